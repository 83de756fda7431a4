"""Lint findings for the programs of a run on virtual devices, and the warnings accepted in shipped configs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hlat_jax import cost
from hlat_jax.byte_sizes import format_bytes
from hlat_jax.config import Config
from hlat_jax.neuron import lint
from hlat_jax.neuron.rules import RULES
from hlat_jax.parallel.sharding import MESH_AXES, Layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.memory import device_bytes
from hlat_jax.step import RunProgram

# Warnings accepted in shipped configs: (program, rule) -> reason.
EXPLAINED = {
    ("init", "RNG01"): "runs once, before the first step; drawing each layer with its own rbg key needs a split, which "
    "JAX does by Threefry for every kind of key. Neuron lists Threefry as incomplete, but others have compiled it; "
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU=1 draws the weights on the host if init has no collective (70b's has)",
}
EXPLAINED[("init", "DT06")] = "the counters of the split are below 2^32, so a cast to 32 bits drops only zeros"
for _name in ("microbatch", "eval"):
    EXPLAINED[(_name, "CG01")] = (
        "the limit on this number is not documented, and HLAT compiled layers of this size with this "
        "tensor parallelism; if compilation fails, follow the advice of the rule"
    )


def num_devices(config: Config) -> int:
    """Returns the number of devices of a config's mesh; for degrees of -1, one row or head per device."""
    pipe, data, fsdp, tensor = (getattr(config.parallel, axis) for axis in MESH_AXES)
    tensor = config.model.num_heads if tensor == -1 else tensor
    inner = max(pipe, 1) * tensor
    if -1 not in (data, fsdp):
        return inner * data * fsdp
    rows = config.data.batch_size // config.train.num_microbatches
    return inner * max(rows, data, fsdp)


def findings(
    name: str, traced: Any, *, program: RunProgram, target: str, operators: Collection[str]
) -> list[lint.Finding]:
    """Returns the findings for one program; for the training step, or its microbatch, also for its planned memory.

    Args:
      name: key of the program in `compilation.traced_programs`.
      traced: the traced program.
      program: the run's program, over the devices that it was traced for.
      target: as for `lint.check`.
      operators: as for `lint.check`.
    """
    found = lint.check_traced(traced, target=target, recurring=name != "init", operators=operators)
    if name not in ("train", "microbatch", "steady"):
        return found
    memory = device_bytes(program, jaxpr=live_jaxpr(traced))
    device = cost.DEVICES[target]
    budget = device.memory_bytes - device.reserved_bytes
    if memory.total <= budget:
        return found
    rule = RULES["MEM1"]
    what = f"planned {format_bytes(memory.total)} of a device's {format_bytes(budget)}"
    over = lint.Finding("MEM1", rule.severity, "func.func", what, "", (), 1, rule.why, rule.instead, rule.source)
    return [over, *(finding for finding in found if finding.rule != "MEM1")]


def layout_for_neuron(config: Config, count: int) -> Layout:
    """Returns the layout of a config over `count` virtual Neuron devices."""
    return planned_layout(config, count, platform="neuron")
