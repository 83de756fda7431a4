"""Functions with a derivative rule: which rules are found to be the derivative of their body, and what is chunked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes.chunk_pass import chunk

B, D, V = 256, 32, 4096
WEIGHTS, X = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(D, V), (B, D)]))
LABELS = jax.random.randint(jax.random.key(2), (B,), 0, V)


@jax.custom_vjp
def t5x_loss(logits, targets, z_weight):
    """The losses and z-losses of tokens. The rule assumes rows of targets with the sum 1, and ignores the z-losses.

    Source: `cross_entropy_with_logits` of T5X, which MaxText has too; written anew from its formula.
    """
    return _t5x_forward(logits, targets, z_weight)[0]


def _t5x_forward(logits, targets, z_weight):
    largest = logits.max(-1, keepdims=True)
    exps = jnp.exp(logits - largest)
    total = exps.sum(-1, keepdims=True)
    log_probs = logits - largest - jnp.log(total)
    log_z = (jnp.log(total) + largest)[..., 0]
    z_losses = z_weight * log_z**2
    losses = -jnp.sum(targets * log_probs, -1) + z_losses
    return (losses, z_losses), (targets, z_weight, exps, total, log_probs, log_z)


def _t5x_backward(kept, cotangents):
    targets, z_weight, exps, total, log_probs, log_z = kept
    of_logits = (1 + 2 * z_weight * log_z)[..., None] * exps / total - targets
    of_losses = cotangents[0][..., None]
    return of_losses * of_logits, -of_losses * log_probs, jnp.zeros_like(z_weight)


t5x_loss.defvjp(_t5x_forward, _t5x_backward)


def loss_of_labels(w, z_weight=1e-3):
    losses, z_losses = t5x_loss(X @ w, jax.nn.one_hot(LABELS, V), z_weight)
    return losses.mean() + z_losses.mean()  # the z-losses count twice in the value, and once in the gradient


def loss_of_shares(w):
    return t5x_loss(X @ w, jax.nn.softmax(X @ jnp.ones((D, V))) * 2, 1e-3)[0].mean()


def temporaries(fn):
    return jax.jit(jax.value_and_grad(fn)).lower(WEIGHTS).compile().memory_analysis().temp_size_in_bytes


def test_a_loss_whose_rule_is_its_derivative_is_in_chunks():
    ours = chunk(loss_of_labels, max_bytes="1MiB", rules=["t5x_loss"])
    for fn in (jax.value_and_grad, jax.grad):
        for a, b in zip(*(jax.tree.leaves(fn(one)(WEIGHTS)) for one in (ours, loss_of_labels)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
    assert temporaries(ours) < temporaries(loss_of_labels) / 4
    assert len(ours.report().replacements) == 1


def test_a_result_that_a_rule_ignores_still_has_no_gradient():
    def logged(w):
        return t5x_loss(X @ w, jax.nn.one_hot(LABELS, V), 1e-3)[1].mean()

    ours = chunk(logged, max_bytes="1MiB", rules=["t5x_loss"])
    assert ours(WEIGHTS) == pytest.approx(logged(WEIGHTS))
    assert not jax.grad(ours)(WEIGHTS).any()


def clip(x):
    return x * 1.0


def round_half(x):
    return jnp.round(2 * x) / 2


def softplus(x):
    return jnp.log1p(jnp.exp(x))


def rule(fn, derivative):
    own = jax.custom_vjp(fn)
    own.defvjp(lambda x: (fn(x), x), lambda x, g: (derivative(x, g),))
    return own


RULES = {
    "clipped gradients": rule(clip, lambda _, g: jnp.clip(g, -1, 1)),
    "gradients clipped at a large norm": rule(clip, lambda _, g: g * jnp.minimum(1, 1e3 / jnp.linalg.norm(g))),
    "straight through": rule(round_half, lambda _, g: g),
    "twice the derivative": rule(jnp.sin, lambda x, g: 2 * g * jnp.cos(x)),
    "stable where the body overflows": rule(softplus, lambda x, g: g * jax.nn.sigmoid(x)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_not_the_derivative_is_kept(name):
    def loss(w):
        return jnp.sum(RULES[name](X @ w) ** 2)

    ours = chunk(loss, max_bytes="1MiB", rules=["clip", "round_half", "sin", "softplus"])
    np.testing.assert_array_equal(jax.grad(ours)(WEIGHTS), jax.grad(loss)(WEIGHTS))
    assert "has a derivative rule of its own" in str(ours.report())


def test_a_rule_that_is_the_derivative_for_labels_alone_is_kept_for_shares():
    ours = chunk(loss_of_shares, max_bytes="1MiB", rules=["t5x_loss"])
    np.testing.assert_array_equal(jax.grad(ours)(WEIGHTS), jax.grad(loss_of_shares)(WEIGHTS))


def test_a_rule_that_is_not_named_is_kept():
    """Random inputs do not show a label that does not count, so the caller decides."""
    ours = chunk(loss_of_labels, max_bytes="1MiB")
    np.testing.assert_array_equal(jax.grad(ours)(WEIGHTS), jax.grad(loss_of_labels)(WEIGHTS))
    assert "see chunk(rules=)" in str(ours.report())


def test_a_function_that_is_called_in_two_ways_is_kept_if_one_needs_its_rule():
    """Both calls share one jaxpr, because they are calls of one jitted function."""
    call = jax.jit(lambda logits, targets: t5x_loss(logits, targets, 1e-3)[0].mean())

    def loss(w):
        shares = jax.nn.softmax(X @ jnp.ones((D, V))) * 2
        return call(X @ w, shares) + call(X @ w, jax.nn.one_hot(LABELS, V))

    ours = chunk(loss, max_bytes="1MiB", rules=["t5x_loss"])
    np.testing.assert_allclose(jax.grad(ours)(WEIGHTS), jax.grad(loss)(WEIGHTS), rtol=0, atol=1e-8)


def test_a_sharding_constraint_on_one_device_does_not_end_a_region():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def loss(w):
        return -jnp.mean(jax.nn.log_softmax(jax.lax.with_sharding_constraint(X @ w, sharding))[:, 0])

    ours = chunk(loss, max_bytes="1MiB")
    np.testing.assert_allclose(jax.grad(ours)(WEIGHTS), jax.grad(loss)(WEIGHTS), rtol=0, atol=1e-6)
    assert len(ours.report().replacements) == 1
