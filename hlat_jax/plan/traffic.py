"""The collectives of a traced step, without compiling it: kind, axes, bytes and trips, at the dtypes of the target.

The collectives of forward, backward and ZeRO are written explicitly, inside `shard_map`, so the trace has all of them;
a partitioner adds only the scalars of the two global norms. `plan.collectives` reads the same rows from a compiled
program; tests compare the two.
"""

from __future__ import annotations

import math
from typing import Any

from hlat_jax.passes.jaxpr import COLLECTIVES, aval_bytes, equations
from hlat_jax.plan.collectives import Collective


def traced_collectives(jaxpr: Any, mesh: Any) -> list[Collective]:
    """Returns the collectives of a traced program between devices; `trips` are their executions in loops.

    Args:
      jaxpr: of the whole program, or of a part.
      mesh: its `shape` maps axes to sizes, outermost first.
    """
    found = (_collective(eqn, trips, mesh) for eqn, trips in equations(jaxpr) if eqn.primitive.name in COLLECTIVES)
    return [collective for collective in found if collective.axes]


def _collective(eqn: Any, trips: int, mesh: Any) -> Collective:
    kind = COLLECTIVES[eqn.primitive.name]
    named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    named = (named,) if isinstance(named, str) else named
    axes = tuple(axis for axis, size in mesh.shape.items() if axis in named and size > 1)
    avals = [var.aval for var in (eqn.outvars if kind == "all-gather" else eqn.invars)]
    return Collective(
        kind=kind,
        axes=axes,
        group_size=math.prod(mesh.shape[axis] for axis in axes),
        num_arrays=len(avals),
        payload_bytes=sum(map(aval_bytes, avals)),
        trips=trips,
        dtypes=tuple(sorted({str(aval.dtype) for aval in avals})),
        op_name=str(eqn.source_info.name_stack),
    )
