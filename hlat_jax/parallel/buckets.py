"""Buckets of arrays that share one collective.

Each of many small collectives pays latency. One collective for all arrays cannot start before the last gradient is
computed. A bucket is in between. The values do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from hlat_jax.parallel import collectives


def assign_buckets(arrays: Sequence[jax.Array], keys: Sequence[Hashable], *, bucket_bytes: int) -> list[list[int]]:
    """Returns the indices of the arrays of each bucket. Every index is in one bucket.

    Args:
      arrays: arrays in the order of the forward pass. Buckets are filled from the last, which has its gradient first.
      keys: keys of the arrays. Only arrays of the same key and dtype share a bucket.
      bucket_bytes: capacity. A larger array has its own bucket. 0 means one array a bucket, in order.
    """
    if not bucket_bytes:
        return [[index] for index in range(len(arrays))]
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for index in reversed(range(len(arrays))):
        array = arrays[index]
        key = (keys[index], jnp.dtype(array.dtype))
        size = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        group, filled = open_groups.get(key, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(index)
        open_groups[key] = group, filled + size
    return groups


def bucketed_psum(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns `collectives.psum` of each, in one collective."""
    if len(arrays) == 1 or not axes:
        return [collectives.psum(array, axes) for array in arrays]
    flat = collectives.psum(jnp.concatenate([array.reshape(-1) for array in arrays]), axes)
    return [part.reshape(array.shape) for part, array in zip(_split(flat, arrays), arrays, strict=True)]


def bucketed_reduce_scatter(arrays: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
    """Returns `collectives.reduce_scatter` of each in its own dim, in one collective with a row for each device."""
    if len(arrays) == 1 or not axes:
        return [collectives.reduce_scatter(array, axes, dim) for array, dim in zip(arrays, dims, strict=True)]
    degree = jax.lax.axis_size(axes)
    moved = [jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, dims, strict=True)]
    own = collectives.reduce_scatter(jnp.concatenate([array.reshape(degree, -1) for array in moved], axis=1), axes, 0)[
        0
    ]
    parts = [jax.ShapeDtypeStruct((array.shape[0] // degree, *array.shape[1:]), array.dtype) for array in moved]
    return [
        jnp.moveaxis(flat.reshape(part.shape), 0, dim)
        for flat, part, dim in zip(_split(own, parts), parts, dims, strict=True)
    ]


def bucketed_all_gather(parts: Sequence[jax.Array], axes: tuple[str, ...], dims: Sequence[int]) -> list[jax.Array]:
    """Returns `collectives.all_gather` of each in its own dim, in one collective. Inverts `bucketed_reduce_scatter`."""
    if len(parts) == 1 or not axes:
        return [collectives.all_gather(part, axes, dim) for part, dim in zip(parts, dims, strict=True)]
    moved = [jnp.moveaxis(part, dim, 0) for part, dim in zip(parts, dims, strict=True)]
    rows = collectives.all_gather(jnp.concatenate([part.reshape(1, -1) for part in moved], axis=1), axes, 0)
    ends = _ends(moved)
    return [
        jnp.moveaxis(rows[:, end - part.size : end].reshape(-1, *part.shape[1:]), 0, dim)
        for part, end, dim in zip(moved, ends, dims, strict=True)
    ]


def _split(flat: jax.Array, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.Array]:
    return [flat[end - array.size : end] for array, end in zip(arrays, _ends(arrays), strict=True)]


def _ends(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[int]:
    return [sum(array.size for array in arrays[: index + 1]) for index in range(len(arrays))]
