"""Warns of a loss with random numbers that depend on the split of the batch over devices and microbatches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from hlat_jax.passes.jaxpr import inner_jaxprs, primitives

_DRAWS = primitives("random_bits random_split random_gamma")


def warn_of_shared_keys(loss: Callable, *, num_parts: int) -> Callable:
    """Returns the loss, which warns at its first trace if it reads no keys, or draws for several rows from one key.

    Args:
      loss: function (params, rows, model state) -> results, for the rows of one part of the batch.
      num_parts: number of parts, over devices and microbatches.
    """
    is_examined = False

    @functools.wraps(loss)
    def examined(params: Any, rows: Any, model_state: Any) -> Any:
        nonlocal is_examined
        if not is_examined:
            is_examined = True
            for text in _warnings(loss, params, rows, model_state, num_parts=num_parts):
                warnings.warn(text, stacklevel=2)
        return loss(params, rows, model_state)

    return examined


def _warnings(loss: Callable, params: Any, rows: Any, model_state: Any, *, num_parts: int) -> Iterator[str]:
    """Yields what to warn of, each once.

    A shape depends on the number of rows if it differs in a trace of twice as many. Where that trace fails, a shape
    with the rows in front does.
    """

    def trace(repeats: int) -> Any:
        def repeated(params: Any, rows: Any, model_state: Any) -> Any:
            rows = jax.tree.map(lambda field: jnp.concatenate([field] * repeats), rows) if repeats > 1 else rows
            return loss(params, rows, model_state)

        return jax.make_jaxpr(repeated)(params, rows, model_state).jaxpr

    jaxpr = trace(1)
    keys = [var for var in jaxpr.invars if jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)]
    draws = list(_draws(jaxpr, ""))
    if keys and draws and not any(operand is key for eqn in jaxpr.eqns for operand in eqn.invars for key in keys):
        yield (
            "the loss is given random keys and reads none of them, so it draws the same numbers in every step. With "
            "Flax NNX, give nnx.reseed the names of the streams of nnx.Rngs, of which nnx.Rngs(0) has one, default."
        )
    draws = draws if num_parts > 1 else []
    try:
        doubled = list(_draws(trace(2), "")) if draws else []
    except Exception:  # whatever the user's function raises for a size that it was not written for
        in_front = jax.tree.leaves(rows)[0].shape[:1]
        dependent_draws = [draw for draw in draws if draw[1][:1] == in_front]
    else:
        dependent_draws = [draw for draw, other in zip(draws, doubled, strict=False) if draw[1] != other[1]]
    for place, shape in dict.fromkeys(dependent_draws):
        yield (
            f"{place}: the loss draws random numbers of shape {shape} from one key for all rows of a part of the "
            f"batch. They depend on the split into {num_parts} parts over devices and microbatches, and a constant "
            "key gives each part the same. Take `keys` in the loss function, one for each row, and draw with jax.vmap "
            "over rows and keys."
        )


def _draws(jaxpr: core.Jaxpr, called_at: str) -> Iterator[tuple[str, tuple]]:
    """Yields (place, shape) of what a jaxpr draws from single keys; a place is "file:line:column (function)"."""
    for eqn in jaxpr.eqns:
        place = source_info_util.summarize(eqn.source_info) or called_at  # JAX does not name its own code
        if eqn.primitive.name in _DRAWS and not eqn.invars[0].aval.shape:
            yield place, eqn.outvars[0].aval.shape
        for inner in inner_jaxprs(eqn):
            yield from _draws(inner, place)
