"""Cuts the trace of a function into segments, for a checkpoint around each. They are the blocks of an unrolled model.

Segments lie between places that few bytes cross, as between the layers of a residual network, and none computes much
more than the others. Source: Chen et al., arXiv 1604.06174, with segments of equal length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jax.extend import core

from hlat_jax.passes.jaxpr import aval_bytes, inner_jaxprs, inner_trips, is_inexact, variables
from hlat_jax.passes.residuals import has_effects, opened_call

_LEAST_SHARE = 0.25  # of the bytes that a function computes, for its segments to be worth their checkpoints
_LITTLE = 0.1  # of the limit of a segment: less than this between two walls is in none
_EVEN = 0.001  # weight of evenness: it decides where as many bytes cross


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive equations of a jaxpr, with the fields of a jaxpr that an interpreter reads.

    Attributes:
      start: number of the first equation.
      stop: number after the last equation.
      eqns: the equations.
      invars: variables read from outside.
      outvars: variables read by later equations, or results of the jaxpr.
      kind: a key that segments of equal equations share, up to parameters that leave the shapes as they are.
      constvars: always empty.
    """

    start: int
    stop: int
    eqns: Sequence[core.JaxprEqn]
    invars: tuple[core.Var, ...]
    outvars: tuple[core.Var, ...]
    kind: tuple
    constvars: tuple[core.Var, ...] = ()


def cut(jaxpr: core.Jaxpr, limit: float) -> list[Segment]:
    """Returns the segments of the equations of a jaxpr, in order, without equations inside its calls.

    Equations that compute more than `limit` bytes, or have effects, are in no segment. A call has its own segments.
    """
    level = _Level(jaxpr)
    return [level.segment(start, stop) for start, stop in level.bounds(limit)]


def best_limit(jaxpr: core.Jaxpr) -> float:
    """Returns the most bytes that a segment of a function should compute.

    Twelve limits between 2 and 50 % of the function are tried. The best has the smallest sum of the bytes kept between
    segments and the bytes that the largest segment computes. A backward pass holds these at one time.
    """
    level = _Level(jaxpr)

    def num_bytes(limit: float) -> float:
        kept, most = level.bytes(limit)
        return kept + most

    return min(map(float, level.weights[-1] * np.geomspace(0.02, 0.5, 12)), key=num_bytes)


class _Level:
    """The equations of one jaxpr, without those inside its calls.

    Attributes:
      weights: bytes of floats that the equations before each compute.
      crossing: bytes that they compute, and that it or a later one reads.
    """

    def __init__(self, jaxpr: core.Jaxpr):
        self.eqns = jaxpr.eqns
        self.weights = np.cumsum([0.0, *map(_bytes, self.eqns)])
        self.last_read = {var: at for at, eqn in enumerate(self.eqns) for var in variables(eqn.invars)}
        self.last_read |= dict.fromkeys(variables(jaxpr.outvars), len(self.eqns))
        changes = np.zeros(len(self.eqns) + 2)
        for at, eqn in enumerate(self.eqns):
            for var in eqn.outvars:
                if var in self.last_read:
                    changes[at + 1] += aval_bytes(var.aval)
                    changes[self.last_read[var] + 1] -= aval_bytes(var.aval)
        self.crossing = np.cumsum(changes)[:-1]
        self.effects = np.array([has_effects(eqn) for eqn in self.eqns], bool)

    @functools.cached_property
    def opened(self) -> dict[int, _Level]:
        """Number of an equation -> the level inside it, for calls."""
        inner = {at: opened_call(eqn) for at, eqn in enumerate(self.eqns)}
        return {at: _Level(jaxpr) for at, jaxpr in inner.items() if jaxpr is not None}

    def walls(self, limit: float) -> list[int]:
        """Returns the numbers of the equations that are in no segment."""
        return [int(at) for at in np.flatnonzero(self.effects | (np.diff(self.weights) > limit))]

    def bounds(self, limit: float) -> Iterator[tuple[int, int]]:
        """Yields where each segment starts, and the number after its last equation."""
        walls = self.walls(limit)
        for low, high in zip([0, *(at + 1 for at in walls)], [*walls, len(self.eqns)], strict=True):
            if self.weights[high] - self.weights[low] >= _LITTLE * limit > 0:
                yield from itertools.pairwise(self._bounds(low, high, limit))

    def bytes(self, limit: float) -> tuple[float, float]:
        """Returns (bytes that are kept: they cross bounds or are in no segment, most that a segment computes)."""
        bounds = list(self.bounds(limit))
        kept = sum(self.crossing[stop] for _, stop in bounds)
        most = max((self.weights[stop] - self.weights[start] for start, stop in bounds), default=0.0)
        for at in self.walls(limit):
            computed = self.weights[at + 1] - self.weights[at]
            inner_kept, inner_most = self.opened[at].bytes(limit) if at in self.opened else (computed, 0.0)
            kept, most = kept + inner_kept, max(most, inner_most)
        return float(kept), float(most)

    def segment(self, start: int, stop: int) -> Segment:
        eqns = self.eqns[start:stop]
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
        outs = [var for eqn in eqns for var in eqn.outvars if self.last_read.get(var, -1) >= stop]
        ins = tuple(var for var in read if var not in made)
        return Segment(start, stop, eqns, ins, tuple(outs), tuple(map(_label, eqns)))

    def _bounds(self, low: int, high: int, limit: float) -> list[int]:
        """Returns the bounds of segments of a range that the fewest bytes cross, and of these the most even."""
        weights, crossing = self.weights[low : high + 1], self.crossing[low : high + 1]
        starts = np.searchsorted(weights, weights - limit)
        sums, before = np.zeros(len(weights)), [0] * len(weights)  # of the best segments up to an equation
        for stop in range(1, len(weights)):
            start = min(int(starts[stop]), stop - 1)
            costs = sums[start:stop] + _EVEN / limit * (weights[stop] - weights[start:stop]) ** 2
            before[stop] = start + int(np.argmin(costs))
            sums[stop] = costs[before[stop] - start] + crossing[stop]
        bounds = [high - low]
        while bounds[-1]:
            bounds.append(before[bounds[-1]])
        return [low + bound for bound in reversed(bounds)]


def computed_bytes(jaxpr: core.Jaxpr) -> float:
    """Returns the bytes of all float results of the equations of a jaxpr, inside calls and loops too."""
    return sum(_bytes(eqn) for eqn in jaxpr.eqns)


def is_worthwhile(segments: Sequence[Segment], jaxpr: core.Jaxpr) -> bool:
    """Returns whether segments of a function, at any level of its calls, hold enough of it."""
    covered = sum(_bytes(eqn) for segment in segments for eqn in segment.eqns)
    return covered >= _LEAST_SHARE * computed_bytes(jaxpr)


def _label(eqn: core.JaxprEqn) -> tuple:
    """Returns what makes an equation equal to another: primitive, shapes, the equations inside."""
    inside = tuple(tuple(map(_label, inner.eqns)) for inner in inner_jaxprs(eqn))
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    shapes = tuple((getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval))) for aval in avals)
    return eqn.primitive.name, shapes, inside, inner_trips(eqn) if inside else 1


def _bytes(eqn: core.JaxprEqn) -> float:
    inside = [computed_bytes(inner) for inner in inner_jaxprs(eqn)]
    if inside:
        return inner_trips(eqn) * sum(inside)
    return float(
        sum(aval_bytes(var.aval) for var in eqn.outvars if hasattr(var.aval, "dtype") and is_inexact(var.aval))
    )
