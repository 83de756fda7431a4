"""Cross-entropies of foreign functions: the spellings that are replaced, and what looks like one and is not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlat_jax.ops import token_statistics
from hlat_jax.passes.autocast import autocast
from hlat_jax.passes.rewrite import rewrite

B, T, D, V = 2, 6, 8, 32


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


def integers(*shape, bound=V, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).integers(0, bound, shape), jnp.int32)


HIDDEN, HEAD, BIAS, WEIGHTS, TARGETS = (
    normal(B, T, D),
    normal(D, V),
    normal(V, seed=1),
    jnp.abs(normal(B, T)),
    integers(B, T),
)
PARAMS = {"hidden": HIDDEN, "head": HEAD, "bias": BIAS}
integer_loss = optax.softmax_cross_entropy_with_integer_labels


def logits_of(p):
    return p["hidden"] @ p["head"]


def of_logits(loss):
    """Returns a function of (params, targets, weights) from one of (logits, targets, weights)."""
    return lambda p, t, w: loss(logits_of(p), t, w)


def from_logits(product):
    """Returns the mean loss after a product."""
    return lambda p, t, w: jnp.mean(integer_loss(product(p), t) * w)


def smoothed(z, t, w):
    labels = optax.smooth_labels(jax.nn.one_hot(t, V), 0.1)
    return jnp.sum(optax.softmax_cross_entropy(z, labels) * w)


def with_z_loss(z, t, w):
    log_z = jax.nn.logsumexp(z, axis=-1)
    losses = log_z - jnp.take_along_axis(z, t[..., None], -1)[..., 0]
    return jnp.sum(w * (losses + 1e-2 * log_z**2))


def by_hand(z, t, w):
    largest = jnp.max(z, axis=-1, keepdims=True)
    log_z = jnp.log(jnp.sum(jnp.exp(z - largest), axis=-1)) + largest[..., 0]
    return jnp.sum(w * (log_z - jnp.sum(jnp.where(jnp.arange(V) == t[..., None], z, 0.0), axis=-1)))


@jax.custom_vjp
def with_rule(z, labels, z_loss):
    log_z = jax.nn.logsumexp(z, axis=-1, keepdims=True)
    squares = z_loss * jax.lax.square(jnp.squeeze(log_z, axis=-1))
    return squares - jnp.sum(labels * (z - log_z), axis=-1), squares


def rule(residuals, cotangents):
    z, labels, z_loss = residuals
    log_z = jax.nn.logsumexp(z, axis=-1, keepdims=True)
    dz = (1 + 2 * z_loss * log_z) * jnp.exp(z - log_z) - labels
    return cotangents[0][..., None] * dz, jnp.zeros_like(labels), jnp.zeros_like(z_loss)


with_rule.defvjp(lambda *args: (with_rule(*args), args), rule)


def in_scan(p, t, w):
    def add(total, row):
        hidden, t, w = row
        return total + jnp.sum(integer_loss(hidden @ p["head"], t) * w), None

    return jax.lax.scan(add, 0.0, (p["hidden"], t, w))[0]


SPELLINGS = {
    "optax integers": of_logits(lambda z, t, w: jnp.mean(integer_loss(z, t) * w)),
    "optax one-hot": of_logits(lambda z, t, w: jnp.mean(optax.softmax_cross_entropy(z, jax.nn.one_hot(t, V)) * w)),
    "one-hot log_softmax, all at once": of_logits(
        lambda z, t, w: -jnp.sum(jax.nn.one_hot(t, V) * jax.nn.log_softmax(z)) / w.size
    ),
    "take_along_axis": of_logits(
        lambda z, t, w: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), t[..., None], -1)[..., 0] * w)
    ),
    "log of softmax": of_logits(
        lambda z, t, w: -jnp.mean(w * jnp.log(jnp.take_along_axis(jax.nn.softmax(z), t[..., None], -1)[..., 0]))
    ),
    "by hand": of_logits(by_hand),
    "z-loss": of_logits(with_z_loss),
    "label smoothing": of_logits(smoothed),
    "a rule of its own": of_logits(lambda z, t, w: jnp.sum(w * with_rule(z, jax.nn.one_hot(t, V), 1e-2)[0])),
    "under jit, vmap and checkpoint": jax.checkpoint(
        jax.jit(lambda p, t, w: jnp.sum(jax.vmap(lambda h, t: integer_loss(h @ p["head"], t))(p["hidden"], t) * w))
    ),
    "in a scan": in_scan,
    "head first": from_logits(lambda p: jnp.einsum("dv,btd->btv", p["head"], p["hidden"])),
    "vocabulary first": from_logits(lambda p: jnp.moveaxis(jnp.einsum("btd,dv->vbt", p["hidden"], p["head"]), 0, -1)),
    "time first": from_logits(lambda p: jnp.swapaxes(jnp.swapaxes(p["hidden"], 0, 1) @ p["head"], 0, 1)),
    "bias": from_logits(lambda p: p["hidden"] @ p["head"] + p["bias"]),
    "softcap": from_logits(lambda p: 3.0 * jnp.tanh((logits_of(p) + p["bias"]) / 3.0)),
    "learned scale": from_logits(lambda p: logits_of(p) * p["bias"][3]),
    "fewer columns by a mask": from_logits(lambda p: jnp.where(jnp.arange(V) < V - 5, logits_of(p), -1e9)),
}


SAME_PROGRAM = 1e-5  # of the norm of a gradient: sums of fp32 in another order


def report_of(fn, *, check):
    ours = rewrite(fn, check=check)  # the check compares values and gradients of what is replaced
    jax.eval_shape(ours, PARAMS, TARGETS, WEIGHTS)
    return ours.report()


def assert_all_replaced(names, *, check):
    for name in names:
        report = report_of(SPELLINGS[name], check=check)
        assert [one.op for one in report.replacements] == ["cross_entropy"], (name, report)
        assert not check or report.replacements[0].difference < SAME_PROGRAM, name
        assert not report.refusals, (name, report)


def test_loss_in_any_spelling_is_replaced():
    assert_all_replaced(SPELLINGS, check=False)
    assert_all_replaced(["optax integers", "a rule of its own"], check=True)


@pytest.mark.slow
def test_replaced_losses_have_the_values_and_gradients_of_the_original():
    assert_all_replaced(SPELLINGS, check=True)


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= SAME_PROGRAM * np.linalg.norm(other)


@pytest.mark.slow
def test_indices_outside_the_vocabulary_mean_what_they_did():
    """NaN where JAX's indexing gives NaN, no target where a one-hot row is all zeros."""
    targets = TARGETS.at[0, 1].set(V + 3).at[1, 2].set(-1)
    for name in ("optax integers", "optax one-hot"):
        fns = SPELLINGS[name], rewrite(SPELLINGS[name], check=False)
        expected, ours = (jax.value_and_grad(lambda p, fn=fn: fn(p, targets, WEIGHTS))(PARAMS) for fn in fns)
        assert np.isnan(expected[0]) == np.isnan(ours[0]) == (name == "optax integers")
        if name == "optax one-hot":
            assert_close(ours, expected)


