"""Precision policies, which name dtypes of storage, compute and accumulation, and stochastic rounding.

The fp32 islands (norm statistics, softmax, logits and loss) are part of each op's contract and do not depend on the
policy. Only "autocast" casts inside ops. With it, logits, attention scores and the outputs of RoPE and of the norms'
scales are bf16. Statistics, exponentials, logarithms and the loss stay fp32.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.facts.policies import POLICY_FACTS

_WORD = 1 << 32  # values of one uint32 word of an index


@dataclasses.dataclass(frozen=True)
class Policy:
    """One precision recipe.

    Attributes:
      param: dtype of the parameters that the forward pass reads.
      compute: dtype of matrix products and activations.
      accumulate: dtype in which gradients of microbatches are summed.
      moment: dtype of the optimizer's moments.
      master: dtype of the master weights, which the optimizer updates. None if it updates the parameters themselves.
      rounding: rounding of casts to a narrower dtype, which is "nearest", "stochastic" (in software, with hashed bits)
        or "hardware" (an accelerator that rounds every cast stochastically).
      autocast: name of the `passes.autocast` policy that the forward pass runs under, if there is one.
    """

    param: Any
    compute: Any
    accumulate: Any
    moment: Any
    master: Any
    rounding: str = "nearest"
    autocast: str | None = None

    @property
    def products(self) -> Any:
        """The dtype of matrix products."""
        return self.compute if self.autocast is None else jnp.dtype(jnp.bfloat16)


_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, None: None}
_DTYPE_KEYS = ("param", "compute", "accumulate", "moment", "master")
POLICIES = {
    name: Policy(**vars(facts) | {key: _DTYPES[getattr(facts, key)] for key in _DTYPE_KEYS})
    for name, facts in POLICY_FACTS.items()
}


def policy_on(name: str, platform: str, *, stochastic_rounding: str = "auto") -> Policy:
    """Returns a named policy for a platform.

    With `stochastic_rounding="auto"`, Neuron rounds stochastically in hardware, and other platforms in software. Give
    "software" or "hardware" to choose. The argument has no effect on policies that round to nearest.

    Raises:
      ValueError: "hardware" on a platform that only rounds to nearest.
    """
    policy = POLICIES[name]
    if policy.rounding == "nearest" or stochastic_rounding == "software":
        return policy
    if platform == "neuron":
        return dataclasses.replace(policy, rounding="hardware")
    if stochastic_rounding == "hardware":
        raise ValueError(
            f"precision.stochastic_rounding='hardware' needs Neuron, since devices of platform {platform!r} round to "
            "nearest. Use 'auto' or 'software'."
        )
    return policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounding:
    """The rounding of the values that one step stores.

    Stochastic rounding goes to one of the two neighbors, with probabilities that make it unbiased. Its random bits are
    an integer hash of the words, the name of the array and the element's index in the global array. They need no
    communication and do not depend on the mesh. Each device computes only the bits of its shard. With `jax.random`
    under `rbg`, every device would draw the bits of the global array.

    Attributes:
      words: uint32 scalars, such as the run's seed and the step. Without them it rounds to nearest.
    """

    words: tuple[jax.Array, ...] | None = None

    def at(self, *words: Any) -> Rounding:
        """Returns a rounding with more words, for a value that is stored several times in a step."""
        if self.words is None:
            return self
        return Rounding((*self.words, *(jnp.asarray(word).astype(jnp.uint32) for word in words)))

    def write(self, value: jax.Array, dtype: Any, *, name: str, shape: tuple[int, ...] | None = None) -> jax.Array:
        """Returns `value`, of any float dtype, rounded to `dtype`. Every stored value is rounded here.

        With words, it must have the shape of the global array. Arrays of the same name and shape get the same bits.
        `shape` is the shape without padding, by default the shape of `value`. The bits do not depend on the padding.
        """
        if self.words is None or jnp.dtype(dtype).itemsize >= value.dtype.itemsize:
            return value.astype(dtype)
        bits = random_bits(self.words, name, shape or value.shape, padded=value.shape)
        return stochastic_round(value.astype(jnp.float32), dtype, bits=bits)

    def add(self, sums: Any, terms: Any) -> Any:
        """Returns sums + terms in the dtypes of `sums`, rounded once. For trees of gradients."""
        if self.words is None:
            return jax.tree.map(lambda total, term: total + term.astype(total.dtype), sums, terms)

        def add(path, total, term):
            exact = total.astype(jnp.float32) + term.astype(jnp.float32)
            return self.write(exact, total.dtype, name="gradients" + jax.tree_util.keystr(path))

        return jax.tree_util.tree_map_with_path(add, sums, terms)


NEAREST = Rounding()


@dataclasses.dataclass(frozen=True)
class Accumulation:
    """The summation of the gradients of the microbatches of one step.

    Attributes:
      num_microbatches: static count of parts of a batch.
      dtype: dtype of the sums.
      rounding: rounding of the sums.
      reduce: function applied to the gradients of each microbatch before the sum, such as ZeRO-2's reduce-scatter.
    """

    num_microbatches: int
    dtype: Any
    rounding: Rounding = NEAREST
    reduce: Callable[[Any], Any] | None = None


def stochastic_round(value: jax.Array, dtype: Any, *, bits: jax.Array) -> jax.Array:
    """Returns fp32 values in bf16, rounded away from zero with a probability equal to the truncated fraction.

    Values that bf16 can represent are unchanged, and so are infinities and NaN.

    Args:
      value: float32 values.
      dtype: bfloat16, the only dtype that has the upper bits of fp32.
      bits: uint32 random bits of the same shape, of which the upper half is used.

    Raises:
      ValueError: another dtype.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(f"stochastic rounding to {jnp.dtype(dtype).name} is not supported. Round to bfloat16.")
    raw = jax.lax.bitcast_convert_type(value, jnp.uint32)
    # no cast, not even of NaN: compilers, neuronx-cc too, remove a cast to bf16 and back
    nan = (raw & jnp.uint32(0x80000000)) | jnp.uint32(0x7FC00000)
    kept = jnp.where(jnp.isnan(value), nan, raw)
    upper = jnp.where(jnp.isfinite(value), raw + (bits >> 16), kept) >> 16
    return jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)


