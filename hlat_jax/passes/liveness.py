"""Estimates the peak bytes of temporaries of a traced program from the lifetime of every value in it.

The model of the buffers that a compiler allocates:
- products, reductions, loops and collectives write buffers; elementwise operations are fused into their readers, unless
  that would compute an exponential or a quotient twice;
- a loop writes its stacked results in place, and updates its carry in place if the old value is not read again;
- a product copies an operand whose dims are in another order than it reads, and runs just before its result is first
  read: the gradients of weights last.
Shapes inside `shard_map` are those of one device. Arguments, and results that reuse donated arguments, are not
temporaries. tests/plan/test_memory.py compares the estimate with XLA's allocation on CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from hlat_jax.passes.jaxpr import COLLECTIVES, TRANSCENDENTAL, aval_bytes, called, is_transposed

# Operands and results of these are buffers.
_OPAQUE = {"dot_general", "scan", "while", "cond", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum"}
_OPAQUE |= {"dynamic_update_slice", "optimization_barrier", "conv_general_dilated", *COLLECTIVES}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "name", "stop_gradient", "transpose", "sharding_constraint"}


def estimated_temporaries(jaxpr: Any, arguments: Any) -> Peak:
    """Returns the peak of temporaries of a program on one device.

    Args:
      jaxpr: of the whole program, `products.live_jaxpr(jit(f).trace(*arguments))`.
      arguments: their shapes and shardings.
    """
    program = _Program(jaxpr, [_share_of(leaf) for leaf in jax.tree.leaves(arguments)])
    owned = set(program.root.outs)
    for op in reversed(program.root.ops):
        if op.name in (*_VIEWS, "optimization_barrier") and not owned.isdisjoint(op.outs):
            owned.update(op.ins[:1])
    return _peak(program.root, program.sizes, frozenset(owned))


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak memory of a program, in bytes on one device.

    Attributes:
      total: all temporaries.
      in_loops: values that loops carry or stack, at their own peak: kept activations and sums of gradients.
      kept: values that forward passes keep for backward passes, at their own peak.
    """

    total: int
    in_loops: int
    kept: int


@dataclasses.dataclass
class _Op:
    """One operation; values are identified by numbers.

    Attributes:
      name: of the primitive.
      ins: values read.
      outs: values written.
      moved: those of `ins` that a product copies first.
      body: of a scan.
      num_consts: of a scan: number of constant inputs, the first.
      num_carry: of a scan: number of carried inputs, the next.
      is_backward: whether it belongs to a backward pass, recomputation included.
    """

    name: str
    ins: list[int]
    outs: list[int]
    moved: set[int] = dataclasses.field(default_factory=set)
    body: _Block | None = None
    num_consts: int = 0
    num_carry: int = 0
    is_backward: bool = False

    @property
    def carried(self) -> list[int]:
        return self.ins[self.num_consts : self.num_consts + self.num_carry]


@dataclasses.dataclass
class _Block:
    """Operations in order, with the values that enter and leave."""

    ops: list[_Op]
    ins: list[int]
    outs: list[int]


