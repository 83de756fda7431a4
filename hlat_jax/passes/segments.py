"""Cuts the trace of a function into segments: the blocks that a Python loop over layers leaves in it.

Blocks are found by their products: a sequence of them, with the same shapes, that repeats, where each block reads what
the one before computes. Its boundaries lie where the fewest bytes cross them, as between the layers of a residual
network. What is left is cut by the scopes in name stacks, such as `block_3` of Flax and Haiku.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax.passes.jaxpr import aval_bytes, inner_jaxprs, inner_trips, is_inexact, variables
from hlat_jax.passes.products import PRODUCTS

# Segments must hold this share of the bytes that a function computes: fewer are parts of a layer, not its layers.
_LEAST_SHARE = 0.25
_NUMBER = re.compile(r"_?\d+")  # in the names of scopes
# A longer sequence of products is taken as the block only if its repeats hold this much more than those of a shorter.
_GAIN = 1.05


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
    """Returns the segments of the equations of a jaxpr, in order, without those inside its calls."""
    level = _Level(jaxpr)
    bounds = list(level.repeated_blocks())
    bounds += level.scoped_blocks(bounds)
    return [level.segment(start, stop) for start, stop in sorted(bounds)]


def computed_bytes(jaxpr: Any) -> float:
    """Returns the bytes of all float results of the equations of a jaxpr, of those inside calls and loops too."""
    return sum(_bytes(eqn) for eqn in jaxpr.eqns)


def is_worthwhile(segments: Sequence[Segment], jaxpr: Any) -> bool:
    """Returns whether segments of a function, at any level of its calls, hold enough of it to be its layers."""
    covered = sum(_bytes(eqn) for segment in segments for eqn in segment.eqns)
    return len(segments) > 1 and covered >= _LEAST_SHARE * computed_bytes(jaxpr)


class _Level:
    """The equations of one jaxpr."""

    def __init__(self, jaxpr: Any):
        self.jaxpr, self.eqns = jaxpr, jaxpr.eqns
        self.labels = [_label(eqn) for eqn in self.eqns]
        products = [tuple(_products(eqn)) for eqn in self.eqns]
        self.cores = [number for number, eqn_products in enumerate(products) if eqn_products]  # equations with products
        self.num_products = [len(eqn_products) for eqn_products in products]
        numbers: dict[tuple, int] = {}
        self.core_labels = np.array([numbers.setdefault(products[at], len(numbers)) for at in self.cores], int)
        self.weights = np.cumsum([0.0, *map(_bytes, self.eqns)])
        self.made_at = {var: at for at, eqn in enumerate(self.eqns) for var in eqn.outvars}
        self.last_read = {var: at for at, eqn in enumerate(self.eqns) for var in variables(eqn.invars)}
        self.last_read |= dict.fromkeys(variables(jaxpr.outvars), len(self.eqns))
        changes = np.zeros(len(self.eqns) + 2)
        for var, at in self.made_at.items():
            if var in self.last_read:
                changes[at + 1] += aval_bytes(var.aval)
                changes[self.last_read[var] + 1] -= aval_bytes(var.aval)
        self.crossing = np.cumsum(changes)  # bytes computed before each equation and read by it or later

    def segment(self, start: int, stop: int) -> Segment:
        eqns = self.eqns[start:stop]
        made = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
        outs = [var for eqn in eqns for var in eqn.outvars if self.last_read.get(var, -1) >= stop]
        return Segment(
            start, stop, eqns, tuple(v for v in read if v not in made), tuple(outs), tuple(self.labels[start:stop])
        )

    def repeated_blocks(self) -> Iterator[tuple[int, int]]:
        """Yields the bounds of blocks that repeat."""
        waiting = [(0, len(self.cores))]
        while waiting:
            low, high = waiting.pop()
            repeats = self._best(low, high)
            if repeats is not None:
                first, period, count, bounds = repeats
                yield from itertools.pairwise(bounds)
                waiting += [(low, first), (first + period * count, high)]

    def scoped_blocks(self, taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yields the bounds of blocks by their scopes, outside of the bounds that are taken."""
        paths = [tuple(str(eqn.source_info.name_stack).split("/")) for eqn in self.eqns]
        siblings: dict[tuple, set[str]] = {}
        for at in self.cores:
            for depth, name in enumerate(paths[at]):
                siblings.setdefault((paths[at][:depth], _NUMBER.sub("", name)), set()).add(name)
        blocks: list[tuple[tuple | None, list[int]]] = []
        for at in self.cores:
            if any(start <= at < stop for start, stop in taken):
                scope = None
            else:
                depths = (
                    d for d, name in enumerate(paths[at]) if len(siblings[paths[at][:d], _NUMBER.sub("", name)]) > 1
                )
                outermost = next(depths, None)
                scope = None if outermost is None else paths[at][: outermost + 1]
            if blocks and blocks[-1][0] == scope:
                blocks[-1][1].append(at)
            else:
                blocks.append((scope, [at]))
        free = set(range(len(self.eqns))).difference(*(range(*bounds) for bounds in taken))
        for number, (scope, cores) in enumerate(blocks):
            if scope is None or sum(self.num_products[at] for at in cores) < 2:
                continue
            low = blocks[number - 1][1][-1] + 1 if number else 0
            high = blocks[number + 1][1][0] if number + 1 < len(blocks) else len(self.eqns)
            inside = [at for at in range(low, high) if at in free and paths[at][: len(scope)] == scope]
            yield inside[0], inside[-1] + 1

    def _best(self, low: int, high: int) -> tuple[int, int, int, list[int]] | None:
        """Returns (first core, cores of a block, blocks, bounds) of the repeats with the most bytes in a range."""
        best, most = None, 0.0
        for period in range(1, (high - low) // 2 + 1):
            equal = self.core_labels[low : high - period] == self.core_labels[low + period : high]
            for start, length in _runs(equal):
                first, count = low + start, (length + period) // period
                held = self.weights[self.cores[first + length + period - 1] + 1] - self.weights[self.cores[first]]
                if count < 2 or held <= _GAIN * most:
                    continue
                shifted = range(first, first + (length + period) % period + 1)
                candidates = [(self._bounds(one, period, count), one) for one in shifted]
                chained = [(bounds, one) for bounds, one in candidates if self._is_chain(bounds)]
                if chained:
                    bounds, one = min(chained, key=lambda each: sum(self.crossing[at] for at in each[0]))
                    best, most = (one, period, count, bounds), held
        return best

    def _bounds(self, first: int, period: int, count: int) -> list[int]:
        """Returns the equations at which `count` blocks of `period` cores start, and the number after the last."""
        firsts = [self.cores[first + block * period] for block in range(count)]
        lasts = [self.cores[first + (block + 1) * period - 1] for block in range(count)]
        gaps = [(last + 1, start) for last, start in zip(lasts[:-1], firsts[1:], strict=True)]
        if len({tuple(self.labels[low:high]) for low, high in gaps}) == 1:
            shift = _last_least(np.sum([self.crossing[low : high + 1] for low, high in gaps], axis=0))
            inner = [low + shift for low, _ in gaps]
        else:
            inner = [low + _last_least(self.crossing[low : high + 1]) for low, high in gaps]
        lead, tail = firsts[1] - inner[0], inner[-1] - lasts[-2]
        low = self.cores[first - 1] + 1 if first else 0
        after = first + count * period
        high = self.cores[after] if after < len(self.cores) else len(self.eqns)
        start, stop = firsts[0] - lead, lasts[-1] + tail
        if start < low or self.labels[start : firsts[0]] != self.labels[inner[0] : firsts[1]]:
            start = max(low, start)
            start += int(np.argmin(self.crossing[start : firsts[0] + 1]))
        if stop > high or self.labels[lasts[-1] : stop] != self.labels[lasts[-2] : inner[-1]]:
            stop = lasts[-1] + 1 + _last_least(self.crossing[lasts[-1] + 1 : min(high, stop) + 1])
        return [start, *inner, stop]

    def _is_chain(self, bounds: Sequence[int]) -> bool:
        """Returns whether each block has a product that depends on what the block before it computes."""
        return all(map(self._follows, bounds, bounds[1:], bounds[2:]))

    def _follows(self, low: int, middle: int, high: int) -> bool:
        reached = {var for eqn in self.eqns[low:middle] for var in eqn.outvars}
        for at in range(middle, high):
            if not reached.isdisjoint(variables(self.eqns[at].invars)):
                if self.num_products[at]:
                    return True
                reached.update(self.eqns[at].outvars)
        return False


def _last_least(values: np.ndarray) -> int:
    return len(values) - 1 - int(np.argmin(values[::-1]))


def _runs(flags: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields (start, length) of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.r_[False, flags, False]))
    yield from ((int(start), int(stop - start)) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _shapes(eqn: Any) -> tuple:
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    return tuple((getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval))) for aval in avals)


def _label(eqn: Any) -> tuple:
    """Returns what makes an equation equal to another: primitive, shapes, the equations inside."""
    inside = tuple(tuple(map(_label, inner.eqns)) for inner in inner_jaxprs(eqn))
    return eqn.primitive.name, _shapes(eqn), inside, inner_trips(eqn) if inside else 1


def _products(eqn: Any) -> Iterator[tuple]:
    """Yields the primitive, shapes and executions of each product of an equation, of those inside it too."""
    if eqn.primitive.name in PRODUCTS:
        yield eqn.primitive.name, _shapes(eqn), 1
    trips = inner_trips(eqn)
    for inner in inner_jaxprs(eqn):
        yield from ((name, shapes, trips * times) for each in inner.eqns for name, shapes, times in _products(each))


def _bytes(eqn: Any) -> float:
    inside = [computed_bytes(inner) for inner in inner_jaxprs(eqn)]
    if inside:
        return inner_trips(eqn) * sum(inside)
    return float(
        sum(aval_bytes(var.aval) for var in eqn.outvars if hasattr(var.aval, "dtype") and is_inexact(var.aval))
    )
