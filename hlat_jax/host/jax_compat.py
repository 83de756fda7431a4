"""Imports private or undocumented parts of JAX, as the only module."""

from __future__ import annotations

import io
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax._src.core import get_axis_env
from jax._src.distributed import global_state
from jax.extend import backend
from jax.interpreters import ad, batching, mlir, partial_eval

__all__ = [
    "CACHE_HIT_EVENT",
    "TESTED_VERSIONS",
    "ad",
    "batching",
    "bound_axes",
    "compile_for_local_devices",
    "global_state",
    "hlo_module",
    "lower_with_sharding_in_types",
    "mlir",
    "pallas_gpu_attention",
    "partial_eval",
]
TESTED_VERSIONS = ("0.9.0.1", "0.10.0", "0.10.2")
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"  # recorded for each program read from the persistent cache

try:
    from jax.extend.mlir import lower_with_sharding_in_types
except ImportError:  # JAX 0.9: a lowering rule cannot set the sharding that explicit mesh axes give a type

    def lower_with_sharding_in_types(ctx, op, aval):
        return op


def bound_axes() -> list[tuple[Any, int]]:
    """Returns (name, size) of each axis that collectives can name here, under `jax.vmap` or `jax.shard_map`."""
    return list(get_axis_env().axis_sizes.items())


def pallas_gpu_attention() -> ModuleType:
    """Returns JAX's Pallas attention module for GPUs, for its `_mha_forward` and `_mha_backward`.

    Imported on the first call, since the import takes a second.
    """
    from jax.experimental.pallas.ops.gpu import attention

    return attention


def hlo_module(lowered: Any) -> bytes:
    """Returns the serialized HLO module of a lowered program, before partitioning."""
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def compile_for_local_devices(lowered: Any, num_partitions: int) -> None:
    """Compiles a lowered program on this process's devices, even if it was lowered for another platform."""
    module = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(file=module)
    devices = jax.devices()
    options = backend.get_compile_options(
        num_replicas=1, num_partitions=num_partitions, device_assignment=np.arange(num_partitions)[None]
    )
    devices[0].client.compile_and_load(module.getvalue(), tuple(devices), options)
