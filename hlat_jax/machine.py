"""What this machine has, against what a config needs: said before anything is compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax import cost
from hlat_jax.config import Config
from hlat_jax.precision import POLICIES
from hlat_jax.sharding import MESH_AXES, TENSOR, Layout, make_layout
from hlat_jax.step import abstract_state, state_bytes


def fitting_layout(config: Config, devices: Sequence[Any]) -> Layout:
    """Returns the layout of the config over `devices`, on which its state and gradients fit and its batch divides.

    Raises:
      ValueError: too little memory, degrees that do not fit the devices, or a batch that does not divide.
    """
    memory = sum(device_memory(device) for device in devices)
    params = cost.num_params(config.model)
    gradients = params * jnp.dtype(POLICIES[config.precision.policy].accumulate).itemsize
    needed = cost.state_bytes(config.model, config.precision.policy) + gradients
    degrees = ", ".join(f"{axis}={getattr(config.parallel, axis)}" for axis in MESH_AXES)
    has = f"this machine has {len(devices)} {devices[0].device_kind} device(s) with {_gib(memory)} in all"
    if needed > memory:
        raise ValueError(
            f"config {config.name}: {params:,} parameters need {_gib(needed)} for state and gradients before any "
            f"activation (precision.policy={config.precision.policy}, parallel {degrees}), and {has}. "
            "Take a smaller config, or more devices."
        )
    layout = make_layout(config.parallel, devices, num_kv_heads=config.model.num_kv_heads)
    _check_divides(config, layout)
    per_device = state_bytes(abstract_state(config, layout))
    if per_device > device_memory(devices[0]):
        raise ValueError(
            f"config {config.name}: the fullest device would hold {_gib(per_device)} of state (parallel {degrees}), "
            f"and {has}. Raise parallel.tensor or parallel.fsdp, or set parallel.zero1=True."
        )
    rows = config.data.batch_size // config.train.num_microbatches
    if rows % layout.row_degree:
        raise ValueError(
            f"data.batch_size={config.data.batch_size} in train.num_microbatches={config.train.num_microbatches} "
            f"leaves {rows} rows, which {layout.row_degree} data-parallel devices do not divide; make data.batch_size "
            f"a multiple of {layout.row_degree * config.train.num_microbatches}."
        )
    return layout


def _check_divides(config: Config, layout: Layout) -> None:
    model = config.model
    sizes = {
        "layers": ("model.num_layers", model.num_layers),
        "vocab": ("model.vocab_size", model.vocab_size),
        "embed": ("model.embed_dim", model.embed_dim),
        "kv_heads": ("model.num_kv_heads", model.num_kv_heads),
        "heads": ("model.num_heads", model.num_heads),
        "mlp": ("model.mlp_dim", model.mlp_dim),
    }
    if not model.fuse_qkv:
        sizes["kv_embed"] = sizes["embed"]
    for axis, (path, size) in sizes.items():
        _check_divisor(path, size, layout, layout.state_rules[axis])
    if layout.sequence_parallel:
        _check_divisor("data.seq_len", config.data.seq_len, layout, TENSOR)
    if layout.wide(("tensor_rep",)) and model.fuse_qkv:
        raise ValueError(
            f"parallel.tensor={layout.degrees['tensor']} above model.num_kv_heads={model.num_kv_heads} copies KV "
            "heads, which takes a KV matrix of its own: set model.fuse_qkv=False, or lower parallel.tensor to at most "
            f"{model.num_kv_heads}."
        )


def _check_divisor(path: str, size: int, layout: Layout, places: Sequence[str]) -> None:
    degree = layout.size(places)
    if size % degree:
        degrees = layout.degrees
        axes = dict.fromkeys("tensor" if place in TENSOR else place for place in places)
        named = " x ".join(f"parallel.{axis}={degrees[axis]}" for axis in axes if degrees[axis] > 1)
        near = min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - degree))
        raise ValueError(
            f"{path}={size} does not divide by {named}; change one of them: {near} is the nearest number of parts."
        )


def device_memory(device: Any) -> int:
    """Returns the bytes one device may use, by the backend, the table, or this host's memory over its devices."""
    if device.process_index != jax.process_index():  # another node's: it tells only its own process; all are alike
        device = jax.local_devices(backend=device.platform)[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    row = cost.device(device.device_kind)
    if row is not None:
        return row.memory_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / cost.GIB:,.1f} GiB"
