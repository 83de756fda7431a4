"""Report of a training program: products after each pass, kernels, collectives, bytes, compile time.

It is read from the trace of the training step and from the step compiled for the devices of this process.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
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
class Bytes:
    """Bytes on one device.

    Attributes:
      arguments: state and batch.
      reused: those of them that results overwrite: the donated state.
      temporaries: as the compiler allocates them.
      predicted: temporaries, as `liveness` estimates them from the trace alone.
    """

    arguments: int
    reused: int
    temporaries: int
    predicted: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Summary of a compiled training program.

    Attributes:
      stages: the step after each pass, in order.
      rewrite: what was replaced in the loss function, and what was not; None without that pass.
      plan: of rematerialization; None without a memory budget.
      collectives: those between replicas.
      bytes: see `Bytes`.
      compile_s: seconds that lowering and compiling took.
    """

    stages: tuple[CompileStage, ...]
    rewrite: RewriteReport | None
    plan: RematPlan | None
    collectives: tuple[Collective, ...]
    bytes: Bytes
    compile_s: float

    def __str__(self) -> str:
        lines = [f"after {stage.name:<10} products {_listed(stage.products)}" for stage in self.stages]
        if self.rewrite is not None:
            lines += [f"rewrite          {line}" for line in str(self.rewrite).splitlines()]
        if self.plan is not None:
            lines += [f"remat            {line}" for line in self.plan.report().splitlines()]
        lines += [f"collectives      {line}" for line in _placed(self.collectives)] or ["collectives      none"]
        held = self.bytes
        lines.append(
            f"bytes            {held.arguments:,} of arguments, {held.reused:,} of them reused for results; "
            f"{held.temporaries:,} of temporaries, {held.predicted:,} predicted"
        )
        return "\n".join([*lines, f"compiled in      {self.compile_s:.1f} s"])


def report(program: TrainingProgram, state: Any, batch: Any) -> Report:
    """Returns the report of a program; compiles its step.

    Args:
      program: program that `passes.compile.training_program` returned.
      state: arrays, or their shapes and shardings.
      batch: likewise.
    """
    arguments, replica_sync = (state, batch, jnp.float32(0.0)), program.train_step.options.active_replica_sync
    traces = {name: step.step.trace(*arguments) for name, step in program.steps.items()}
    jaxprs = {name: live_jaxpr(traced) for name, traced in traces.items()}
    stages = tuple(CompileStage(name=name, jaxpr=jaxpr, products=_products(jaxpr)) for name, jaxpr in jaxprs.items())
    began = time.monotonic()
    compiled = traces[stages[-1].name].lower().compile()
    seconds = time.monotonic() - began
    memory = compiled.memory_analysis()
    collectives = [] if replica_sync is None else traced_collectives(stages[-1].jaxpr, replica_sync.layout.mesh)
    held = Bytes(
        arguments=memory.argument_size_in_bytes,
        reused=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        predicted=estimated_temporaries(stages[-1].jaxpr, jax.tree.map(_shape, arguments)).total,
    )
    return Report(
        stages=stages,
        rewrite=None if program.rewritten is None else program.rewritten.report(),
        plan=program.plan,
        collectives=tuple(collectives),
        bytes=held,
        compile_s=seconds,
    )


def place(collective: Collective) -> str:
    """Returns the place of a collective in a step: forward, backward or outside, and whether in a loop."""
    name = collective.op_name
    where = "backward" if "transpose(" in name else "forward" if "jvp(" in name else "outside"
    return where + (" loop" if collective.trips > 1 else "")


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _products(jaxpr: Any) -> dict[str, int]:
    found: collections.Counter = collections.Counter()
    for eqn, trips in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            found[" x ".join(sorted({str(var.aval.dtype) for var in eqn.invars[:2]}))] += trips
    return dict(found)


def _placed(found: Iterable[Collective]) -> list[str]:
    groups: dict[tuple, list[Collective]] = collections.defaultdict(list)
    for collective in found:
        groups[collective.kind, "*".join(collective.axes), place(collective)].append(collective)
    return [
        f"{kind} over {axes}, {where}: {sum(c.trips for c in group)} times, "
        f"{sum(c.trips * c.payload_bytes for c in group):,} bytes"
        for (kind, axes, where), group in sorted(groups.items())
    ]


def _listed(products: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {dtypes}" for dtypes, count in sorted(products.items())) or "none"
