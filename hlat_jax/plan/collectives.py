"""Finds kind, mesh axes, bytes and executions of the collectives of a traced program without compiling it.

The collectives of forward, backward and ZeRO are written explicitly inside `shard_map`. So the trace has all of them,
at the target's dtypes. A partitioner adds only the scalars of two global norms. Tests compare compiled programs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from hlat_jax.passes.jaxpr import COLLECTIVES, aval_bytes, inner_jaxprs, inner_trips

KINDS = tuple(dict.fromkeys(COLLECTIVES.values()))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes along which the devices of a group differ, outermost first, or () if no data leaves a device.
      payload_bytes: the bytes of the full arrays on one device, in one execution. They are the operand of a reduction
        or a scatter, the result of a gather, or the exchanged or sent arrays.
      trips: the executions in one run of the program, the product of the trip counts of the loops around it.
      num_arrays: the number of arrays. Compilers merge small collectives.
      op_name: the names of the transformations and functions that it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    trips: int = 1
    num_arrays: int = 1
    op_name: str = ""

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends in one execution, by the bus factor of the kind."""
        return self.payload_bytes * bus_factor(self.kind, self.group_size)


@dataclasses.dataclass(frozen=True)
class Count:
    """Sums over all executions of the collectives of one kind and one set of axes, on one device."""

    executions: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0


def count_collectives(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], Count]:
    """Returns sums by (kind, axes) of collectives that leave a device, sorted by both."""
    groups = collections.defaultdict(list)
    for collective in collectives:
        if collective.axes:
            groups[collective.kind, collective.axes].append(collective)
    return {
        key: Count(
            executions=sum(c.trips for c in members),
            payload_bytes=sum(c.payload_bytes * c.trips for c in members),
            wire_bytes=sum(c.wire_bytes * c.trips for c in members),
        )
        for key, members in sorted(groups.items())
    }


def bus_factor(kind: str, group_size: int) -> float:
    """Returns the share of the payload that each of `group_size` devices sends.

    It is 2(r - 1)/r for all-reduce, and (r - 1)/r for gather, scatter and exchange. Source: AWS's `nccom-test`.
    """
    if kind == "collective-permute":
        return 1.0
    once = (group_size - 1) / group_size
    return 2 * once if kind == "all-reduce" else once


def traced_collectives(jaxpr: Any, mesh: Any) -> list[Collective]:
    """Returns the collectives of a traced program, or of a part of one, that leave a device of the mesh."""
    return [collective for collective in _collectives(jaxpr, mesh, 1, "") if collective.axes]


def _collectives(jaxpr: Any, mesh: Any, trips: int, outer: str) -> Iterator[Collective]:
    """Yields the collectives of a jaxpr that runs `trips` times, with names in `outer` around it."""
    for eqn in jaxpr.eqns:
        names = f"{outer}/{eqn.source_info.name_stack}"
        for inner in inner_jaxprs(eqn):
            yield from _collectives(inner, mesh, trips * inner_trips(eqn), names)
        kind = COLLECTIVES.get(eqn.primitive.name)
        if kind is None:
            continue
        named = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
        named = (named,) if isinstance(named, str) else named
        axes = tuple(axis for axis, size in mesh.shape.items() if axis in named and size > 1)
        variables = eqn.outvars if kind == "all-gather" else eqn.invars
        yield Collective(
            kind=kind,
            axes=axes,
            group_size=math.prod(mesh.shape[axis] for axis in axes),
            payload_bytes=sum(aval_bytes(var.aval) for var in variables),
            trips=trips,
            num_arrays=len(variables),
            op_name=names,
        )
