"""A `jax.checkpoint` whose backward pass runs in the order in which it is written, outside of loops too.

`jax.checkpoint` relies on optimization barriers. XLA for CPU removes these before it eliminates common subexpressions,
so that outside of a loop it keeps the products that should be recomputed; and every compiler may put off the gradients
of weights, with all that they read. Here the recomputation of a block waits for the gradients that enter it, and the
gradients that leave it wait for those of its weights. On CPU the order is a dependency between the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from hlat_jax.passes.jaxpr import is_inexact, varying_axes


def checkpointed(fn: Callable, *, policy: Callable, waiting: Sequence[bool]) -> Callable:
    """Returns `fn` under `jax.checkpoint`, with a backward pass in order. It has no forward-mode derivative.

    Args:
      fn: arrays -> list of arrays; closes over no traced values.
      policy: as for `jax.checkpoint`.
      waiting: for each argument, whether recomputation from it waits: activations should, weights need not.
    """
    rematerialized = jax.checkpoint(fn, policy=policy)

    @jax.custom_vjp
    def run(*args: Any) -> list:
        return fn(*args)

    def forward(*primals: Any) -> tuple[list, Any]:
        args = [primal.value for primal in primals]
        places = [at for at, one in enumerate(primals) if one.perturbed and is_inexact(jax.typeof(one.value))]

        def of_perturbed(*perturbed: Any) -> list:
            merged = list(args)
            for at, value in zip(places, perturbed, strict=True):
                merged[at] = value
            return rematerialized(*merged)

        outs, pullback = jax.vjp(of_perturbed, *(args[at] for at in places))
        waits = [
            any(leaf is arg for arg, wait in zip(args, waiting, strict=True) if wait)
            for leaf in jax.tree.leaves(pullback)
        ]
        return outs, (pullback, _as_structure(waits), _as_structure(at in places for at in range(len(args))))

    def backward(residuals: Any, cotangents: list) -> tuple:
        pullback, waits, is_perturbed = residuals
        nonzero = [ct for ct in cotangents if not isinstance(ct, SymbolicZero)]
        leaves, structure = jax.tree.flatten(pullback)
        held = iter(_after([leaf for leaf, wait in zip(leaves, waits, strict=True) if wait == ()], nonzero)[0])
        leaves = [next(held) if wait == () else leaf for leaf, wait in zip(leaves, waits, strict=True)]
        grads = iter(jax.tree.unflatten(structure, leaves)([_instantiated(ct) for ct in cotangents]))
        grads = [next(grads) if moves == () else None for moves in is_perturbed]
        entering = [at for at, wait in enumerate(waiting) if wait and grads[at] is not None]
        weights = [at for at, wait in enumerate(waiting) if not wait and grads[at] is not None]
        ordered = _after([grads[at] for at in entering], [grads[at] for at in weights])
        for at, grad in zip((*entering, *weights), (*ordered[0], *ordered[1]), strict=True):
            grads[at] = grad
        return tuple(grads)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _as_structure(flags: Any) -> tuple:
    """Returns flags as a pytree without leaves, for residuals: () is true, None is false."""
    return tuple(() if flag else None for flag in flags)


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    return jnp.zeros(aval.shape, aval.dtype)


@jax.custom_jvp
def _after(values: list, others: list) -> tuple[list, list]:
    """Returns the arguments; the values are available when the others are."""
    axes = {varying_axes(jax.typeof(array)) for array in (*values, *others)}
    if not values or not others or len(axes) > 1:  # under shard_map, one that varies may not enter one that does not
        return values, others
    return jax.lax.platform_dependent(values, others, cpu=_loop, default=_barrier)


_after.defjvp(lambda primals, tangents: (_after(*primals), tuple(tangents)))


def _barrier(values: list, others: list) -> tuple[list, list]:
    return jax.lax.optimization_barrier((values, others))


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
