"""Norms of foreign functions: the spellings that are replaced, and what looks like one and is not."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import training_program

from hlat_jax.ops import general_norm
from hlat_jax.ops.dispatch import dispatch

B, T, D = 2, 3, 16
EPS = 1e-5


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


X, GAIN, BIAS = normal(B, T, D), normal(D, seed=1), normal(D, seed=2)
mean = functools.partial(jnp.mean, axis=-1, keepdims=True)
var = functools.partial(jnp.var, axis=-1, keepdims=True)
rsqrt = jax.lax.rsqrt


def linen(module, **given):
    """Returns a function of (x, gain, bias) from a Linen module."""
    return lambda x, g, b: module.apply({"params": {"scale": g, "bias": b} | given}, x)


def haiku(build):
    def run(x, g, b):
        apply = hk.without_apply_rng(hk.transform(lambda x: build(name="norm")(x))).apply
        return apply({"norm": {"scale": g, "offset": b}}, x)

    return run


def equinox(module):
    def run(x, g, b):
        given = eqx.tree_at(lambda norm: (norm.weight, norm.bias), module(D), (g, b), is_leaf=lambda leaf: leaf is None)
        return jax.vmap(jax.vmap(given))(x)

    return run


def in_half_precision(x, g, b):
    x = x.astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    return (wide * rsqrt(mean(wide * wide) + EPS)).astype(jnp.bfloat16) * g.astype(jnp.bfloat16)


def over_the_middle(x, g, b):
    x = x - jnp.mean(x, axis=1)[:, None]
    return x / jnp.sqrt(jnp.square(x).sum(axis=1) / T + EPS)[:, None]


layer_norm = functools.partial(hk.LayerNorm, -1, create_scale=True, create_offset=True)
LAYER, RMS = f"LayerNorm over {D}, eps 1e-05", f"RMSNorm over {D}, eps 1e-05"
# name -> (function of x, gain, bias; what the report says)
SPELLINGS = {
    "flax LayerNorm": (linen(nn.LayerNorm(epsilon=EPS)), f"{LAYER}, gain, bias"),
    "flax LayerNorm, no bias": (linen(nn.LayerNorm(epsilon=EPS, use_bias=False)), f"{LAYER}, gain"),
    "flax LayerNorm, two passes": (linen(nn.LayerNorm(epsilon=EPS, use_fast_variance=False)), f"{LAYER}, gain, bias"),
    "flax RMSNorm": (linen(nn.RMSNorm(epsilon=EPS)), f"{RMS}, gain"),
    "haiku LayerNorm": (haiku(layer_norm), f"{LAYER}, gain, bias"),
    "haiku LayerNorm, fast": (haiku(functools.partial(layer_norm, use_fast_variance=True)), f"{LAYER}, gain, bias"),
    "haiku RMSNorm": (haiku(functools.partial(hk.RMSNorm, -1)), f"{RMS}, gain"),
    "equinox LayerNorm": (equinox(eqx.nn.LayerNorm), f"{LAYER}, gain, bias"),
    "equinox RMSNorm": (equinox(eqx.nn.RMSNorm), f"{RMS}, gain, bias"),
    "jax.nn.standardize": (lambda x, g, b: jax.nn.standardize(x), LAYER),
    "1 + gain": (lambda x, g, b: x * rsqrt(mean(x**2) + EPS) * (1 + g), f"{RMS}, gain"),
    "gain with the root": (lambda x, g, b: x * (g / jnp.sqrt(mean(x**2) + EPS)) + b, f"{RMS}, gain, bias"),
    "one over a power": (lambda x, g, b: (x - mean(x)) * (var(x) + EPS) ** -0.5 * g, f"{LAYER}, gain"),
    "a mean by a product": (lambda x, g, b: x / (jnp.sum(x * x, -1, keepdims=True) * (1 / D) + EPS) ** 0.5, RMS),
    "a learned scale": (lambda x, g, b: x * rsqrt(mean(x**2) + EPS) * g[3], f"{RMS}, gain"),
    "two passes, x centered": (over_the_middle, f"LayerNorm over {T}, eps 1e-05"),
    "bf16, product after rounding": (in_half_precision, f"{RMS}, gain"),
}


@pytest.mark.quick_cases("flax LayerNorm")
@pytest.mark.parametrize("name", SPELLINGS)
def test_norm_in_any_spelling_is_replaced(name):
    function, facts = SPELLINGS[name]
    fn = dispatch(function)  # which compares values and gradients of what it replaces
    jax.eval_shape(fn, X, GAIN, BIAS)
    report = fn.report()
    assert [(one.op, one.facts) for one in report.replacements] == [("norm", facts)], report
    assert report.replacements[0].difference < (3e-2 if "bf16" in name else 1e-6)
    assert not report.refusals


def statistic_too(x, g, b):
    inverse = rsqrt(mean(x**2) + EPS)
    return x * inverse * g, inverse


def rounded_statistic(x, g, b):
    return x * rsqrt(mean(x**2).astype(jnp.bfloat16).astype(jnp.float32) + EPS)


# name -> (function, the reason; None: nothing that looks like a norm)
NO_GAIN, NO_STATISTIC = "not multiplied with the same array", "not the mean of squares or the variance"
MUTATIONS = {
    "eps outside the root": (lambda x, g, b: x / (jnp.sqrt(mean(x**2)) + EPS) * g, NO_GAIN),
    "a statistic that is returned": (statistic_too, "the result of rsqrt .* is returned"),
    "another array": (lambda x, g, b: (x[::-1] + 1) * rsqrt(mean(x**2) + EPS) * g, NO_GAIN),
    "a variance of D - 1": (lambda x, g, b: (x - mean(x)) * rsqrt(var(x, ddof=1) + EPS) * g, NO_STATISTIC),
    "gain before the root": (lambda x, g, b: x * rsqrt(mean((x * g) ** 2) + EPS), NO_GAIN),
    "eps that is learned": (lambda x, g, b: x * rsqrt(mean(x**2) + g[0]), None),
    "negative eps": (lambda x, g, b: x * rsqrt(mean(x**2) - EPS), NO_STATISTIC),
    "a sum in place of the mean": (lambda x, g, b: x * rsqrt(jnp.sum(x**2, -1, keepdims=True) + EPS), None),
    "a mean over another axis": (
        lambda x, g, b: (x - x.mean(axis=1, keepdims=True)) * rsqrt(var(x) + EPS) * g,
        NO_GAIN,
    ),
    "the variance of what is not centered": (lambda x, g, b: x * rsqrt(var(x) + EPS) * g, NO_GAIN),
    "the mean square of what is centered": (lambda x, g, b: (x - mean(x)) * rsqrt(mean(x**2) + EPS) * g, NO_GAIN),
    "half of the mean": (lambda x, g, b: (x - mean(x) / 2) * rsqrt(var(x) + EPS) * g, NO_GAIN),
    "a statistic without a gradient": (lambda x, g, b: x * rsqrt(jax.lax.stop_gradient(mean(x**2)) + EPS), None),
    "a statistic that is rounded": (rounded_statistic, None),
    "an outer product": (
        lambda x, g, b: x * rsqrt(jnp.sum(x[..., :, None] * x[..., None, :], -1) / D + EPS),
        None,
    ),
    "small and not centered": (lambda x, g, b: 1e-7 * x * rsqrt(var(x) + EPS), NO_GAIN),
    "the length of a difference from a number": (lambda x, g, b: jnp.sqrt(jnp.mean((g[0] - x) ** 2, -1)), NO_GAIN),
    "a scaled length": (lambda x, g, b: jnp.sqrt(jnp.sum(g[0] * x**2, -1)), None),
    "a root twice": (lambda x, g, b: x * rsqrt(mean(x**2) + EPS) ** 2 * g, NO_GAIN),
    "fourth powers": (lambda x, g, b: x * rsqrt(mean(x**4) + EPS), None),
    "a mean over two axes": (lambda x, g, b: x * rsqrt(jnp.mean(x**2, (1, 2), keepdims=True) + EPS) * g, None),
}


def test_what_is_no_norm_of_one_array_is_left_as_it_is():
    for name, (function, reason) in MUTATIONS.items():
        fn = dispatch(function, check=False)  # by structure alone: eps is below the tolerance of a comparison
        jax.eval_shape(fn, X, GAIN, BIAS)
        report = fn.report()
        assert not report.replacements, name
        assert re.search(reason, str(report)) if reason else not report.refusals, (name, str(report))


def test_a_norm_whose_arrays_are_printed_is_traced():
    def printed(x):
        jax.debug.print("{}", x[0, 0, 0])
        jax.debug.callback(lambda x: None, x)
        return x * rsqrt(mean(x**2) + EPS)

    np.testing.assert_allclose(dispatch(printed)(X), printed(X), rtol=1e-5)


def test_what_stands_beside_a_norm_stays():
    """A gain of every position, a residual, and a cast that something else reads too."""

    def block(x, g, b):
        wide = x.astype(jnp.float32)
        y = wide * rsqrt(mean(wide**2) + EPS) * X
        return wide + y

    fn = dispatch(block)
    jax.eval_shape(fn, X.astype(jnp.bfloat16), GAIN, BIAS)
    assert [one.facts for one in fn.report().replacements] == [RMS]


@pytest.mark.slow
@pytest.mark.parametrize("is_centered", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_norms_match_float64_and_keep_one_array(is_centered):
    variant = general_norm.Variant(2, EPS, is_centered, np.float32)
    x, g, b = (np.asarray(one, np.float64) for one in (X + 3, GAIN, BIAS))
    dy = np.asarray(normal(B, T, D, seed=3), np.float64)
    centered = x - x.mean(-1, keepdims=True) if is_centered else x
    root = np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)
    normalized = centered / root
    dnormalized = dy * g
    dx = dnormalized - normalized * (dnormalized * normalized).mean(-1, keepdims=True)
    dx = (dx - dnormalized.mean(-1, keepdims=True) if is_centered else dx) / root
    expected = normalized * g + b, dx, (dy * normalized).sum((0, 1), keepdims=True), dy.sum((0, 1), keepdims=True)
    for name in general_norm.OP.names:

        def norm(x, gain, bias, name=name):
            return general_norm.general_norm(x, gain=gain, bias=bias, variant=variant, implementation=name)

        y, pullback = jax.vjp(norm, X + 3, GAIN[None, None], BIAS[None, None])
        for found, wanted in zip((y, *pullback(jnp.float32(dy))), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
        kept = sum(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.size >= X.size)
        assert name == "reference" or kept == X.size


def test_ops_that_are_looked_for_are_named():
    fn = dispatch(SPELLINGS["1 + gain"][0], ops=("attention", "mlp"))
    jax.eval_shape(fn, X, GAIN, BIAS)
    assert str(fn.report()) == "dispatch: nothing replaced"
    for ops in ("norm", ("norms",)):
        with pytest.raises(ValueError, match="must be a sequence of names of attention, cross_entropy, norm, mlp"):
            dispatch(fn, ops=ops)


@pytest.mark.slow
def test_norms_stay_where_a_program_selects_residuals():
    for residuals in (False, True):
        program = training_program(
            lambda gain, x: jnp.mean(SPELLINGS["1 + gain"][0](x, gain, None) ** 2),
            optax.sgd(1e-3),
            options={"rewrite": True, "residuals": residuals},
            params=GAIN,
            batch=X,
        )
        assert [one.op for one in program.rewritten.report().replacements] == ([] if residuals else ["norm"])
