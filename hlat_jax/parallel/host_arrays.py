"""Makes arrays on devices from values that the host computes, a layer at a time, without a program for the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Index = tuple[tuple[int, int], ...]  # (start, stop) in every dim


def place_values(
    targets: Sequence[jax.ShapeDtypeStruct], compute: Callable[[int], Sequence[np.ndarray]], *, is_stacked: bool
) -> list[jax.Array]:
    """Returns arrays with the shapes, dtypes and shardings of `targets`.

    The host holds the shards of this process's devices, each once, and one result of `compute`.

    Args:
      targets: shapes, dtypes and shardings of the arrays.
      compute: function of a layer that returns its values for each target, without the leading axis. It is called for
        the layers that a device of this process holds.
      is_stacked: whether the leading axis counts layers. Otherwise `compute(0)` returns whole values, and rows that
        they lack are zeros.
    """
    held = [_empty_shards(target) for target in targets]
    layers = {0}
    if is_stacked:
        layers = {layer for shards in held for (start, stop), *_ in shards for layer in range(start, stop)}
    for layer in sorted(layers):
        for values, shards in zip(compute(layer), held, strict=True):
            for index, shard in shards.items():
                if not is_stacked:
                    _copy(values, index, shard)
                elif index[0][0] <= layer < index[0][1]:
                    _copy(values, index[1:], shard[layer - index[0][0]])
    return [_on_devices(target, shards) for target, shards in zip(targets, held, strict=True)]


def place_constant(target: jax.ShapeDtypeStruct, value: Any) -> jax.Array:
    """Returns an array with the shape, dtype and sharding of `target`, equal to `value` everywhere."""
    shard = np.full(target.sharding.shard_shape(target.shape), value, target.dtype)
    return jax.make_array_from_callback(target.shape, target.sharding, lambda _: shard)


def _copy(values: np.ndarray, index: Index, shard: np.ndarray) -> None:
    part = values[tuple(slice(*bounds) for bounds in index)]
    shard[tuple(map(slice, part.shape))] = part


def _empty_shards(target: jax.ShapeDtypeStruct) -> dict[Index, np.ndarray]:
    """Returns zeros for the shards of a target on this process's devices; replicas of a shard share one."""
    indices = target.sharding.addressable_devices_indices_map(target.shape).values()
    shape = target.sharding.shard_shape(target.shape)
    return {index: np.zeros(shape, target.dtype) for index in {_bounds(index, target) for index in indices}}


def _bounds(index: tuple[slice, ...], target: jax.ShapeDtypeStruct) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(index, target.shape, strict=True))


def _on_devices(target: jax.ShapeDtypeStruct, shards: dict[Index, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(target.shape, target.sharding, lambda index: shards[_bounds(index, target)])