@pytest.mark.slow
def test_loss_is_found_before_and_after_autocast():
    loss = SPELLINGS["optax integers"]
    exact = jax.grad(loss)(PARAMS, TARGETS, WEIGHTS)["head"]
    before, after = rewrite(loss, check=False), rewrite(autocast(loss, "bf16"), check=False)
    for ours, outer in ((before, autocast(before, "bf16")), (after, after)):
        low = jax.grad(outer)(PARAMS, TARGETS, WEIGHTS)["head"]
        assert len(ours.report().replacements) == 1
        error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 2e-2  # operands and gradients are rounded to bf16, 4e-3 of a value


def normalised(z, t):
    """Float64: log-normaliser, the target's logit, the sum."""
    log_z = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    return log_z, np.take_along_axis(z, t[..., None], -1)[..., 0], z.sum(-1)


@pytest.mark.parametrize(("num_columns", "contracted"), [(96, 1), (85, 0)], ids=["even VD", "uneven DV"])
def test_token_statistics_match_float64(num_columns, contracted, monkeypatch):
    monkeypatch.setattr(token_statistics, "LEAST_COLUMNS", 12)
    head, bias, t = normal(D, num_columns), normal(num_columns), integers(B, T, bound=num_columns)
    cotangents = normal(3, B, T)
    form = token_statistics.LogitsForm(contracted, lambda product, bias, scale: scale * jnp.tanh(product + bias))

    def run(hidden, head, bias, scale):
        head = head.T if contracted == 1 else head
        return tuple(token_statistics.token_statistics(hidden, head=head, targets=t, params=(bias, scale), form=form))

    operands = HIDDEN, head, bias, jnp.float32(2.0)
    h, w, b = (np.asarray(x, np.float64) for x in operands[:3])
    wide = np.tanh(h @ w + b)
    expected = normalised(2 * wide, np.asarray(t))
    dlog_z, dtarget, dsum = (np.asarray(x, np.float64)[..., None] for x in cotangents)
    dz = np.exp(2 * wide - expected[0][..., None]) * dlog_z + np.eye(num_columns)[np.asarray(t)] * dtarget + dsum
    dproduct = 2 * dz * (1 - wide**2)
    gradients = dproduct @ w.T, np.einsum("btd,btv->dv", h, dproduct), dproduct.sum((0, 1)), np.sum(dz * wide)
    statistics, pullback = jax.vjp(run, *operands)
    for mine, exact in zip((*statistics, *pullback(tuple(cotangents))), (*expected, *gradients), strict=True):
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_logits_of_all_tokens_are_never_held():
    columns, tokens = 16_384, 64
    p = {"hidden": jnp.ones((tokens, 8)), "head": jnp.ones((8, columns))}
    t = jnp.zeros(tokens, jnp.int32)

    def loss(p, t):
        return jnp.mean(integer_loss(p["hidden"] @ p["head"], t))

    sizes = [
        jax.jit(jax.grad(fn)).lower(p, t).compile().memory_analysis().temp_size_in_bytes
        for fn in (loss, rewrite(loss, check=False))
    ]
    assert sizes[0] > 4 * tokens * columns > 2 * sizes[1]


