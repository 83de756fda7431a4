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
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops.cross_entropy import is_loss_scaled
from hlat_jax.passes.independence import SUM, Link, bind_part, links
from hlat_jax.passes.jaxpr import aval_bytes, place_of, varying_axes
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal, is_literal

ShapeOf = Callable[[Any], Sequence[int]]
MAX_BYTES = 32 * 2**20
LOSS_BYTES = 2 * 2**20
LEAST_ROWS = 128  # of a chunk of a loss: each chunk adds to the gradient of the whole head
_PARTS = 4  # of `max_bytes`: several values of a chunk are held at a time
_LEAST_GAIN = 2.0  # the largest intermediate must be so many times what a region reads and returns in chunks
_OF_WHOLE = Link((None,), (None,))  # of an equation that each chunk computes alike
_REDUCED = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_and": jnp.all, "reduce_or": jnp.any}


class Mixed(ValueError):
    """Along this dimension indices are mixed, or no rule says how they are computed."""


def matches(graph: EquationGraph, *, max_bytes: int = MAX_BYTES) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each intermediate of more than `max_bytes`, the largest first."""
    taken: set[int] = set()
    large = [var for eqn in graph.eqns for var in eqn.outvars if aval_bytes(var.aval) > max_bytes]
    for seed in sorted(large, key=lambda var: aval_bytes(var.aval), reverse=True):
        eqn = graph.producer(seed)
        if id(eqn) in taken or graph.is_constant(seed) or not graph.readers(seed):
            continue
        parts = -(-_PARTS * aval_bytes(seed.aval) // max_bytes)
        bounds = _Bounds(
            parts, False, lambda var: _PARTS * aval_bytes(var.aval) > max_bytes, aval_bytes(seed.aval) // 64
        )
        regions, reason = _regions(graph, seed, bounds, taken)
        if regions:
            region = min(regions, key=lambda one: one.cost)
            taken |= {id(eqn) for eqn in region.eqns}
            yield region.match()
        else:
            yield Refusal("chunk", graph.source(eqn), reason)


def losses(graph: EquationGraph, *, max_bytes: int = LOSS_BYTES) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each product of more than `max_bytes` of which a loss is computed, as logits are.

    No other product depends on it, and the region ends in one number. The backward pass computes none of its chunks
    again, so that they cost no time.
    """
    for eqn in graph.eqns:
        if eqn.primitive.name != "dot_general" or id(eqn) in graph.taken:
            continue
        seed = eqn.outvars[0]
        if aval_bytes(seed.aval) <= max_bytes:
            continue
        parts = min(-(-_PARTS * aval_bytes(seed.aval) // max_bytes), _num_rows(eqn) // LEAST_ROWS)
        if parts < 2 or graph.is_constant(seed) or not _is_of_loss(graph, seed):
            continue
        num_bytes = aval_bytes(seed.aval)
        bounds = _Bounds(parts, True, lambda var, size=seed.aval.size: 2 * var.aval.size > size, num_bytes)
        regions, reason = _regions(graph, seed, bounds, graph.taken)
        ends = [region for region in regions if region.is_loss]
        if ends:
            yield min(ends, key=lambda one: one.cost).match(name="loss")
        else:
            in_turn = (
                f"{seed.aval.str_short()}: it does not end in one number, of fp32 or bf16, that is not of one device"
            )
            in_turn += "; `passes.chunk` computes its chunks, each twice"
            yield Refusal("loss", graph.source(eqn), in_turn if regions else reason)


def _is_of_loss(graph: EquationGraph, seed: Any) -> bool:
    """Returns whether a result that is one number depends on a variable, and no product does."""
    dependent, waiting = {seed}, [seed]
    while waiting:
        for eqn in graph.readers(waiting.pop()):
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                return False
            waiting += set(eqn.outvars) - dependent
            dependent |= set(eqn.outvars)
    return any(not is_literal(atom) and atom in dependent and atom.aval.size == 1 for atom in graph.outvars)


def _num_rows(product: Any) -> int:
    """Returns how many rows of the first operand a product has, those of a batch included."""
    ((_, contracted), (_, batch)), second = product.params["dimension_numbers"], product.invars[1].aval.shape
    columns = math.prod(size for dim, size in enumerate(second) if dim not in (*contracted, *batch))
    return product.outvars[0].aval.size // max(columns, 1)


def _regions(graph: EquationGraph, seed: Any, bounds: _Bounds, taken: Collection[int]) -> tuple[list[_Region], str]:
    """Returns the regions around a variable, one for each dimension, and why there are no others."""
    regions, reasons = [], []
    for dim in range(seed.aval.ndim):
        for is_eager in (True, False):
            try:
                regions.append(_Region(graph, seed, dim, dataclasses.replace(bounds, is_eager=is_eager), taken))
                break
            except Mixed as why:
                reason = str(why)
        else:
            reasons.append(reason)
    return regions, f"{seed.aval.str_short()}: {'; '.join(dict.fromkeys(reasons))}"


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """How far a region reaches.

    Attributes:
      parts: number of chunks, or the nearest one that divides the dimension.
      is_most: whether there are no more chunks than that; otherwise no fewer, and up to eight times as many.
      is_large: takes a variable, and returns whether it is computed in the region if it can be.
      is_eager: whether a large operand is computed in the region although others read it, who are then part of it.
      tiny_bytes: the bytes of results up to which the region goes on through them if all of it then ends in sums.
    """

    parts: int
    is_most: bool
    is_large: Callable[[Any], bool]
    tiny_bytes: int
    is_eager: bool = True


class _Region:
    """Equations around a large value that are computed in chunks of one dimension.

    Attributes:
      eqns: the equations, in order.
      dims: variable -> its dimension that is cut into `num_parts`, of what differs from chunk to chunk.
      reductions: variable -> how it is reduced over the chunks; "" of what is computed from reduced values alone.
      links: id of an equation -> its link; None of an equation of reduced values alone.
      outputs: variables that others read.
      cost: of the region, by which those of several dimensions are compared: loops, bytes of a chunk, bytes that are
        left between the loops.
      loops: (equations of reduced values alone, the loop after them), in order.
    """

    def __init__(self, graph: EquationGraph, seed: Any, dim: int, bounds: _Bounds, taken: Collection[int]):
        """Finds the region around `seed`.

        Raises:
          Mixed: there is none along the dimension.
        """
        self.graph, self.seed = graph, seed
        size, num_bytes = seed.aval.shape[dim], aval_bytes(seed.aval)
        first = min(bounds.parts, size)
        numbers = range(first, 1, -1) if bounds.is_most else range(first, min(8 * first, size) + 1)
        self.num_parts = next((number for number in numbers if size % number == 0), 1)
        if self.num_parts < 2:
            raise Mixed(f"dimension {dim} of {size} has no {first} equal parts, nor about as many")
        self.dims: dict[Any, int] = {seed: dim}
        self.reductions: dict[Any, str] = {}
        self._whole: set[Any] = set()  # operands that every chunk takes as a whole
        self._bounds, self._taken = bounds, taken
        self.links: dict[int, Link | None] = {}
        self._grow([graph.producer(seed)])
        self._extend()
        self.eqns = [eqn for eqn in graph.eqns if id(eqn) in self.links]
        self.outputs = self._outputs()
        self.loops = self._loops()
        kept_bytes = self._kept_bytes()
        self.cost = len(self.loops), num_bytes // min(bounds.parts, self.num_parts), kept_bytes
        if num_bytes < _LEAST_GAIN * kept_bytes:
            raise Mixed("chunks would keep about as many bytes")

    @property
    def is_loss(self) -> bool:
        """Whether it ends in one number with a derivative: its gradients are computed with it, and no chunk twice."""
        return len(self.loops) == 1 and self.loops[0][1].scalar is not None

    def match(self, *, name: str = "chunk") -> Match:
        """Returns the region as what `rewrite` replaces."""
        number = {id(eqn): at for at, eqn in enumerate(self.eqns)}
        inputs = [atom for eqn in self.eqns for atom in eqn.invars if not is_literal(atom)]
        inputs = [var for var in dict.fromkeys(inputs) if id(self.graph.producer(var)) not in number]

        def replacement_at(shape_of: ShapeOf) -> Callable[..., list[Any]]:
            size = shape_of(self.seed)[self.dims[self.seed]]
            num_parts = self.num_parts if size == self.seed.aval.shape[self.dims[self.seed]] else 2
            loops = _Loops(self, shape_of, num_parts)
            return lambda choose, *values: loops.compute(dict(zip(inputs, values, strict=True)))

        again = f", in {len(self.loops)} loops" if len(self.loops) > 1 else ""
        return Match(
            op=name,
            eqns=self.eqns,
            inputs=inputs,
            outputs=self.outputs,
            replacement=replacement_at(_real_shape),
            source=self.graph.source(self.graph.producer(self.seed)),
            facts=f"{self.seed.aval.str_short()} in {self.num_parts} parts of dimension {self.dims[self.seed]}{again}",
            resized=replacement_at,
        )

    def _extend(self) -> None:
        """Adds what is computed from tiny results, such as losses of tokens, where all of it ends in sums."""
        before = dict(self.links), dict(self.dims), dict(self.reductions), set(self._whole)
        try:
            while True:
                self.eqns = [eqn for eqn in self.graph.eqns if id(eqn) in self.links]
                ends = [var for var in self._outputs() if var in self.dims]
                if not ends:
                    return
                for var in ends:
                    if self.graph.is_output(var) or aval_bytes(var.aval) > self._bounds.tiny_bytes:
                        raise Mixed("it does not end in sums")
                    self._grow(self.graph.readers(var))
        except Mixed:
            self.links, self.dims, self.reductions, self._whole = before

    def _grow(self, first: Sequence[Any]) -> None:
        waiting = list(first)
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in self.links:
                if id(eqn) in self._taken:
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
            if source is None or id(source) in self._taken:
                continue
            if atom not in self.dims:
                self._take_whole(source)
            elif self._is_included(atom, source):
                with contextlib.suppress(Mixed):  # else it is computed before the loops
                    self._link_of(source)
                    found.append(source)
        for var in eqn.outvars:
            if var in self.dims and self._bounds.is_large(var):
                if self.graph.is_output(var):
                    raise Mixed("it is a result of the function")
                found += self.graph.readers(var)
        return found

    def _is_included(self, var: Any, source: Any) -> bool:
        """Returns whether a value that differs from chunk to chunk is computed in the region if it can be."""
        if not (self._bounds.is_large(var) or not _variables(source) or id(source) in self.graph.sealed):
            return False
        return self._bounds.is_eager or all(id(reader) in self.links for reader in self.graph.readers(var))

    def _take_whole(self, eqn: Any) -> None:
        """Adds an equation that each chunk computes alike: a transpose that outside would be a copy, part of a rule."""
        (var, *_), operands = eqn.outvars, _variables(eqn)
        is_read_here = len(self.graph.readers(var)) == 1 and not self.graph.is_output(var)
        is_copy = eqn.primitive.name == "transpose" and is_read_here and operands
        if (is_copy or id(eqn) in self.graph.sealed) and not set(operands) & set(self.dims):
            self.links[id(eqn)] = _OF_WHOLE
            self._whole |= set(operands)
            for source in map(self.graph.producer, operands):
                if id(source) in self.graph.sealed and id(source) not in self.links:
                    self._take_whole(source)

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

    def _loops(self) -> list[tuple[list[Any], _Loop]]:
        """Returns the loops in order; each begins with what the ones before it have reduced."""
        level: dict[Any, int] = {}
        eqns_of: dict[int, list[Any]] = {}
        for eqn in self.eqns:
            now = max((level.get(atom, 0) for atom in eqn.invars if not is_literal(atom)), default=0)
            eqns_of.setdefault(now, []).append(eqn)
            level |= dict.fromkeys(eqn.outvars, now + bool(self.reductions.get(eqn.outvars[0])))
        inside = {var for eqn in self.eqns for var in eqn.outvars}
        computed: set[Any] = set()
        loops = []
        for now in range(max(eqns_of) + 1):
            between = [eqn for eqn in eqns_of.get(now, []) if self.links[id(eqn)] is None]
            computed |= {var for eqn in between for var in eqn.outvars}
            goals = [
                var
                for eqn in eqns_of.get(now, [])
                for var in eqn.outvars
                if self.reductions.get(var) or (var in self.dims and var in self.outputs)
            ]
            loops.append((between, self._loop(goals, inside - computed)))
            computed |= set(goals)
        return loops

    def _loop(self, goals: Sequence[Any], to_compute: Collection[Any]) -> _Loop:
        needed: set[int] = set()
        waiting = [self.graph.producer(var) for var in goals]
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in needed:
                needed.add(id(eqn))
                waiting += [self.graph.producer(atom) for atom in _variables(eqn) if atom in to_compute]
        eqns = [eqn for eqn in self.eqns if id(eqn) in needed]
        own = {var for eqn in eqns for var in eqn.outvars}
        reads = list(dict.fromkeys(atom for eqn in eqns for atom in _variables(eqn) if atom not in own))
        cut, whole = [v for v in reads if v in self.dims], [v for v in reads if v not in self.dims]
        return _Loop(goals, eqns, cut, whole, self._differentiated(eqns, goals, reads))

    def _differentiated(self, eqns: Sequence[Any], goals: Sequence[Any], reads: Sequence[Any]) -> int | None:
        """Returns which of the goals has a derivative if they are sums of numbers and one has; else None."""
        has_derivative = {var for var in reads if _is_float(var)}
        for eqn in eqns:
            if any(atom in has_derivative for atom in _variables(eqn)):
                has_derivative |= {var for var in eqn.outvars if _is_float(var)}
        if any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) or var.aval.dtype == jnp.float16 for var in reads):
            return None  # complex numbers are not sorted here; fp16 needs the scale of its loss in the loop
        if any(varying_axes(var.aval) for var in reads):
            return None  # of one device: inside shard_map JAX sums the gradients of what all devices have
        places = [at for at, var in enumerate(goals) if var in has_derivative]
        are_sums = all(self.reductions.get(var) == SUM and not var.aval.shape for var in goals)
        return places[0] if are_sums and len(places) == 1 else None

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
class _Loop:
    """One loop over the chunks of a region.

    Attributes:
      goals: variables that it computes.
      eqns: the equations that they need, in order.
      cut: variables that a chunk reads a part of.
      whole: variables that each chunk reads as they are.
      scalar: which of the goals has a derivative, if all are sums of numbers and one alone has one; else None.
    """

    goals: Sequence[Any]
    eqns: Sequence[Any]
    cut: Sequence[Any]
    whole: Sequence[Any]
    scalar: int | None


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
        for between, loop in self.region.loops:
            for eqn in between:
                self._compute(env, eqn)
            if loop.goals:
                self._run(env, loop)
        return [env[var] for var in self.region.outputs]

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

    def _run(self, env: dict[Any, Any], loop: _Loop) -> None:
        """Adds the goals of a loop."""

        def part(number: Any, slices: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            local = dict(zip((*loop.cut, *loop.whole), (*slices, *others), strict=True))
            for eqn in loop.eqns:
                self._compute(local, eqn, number, self.num_parts)
            return [local[var] for var in loop.goals]

        dims = self.region.dims
        run = _in_turn if loop.scalar is None else functools.partial(_with_gradients, loop.scalar)
        slices = [_split(env[var], dims[var], self.num_parts) for var in loop.cut]
        parts = run(part, slices, [env[var] for var in loop.whole], self.num_parts)
        for var, values in zip(loop.goals, parts, strict=True):
            reduction = self.region.reductions.get(var)
            if var in dims:
                env[var] = _join(values, dims[var])
            elif reduction == SUM:
                env[var] = values.sum(0).astype(var.aval.dtype)
            else:
                env[var] = _REDUCED[reduction](values, axis=0)


def _in_turn(part: Callable, slices: Sequence[Any], others: Sequence[Any], num_parts: int) -> list[Any]:
    """Returns the results of all chunks, stacked; the backward pass computes a chunk again."""
    again = jax.checkpoint(part, prevent_cse=False)
    numbered = jnp.arange(num_parts, dtype=jnp.int32), slices
    return jax.lax.scan(lambda _, at: (None, again(*at, others)), None, numbered)[1]


def _with_gradients(
    scalar: int, part: Callable, slices: Sequence[Any], others: Sequence[Any], num_parts: int
) -> list[Any]:
    """Returns the results of all chunks, which are numbers, and sums their gradients in the same loop, in fp32 or more.

    So the backward pass scales gradients, and computes no chunk again, but for a scaled loss, of which they would be
    unscaled here: see `ops.loss_scale`. Result `scalar` alone has a derivative.
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

    def in_turn(cut: Sequence[Any], whole: Sequence[Any], fixed: tuple) -> list[Any]:
        def step(number: Any, at: Any, whole: Sequence[Any]) -> list[Any]:
            cut, fixed_cut = at
            return call(number, [*cut, *whole], [*fixed_cut, *fixed[1]])

        return _in_turn(step, (cut, fixed[0]), whole, num_parts)

    sums = jax.custom_vjp(in_turn)

    def forward(cut: Sequence[Any], whole: Sequence[Any], fixed: tuple) -> tuple[list[Any], Any]:
        if is_loss_scaled():
            return in_turn(cut, whole, fixed), (cut, whole, fixed)

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
        if len(kept) == 3:
            cut, whole, fixed = kept
            return *jax.vjp(lambda cut, whole: in_turn(cut, whole, fixed), cut, whole)[1](cotangents), None
        (grads, total), by_part = kept, cotangents[scalar]  # all equal: the parts are summed
        grads = [(grad * by_part[0]).astype(grad.dtype) for grad in grads]
        return grads, [(grad * by_part[0]).astype(dtype) for grad, dtype in zip(total, dtypes, strict=True)], None

    sums.defvjp(forward, backward)
    cut, whole = sort([*slices, *others], True)
    dtypes = [x.dtype for x in whole]
    return sums(cut, whole, sort([*slices, *others], False))


def _variables(eqn: Any) -> list[Any]:
    return [atom for atom in eqn.invars if not is_literal(atom)]


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
