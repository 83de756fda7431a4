"""The collectives of a traced step: kind, axes, bytes, trips, at the dtypes of the target and with nothing compiled.

Every collective of forward, backward and ZeRO is written in `parallel.collectives`, so the trace has it all; what a
partitioner adds outside that region are the scalars of the two global norms. The rows are those of `plan.collectives`,
which reads the same from a compiled program: tests compare the two.
"""

from __future__ import annotations

import math
from typing import Any

from hlat_jax.passes.jaxpr import equations
from hlat_jax.plan.collectives import Collective

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def traced_collectives(jaxpr: Any, mesh: Any) -> list[Collective]:
    """Returns the collectives of a traced program, loops unfolded into `trips`.

    Args:
      jaxpr: of the whole program, or of a part.
      mesh: its `shape` maps axes to sizes, outermost first.
    """
    found = (_collective(eqn, trips, mesh) for eqn, trips in equations(jaxpr) if eqn.primitive.name in _KINDS)
    return [collective for collective in found if collective.axes]


def _collective(eqn: Any, trips: int, mesh: Any) -> Collective:
    kind = _KINDS[eqn.primitive.name]
    named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    named = (named,) if isinstance(named, str) else named
    axes = tuple(axis for axis, size in mesh.shape.items() if axis in named and size > 1)
    avals = [var.aval for var in (eqn.outvars if kind == "all-gather" else eqn.invars)]
    return Collective(
        kind=kind,
        axes=axes,
        group_size=math.prod(mesh.shape[axis] for axis in axes),
        num_arrays=len(avals),
        payload_bytes=sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals),
        trips=trips,
        dtypes=tuple(sorted({str(aval.dtype) for aval in avals})),
        op_name=str(eqn.source_info.name_stack),
    )
