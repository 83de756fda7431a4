"""How many bytes of temporaries a traced program holds at its fullest moment, by the life of every value in it.

Owns a model of what a compiler keeps: products, reductions, loops and collectives write buffers; what is elementwise
is computed where it is read, unless that would compute an exponential twice; a loop writes its stacked results in place
and updates what it carries in place where the old value is no longer read. The order is the program's. Refuses to know
what the program is: it takes the jaxpr of the very step that trains, whose shapes inside `shard_map` are those of one
device. Arguments, and results that take the place of donated arguments, are no temporaries.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

_INLINED = {"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "shard_map"}
_INLINED |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"}
# Their inputs are buffers and their results too.
_OPAQUE = {"dot_general", "scan", "while", "cond", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum"}
_OPAQUE |= {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter"}
_OPAQUE |= {"psum_scatter", "ppermute", "all_to_all", "dynamic_update_slice", "optimization_barrier", "conv_general_dilated"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
_VIEWS = {"reshape", "squeeze", "expand_dims", "copy", "pvary", "pcast", "name", "stop_gradient", "transpose"}
_VIEWS |= {"sharding_constraint", "optimization_barrier"}
_EXPENSIVE = {"exp", "exp2", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt", "pow", "sin", "cos", "erf", "div"}


@dataclasses.dataclass
class _Op:
    """One operation on values, which are numbers; `body` and its counts belong to a scan."""

    name: str
    ins: list[int]
    outs: list[int]
    body: _Block | None = None
    num_consts: int = 0
    num_carry: int = 0
    moved: frozenset[int] = frozenset()


@dataclasses.dataclass
class _Block:
    """Operations in order, the values that come from outside, and those that leave."""

    ops: list[_Op]
    ins: list[int]
    outs: list[int]


class _Program:
    """A jaxpr with its calls inlined: blocks of operations, and the bytes of each value."""

    def __init__(self, jaxpr: Any):
        self.sizes: list[int] = []
        env = {var: self._new(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self.root = self._block(jaxpr, env)

    def _new(self, aval: Any) -> int:
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype("bool"))
        itemsize = dtype.itemsize if isinstance(dtype, np.dtype) else 0
        self.sizes.append(math.prod(shape) * itemsize)
        return len(self.sizes) - 1

    def _block(self, jaxpr: Any, env: dict[Any, int]) -> _Block:
        ops: list[_Op] = []
        ins = [env[var] for var in (*jaxpr.constvars, *jaxpr.invars)]
        self._inline(jaxpr, env, ops)
        outs = [self._read(var, env) for var in jaxpr.outvars]
        return _Block(ops, ins, outs)

    def _read(self, var: Any, env: dict[Any, int]) -> int:
        return self._new(jax.core.ShapedArray((), np.bool_)) if isinstance(var, Literal) else env[var]

    def _inline(self, jaxpr: Any, env: dict[Any, int], ops: list[_Op]) -> None:
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            ins = [self._read(var, env) for var in eqn.invars]
            inner = _inner(eqn) if name in _INLINED else None
            if inner is not None:
                inner_env = dict(zip(inner.invars, ins, strict=True))
                inner_env |= {var: self._new(var.aval) for var in inner.constvars}
                self._inline(inner, inner_env, ops)
                env |= {var: self._read(out, inner_env) for var, out in zip(eqn.outvars, inner.outvars, strict=True)}
                continue
            outs = [self._new(var.aval) for var in eqn.outvars]
            env |= dict(zip(eqn.outvars, outs, strict=True))
            if name == "scan":
                ops.append(self._scan(eqn, ins, outs))
            elif name == "optimization_barrier":
                ops.extend(_Op(name, [i], [o]) for i, o in zip(ins, outs, strict=True))
            elif name == "dot_general":
                ops.append(_Op(name, ins, outs, moved=_moved_operands(eqn, ins)))
            else:
                ops.append(_Op(name, ins, outs))

    def _scan(self, eqn: Any, ins: list[int], outs: list[int]) -> _Op:
        inner = eqn.params["jaxpr"].jaxpr
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        env = {var: self._new(var.aval) for var in inner.constvars}
        for i, var in enumerate(inner.invars):
            env[var] = ins[i] if i < num_consts else self._new(var.aval)
        block = self._block(inner, env)
        block.ins = [env[var] for var in inner.invars]
        return _Op("scan", ins, outs, block, num_consts, num_carry)


def _moved_operands(eqn: Any, ins: list[int]) -> frozenset[int]:
    """Returns the operands of a product that are copied into its order: batch, free, summed by batch, summed, free.

    A product without batch dims takes either order of the two.
    """
    summed, batch = eqn.params["dimension_numbers"]
    moved = set()
    for side, (value, var) in enumerate(zip(ins, eqn.invars, strict=True)):
        lead, dims = tuple(range(len(batch[side]))), set(summed[side])
        is_summed = [dim in dims for dim in range(len(lead), var.aval.ndim)]
        changes = sum(a != b for a, b in itertools.pairwise(is_summed))
        turned = bool(lead) and changes and is_summed[0] != bool(side)
        if tuple(batch[side]) != lead or changes > 1 or turned:
            moved.add(value)
    return frozenset(moved)


def _inner(eqn: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            found = eqn.params[key]
            return getattr(found, "jaxpr", found)
    return None


def temporary_bytes(jaxpr: Any) -> int:
    """Returns the bytes of temporaries at the fullest moment of a program.

    Args:
      jaxpr: a `Jaxpr`, as `jax.jit(f).trace(...).jaxpr.jaxpr`.
    """
    program = _Program(jaxpr)
    return _peak(program.root, program.sizes, frozenset(program.root.outs))


def _peak(block: _Block, sizes: list[int], owned: frozenset[int]) -> int:
    """Returns the most bytes that the values of a block take beside its inputs and those that its caller `owned`."""
    ops = _late_slices(_alive(block), block)
    sources = _sources(ops, block, sizes)
    last_use: dict[int, int] = {}
    for place, op in enumerate(ops):
        for value in op.ins:
            for source in sources.get(value, ()):
                last_use[source] = place
    for value in set(block.outs) - owned:
        for source in sources.get(value, ()):
            last_use[source] = len(ops)
    dying = collections.defaultdict(list)
    for value, place in last_use.items():
        dying[place].append(value)
    live: dict[int, int] = {}
    total = most = 0
    for place, op in enumerate(ops):
        made = {v: sizes[v] for v in op.outs if sources.get(v) == (v,) and v not in owned}
        inside = sum(sizes[value] for value in op.moved)
        if op.body is not None:
            inside = _scan_peak(op, sizes)
        freed = sum(live.get(value, 0) for value in dying[place])
        fresh = sum(made.values())
        in_place = min(freed, fresh) if op.name not in _OPAQUE or op.name == "scan" else 0
        most = max(most, total + fresh - in_place + inside)
        for value in dying[place]:
            total -= live.pop(value, 0)
        for value, size in made.items():
            if value in last_use:
                live[value] = size
                total += size
    return most


def _scan_peak(op: _Op, sizes: list[int]) -> int:
    """Returns what one turn of a loop takes beside what the loop carries, reads and writes."""
    body = op.body
    carried_in = body.ins[op.num_consts : op.num_consts + op.num_carry]
    place = {value: i for i, inner in enumerate(body.ops) for value in inner.outs}
    last_read: dict[int, int] = {}
    for i, inner in enumerate(body.ops):
        for value in inner.ins:
            last_read[value] = i
    stacked = [v for v, out in zip(body.outs[op.num_carry :], op.outs[op.num_carry :], strict=True)]
    in_place = {
        after
        for before, after in zip(carried_in, body.outs, strict=False)
        if place.get(after, -1) >= last_read.get(before, -1)
    }
    return _peak(body, sizes, frozenset(in_place) | frozenset(stacked))


def _alive(block: _Block) -> list[_Op]:
    needed, kept = set(block.outs), []
    for op in reversed(block.ops):
        if needed.intersection(op.outs):
            needed.update(op.ins)
            kept.append(op)
    return kept[::-1]


def _late_slices(ops: list[_Op], block: _Block) -> list[_Op]:
    return ops


def _sources(ops: list[_Op], block: _Block, sizes: list[int]) -> dict[int, tuple[int, ...]]:
    """Returns, for each value, the buffers that it is read from: itself when it is one."""
    readers: dict[int, list[_Op]] = collections.defaultdict(list)
    for op in ops:
        for value in op.ins:
            readers[value].append(op)
    sources: dict[int, tuple[int, ...]] = {}
    costly: set[int] = set()
    outs = set(block.outs)
    for op in ops:
        for out in op.outs:
            below = tuple(dict.fromkeys(s for value in op.ins for s in sources.get(value, ())))
            is_costly = op.name in _EXPENSIVE or any(v in costly for v in op.ins if v not in sources.get(v, ()))
            if op.name in _VIEWS:
                sources[out] = below
                if is_costly:
                    costly.add(out)
                continue
            buffered = op.name in _OPAQUE or op.name in _REDUCTIONS or out in outs
            buffered |= any(_reads_buffers(reader, out, readers) for reader in readers[out])
            buffered |= is_costly and len(readers[out]) > 1
            if buffered:
                sources[out] = (out,)
            else:
                sources[out] = below
                if is_costly:
                    costly.add(out)
    return sources


def _reads_buffers(op: _Op, value: int, readers: dict[int, list[_Op]]) -> bool:
    if op.name in _VIEWS - {"optimization_barrier"}:
        return any(_reads_buffers(reader, out, readers) for out in op.outs for reader in readers[out])
    return op.name in _REDUCTIONS or (op.name in _OPAQUE and value not in op.moved)
