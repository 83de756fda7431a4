"""ZeRO for parameters of any shape and nesting, which shards one dim of each array over the devices.

    step = train_step(loss, optax.adam(1e-3), options=StepOptions(policy, zero=3), params=params)

The loss function takes unsharded parameters and the rows of one device. The decoder of `hlat_jax.model` has logical
axes and finer shardings, and does not use this.
Source of the stages: Rajbhandari et al., arXiv 1910.02054.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.config import ParallelConfig
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.sharding import make_layout

STAGES = (0, 1, 2, 3)
_SHARDED, _REPLICATED = "sharded", "replicated"


def make_replica_sync(params: Any, devices: Sequence[Any], *, stage: int, bucket_bytes: int = 0) -> ReplicaSync:
    """Returns the shardings and collectives of a program with these parameters, the rows of a batch split over devices.

    An array is sharded in its first dim that the number of devices divides, and otherwise replicated.

    Args:
      params: arrays or their shapes.
      devices: all devices, the nearest next to each other.
      stage: the ZeRO stage. Stage 0 shards nothing, and 1 optimizer state and master weights. Stage 2 also shards the
        sums of gradients over microbatches. Stage 3 also shards parameters, and gathers them for each pass.
      bucket_bytes: bytes on a device up to which arrays share a collective. 0 gives each array its own collective.

    Raises:
      ValueError: another stage, no devices, negative bytes, or parameters that are not floating-point arrays or
        include an empty tuple.
    """
    check_stage(stage, devices, bucket_bytes=bucket_bytes)
    check_params(params)
    if any(map(_is_empty, jax.tree.leaves(params, is_leaf=_is_empty))):
        raise ValueError("params has an empty tuple, which here means the axes of a scalar. Leave it out or use None.")
    degree, mesh_axis = len(devices), "fsdp" if stage == 3 else "data"
    layout = make_layout(ParallelConfig(**({"data": 1, "fsdp": -1} if stage == 3 else {})), devices)
    sharded, replicated = {_SHARDED: (mesh_axis,), _REPLICATED: ()}, {_SHARDED: (), _REPLICATED: ()}
    layout = dataclasses.replace(
        layout,
        param_rules=sharded if stage == 3 else replicated,
        state_rules=sharded if stage else replicated,
        partial_gradients={},
        reduce_gradients="microbatch" if stage == 2 else "step",
        bucket_bytes=bucket_bytes,
    )
    return ReplicaSync(layout, jax.tree.map(lambda leaf: _axes(leaf.shape, degree), params), gathers=True)


def check_stage(stage: Any, devices: Any, *, bucket_bytes: Any) -> None:
    """Raises ValueError for arguments that `make_replica_sync` does not accept. `devices` may be None here."""
    if not _is_int(stage) or stage not in STAGES:
        raise ValueError(f"zero stage {stage!r} is not one of {', '.join(map(str, STAGES))}.")
    if devices is not None and not (
        isinstance(devices, Sequence) and devices and all(isinstance(device, jax.Device) for device in devices)
    ):
        raise ValueError(
            f"devices={devices!r} must be a list of one or more devices. Give jax.devices() or some of them."
        )
    if not _is_int(bucket_bytes) or bucket_bytes < 0:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} must be 0 (one collective an array) or more.")


def check_params(params: Any) -> None:
    """Raises ValueError for a leaf that cannot be trained, which is no array or shape, or not floating-point.

    It refuses a module of Flax NNX too, because tied weights and the updates of batch statistics would be lost.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_untrained):
        name = f"params{jax.tree_util.keystr(path)}"
        if _is_untrained(leaf):
            raise ValueError(
                f"{name} is a {type(leaf).__name__} of Flax NNX, but params must be arrays. Split the model, and begin "
                "the loss function with nnx.merge(graph, params, rest, copy=True), see docs/passes.md:\n"
                "  graph, params, rest = nnx.split(model, nnx.Param, ...)"
            )
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{name} is a {type(leaf).__name__}. Give an array, or a jax.ShapeDtypeStruct.")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {leaf.dtype}, but only floating-point arrays have gradients. Take it out, and bind it to "
                "the loss function with functools.partial."
            )


def _is_untrained(leaf: Any) -> bool:
    """Returns whether a leaf is a module of Flax NNX, or one of its variables that layers update themselves."""
    names = {base.__name__ for base in type(leaf).__mro__ if base.__module__.startswith("flax.nnx.")}
    return not names.isdisjoint(("Module", "BatchStat", "Cache", "RngState"))


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _axes(shape: tuple[int, ...], degree: int) -> tuple[str, ...]:
    chosen = next((dim for dim, size in enumerate(shape) if size and size % degree == 0), None)
    return tuple(_SHARDED if dim == chosen else _REPLICATED for dim in range(len(shape)))


def _is_empty(tree: Any) -> bool:
    return isinstance(tree, tuple) and not tree
