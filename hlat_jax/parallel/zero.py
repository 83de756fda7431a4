"""ZeRO for parameters of any shape and nesting: which dim of each lies split over the devices, and at which stage.

    program = training_program(loss, optax.adam(1e-3), options=ProgramOptions(policy, zero=3), params=params)

The loss function sees whole parameters and the rows of one device, and needs to know nothing of it. Our own model has
logical axes and splits finer than that; it does not come here.
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
from hlat_jax.parallel.replica_sync import Spread
from hlat_jax.parallel.sharding import make_layout

STAGES = (0, 1, 2, 3)
_SPLIT, _WHOLE = "split", "whole"


def spread_over(params: Any, devices: Sequence[Any], *, stage: int, bucket_bytes: int = 0) -> Spread:
    """Returns how a program with these parameters lies on devices that share the rows of each batch.

    An array is split in its first dim that the number of devices divides; one without such a dim is held whole by all.

    Args:
      params: arrays or their shapes.
      devices: all of them, the nearest next to each other.
      stage: 0: everything on every device; 1: optimizer state and master weights split; 2: gradients too, while those
        of microbatches are summed; 3: parameters too, gathered for the loss and again for its backward pass.
      bucket_bytes: arrays share collectives of up to so many bytes on a device; 0: one each.

    Raises:
      ValueError: another stage, no devices, fewer bytes than none, or parameters that are no floating-point arrays or
        have an empty tuple among them.
    """
    check_stage(stage, devices, bucket_bytes=bucket_bytes)
    check_params(params)
    if any(map(_is_empty, jax.tree.leaves(params, is_leaf=_is_empty))):
        raise ValueError(
            "params has an empty tuple, which stands for the axes of a scalar here; leave it out or use None."
        )
    degree, place = len(devices), "fsdp" if stage == 3 else "data"
    layout = make_layout(ParallelConfig(**({"data": 1, "fsdp": -1} if stage == 3 else {})), devices)
    split, nowhere = {_SPLIT: (place,), _WHOLE: ()}, {_SPLIT: (), _WHOLE: ()}
    layout = dataclasses.replace(
        layout,
        param_rules=split if stage == 3 else nowhere,
        state_rules=split if stage else nowhere,
        partial_gradients={},
        reduce_gradients="microbatch" if stage == 2 else "step",
        bucket_bytes=bucket_bytes,
    )
    return Spread(layout, jax.tree.map(lambda leaf: _axes(leaf.shape, degree), params), gathers=True)


def check_stage(stage: Any, devices: Any, *, bucket_bytes: Any) -> None:
    """Raises ValueError for what `spread_over` does not take; `devices` may be None here."""
    if not _is_int(stage) or stage not in STAGES:
        raise ValueError(f"zero stage {stage!r} is not one of {', '.join(map(str, STAGES))}.")
    if devices is not None and not (
        isinstance(devices, Sequence) and devices and all(isinstance(device, jax.Device) for device in devices)
    ):
        raise ValueError(
            f"devices={devices!r} must be a list of one or more devices of JAX: give jax.devices(), or a part."
        )
    if not _is_int(bucket_bytes) or bucket_bytes < 0:
        raise ValueError(f"bucket_bytes={bucket_bytes!r} must be 0 (one collective an array) or more.")


def check_params(params: Any) -> None:
    """Raises ValueError for a leaf that cannot be trained: no array and no shape, or of another dtype than floats."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{name} is a {type(leaf).__name__}: give an array, or a jax.ShapeDtypeStruct of one.")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"{name} is {leaf.dtype}: there are gradients of floating-point arrays alone. Take it out, and bind it "
                "to the loss function with functools.partial."
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _axes(shape: tuple[int, ...], degree: int) -> tuple[str, ...]:
    chosen = next((dim for dim, size in enumerate(shape) if size and size % degree == 0), None)
    return tuple(_SPLIT if dim == chosen else _WHOLE for dim in range(len(shape)))


def _is_empty(tree: Any) -> bool:
    return isinstance(tree, tuple) and not tree
