"""Dynamic loss scaling for fp16, which multiplies the loss and divides the gradients. Below 6e-8, fp16 is 0.

All functions are pure. A step is skipped by `where`, never by `cond`, which Neuron does not support. bf16 has the
range of fp32 and needs no loss scale.

    value, grads, finite = loss_scale.value_and_grad(autocast(loss, "fp16"))(scale, params, batch)
    params, scale = loss_scale.choose(finite, params - rate * grads, params), loss_scale.adjust(scale, finite)

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops.cross_entropy import scaled_losses


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """State of the scaling, a pytree of two arrays. Keep it in a checkpoint.

    Attributes:
      scale: float32 scalar, a power of two, so that multiplying rounds nothing.
      good_steps: int32 scalar, number of steps with finite gradients since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


def initial(*, scale: float = 2.0**15) -> LossScale:
    """Returns the state before the first step.

    Raises:
      ValueError: a scale that is not a power of two.
    """
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise ValueError(f"loss scale {scale} must be a power of two, such as {2.0**15:.0f}.")
    return LossScale(jnp.float32(scale), jnp.int32(0))


def value_and_grad(loss_fn: Callable) -> Callable[..., tuple[jax.Array, Any, jax.Array]]:
    """Returns (LossScale, params, *args) -> (loss, gradients with respect to params, whether all of them are finite).

    `loss_fn` returns a scalar. The loss and the gradients returned are unscaled, and the gradients are fp32.
    """

    def scale_loss(params: Any, state: LossScale, *args: Any) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(params, *args)
        return loss.astype(jnp.float32) * state.scale, loss

    def unscale(state: LossScale, params: Any, *args: Any) -> tuple[jax.Array, Any, jax.Array]:
        with scaled_losses():
            (_, loss), grads = jax.value_and_grad(scale_loss, has_aux=True)(params, state, *args)
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32) / state.scale, grads)
        return loss, grads, all_finite((loss, grads))

    return unscale


def all_finite(tree: Any) -> jax.Array:
    """Returns a bool scalar, True if all leaves are free of infinities and NaNs."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def choose(finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns the new tree of arrays, or the old one after a step that was not finite."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def adjust(
    state: LossScale,
    finite: jax.Array,
    *,
    growth_steps: int = 2000,
    smallest: float = 2.0**-24,
    largest: float = 2.0**24,
) -> LossScale:
    """Returns the state after a step, with the scale halved if it was not finite, and doubled after enough good steps.

    Args:
      state: state before the step.
      finite: whether the step was finite.
      growth_steps: number of consecutive good steps after which the scale doubles.
      smallest: lower limit of the scale. It is far below 1, because products in fp16 sum gradients over all tokens of
        a microbatch. The sum over 2**24 tokens, times 2**-24, is as large as their mean.
      largest: upper limit of the scale, which is the fp32 cotangent of the scaled loss.
    """
    good_steps = jnp.where(finite, state.good_steps + 1, 0)
    is_due = good_steps >= growth_steps
    grown = jnp.where(is_due, jnp.minimum(state.scale * 2, largest), state.scale)
    scale = jnp.where(finite, grown, jnp.maximum(state.scale / 2, smallest))
    return LossScale(scale, jnp.where(is_due, 0, good_steps))
