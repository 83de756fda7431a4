"""Rotary position embeddings in the half-rotation layout of Hugging Face, in plain JAX.

R is H/2, the number of rotated pairs of a head.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation, which divides all frequencies by `factor`. Source: arXiv 2306.15595."""

    factor: float

    def frequencies(self, periods_R: np.ndarray, *, theta: float) -> np.ndarray:
        """Returns the scaled frequencies of the rotated pairs [H/2]. Periods are in positions per radian."""
        return 1 / periods_R / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of the rotary frequencies in Llama 3.1 and later. The fields have Hugging Face's meaning.

    Attributes:
      factor: divisor of the low frequencies.
      low_freq_factor: factor such that wavelengths above `original_positions / low_freq_factor` are scaled in full.
      high_freq_factor: factor such that wavelengths below `original_positions / high_freq_factor` are kept. Between the
        two, frequencies are interpolated.
      original_positions: sequence length before scaling, in tokens.

    Source: `rope_type="llama3"` of Hugging Face transformers.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def frequencies(self, periods_R: np.ndarray, *, theta: float) -> np.ndarray:
        """Returns the scaled frequencies of the rotated pairs [H/2]. Periods are in positions per radian."""
        kept_R = 1 / periods_R
        turns_R = 1 / (1 / kept_R * (2 * math.pi)) * self.original_positions
        share_R = (turns_R - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between_R = (1 - share_R) * kept_R / self.factor + share_R * kept_R
        return np.where(share_R <= 0, kept_R / self.factor, np.where(share_R >= 1, kept_R, between_R))


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN. The fields have Hugging Face's meaning.

    Attributes:
      factor: divisor of the low frequencies.
      original_positions: sequence length before scaling, in tokens.
      beta_fast: number of rotations within the original positions above which pairs are kept.
      beta_slow: number of rotations below which pairs are scaled in full. Between the two, frequencies are interpolated
        by the number of the pair.
      attention_factor: factor of rotated queries and keys. 0 means 0.1 ln(factor) + 1.

    Source: Peng et al., arXiv 2309.00071, section 3, with bounds rounded to whole pairs as by transformers.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float

    @property
    def table_factor(self) -> float:
        """The factor of cos and sin, and so of rotated queries and keys."""
        return self.attention_factor or (0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0)

    def frequencies(self, periods_R: np.ndarray, *, theta: float) -> np.ndarray:
        """Returns the scaled frequencies of the rotated pairs [H/2]. Periods are in positions per radian, theta > 1."""
        pairs = len(periods_R)

        def pair_of(rotations: float) -> float:
            return pairs * math.log(self.original_positions / (rotations * 2 * math.pi)) / math.log(theta)

        first, last = (
            max(math.floor(pair_of(self.beta_fast)), 0),
            min(math.ceil(pair_of(self.beta_slow)), 2 * pairs - 1),
        )
        width = last - first or 1e-3  # as transformers, where both bounds are one pair
        share_R = 1 - np.clip((np.arange(pairs, dtype=np.float32) - first) / width, 0, 1)
        return 1 / (self.factor * periods_R) * (1 - share_R) + 1 / periods_R * share_R


SCALINGS = {"linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
Scaling = LinearScaling | Llama3Scaling | YarnScaling


def rope_frequencies(head_dim: int, *, theta: float, scaling: Scaling | None = None) -> np.ndarray:
    """Returns float32 [H/2], the radians per position of each rotated pair.

    Pair i has theta^(-2i / H), before scaling. It is computed on the host in fp32 in the order of transformers, as a
    constant of the program. So nearly all frequencies have the bits with which published models were trained.

    Source: arXiv 2104.09864, section 3.2.2.
    """
    exponents_R = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # NumPy's power in fp32 is often off by a bit; this one is rounded correctly, as PyTorch's mostly is
    periods_R = (float(theta) ** exponents_R.astype(np.float64)).astype(np.float32)
    return 1 / periods_R if scaling is None else scaling.frequencies(periods_R, theta=theta)


def rope_tables(
    positions_BT: jax.Array, *, frequencies: np.ndarray, scaling: Scaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each fp32 [B, T, H/2], which all layers share.

    Args:
      positions_BT: int32 positions of the tokens.
      frequencies: result of `rope_frequencies`.
      scaling: scaling of the frequencies. YaRN also scales the tables.
    """
    # fp32: bf16 cannot represent positions above 256
    angles = positions_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(scaling, YarnScaling):
        cos, sin = cos * scaling.table_factor, sin * scaling.table_factor
    return cos, sin


def apply_rope(x_BTNH: jax.Array, *, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x_BTNH` with each pair (i, i + H/2) of a head rotated by its angle, in the dtype of `x_BTNH`.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). It is computed in fp32 and rounded once.

    Args:
      x_BTNH: queries or keys.
      cos: table [B, T, H/2] from `rope_tables`.
      sin: table [B, T, H/2] from `rope_tables`.

    Raises:
      ValueError: H is odd, or the tables have another width.
    """
    h = x_BTNH.shape[3]
    if h % 2:
        raise ValueError(f"model.head_dim={h} must be even, since rotary embeddings rotate pairs.")
    if not cos.shape[-1] == sin.shape[-1] == h // 2:
        widths = f"cos has width {cos.shape[-1]} and sin {sin.shape[-1]}"
        raise ValueError(f"{widths}, but head_dim={h} has {h // 2} pairs. Compute both with rope_tables for head_dim.")
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]  # for all heads
    rotated_BTNH = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated_BTNH.astype(x_BTNH.dtype)
