"""Losses of foreign functions that end in one number: each chunk is computed once, with its gradients.

Other functions, and the memory of a chunk, are in `test_chunk`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlat_jax.ops.cross_entropy import scaled_losses
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.rewrite import chunks

B, T, D, V = 2, 16, 8, 256


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32))


WEIGHTS = jnp.abs(normal(B, T))
TARGETS = jnp.asarray(np.random.default_rng((0, B, T)).integers(0, V, (B, T)), jnp.int32)
PARAMS = {"hidden": normal(B, T, D), "head": normal(D, V), "bias": normal(V, seed=1)}
integer_loss = optax.softmax_cross_entropy_with_integer_labels


def logits_of(p):
    return p["hidden"] @ p["head"]


def of_logits(loss):
    """Returns a function of (params, targets, weights) from one of (logits, targets, weights)."""
    return lambda p, t, w: loss(logits_of(p), t, w)


def from_logits(product):
    """Returns the mean loss after a product."""
    return lambda p, t, w: jnp.mean(integer_loss(product(p), t) * w)


def with_z_loss(z, t, w):
    log_z = jax.nn.logsumexp(z, axis=-1)
    losses = log_z - jnp.take_along_axis(z, t[..., None], -1)[..., 0]
    return jnp.sum(w * (losses + 1e-2 * log_z**2))


def by_hand(z, t, w):
    largest = jnp.max(z, axis=-1, keepdims=True)
    log_z = jnp.log(jnp.sum(jnp.exp(z - largest), axis=-1)) + largest[..., 0]
    return jnp.sum(w * (log_z - jnp.sum(jnp.where(jnp.arange(V) == t[..., None], z, 0.0), axis=-1)))


def in_scan(p, t, w):
    def add(total, row):
        hidden, t, w = row
        return total + jnp.sum(integer_loss(hidden @ p["head"], t) * w), None

    return jax.lax.scan(add, 0.0, (p["hidden"], t, w))[0]


def own_targets(p, t, w):
    z = logits_of(p)
    return jnp.sum(w * integer_loss(z, jnp.argmax(z, -1)))


def shifted_normaliser(z, t, w):
    """Subtracts the largest logit and forgets to add it again."""
    largest = z.max(-1, keepdims=True)
    return jnp.sum(w * (jnp.log(jnp.exp(z - largest).sum(-1)) - jnp.take_along_axis(z, t[..., None], -1)[..., 0]))


LOSSES = {
    "optax integers": of_logits(lambda z, t, w: jnp.mean(integer_loss(z, t) * w)),
    "optax one-hot": of_logits(lambda z, t, w: jnp.mean(optax.softmax_cross_entropy(z, jax.nn.one_hot(t, V)) * w)),
    "an index of each dimension": of_logits(
        lambda z, t, w: -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(len(t))[:, None], jnp.arange(t.shape[1]), t] * w)
    ),
    "one index of all tokens": of_logits(
        lambda z, t, w: -jnp.mean(jax.nn.log_softmax(z).reshape(-1, V)[jnp.arange(t.size), t.reshape(-1)] * w.mean())
    ),
    "log of softmax": of_logits(
        lambda z, t, w: -jnp.mean(w * jnp.log(jnp.take_along_axis(jax.nn.softmax(z), t[..., None], -1)[..., 0]))
    ),
    "by hand": of_logits(by_hand),
    "z-loss": of_logits(with_z_loss),
    "under jit, vmap and checkpoint": jax.checkpoint(
        jax.jit(lambda p, t, w: jnp.sum(jax.vmap(lambda h, t: integer_loss(h @ p["head"], t))(p["hidden"], t) * w))
    ),
    "in a scan": in_scan,
    "head first": from_logits(lambda p: jnp.einsum("dv,btd->btv", p["head"], p["hidden"])),
    "vocabulary first": from_logits(lambda p: jnp.moveaxis(jnp.einsum("btd,dv->vbt", p["hidden"], p["head"]), 0, -1)),
    "softcap": from_logits(lambda p: 3.0 * jnp.tanh((logits_of(p) + p["bias"]) / 3.0)),
    "learned scale": from_logits(lambda p: logits_of(p) * p["bias"][3]),
    "fewer columns by a mask": from_logits(lambda p: jnp.where(jnp.arange(V) < V - 5, logits_of(p), -1e9)),
    "targets computed from the logits": own_targets,
    "a maximum that does not cancel": of_logits(shifted_normaliser),
}


SAME_PROGRAM = 1e-5  # of the norm of a gradient: sums of fp32 in another order


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_ROWS", 4)
    monkeypatch.setattr(chunks, "LOSS_BYTES", 4096)


def rewritten(fn, *, check=False):
    return chunk(fn, max_bytes="1MiB", check=check)


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(one - other) <= SAME_PROGRAM * np.linalg.norm(other)


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_is_computed_in_chunks_with_its_gradients(name):
    ours = rewritten(LOSSES[name])
    expected, found = (jax.jit(jax.value_and_grad(fn))(PARAMS, TARGETS, WEIGHTS) for fn in (LOSSES[name], ours))
    assert_close(found, expected)
    assert [one.op for one in ours.report().replacements] == ["chunk"], ours.report()
    assert not ours.report().refusals, ours.report()


def test_indices_outside_the_vocabulary_mean_what_they_did():
    """NaN where JAX's indexing gives NaN, no target where a one-hot row is all zeros."""
    targets = TARGETS.at[0, 1].set(V + 3).at[1, 2].set(-1)
    for name in ("optax integers", "optax one-hot"):
        fns = LOSSES[name], rewritten(LOSSES[name])
        expected, ours = (jax.value_and_grad(lambda p, fn=fn: fn(p, targets, WEIGHTS))(PARAMS) for fn in fns)
        assert np.isnan(expected[0]) == np.isnan(ours[0]) == (name == "optax integers")
        if name == "optax one-hot":
            assert_close(ours, expected)


