"""Functions with a custom backward pass that forward mode differentiates too, unlike a `jax.custom_vjp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.host.jax_compat import ad, batching, mlir

Forward = Callable[[Sequence[Any], Sequence[int]], tuple[list, Any]]
Linear = Callable[[Any, dict[int, Any]], Mapping[int, Any]]


def with_backward(fn: Callable, forward: Forward, backward: Linear, *, push: Linear | None = None) -> Callable:
    """Returns `fn` with a custom backward pass in reverse mode.

    Forward mode runs `push`, or else differentiates `fn` as JAX does, which computes its results a second time.

    Args:
      fn: function arrays -> list of arrays. It and the other functions close over no traced values.
      forward: function (arguments, numbers of the perturbed ones) -> (results of `fn`, residuals, a pytree of arrays).
      backward: function (residuals, number of a result -> its cotangent) -> number of an argument -> its gradient.
      push: function (residuals, number of an argument -> its tangent) -> number of a result -> its tangent.
    """
    if push is None:

        def forward_and_arguments(primals: Sequence[Any], places: Sequence[int]) -> tuple[list, Any]:
            outs, kept = forward(primals, places)
            return outs, (kept, list(primals))

        def backward_of_first(kept: Any, cotangents: dict[int, Any]) -> Mapping[int, Any]:
            return backward(kept[0], cotangents)

        def push_of_fn(kept: Any, tangents: dict[int, Any]) -> Mapping[int, Any]:
            return dict(enumerate(_jvp_at(fn, kept[1], tangents)[1]))

        return with_backward(fn, forward_and_arguments, backward_of_first, push=push_of_fn)

    def called(*args: Any) -> list:
        return fn(*args)

    called.__name__ = called.__qualname__ = fn.__name__
    run = jax.custom_jvp(called)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        places = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        outs, kept = forward(primals, places)
        leaves, tree = jax.tree.flatten(kept)
        held = list({id(leaf): leaf for leaf in leaves}.values())  # an argument may be kept twice
        number = {id(leaf): at for at, leaf in enumerate(held)}
        order = [number[id(leaf)] for leaf in leaves]
        pushed = [at for at, out in enumerate(outs) if jnp.issubdtype(out.dtype, jnp.inexact)]
        avals = tuple(jax.typeof(outs[at]).to_tangent_aval() for at in pushed)

        def kept_of(held: Sequence[Any]) -> Any:
            return jax.tree.unflatten(tree, [held[at] for at in order])

        def push_held(held: Sequence[Any], tangents: Sequence[Any]) -> list:
            given = push(kept_of(held), dict(zip(places, tangents, strict=True)))
            zeros = (jnp.zeros(aval.shape, aval.dtype) for aval in avals)
            return [jnp.asarray(given.get(at, zero), zero.dtype) for at, zero in zip(pushed, zeros, strict=True)]

        def pull(held: Sequence[Any], cotangents: Sequence[Any]) -> list:
            nonzero = {at: cotangent for at, cotangent in zip(pushed, cotangents, strict=True) if cotangent is not None}
            grads = backward(kept_of(held), nonzero)
            return [grads.get(at) for at in places]

        params = {"push": push_held, "pull": pull, "num_held": len(held), "avals": avals}
        given = dict(zip(pushed, _pushed.bind(*held, *(tangents[at] for at in places), **params), strict=True))
        zeros = (SymbolicZero(jax.typeof(out).to_tangent_aval()) for out in outs)
        return outs, [given.get(at, zero) for at, zero in enumerate(zeros)]

    run.defjvp(derivative, symbolic_zeros=True)
    return run


def has_own_backward(eqn: Any) -> bool:
    """Returns whether an equation calls a function with a custom backward pass, see `with_backward`."""
    if eqn.primitive.name != "custom_jvp_call":
        return eqn.primitive.name == "custom_vjp_call"
    return eqn.params["call_jaxpr"].jaxpr.debug_info.func_filename == with_backward.__code__.co_filename


def _jvp_at(fn: Callable, primals: Sequence[Any], tangents: Mapping[int, Any]) -> tuple[list, list]:
    """Returns the results of a function of many arguments, and their tangents, given the tangents of some arguments."""

    def of_perturbed(*perturbed: Any) -> list:
        return fn(*(dict(enumerate(primals)) | dict(zip(tangents, perturbed, strict=True))).values())

    return jax.jvp(of_perturbed, [primals[at] for at in tangents], list(tangents.values()))


# The derivative of such a function as one operation: what is held and tangents -> tangents, of types `avals`. `pull` is
# its transpose: (what is held, cotangents) -> cotangents, where None stands for zeros.
_pushed = core.Primitive("own_backward_pushforward")
_pushed.multiple_results = True


def _run(*args: Any, push: Callable, num_held: int, **_: Any) -> list:
    return push(list(args[:num_held]), list(args[num_held:]))


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list, list]:
    nonzero = {at: tangent for at, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)}
    return _jvp_at(lambda *args: _run(*args, **params), primals, nonzero)


def _transposed(cotangents: Sequence[Any], *args: Any, pull: Callable, num_held: int, **_: Any) -> list:
    grads = pull(list(args[:num_held]), [None if isinstance(one, ad.Zero) else one for one in cotangents])
    avals = [tangent.aval for tangent in args[num_held:]]
    return [None] * num_held + [ad.Zero(aval) if one is None else one for one, aval in zip(grads, avals, strict=True)]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, num_held: int, avals: Any, **functions: Any) -> Any:
    def mapped(name: str) -> Callable:
        return jax.vmap(
            functions[name],
            in_axes=(list(dims[:num_held]), 0),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    # all tangents are mapped, so that all gradients are
    tangents = [
        batching.bdim_at_front(tangent, dim, axis.size)
        for tangent, dim in zip(args[num_held:], dims[num_held:], strict=True)
    ]
    push, held = mapped("push"), list(args[:num_held])
    new = tuple(jax.make_jaxpr(push)(held, tangents).out_avals)
    outs = _pushed.bind(*held, *tangents, push=push, pull=mapped("pull"), num_held=num_held, avals=new)
    return outs, [0] * len(outs)


_pushed.def_impl(_run)
_pushed.def_abstract_eval(lambda *_, avals, **__: avals)
mlir.register_lowering(_pushed, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[_pushed] = _derivative
ad.primitive_transposes[_pushed] = _transposed
batching.fancy_primitive_batchers[_pushed] = _batch
