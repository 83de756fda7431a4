"""Autocast of the equations that call functions: loops, branches, calls, derivative rules.

Each handler rebinds an equation with its functions retraced by the `Cast`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.passes.jaxpr import (
    backward_of,
    bind_shard_map,
    forward_of,
    is_inexact,
    op_name,
    pushforward_of,
    reaching,
    rebind,
    without_consts,
)
from hlat_jax.passes.kinds import Kind, Value, mix, value


def _arrays(cast: Any, operands: Sequence[Value]) -> list[Any]:
    return [operand.held(cast.low) for operand in operands]


def _kinds(operands: Sequence[Value]) -> list[Kind]:
    return [operand.kind for operand in operands]


def _values(cast: Any, eqn: Any, outs: Sequence[Any], kinds: Sequence[Kind]) -> list[Value]:
    return [
        value(out, kind=kind, aval=var.aval, low=cast.low)
        for out, kind, var in zip(outs, kinds, eqn.outvars, strict=True)
    ]


def _jit(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retrace(eqn.params["jaxpr"], _kinds(operands), wide=wide)
    return _values(cast, eqn, rebind(eqn, _arrays(cast, operands), jaxpr=closed), kinds)


def _remat(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retrace(core.ClosedJaxpr(eqn.params["jaxpr"], []), _kinds(operands), wide=wide)
    opened, consts = without_consts(closed)
    return _values(cast, eqn, rebind(eqn, consts + _arrays(cast, operands), jaxpr=opened), kinds)


def _shard_map(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    inner, kinds = eqn.params["jaxpr"], []

    def local(*arrays: Any) -> list[Any]:
        held = zip(arrays, _kinds(operands), inner.invars, strict=True)
        outs = cast.run(inner, [value(a, kind=k, aval=v.aval, low=cast.low) for a, k, v in held], wide)
        kinds[:] = _kinds(outs)
        return _arrays(cast, outs)

    outs = bind_shard_map(eqn, local, _arrays(cast, operands))
    return _values(cast, eqn, outs, kinds)


def _cond(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """Each result is narrow if it is in every branch, and otherwise as declared."""
    index, *rest = operands
    traced = [cast.retrace(branch, _kinds(rest))[1] for branch in eqn.params["branches"]]
    kinds = [_join(each) for each in zip(*traced, strict=True)]
    branches = tuple(cast.retrace(branch, _kinds(rest), forced=kinds)[0] for branch in eqn.params["branches"])
    outs = rebind(eqn, [index.declared(), *_arrays(cast, rest)], branches=branches)
    return _values(cast, eqn, outs, kinds)


def _join(kinds: Sequence[Kind]) -> Kind:
    if set(kinds) == {Kind.LOW} or Kind.FIXED in kinds:
        return kinds[0]
    return max(Kind.SOFT, mix(kinds))


def _scan(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    first, closed = eqn.params["num_consts"], eqn.params["jaxpr"]
    carried = slice(first, first + eqn.params["num_carry"])
    kinds = _kinds(operands)
    kinds[carried] = _carry_kinds(cast, closed, kinds, carried)
    num_ys = len(eqn.outvars) - eqn.params["num_carry"]
    wide = [*_stays_fp32(kinds[carried]), *[False] * num_ys]
    body, out_kinds = cast.retrace(closed, kinds, forced=[*kinds[carried], *[None] * num_ys], wide=wide)
    arrays = [_as_kind(cast, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    return _values(cast, eqn, rebind(eqn, arrays, jaxpr=body), out_kinds)


def _while(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    kinds = _kinds(operands)
    body_kinds = kinds[num_cond:]
    carry = _carry_kinds(cast, eqn.params["body_jaxpr"], body_kinds, slice(num_body, len(body_kinds)))
    wide_carry = _stays_fp32(carry)
    body, _ = cast.retrace(eqn.params["body_jaxpr"], [*body_kinds[:num_body], *carry], forced=carry, wide=wide_carry)
    condition, _ = cast.retrace(eqn.params["cond_jaxpr"], [*kinds[:num_cond], *carry])
    kinds = [*kinds[: num_cond + num_body], *carry]
    arrays = [_as_kind(cast, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    return _values(cast, eqn, rebind(eqn, arrays, body_jaxpr=body, cond_jaxpr=condition), carry)


def _stays_fp32(carry: Sequence[Kind]) -> list[bool]:
    return [kind >= Kind.KEPT for kind in carry]


def _as_kind(cast: Any, operand: Value, kind: Kind) -> Any:
    return operand.narrow(cast.low, saturate=True) if kind is Kind.LOW else operand.declared()


def _carry_kinds(cast: Any, body: Any, kinds: Sequence[Kind], carried: slice) -> list[Kind]:
    """Returns the kinds in which the body of a loop holds its carry.

    A carry that matrix products read, such as the activations of layers, is narrow if the body's result is. One that
    they never read is an accumulator: it stays fp32, and so does the arithmetic on it. The kinds are a fixed point:
    each only moves up in SOFT < LOW < WIDE < KEPT < HUGE, so the iteration ends. An INTEGER stays one while the body's
    result is INTEGER; otherwise it restarts from the kind that it would have had.
    """
    feeds = reaching(body.jaxpr, cast.is_product)[carried]
    order = [Kind.FIXED, Kind.SOFT, Kind.LOW, Kind.WIDE, Kind.KEPT, Kind.HUGE]

    def start(kind: Kind, is_read: bool) -> Kind:
        if kind in (Kind.FIXED, Kind.HUGE):
            return kind
        if not is_read:
            return Kind.KEPT
        return kind if kind is Kind.LOW else Kind.SOFT

    first = [start(kind, is_read) for kind, is_read in zip(kinds[carried], feeds, strict=True)]
    carry = [kind if kind is Kind.INTEGER else one for kind, one in zip(kinds[carried], first, strict=True)]
    while True:
        full = [*kinds[: carried.start], *carry, *kinds[carried.stop :]]
        outs = cast.retrace(body, full)[1][: len(carry)]
        # narrow on entry but fp32 on exit: fp32
        outs = [
            Kind.WIDE if old is Kind.LOW and new is not Kind.LOW else new for old, new in zip(carry, outs, strict=True)
        ]
        moved = []
        for old, new, initial in zip(carry, outs, first, strict=True):
            if old is Kind.FIXED or new is Kind.FREE or old is new:
                moved.append(old)
            elif old is Kind.INTEGER:
                moved.append(initial)
            else:
                moved.append(max(old, Kind.KEPT if new is Kind.INTEGER else new, key=order.index))
        if moved == carry:
            return carry
        carry = moved


def _custom_jvp(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retrace(eqn.params["call_jaxpr"], _kinds(operands), wide=wide)
    in_avals, out_avals = closed_avals(eqn)
    call = jax.custom_jvp(_name(core.jaxpr_as_fun(closed), eqn))
    is_symbolic = eqn.params["symbolic_zeros"]

    def rule(primals, tangents):
        is_given, is_pushed = [_is_nonzero(tangent, aval) for tangent, aval in zip(tangents, in_avals, strict=True)], []

        def declared(*arrays):
            filled = _with_zeros(arrays[len(in_avals) :], in_avals, is_given, is_symbolic=is_symbolic)
            outs, pushed = pushforward_of(eqn, arrays[: len(in_avals)], filled)
            is_pushed[:] = [_is_nonzero(tangent, aval) for tangent, aval in zip(pushed, out_avals, strict=True)]
            return [*outs, *_chosen(pushed, is_pushed)]

        traced = jax.make_jaxpr(declared)(*in_avals, *_chosen(in_avals, is_given))
        in_kinds = [*_kinds(operands), *_gradient_kinds(_chosen(_kinds(operands), is_given))]
        tangent_kinds = _gradient_kinds(_chosen(kinds, is_pushed))
        wide_outs = [*wide, *[False] * len(tangent_kinds)]
        narrow, _ = cast.retrace(traced, in_kinds, forced=[*kinds, *tangent_kinds], wide=wide_outs)
        found = core.jaxpr_as_fun(narrow)(*primals, *_chosen(tangents, is_given))
        outs, pushed = found[: len(kinds)], found[len(kinds) :]
        return outs, _with_zeros(pushed, list(map(jax.typeof, outs)), is_pushed, is_symbolic=is_symbolic)

    call.defjvp(rule, symbolic_zeros=is_symbolic)
    return _values(cast, eqn, call(*_arrays(cast, operands)), kinds)


class _Forward:
    """The forward rule of a `custom_vjp`, cast, and what is known of its residuals.

    Args:
      traced: declared jaxpr of (results, residuals).
      narrow: the cast jaxpr.
      kinds: kinds of its results and residuals.
      num_outs: number of the results.

    Attributes:
      avals: declared types of the residuals.
      values: values of residuals that depend on no operand, which the backward rule may read in Python, and None.
    """

    def __init__(self, traced: Any, narrow: Any, kinds: Sequence[Kind], num_outs: int):
        self.narrow, self.num_outs = narrow, num_outs
        self.avals, self.kinds = traced.out_avals[num_outs:], kinds[num_outs:]
        consts = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        atoms = traced.jaxpr.outvars[num_outs:]
        found = [atom.val if isinstance(atom, core.Literal) else consts.get(atom) for atom in atoms]
        self.values = [None if isinstance(value, jax.core.Tracer) else value for value in found]


def _custom_vjp(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """The forward and backward rules are traced at their declared dtypes and cast, residuals included."""
    closed, kinds = cast.retrace(eqn.params["call_jaxpr"], _kinds(operands))
    in_avals, out_avals = closed_avals(eqn)
    num_consts = eqn.params.get("num_consts", 0)  # closed-over operands, which its rules do not receive
    call = jax.custom_vjp(_name(core.jaxpr_as_fun(closed), eqn))
    is_symbolic = eqn.params["symbolic_zeros"]
    forwards: dict[tuple[bool, ...], _Forward] = {}  # by whether each operand is differentiated

    def forward(perturbed):
        if perturbed not in forwards:
            traced = jax.make_jaxpr(lambda *args: forward_of(eqn, args, perturbed))(*in_avals)
            forced = [*kinds, *[None] * (len(traced.out_avals) - len(kinds))]
            narrow, found = cast.retrace(traced, _kinds(operands), forced=forced)
            forwards[perturbed] = _Forward(traced, narrow, found, len(kinds))
        return forwards[perturbed]

    def forward_rule(*args):
        # other rules are not told; True would be an error for what such a rule closes over
        perturbed = [is_symbolic and arg.perturbed for arg in args]
        arrays = [arg.value for arg in args] if is_symbolic else args
        narrow = forward((False,) * num_consts + tuple(perturbed[num_consts:])).narrow
        found = core.jaxpr_as_fun(narrow)(*arrays)
        return found[: len(kinds)], tuple(found[len(kinds) :])

    def backward_rule(residuals, cotangents):
        types = _types(map(jax.typeof, residuals))
        of = next(one for one in reversed(forwards.values()) if _types(one.narrow.out_avals[one.num_outs :]) == types)
        is_given, is_wanted = [_is_nonzero(one, aval) for one, aval in zip(cotangents, out_avals, strict=True)], []
        is_array = [value is None for value in of.values]

        def declared(*arrays):
            held = iter(arrays)
            filled = [next(held) if value is None else value for value in of.values]
            found = backward_of(eqn, filled, _with_zeros(held, out_avals, is_given, is_symbolic=is_symbolic))
            is_wanted[:] = [one is not None for one in found]
            return _chosen(found, is_wanted)

        traced = jax.make_jaxpr(declared)(*_chosen(of.avals, is_array), *_chosen(out_avals, is_given))
        in_kinds = [*_chosen(of.kinds, is_array), *_gradient_kinds(_chosen(kinds, is_given))]
        wanted = _gradient_kinds(_chosen(_kinds(operands), is_wanted))
        narrow, _ = cast.retrace(traced, in_kinds, forced=wanted)
        grads = iter(core.jaxpr_as_fun(narrow)(*_chosen(residuals, is_array), *_chosen(cotangents, is_given)))
        return tuple(next(grads) if is_one else None for is_one in is_wanted)

    call.defvjp(forward_rule, backward_rule, symbolic_zeros=is_symbolic)
    arrays = _arrays(cast, operands)
    consts = [_without_gradient(array, eqn) for array in arrays[:num_consts]]
    return _values(cast, eqn, call(*consts, *arrays[num_consts:]), kinds)


def _without_gradient(array: Any, eqn: Any) -> Any:
    """Returns a closed-over operand of a `custom_vjp`; a gradient by it raises, as it does without autocast."""
    if not (isinstance(array, jax.core.Tracer) and is_inexact(array)):
        return array
    closed_over = jax.custom_jvp(lambda x: x)

    @closed_over.defjvp
    def rule(primals, tangents):
        raise ValueError(
            f"autocast: {op_name(eqn)} is a jax.custom_vjp that closes over an array that you differentiate with "
            "respect to, and its derivative rule has no gradient for it: pass the array as an argument."
        )

    return closed_over(array)


def closed_avals(eqn: Any) -> tuple[list[Any], list[Any]]:
    """Returns the avals of an equation's operands and of its results, as declared."""
    return [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]


