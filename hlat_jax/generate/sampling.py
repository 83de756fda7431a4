"""Sampling of tokens from logits: greedy, temperature, top-k and top-p.

It uses no argmax, sort and top-k, which Neuron does not support. A bisection over the bits of the logits finds exact
thresholds, and the token is the lowest index of the maximum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.precision import random_bits

_EXCLUDED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of sampling, as scalars that are arguments of a program, so that one program supports all values.

    Attributes:
      temperature: divisor of the logits. 0 is greedy, and takes the first of the most likely tokens.
      top_k: number of most likely tokens, and their ties, from which tokens are drawn. 0 draws from all.
      top_p: sum of probabilities of the most likely of these tokens, and their ties, from which tokens are drawn. 1
        draws from all.
      seed: seed of the random draws.
      repetition_penalty: factor that makes tokens of the prompt and of the text so far less likely, above 1. 1 is no
        penalty, and None in `arguments`, since the programs then have no such tokens.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0
    seed: Any = 0
    repetition_penalty: Any = 1.0

    def arguments(self) -> Sampling:
        """Returns the same as NumPy scalars, the arguments of a program.

        Raises:
          ValueError: a value outside its range.
        """
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be a finite number of at least 0 (greedy).")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (every token).")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1 (every token).")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0. Use 1 for no penalty.")
        return Sampling(
            np.float32(self.temperature),
            np.int32(min(self.top_k, 2**31 - 1)),
            np.float32(self.top_p),
            np.uint32(self.seed & 0xFFFFFFFF),
            None if self.repetition_penalty == 1 else np.float32(self.repetition_penalty),
        )


def abstract_sampling(*, is_penalized: bool = False) -> Sampling:
    """Returns the shapes and dtypes of `Sampling.arguments`, with a repetition penalty or without."""
    arguments = Sampling(repetition_penalty=2 if is_penalized else 1).arguments()
    return jax.tree.map(lambda value: jax.ShapeDtypeStruct((), value.dtype), arguments)


def penalize_repetition(logits_BV: jax.Array, seen_BV: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns the logits, moved down for tokens that a row has had.

    A positive logit is divided by `factor`. A negative logit is multiplied by it, as in transformers.
    Source: Keskar et al. (CTRL), arXiv 1909.05858, section 4.1.
    """
    lower_BV = jnp.where(logits_BV > 0, logits_BV / factor, logits_BV * factor)
    return jnp.where(seen_BV, lower_BV, logits_BV)


def sample(logits_BV: jax.Array, sampling: Sampling, *, draws: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns int32 token ids [B]. First top-k cuts, then top-p, as in Hugging Face.

    Args:
      logits_BV: fp32 logits of the whole vocabulary.
      sampling: result of `Sampling.arguments`.
      draws: integers [B] that seed a draw together with `sampling.seed`, which are the prompt's number and the position
        of the new token. A draw depends on nothing else, so not on the mesh.
    """
    drawn = sampling.temperature > 0
    scaled_BV = logits_BV / jnp.where(drawn, sampling.temperature, 1.0)
    kept_BV = _allowed(scaled_BV, sampling)
    noise_BV = jnp.where(drawn, _gumbel(sampling.seed, draws, logits_BV.shape[1]), 0.0)
    return _first_maximum(jnp.where(kept_BV, scaled_BV + noise_BV, _EXCLUDED))


def _allowed(scaled_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns which tokens top-k and top-p keep."""
    vocab_size = scaled_BV.shape[1]
    keys_BV = _ordered_bits(scaled_BV)
    # fp32 counts: exact below 2^24
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size).astype(jnp.float32)
    among_BV = _above(keys_BV, lambda mask_BV: jnp.sum(mask_BV.astype(jnp.float32), axis=1) >= k)
    exp_BV = jnp.where(among_BV, jnp.exp(scaled_BV - jnp.max(scaled_BV, axis=1, keepdims=True)), 0.0)
    needed_B = sampling.top_p * jnp.sum(exp_BV, axis=1)
    likely_BV = _above(keys_BV, lambda mask_BV: jnp.sum(jnp.where(mask_BV, exp_BV, 0.0), axis=1) >= needed_B)
    # keeps tokens whose probability is lost in the rounding of the sum
    return among_BV & (likely_BV | (sampling.top_p >= 1))


def _above(keys_BV: jax.Array, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns which uint32 keys are at or above the greatest threshold that holds, found bit by bit from the highest.

    `holds` maps the mask of tokens at or above a threshold to bool [B]. It is monotonic, and True for all tokens.
    """

    def set_bit(bit_index, threshold_B):
        tried_B = threshold_B | (jnp.uint32(1 << 31) >> bit_index.astype(jnp.uint32))
        return jnp.where(holds(keys_BV >= tried_B[:, None]), tried_B, threshold_B)

    threshold_B = jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(keys_BV.shape[:1], jnp.uint32))
    return keys_BV >= threshold_B[:, None]


def _ordered_bits(x: jax.Array) -> jax.Array:
    """Returns uint32 in the order of the fp32 values."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _gumbel(seed: jax.Array, draws: tuple[jax.Array, jax.Array], vocab_size: int) -> jax.Array:
    """Returns fp32 [B, V] of the Gumbel distribution: the argmax of logits plus these is a draw from their softmax."""
    words = (seed, *(draw.astype(jnp.uint32)[:, None] for draw in draws))
    bits_BV = random_bits(words, "sampling", (vocab_size,))
    # the rare large values come from uniform numbers near 0, which fp32 resolves; at 1 the logarithm would be infinite
    uniform_BV = jnp.minimum((bits_BV.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform_BV))


def _first_maximum(x_BV: jax.Array) -> jax.Array:
    """Returns the lowest int32 index of each row's maximum, in two reductions of one operand each."""
    vocab_size = x_BV.shape[1]
    index_BV = jax.lax.broadcasted_iota(jnp.int32, x_BV.shape, 1)
    at_BV = jnp.where(x_BV >= jnp.max(x_BV, axis=1, keepdims=True), index_BV, vocab_size)
    return jnp.minimum(jnp.min(at_BV, axis=1), vocab_size - 1)  # still a valid index for NaN
