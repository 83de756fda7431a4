"""Large intermediates of any loss and any attention, computed in chunks: a matcher that knows no op.

From the largest intermediate, such as logits or scores, it walks outward while one dimension stays independent: every
index along it is computed alike, from the same index of the operands (`passes.independence`). That region becomes a
loop over chunks of the dimension under `jax.checkpoint`, so that one chunk is all that is held, in the backward pass
too. What is reduced over the dimension, such as a mean or the maximum of a softmax over it, is accumulated in fp32, in
the order of the chunks; what depends on it is computed by another loop, which computes its chunks again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.independence import SUM, Link, bind_part, links
from hlat_jax.passes.jaxpr import aval_bytes, place_of
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal, is_literal

ShapeOf = Callable[[Any], Sequence[int]]
MAX_BYTES = 32 * 2**20
_PARTS = 4  # of `max_bytes`: several values of a chunk are held at a time
_LEAST_GAIN = 2.0  # the largest intermediate must be so many times what a region reads and returns in chunks
_TINY = 64  # how many times smaller than the intermediate a result is through which a region goes on to its sum
_OF_WHOLE = Link((None,), (None,))  # of an equation that each chunk computes alike
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
        region = min(regions, key=lambda one: (one.num_levels, max(_PARTS * one.part_bytes, max_bytes), one.kept_bytes))
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
      kept_bytes: of what is left between the loops.
      level: id of an equation -> how many reductions over the chunks come before it.
    """

    def __init__(self, graph: EquationGraph, seed: Any, dim: int, *, max_bytes: int, taken: set[int]):
        self.graph, self.seed = graph, seed
        size, num_bytes = seed.aval.shape[dim], aval_bytes(seed.aval)
        needed = -(-_PARTS * num_bytes // max_bytes)
        self.num_parts = next((parts for parts in range(min(needed, size), size + 1) if size % parts == 0), 1)
        if self.num_parts < 2:
            raise Mixed(f"dimension {dim} has one index")
        self.part_bytes = num_bytes // self.num_parts
        self.dims: dict[Any, int] = {seed: dim}
        self.reductions: dict[Any, str] = {}
        self._whole: set[Any] = set()  # operands that every chunk takes as a whole
        self._small = max_bytes // 4
        self.links: dict[int, Link | None] = {}
        self._grow([graph.producer(seed)], taken)
        self._extend(taken)
        self.eqns = [eqn for eqn in graph.eqns if id(eqn) in self.links]
        self.outputs = self._outputs()
        self.level = self._levels()
        self.kept_bytes = self._kept_bytes()
        if num_bytes < _LEAST_GAIN * self.kept_bytes:
            raise Mixed("chunks would keep about as many bytes")

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

    def _extend(self, taken: set[int]) -> None:
        """Adds what is computed from tiny results, such as losses of tokens, where all of it ends in sums."""
        before = dict(self.links), dict(self.dims), dict(self.reductions), set(self._whole)
        try:
            while True:
                self.eqns = [eqn for eqn in self.graph.eqns if id(eqn) in self.links]
                ends = [var for var in self._outputs() if var in self.dims]
                if not ends:
                    return
                for var in ends:
                    if self.graph.is_output(var) or _TINY * aval_bytes(var.aval) > aval_bytes(self.seed.aval):
                        raise Mixed("it does not end in sums")
                    self._grow(self.graph.readers(var), taken)
        except Mixed:
            self.links, self.dims, self.reductions, self._whole = before

    def _grow(self, first: Sequence[Any], taken: set[int]) -> None:
        waiting = list(first)
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
        link = self._link_of(eqn)
        self.links[id(eqn)] = link
        self.dims |= _ends(eqn, link)
        self._whole |= {atom for atom in eqn.invars if not is_literal(atom) and atom not in self.dims}
        if link.reduction:
            self.reductions |= dict.fromkeys(eqn.outvars, link.reduction)

    def _link_of(self, eqn: Any) -> Link:
        """Returns the link of an equation that the dimensions known so far name. Raises Mixed if there is none."""
        name = f"{eqn.primitive.name} at {self.graph.source(eqn)}"
        for link in () if eqn.effects else links(eqn):
            ends = _ends(eqn, link)
            known = {var: dim for var, dim in ends.items() if var in self.dims}
            results = [var for var in eqn.outvars if var in self.dims]
            if not known or any(var not in known for var in results) or any(self.dims[v] != known[v] for v in known):
                continue
            for var, dim in ends.items():
                if var.aval.shape[dim] % self.num_parts:
                    raise Mixed(f"{self.num_parts} parts do not divide {var.aval.str_short()}, {name}")
            operands = [pair for pair in zip(eqn.invars, link.operands, strict=True) if not is_literal(pair[0])]
            whole = {atom for atom, dim in operands if dim is None}
            is_taken_twice = len(set(operands)) > len({atom for atom, _ in operands})  # as in x @ x.T
            if is_taken_twice or whole & set(self.dims) or self._whole & set(ends):
                raise Mixed(f"{name} takes all of it at each index")
            return link
        raise Mixed(f"{name} mixes it, or has no rule")

    def _neighbors(self, eqn: Any) -> list[Any]:
        """Returns the equations that compute large operands, or take none, and those that read large results."""
        found = []
        for atom in eqn.invars:
            source = self.graph.producer(atom)
            if source is None:
                continue
            if atom not in self.dims and source.primitive.name == "transpose":  # outside of the loop it is a copy
                is_read_here = len(self.graph.readers(atom)) == 1 and not self.graph.is_output(atom)
                if is_read_here and source.invars[0] not in self.dims and not is_literal(source.invars[0]):
                    self.links[id(source)] = _OF_WHOLE
                    self._whole.add(source.invars[0])
            elif atom in self.dims and (aval_bytes(atom.aval) > self._small or not source.invars):
                with contextlib.suppress(Mixed):  # else it is computed before the loops
                    self._link_of(source)
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

    def _kept_bytes(self) -> int:
        """Returns the bytes of what the loops read and return in chunks, and of what is reduced over them."""
        inside = {id(eqn) for eqn in self.eqns}
        read = {atom for eqn in self.eqns for atom in eqn.invars if not is_literal(atom) and atom in self.dims}
        ends = [var for var in read if id(self.graph.producer(var)) not in inside]
        ends += [var for var in self.outputs if var in self.dims]
        parts = [var for var in self.outputs if self.reductions.get(var)]
        return sum(aval_bytes(var.aval) for var in ends) + self.num_parts * sum(aval_bytes(var.aval) for var in parts)


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

        def part(number: Any, slices: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            local = dict(zip((*cut, *whole), (*slices, *others), strict=True))
            for eqn in eqns:
                self._compute(local, eqn, number, self.num_parts)
            return [local[var] for var in goals]

        scalar = self._differentiated(eqns, goals, reads)
        loop = _in_turn if scalar is None else functools.partial(_with_gradients, scalar)
        slices = [_split(env[var], region.dims[var], self.num_parts) for var in cut]
        parts = loop(part, slices, [env[var] for var in whole], self.num_parts)
        for var, values in zip(goals, parts, strict=True):
            if var in region.dims:
                env[var] = _join(values, region.dims[var])
            elif region.reductions[var] == SUM:
                env[var] = values.sum(0).astype(var.aval.dtype)
            else:
                env[var] = _REDUCED[region.reductions[var]](values, axis=0)

    def _differentiated(self, eqns: Sequence[Any], goals: Sequence[Any], reads: Collection[Any]) -> int | None:
        """Returns which of the goals has a derivative if they are sums of numbers and one has; else None."""
        has_derivative = {var for var in reads if _is_float(var)}
        for eqn in eqns:
            if any(not is_literal(atom) and atom in has_derivative for atom in eqn.invars):
                has_derivative |= {var for var in eqn.outvars if _is_float(var)}
        if any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) or var.aval.dtype == jnp.float16 for var in reads):
            return None  # complex numbers are not sorted here; fp16 needs the scale of its loss in the loop
        found = [at for at, var in enumerate(goals) if var in has_derivative]
        are_sums = all(self.region.reductions.get(var) == SUM and not var.aval.shape for var in goals)
        return found[0] if are_sums and len(found) == 1 else None


