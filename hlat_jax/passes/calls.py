"""Autocast of the equations that call functions: loops, branches, calls, derivative rules.

Each handler rebinds an equation with its functions retraced by the `Cast`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.host.jax_compat import partial_eval
from hlat_jax.ops.own_backward import has_own_backward, with_backward
from hlat_jax.passes.jaxpr import (
    bind_shard_map,
    carry_of,
    inputs_of,
    is_inexact,
    linearized_at,
    op_name,
    perturbed_at,
    reaching,
    rebind,
    without_consts,
)
from hlat_jax.passes.kinds import Kind, Value, mix, value


def _arrays(cast: Any, operands: Sequence[Value]) -> list[Any]:
    return [operand.held(cast.low) for operand in operands]


def _kinds(operands: Sequence[Value]) -> list[Kind]:
    return [operand.kind for operand in operands]


def _jit(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retrace(eqn.params["jaxpr"], _kinds(operands), wide=wide)
    return cast.results(eqn, rebind(eqn, _arrays(cast, operands), jaxpr=closed), kinds)


def _remat(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, kinds = cast.retrace(core.ClosedJaxpr(eqn.params["jaxpr"], []), _kinds(operands), wide=wide)
    opened, consts = without_consts(closed)
    return cast.results(eqn, rebind(eqn, consts + _arrays(cast, operands), jaxpr=opened), kinds)


def _shard_map(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    inner, kinds = eqn.params["jaxpr"], []

    def local(*arrays: Any) -> list[Any]:
        held = zip(arrays, _kinds(operands), inner.invars, strict=True)
        outs = cast.run(inner, [value(a, kind=k, aval=v.aval, low=cast.low) for a, k, v in held], wide)
        kinds[:] = _kinds(outs)
        return _arrays(cast, outs)

    outs = bind_shard_map(eqn, local, _arrays(cast, operands))
    return cast.results(eqn, outs, kinds)


def _cond(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """Each result is narrow if it is in every branch, and otherwise as declared."""
    index, *rest = operands
    traced = [cast.retrace(branch, _kinds(rest))[1] for branch in eqn.params["branches"]]
    kinds = [_join(each) for each in zip(*traced, strict=True)]
    branches = tuple(cast.retrace(branch, _kinds(rest), forced=kinds)[0] for branch in eqn.params["branches"])
    outs = rebind(eqn, [index.declared(), *_arrays(cast, rest)], branches=branches)
    return cast.results(eqn, outs, kinds)


def _join(kinds: Sequence[Kind]) -> Kind:
    if set(kinds) == {Kind.LOW} or Kind.FIXED in kinds:
        return kinds[0]
    return max(Kind.SOFT, mix(kinds))


def _scan(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    closed, carried = carry_of(eqn)
    kinds = _kinds(operands)
    kinds[carried] = _carry_kinds(cast, closed, kinds, carried)
    num_ys = len(eqn.outvars) - (carried.stop - carried.start)
    wide = [*_stays_fp32(kinds[carried]), *[False] * num_ys]
    body, out_kinds = cast.retrace(closed, kinds, forced=[*kinds[carried], *[None] * num_ys], wide=wide)
    return cast.results(eqn, rebind(eqn, _as_kinds(cast, operands, kinds), jaxpr=body), out_kinds)


def _while(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    num_cond, (closed, carried) = eqn.params["cond_nconsts"], carry_of(eqn)
    cond_kinds, kinds = _kinds(operands)[:num_cond], _kinds(operands)[num_cond:]
    kinds[carried] = carry = _carry_kinds(cast, closed, kinds, carried)
    body, _ = cast.retrace(closed, kinds, forced=carry, wide=_stays_fp32(carry))
    condition, _ = cast.retrace(eqn.params["cond_jaxpr"], [*cond_kinds, *carry])
    arrays = _as_kinds(cast, operands, [*cond_kinds, *kinds])
    return cast.results(eqn, rebind(eqn, arrays, body_jaxpr=body, cond_jaxpr=condition), carry)


def _stays_fp32(carry: Sequence[Kind]) -> list[bool]:
    return [kind >= Kind.KEPT for kind in carry]


def _as_kinds(cast: Any, operands: Sequence[Value], kinds: Sequence[Kind]) -> list[Any]:
    pairs = zip(operands, kinds, strict=True)
    return [one.narrow(cast.low, saturate=True) if kind is Kind.LOW else one.declared() for one, kind in pairs]


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
    """The derivative of the declared function, by its rule, is traced and cast."""
    if has_own_backward(eqn):
        return _own_backward(cast, eqn, operands, wide)
    given_kinds = _kinds(operands)  # rules hold no tracers
    closed, kinds = cast.retrace(eqn.params["call_jaxpr"], given_kinds, wide=wide)
    in_avals, out_avals = closed_avals(eqn)
    call = jax.custom_jvp(_name(core.jaxpr_as_fun(closed), eqn))

    def rule(primals, tangents):
        places = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

        def declared(*arrays):
            args = arrays[: len(in_avals)]
            run = perturbed_at(lambda *args: rebind(eqn, args), args, places)
            outs, pushed = jax.jvp(run, [args[at] for at in places], list(arrays[len(in_avals) :]))
            return [*outs, *(tangent for tangent in pushed if tangent.dtype != jax.dtypes.float0)]

        traced, is_pushed = _without_zeros(
            jax.make_jaxpr(declared)(*in_avals, *_at(in_avals, places)), len(kinds), num_linear=len(places)
        )
        pushed = [at for at, aval in enumerate(out_avals) if is_inexact(aval)]
        pushed = list(itertools.compress(pushed, is_pushed))
        in_kinds = [*given_kinds, *_gradient_kinds(_at(given_kinds, places))]
        tangent_kinds = _gradient_kinds(_at(kinds, pushed))
        wide_outs = [*wide, *[False] * len(pushed)] if wide else ()
        narrow, _ = cast.retrace(traced, in_kinds, forced=[*kinds, *tangent_kinds], wide=wide_outs)
        results = core.jaxpr_as_fun(narrow)(*primals, *_at(tangents, places))
        outs, given = results[: len(kinds)], dict(zip(pushed, results[len(kinds) :], strict=True))
        return outs, [
            given[at] if at in given else SymbolicZero(jax.typeof(out).to_tangent_aval()) for at, out in enumerate(outs)
        ]

    call.defjvp(rule, symbolic_zeros=True)
    return cast.results(eqn, call(*_arrays(cast, operands)), kinds)


def _own_backward(cast: Any, eqn: Any, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
    """The declared function is linearized by its rules; both halves are cast, and what is kept between them."""
    given_kinds = _kinds(operands)  # rules hold no tracers
    closed, kinds = cast.retrace(eqn.params["call_jaxpr"], given_kinds)
    in_avals, out_avals = closed_avals(eqn)

    @functools.cache
    def halves(places):
        """Returns the cast forward half, backward half and derivative for operands that are differentiated."""
        kept: list[Any] = []

        def declared(*arrays):
            outs, push = linearized_at(lambda *args: rebind(eqn, args), arrays, places)
            kept[:] = jax.tree.flatten(push)
            return [*outs, *filter(_is_tracer, kept[0])]

        traced = jax.make_jaxpr(declared)(*in_avals)
        forced = [*kinds, *[None] * (len(traced.out_avals) - len(kinds))]
        narrow, out_kinds = cast.retrace(traced, given_kinds, forced=forced)
        # what depends on no operand has its value, which a rule may read in Python
        leaves, structure = [None if _is_tracer(leaf) else leaf for leaf in kept[0]], kept[1]
        held_avals, held_kinds = traced.out_avals[len(kinds) :], out_kinds[len(kinds) :]

        def linear(of_push, arrays, *, avals, given, wanted):
            """Returns number -> result of a function of the derivative and the last arrays, cast.

            Types and kinds of these are `avals` and `given`; `wanted` has the kind of each result.
            """

            def declared(*arrays):
                left = iter(arrays)
                push = jax.tree.unflatten(structure, [next(left) if leaf is None else leaf for leaf in leaves])
                return of_push(push, list(left))

            traced, is_wanted = _without_zeros(jax.make_jaxpr(declared)(*held_avals, *avals), 0, num_linear=len(avals))
            places = list(itertools.compress(wanted, is_wanted))
            in_kinds, forced = [*held_kinds, *_gradient_kinds(given)], _gradient_kinds(_at(wanted, places))
            narrow, _ = cast.retrace(traced, in_kinds, forced=forced)
            return dict(zip(places, core.jaxpr_as_fun(narrow)(*arrays), strict=True))

        def pull(*held_and_cotangents):
            *held, cotangents = held_and_cotangents
            given = [at for at in cotangents if is_inexact(out_avals[at])]

            def of_cotangents(push, cotangents):
                return jax.linear_transpose(lambda *args: _at(push(*args), given), *_at(in_avals, places))(cotangents)

            arrays = [*held, *(cotangents[at] for at in given)]
            wanted = {at: given_kinds[at] for at in places}
            return linear(of_cotangents, arrays, avals=_at(out_avals, given), given=_at(kinds, given), wanted=wanted)

        def push(*held_and_tangents):
            *held, tangents = held_and_tangents
            pushed = [at for at, aval in enumerate(out_avals) if is_inexact(aval)]
            arrays = [*held, *(tangents[at] for at in places)]
            return linear(
                lambda push, tangents: _at(push(*tangents), pushed),
                arrays,
                avals=_at(in_avals, places),
                given=_at(given_kinds, places),
                wanted={at: kinds[at] for at in pushed},
            )

        return core.jaxpr_as_fun(narrow), pull, push

    def forward(args, places):
        run, *linear = halves(tuple(at for at in places if is_inexact(in_avals[at])))
        results = run(*args)
        return results[: len(kinds)], [jax.tree_util.Partial(half, *results[len(kinds) :]) for half in linear]

    function = _name(core.jaxpr_as_fun(closed), eqn)
    if eqn.primitive.name == "custom_jvp_call":
        call = with_backward(function, forward, lambda kept, given: kept[0](given), push=lambda kept, t: kept[1](t))
        return cast.results(eqn, call(*_arrays(cast, operands)), kinds)
    call = jax.custom_vjp(function)

    def forward_rule(*args):
        outs, (pull, _) = forward([arg.value for arg in args], [at for at, arg in enumerate(args) if arg.perturbed])
        return outs, pull

    def backward_rule(pull, cotangents):
        given = {at: one for at, one in enumerate(cotangents) if not isinstance(one, SymbolicZero)}
        return tuple(map(pull(given).get, range(len(in_avals))))

    call.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return cast.results(eqn, call(*_arrays(cast, operands)), kinds)


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _at(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [items[at] for at in places]


def _without_zeros(closed: Any, num_outs: int, *, num_linear: int) -> tuple[Any, list[bool]]:
    """Returns a jaxpr without the results after `num_outs` that are zero, and which of them are not.

    They are linear in the last `num_linear` inputs, so they are zero where they depend on none of them.
    """
    num_nonlinear = len(closed.in_avals) - num_linear
    places = range(num_outs, len(closed.out_avals))
    is_nonzero = [any(inputs_of(closed.jaxpr, at)[num_nonlinear:]) for at in places]
    wanted = [True] * num_outs + is_nonzero
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts), is_nonzero


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


HANDLERS = {
    "jit": _jit,
    "remat2": _remat,
    "shard_map": _shard_map,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _own_backward,
}
