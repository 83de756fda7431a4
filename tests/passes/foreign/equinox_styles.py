"""A U-Net as it is written with Equinox: one example at a time under `vmap`, parameters in the module itself."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Convolutions(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    norms: list[eqx.nn.GroupNorm]

    def __init__(self, num_in, num_out, *, key):
        first, second = jax.random.split(key)
        self.first = eqx.nn.Conv2d(num_in, num_out, 3, padding=1, key=first)
        self.second = eqx.nn.Conv2d(num_out, num_out, 3, padding=1, key=second)
        self.norms = [eqx.nn.GroupNorm(4, num_out) for _ in range(2)]

    def __call__(self, x):
        x = jax.nn.silu(self.norms[0](self.first(x)))
        return jax.nn.silu(self.norms[1](self.second(x)))


class UNet(eqx.Module):
    down: list[Convolutions]
    bottom: Convolutions
    widen: list[eqx.nn.ConvTranspose2d]
    up: list[Convolutions]
    last: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d

    def __init__(self, widths, *, key):
        *widths, bottom = widths
        keys = iter(jax.random.split(key, 3 * len(widths) + 2))
        self.down = [Convolutions(a, b, key=next(keys)) for a, b in zip([3, *widths], widths, strict=False)]
        self.bottom = Convolutions(widths[-1], bottom, key=next(keys))
        wider = [bottom, *widths[:0:-1]]
        self.widen = [
            eqx.nn.ConvTranspose2d(a, b, 2, stride=2, key=next(keys)) for a, b in zip(wider, widths[::-1], strict=True)
        ]
        self.up = [Convolutions(2 * width, width, key=next(keys)) for width in widths[::-1]]
        self.last = eqx.nn.Conv2d(widths[0], 3, 1, key=next(keys))
        self.pool = eqx.nn.MaxPool2d(2, 2)

    def __call__(self, x):
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(jnp.concatenate([skipped.pop(), widen(x)]))
        return self.last(x)


def unet(*, small=False):
    rows, size, widths = (2, 16, (8, 16)) if small else (2, 128, (16, 32, 64))
    model = eqx.filter_jit(lambda key: UNet(widths, key=key))(jax.random.key(0, impl="rbg"))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    rng = np.random.default_rng(0)
    noisy, clean = (jnp.asarray(rng.normal(size=(rows, 3, size, size)).astype(np.float32)) for _ in range(2))

    def loss(params, batch):
        found = jax.vmap(eqx.combine(params, static))(batch["noisy"])
        return jnp.mean(jnp.square(found - batch["clean"]))

    return loss, params, {"noisy": noisy, "clean": clean}