def _name(function: Any, eqn: Any) -> Any:
    def call(*args):
        return function(*args)

    call.__name__ = call.__qualname__ = op_name(eqn) or eqn.primitive.name
    return call


def _gradient_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """Returns the kinds of the tangents or cotangents of values: they have the dtypes of the values."""
    return [kind if kind <= Kind.LOW and kind != Kind.FREE else Kind.SOFT for kind in kinds]


def _types(avals: Iterable[Any]) -> list[tuple]:
    return [(aval.shape, aval.dtype) for aval in avals]


def _is_nonzero(item: Any, aval: Any) -> bool:
    """Returns whether the tangent or cotangent of a value of this type is an array."""
    return is_inexact(aval) and not isinstance(item, SymbolicZero)


def _chosen(items: Sequence[Any], is_chosen: Sequence[bool]) -> list[Any]:
    return list(itertools.compress(items, is_chosen))


def _with_zeros(items: Sequence[Any], avals: Sequence[Any], is_given: Sequence[bool], *, is_symbolic: bool) -> list:
    """Returns the tangents or cotangents of values: the items, and zeros for the values without."""
    left = iter(items)
    return [
        next(left)
        if is_one
        else SymbolicZero(aval.to_tangent_aval())
        if is_symbolic
        else np.zeros(aval.shape, jax.dtypes.float0)
        for is_one, aval in zip(is_given, avals, strict=True)
    ]


HANDLERS = {
    "jit": _jit,
    "remat2": _remat,
    "shard_map": _shard_map,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
