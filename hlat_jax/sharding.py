"""The device mesh, logical axes, and the rule tables between them.

Owns which logical axis lies on which mesh axis, for parameters, optimizer state, activations and batches. Refuses to
know the model: it sees arrays and the names of their axes. An axis name that no table knows raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.batch import Batch
from hlat_jax.config import ParallelConfig

MESH_AXES = ("pipe", "data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# Logical axis of a parameter -> mesh axis. Megatron column and row splits, vocabulary-parallel tables, and FSDP on
# the residual width. `layers` is stacked; `qkv`, `q_per_kv`, `head_dim` and `norm` are never split.
PARAM_RULES: dict[str, Any] = {
    "layers": "pipe",
    "vocab": "tensor",
    "embed": "fsdp",
    "kv_heads": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "qkv": None,
    "q_per_kv": None,
    "head_dim": None,
    "gate": None,
    "norm": None,
}
# ZeRO-1: optimizer state and master weights are also split over the replicas of the parameters.
ZERO1_RULES = PARAM_RULES | {"embed": ("fsdp", "data")}
ACTIVATION_RULES: dict[str, Any] = {
    "batch": ROWS,
    "seq": None,
    "seq_inner": None,
    "embed": None,
    "kv_heads": "tensor",
    "heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rule tables: everything that a step has to know about devices."""

    mesh: Any
    param_rules: dict[str, Any]
    state_rules: dict[str, Any]
    activation_rules: dict[str, Any]

    @property
    def platform(self) -> str:
        """The platform of the devices, such as `cpu`."""
        return self.mesh.devices.flat[0].platform

    @property
    def row_degree(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return int(np.prod([self.mesh.shape[axis] for axis in ROWS]))

    def param_sharding(self, axes: tuple) -> NamedSharding:
        """Returns where a parameter with these logical axes lies."""
        return NamedSharding(self.mesh, _spec(axes, self.param_rules))

    def state_sharding(self, axes: tuple) -> NamedSharding:
        """Returns where the moments and the master weights of a parameter with these logical axes lie."""
        return NamedSharding(self.mesh, _spec(axes, self.state_rules))

    def replicated(self) -> NamedSharding:
        """Returns the sharding of a value that every device holds whole."""
        return NamedSharding(self.mesh, P())

    def rows(self) -> NamedSharding:
        """Returns the sharding of batch fields [B, ...]."""
        return NamedSharding(self.mesh, P(ROWS))

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Returns `x` with its logical axes laid out by the activation rules; the identity on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, _spec(axes, self.activation_rules)))


def make_layout(parallel: ParallelConfig, devices: Sequence[Any]) -> Layout:
    """Returns the layout of a config's degrees over `devices`, outermost axis first.

    Raises:
      ValueError: degrees that do not multiply to the number of devices.
    """
    degrees = resolve_degrees(parallel, len(devices))
    # pipe is only a name so far: nothing is placed on it until the pipelined step exists.
    mesh = Mesh(np.asarray(devices).reshape(degrees), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    activation_rules = dict(ACTIVATION_RULES)
    if parallel.sequence_parallel:
        activation_rules["seq"] = "tensor"
    state_rules = ZERO1_RULES if parallel.zero1 else PARAM_RULES
    return Layout(mesh, PARAM_RULES, state_rules, activation_rules)


def resolve_degrees(parallel: ParallelConfig, num_devices: int) -> tuple[int, ...]:
    """Returns (pipe, data, fsdp, tensor) with -1 replaced by what remains of `num_devices`.

    Raises:
      ValueError: the product is not `num_devices`.
    """
    wanted = [getattr(parallel, axis) for axis in MESH_AXES]
    fixed = int(np.prod([d for d in wanted if d != -1]))
    degrees = tuple(num_devices // fixed if d == -1 else d for d in wanted)
    if int(np.prod(degrees)) != num_devices or 0 in degrees:
        named = ", ".join(f"parallel.{axis}={d}" for axis, d in zip(MESH_AXES, wanted, strict=True))
        raise ValueError(
            f"{named} need {'a multiple of ' if -1 in wanted else ''}{fixed} devices and there are {num_devices}; "
            "change a degree, or run on that many devices."
        )
    return degrees


def shard_batch(batch: Batch, layout: Layout) -> Batch:
    """Returns the global batch on devices from this process's rows (NumPy, [B / num_processes, T])."""
    sharding = layout.rows()
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)


def process_rows(layout: Layout, num_rows: int) -> list[int]:
    """Returns the rows of a batch of `num_rows` that this process must bring, in order; `shard_batch` takes them."""
    places = layout.rows().addressable_devices_indices_map((num_rows,)).values()
    return sorted({row for (rows,) in places for row in range(*rows.indices(num_rows))})


def gather_rows(values: np.ndarray, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """Returns int64[num_rows, n] of all processes from the int64[len(rows), n] of each, whose rows are `rows`.

    Every process calls it at the same point, with as many rows as the others.
    """
    if jax.process_count() == 1:
        return values
    # halves of 32 bits: JAX would cut 64
    halves = np.ascontiguousarray(values, np.int64).view(np.uint32)
    everywhere = multihost_utils.process_allgather((np.asarray(rows, np.int32), halves))
    whole = np.zeros((num_rows, values.shape[1]), np.int64)
    whole[np.asarray(everywhere[0]).reshape(-1)] = (
        np.ascontiguousarray(everywhere[1]).view(np.int64).reshape(-1, values.shape[1])
    )
    return whole


def _spec(axes: Sequence[str], rules: dict[str, Any]) -> P:
    unknown = [axis for axis in axes if axis not in rules]
    if unknown:
        raise ValueError(f"logical axes {unknown} have no rule; known: {', '.join(rules)}.")
    return P(*(rules[axis] for axis in axes))
