"""Spikes of the loss and the gradient norm: steps far above a window of those before, found on the device.

Only values that are reduced over all devices are compared, so that all take the same decision, and without the host.
The window is part of the state: it is saved, and a resumed run goes on with it.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

_LEAST_SPREAD = 1e-4  # of the mean: a window of equal values would otherwise never take a new level


@dataclasses.dataclass(frozen=True)
class SpikePolicy:
    """What a spike is, and whether a step with one is skipped.

    Attributes:
      skips: the update of such a step is masked, as that of a step that is not finite; False: it is only reported.
      sigmas: standard deviations above the mean of the window, from where a value is a spike.
      window: number of steps in the window; it decides once it has half of them, and at least 2.

    Raises:
      ValueError: `sigmas` is not above 0, or a window of less than 2 steps.
    """

    skips: bool = True
    sigmas: float = 6.0
    window: int = 128

    def __post_init__(self):
        if not 0 < self.sigmas < math.inf or self.window < 2:
            raise ValueError(
                f"SpikePolicy(sigmas={self.sigmas}, window={self.window}): give sigmas above 0, such as 6.0, and a "
                "window of 2 steps or more, such as 128."
            )


def initial(policy: SpikePolicy) -> dict[str, jax.Array]:
    """Returns an empty window: {"values": fp32[2, window], oldest first, "count": int32, how many of them are set}."""
    return {"values": jnp.zeros((2, policy.window), jnp.float32), "count": jnp.zeros((), jnp.int32)}


def observed(
    state: dict[str, jax.Array], *, loss: jax.Array, grad_norm: jax.Array, finite: jax.Array, policy: SpikePolicy
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (whether this step is a spike, the window with its loss and gradient norm).

    A step that is not finite is no spike and leaves the window as it is: one NaN in it would make all that follow
    spikes, or none. A spike enters the window as the limit that it exceeds, whether it is skipped or not. Entered as it
    is, a single one of 1e6 would hide all others for a whole window. Left out, a lasting new level would be a
    spike for ever; so the limit rises with each, and a new level is normal after some tens of steps.

    Source: OLMo-core's SkipStepOptimizer (6 standard deviations of 128 steps, loss or gradient norm).
    """
    values, count = state["values"], state["count"]
    found = jnp.stack([loss, grad_norm])[:, None]
    is_set = jnp.arange(policy.window) >= policy.window - count
    num = jnp.maximum(count, 2).astype(jnp.float32)
    mean = jnp.sum(jnp.where(is_set, values, 0.0), axis=1, keepdims=True) / num
    squares = jnp.sum(jnp.where(is_set, jnp.square(values - mean), 0.0), axis=1, keepdims=True)
    sigma = jnp.maximum(jnp.sqrt(squares / (num - 1.0)), _LEAST_SPREAD * jnp.abs(mean))
    limit = jnp.where(count >= max(2, policy.window // 2), mean + policy.sigmas * sigma, jnp.inf)
    entered = jnp.concatenate([values[:, 1:], jnp.minimum(found, limit)], axis=1)
    window = {
        "values": jnp.where(finite, entered, values),
        "count": jnp.where(finite, jnp.minimum(count + 1, policy.window), count),
    }
    return finite & jnp.any(found > limit), window
