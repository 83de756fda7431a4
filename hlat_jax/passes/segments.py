"""Cuts the trace of a function into segments, for a checkpoint around each: the blocks of a function without a loop.

Segments lie between places that few bytes cross, as between the layers of a residual network, and compute about as much
each. Source: Chen et al., arXiv 1604.06174, whose segments are of equal length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hlat_jax.passes.jaxpr import aval_bytes, inner_jaxprs, inner_trips, is_inexact, variables

_LEAST_SHARE = 0.25  # of the bytes that a function computes, for its segments to be worth their checkpoints
_EVEN = 0.001  # of the bytes of segments as large as allowed: so small that it decides among bounds that are as good


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive equations of a jaxpr; has the fields of a jaxpr that an interpreter reads.

    Attributes:
      start: number of the first equation.
      stop: number after the last.
      eqns: the equations.
      invars: variables read from outside.
      outvars: variables read by later equations, or results of the jaxpr.
      kind: equal for segments whose equations are the same, up to parameters that leave the shapes as they are.
      constvars: none.
    """

    start: int
    stop: int
    eqns: Sequence[Any]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    kind: tuple
    constvars: tuple[Any, ...] = ()


def cut(jaxpr: Any) -> list[Segment]:
    """Returns the segments of the equations of a jaxpr, in order, without those inside its calls.

    There are none if one equation computes most: a loop, or a call, which may have segments.
    """
    weights = np.cumsum([0.0, *map(_bytes, jaxpr.eqns)])
    if np.diff(weights).max(initial=0.0) > weights[-1] / 2 or not weights[-1]:
        return []
    last_read = {var: at for at, eqn in enumerate(jaxpr.eqns) for var in variables(eqn.invars)}
    last_read |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
    crossing = _crossing(jaxpr, last_read)
    limits = weights[-1] * np.geomspace(0.02, 0.5, 12)
    _, bounds = min((_bounds(weights, crossing, limit) for limit in limits), key=lambda each: each[0])
    return [_segment(jaxpr.eqns[start:stop], start, stop, last_read) for start, stop in itertools.pairwise(bounds)]


def _segment(eqns: Sequence[Any], start: int, stop: int, last_read: dict[Any, int]) -> Segment:
    made = {var for eqn in eqns for var in eqn.outvars}
    read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
    outs = [var for eqn in eqns for var in eqn.outvars if last_read.get(var, -1) >= stop]
    return Segment(
        start, stop, eqns, tuple(var for var in read if var not in made), tuple(outs), tuple(map(_label, eqns))
    )


def computed_bytes(jaxpr: Any) -> float:
    """Returns the bytes of all float results of the equations of a jaxpr, of those inside calls and loops too."""
    return sum(_bytes(eqn) for eqn in jaxpr.eqns)


def is_worthwhile(segments: Sequence[Segment], jaxpr: Any) -> bool:
    """Returns whether segments of a function, at any level of its calls, hold enough of it."""
    covered = sum(_bytes(eqn) for segment in segments for eqn in segment.eqns)
    return covered >= _LEAST_SHARE * computed_bytes(jaxpr)


def _bounds(weights: np.ndarray, crossing: np.ndarray, limit: float) -> tuple[float, list[int]]:
    """Returns (bytes, bounds) of segments that compute at most `limit` bytes each, or are one equation.

    The bounds are those that the fewest bytes cross, and of these the most even. The bytes returned cross them or are
    computed by the largest segment: what is kept, and what a backward pass holds at one time.
    """
    starts = np.searchsorted(weights, weights - limit)
    sums, before = np.zeros(len(weights)), [0] * len(weights)  # of the best segments up to an equation
    for stop in range(1, len(weights)):
        start = min(int(starts[stop]), stop - 1)
        costs = sums[start:stop] + _EVEN / limit * (weights[stop] - weights[start:stop]) ** 2
        before[stop] = start + int(np.argmin(costs))
        sums[stop] = costs[before[stop] - start] + crossing[stop]
    bounds = [len(weights) - 1]
    while bounds[-1]:
        bounds.append(before[bounds[-1]])
    return sums[-1] - np.diff(weights[bounds]).min(), bounds[::-1]


def _crossing(jaxpr: Any, last_read: dict[Any, int]) -> np.ndarray:
    """Returns the bytes computed before each equation and read by it or later."""
    changes = np.zeros(len(jaxpr.eqns) + 2)
    for at, eqn in enumerate(jaxpr.eqns):
        for var in eqn.outvars:
            if var in last_read:
                changes[at + 1] += aval_bytes(var.aval)
                changes[last_read[var] + 1] -= aval_bytes(var.aval)
    return np.cumsum(changes)[:-1]


def _label(eqn: Any) -> tuple:
    """Returns what makes an equation equal to another: primitive, shapes, the equations inside."""
    inside = tuple(tuple(map(_label, inner.eqns)) for inner in inner_jaxprs(eqn))
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    shapes = tuple((getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval))) for aval in avals)
    return eqn.primitive.name, shapes, inside, inner_trips(eqn) if inside else 1


def _bytes(eqn: Any) -> float:
    inside = [computed_bytes(inner) for inner in inner_jaxprs(eqn)]
    if inside:
        return inner_trips(eqn) * sum(inside)
    return float(
        sum(aval_bytes(var.aval) for var in eqn.outvars if hasattr(var.aval, "dtype") and is_inexact(var.aval))
    )
