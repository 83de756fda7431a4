"""Large intermediates of any loss and any attention, computed in chunks: a matcher that knows no op.

From the largest intermediate, such as logits or scores, it walks outward while one dimension stays independent: every
index along it is computed alike, from the same index of the operands (`passes.independence`). That region becomes a
loop over chunks of the dimension under `jax.checkpoint`, so that one chunk is all that is held, in the backward pass
too. What is reduced over the dimension, such as a mean or the maximum of a softmax over it, is accumulated in fp32, in
the order of the chunks; what depends on it is computed by another loop, which computes its chunks again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.passes.independence import SUM, Link, bind_part, links
from hlat_jax.passes.jaxpr import aval_bytes, place_of
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal, is_literal

ShapeOf = Callable[[Any], Sequence[int]]
MAX_BYTES = 32 * 2**20
_LEAST_GAIN = 2.0  # the largest intermediate must be so many times what a region reads and returns in chunks
_REDUCED = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_and": jnp.all, "reduce_or": jnp.any}


class Mixed(ValueError):
    """Along this dimension indices are mixed, or no rule says how they are computed."""


def matches(graph: EquationGraph, *, max_bytes: int = MAX_BYTES) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each intermediate of more than `max_bytes`, the largest first."""
    taken: set[int] = set()
    tried: set[Any] = set()
    large = [var for eqn in graph.eqns for var in eqn.outvars if aval_bytes(var.aval) > max_bytes]
    for seed in sorted(large, key=lambda var: aval_bytes(var.aval), reverse=True):
        eqn = graph.producer(seed)
        if seed in tried or id(eqn) in taken or graph.is_constant(seed) or not graph.readers(seed):
            continue
        regions, reasons = [], []
        for dim in range(seed.aval.ndim):
            try:
                regions.append(_Region(graph, seed, dim, max_bytes=max_bytes, taken=taken))
            except Mixed as why:
                reasons.append(str(why))
        if not regions:
            tried.add(seed)
            yield Refusal("chunk", graph.source(eqn), f"{seed.aval.str_short()}: {'; '.join(dict.fromkeys(reasons))}")
            continue
        region = min(regions, key=lambda region: (region.num_levels, region.part_bytes, len(region.eqns)))
        taken |= {id(eqn) for eqn in region.eqns}
        yield region.match()