def accuracy_too(p, t, w):
    z = logits_of(p)
    return jnp.sum(w * integer_loss(z, t)) + jnp.sum(jnp.argmax(z, -1) == t)


def own_targets(p, t, w):
    z = logits_of(p)
    return jnp.sum(w * integer_loss(z, jnp.argmax(z, -1)))


def shifted_normaliser(z, t, w):
    """Subtracts the largest logit and forgets to add it again."""
    largest = z.max(-1, keepdims=True)
    return jnp.sum(w * (jnp.log(jnp.exp(z - largest).sum(-1)) - jnp.take_along_axis(z, t[..., None], -1)[..., 0]))


def soft_labels(z, t, w):
    labels = jax.nn.softmax(jnp.sin(jnp.arange(V) * t[..., None].astype(jnp.float32)))
    return jnp.sum(w * optax.softmax_cross_entropy(z, labels))


def two_hot(z, t, w):
    labels = 0.7 * jax.nn.one_hot(t, V) + 0.3 * jax.nn.one_hot(V - 1 - t, V)
    return jnp.sum(w * optax.softmax_cross_entropy(z, labels))


# name -> (function, the reason; None: nothing that looks like a loss)
MUTATIONS = {
    "logits read by an accuracy": (accuracy_too, r"also read by another operation \(argmax at"),
    "targets computed from the logits": (own_targets, r"also read by another operation \(argmax at"),
    "a maximum that does not cancel": (of_logits(shifted_normaliser), "log-normalisers are summed over tokens"),
    "labels that are probabilities": (of_logits(soft_labels), "labels that are not one-hot of integers"),
    "two targets": (of_logits(two_hot), "more than one target"),
    "a temperature per token": (
        of_logits(lambda z, t, w: jnp.sum(w * integer_loss(z / (w[..., None] + 1), t))),
        "logits with a scale per token",
    ),
    "softmax over tokens": (
        of_logits(
            lambda z, t, w: -jnp.sum(w * jnp.take_along_axis(jax.nn.log_softmax(z, 1), t[..., None], -1)[..., 0])
        ),
        None,
    ),
    "focal loss": (
        of_logits(
            lambda z, t, w: -jnp.sum(jax.nn.one_hot(t, V) * (1 - jax.nn.softmax(z)) ** 2 * jax.nn.log_softmax(z))
        ),
        "probabilities are added",
    ),
    "softmax without a loss": (of_logits(lambda z, t, w: jnp.sum(jax.nn.softmax(z) ** 2)), None),
}


def test_what_is_no_loss_of_one_target_is_left_as_it_is():
    for name, (function, reason) in MUTATIONS.items():
        report = report_of(function, check=True)
        assert not report.replacements, name
        assert re.search(reason, str(report)) if reason else not report.refusals, (name, report)


def test_logits_over_a_number_are_replaced_though_its_gradient_nearly_cancels():
    def loss(hidden, table, targets, number):
        soft = jax.nn.one_hot(targets, 512) * 0.9 + 0.1 / 512
        return -jnp.sum(soft * jax.nn.log_softmax(hidden @ table.T / number), -1).mean()

    def over_a_constant(*args):  # as in Flax's wmt
        return loss(*args[:3], jnp.sqrt(64))

    args = jnp.zeros((8, 48, 64)), jnp.zeros((512, 64)), jnp.ones((8, 48), int), jnp.float32(8)
    for fn in (loss, over_a_constant):
        ours = rewrite(fn)
        jax.eval_shape(ours, *args)
        assert "cross_entropy" in [one.op for one in ours.report().replacements]