class _Program:
    """A jaxpr with its calls inlined: blocks of operations, and the bytes of each value on one device."""

    def __init__(self, jaxpr: Any, shares: Sequence[float]):
        self.sizes: list[int] = []
        self.shares: list[float] = []
        self.inside_a_region = False  # of shard_map, where shapes are those of one device
        self.is_backward = False
        env = {var: self._new(var.aval) for var in jaxpr.constvars}
        env |= {var: self._new(var.aval, share) for var, share in zip(jaxpr.invars, shares, strict=True)}
        self.root = self._block(jaxpr, env)

    def _new(self, aval: Any, share: float = 1.0) -> int:
        self.sizes.append(round(aval_bytes(aval) * share))
        self.shares.append(share)
        return len(self.sizes) - 1

    def _block(self, jaxpr: Any, env: dict[Any, int]) -> _Block:
        ops: list[_Op] = []
        self._inline(jaxpr, env, ops)
        return _Block(ops, [env[var] for var in jaxpr.invars], [self._read(var, env) for var in jaxpr.outvars])

    def _read(self, var: Any, env: dict[Any, int]) -> int:
        return self._new(None) if isinstance(var, Literal) else env[var]

    def _inline(self, jaxpr: Any, env: dict[Any, int], ops: list[_Op]) -> None:
        for eqn in jaxpr.eqns:
            ins = [self._read(var, env) for var in eqn.invars]
            outside, first = self.is_backward, len(ops)
            self.is_backward |= is_transposed(eqn)
            inner = called(eqn)
            if inner is not None:
                self._call(eqn, inner, ins, env=env, ops=ops)
            else:
                ops.extend(self._ops(eqn, ins, env))
                for op in ops[first:]:
                    op.is_backward = self.is_backward
            self.is_backward = outside

    def _ops(self, eqn: Any, ins: list[int], env: dict[Any, int]) -> Iterator[_Op]:
        name, share = eqn.primitive.name, self._share(eqn, ins)
        outs = [self._new(var.aval, share) for var in eqn.outvars]
        env |= dict(zip(eqn.outvars, outs, strict=True))
        if name == "scan":
            yield self._scan(eqn, ins, outs)
        elif name == "optimization_barrier":
            yield from (_Op(name, [i], [o]) for i, o in zip(ins, outs, strict=True))
        else:
            yield _Op(name, ins, outs, _moved_operands(eqn, ins) if name == "dot_general" else set())

    def _call(self, eqn: Any, inner: Any, ins: list[int], *, env: dict[Any, int], ops: list[_Op]) -> None:
        inner_env = {var: self._new(var.aval) for var in inner.constvars} | dict(zip(inner.invars, ins, strict=True))
        is_region = eqn.primitive.name == "shard_map"
        self.inside_a_region |= is_region
        self._inline(inner, inner_env, ops)
        self.inside_a_region &= not is_region
        for var, out in zip(eqn.outvars, inner.outvars, strict=True):
            value = env[var] = self._read(out, inner_env)
            if is_region:
                self.shares[value] = self.sizes[value] / max(1, aval_bytes(var.aval))

    def _share(self, eqn: Any, ins: list[int]) -> float:
        """Returns the share of a result on one device: by its sharding constraint, or that of its largest operand."""
        if self.inside_a_region:
            return 1.0
        if eqn.primitive.name == "sharding_constraint":
            return _share_of(jax.ShapeDtypeStruct(eqn.outvars[0].aval.shape, bool, sharding=eqn.params["sharding"]))
        sized = [(aval_bytes(var.aval), value) for var, value in zip(eqn.invars, ins, strict=True)]
        return self.shares[max(sized)[1]] if sized else 1.0

    def _scan(self, eqn: Any, ins: list[int], outs: list[int]) -> _Op:
        inner = eqn.params["jaxpr"].jaxpr
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        env = {var: self._new(var.aval) for var in inner.constvars}
        env |= {var: ins[i] if i < num_consts else self._new(var.aval) for i, var in enumerate(inner.invars)}
        return _Op("scan", ins, outs, set(), self._block(inner, env), num_consts, num_carry)


def _share_of(leaf: Any) -> float:
    if leaf.sharding is None:
        return 1.0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) / max(1, math.prod(leaf.shape))


