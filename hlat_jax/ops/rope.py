"""Rotary position embeddings in the half-rotation layout of Hugging Face. Owns frequencies, tables and rotation."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Stretching of the rotary frequencies of Llama 3.1 and later; the fields carry Hugging Face's meaning.

    Attributes:
      factor: low frequencies are divided by this.
      low_freq_factor: wavelengths above `original_positions / low_freq_factor` are stretched in full.
      high_freq_factor: wavelengths below `original_positions / high_freq_factor` are kept; between, interpolated.
      original_positions: sequence length before stretching, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


def rope_frequencies(head_dim: int, *, theta: float, scaling: Llama3Scaling | None = None) -> np.ndarray:
    """Returns float32 [H/2]: radians per position of each rotated pair.

    Computed on the host in float64 and rounded once: a constant of the program, never part of its arithmetic.

    Source: arXiv 2104.09864, section 3.2.2; scaling as `rope_type="llama3"` of Hugging Face transformers.
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    wavelengths = 2 * math.pi / frequencies
    share_kept = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    share_kept = np.clip(share_kept, 0.0, 1.0)
    return ((1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies).astype(np.float32)


def rope_tables(positions_BT: jax.Array, *, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each fp32 [B, T, H/2]. Computed once per step and shared by all layers."""
    # fp32: bf16 cannot represent positions above 256
    angles = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_BTNH: jax.Array, *, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x_BTNH` with each pair (i, i + H/2) of a head turned by its angle, in the dtype of `x_BTNH`.

    Rotation is fp32 (products of the fp32 tables) and rounded once.

    Args:
      x_BTNH: queries or keys.
      cos: [B, T, H/2] from `rope_tables`.
      sin: likewise.
    """
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)
