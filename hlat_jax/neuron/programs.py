"""Lint findings for the programs of a run on virtual devices, and the warnings accepted in shipped configs."""

from __future__ import annotations

import os
from typing import Any

from hlat_jax.config import Config
from hlat_jax.facts import compiler_limits, hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.core_groups import server_for
from hlat_jax.neuron import lint
from hlat_jax.neuron.rules import RULES
from hlat_jax.parallel.degrees import are_degrees_valid
from hlat_jax.parallel.sharding import MESH_AXES, Layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.instructions import estimate_instructions
from hlat_jax.plan.memory import device_bytes
from hlat_jax.program import RunProgram

# Warnings accepted in shipped configs: (program, rule) -> reason.
EXPLAINED = {
    (name, "CC05"): "the recipe's groups are listed on trn1; on trn2 take degrees of 4, 16 or 64 in a node, as "
    "llama3_8b does"
    for name in ("update", "eval", "prefill", "decode")
}
for _name in ("prefill", "decode"):
    EXPLAINED[(_name, "DG01")] = (
        "the head is stored [V, D], as the embedding that it may share; one row of logits is computed for samples "
        "only, and by arithmetic reading the matrix takes longer than transposing it: on trn1 2 bytes at 410 GB/s, and "
        "256 FLOPs at 95 TFLOP/s, for each element"
    )


def num_devices(config: Config, *, target: str = "") -> int:
    """Returns the number of devices of a config's mesh, for degrees of -1 with one row or head per device.

    With a target, degrees of -1 become smaller until its groups of cores allow them.
    """
    pipe, data, fsdp, context, tensor = (getattr(config.parallel, axis) for axis in MESH_AXES)
    is_free = -1 in (pipe, data, fsdp, context, tensor)
    inner = max(pipe, 1) * max(context, 1) * (config.model.num_heads if tensor == -1 else tensor)
    rows = config.data.batch_size // max(1, config.train.num_microbatches)
    most = inner * (max(rows, data, fsdp) if -1 in (data, fsdp) else data * fsdp)
    if not target or not is_free:
        return most
    allowed = (n for n in range(most, 0, -1) if are_degrees_valid(config, n, server=server_for(target, n)))
    return next(allowed, most)


def findings(name: str, traced: Any, *, program: RunProgram, target: str) -> list[lint.Finding]:
    """Returns the findings for one of `compilation.traced_programs`, by its name and its trace.

    Findings for the training step, or for its microbatch, include the planned memory.
    """
    flags = f"{program.config.train.compiler_flags} {os.environ.get('NEURON_CC_FLAGS', '')}"
    options = {"compiler_flags": flags, "placement": [device.id for device in program.layout.mesh.devices.flat]}
    hits = lint.check_traced(traced, target=target, **options)
    if name == "eval":  # its loops are kept, see `Instructions.count_for_limit`
        count = estimate_instructions(live_jaxpr(traced), num_shards=1).count_for_limit(name)
        most = compiler_limits.program_limit(flags)
        hits = [finding for finding in hits if finding.rule != "CG01" or compiler_limits.may_exceed(count, most)]
    if name not in ("train", "microbatch", "steady"):
        return hits
    memory = device_bytes(program, jaxpr=live_jaxpr(traced))
    budget = hardware.DEVICES[target].program_bytes
    if memory.total <= budget:
        return hits
    rule = RULES["MEM1"]
    detail = f"planned {format_bytes(memory.total)} of a device's {format_bytes(budget)}"
    over = lint.Finding("MEM1", rule.severity, "func.func", detail, "", 1, rule.why, rule.instead, rule.source)
    return [over, *(finding for finding in hits if finding.rule != "MEM1")]


def layout_for_neuron(config: Config, count: int, *, target: str = "") -> Layout:
    """Returns the layout of a config over `count` virtual Neuron devices, placed as the target needs."""
    server = server_for(target, count) if target else None
    return planned_layout(config, count, platform="neuron", server=server, chip=target)
