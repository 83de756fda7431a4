"""Models in plain JAX: a mixture of experts by `ragged_dot`, a graph network, a latent ODE, and a Conformer."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.ode import odeint


def matrices(rng, *shape):
    """Returns normal fp32 values of variance 1 / fan-in."""
    return jnp.asarray(rng.normal(size=shape).astype(np.float32) * shape[-2] ** -0.5)


def normalized(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def moe_block(layer, x, *, top_k):
    """Returns x_ND plus what the `top_k` experts of each row make of it; no row is dropped."""
    num_rows, num_experts = x.shape[0], layer["router"].shape[-1]
    y = normalized(x, layer["gain"])
    weights, experts = jax.lax.top_k(jax.nn.softmax(y @ layer["router"]), top_k)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1))
    rows, sizes = y[order // top_k], jnp.bincount(experts.reshape(-1), length=num_experts)
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, layer["gate"], sizes))
    hidden = hidden * jax.lax.ragged_dot(rows, layer["up"], sizes)
    out = jax.lax.ragged_dot(hidden, layer["down"], sizes)[jnp.argsort(order)]
    return x + jnp.sum(out.reshape(num_rows, top_k, -1) * weights[..., None], axis=1)


def moe(*, small=False):
    sizes = (2, 16, 32, 4, 24, 31) if small else (3, 128, 256, 8, 4096, 512)
    layers, embed_dim, mlp_dim, experts, rows, vocab_size = sizes
    rng = np.random.default_rng(0)
    params = {"embed": matrices(rng, vocab_size, embed_dim), "out": matrices(rng, embed_dim, vocab_size), "layers": []}
    for _ in range(layers):
        layer = {"gain": jnp.ones(embed_dim), "router": matrices(rng, embed_dim, experts)}
        layer |= {name: matrices(rng, experts, embed_dim, mlp_dim) for name in ("gate", "up")}
        params["layers"].append(layer | {"down": matrices(rng, experts, mlp_dim, embed_dim)})
    tokens, targets = rng.integers(0, vocab_size, (2, rows), dtype=np.int32)

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        for layer in params["layers"]:
            x = moe_block(layer, x, top_k=2)
        log_probs = jax.nn.log_softmax(x @ params["out"])
        return -jnp.mean(jnp.take_along_axis(log_probs, batch["targets"][:, None], axis=-1))

    return loss, params, {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(targets)}


def mlp_params(rng, *widths):
    return [{"w": matrices(rng, a, b), "b": jnp.zeros(b)} for a, b in itertools.pairwise(widths)]


def mlp(layers, x, act):
    """Returns the output of dense layers with `act` between them."""
    for layer in layers[:-1]:
        x = act(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def gnn(*, small=False):
    """Encode, three rounds of messages along the edges, decode, with sums over the receivers."""
    nodes, edges, width = (12, 40, 16) if small else (1024, 8192, 64)
    rng = np.random.default_rng(0)
    params = {
        "nodes": mlp_params(rng, 5, width, width),
        "edges": mlp_params(rng, 3, width, width),
        "rounds": [
            {"edges": mlp_params(rng, 3 * width, width, width), "nodes": mlp_params(rng, 2 * width, width, width)}
            for _ in range(3)
        ],
        "out": mlp_params(rng, width, width, 2),
    }
    senders, receivers = rng.integers(0, nodes, (2, edges), dtype=np.int32)
    arrays = {"nodes": (nodes, 5), "edges": (edges, 3), "targets": (nodes, 2)}
    batch = {name: jnp.asarray(rng.normal(size=shape).astype(np.float32)) for name, shape in arrays.items()}
    batch |= {"senders": jnp.asarray(senders), "receivers": jnp.asarray(receivers)}

    def standardized(x):
        x = x - x.mean(axis=-1, keepdims=True)
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)

    def loss(params, batch):
        senders, receivers = batch["senders"], batch["receivers"]
        h, e = (mlp(params[name], batch[name], jax.nn.relu) for name in ("nodes", "edges"))
        for layer in params["rounds"]:
            messages = mlp(layer["edges"], jnp.concatenate([e, h[senders], h[receivers]], axis=-1), jax.nn.relu)
            e = e + standardized(messages)
            received = jax.ops.segment_sum(e, receivers, num_segments=h.shape[0])
            h = h + standardized(mlp(layer["nodes"], jnp.concatenate([h, received], axis=-1), jax.nn.relu))
        return jnp.mean(jnp.square(mlp(params["out"], h, jax.nn.relu) - batch["targets"]))

    return loss, params, batch


def latent_ode(*, small=False):
    """An encoder, a latent state that `odeint` follows with its adjoint, a decoder of every time."""
    rows, times, observed, latent, width = (3, 5, 6, 4, 8) if small else (128, 32, 32, 64, 256)
    rng = np.random.default_rng(0)
    params = {
        "encoder": mlp_params(rng, observed, width, latent),
        "field": mlp_params(rng, latent, width, latent),
        "decoder": mlp_params(rng, latent, width, width, observed),
    }
    batch = {
        "times": jnp.linspace(0.0, 1.0, times),
        "observed": jnp.asarray(rng.normal(size=(times, rows, observed)).astype(np.float32)),
    }

    def loss(params, batch):
        start = mlp(params["encoder"], batch["observed"][0], jnp.tanh)
        states = odeint(lambda y, t, field: mlp(field, y, jnp.tanh), start, batch["times"], params["field"])
        return jnp.mean(jnp.square(mlp(params["decoder"], states, jnp.tanh) - batch["observed"]))

    return loss, params, batch


def standardized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def conformer_block(layer, x):
    """Returns the result of half an MLP, attention, and a depthwise convolution over time."""
    width = x.shape[-1]
    x = x + 0.5 * jax.nn.silu(standardized(x) @ layer["up"]) @ layer["down"]
    q, k, v = jnp.split(standardized(x) @ layer["qkv"], 3, -1)
    x = x + jax.nn.softmax(q @ k.swapaxes(1, 2) * width**-0.5) @ v @ layer["mix"]
    values, gates = jnp.split(standardized(x) @ layer["glu"], 2, -1)
    dims = {"dimension_numbers": ("NHC", "HIO", "NHC"), "feature_group_count": width}
    over_time = jax.lax.conv_general_dilated(values * jax.nn.sigmoid(gates), layer["times"], (1,), "SAME", **dims)
    return x + jax.nn.silu(standardized(over_time)) @ layer["out"]


def conformer():
    rows, length, width, num_layers = 4, 64, 32, 2
    rng = np.random.default_rng(0)
    shapes = {"up": (width, 4 * width), "down": (4 * width, width), "qkv": (width, 3 * width), "mix": (width, width)}
    shapes |= {"glu": (width, 2 * width), "times": (15, 1, width), "out": (width, width)}
    params = [{name: matrices(rng, *shape) for name, shape in shapes.items()} for _ in range(num_layers)]
    frames, targets = matrices(rng, 2, rows, length, width)

    def loss(params, batch):
        x = batch["frames"]
        for layer in params:
            x = conformer_block(layer, x)
        return jnp.mean(jnp.square(standardized(x) - batch["targets"]))

    return loss, params, {"frames": frames, "targets": targets}