def _in_turn(part: Callable, slices: Sequence[Any], others: Sequence[Any], num_parts: int) -> list[Any]:
    """Returns the results of all chunks, stacked; the backward pass computes a chunk again."""
    again = jax.checkpoint(part, prevent_cse=False)
    numbered = jnp.arange(num_parts, dtype=jnp.int32), slices
    return jax.lax.scan(lambda _, at: (None, again(*at, others)), None, numbered)[1]


def _with_gradients(
    scalar: int, part: Callable, slices: Sequence[Any], others: Sequence[Any], num_parts: int
) -> list[Any]:
    """Returns the results of all chunks, which are numbers, and sums their gradients in the same loop, in fp32 or more.

    So the backward pass scales gradients, and computes no chunk again. Result `scalar` alone has a derivative.
    """
    numbers = np.arange(num_parts, dtype=np.int32)  # not traced: the functions below close over it
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in (*slices, *others)]
    num_cut = len(slices)

    def call(number: Any, floats: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
        rest = iter(fixed), iter(floats)
        values = [next(rest[one]) for one in is_float]
        return part(number, values[:num_cut], values[num_cut:])

    def sort(values: Sequence[Any], kind: bool) -> tuple[list[Any], list[Any]]:
        at = [number for number, one in enumerate(is_float) if one == kind]
        return [values[i] for i in at if i < num_cut], [values[i] for i in at if i >= num_cut]

    @jax.custom_vjp
    def sums(cut: Sequence[Any], whole: Sequence[Any], fixed: tuple) -> list[Any]:
        def step(_: None, at: Any) -> tuple[None, list[Any]]:
            number, cut, fixed_cut = at
            return None, call(number, [*cut, *whole], [*fixed_cut, *fixed[1]])

        return jax.lax.scan(step, None, (numbers, cut, fixed[0]))[1]

    def forward(cut: Sequence[Any], whole: Sequence[Any], fixed: tuple) -> tuple[list[Any], Any]:
        def step(total: Sequence[Any], at: Any) -> tuple[Any, Any]:
            number, cut, fixed_cut = at
            values, pull_back = jax.vjp(lambda *floats: call(number, floats, [*fixed_cut, *fixed[1]]), *cut, *whole)
            grads = pull_back([jnp.full_like(x, 1 if place == scalar else 0) for place, x in enumerate(values)])
            total = [old + new.astype(old.dtype) for old, new in zip(total, grads[len(cut) :], strict=True)]
            return total, (values, grads[: len(cut)])

        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in whole]
        total, (values, grads) = jax.lax.scan(step, zeros, (numbers, cut, fixed[0]))
        return values, (grads, total)

    def backward(kept: tuple, cotangents: Sequence[Any]) -> tuple[Any, Any, None]:
        (grads, total), by_part = kept, cotangents[scalar]  # all equal: the parts are summed
        grads = [(grad * by_part[0]).astype(grad.dtype) for grad in grads]
        return grads, [(grad * by_part[0]).astype(dtype) for grad, dtype in zip(total, dtypes, strict=True)], None

    sums.defvjp(forward, backward)
    cut, whole = sort([*slices, *others], True)
    dtypes = [x.dtype for x in whole]
    return sums(cut, whole, sort([*slices, *others], False))


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


def _real_shape(var: Any) -> Sequence[int]:
    return var.aval.shape


def _join(parts: Any, dim: int) -> Any:
    whole = jnp.moveaxis(parts, 0, dim)
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def _ends(eqn: Any, link: Link) -> dict[Any, int]:
    """Returns the variables of an equation that a link cuts, and along which dimension."""
    atoms = *zip(eqn.invars, link.operands, strict=True), *zip(eqn.outvars, link.results, strict=True)
    return {atom: dim for atom, dim in atoms if dim is not None and not is_literal(atom)}


def _split(x: Any, dim: int, num_parts: int) -> Any:
    shape = (*x.shape[:dim], num_parts, x.shape[dim] // num_parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)
