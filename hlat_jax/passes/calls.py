"""Autocast of the equations that call functions: loops, branches, calls, derivative rules.

Each handler rebinds an equation with its functions retraced by the `Cast`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from hlat_jax.passes.jaxpr import is_inexact, manual_axes, op_name, reaching, rebind, vjp_of, without_consts
from hlat_jax.passes.kinds import Kind, Value, mixed, value


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
    closed, kinds = cast.retraced(eqn.params["jaxpr"], _kinds(operands), wide=wide)
    return _values(cast, eqn, rebind(eqn, _arrays(cast, operands), jaxpr=closed), kinds)


def _remat(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retraced(core.ClosedJaxpr(eqn.params["jaxpr"], []), _kinds(operands), wide=wide)
    opened, consts = without_consts(closed)
    return _values(cast, eqn, rebind(eqn, consts + _arrays(cast, operands), jaxpr=opened), kinds)


def _shard_map(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    params, inner, kinds = eqn.params, eqn.params["jaxpr"], []

    def local(*arrays):
        held = zip(arrays, _kinds(operands), inner.invars, strict=True)
        outs = cast.run(inner, [value(a, kind=k, aval=v.aval, low=cast.low) for a, k, v in held], wide)
        kinds[:] = _kinds(outs)
        return tuple(_arrays(cast, outs))

    mapped = jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(manual_axes(eqn)),
        check_vma=params["check_vma"],
    )
    outs = mapped(*_arrays(cast, operands))
    return _values(cast, eqn, outs, kinds)


def _cond(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """Each result is narrow if it is in every branch, and otherwise as declared."""
    index, *rest = operands
    traced = [cast.retraced(branch, _kinds(rest))[1] for branch in eqn.params["branches"]]
    kinds = [_joined(each) for each in zip(*traced, strict=True)]
    branches = tuple(cast.retraced(branch, _kinds(rest), forced=kinds)[0] for branch in eqn.params["branches"])
    outs = rebind(eqn, [index.declared(), *_arrays(cast, rest)], branches=branches)
    return _values(cast, eqn, outs, kinds)


def _joined(kinds: Sequence[Kind]) -> Kind:
    if set(kinds) == {Kind.LOW} or Kind.FIXED in kinds:
        return kinds[0]
    return max(Kind.SOFT, mixed(kinds))


def _scan(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    first, closed = eqn.params["num_consts"], eqn.params["jaxpr"]
    carried = slice(first, first + eqn.params["num_carry"])
    kinds = _kinds(operands)
    kinds[carried] = _carry_kinds(cast, closed, kinds, carried)
    num_ys = len(eqn.outvars) - eqn.params["num_carry"]
    wide = [*_stays_fp32(kinds[carried]), *[False] * num_ys]
    body, out_kinds = cast.retraced(closed, kinds, forced=[*kinds[carried], *[None] * num_ys], wide=wide)
    arrays = [_as_kind(cast, operand, kind) for operand, kind in zip(operands, kinds, strict=True)]
    return _values(cast, eqn, rebind(eqn, arrays, jaxpr=body), out_kinds)


def _while(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    kinds = _kinds(operands)
    body_kinds = kinds[num_cond:]
    carry = _carry_kinds(cast, eqn.params["body_jaxpr"], body_kinds, slice(num_body, len(body_kinds)))
    wide_carry = _stays_fp32(carry)
    body, _ = cast.retraced(eqn.params["body_jaxpr"], [*body_kinds[:num_body], *carry], forced=carry, wide=wide_carry)
    condition, _ = cast.retraced(eqn.params["cond_jaxpr"], [*kinds[:num_cond], *carry])
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
        if not is_read or not cast.narrow_carry:
            return Kind.KEPT
        return kind if kind is Kind.LOW else Kind.SOFT

    first = [start(kind, is_read) for kind, is_read in zip(kinds[carried], feeds, strict=True)]
    carry = [kind if kind is Kind.INTEGER else one for kind, one in zip(kinds[carried], first, strict=True)]
    while True:
        full = [*kinds[: carried.start], *carry, *kinds[carried.stop :]]
        outs = cast.retraced(body, full)[1][: len(carry)]
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
    closed, kinds = cast.retraced(eqn.params["call_jaxpr"], _kinds(operands), wide=wide)
    in_avals, out_avals = closed_avals(eqn)
    call = jax.custom_jvp(_named(core.jaxpr_as_fun(closed), eqn))

    def declared_rule(*arrays):
        primals, tangents = arrays[: len(in_avals)], arrays[len(in_avals) :]
        outs, out_tangents = jax.jvp(lambda *args: rebind(eqn, args), primals, tuple(_with_zeros(tangents, in_avals)))
        return [*outs, *_inexact(out_tangents, out_avals)]

    @call.defjvp
    def rule(primals, tangents):
        traced = jax.make_jaxpr(declared_rule)(*in_avals, *_inexact(in_avals, in_avals))
        in_kinds = [*_kinds(operands), *_gradient_kinds(_kinds(operands), in_avals)]
        tangent_kinds = _gradient_kinds(kinds, out_avals)
        wide_outs = [*wide, *[False] * len(tangent_kinds)]
        narrow, _ = cast.retraced(traced, in_kinds, forced=[*kinds, *tangent_kinds], wide=wide_outs)
        found = core.jaxpr_as_fun(narrow)(*primals, *_inexact(tangents, in_avals))
        return found[: len(kinds)], _with_zeros(found[len(kinds) :], out_avals)

    return _values(cast, eqn, call(*_arrays(cast, operands)), kinds)


def _custom_vjp(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """The forward and backward rules are traced at their declared dtypes and cast, residuals included."""
    closed, kinds = cast.retraced(eqn.params["call_jaxpr"], _kinds(operands))
    in_avals, out_avals = closed_avals(eqn)
    num_consts = eqn.params.get("num_consts", 0)  # closed-over operands, which its rules do not receive
    call = jax.custom_vjp(_named(core.jaxpr_as_fun(closed), eqn))

    @functools.cache
    def forward():
        trees = []

        def declared(*args):
            outs, pull = vjp_of(eqn, args)
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return [*outs, *residuals]

        traced = jax.make_jaxpr(declared)(*in_avals)
        residual_avals = traced.out_avals[len(kinds) :]
        narrow, found = cast.retraced(traced, _kinds(operands), forced=[*kinds, *[None] * len(residual_avals)])
        return narrow, trees[0], residual_avals, found[len(kinds) :]

    def forward_rule(*args):
        found = core.jaxpr_as_fun(forward()[0])(*args)
        return found[: len(kinds)], tuple(found[len(kinds) :])

    def backward_rule(residuals, cotangents):
        _, tree, residual_avals, residual_kinds = forward()

        def declared(*arrays):
            pull = jax.tree.unflatten(tree, arrays[: len(residual_avals)])
            return _inexact(pull(_with_zeros(arrays[len(residual_avals) :], out_avals)), in_avals[num_consts:])

        traced = jax.make_jaxpr(declared)(*residual_avals, *_inexact(out_avals, out_avals))
        in_kinds = [*residual_kinds, *_gradient_kinds(kinds, out_avals)]
        wanted = _gradient_kinds(_kinds(operands[num_consts:]), in_avals[num_consts:])
        narrow, _ = cast.retraced(traced, in_kinds, forced=wanted)
        grads = iter(core.jaxpr_as_fun(narrow)(*residuals, *_inexact(cotangents, out_avals)))
        operand_grads = [next(grads) if is_inexact(aval) else None for aval in in_avals[num_consts:]]
        return (*[None] * num_consts, *operand_grads)

    call.defvjp(forward_rule, backward_rule)
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


def _named(function: Any, eqn: Any) -> Any:
    def call(*args):
        return function(*args)

    call.__name__ = call.__qualname__ = op_name(eqn) or eqn.primitive.name
    return call


def _gradient_kinds(kinds: Sequence[Kind], avals: Sequence[Any]) -> list[Kind]:
    """Returns the kinds of the tangents or cotangents of values: they have the dtypes of the values."""
    pairs = zip(kinds, avals, strict=True)
    return [kind if kind <= Kind.LOW and kind != Kind.FREE else Kind.SOFT for kind, aval in pairs if is_inexact(aval)]


def _inexact(items: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Returns the items of values that have a derivative."""
    return [item for item, aval in zip(items, avals, strict=True) if is_inexact(aval)]


def _with_zeros(items: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Returns the items, with a float0 zero for each value that has no derivative."""
    items = iter(items)
    return [next(items) if is_inexact(aval) else np.zeros(aval.shape, jax.dtypes.float0) for aval in avals]


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
