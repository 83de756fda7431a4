"""Report of a training program: products after each pass, kernels, collectives, bytes, compile time.

It is read from the trace of the training step and from the step compiled for the devices of this process.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.passes.compile import TrainingProgram
from hlat_jax.passes.jaxpr import equations
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.products import PRODUCTS, live_jaxpr
from hlat_jax.passes.remat import RematPlan
from hlat_jax.passes.rewrite import RewriteReport
from hlat_jax.plan.collectives import Collective, traced_collectives


@dataclasses.dataclass(frozen=True)
class CompileStage:
    """The training step after one pass.

    Attributes:
      name: of the pass; "loss" before any of them.
      jaxpr: of the step, without equations whose results nothing reads.
      products: dtypes of the operands -> number of matrix products in them that one step executes.
    """

    name: str
    jaxpr: Any
    products: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Report:
    """Summary of a compiled training program.

    Attributes:
      stages: the step after each pass, in order.
      rewrite: what was replaced in the loss function, and what was not; None without that pass.
      plan: plan of rematerialization; None without a memory budget.
      collectives: collectives between replicas.
      memory: bytes of one device, as XLA's `memory_analysis` has them.
      predicted_bytes: temporaries, as `liveness` estimates them from the trace alone.
      compile_s: seconds that lowering and compiling took.
    """

    stages: tuple[CompileStage, ...]
    rewrite: RewriteReport | None
    plan: RematPlan | None
    collectives: tuple[Collective, ...]
    memory: Any
    predicted_bytes: int
    compile_s: float

    def __str__(self) -> str:
        lines = []
        for stage in self.stages:
            products = ", ".join(f"{count} in {dtypes}" for dtypes, count in sorted(stage.products.items())) or "none"
            lines.append(f"after {stage.name:<10} products {products}")
        if self.rewrite is not None:
            lines += [f"rewrite          {line}" for line in str(self.rewrite).splitlines()]
        if self.plan is not None:
            lines += [f"remat            {line}" for line in self.plan.report().splitlines()]
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
            f"reused for results; {memory.temp_size_in_bytes:,} of temporaries, {self.predicted_bytes:,} predicted"
        )
        return "\n".join([*lines, f"compiled in      {self.compile_s:.1f} s"])


def report(program: TrainingProgram, state: Any, batch: Any) -> Report:
    """Returns the report of a program; compiles its step.

    Args:
      program: program that `passes.compile.training_program` returned.
      state: arrays, or their shapes and shardings.
      batch: arrays, or their shapes and shardings.
    """
    arguments, replica_sync = (state, batch, jnp.float32(0.0)), program.train_step.options.active_replica_sync
    traces = {name: step.step.trace(*arguments) for name, step in program.steps.items()}
    jaxprs = {name: live_jaxpr(traced) for name, traced in traces.items()}
    stages = tuple(CompileStage(name=name, jaxpr=jaxpr, products=_products(jaxpr)) for name, jaxpr in jaxprs.items())
    began = time.monotonic()
    compiled = traces[stages[-1].name].lower().compile()
    seconds = time.monotonic() - began
    collectives = [] if replica_sync is None else traced_collectives(stages[-1].jaxpr, replica_sync.layout.mesh)

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))

    return Report(
        stages=stages,
        rewrite=None if program.rewritten is None else program.rewritten.report(),
        plan=program.plan,
        collectives=tuple(collectives),
        memory=compiled.memory_analysis(),
        predicted_bytes=estimated_temporaries(stages[-1].jaxpr, jax.tree.map(shape, arguments)).total,
        compile_s=seconds,
    )


def place(collective: Collective) -> str:
    """Returns the place of a collective in a step: forward, backward or outside, and whether in a loop."""
    name = collective.op_name
    where = "backward" if "transpose(" in name else "forward" if "jvp(" in name else "outside"
    return where + (" loop" if collective.trips > 1 else "")


def _products(jaxpr: Any) -> dict[str, int]:
    found: collections.Counter = collections.Counter()
    for eqn, trips in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            found[" x ".join(sorted({str(var.aval.dtype) for var in eqn.invars[:2]}))] += trips
    return dict(found)
