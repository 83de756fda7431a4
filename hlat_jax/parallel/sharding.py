"""The device mesh, and rule tables that map logical axes of parameters, gradients and optimizer state to mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ParallelConfig, count_text

MESH_AXES = ("pipe", "data", "fsdp", "context", "tensor")
# `tensor` is two axes of the mesh: KV heads are split over the second, and replicated over the first when there are
# more tensor-parallel devices than KV heads. The copies of a KV head are then far apart, as Neuron's groups of 4 on
# trn1 are: with TP 32 and 8 KV heads cores 0, 8, 16 and 24, and not four neighbors, see `facts.core_groups`.
TENSOR = ("tensor_rep", "tensor_kv")
ROWS = ("data", "fsdp")
CONTEXT = ("context",)  # an axis of the mesh only where it is above 1
TOKENS = (*ROWS, *CONTEXT)  # mesh axes over which devices have other tokens

# Logical axis of a parameter -> mesh axes. Megatron column and row splits, embedding table and head also split over
# pipeline stages, and FSDP on the residual width. `kv_embed` is the width of a KV matrix of its own.
PARAM_RULES: dict[str, tuple[str, ...]] = {
    "layers": ("pipe",),
    "vocab": ("pipe", *TENSOR),
    "embed": ("fsdp",),
    "kv_embed": ("fsdp",),
    "kv_heads": ("tensor_kv",),
    "q_per_kv": ("tensor_rep",),
    "heads": ("tensor_kv", "tensor_rep"),  # query heads of one KV head are neighbors in the parameter
    "mlp": TENSOR,
    "qkv": (),
    "head_dim": (),
    "gate": (),
    "norm": (),
}
# ZeRO-1: optimizer state and master weights are also split over the replicas of the parameters.
ZERO1_RULES = PARAM_RULES | {"embed": ("fsdp", "data"), "kv_embed": ("fsdp", "data", "tensor_rep")}
# Mesh axes over which a gradient is a partial sum, beside ROWS and CONTEXT and unless they split the parameter: what
# devices share of the parameters of heads serves the heads that each has of its own, and under sequence parallelism a
# norm has a part of the sequence.
PARTIAL_GRADIENTS: dict[str, tuple[str, ...]] = {"head_dim": TENSOR}
SEQUENCE_PARTIAL_GRADIENTS = PARTIAL_GRADIENTS | {"norm": TENSOR}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rule tables.

    Attributes:
      mesh: mesh of devices, or abstract, with axes pipe, data, fsdp, context if it is split, tensor_rep, tensor_kv.
      param_rules: logical axis -> mesh axes, for the parameters that the forward pass reads.
      state_rules: logical axis -> mesh axes, for optimizer state and master weights.
      partial_gradients: logical axis -> mesh axes over which gradients are partial sums, on top of ROWS and CONTEXT.
      sequence_parallel: whether activations between blocks are split over `tensor` along the sequence.
      reduce_gradients: time of the sum of gradients over replicas, "step" or "microbatch".
      pipe_exchange: collective by which pipeline stages exchange values, "permute" or "all_gather".
      bucket_bytes: bytes on a device up to which gradients or parameters share a collective. 0 gives each array its own
        collective.
    """

    mesh: Any
    param_rules: dict[str, tuple[str, ...]]
    state_rules: dict[str, tuple[str, ...]]
    partial_gradients: dict[str, tuple[str, ...]]
    sequence_parallel: bool = False
    reduce_gradients: str = "step"
    bucket_bytes: int = 0
    pipe_exchange: str = "permute"

    @property
    def platform(self) -> str:
        """The platform of the devices, such as `cpu`, or of the default backend for an abstract mesh."""
        return jax.default_backend() if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0].platform

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of MESH_AXES, as in `config.parallel`."""
        return {axis: self.size(TENSOR if axis == "tensor" else (axis,)) for axis in MESH_AXES}

    @property
    def row_degree(self) -> int:
        """The number of parts that the rows of a batch are split into."""
        return self.size(ROWS)

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """The logical axes that fsdp splits. Every matrix has one of them."""
        return tuple(axis for axis, mesh_axes in self.param_rules.items() if "fsdp" in mesh_axes)

    def size(self, axes: Sequence[str]) -> int:
        """Returns the product of the sizes of mesh axes."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in axes)

    def wide(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the mesh axes that are larger than 1."""
        return tuple(axis for axis in axes if self.mesh.shape.get(axis, 1) > 1)

    def vocab_rows(self, vocab_size: int) -> int:
        """Returns the number of rows of the embedding table and the head, padded for equal parts."""
        parts = self.size(self.param_rules["vocab"])
        return -(-vocab_size // parts) * parts

    def state_shape(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[int, ...]:
        """Returns the shape of the state of a parameter, with the dim that replicas split padded to whole parts."""
        dim, split = self.state_split(axes)
        if not split:
            return shape
        parts = self.size(self.state_rules[axes[dim]])
        return (*shape[:dim], -(-shape[dim] // parts) * parts, *shape[dim + 1 :])

    def state_split(self, axes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Returns the dim and the mesh axes along which the state of a parameter is split and the parameter is not."""
        for dim, axis in enumerate(axes):
            more = self.wide(self.state_rules[axis][len(self.param_rules[axis]) :])
            if more:
                return dim, more
        return 0, ()

    def reduction(self, axes: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], int]:
        """Returns the reduction ((mesh axes, mesh axes), dim) of a gradient with these logical axes.

        The gradient is reduce-scattered over the first mesh axes in `dim`, then summed over the second.
        """
        dim, scattered = self.state_split(axes)
        done = {*scattered, *(mesh_axis for axis in axes for mesh_axis in self.param_rules[axis])}
        summed = {*TOKENS, *(mesh_axis for axis in axes for mesh_axis in self.partial_gradients.get(axis, ()))} - done
        return (scattered, tuple(axis for axis in self.wide((*TOKENS, *TENSOR)) if axis in summed)), dim

    def param_sharding(self, axes: tuple) -> NamedSharding:
        """Returns the sharding of a parameter with these logical axes."""
        return NamedSharding(self.mesh, spec(axes, self.param_rules))

    def state_sharding(self, axes: tuple) -> NamedSharding:
        """Returns the sharding of the moments and the master weights of a parameter with these logical axes."""
        return NamedSharding(self.mesh, spec(axes, self.state_rules))

    def replicated_sharding(self) -> NamedSharding:
        """Returns the sharding of a replicated value."""
        return NamedSharding(self.mesh, P())

    def rows(self) -> NamedSharding:
        """Returns the sharding of values of rows, [B]."""
        return NamedSharding(self.mesh, P(ROWS))

    @property
    def batch_spec(self) -> P:
        """The partition spec of batch fields, [B, ...], or [B, T] if the sequence is split."""
        return P(ROWS, *self.wide(CONTEXT))


