"""Reports the passes, collectives, bytes and compile time of a training program.

The report comes from the trace of the training step and from the step compiled for the devices of this process.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.passes.compile import TrainingProgram
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import Collective, traced_collectives


@dataclasses.dataclass(frozen=True)
class Report:
    """Summary of a compiled training program.

    Attributes:
      passes: the table of `TrainingProgram.report`.
      memory: the bytes of one device from XLA's `memory_analysis`.
      predicted_bytes: the temporaries that `liveness` estimates only from the trace.
    """

    passes: str
    collectives: tuple[Collective, ...]
    memory: Any
    predicted_bytes: int
    compile_s: float

    def __str__(self) -> str:
        lines = [self.passes]
        groups: dict[tuple, list[Collective]] = collections.defaultdict(list)
        for collective in self.collectives:
            groups[collective.kind, "*".join(collective.axes), place(collective)].append(collective)
        for (kind, axes, where), group in sorted(groups.items()):
            times, payload = sum(c.trips for c in group), sum(c.trips * c.payload_bytes for c in group)
            lines.append(f"collectives      {kind} over {axes}, {where}: {times} times, {payload:,} bytes")
        lines += [] if groups else ["collectives      none"]
        memory = self.memory
        lines.append(
            f"bytes            {memory.argument_size_in_bytes:,} of arguments, {memory.alias_size_in_bytes:,} of them "
            f"reused for results, {memory.temp_size_in_bytes:,} of temporaries, {self.predicted_bytes:,} predicted"
        )
        return "\n".join([*lines, f"compiled in      {self.compile_s:.1f} s"])


def report(program: TrainingProgram, state: Any, batch: Any) -> Report:
    """Compiles the step of a program, and returns its report.

    Args:
      program: the training program.
      state: the arrays of the state, or their shapes and shardings.
      batch: the arrays of the batch, or their shapes and shardings.
    """
    arguments, replica_sync = (state, batch, jnp.float32(0.0)), program.train_step.options.active_replica_sync
    traced = program.train_step.step.trace(*arguments)
    jaxpr = live_jaxpr(traced)
    began = time.monotonic()
    compiled = traced.lower().compile()
    seconds = time.monotonic() - began
    collectives = [] if replica_sync is None else traced_collectives(jaxpr, replica_sync.layout.mesh)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))

    shapes = jax.tree.map(shape, arguments)
    return Report(
        passes=dataclasses.replace(program, arguments=shapes).report(),
        collectives=tuple(collectives),
        memory=compiled.memory_analysis(),
        predicted_bytes=estimated_temporaries(jaxpr, shapes).total,
        compile_s=seconds,
    )


def place(collective: Collective) -> str:
    """Returns the place of a collective in a step, forward, backward or outside, and whether it is in a loop."""
    name = collective.op_name
    where = "backward" if "transpose(" in name else "forward" if "jvp(" in name else "outside"
    return where + (" loop" if collective.trips > 1 else "")
