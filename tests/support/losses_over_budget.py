"""Losses whose memory no choice of saved values lowers much: recurrences over time, scores, logits, second derivatives.

Each takes (params, batch), and `ARGUMENTS` has small ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

B, D, N, HEADS, VOCAB = 2, 16, 4, 2, 1024  # rows, width, states of a channel
STEPS = 256


def _normal(rng, *shape, scale=1.0):
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)


def recurrent_arguments(*, num_steps=STEPS, rows=B, width=D):
    """Returns the parameters and the sequence of the three recurrences."""
    rng, scale = np.random.default_rng(0), width**-0.5
    params = {name: _normal(rng, width, width, scale=scale) for name in ("q", "k", "v", "w")}
    params |= {name: _normal(rng, width, 3 * width, scale=scale) for name in ("of_x", "of_state")}
    params |= {name: _normal(rng, width, N, scale=scale) for name in ("rates", "b", "c")}
    return params, _normal(rng, num_steps, rows, width)


def retention(params, x, reverse=False):
    def step(state, heads):
        q, k, v = heads
        state = 0.9 * state + k[:, :, None] * v[:, None, :]
        return state, jnp.einsum("bd,bde->be", q, state)

    heads, start = [x @ params[name] for name in "qkv"], jnp.zeros((*x.shape[1:], x.shape[-1]))
    return jnp.mean(jax.lax.scan(step, start, heads, reverse=reverse)[1] ** 2)


def gru(params, x, reverse=False):
    def step(state, x):
        (z, r, n), (uz, ur, un) = (jnp.split(a, 3, -1) for a in (x @ params["of_x"], state @ params["of_state"]))
        z, r = jax.nn.sigmoid(z + uz), jax.nn.sigmoid(r + ur)
        return (1 - z) * jnp.tanh(n + r * un) + z * state, None

    return jnp.mean(jax.lax.scan(step, jnp.zeros(x.shape[1:]), x, reverse=reverse)[0] ** 2)


def ssm(params, x, reverse=False):
    def step(state, x):
        dt, b, c = jax.nn.softplus(x @ params["w"]), x @ params["b"], x @ params["c"]
        state = jnp.exp(-dt[..., None] * jnp.exp(params["rates"])) * state + (dt * x)[..., None] * b[:, None]
        return state, jnp.einsum("bdn,bn->bd", state, c)

    return jnp.mean(jax.lax.scan(step, jnp.zeros((*x.shape[1:], N)), x, reverse=reverse)[1] ** 2)


def biased_attention(params, x):
    """Returns a loss of attention with T5's relative bias and a cap of the scores."""
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    places = jnp.arange(x.shape[1])
    distance = jnp.clip(places[:, None] - places[None], 0, 31)
    scores = 30 * jnp.tanh((jnp.einsum("bthd,bshd->bhts", q, k) + params["bias"][:, distance]) / 30)
    scores = jnp.where(places[:, None] >= places[None], scores, -1e9)
    return jnp.mean(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v) ** 2)


def dpo(params, tokens):
    """Returns the loss of direct preference optimization with adapters of low rank; the reference has none."""

    def log_prob(up, tokens):
        hidden = params["embedding"][tokens[:, :-1]]
        log_probs = jax.nn.log_softmax(jnp.tanh(hidden + hidden @ params["down"] @ up) @ params["head"])
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0].sum(-1)

    chosen, rejected = (log_prob(params["up"], each) - log_prob(0 * params["up"], each) for each in tokens)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (chosen - rejected)))


def contrastive(params, pairs):
    """Returns the loss of CLIP, of which chunks of few rows keep as much as the whole."""
    images, texts = (jnp.tanh(x @ w) for x, w in zip(pairs, params["towers"], strict=True))
    images, texts = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (images, texts))
    logits = images @ texts.T * jnp.exp(params["scale"])
    labels, loss = jnp.arange(len(logits)), optax.softmax_cross_entropy_with_integer_labels
    return (loss(logits, labels).mean() + loss(logits.T, labels).mean()) / 2


def poisson_residual(params, points):
    """Returns the loss of a network that solves a Poisson equation: the trace of its Hessian."""

    def solution(point):
        return (jnp.tanh(jnp.tanh(point @ params["in"]) @ params["mid"]) @ params["out"])[0]

    return jnp.mean((jax.vmap(lambda point: jnp.trace(jax.hessian(solution)(point)))(points) - 1) ** 2)


def _arguments():
    rng = np.random.default_rng(1)
    attention = {name: _normal(rng, D, D, scale=D**-0.5) for name in "qkv"} | {"bias": _normal(rng, HEADS, 32)}
    adapters = {"down": _normal(rng, D, 4, scale=0.25), "up": _normal(rng, 4, D, scale=0.5)}
    adapters |= {"embedding": _normal(rng, VOCAB, D), "head": _normal(rng, D, VOCAB, scale=0.25)}
    network = {"in": _normal(rng, 2, 32), "mid": _normal(rng, 32, 32, scale=0.2), "out": _normal(rng, 32, 1, scale=0.2)}
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, B, 65)), jnp.int32)
    recurrent = recurrent_arguments()
    return {
        retention: recurrent,
        gru: recurrent,
        ssm: recurrent,
        biased_attention: (attention, _normal(rng, B, 256, D)),
        dpo: (adapters, tokens),
        poisson_residual: (network, _normal(rng, 512, 2)),
        contrastive: (
            {"towers": _normal(rng, 2, D, D, scale=D**-0.5), "scale": jnp.float32(1)},
            _normal(rng, 2, 256, D),
        ),
    }


ARGUMENTS = _arguments()
