"""The programs of a run on virtual devices: on how many, what `lint` finds in them, and which findings are accepted."""

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
    ("init", "RNG01"): "runs once, before the first step; drawing from rbg keys of its own for every layer takes a "
    "split, which JAX does by Threefry whatever the key. Neuron lists it as incomplete, and others have compiled it; "
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU=1 draws weights on the host where the program has no collective; 70b's has",
    ("train", "CC02"): "the stages of this pipeline lie on different nodes, so their rings run over EFA; "
    "NEURON_COLLECTIVE_PERMUTE_TO_ALL_GATHER=1 replaces them if the runtime refuses",
}
EXPLAINED[("init", "DT06")] = "the counters of that split, below 2^32: their upper word is 0, also where it is cut off"
for _name in ("train", "eval"):
    EXPLAINED[(_name, "CG01")] = (
        "no page gives the limit for this number, and HLAT compiled layers of this size and degree "
        "of tensor parallelism; if the compiler refuses, see what to write instead"
    )
EXPLAINED[("eval", "CC02")] = EXPLAINED[("train", "CC02")]


def num_devices(config: Config) -> int:
    """Returns the devices of a config's mesh; an open one leaves each device one row at a time, or one query head."""
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
    """Returns the findings of one program, and for the training step also of its planned memory.

    Args:
      name: of the program, as `compilation.traced_programs` has it.
      traced: its trace.
      program: of the run, over the devices that it was traced for.
      target: as for `lint.check`.
      operators: as for `lint.check`.
    """
    found = lint.check_traced(traced, target=target, recurring=name != "init", operators=operators)
    if name != "train":
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
