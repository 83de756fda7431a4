"""Checks that a config fits the memory of this machine, before anything is compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hlat_jax.config import Config, count_text
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.precision import POLICIES
from hlat_jax.program import RunProgram, make_program, state_bytes
from hlat_jax.run import costs


def fitting_program(config: Config, devices: Sequence[jax.Device]) -> RunProgram:
    """Returns the program of the config over `devices`, after checks of memory and batch size.

    Raises:
      ValueError: memory is too small, degrees do not fit the devices, or the batch does not divide.
    """
    memory = sum(device_memory(device) for device in devices)
    params = costs.num_params(config.model)
    gradients = params * jnp.dtype(POLICIES[config.precision.policy].accumulate).itemsize
    state = costs.policy_state_bytes(config.model, config.precision.policy, optimizer=config.optimizer.name)
    needed = state + gradients
    degrees = ", ".join(f"{axis}={getattr(config.parallel, axis)}" for axis in MESH_AXES)
    counted = count_text(len(devices), f"{devices[0].device_kind} device")
    has = f"this machine has {counted} with {format_bytes(memory)} in all"
    if needed > memory:
        raise ValueError(
            f"config {config.name}: {params:,} parameters need {format_bytes(needed)} for state and gradients before "
            f"any activation (precision.policy={config.precision.policy}, parallel {degrees}), and {has}. "
            "Use a smaller config or more devices."
        )
    program = make_program(config, layout_over(config, devices))
    per_device = state_bytes(program.abstract_state)
    if per_device > device_memory(devices[0]):
        raise ValueError(
            f"config {config.name}: the fullest device would hold {format_bytes(per_device)} of state (parallel "
            f"{degrees}), and {has}. Raise parallel.tensor or parallel.fsdp, or set parallel.zero1=True."
        )
    return program


def device_memory(device: jax.Device) -> int:
    """Returns the memory of a device in bytes from the backend or `facts.hardware`, else a share of host memory."""
    if device.process_index != jax.process_index():  # another node's: only its own process can read the statistics
        device = jax.local_devices(backend=device.platform)[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    row = hardware.device(device.device_kind)
    if row is not None:
        return row.memory_bytes
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