@pytest.mark.slow
def test_a_loss_is_found_before_and_after_autocast():
    loss = LOSSES["optax integers"]
    exact = jax.grad(loss)(PARAMS, TARGETS, WEIGHTS)["head"]
    before, after = rewritten(loss), rewritten(autocast(loss, "bf16"))
    for ours, outer in ((before, autocast(before, "bf16")), (after, after)):
        low = jax.grad(outer)(PARAMS, TARGETS, WEIGHTS)["head"]
        assert len(ours.report().replacements) == 1
        error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
        assert 1e-4 < error < 2e-2  # operands and gradients are rounded to bf16, 4e-3 of a value


def test_gradients_of_a_scaled_loss_in_fp16_do_not_vanish():
    """They are of 1e-8 in the logits, less than the least number of fp16: they are computed after the scale."""

    def loss(p, t, w):
        return 1e-7 * LOSSES["optax integers"](p, t, w)

    def scaled(fn):
        return lambda p, *rest: 2.0**20 * fn(p, *rest)

    exact = jax.grad(loss)(PARAMS, TARGETS, WEIGHTS)["head"]
    low = autocast(rewritten(loss), "fp16")
    with scaled_losses():
        grads = jax.grad(scaled(low))(PARAMS, TARGETS, WEIGHTS)["head"] / 2.0**20
    assert np.linalg.norm(grads - exact) < 1e-2 * np.linalg.norm(exact)


@jax.custom_vjp
def clipped(z):
    return z * 1.0


clipped.defvjp(lambda z: (z * 1.0, None), lambda _, g: (jnp.clip(g, -10, 10),))


def test_a_derivative_rule_is_kept_even_where_random_inputs_do_not_show_it():
    """The clip bites at large weights alone; the slope of ReLU at 0 is 0, that of the maximum in its body one half."""

    def steep(p, t, w):
        return jnp.sum(integer_loss(clipped(logits_of(p)), t) * 100)

    def rectified(p, t, w):
        return jnp.sum(integer_loss(jax.nn.relu(logits_of(p)), t))

    for loss, params, num_replaced in ((steep, PARAMS, 0), (rectified, PARAMS | {"head": 0 * PARAMS["head"]}, 1)):
        ours = rewritten(loss, check=True)
        assert_close(*(jax.grad(fn)(params, TARGETS, WEIGHTS) for fn in (ours, loss)))
        assert len(ours.report().replacements) == num_replaced


@pytest.mark.slow
def test_rows_that_have_no_equal_parts_are_in_chunks_too_and_callbacks_stay():
    def loss(hidden):
        jax.debug.callback(lambda _: None, hidden)
        return jnp.sum(integer_loss(hidden @ PARAMS["head"], jnp.zeros(31, jnp.int32)))

    ours = rewritten(loss)
    assert_close(jax.grad(ours)(normal(31, D)), jax.grad(loss)(normal(31, D)))
    assert "[31,256] in 7 parts" in str(ours.report())


def over_tokens(p, t, w):
    return -jnp.sum(w * jnp.take_along_axis(jax.nn.log_softmax(logits_of(p), (0, 1)), t[..., None], -1)[..., 0])


def of_the_token_before(p, t, w):
    return -jnp.mean(jax.nn.log_softmax(logits_of(p).reshape(-1, V))[jnp.arange(t.size) - 1, t.reshape(-1)])


def of_transposed(p, t, w):  # the index that counts comes after the other one
    return -jnp.mean(jax.nn.log_softmax(logits_of(p).reshape(-1, V)).T[t.reshape(-1), jnp.arange(t.size)])


def test_a_loss_whose_chunks_would_be_computed_twice_is_left():
    for loss in (over_tokens, of_the_token_before, of_transposed):
        ours = rewritten(loss)
        jax.eval_shape(ours, PARAMS, TARGETS, WEIGHTS)
        assert not ours.report().replacements


def test_each_chunk_of_a_loss_is_computed_once():
    def flops(loss):
        return total_flops(live_jaxpr(jax.jit(jax.value_and_grad(loss)).trace(PARAMS, TARGETS, WEIGHTS)))

    loss = LOSSES["optax integers"]
    ours = rewritten(loss)
    assert flops(ours) <= 1.02 * flops(loss)  # the rest are sums over chunks
    assert ours.report().replacements


def test_a_divisor_is_a_constant_or_a_parameter_whose_gradient_nearly_cancels():
    def loss(hidden, table, targets, number):
        soft = jax.nn.one_hot(targets, 512) * 0.9 + 0.1 / 512
        return -jnp.sum(soft * jax.nn.log_softmax(hidden @ table.T / number), -1).mean()

    def over_a_constant(*args):  # as in Flax's wmt
        return loss(*args[:3], jnp.sqrt(64))

    args = jnp.zeros((8, 48, 64)), jnp.zeros((512, 64)), jnp.ones((8, 48), int), jnp.float32(8)
    for fn in (loss, over_a_constant):
        ours = rewritten(fn, check=True)
        jax.eval_shape(ours, *args)
        assert ours.report().replacements
