"""Reads stored arrays straight into memory that JAX takes over, which needs little more memory than their values."""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tensorstore as ts

Bounds = tuple[tuple[int, int], ...]  # of each axis, first and last + 1

INDEX_CACHE = "cache_pool#index"
_READ_BYTES = 1 << 22  # several small chunks are one read
_NUM_READS = min(16, os.cpu_count() or 1)  # at a time; each holds a chunk as it is stored, and decoded


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype, *, offset: int = 0) -> np.ndarray:
    """Returns an uninitialized array that JAX on CPU takes over without a copy, as its address is a multiple of 64.

    With an `offset` in bytes from such an address JAX copies it.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + 64 + offset, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def read_parts(
    abstract: jax.ShapeDtypeStruct,
    fill: Callable[[dict[Bounds, np.ndarray]], None],
    *,
    stored_shape: tuple[int, ...] | None = None,
    donatable: bool = False,
) -> Any:
    """Returns a jax array if `abstract` has a sharding, else a NumPy array.

    Args:
      abstract: the shape, dtype and sharding of the array.
      fill: function that writes the values of the parts that the devices of this process need, each once.
      stored_shape: shape of what is stored, by default the shape of the array. Elements beyond it are zeros.
      donatable: whether a program can reuse the memory. On CPU this takes a copy, as JAX cannot donate foreign memory.
    """
    shape, sharding = abstract.shape, abstract.sharding

    def bounds(index: tuple[slice, ...]) -> Bounds:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    whole = (slice(None),) * len(shape)
    indices = [whole] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
    parts = {
        limits: aligned_empty(
            tuple(stop - start for start, stop in limits), np.dtype(abstract.dtype), offset=16 * donatable
        )
        for limits in map(bounds, indices)
    }
    stored = parts
    if stored_shape is not None and any(map(int.__lt__, stored_shape, shape)):
        stored = {}
        for limits, values in parts.items():
            within = tuple((start, min(stop, size)) for (start, stop), size in zip(limits, stored_shape, strict=True))
            if within != limits:
                values.fill(0)
            if all(start < stop for start, stop in within):
                stored[within] = values[tuple(slice(stop - start) for start, stop in within)]
    fill(stored)
    if sharding is None:
        return parts[bounds(whole)]
    array = jax.make_array_from_callback(shape, sharding, lambda index: parts[bounds(index)])
    return jax.block_until_ready(array)  # what was copied is freed before the next array is read


def read_chunked(spec: dict[str, Any], abstract: jax.ShapeDtypeStruct, *, donatable: bool = False) -> Any:
    """Reads an array with TensorStore into the array that `read_parts` returns.

    Args:
      spec: TensorStore's spec, with INDEX_CACHE as the cache for the nodes of a database.
      abstract: the shape, dtype and sharding. Each axis may have fewer elements than are stored, or more, which are
        zeros. Another dtype rounds to nearest.
      donatable: whether a program can reuse the memory, see `read_parts`.

    The read needs memory for a few chunks, stored and decoded. An array of one chunk needs three times its size.
    """
    # a cache for this array alone: another checkpoint may be at the same path later
    context = ts.Context({INDEX_CACHE: {"total_bytes_limit": 1 << 24}})
    stored = ts.open(spec, open=True, read=True, context=context).result()
    chunk = stored.chunk_layout.read_chunk.shape or ()  # None of a scalar
    itemsize = stored.dtype.numpy_dtype.itemsize
    if stored.dtype.numpy_dtype != abstract.dtype:
        stored = ts.cast(stored, ts.dtype(abstract.dtype))

    def fill(parts: dict[Bounds, np.ndarray]) -> None:
        reads: collections.deque[Any] = collections.deque()
        for limits, values in parts.items():
            target = ts.array(values)[ts.d[:].translate_to[tuple(start for start, _ in limits)]]
            for box in _boxes(limits, chunk, itemsize):
                if len(reads) == _NUM_READS:
                    reads.popleft().result()
                reads.append(target[box].write(stored[box]))
        for read in reads:
            read.result()

    return read_parts(abstract, fill, stored_shape=tuple(stored.shape), donatable=donatable)


def _boxes(limits: Bounds, chunk: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yields the parts of `limits` that are read at once, each of a chunk, or of several if they are small."""
    sizes = list(chunk)
    for axis in reversed(range(len(sizes))):
        needed = -(-limits[axis][1] // sizes[axis])
        sizes[axis] *= max(1, min(needed, _READ_BYTES // (math.prod(sizes) * itemsize)))
    ranges = [range(start - start % size, stop, size) for (start, stop), size in zip(limits, sizes, strict=True)]
    for firsts in itertools.product(*ranges):
        yield tuple(
            slice(max(first, start), min(first + size, stop))
            for first, size, (start, stop) in zip(firsts, sizes, limits, strict=True)
        )
