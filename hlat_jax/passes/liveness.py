"""Estimates the peak bytes of temporaries of a traced program from the lifetime of every value in it.

Products, reductions, loops and collectives write buffers. Elementwise operations are fused into their readers, unless
an exponential or a quotient would be computed twice. A loop writes its stacked results in place. It updates its carry
in place if the old value is not read again. A product copies an operand if its dims are in another order than the
product reads them. A product runs just before its result is first read, so the gradients of weights run last.

Shapes inside `shard_map` are the shapes on one device. Arguments, and results that reuse donated arguments, are not
temporaries. tests/plan/test_memory.py compares the estimate with XLA's allocation on CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from hlat_jax.passes.dataflow import Dataflow, Op, num_bytes, readers, upstream
from hlat_jax.passes.interpret import called, compound
from hlat_jax.passes.jaxpr import (
    COLLECTIVES,
    REDUCTIONS,
    TRANSCENDENTAL,
    aval_bytes,
    is_literal,
    is_transposed,
    primitives,
    variables,
)

# Operands and results of these are buffers.
_OPAQUE = COLLECTIVES.keys() | primitives(
    """
    dot_general scan while cond gather scatter scatter-add sort top_k cumsum dynamic_update_slice optimization_barrier
    conv_general_dilated
    """
)
_VIEWS = primitives("reshape squeeze expand_dims copy name stop_gradient transpose sharding_constraint")


def estimated_temporaries(jaxpr: core.Jaxpr, arguments: Any) -> Peak:
    """Returns the peak of temporaries of a program on one device.

    Args:
      jaxpr: the whole program, `products.live_jaxpr(jit(f).trace(*arguments))`.
      arguments: shapes and shardings of the arguments.
    """
    return _peak(moments(jaxpr, arguments))


def moments(jaxpr: core.Jaxpr, arguments: Any) -> Iterator[_Moment]:
    """Yields each equation in the order in which they run, and the temporaries while it runs. A loop runs once.

    Args:
      jaxpr, arguments: as for `estimated_temporaries`.
    """
    program = _Block(jaxpr, [_share_of(leaf) for leaf in jax.tree.leaves(arguments)])
    owned = set(variables(program.outputs))
    for op in reversed(program.ops):
        if op.name in (*_VIEWS, "optimization_barrier") and not owned.isdisjoint(op.outvars):
            owned.update(op.operands[:1])
    return _moments(program, frozenset(owned))


class Peak(NamedTuple):
    """Peak memory of a program, in bytes on one device.

    Attributes:
      total: all temporaries.
      in_loops: values that loops carry or stack, such as kept activations and sums of gradients, at their own peak.
      kept: values that forward passes keep for backward passes, at their own peak.
    """

    total: int
    in_loops: int
    kept: int


_Moment = tuple[core.JaxprEqn, Peak]


@dataclasses.dataclass(eq=False)
class _Op(Op):
    """One operation of a block.

    Attributes:
      moved: operands that a product copies first.
      body: the body of a scan.
      is_backward: whether it belongs to a backward pass, recomputation included.
    """

    moved: set[core.Var] = dataclasses.field(default_factory=set)
    body: _Block | None = None
    is_backward: bool = False


class _Block(Dataflow[_Op]):
    """A program or the body of a loop, with the share of each value on one device, `shares`, and its bytes, `sizes`.

    Args:
      jaxpr: open jaxpr.
      shares: for each input, the share of it on one device.
      is_local: whether shapes are the shapes on one device, as inside `shard_map`.
      is_backward: whether the block belongs to a backward pass.
    """

    def __init__(
        self, jaxpr: core.Jaxpr, shares: Sequence[float], *, is_local: bool = False, is_backward: bool = False
    ):
        super().__init__(jaxpr, inlined=called, op=_Op)
        self.shares = dict.fromkeys(self.number, 1.0)
        self.shares |= dict(zip(self.inputs[len(jaxpr.constvars) :], shares, strict=True))
        self.is_local = is_local
        for op in self.ops:
            op.is_backward = is_backward or any(map(is_transposed, op.enclosing))
            self.shares |= dict.fromkeys(op.outvars, self._share_of_results(op))
            if op.name == "dot_general":
                op.moved = _moved_operands(op)
            elif op.name == "scan":
                loop = compound(op.eqn)
                inside = [self._share(op, at) if at < loop.carried.start else 1.0 for at in range(len(op.invars))]
                body, is_local = loop.bodies[0].closed.jaxpr, self._is_local(op)
                op.body = _Block(body, inside, is_local=is_local, is_backward=op.is_backward)
        self.sizes = {value: round(num_bytes(value) * share) for value, share in self.shares.items()}
        self.ops = [part for op in self.ops for part in _split(op)]

    def _is_local(self, op: _Op) -> bool:
        return self.is_local or any(call.eqn.primitive.name == "shard_map" for call in op.calls)

    def _share(self, op: _Op, at: int) -> float:
        """Returns the share of operand number `at` on one device, relative to its shape where `op` reads it."""
        value = op.invars[at]
        if is_literal(value):
            return 1.0
        producer = self.producer.get(value)
        if producer is None or self._is_local(op) or not self._is_local(producer):
            return self.shares[value]
        return num_bytes(value) / max(1, aval_bytes(op.eqn.invars[at].aval))  # a result of a `shard_map`

    def _share_of_results(self, op: _Op) -> float:
        """Returns the share of the results on one device: by a sharding constraint, or as of the largest operand."""
        if self._is_local(op):
            return 1.0
        if op.name == "sharding_constraint":
            return _share_of(
                jax.ShapeDtypeStruct(op.eqn.outvars[0].aval.shape, bool, sharding=op.eqn.params["sharding"])
            )
        atoms = zip(op.eqn.invars, op.invars, strict=True)
        sized = [(aval_bytes(var.aval), math.inf if is_literal(atom) else self.number[atom]) for var, atom in atoms]
        largest = max(range(len(sized)), key=sized.__getitem__, default=None)
        return 1.0 if largest is None else self._share(op, largest)


def _split(op: _Op) -> Iterator[_Op]:
    """Yields an operation, or one for each operand of a barrier, whose results are the operands."""
    if op.name != "optimization_barrier":
        yield op
        return
    for read, written in zip(op.invars, op.outvars, strict=True):
        yield dataclasses.replace(op, invars=[read], outvars=[written])


def _share_of(leaf: Any) -> float:
    if leaf.sharding is None:
        return 1.0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) / max(1, math.prod(leaf.shape))


def _moved_operands(op: _Op) -> set[core.Var]:
    """Returns the operands that a product copies: it reads [batch, free, contracted] by [batch, contracted, free].

    Without batch dims, it reads free and contracted dims in either order.
    """
    contracted, batch = op.eqn.params["dimension_numbers"]
    moved = []
    for side, (value, var) in enumerate(zip(op.invars, op.eqn.invars, strict=True)):
        lead = tuple(range(len(batch[side])))
        is_contracted = [dim in contracted[side] for dim in range(len(lead), var.aval.ndim)]
        changes = sum(a != b for a, b in itertools.pairwise(is_contracted))
        turned = lead and changes and is_contracted[0] != bool(side)
        if tuple(batch[side]) != lead or changes > 1 or turned:
            moved.append(value)
    return set(variables(moved))


def _peak(moments: Iterable[_Moment]) -> Peak:
    """Returns the largest value of each field."""
    return Peak(*map(max, zip(*((0, 0, 0), *(held for _, held in moments)), strict=True)))


def _moments(block: _Block, owned: frozenset[core.Var]) -> Iterator[_Moment]:
    """Yields the bytes of a block at each operation, without its inputs and those that its caller owns (`owned`)."""
    sizes, results = block.sizes, set(variables(block.outputs))
    ops = _schedule(upstream(block.ops, results))
    sources = _sources(ops, results)
    dying = _dying(ops, sources, leaving=results - owned)
    used = {value for values in dying.values() for value in values}
    live: dict[core.Var, int] = {}
    looped: set[core.Var] = set()
    kept = _kept_for_backward(ops, dying)
    held = Peak(0, 0, 0)  # of the live values, kept up to date

    def of(values: dict[core.Var, int]) -> Peak:
        in_loops, in_backward = (sum(values[value] for value in values.keys() & part) for part in (looped, kept))
        return Peak(sum(values.values()), in_loops, in_backward)

    for place, op in enumerate(ops):
        made = {value: sizes[value] for value in op.outvars if sources[value] == (value,) and value not in owned}
        inside, reused = [(op.eqn, Peak(sum(sizes[value] for value in op.moved), 0, 0))], {}
        if op.body is not None:
            inside = [*_iteration(op)] or inside
            starts = {
                source for value in variables(op.invars[compound(op.eqn).carried]) for source in sources.get(value, ())
            }
            reused = {value: live[value] for value in starts.intersection(dying[place], live)}
            looped.update(op.outvars)
        new, old = of(made), of(reused)
        for eqn, transient in inside:
            now = Peak(
                held.total + max(0, new.total - old.total) + transient.total,
                held.in_loops + new.in_loops - old.in_loops + transient.in_loops,
                held.kept + new.kept + transient.kept,
            )
            yield eqn, now
        gone = of({value: live.pop(value) for value in dying[place] if value in live})
        read = {value: size for value, size in made.items() if value in used}
        live |= read
        held = Peak(*(a + b - c for a, b, c in zip(held, of(read), gone, strict=True)))


def _kept_for_backward(ops: list[_Op], dying: dict[int, list[core.Var]]) -> set[core.Var]:
    """Returns the values that are written in the forward pass and last read in the backward pass."""
    forward = {value for op in ops if not op.is_backward for value in op.outvars}
    backward = [values for place, values in dying.items() if place < len(ops) and ops[place].is_backward]
    return forward & set().union(*backward)


def _dying(
    ops: list[_Op], sources: dict[core.Var, tuple[core.Var, ...]], *, leaving: set[core.Var]
) -> dict[int, list[core.Var]]:
    """Returns number of an operation -> the buffers that it is the last to read."""
    last_use: dict[core.Var, int] = {}
    for place, values in [(place, op.operands) for place, op in enumerate(ops)] + [(len(ops), leaving)]:
        last_use |= {source: place for value in values for source in sources.get(value, ())}
    dying = collections.defaultdict(list)
    for value, place in last_use.items():
        dying[place].append(value)
    return dying


def _iteration(op: _Op) -> Iterator[_Moment]:
    """Yields the bytes during one iteration of a loop, without what the loop reads, carries and stacks."""
    body, carry = op.body, compound(op.eqn).carried
    made_at = {value: place for place, inner in enumerate(body.ops) for value in inner.outvars}
    last_read = {value: places[-1] for value, places in readers(body.ops).items()}
    carried = zip(body.inputs[len(body.inputs) - len(op.invars) :][carry], body.outputs, strict=False)
    owned = {new for old, new in carried
             if not is_literal(new) and made_at.get(new, -1) >= last_read.get(old, -1)}  # fmt: skip
    return _moments(body, frozenset({*owned, *variables(body.outputs[carry.stop - carry.start :])}))


def _schedule(ops: list[_Op]) -> list[_Op]:
    """Returns the operations with each product or elementwise one moved to just before its first reader."""
    needed_at: dict[core.Var, float] = {}
    places = []
    for number, op in reversed(list(enumerate(ops))):
        place = float(number)
        if op.name == "dot_general" or op.name not in _OPAQUE | REDUCTIONS:
            place = max(place, min(needed_at.get(value, len(ops)) for value in op.outvars) - 0.5)
        places.append((place, number))
        for value in op.operands:
            needed_at[value] = min(needed_at.get(value, len(ops)), place)
    return [ops[number] for _, number in sorted(places)]


def _sources(ops: list[_Op], results: set[core.Var]) -> dict[core.Var, tuple[core.Var, ...]]:
    """Returns for each value computed here the buffers that it is read from: itself if it is a buffer.

    If a product copies an elementwise value, all products that read it do: it is added to their `moved`.
    """
    readers_of = {value: [ops[place] for place in places] for value, places in readers(ops).items()}
    sources: dict[core.Var, tuple[core.Var, ...]] = {}
    costly: set[core.Var] = set()  # fused values that are costly to compute
    for op in ops:
        below = tuple(dict.fromkeys(source for value in op.operands for source in sources.get(value, ())))
        is_costly = op.name in TRANSCENDENTAL or not costly.isdisjoint(op.operands)
        for out in op.outvars:
            is_buffer = op.name not in _VIEWS and (op.name in _OPAQUE | REDUCTIONS or out in results)
            if op.name not in _VIEWS and not is_buffer:
                ends = list(_ends(out, readers_of))
                products = [(reader, value) for reader, value in ends if reader.name == "dot_general"]
                if any(value in reader.moved for reader, value in products):
                    for reader, value in products:
                        reader.moved.add(value)
                is_buffer = any(
                    reader.name in REDUCTIONS or (reader.name in _OPAQUE and value not in reader.moved)
                    for reader, value in ends
                )
                is_buffer |= is_costly and len(readers_of.get(out, ())) > 1
            sources[out] = (out,) if is_buffer else below
            if is_costly and not is_buffer:
                costly.add(out)
    return sources


def _ends(value: core.Var, readers_of: dict[core.Var, list[_Op]]) -> Iterator[tuple[_Op, core.Var]]:
    """Yields (reader of a value, the value it reads), looking through views."""
    for op in readers_of.get(value, ()):
        if op.name in _VIEWS:
            yield from (end for out in op.outvars for end in _ends(out, readers_of))
        else:
            yield op, value
