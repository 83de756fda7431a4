"""ZeRO for parameters of any shape and nesting: which dim of each lies split over the devices, and at which stage.

    spread = spread_over(params, jax.devices(), stage=3)
    program = training_program(loss, optax.adam(1e-3), options=ProgramOptions(policy, spread=spread))

The loss function sees whole parameters and the rows of one device, and needs to know nothing of it. Our own model has
logical axes and splits finer than that; it does not come here.
Source of the stages: Rajbhandari et al., arXiv 1910.02054.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from hlat_jax.config import ParallelConfig
from hlat_jax.sharding import make_layout
from hlat_jax.spread import Spread

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
      ValueError: another stage, fewer bytes than none, or an empty tuple among the parameters.
    """
    if stage not in STAGES:
        raise ValueError(f"zero stage {stage!r} is not one of {', '.join(map(str, STAGES))}.")
    if bucket_bytes < 0:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be 0 (one collective an array) or more.")
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


def _axes(shape: tuple[int, ...], degree: int) -> tuple[str, ...]:
    chosen = next((dim for dim, size in enumerate(shape) if size and size % degree == 0), None)
    return tuple(_SPLIT if dim == chosen else _WHOLE for dim in range(len(shape)))


def _is_empty(tree: Any) -> bool:
    return isinstance(tree, tuple) and not tree
