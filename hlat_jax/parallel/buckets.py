"""Several arrays in one collective: which of them share a bucket, and how they lie in it.

Many small collectives cost a start each; one that carries everything cannot begin before the last gradient is there.
A bucket is in between. What every element becomes does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from hlat_jax.parallel.collectives import gathered, scattered, summed


def grouped(arrays: Sequence[jax.Array], keys: Sequence[Hashable], *, bucket_bytes: int) -> list[list[int]]:
    """Returns the numbers of the arrays that travel together, every number once.

    Args:
      arrays: in the order of the forward pass; buckets are filled from the last, whose gradient is the first to come.
      keys: what arrays of one bucket have in common; each keeps to its dtype too.
      bucket_bytes: an array that does not fit beside those before it begins a new bucket. 0: each by itself, in order.
    """
    if not bucket_bytes:
        return [[number] for number in range(len(arrays))]
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for number in reversed(range(len(arrays))):
        array = arrays[number]
        key = (keys[number], jnp.dtype(array.dtype))
        size = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        group, filled = open_groups.get(key, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(number)
        open_groups[key] = group, filled + size
    return groups


def summed_together(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns `summed` of each, in one collective."""
    if len(arrays) == 1 or not axes:
        return [summed(array, axes) for array in arrays]
    flat = summed(jnp.concatenate([array.reshape(-1) for array in arrays]), axes)
    return [part.reshape(array.shape) for part, array in zip(_split(flat, arrays), arrays, strict=True)]


def scattered_together(arrays: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
    """Returns `scattered` of each in its own dim, in one collective: a row of the bucket goes to a device."""
    if len(arrays) == 1 or not axes:
        return [scattered(array, axes, dim) for array, dim in zip(arrays, dims, strict=True)]
    degree = jax.lax.axis_size(axes)
    moved = [jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims, strict=True)]
    own = scattered(jnp.concatenate([array.reshape(degree, -1) for array in moved], axis=1), axes, 0)[0]
    parts = [jax.ShapeDtypeStruct((array.shape[0] // degree, *array.shape[1:]), array.dtype) for array in moved]
    return [
        jnp.moveaxis(flat.reshape(part.shape), 0, dim)
        for flat, part, dim in zip(_split(own, parts), parts, dims, strict=True)
    ]


def gathered_together(parts: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
    """Returns `gathered` of each in its own dim, in one collective; undoes `scattered_together`."""
    if len(parts) == 1 or not axes:
        return [gathered(part, axes, dim) for part, dim in zip(parts, dims, strict=True)]
    moved = [jnp.moveaxis(part, dim, 0) for part, dim in zip(parts, dims, strict=True)]
    rows = gathered(jnp.concatenate([part.reshape(1, -1) for part in moved], axis=1), axes, 0)
    ends = _ends(moved)
    return [
        jnp.moveaxis(rows[:, end - part.size : end].reshape(-1, *part.shape[1:]), 0, dim)
        for part, end, dim in zip(moved, ends, dims, strict=True)
    ]


def _split(flat: jax.Array, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [flat[end - array.size : end] for array, end in zip(arrays, _ends(arrays), strict=True)]


def _ends(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[int]:
    return [sum(array.size for array in arrays[: number + 1]) for number in range(len(arrays))]
