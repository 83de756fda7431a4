"""RMSNorm in plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, *, scale: jax.Array, eps: float) -> jax.Array:
    """Returns `x / rms(x) * scale` over the last axis, in the dtype of `x`.

    With rms(x) = sqrt(mean(x^2) + eps), statistics and normalisation are fp32. The quotient is rounded to `x.dtype`
    before the product with the scale, so that a bf16 model multiplies in bf16.

    Args:
      x: array [..., D] of any float dtype.
      scale: array [D], which is cast to `x.dtype`.
      eps: number added to the mean square.

    Source: HLAT-70B `modeling_llama_nxd.py` (arXiv 2404.10630) and `LlamaRMSNorm` of Hugging Face, in the same order.
    """
    return _normalized(x, scale, eps)


# The backward pass recomputes from x: otherwise the fp32 intermediates of every layer would be kept.
@functools.partial(jax.checkpoint, static_argnums=2)
def _normalized(x, scale, eps):
    x_fp32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_fp32), axis=-1, keepdims=True)
    return (x_fp32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * scale.astype(x.dtype)