class _Region:
    """Equations around a large value that are computed in chunks of one dimension.

    Attributes:
      eqns: the equations, in order.
      dims: variable -> its dimension that is cut into `num_parts`, of what differs from chunk to chunk.
      reductions: variable -> how it is reduced over the chunks; "" of what is computed from reduced values alone.
      links: id of an equation -> its link; None of an equation of reduced values alone.
      outputs: variables that others read.
      level: id of an equation -> how many reductions over the chunks come before it.
    """

    def __init__(self, graph: EquationGraph, seed: Any, dim: int, *, max_bytes: int, taken: set[int]):
        self.graph, self.seed = graph, seed
        size, num_bytes = seed.aval.shape[dim], aval_bytes(seed.aval)
        needed = -(-num_bytes // max_bytes)
        self.num_parts = next((parts for parts in range(min(needed, size), size + 1) if size % parts == 0), 1)
        if self.num_parts < 2:
            raise Mixed(f"dimension {dim} has one index")
        self.part_bytes = num_bytes // self.num_parts
        self.dims: dict[Any, int] = {seed: dim}
        self.reductions: dict[Any, str] = {}
        self._small = max_bytes // 4
        self.links: dict[int, Link | None] = {}
        self._grow(graph.producer(seed), taken)
        self.eqns = [eqn for eqn in graph.eqns if id(eqn) in self.links]
        self.outputs = self._outputs()
        self.level = self._levels()
        self._require_gain()

    @property
    def num_levels(self) -> int:
        """The number of loops."""
        return max(self.level.values()) + 1

    def match(self) -> Match:
        """Returns the region as what `rewrite` replaces."""
        number = {id(eqn): at for at, eqn in enumerate(self.eqns)}
        inputs = [atom for eqn in self.eqns for atom in eqn.invars if not is_literal(atom)]
        inputs = [var for var in dict.fromkeys(inputs) if id(self.graph.producer(var)) not in number]

        def replacement_at(shape_of: ShapeOf) -> Callable[..., list[Any]]:
            size = shape_of(self.seed)[self.dims[self.seed]]
            num_parts = self.num_parts if size == self.seed.aval.shape[self.dims[self.seed]] else 2
            loops = _Loops(self, shape_of, num_parts)
            return lambda choose, *values: loops.compute(dict(zip(inputs, values, strict=True)))

        again = f", in {self.num_levels} loops" if self.num_levels > 1 else ""
        return Match(
            op="chunk",
            eqns=self.eqns,
            inputs=inputs,
            outputs=self.outputs,
            replacement=replacement_at(_real_shape),
            source=self.graph.source(self.graph.producer(self.seed)),
            facts=f"{self.seed.aval.str_short()} in {self.num_parts} parts of dimension {self.dims[self.seed]}{again}",
            resized=replacement_at,
        )

    def _grow(self, first: Any, taken: set[int]) -> None:
        waiting = [first]
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in self.links:
                if id(eqn) in taken:
                    raise Mixed("it is computed in other chunks")
                self._add(eqn)
                waiting += self._neighbors(eqn)
            if not waiting:
                waiting += self._between()

    def _add(self, eqn: Any) -> None:
        """Adds an equation by the link that the dimensions known so far name, and sets those of its other variables."""
        link = next((one for one in links(eqn) if self._agrees(eqn, one)), None)
        if link is None or eqn.effects:
            raise Mixed(f"{eqn.primitive.name} at {self.graph.source(eqn)} mixes it, or has no rule")
        self.links[id(eqn)] = link
        for atom, dim in (*zip(eqn.invars, link.operands, strict=True), *zip(eqn.outvars, link.results, strict=True)):
            if dim is not None and not is_literal(atom):
                if atom.aval.shape[dim] % self.num_parts:
                    raise Mixed(f"{self.num_parts} parts do not divide {atom.aval.str_short()}")
                if self.dims.setdefault(atom, dim) != dim:
                    raise Mixed(f"{eqn.primitive.name} at {self.graph.source(eqn)} takes it along two dimensions")
        for atom, dim in zip(eqn.invars, link.operands, strict=True):
            if dim is None and not is_literal(atom) and atom in self.dims:
                raise Mixed(f"{eqn.primitive.name} at {self.graph.source(eqn)} takes all of it at each index")
        if link.reduction:
            self.reductions |= dict.fromkeys(eqn.outvars, link.reduction)

    def _agrees(self, eqn: Any, link: Link) -> bool:
        at_results = [
            self.dims[var] == dim for var, dim in zip(eqn.outvars, link.results, strict=True) if var in self.dims
        ]
        if at_results:
            return all(at_results)
        operands = zip(eqn.invars, link.operands, strict=True)
        return any(self.dims[atom] == dim for atom, dim in operands if not is_literal(atom) and atom in self.dims)

    def _neighbors(self, eqn: Any) -> list[Any]:
        """Returns the equations that compute large operands, or take none, and those that read large results."""
        found = []
        for atom in eqn.invars:
            source = None if is_literal(atom) or atom not in self.dims else self.graph.producer(atom)
            is_made_here = source is not None and (aval_bytes(atom.aval) > self._small or not source.invars)
            if is_made_here and any(self._agrees(source, link) for link in links(source)):
                found.append(source)
        for var in eqn.outvars:
            if var in self.dims and aval_bytes(var.aval) > self._small:
                if self.graph.is_output(var):
                    raise Mixed("it is a result of the function")
                found += self.graph.readers(var)
        return found

    def _between(self) -> list[Any]:
        """Returns equations that depend on the region and that it depends on; adds those of reduced values alone."""
        eqns = self.graph.eqns
        inside = [at for at, eqn in enumerate(eqns) if id(eqn) in self.links]
        first, last = inside[0], inside[-1]
        after: set[Any] = set()  # variables that depend on the region
        dependent = []
        for eqn in eqns[first : last + 1]:
            if id(eqn) in self.links or any(not is_literal(atom) and atom in after for atom in eqn.invars):
                after |= set(eqn.outvars)
                dependent.append(eqn)
        needed: set[Any] = set()
        between = []
        for eqn in reversed(dependent):
            if id(eqn) in self.links or needed & set(eqn.outvars):
                needed |= {atom for atom in eqn.invars if not is_literal(atom)}
                between += [eqn] if id(eqn) not in self.links else []
        for eqn in reversed(between):
            atoms = [atom for atom in eqn.invars if not is_literal(atom)]
            if any(atom in self.dims for atom in atoms):
                return [eqn]
            self.links[id(eqn)] = None
            self.reductions |= dict.fromkeys(eqn.outvars, "")
        return []

    def _levels(self) -> dict[int, int]:
        level: dict[Any, int] = {}
        of_eqn = {}
        for eqn in self.eqns:
            now = max((level.get(atom, 0) for atom in eqn.invars if not is_literal(atom)), default=0)
            of_eqn[id(eqn)] = now
            level |= dict.fromkeys(eqn.outvars, now + bool(self.reductions.get(eqn.outvars[0])))
        return of_eqn

    def _outputs(self) -> list[Any]:
        inside = {id(eqn) for eqn in self.eqns}

        def is_read(var: Any) -> bool:
            return self.graph.is_output(var) or any(id(eqn) not in inside for eqn in self.graph.readers(var))

        return [var for eqn in self.eqns for var in eqn.outvars if is_read(var)]

    def _require_gain(self) -> None:
        inside = {id(eqn) for eqn in self.eqns}
        read = {atom for eqn in self.eqns for atom in eqn.invars if not is_literal(atom) and atom in self.dims}
        ends = [var for var in read if id(self.graph.producer(var)) not in inside]
        ends += [var for var in self.outputs if var in self.dims]
        kept = sum(aval_bytes(var.aval) for var in ends)
        if aval_bytes(self.seed.aval) < _LEAST_GAIN * kept:
            raise Mixed("chunks would keep about as many bytes")


@dataclasses.dataclass(frozen=True)
class _Loops:
    """A region as loops over chunks, at the shapes of the program or at smaller ones.

    Attributes:
      region: what is computed.
      shape_of: shape of a variable.
      num_parts: number of chunks.
    """

    region: _Region
    shape_of: ShapeOf
    num_parts: int

    def compute(self, env: dict[Any, Any]) -> list[Any]:
        """Returns the values of the outputs from those of the inputs, which `env` has."""
        region, outputs = self.region, self.region.outputs
        for level in range(region.num_levels + 1):
            goals = []
            for eqn in region.eqns:
                if region.level[id(eqn)] != level:
                    continue
                if region.links[id(eqn)] is None:
                    self._compute(env, eqn)
                goals += [v for v in eqn.outvars if region.reductions.get(v) or (v in region.dims and v in outputs)]
            if goals:
                self._loop(env, goals)
        return [env[var] for var in outputs]

    def _compute(self, env: dict[Any, Any], eqn: Any, number: Any = None, parts: int = 1) -> None:
        """Adds the results of an equation; of chunk `number` of `parts`, if it is one of several."""
        region, shapes = self.region, []
        for var in eqn.outvars:
            shape, dim = list(self.shape_of(var)), region.dims.get(var)
            if dim is not None:
                shape[dim] //= parts
            shapes.append(shape)
        dim = region.dims.get(eqn.outvars[0])
        begin = None if dim is None or number is None else (dim, number * shapes[0][dim])
        values = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        with place_of(eqn):
            results = bind_part(eqn, values, shapes, start=begin)
        if region.reductions.get(eqn.outvars[0]) == SUM and results[0].dtype in (jnp.bfloat16, jnp.float16):
            results = [result.astype(jnp.float32) for result in results]  # partial sums
        env |= zip(eqn.outvars, results, strict=True)

    def _loop(self, env: dict[Any, Any], goals: Sequence[Any]) -> None:
        """Adds the goals, computed in a loop over the chunks."""
        region, needed = self.region, {}
        waiting = [region.graph.producer(var) for var in goals]
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in needed:
                needed[id(eqn)] = eqn
                atoms = [atom for atom in eqn.invars if not is_literal(atom) and atom not in env]
                waiting += map(region.graph.producer, atoms)
        eqns = [eqn for eqn in region.eqns if id(eqn) in needed]
        own = {var for eqn in eqns for var in eqn.outvars}
        reads = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if not is_literal(atom) and atom not in own)
        cut, whole = [v for v in reads if v in region.dims], [v for v in reads if v not in region.dims]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def part(number: Any, slices: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            local = dict(zip((*cut, *whole), (*slices, *others), strict=True))
            for eqn in eqns:
                self._compute(local, eqn, number, self.num_parts)
            return [local[var] for var in goals]

        others = [env[var] for var in whole]
        slices = [_split(env[var], region.dims[var], self.num_parts) for var in cut]
        numbered = jnp.arange(self.num_parts, dtype=jnp.int32), slices
        _, parts = jax.lax.scan(lambda _, at: (None, part(*at, others)), None, numbered)
        for var, values in zip(goals, parts, strict=True):
            if var in region.dims:
                env[var] = _join(values, region.dims[var])
            elif region.reductions[var] == SUM:
                env[var] = values.sum(0).astype(var.aval.dtype)
            else:
                env[var] = _REDUCED[region.reductions[var]](values, axis=0)


def _real_shape(var: Any) -> Sequence[int]:
    return var.aval.shape


def _join(parts: Any, dim: int) -> Any:
    whole = jnp.moveaxis(parts, 0, dim)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def _split(x: Any, dim: int, num_parts: int) -> Any:
    shape = (*x.shape[:dim], num_parts, x.shape[dim] // num_parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)
