"""Forward mode, and both modes in turn, of functions that run in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.residuals import select_residuals

NUM_TOKENS, WIDTH = 256, 4
W, X, W_DOT, X_DOT = (
    jax.random.normal(jax.random.key(seed), shape) / 2
    for seed, shape in enumerate([(WIDTH, 64), (NUM_TOKENS, WIDTH)] * 2)
)
LABELS = jnp.arange(NUM_TOKENS) % 64


def of_tokens(w, x):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS))


def of_both_sides(w, x):
    """CLIP's, in two loops with one derivative."""
    scores, labels = (x @ w[:, :WIDTH]) @ x.T, jnp.arange(NUM_TOKENS)
    loss = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(loss(scores, labels)) + jnp.mean(loss(scores.T, labels))


def attended(w, x):
    """Attention of all positions to all."""
    q, k, v = ((x[:24] @ w[:, at : at + 8]).reshape(1, 24, 2, 4) for at in (0, 8, 16))
    probs = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2)
    return jnp.mean(jnp.einsum("bnts,bsnh->btnh", probs, v) ** 2)


REPLACED = {
    "loss": (of_tokens, lambda fn: chunk(fn, max_bytes="16KiB")),
    "chunks": (of_both_sides, lambda fn: chunk(fn, max_bytes="64KiB")),
    "attention": (attended, lambda fn: chunk(fn, max_bytes="1KiB")),
}
PROGRAMS = {
    "jvp": lambda fn: jax.jvp(fn, (W, X), (W_DOT, X_DOT)),
    "jvp by one": lambda fn: jax.jvp(lambda w: fn(w, X), (W,), (W_DOT,)),
    "jacfwd": lambda fn: jax.jacfwd(lambda row: fn(W.at[0].set(row), X))(W[0]),
    "jvp of grad": lambda fn: jax.jvp(jax.grad(fn, (0, 1)), (W, X), (W_DOT, X_DOT)),
    "hessian": lambda fn: jax.hessian(lambda row: fn(W.at[0, :3].set(row), X))(W[0, :3]),
    "linearize": lambda fn: jax.linearize(fn, W, X)[1](W_DOT, X_DOT),
    "vmap of jvp": lambda fn: jax.vmap(lambda x, dot: jax.jvp(fn, (W, x), (W_DOT, dot)))(
        jnp.stack([X, X_DOT]), jnp.stack([X_DOT, X])
    ),
    "jvp of vmap": lambda fn: jax.jvp(jax.vmap(fn, (None, 0)), (W, X[None]), (W_DOT, X_DOT[None])),
    "grad of vmap": lambda fn: jax.grad(lambda w: jax.vmap(fn, (None, 0))(w, jnp.stack([X, X_DOT])).sum())(W),
    "grad of jvp": lambda fn: jax.grad(lambda w, x: jax.jvp(fn, (w, x), (W_DOT, X_DOT))[1], (0, 1))(W, X),
    "grad of grad": lambda fn: jax.grad(lambda w: jnp.vdot(jax.grad(fn)(w, X), W_DOT))(W),
}


def distance(found, wanted):
    """Returns the norm of the difference, relative to the norm of the second."""
    found, wanted = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(one)]) for one in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.quick_cases("loss-some", "chunks-some")
@pytest.mark.parametrize("programs", [("jvp", "jvp of grad"), PROGRAMS], ids=["some", "all"])
@pytest.mark.parametrize("replaced", REPLACED)
def test_every_mode_has_the_derivatives_of_the_plain_function(replaced, programs):
    plain, pass_ = REPLACED[replaced]
    ours = pass_(plain)
    for name in programs:
        found, wanted = (jax.jit(lambda fn=fn, name=name: PROGRAMS[name](fn))() for fn in (ours, plain))
        assert distance(found, wanted) < 1e-5, name  # sums of fp32 in another order
    assert ours.report().replacements, ours.report()


@pytest.mark.slow
@pytest.mark.parametrize("replaced", REPLACED)
def test_forward_mode_passes_through_the_other_passes(replaced):
    plain, pass_ = REPLACED[replaced]
    wanted = jax.jit(lambda: PROGRAMS["jvp"](plain))()
    for others, tolerance in ((select_residuals, 1e-5), (lambda fn: autocast(fn, "bf16"), 3e-2)):
        fn = others(pass_(plain))
        assert distance(jax.jit(lambda fn=fn: PROGRAMS["jvp"](fn))(), wanted) < tolerance
