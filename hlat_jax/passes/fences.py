"""A `jax.checkpoint` with a backward pass in the order in which it is written, outside of loops too.

`jax.checkpoint` relies on optimization barriers. XLA for CPU removes the barriers before it eliminates common
subexpressions, so outside of a loop it keeps the products that should be recomputed. And every compiler may put off the
gradients of weights, with all that they read. Here the recomputation of a block waits for the gradients that enter it.
The gradients that leave it wait for the gradients of its weights. On CPU the order is a dependency between the values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.host.jax_compat import ad, batching, mlir
from hlat_jax.passes.jaxpr import inputs_of, is_inexact, linearized_at, varying_axes


def checkpoint_in_order(fn: Callable, *, policy: Callable, waiting: Sequence[bool]) -> Callable:
    """Returns `fn` under `jax.checkpoint`, with a backward pass in order.

    Args:
      fn: function arrays -> list of arrays, which closes over no traced values.
      policy: the argument of `jax.checkpoint`.
      waiting: for each argument, whether recomputation from it waits. Activations should wait, weights need not.
        Recomputation from saved values waits too.
    """
    rematerialized = jax.checkpoint(fn, policy=policy)

    def linearize(primals: Sequence[Any], places: Sequence[int]) -> Linearized:
        outs, pushforward = linearized_at(rematerialized, primals, places)
        held, structure = jax.tree.flatten(pushforward)
        weights = [arg for arg, wait in zip(primals, waiting, strict=True) if not wait]

        def push(held: Sequence[Any], tangents: Sequence[Any]) -> list:
            return jax.tree.unflatten(structure, held)(*tangents)

        waits = tuple(not any(one is weight for weight in weights) for one in held)
        return Linearized(outs, held, push, _after, waits, tuple(waiting[at] for at in places))

    return with_derivative(fn, linearize, name="checkpoint_in_order")


@dataclasses.dataclass(frozen=True)
class Linearized:
    """The results of a function and its derivative, by the arguments that are differentiated.

    Attributes:
      outs: the results.
      held: the arrays that the derivative keeps.
      push: function (held, tangents of the arguments) -> tangents of the results.
      after: function (values, others) -> both. In the transpose, the values are available when the others are.
      waits: for each array held, whether computation from it waits for the gradients that enter.
      entering: for each tangent, whether its gradient waits for the gradients of the others.
    """

    outs: list
    held: list
    push: Callable
    after: Callable
    waits: tuple
    entering: tuple


def with_derivative(
    fn: Callable, linearize: Callable[[Sequence[Any], Sequence[int]], Linearized], *, name: str
) -> Callable:
    """Returns `fn` with another derivative, in every mode and order.

    Args:
      fn: function arrays -> list of arrays, which closes over no traced values.
      linearize: function (arguments, numbers of the perturbed arguments) -> results and derivative.
      name: name of the function in jaxprs.
    """

    def called(*args: Any) -> list:
        return fn(*args)

    called.__name__ = called.__qualname__ = name
    run = jax.custom_jvp(called)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        places = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        linearized = linearize(primals, places)
        given = [*linearized.held, *(tangents[at] for at in places)]
        num_held = len(linearized.held)

        def push_all(*args: Any) -> list:
            return linearized.push(args[:num_held], args[num_held:])

        # No other output is perturbed, as it would not be without the checkpoint: later rules may be told which are.
        linear = jax.make_jaxpr(push_all)(*given).jaxpr
        reached = [
            at
            for at, out in enumerate(linearized.outs)
            if is_inexact(jax.typeof(out)) and any(inputs_of(linear, at)[num_held:])
        ]

        def push(*args: Any) -> list:
            pushed = push_all(*args)
            return [pushed[at] for at in reached]

        order = {"after": linearized.after, "waits": linearized.waits, "entering": linearized.entering}
        pushed = dict(zip(reached, _pushed.bind(*given, push=push, **order), strict=True))
        zeros = [SymbolicZero(jax.typeof(out).to_tangent_aval()) for out in linearized.outs]
        return linearized.outs, [pushed.get(at, zero) for at, zero in enumerate(zeros)]

    run.defjvp(derivative, symbolic_zeros=True)
    return run


# The derivative of a block as one operation: what it holds and tangents -> tangents, with a transpose in order.
# Parameters are those of `Linearized`.
_pushed = core.Primitive("ordered_pushforward")
_pushed.multiple_results = True
_pushed.def_impl(lambda *args, push, **_: push(*args))
_pushed.def_abstract_eval(lambda *avals, push, **_: jax.make_jaxpr(push)(*avals).out_avals)
mlir.register_lowering(_pushed, mlir.lower_fun(lambda *args, push, **_: push(*args), multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, push: Callable, **_: Any) -> tuple[list, list]:
    return jax.jvp(push, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _transposed(
    cotangents: Sequence[Any], *args: Any, push: Callable, after: Callable, waits: tuple, entering: tuple
) -> list:
    held, tangents = list(args[: len(waits)]), args[len(waits) :]
    nonzero = [cotangent for cotangent in cotangents if not isinstance(cotangent, ad.Zero)]
    places = [at for at, wait in enumerate(waits) if wait]
    for at, value in zip(places, after([held[at] for at in places], nonzero)[0], strict=True):
        held[at] = value

    def push_to_nonzero(*tangents: Any) -> list:  # what the others are computed by may have no transpose
        outs = zip(push(*held, *tangents), cotangents, strict=True)
        return [out for out, cotangent in outs if not isinstance(cotangent, ad.Zero)]

    avals = [tangent.aval for tangent in tangents]
    linear = jax.make_jaxpr(push_to_nonzero)(*avals).jaxpr
    read = [inputs_of(linear, at) for at in range(len(nonzero))]
    grads = list(jax.linear_transpose(push_to_nonzero, *avals)(nonzero))
    grads = [grad if any(reads) else ad.Zero(aval) for grad, aval, *reads in zip(grads, avals, *read, strict=True)]
    reached = [at for at, grad in enumerate(grads) if not isinstance(grad, ad.Zero)]
    first = [at for at in reached if entering[at]]
    last = [at for at in reached if not entering[at]]
    ordered = after([grads[at] for at in first], [grads[at] for at in last])
    for at, grad in zip((*first, *last), (*ordered[0], *ordered[1]), strict=True):
        grads[at] = grad
    return [None] * len(held) + grads


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, push: Callable, **params: Any) -> tuple:
    mapped = jax.vmap(
        push, in_axes=tuple(dims), axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name
    )
    outs = _pushed.bind(*args, push=mapped, **params)
    return outs, [0] * len(outs)


ad.primitive_jvps[_pushed] = _jvp
ad.primitive_transposes[_pushed] = _transposed
batching.fancy_primitive_batchers[_pushed] = _batch


@jax.custom_jvp
def _after(values: list, others: list) -> tuple[list, list]:
    axes = {varying_axes(jax.typeof(array)) for array in (*values, *others)}
    if not values or not others or len(axes) > 1:  # under shard_map, one that varies may not enter one that does not
        return values, others
    return jax.lax.platform_dependent(values, others, cpu=_loop, default=barrier)


_after.defjvp(lambda primals, tangents: (_after(*primals), tuple(tangents)))


def barrier(values: list, others: list) -> tuple[list, list]:
    """Returns the arguments behind an optimization barrier, as in `jax.checkpoint`."""
    arrays = [*values, *others]
    axes = [varying_axes(jax.typeof(array)) for array in arrays]
    # all results of a barrier vary over the axes of any operand
    places = [at for at, each in enumerate(axes) if values and others and each == frozenset().union(*axes)]
    for at, array in zip(places, jax.lax.optimization_barrier([arrays[at] for at in places]), strict=True):
        # JAX's rule gives integers a tangent, and the rule of `cond` takes no index that has one
        arrays[at] = array if is_inexact(array) else core.primitives.stop_gradient_p.bind(array)
    return arrays[: len(values)], arrays[len(values) :]


def _loop(values: list, others: list) -> tuple[list, list]:
    """Passes floats through a loop whose number of trips, zero, is computed from one element of each of the others.

    No compiler sees that it is zero, so that the loop starts when all of these exist, and its results are buffers.
    """
    trips = functools.reduce(jnp.bitwise_or, [_zero_of(other) for other in others if other.size], jnp.uint32(0))
    places = [at for at, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact)]

    def turn(state: tuple) -> tuple:
        trip, floats = state
        return trip + 1, [value + value for value in floats]

    _, floats = jax.lax.while_loop(
        lambda state: state[0] < trips, turn, (jnp.zeros_like(trips), [values[at] for at in places])
    )
    values = list(values)
    for at, value in zip(places, floats, strict=True):
        values[at] = value
    return values, others


def _zero_of(array: jax.Array) -> jax.Array:
    first = jnp.real(jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(()))
    bits = jax.lax.bitcast_convert_type(first, f"uint{8 * first.dtype.itemsize}")
    return jax.lax.population_count(bits).astype(jnp.uint32) >> 7  # a word has at most 64 bits set