def _moved_operands(eqn: Any, ins: list[int]) -> set[int]:
    """Returns the operands that a product copies: it reads [batch, free, contracted] by [batch, contracted, free].

    Without batch dims, it reads free and contracted dims in either order.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    moved = set()
    for side, (value, var) in enumerate(zip(ins, eqn.invars, strict=True)):
        lead = tuple(range(len(batch[side])))
        is_contracted = [dim in contracted[side] for dim in range(len(lead), var.aval.ndim)]
        changes = sum(a != b for a, b in itertools.pairwise(is_contracted))
        turned = lead and changes and is_contracted[0] != bool(side)
        if tuple(batch[side]) != lead or changes > 1 or turned:
            moved.add(value)
    return moved


def _peak(block: _Block, sizes: list[int], owned: frozenset[int]) -> Peak:
    """Returns the peak of the values of a block, without its inputs and those that its caller owns (`owned`)."""
    ops = _scheduled(_alive(block))
    sources = _sources(ops, frozenset(block.outs))
    dying = _dying(ops, sources, leaving=set(block.outs) - owned)
    used = {value for values in dying.values() for value in values}
    live: dict[int, int] = {}
    looped: set[int] = set()
    kept = _kept_for_backward(ops, dying)
    most = Peak(0, 0, 0)
    for place, op in enumerate(ops):
        made = {value: sizes[value] for value in op.outs if sources[value] == (value,) and value not in owned}
        transient, reused = Peak(sum(sizes[value] for value in op.moved), 0, 0), {}
        if op.body is not None:
            transient = _iteration_peak(op, sizes)
            starts = {source for value in op.carried for source in sources.get(value, ())}
            reused = {value: live[value] for value in starts.intersection(dying[place], live)}
            looped.update(op.outs)
        fresh = max(0, sum(made.values()) - sum(reused.values()))
        loops = [size for value, size in (live | made).items() if value in looped - reused.keys()]
        most = Peak(
            max(most.total, sum(live.values()) + fresh + transient.total),
            max(most.in_loops, sum(loops) + transient.in_loops),
            max(most.kept, sum(size for value, size in (live | made).items() if value in kept) + transient.kept),
        )
        for value in dying[place]:
            live.pop(value, None)
        live |= {value: size for value, size in made.items() if value in used}
    return most


def _kept_for_backward(ops: list[_Op], dying: dict[int, list[int]]) -> set[int]:
    """Returns the values that are written in the forward pass and last read in the backward pass."""
    forward = {value for op in ops if not op.is_backward for value in op.outs}
    return {
        value
        for place, values in dying.items()
        if place < len(ops) and ops[place].is_backward
        for value in values
        if value in forward
    }


def _dying(ops: list[_Op], sources: dict[int, tuple[int, ...]], *, leaving: set[int]) -> dict[int, list[int]]:
    """Returns number of an operation -> the buffers that it is the last to read."""
    last_use: dict[int, int] = {}
    for place, values in [(place, op.ins) for place, op in enumerate(ops)] + [(len(ops), leaving)]:
        last_use |= {source: place for value in values for source in sources.get(value, ())}
    dying = collections.defaultdict(list)
    for value, place in last_use.items():
        dying[place].append(value)
    return dying


def _iteration_peak(op: _Op, sizes: list[int]) -> Peak:
    """Returns the peak of one iteration of a loop, without what the loop reads, carries and stacks."""
    body = op.body
    made_at = {value: place for place, inner in enumerate(body.ops) for value in inner.outs}
    last_read = {value: place for place, inner in enumerate(body.ops) for value in inner.ins}
    before = body.ins[op.num_consts : op.num_consts + op.num_carry]
    in_place = {
        new for old, new in zip(before, body.outs, strict=False) if made_at.get(new, -1) >= last_read.get(old, -1)
    }
    return _peak(body, sizes, frozenset(in_place) | frozenset(body.outs[op.num_carry :]))


def _alive(block: _Block) -> list[_Op]:
    """Returns the operations that the results of the block depend on."""
    needed, kept = set(block.outs), []
    for op in reversed(block.ops):
        if needed.intersection(op.outs):
            needed.update(op.ins)
            kept.append(op)
    return kept[::-1]


def _scheduled(ops: list[_Op]) -> list[_Op]:
    """Returns the operations with each product or elementwise one moved to just before its first reader."""
    needed_at: dict[int, float] = {}
    places = []
    for number, op in reversed(list(enumerate(ops))):
        place = float(number)
        if op.name == "dot_general" or op.name not in _OPAQUE | _REDUCTIONS:
            place = max(place, min(needed_at.get(value, len(ops)) for value in op.outs) - 0.5)
        places.append((place, number))
        for value in op.ins:
            needed_at[value] = min(needed_at.get(value, len(ops)), place)
    return [ops[number] for _, number in sorted(places)]


def _sources(ops: list[_Op], outs: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Returns for each value computed here the buffers that it is read from: itself if it is a buffer.

    If a product copies an elementwise value, all products that read it do: it is added to their `moved`.
    """
    readers: dict[int, list[_Op]] = collections.defaultdict(list)
    for op in ops:
        for value in op.ins:
            readers[value].append(op)
    sources: dict[int, tuple[int, ...]] = {}
    costly: set[int] = set()  # fused values that are costly to compute
    for op in ops:
        below = tuple(dict.fromkeys(source for value in op.ins for source in sources.get(value, ())))
        is_costly = op.name in TRANSCENDENTAL or not costly.isdisjoint(op.ins)
        for out in op.outs:
            is_buffer = op.name not in _VIEWS and (op.name in _OPAQUE | _REDUCTIONS or out in outs)
            if op.name not in _VIEWS and not is_buffer:
                ends = list(_ends(out, readers))
                products = [(reader, value) for reader, value in ends if reader.name == "dot_general"]
                if any(value in reader.moved for reader, value in products):
                    for reader, value in products:
                        reader.moved.add(value)
                is_buffer = any(_reads_a_buffer(reader, value) for reader, value in ends)
                is_buffer |= is_costly and len(readers[out]) > 1
            sources[out] = (out,) if is_buffer else below
            if is_costly and not is_buffer:
                costly.add(out)
    return sources


def _ends(value: int, readers: dict[int, list[_Op]]) -> Iterator[tuple[_Op, int]]:
    """Yields (reader of a value, the value it reads), looking through views."""
    for op in readers[value]:
        if op.name in _VIEWS:
            yield from (end for out in op.outs for end in _ends(out, readers))
        else:
            yield op, value


def _reads_a_buffer(op: _Op, value: int) -> bool:
    return op.name in _REDUCTIONS or (op.name in _OPAQUE and value not in op.moved)
