"""Converts the programs of a run to HLO modules for neuronx-cc, as one device of the mesh runs them.

The module of one device comes from XLA's SPMD partitioner. It runs on the program as lowered for Neuron, for virtual
CPU devices, in the subprocess `python -m hlat_jax.neuron.hlo` with a JSON object on stdin. The module has the dtypes of
the program, because XLA's CPU passes run later. Neuron's compiler and plugin are not used.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from hlat_jax.config import Config
from hlat_jax.neuron import hlo_proto
from hlat_jax.parallel.virtual_devices import fewer_replicas, planned_layout
from hlat_jax.resolve import resolve

_AFTER = "*after_spmd-partitioning*.pb"


def whole_module(lowered: Any) -> bytes:
    """Returns the serialized module of a lowered program before partitioning, with small ids."""
    from hlat_jax.host.jax_compat import hlo_module

    return hlo_proto.renumber(hlo_module(lowered))


def device_module(
    name: str, config: Config, num_devices: int, *, max_devices: int, target: str = ""
) -> tuple[bytes, dict[str, int]]:
    """Returns the serialized module of one device, with small ids, and the degrees of its mesh.

    Args:
      name: the key of the program in `compilation.traced_programs`.
      config: the config of the run.
      num_devices: the number of devices of the run.
      max_devices: the largest number of devices to partition for, by a lower data degree with equal rows per device.
      target: one of `rules.LINTED`, which chooses the implementations, or "" for any chip. Groups of cores are not
        checked, because no run has this mesh.

    Raises:
      ValueError: one replica needs more than 2,048 devices, or an implementation that the target does not have.
      RuntimeError: the partitioner failed. The message ends with its last output.
    """
    small, count = fewer_replicas(config, num_devices, max_devices=max_devices)
    if count == 1:  # nothing to partition
        lowered, degrees = _lower(name, small, count, target=target)
        return whole_module(lowered), degrees
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--xla_force_host_platform_device_count={count}", "--xla_backend_optimization_level=0"]
        flags += [f"--xla_dump_to={folder}", "--xla_dump_hlo_as_proto", "--xla_dump_hlo_pass_re=spmd-partitioning"]
        env = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
        words = [sys.executable, "-m", "hlat_jax.neuron.hlo"]
        task = json.dumps({"config": small.to_dict(), "num_devices": count, "program": name, "target": target})
        done = subprocess.run(words, input=task, env=env, capture_output=True, text=True, check=False)
        dumped = sorted(pathlib.Path(folder).glob(_AFTER))
        if not dumped:
            raise RuntimeError(f"partitioning {name} for {count} virtual devices failed: {done.stderr[-2000:]}")
        module = hlo_proto.renumber(hlo_proto.module_from_dump(dumped[-1].read_bytes()))
    return module, planned_layout(small, count, platform="neuron").degrees


def _lower(name: str, config: Config, num_devices: int, *, target: str) -> tuple[Any, dict[str, int]]:
    """Returns (program lowered for Neuron, degrees of its mesh)."""
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import traced_programs

    program = make_program(config, planned_layout(config, num_devices, platform="neuron", chip=target))
    return traced_programs(program)[name]().lower(lowering_platforms=("neuron",)), program.layout.degrees


def partition(name: str, config: Config, num_devices: int, *, target: str = "") -> None:
    """Compiles a program lowered for Neuron on this process's CPU devices, so that XLA dumps the partitioned module.

    Operations that a CPU cannot compile, such as Neuron kernels, fail only after the dump.
    """
    from hlat_jax.host.jax_compat import compile_for_local_devices

    lowered, _ = _lower(name, config, num_devices, target=target)
    compile_for_local_devices(lowered, num_devices)


if __name__ == "__main__":
    task = json.load(sys.stdin)
    partition(task["program"], resolve(task["config"]), task["num_devices"], target=task["target"])
