"""The very step that trains, traced for devices that need not exist: what the rest of the planner reads.

Owns the devices of a plan and the trace. Nothing is compiled and no accelerator is asked: 8,192 devices take a second.
Shapes inside the region of `collectives.Spread` are those of one device, dtypes are those of the target.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.batch import abstract_batch
from hlat_jax.config import Config
from hlat_jax.sharding import Layout, make_layout
from hlat_jax.step import abstract_state, make_train_step


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """As much of a JAX device as a mesh asks for."""

    id: int
    platform: str
    device_kind: str = "planned"
    process_index: int = 0
    client: Any = None


def planned_layout(config: Config, num_devices: int, *, platform: str) -> Layout:
    """Returns the layout of a config over devices of a platform, which chooses implementations; none has to exist.

    Raises:
      ValueError: as `sharding.make_layout`.
    """
    devices = [PlannedDevice(number, platform) for number in range(num_devices)]
    return make_layout(config.parallel, devices, num_kv_heads=config.model.num_kv_heads)


def step_arguments(config: Config, layout: Layout) -> tuple[Any, Any, Any]:
    """Returns the shapes, dtypes and shardings of (state, batch, learning rate)."""
    with_segments = config.data.packing == "documents"
    batch = abstract_batch(config.data.batch_size, config.data.seq_len, with_segments=with_segments)
    rows = layout.rows()
    batch = jax.tree.map(lambda field: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=rows), batch)
    return abstract_state(config, layout), batch, jax.ShapeDtypeStruct((), jnp.float32)


def traced_step(config: Config, layout: Layout) -> Any:
    """Returns the trace of `make_train_step`: `.jaxpr` is closed, `.lower()` needs devices that exist."""
    return make_train_step(config, layout).trace(*step_arguments(config, layout))
