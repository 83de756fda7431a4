"""Matches regions around large intermediates of any loss and any attention, to compute them in chunks.

From the largest intermediate, such as logits or scores, the matcher walks outward while one dimension is independent.
Every index along it is then computed alike, from the same index of the operands, see `passes.independence`. The region
becomes a loop over chunks of the dimension under `jax.checkpoint`, so only one chunk is held, in the backward pass too.
There are several loops if a value depends on a reduction over the dimension, such as the maximum of a softmax. `loops`
computes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from hlat_jax.passes.independence import Link, links
from hlat_jax.passes.jaxpr import aval_bytes, is_literal, primitives, variables
from hlat_jax.passes.products import PRODUCTS
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal, own_rule
from hlat_jax.passes.rewrite.loops import Chunks, Loop, ShapeOf

MAX_BYTES = 32 * 2**20
LOSS_BYTES = 2 * 2**20
LEAST_ROWS = 128  # of a chunk of a loss: each chunk adds to the gradient of the whole head
_PARTS = 4  # of `max_bytes`: several values of a chunk are held at a time
_LEAST_GAIN = 2.0  # the largest intermediate must be so many times what a region keeps, see `_Region._kept_bytes`
_RESHAPES = primitives("reshape squeeze expand_dims")
_FEW = 16  # chunks that are never too many, if they divide the dimension
_OF_WHOLE = Link((None,), (None,))  # of an equation that each chunk computes alike


class Mixed(ValueError):
    """Indices are mixed along this dimension, or there is no rule for them.

    Attributes:
      dims: the dimensions of the region that was found so far.
    """

    def __init__(self, reason: str, dims: Mapping[Any, int]):
        super().__init__(reason)
        self.dims = dims


def matches(graph: EquationGraph, *, max_bytes: int = MAX_BYTES) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each intermediate of more than `max_bytes`, the largest first."""
    taken = set(graph.taken)
    failed: dict[Any, str] = {}
    large = [var for eqn in graph.eqns for var in eqn.outvars if aval_bytes(var.aval) > max_bytes]
    for seed in sorted(large, key=lambda var: aval_bytes(var.aval), reverse=True):
        eqn = graph.producer(seed)
        if id(eqn) in taken or graph.is_constant(seed) or _is_given(graph, seed) or not graph.readers(seed):
            continue
        if _is_placed(seed):
            yield Refusal("chunk", graph.source(eqn), f"{seed.aval.str_short()}: sharded over an axis of type Explicit")
            continue
        num_bytes = aval_bytes(seed.aval)
        parts = _num_parts(num_bytes, max_bytes)
        bounds = _Bounds(parts, False, lambda var: _PARTS * aval_bytes(var.aval) > max_bytes, num_bytes // 64)
        regions, reasons = _regions(graph, seed, bounds, taken, failed)
        if regions:
            region = min(regions, key=lambda one: one.cost)
            taken |= {id(eqn) for eqn in region.eqns}
            yield region.match()
        else:
            yield Refusal("chunk", graph.source(eqn), f"{seed.aval.str_short()}: {'; '.join(reasons)}")


def losses(graph: EquationGraph, *, max_bytes: int = MAX_BYTES) -> Iterator[Match]:
    """Yields a match for each product from which a loss is computed, such as logits, if its chunks cost no time.

    These are products of more than `LOSS_BYTES`, in chunks of at least `LEAST_ROWS` rows. No other product depends on
    them, and their region ends in one number, so the backward pass computes no chunk again. Products that need smaller
    chunks to meet `max_bytes` are left to `matches`.
    """
    for eqn in list(graph.eqns):
        if eqn.primitive.name != "dot_general" or id(eqn) in graph.taken:
            continue
        seed = eqn.outvars[0]
        num_bytes, limit = aval_bytes(seed.aval), min(max_bytes, LOSS_BYTES)
        parts = min(_num_parts(num_bytes, limit), _num_rows(eqn) // LEAST_ROWS)
        needed = _num_parts(num_bytes, max_bytes)
        if parts <= max(needed, 1) or graph.is_constant(seed) or _is_placed(seed) or not _is_of_loss(graph, seed):
            continue
        bounds = _Bounds(parts, True, lambda var, size=seed.aval.size: 2 * var.aval.size > size, num_bytes)
        regions, _ = _regions(graph, seed, bounds, graph.taken)
        if ends := [region for region in regions if region.is_loss]:
            yield min(ends, key=lambda one: one.cost).match()


def _is_placed(var: Any) -> bool:
    """Returns whether the type of a value has a sharding, as over axes of type Explicit: a loop cannot slice it."""
    return any(part is not None for part in var.aval.sharding.spec)


def _num_parts(num_bytes: int, max_bytes: int) -> int:
    """Returns the number of chunks that keep a value and its neighbors within a limit; 0 if it needs none."""
    return -(-_PARTS * num_bytes // max_bytes) if num_bytes > max_bytes else 0


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


def _regions(
    graph: EquationGraph, seed: Any, bounds: _Bounds, taken: Collection[int], failed: dict[Any, str] | None = None
) -> tuple[list[_Region], list[str]]:
    """Returns the regions around a variable, one for each dimension, and why there are no others.

    Those of other large variables in a region that is none are the same: `failed` has their reasons, and gets more.
    """
    regions, reasons = [], []
    failed = {} if failed is None else failed
    for dim in (dim for dim, size in enumerate(seed.aval.shape) if size > 1):
        for is_eager in (True, False):
            reason = failed.get((seed, dim, is_eager), "")
            if reason:
                continue
            bounds = dataclasses.replace(bounds, is_eager=is_eager)
            try:
                regions.append(_Region.around(graph, seed, dim, bounds=bounds, taken=frozenset(taken)))
            except Mixed as mixed:
                reason = str(mixed)
                large = [pair for pair in mixed.dims.items() if bounds.is_large(pair[0])]
                failed |= dict.fromkeys([(*pair, is_eager) for pair in large], reason)
            else:
                break
        else:
            reasons.append(reason)
    return regions, list(dict.fromkeys(reasons))


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """How far a region reaches.

    Attributes:
      parts: number of chunks, unless one near it divides the dimension.
      is_most: whether there are then fewer chunks, down to half as many; else more, up to twice as many, or `_FEW`.
      is_large: takes a variable, and returns whether it is computed in the region if it can be.
      is_eager: whether a large operand is computed in the region although others read it, who are then part of it.
      tiny_bytes: the bytes of results up to which the region goes on through them if all of it then ends in sums.
    """

    parts: int
    is_most: bool
    is_large: Callable[[Any], bool]
    tiny_bytes: int
    is_eager: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Region:
    """Equations around a large value that are computed in chunks of one dimension. It grows: each step returns another.

    Attributes:
      graph: the equations of the function.
      seed: the large value.
      bounds: how far the region reaches.
      taken: ids of equations that are computed in other chunks.
      num_parts: number of chunks.
      dims, reductions: see `Chunks`.
      links: id of an equation -> its link; None of an equation of reduced values alone.
      whole: operands that every chunk takes as a whole.
      copies: (a variable that is read before the loops, a dimension) -> its copy that is cut along this dimension.
      reading: id of an equation -> the same equation, reading copies.
    """

    graph: EquationGraph
    seed: Any
    bounds: _Bounds
    taken: frozenset[int]
    num_parts: int
    dims: Mapping[Any, int]
    reductions: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    links: Mapping[int, Link | None] = dataclasses.field(default_factory=dict)
    whole: frozenset[Any] = frozenset()
    copies: Mapping[tuple[Any, int | None], Any] = dataclasses.field(default_factory=dict)
    reading: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def around(cls, graph: EquationGraph, seed: Any, dim: int, *, bounds: _Bounds, taken: frozenset[int]) -> _Region:
        """Returns the region around a value.

        Raises:
          Mixed: there is none along the dimension.
        """
        alone = cls(graph, seed, bounds, taken, _num_chunks(seed.aval.shape[dim], bounds), {seed: dim})
        region = alone._grown([graph.producer(seed)])._extended()
        if any(id(graph.producer(var)) in region.links for var, _ in region.copies):
            raise region._mixed("it is read along two dimensions")
        if aval_bytes(seed.aval) < _LEAST_GAIN * region._kept_bytes:
            raise region._mixed("chunks would keep about as many bytes")
        return region

    @functools.cached_property
    def eqns(self) -> list[Any]:
        """The equations, in order."""
        return [eqn for eqn in self.graph.eqns if id(eqn) in self.links]

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The equations as they are computed in chunks."""
        reading = [self.reading.get(id(eqn), eqn) for eqn in self.eqns]
        return Chunks(reading, self.dims, self.reductions, self._outputs, self.bounds.tiny_bytes)

    @functools.cached_property
    def _loops(self) -> list[Loop]:
        return self.chunks.loops()

    @property
    def is_loss(self) -> bool:
        """Whether it ends in one number with a derivative: its gradients are computed with it, and no chunk twice."""
        return len(self._loops) == 1 and self._loops[0].scalar is not None

    @property
    def cost(self) -> tuple[int, int, int]:
        """Number of loops, bytes of a chunk, bytes that the loops keep: by these, regions along dimensions compare."""
        num_chunks = min(self.bounds.parts, self.num_parts)
        return len(self._loops), aval_bytes(self.seed.aval) // num_chunks, self._kept_bytes

    def match(self) -> Match:
        """Returns the region as a match with the loops as its replacement."""
        made = {var for eqn in self.eqns for var in eqn.outvars}
        originals = self.graph.copied | {new: var for (var, _), new in self.copies.items()}
        reads = [var for eqn in self.chunks.eqns for var in variables(eqn.invars) if var not in made]
        inputs, dim = list(dict.fromkeys(originals.get(var, var) for var in reads)), self.dims[self.seed]

        def replacement_at(shape_of: ShapeOf) -> Callable[..., list[Any]]:
            num_parts = self.num_parts if shape_of(self.seed)[dim] == self.seed.aval.shape[dim] else 2

            def replacement(*values: Any) -> list[Any]:
                env = dict(zip(inputs, values, strict=True))
                env |= {var: env[originals[var]] for var in reads if var in originals}
                return self.chunks.compute(env, shape_of=shape_of, num_parts=num_parts)

            return replacement

        again = f", in {len(self._loops)} loops" if len(self._loops) > 1 else ""
        return Match(
            op="chunk",
            eqns=self.eqns,
            inputs=inputs,
            outputs=self.chunks.outputs,
            replacement=replacement_at(lambda var: var.aval.shape),
            source=self.graph.source(self.graph.producer(self.seed)),
            facts=f"{self.seed.aval.str_short()} in {self.num_parts} parts of dimension {dim}{again}",
            resized=replacement_at,
            cut_to=5 if self.seed.aval.shape[dim] % self.num_parts else 4,
        )

    def _mixed(self, reason: str) -> Mixed:
        return Mixed(reason, self.dims)

    def _extended(self) -> _Region:
        """Returns the region with what is computed from tiny results, such as losses of tokens, if it ends in sums."""
        region = self
        try:
            while ends := [var for var in region._outputs if var in region.dims]:
                for var in ends:
                    if self.graph.is_output(var) or aval_bytes(var.aval) > self.bounds.tiny_bytes:
                        return self
                    region = region._grown(self.graph.readers(var))
        except Mixed:
            return self
        return region

    def _grown(self, first: Sequence[Any]) -> _Region:
        """Returns the region with some equations, and those around them that belong to it."""
        region, waiting = self, list(first)
        while waiting:
            eqn = waiting.pop()
            if id(eqn) not in region.links:
                if id(eqn) in self.taken:
                    raise region._mixed("it is computed in other chunks")
                region, neighbors = region._with(eqn)._with_neighbors(eqn)
                waiting += neighbors
            if not waiting:
                region, waiting = region._with_between()
        return region

    def _with(self, eqn: Any) -> _Region:
        """Returns the region with an equation, by the link that the dimensions known so far name."""
        link = self._link_of(eqn)
        invars = [atom if is_literal(atom) else self.graph.copy_of_constant(atom, eqn) for atom in eqn.invars]
        own = eqn.replace(invars=invars)  # with constants of its own
        copies = {**{pair: core.Var(pair[0].aval) for pair in self._in_two_ways(own, link)}, **self.copies}
        pairs = zip(invars, link.operands, strict=True)
        own = own.replace(invars=[one if is_literal(one) else copies.get((one, dim), one) for one, dim in pairs])
        dims = {**self.dims, **dict(_ends(own, link))}
        reduced = dict.fromkeys(eqn.outvars, link.reduction) if link.reduction else {}
        return dataclasses.replace(
            self,
            dims=dims,
            reductions={**self.reductions, **reduced},
            links={**self.links, id(eqn): link},
            whole=self.whole | (set(variables(own.invars)) - dims.keys()),
            copies=copies,
            reading={**self.reading, id(eqn): own},
        )

    def _link_of(self, eqn: Any) -> Link:
        """Returns the link of an equation that the dimensions known so far name; if several, that of fewest copies.

        Raises:
          Mixed: there is none.
        """
        name = f"{eqn.primitive.name} at {self.graph.source(eqn)}"
        fitting = []
        for link in () if eqn.effects else links(eqn):
            known = {var for var, dim in _ends(eqn, link) if self.dims.get(var) == dim}
            if known and known.issuperset(var for var in eqn.outvars if var in self.dims):
                fitting.append(link)
        if not fitting:
            raise self._mixed(own_rule(eqn) or f"{name} mixes it, or has no rule")
        link = min(fitting, key=lambda one: len(self._in_two_ways(eqn, one)))
        ends = _ends(eqn, link)
        for var, dim in ends:
            own, size = var.aval.shape[dim], self.seed.aval.shape[self.dims[self.seed]]
            if own != size and (own % self.num_parts or size % self.num_parts):
                raise self._mixed(f"{self.num_parts} parts do not divide {var.aval.str_short()}, {name}")
        made = {var for var, _ in self._in_two_ways(eqn, link) if id(self.graph.producer(var)) in self.links}
        if made or self.whole.intersection(var for var, _ in ends if var in eqn.outvars):
            raise self._mixed(f"{name} takes all of it at each index")
        return link

    def _in_two_ways(self, eqn: Any, link: Link) -> set[tuple[Any, int | None]]:
        """Returns the operands that a link cuts along another dimension than they are cut already, each with it."""
        pairs = [pair for pair in zip(eqn.invars, link.operands, strict=True) if not is_literal(pair[0])]
        ways = {**dict(reversed(pairs)), **dict.fromkeys(self.whole), **self.dims}
        return {(atom, dim) for atom, dim in pairs if ways[atom] != dim}

    def _with_neighbors(self, eqn: Any) -> tuple[_Region, list[Any]]:
        """Returns the region, and the equations that compute large operands, or take none, or read large results.

        Transposes that each chunk computes alike are part of the region returned.
        """
        region, neighbors = self, []
        for atom in self.reading[id(eqn)].invars:
            source = self.graph.producer(atom)
            if source is None or id(source) in self.taken:
                continue
            if atom not in self.dims:
                region = region._with_transpose(source)
            elif region._is_included(atom, source):
                with contextlib.suppress(Mixed):  # else it is computed before the loops
                    region._link_of(source)
                    neighbors.append(source)
        for var in eqn.outvars:
            if var in self.dims and self.bounds.is_large(var):
                if self.graph.is_output(var):
                    raise self._mixed("it is a result of the function")
                neighbors += [eqn for eqn in self.graph.readers(var) if id(eqn) not in self.taken]
        return region, neighbors

    def _is_included(self, var: Any, source: Any) -> bool:
        """Returns whether a value that differs from chunk to chunk is computed in the region if it can be."""
        if not self.bounds.is_large(var) and variables(source.invars):
            return False
        return self.bounds.is_eager or all(id(reader) in self.links for reader in self.graph.readers(var))

    def _with_transpose(self, eqn: Any) -> _Region:
        """Returns the region with a transpose that each chunk computes alike, and that outside would be a copy."""
        (var, *_), operands = eqn.outvars, variables(eqn.invars)
        is_read_here = len(self.graph.readers(var)) == 1 and not self.graph.is_output(var)
        if eqn.primitive.name != "transpose" or not is_read_here or not operands or set(operands) & set(self.dims):
            return self
        links = {**self.links, id(eqn): _OF_WHOLE}
        return dataclasses.replace(self, links=links, whole=self.whole | set(operands))

    def _with_between(self) -> tuple[_Region, list[Any]]:
        """Returns the region, and an equation that depends on it and that it depends on, if there is one.

        Such equations of reduced values alone are part of the region returned.
        """
        links, reductions = dict(self.links), dict(self.reductions)
        made = {var for eqn in self.eqns for var in eqn.outvars}
        eqns: list[Any] = []
        for eqn in self.graph.between(made, {atom for one in self.eqns for atom in variables(one.invars)}):
            if id(eqn) not in links:
                if any(atom in self.dims for atom in variables(eqn.invars)):
                    eqns = [eqn]
                    break
                links[id(eqn)] = None
                reductions |= dict.fromkeys(eqn.outvars, "")
        return dataclasses.replace(self, links=links, reductions=reductions), eqns

    @functools.cached_property
    def _outputs(self) -> list[Any]:
        def is_read(var: Any) -> bool:
            return self.graph.is_output(var) or any(id(eqn) not in self.links for eqn in self.graph.readers(var))

        return [var for eqn in self.eqns for var in eqn.outvars if is_read(var)]

    @functools.cached_property
    def _kept_bytes(self) -> int:
        """The bytes of what the loops read and return in chunks, and of what is reduced over them.

        What is given is held in any case, and counts for elementwise equations alone, which a compiler fuses.
        """
        made = {var for eqn in self.eqns for var in eqn.outvars}
        reads = {atom for eqn in self.eqns for atom in variables(eqn.invars)}
        if any(eqn.primitive.name in PRODUCTS for eqn in self.eqns):
            reads = {atom for atom in reads if not _is_given(self.graph, atom)}
        ends = [var for var in reads - made if var in self.dims]
        ends += [var for var in self._outputs if var in self.dims]
        parts = [var for var in self._outputs if self.reductions.get(var)]
        return sum(aval_bytes(var.aval) for var in ends) + self.num_parts * sum(aval_bytes(var.aval) for var in parts)


def _num_chunks(size: int, bounds: _Bounds) -> int:
    """Returns the number of chunks of a dimension: one near `bounds.parts` that divides it, if there is one."""
    first = min(bounds.parts, size)
    numbers = range(first, first // 2, -1) if bounds.is_most else range(first, min(max(2 * first, _FEW), size) + 1)
    num_rows = -(-size // next((number for number in numbers if size % number == 0), first))
    return -(-size // num_rows)


def _is_given(graph: EquationGraph, atom: Any) -> bool:
    """Returns whether a value is an argument or a constant, but for its shape."""
    source = graph.producer(atom)
    return source is None or (source.primitive.name in _RESHAPES and _is_given(graph, source.invars[0]))


def _ends(eqn: Any, link: Link) -> list[tuple[Any, int]]:
    """Returns the variables of an equation that a link cuts, and along which dimension."""
    atoms = *zip(eqn.invars, link.operands, strict=True), *zip(eqn.outvars, link.results, strict=True)
    return [(atom, dim) for atom, dim in atoms if dim is not None and not is_literal(atom)]
