"""Models that are not ours, in plain JAX and in Flax, with their losses and batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.batch import SumAndCount


class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (24, 16):
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(3)(x)[:, 0]


def plain_params():
    rng = np.random.default_rng(0)
    w = [rng.normal(size=shape).astype(np.float32) / 4 for shape in ((8, 24), (24, 16), (16, 5))]
    return {"layers": [(w[0], np.zeros(24, np.float32)), (w[1], np.zeros(16, np.float32))], "out": w[2], "scale": 1.0}


def plain_loss(params, batch):
    x = batch["x"]
    for w, b in params["layers"]:
        x = jnp.tanh(x @ w + b)
    return loss_of(params["scale"] * (x @ params["out"])[:, 0], batch)


def loss_of(found, batch):
    return SumAndCount(jnp.sum(batch["weight"] * jnp.square(found - batch["y"])), jnp.sum(batch["weight"]))


def user_model(kind):
    """Returns (loss function, parameters) of a model in plain JAX, with tuples and a scalar, or of one in Flax."""
    if kind == "plain":
        return plain_loss, jax.tree.map(jnp.asarray, plain_params())
    tower = Tower()
    return lambda params, batch: loss_of(tower.apply(params, batch["x"]), batch), tower.init(
        jax.random.key(0), np.zeros((1, 8))
    )


def batch(step):
    rng = np.random.default_rng(step)
    weight = rng.integers(0, 3, 16).astype(np.float32)
    return {
        "x": rng.normal(size=(16, 8)).astype(np.float32),
        "y": rng.normal(size=16).astype(np.float32),
        "weight": weight,
    }