def remainder(index: jax.Array, divisor: int) -> jax.Array:
    """Returns index % divisor of int32 between -2^24 and 2^24, without a division of integers.

    Trainium was seen to divide integers by an fp32 reciprocal, off by one. Here the quotient may be off by one.
    Source: rule KB09 of docs/neuron-lint.md.
    """
    # half a number away from multiples, so that the product need not be exact
    quotient = jnp.floor((index.astype(jnp.float32) + 0.5) * (1.0 / divisor)).astype(jnp.int32)
    rest = index - quotient * divisor
    rest = jnp.where(rest < 0, rest + divisor, rest)
    return jnp.where(rest >= divisor, rest - divisor, rest)


def random_bits(
    words: tuple[jax.Array, ...], name: str, shape: tuple[int, ...], *, padded: tuple[int, ...] | None = None
) -> jax.Array:
    """Returns uint32 random bits, a hash of the words, a name and each element's 64-bit index.

    Words may be arrays, which are broadcast against the shape. The bits have the shape `padded`, by default `shape`.
    Bits of elements within `shape` do not depend on `padded`.
    """
    padded = padded or shape
    key = jnp.uint32(zlib.crc32(name.encode()))
    for word in words:
        key = _mix_bits(key ^ _mix_bits(word))
    split = next(dim for dim in range(len(shape) + 1) if math.prod(shape[dim:]) <= _WORD)
    ones = (1,) * len(shape)
    high = _mix_bits(_index(shape[:split] + ones[split:], padded[:split] + ones[split:]) + key)
    low = _index(ones[:split] + shape[split:], ones[:split] + padded[split:])
    # two rounds with different keys: one would give every array the same values in another order
    return _mix_bits(_mix_bits(low ^ high) + _mix_bits(high ^ jnp.uint32(0x9E3779B9)))


def _index(shape: tuple[int, ...], padded: tuple[int, ...]) -> jax.Array:
    """Returns the index of each element of `padded` in row-major order over `shape`, which has at most 2^32."""
    index = jnp.zeros(padded, jnp.uint32)
    for dim, size in enumerate(padded):
        if size > 1:
            stride = jnp.uint32(math.prod(shape[dim + 1 :]))
            index = index + stride * jax.lax.broadcasted_iota(jnp.uint32, padded, dim)
    return index


def _mix_bits(x: jax.Array) -> jax.Array:
    """Returns a permutation of the 32-bit integers in which each bit of `x` flips about half of the bits.

    Source: the constants of lowbias32, C. Wellons, https://nullprogram.com/blog/2018/07/31/ (public domain).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def cast_tree(tree: Any, dtype: Any) -> Any:
    """Returns the tree with every floating-point leaf in `dtype`, rounded to nearest, and other leaves as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)
