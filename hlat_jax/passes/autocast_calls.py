"""Autocast of functions with derivative rules. The derivative by the declared rule is traced and cast."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.host.jax_compat import partial_eval
from hlat_jax.ops.own_backward import with_backward
from hlat_jax.passes.autocast_kinds import Kind
from hlat_jax.passes.jaxpr import inputs_of, is_inexact, linearized_at, op_name, perturbed_at, rebind

# (a declared jaxpr, kinds of its inputs, forced kinds of results, results that only `never` operations read)
# -> (the jaxpr for these, the kinds of its results); see `Cast.retrace`
Retrace = Callable[..., tuple[core.ClosedJaxpr, list[Kind]]]


def custom_jvp(
    retrace: Retrace, eqn: core.JaxprEqn, *, arrays: Sequence[Any], given_kinds: list[Kind], wide: Sequence[bool]
) -> tuple[list[Any], list[Kind]]:
    """Returns the results of a `jax.custom_jvp` function, and their kinds.

    Args:
      retrace: function that casts a jaxpr, see `Retrace`.
      eqn: the call.
      arrays: operands of the call, held as their kinds.
      given_kinds: kinds of the operands.
      wide: for each result, whether only `never` operations read it.
    """
    closed, kinds = retrace(eqn.params["call_jaxpr"], given_kinds, wide=wide)
    in_avals, out_avals = [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]
    call = jax.custom_jvp(_named(core.jaxpr_as_fun(closed), eqn))

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
        narrow, _ = retrace(traced, in_kinds, forced=[*kinds, *tangent_kinds], wide=wide_outs)
        results = core.jaxpr_as_fun(narrow)(*primals, *_at(tangents, places))
        outs, given = results[: len(kinds)], dict(zip(pushed, results[len(kinds) :], strict=True))
        return outs, [
            given[at] if at in given else SymbolicZero(jax.typeof(out).to_tangent_aval()) for at, out in enumerate(outs)
        ]

    call.defjvp(rule, symbolic_zeros=True)
    return call(*arrays), kinds


def own_backward(
    retrace: Retrace, eqn: core.JaxprEqn, *, arrays: Sequence[Any], given_kinds: list[Kind]
) -> tuple[list[Any], list[Kind]]:
    """Returns the results of a function with its own backward pass, and their kinds. Arguments: see `custom_jvp`.

    The function is linearized by its rules. Both halves are cast, and so are the values kept between them.
    """
    closed, kinds = retrace(eqn.params["call_jaxpr"], given_kinds)
    function, in_avals = _named(core.jaxpr_as_fun(closed), eqn), closed.in_avals
    halves = functools.cache(functools.partial(_halves, retrace, eqn, given_kinds, kinds))

    def forward(args, places):
        run, *linear = halves(tuple(at for at in places if is_inexact(in_avals[at])))
        results = run(*args)
        return results[: len(kinds)], [jax.tree_util.Partial(half, *results[len(kinds) :]) for half in linear]

    if eqn.primitive.name == "custom_jvp_call":
        call = with_backward(function, forward, lambda kept, given: kept[0](given), push=lambda kept, t: kept[1](t))
        return call(*arrays), kinds
    call = jax.custom_vjp(function)

    def forward_rule(*args):
        outs, (pull, _) = forward([arg.value for arg in args], [at for at, arg in enumerate(args) if arg.perturbed])
        return outs, pull

    def backward_rule(pull, cotangents):
        given = {at: one for at, one in enumerate(cotangents) if not isinstance(one, SymbolicZero)}
        return tuple(map(pull(given).get, range(len(in_avals))))

    call.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    return call(*arrays), kinds


def _halves(
    retrace: Retrace, eqn: core.JaxprEqn, given_kinds: list[Kind], kinds: list[Kind], places: tuple[int, ...]
) -> tuple[Callable, Callable, Callable]:
    """Returns the cast forward half, backward half and derivative of a called function.

    `given_kinds` and `kinds` are the kinds of operands and results, and `places` the differentiated operands.
    """
    in_avals, out_avals = [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars]
    kept: list[Any] = []

    def declared(*arrays):
        outs, push = linearized_at(lambda *args: rebind(eqn, args), arrays, places)
        kept[:] = jax.tree.flatten(push)
        return [*outs, *filter(_is_tracer, kept[0])]

    traced = jax.make_jaxpr(declared)(*in_avals)
    forced = [*kinds, *[None] * (len(traced.out_avals) - len(kinds))]
    narrow, out_kinds = retrace(traced, given_kinds, forced=forced)
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
        narrow, _ = retrace(traced, in_kinds, forced=forced)
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
        given, wanted = _at(given_kinds, places), {at: kinds[at] for at in pushed}
        return linear(
            lambda push, tangents: _at(push(*tangents), pushed),
            arrays,
            avals=_at(in_avals, places),
            given=given,
            wanted=wanted,
        )

    return core.jaxpr_as_fun(narrow), pull, push


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _at(items: Any, places: Sequence[int]) -> list[Any]:
    return [items[at] for at in places]


def _without_zeros(closed: core.ClosedJaxpr, num_outs: int, *, num_linear: int) -> tuple[core.ClosedJaxpr, list[bool]]:
    """Returns a jaxpr without the results after `num_outs` that are zero, and which of them are not.

    They are linear in the last `num_linear` inputs, so they are zero where they depend on none of them.
    """
    num_nonlinear = len(closed.in_avals) - num_linear
    places = range(num_outs, len(closed.out_avals))
    is_nonzero = [any(inputs_of(closed.jaxpr, at)[num_nonlinear:]) for at in places]
    wanted = [True] * num_outs + is_nonzero
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts), is_nonzero


def _named(function: Callable, eqn: core.JaxprEqn) -> Callable:
    def call(*args):
        return function(*args)

    call.__name__ = call.__qualname__ = op_name(eqn) or eqn.primitive.name
    return call


def _gradient_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """Returns the kinds of the tangents or cotangents of values: they have the dtypes of the values."""
    return [kind if kind <= Kind.LOW and kind != Kind.FREE else Kind.SOFT for kind in kinds]
