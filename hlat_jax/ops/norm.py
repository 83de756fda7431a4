"""RMSNorm. Owns its arithmetic and where it rounds; the scale parameter belongs to the model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, *, scale: jax.Array, eps: float) -> jax.Array:
    """Returns `x / rms(x) * scale` over the last axis, in the dtype of `x`.

    Statistics and normalisation are fp32; the quotient is rounded to `x.dtype` before it meets the scale, so that a
    bf16 model multiplies in bf16.

    Args:
      x: [..., D], any float dtype.
      scale: [D], cast to `x.dtype`.
      eps: added to the mean square.

    Source: HLAT-70B `modeling_llama_nxd.py` (arXiv 2404.10630) and `LlamaRMSNorm` of Hugging Face, the same order.
    """
    return _normalised(x, scale, eps)


# The backward pass starts again from x: the fp32 intermediates would each be written and kept for every layer.
@functools.partial(jax.checkpoint, static_argnums=2)
def _normalised(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    x_fp32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_fp32), axis=-1, keepdims=True)
    return (x_fp32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype) * scale.astype(x.dtype)
