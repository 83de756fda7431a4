"""Digests of arrays on devices: integer sums that no mesh changes, by which replicas and restored arrays are compared.

A digest is the sum modulo 2^32 of a hash of each word, a value as an unsigned integer, and its index in the global
array. For one index the hash is a bijection: a digest changes with every change of one word. A word of zero adds
nothing, and an index counts no padding. So padding, of the vocabulary or for ZeRO-1, changes no digest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hlat_jax.host.distributed import exchange

# What every device sums besides its arrays: a device or a compiler that does not add integers exactly is found by it.
PROBE = np.arange(1, 4097, dtype=np.uint32) * np.uint32(2654435761)


def make_digest(
    mesh: Any, shardings: Any, *, shapes: Callable[[Any], Sequence[tuple[int, ...]]] | None = None
) -> Callable[[Any, Any], jax.Array]:
    """Returns (arrays, PROBE) -> uint32[devices, arrays + 1]: the digests of each device's shards, the probe's last.

    Devices are in the order of the mesh. No device sends anything to another.

    Args:
      mesh: the mesh of the arrays.
      shardings: tree of the shardings of the arrays.
      shapes: function from the tree of arrays to the shape of each without padding, by default its own shape. Padding
        has only zeros.
    """
    specs = [sharding.spec for sharding in jax.tree.leaves(shardings)]

    def state_digest(tree: Any, probe: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(tree)
        own_shapes = [leaf.shape for leaf in leaves] if shapes is None else shapes(tree)

        def digest(shards: list[jax.Array], places: dict[str, jax.Array], probe: jax.Array) -> jax.Array:
            of_shards = zip(shards, specs, own_shapes, strict=True)
            sums = [_shard_sum(mesh, places, shard, spec, shape) for shard, spec, shape in of_shards]
            return jnp.stack([*sums, _sum(probe, jax.lax.iota(jnp.uint32, probe.size))])[None]

        # `axis_index` would divide by a number of replicas, see rule KB09 of docs/neuron-lint.md
        places = {axis: jnp.arange(size, dtype=jnp.uint32) for axis, size in mesh.shape.items() if size > 1}
        in_specs = specs, {axis: P(axis) for axis in places}, P()
        of_devices = jax.shard_map(digest, mesh=mesh, in_specs=in_specs, out_specs=P(mesh.axis_names), check_vma=False)
        return of_devices(leaves, places, probe)

    return state_digest


def _shard_sum(mesh: Any, places: dict[str, jax.Array], shard: jax.Array, spec: P, shape: tuple[int, ...]) -> jax.Array:
    """Returns the digest, uint32[], of this device's shard of an array, with its place along each axis of the mesh.

    `shape` is the shape of the whole array without padding.
    """
    bits = jax.lax.bitcast_convert_type(shard, f"uint{8 * shard.dtype.itemsize}")
    index, stride = jnp.zeros(shard.shape, jnp.uint32), 1
    axes_by_dim = [*spec, *[None] * (shard.ndim - len(spec))]
    for dim in reversed(range(shard.ndim)):
        axes = axes_by_dim[dim] or ()
        axes = axes if isinstance(axes, tuple) else (axes,)
        place, size = jax.lax.broadcasted_iota(jnp.uint32, shard.shape, dim), shard.shape[dim]
        for axis in reversed([axis for axis in axes if axis in places]):
            place = place + places[axis].reshape(()) * jnp.uint32(size)
            size *= mesh.shape[axis]
        index = index + place * jnp.uint32(stride % (1 << 32))
        stride *= shape[dim]
    return _sum(bits.astype(jnp.uint32), index)


def _sum(words: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.sum(_hash(words, index), dtype=jnp.uint32)


def _hash(words: Any, index: Any) -> Any:
    """Returns a uint32 hash of each word and its index, also for NumPy arrays."""
    factor = index * np.uint32(0x9E3779B1)
    factor = (factor ^ (factor >> np.uint32(16))) * np.uint32(0x7FEB352D)
    mixed = words * (factor | np.uint32(1))
    return (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x846CA68B)


def gather_digests(digests: jax.Array) -> np.ndarray:
    """Returns the result of `make_digest` with the rows of all processes, which call it together."""
    mine = {shard.index[0].start or 0: np.asarray(shard.data).tobytes().hex() for shard in digests.addressable_shards}
    whole = np.zeros(digests.shape, np.uint32)
    for message in exchange(json.dumps(mine)):
        for device, row in json.loads(message).items():
            whole[int(device)] = np.frombuffer(bytes.fromhex(row), np.uint32)
    return whole


@dataclasses.dataclass(frozen=True)
class Difference:
    """Replicas of one part of an array whose digests differ.

    Attributes:
      array: index of the array. The probe comes after the last one.
      devices: places in the mesh of the devices in the minority, or of all `replicas` if no majority exists.
      replicas: places of all devices that hold this part.
    """

    array: int
    devices: tuple[int, ...]
    replicas: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The devices that hold the same part of an array: `groups[i]` has for each part of array i their places."""

    groups: Sequence[Sequence[tuple[int, ...]]]

    def differences(self, digests: np.ndarray) -> list[Difference]:
        """Returns the replicas that differ, from the digests of all devices. The probe is compared over all."""
        found = []
        for array, groups in enumerate([*self.groups, [tuple(range(len(digests)))]]):
            for group in groups:
                values, counts = np.unique(digests[list(group), array], return_counts=True)
                if len(values) > 1:
                    most = values[counts == counts.max()]
                    others = [place for place in group if len(most) > 1 or digests[place, array] != most[0]]
                    found.append(Difference(array, tuple(others), group))
        return found

    def whole(self, digests: np.ndarray) -> list[int]:
        """Returns the digest of every whole array: each part counts once."""
        first = [[group[0] for group in groups] for groups in self.groups]
        return [int(digests[places, array].sum(dtype=np.uint32)) for array, places in enumerate(first)]


def find_replicas(arrays: Any, mesh: Mesh) -> Replicas:
    """Returns which devices of a mesh hold the same parts of arrays, or of their shapes with shardings."""
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    known: dict[Any, list[tuple[int, ...]]] = {}  # arrays of the same sharding and shape have the same

    def groups_of(leaf: Any) -> list[tuple[int, ...]]:
        key = leaf.sharding, leaf.shape
        if key not in known:
            holders: dict[str, list[int]] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                holders.setdefault(str(index), []).append(places[device])
            known[key] = [tuple(sorted(group)) for group in holders.values()]
        return known[key]

    return Replicas([groups_of(leaf) for leaf in jax.tree.leaves(arrays)])


def adds_exactly(digests: np.ndarray) -> bool:
    """Returns whether the devices have summed the probe as integers are summed. All have the same sum."""
    expected = _hash(PROBE, np.arange(PROBE.size, dtype=np.uint32)).sum(dtype=np.uint32)
    return int(digests[0, -1]) == int(expected)
