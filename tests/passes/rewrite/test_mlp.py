"""MLPs of foreign functions: those that are replaced, and those that are not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes.rewrite import rewrite

B, T, D, F = 2, 3, 4, 8


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


X = normal(B, T, D)
PARAMS = {"up": normal(D, F), "gate": normal(D, F, seed=1), "bias": normal(F), "down": normal(F, D)}
PARAMS["pair"] = normal(2, D, F)


def of(act):
    """Returns a function of (params, x) with an activation between two products."""
    return lambda p, x: act(x @ p["up"]) @ p["down"]


def of_pair(act):
    return lambda p, x: act(x @ p["gate"], x @ p["up"]) @ p["down"]


def linen(p, x):
    hidden = nn.Dense(F).apply({"params": {"kernel": p["up"], "bias": p["bias"]}}, x)
    return nn.Dense(D, use_bias=False).apply({"params": {"kernel": p["down"]}}, nn.gelu(hidden))


def paired_einsum(p, x):
    gate, up = jnp.einsum("BTD,CDF->CBTF", x, p["pair"])
    return jnp.einsum("BTF,FD->BTD", nn.gelu(gate) * up, p["down"])


def broadcast_bias(p, x):
    hidden = x @ p["up"] + jnp.broadcast_to(p["bias"], (B, T, F))
    return jnp.einsum("fd,btf->btd", p["down"], jax.nn.gelu(hidden, approximate=False))


def dropped(p, x):
    return jnp.where(p["pair"].sum() > jnp.sin(jnp.arange(F)), jax.nn.gelu(x @ p["up"]), 0) @ p["down"]


MLPS = {
    "flax Dense": linen,
    "weights first, bias": broadcast_bias,
    "dropout after it": dropped,
    "SwiGLU": of_pair(lambda gate, up: jax.nn.silu(gate) * up),
    "clipped, as of gpt-oss": of_pair(lambda gate, up: (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate)),
    "GeGLU of one product": paired_einsum,
    "a gate without a gradient": of(lambda h: h * jax.lax.stop_gradient(jax.nn.sigmoid(h)) * h),
}


@pytest.mark.parametrize("name", MLPS)
def test_an_mlp_is_replaced_whatever_its_activation_is(name):
    fn = MLPS[name]
    ours = rewrite(fn, check=name in ("SwiGLU", "weights first, bias"))
    expected, found = (
        jax.jit(jax.value_and_grad(lambda p, one=one: jnp.sum(one(p, X) ** 2)))(PARAMS) for one in (fn, ours)
    )
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)
    report = ours.report()
    assert [one.op for one in report.replacements] == ["mlp"], report
    assert f"F {F}" in report.replacements[0].facts
    assert not report.refusals, report


def test_an_mlp_in_half_precision_keeps_its_roundings():
    low, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (PARAMS, X))
    ours = rewrite(MLPS["SwiGLU"])
    expected, found = (jax.grad(lambda p, one=one: jnp.sum(one(p, x)))(low) for one in (MLPS["SwiGLU"], ours))
    assert ours.report().replacements
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(b, a)


def hidden_too(p, x):
    hidden = jax.nn.gelu(x @ p["up"])
    return hidden @ p["down"], hidden


@jax.custom_vjp
def clipped_product(a, w):
    return a @ w


clipped_product.defvjp(
    lambda a, w: (a @ w, (a, w)),
    lambda kept, g: (jnp.clip(g @ kept[1].T, -50, 50), jnp.clip(kept[0].T @ g, -50, 50)),
)


# name -> (function, whether the report names it)
MUTATIONS = {
    "hidden array returned": (hidden_too, True),
    "ReLU": (of(jax.nn.relu), False),
    "tanh, of which one array is kept anyway": (of(jnp.tanh), False),
    "three arrays": (
        lambda p, x: (jax.nn.silu(x @ p["gate"]) * (x @ p["up"]) * jnp.sin(x @ p["up"])) @ p["down"],
        False,
    ),
    "a product with a derivative of its own": (
        lambda p, x: clipped_product(jax.nn.gelu((x @ p["up"]).reshape(-1, F)), p["down"]),
        False,
    ),
}


def test_what_gains_nothing_or_is_read_elsewhere_is_left_as_it_is():
    for name, (function, is_named) in MUTATIONS.items():
        fn = rewrite(function, check=False)
        jax.eval_shape(fn, PARAMS, X)
        report = fn.report()
        assert not report.replacements, name
        assert bool(report.refusals) == is_named, (name, str(report))


@pytest.mark.slow
def test_backward_pass_holds_one_hidden_array():
    """Also outside of a loop, where XLA on CPU keeps what a checkpoint computes again in the same way."""
    tokens, hidden, blocks = 64, 512, 8

    def loss(p, x):
        for up, down in zip(*p, strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.sum(x**2)

    p, x = ([jnp.ones((8, hidden))] * blocks, [jnp.ones((hidden, 8))] * blocks), jnp.ones((tokens, 8))
    sizes = [
        jax.jit(jax.grad(fn)).lower(p, x).compile().memory_analysis().temp_size_in_bytes
        for fn in (loss, rewrite(loss, check=False))
    ]
    arrays = [size / (4 * tokens * hidden) for size in sizes]
    assert arrays[0] > 2 * blocks
    assert arrays[1] < 1.5 * blocks