def make_layout(parallel: ParallelConfig, devices: Sequence[Any], *, num_kv_heads: int | None = None) -> Layout:
    """Returns the layout of a config's degrees over `devices`, outermost axis first.

    Args:
      parallel: the degrees.
      devices: all devices, the nearest next to each other.
      num_kv_heads: the KV heads of the model, which a larger `parallel.tensor` replicates. The default is
        `parallel.tensor`.

    Raises:
      ValueError: degrees that do not multiply to the number of devices.
    """
    shape = _mesh_shape(parallel, len(devices), num_kv_heads)
    places = np.asarray(devices).reshape(tuple(shape.values()))
    return _with_rules(Mesh(places, tuple(shape), axis_types=(AxisType.Auto,) * len(shape)), parallel)


def abstract_layout(parallel: ParallelConfig, num_devices: int, *, num_kv_heads: int | None = None) -> Layout:
    """Returns `make_layout` over an abstract mesh, which has shapes and shardings but no devices."""
    shape = _mesh_shape(parallel, num_devices, num_kv_heads)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return _with_rules(mesh, parallel)


def _mesh_shape(parallel: ParallelConfig, num_devices: int, num_kv_heads: int | None) -> dict[str, int]:
    shape = dict(zip(MESH_AXES, resolve_degrees(parallel, num_devices), strict=True))
    tensor = shape.pop("tensor")
    tensor_kv = tensor if num_kv_heads is None else min(tensor, num_kv_heads)
    if shape["context"] == 1:  # the programs of runs that do not split it do not name it
        del shape["context"]
    return shape | {"tensor_rep": tensor // tensor_kv, "tensor_kv": tensor_kv}


def _with_rules(mesh: Any, parallel: ParallelConfig) -> Layout:
    state_rules = ZERO1_RULES if parallel.zero1 else PARAM_RULES
    if parallel.zero1 and "context" in mesh.shape:
        state_rules = state_rules | {axis: (*state_rules[axis], *CONTEXT) for axis in ("embed", "kv_embed")}
    return Layout(
        mesh,
        param_rules=PARAM_RULES,
        state_rules=state_rules,
        partial_gradients=SEQUENCE_PARTIAL_GRADIENTS if parallel.sequence_parallel else PARTIAL_GRADIENTS,
        sequence_parallel=parallel.sequence_parallel,
        reduce_gradients=parallel.reduce_gradients,
        bucket_bytes=parallel.bucket_bytes,
        pipe_exchange=parallel.pipe_exchange,
    )


def resolve_degrees(parallel: ParallelConfig, num_devices: int) -> tuple[int, ...]:
    """Returns (pipe, data, fsdp, context, tensor) with -1 replaced by the degree that remains for `num_devices`.

    Raises:
      ValueError: the product is not `num_devices`.
    """
    wanted = [getattr(parallel, axis) for axis in MESH_AXES]
    fixed = math.prod(d for d in wanted if d != -1)
    degrees = tuple(num_devices // fixed if d == -1 else d for d in wanted)
    if math.prod(degrees) != num_devices:
        named = ", ".join(f"parallel.{axis}={d}" for axis, d in zip(MESH_AXES, wanted, strict=True))
        many = f"{'a multiple of ' if -1 in wanted else ''}{count_text(fixed, 'device')}"
        raise ValueError(f"{named} need {many}, not {num_devices}. Use {many}, or change a degree.")
    return degrees


def spec(axes: Sequence[str], rules: Mapping[str, str | tuple[str, ...] | None]) -> P:
    """Returns the partition spec of an array with these logical axes. Raises ValueError if an axis has no rule."""
    unknown = [axis for axis in axes if axis not in rules]
    if unknown:
        raise ValueError(f"logical axes {unknown} have no rule. Use {', '.join(rules)}.")
    return P(*(rules[axis] or None for axis in axes))
