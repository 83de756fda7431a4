"""The second half of an MLP of models other than ours: an activation of one or two hidden arrays, and a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops.dialect import CallSpec, Implementation, Op
from hlat_jax.passes.fences import checkpointed

# Name -> function of one hidden array; of two, it is multiplied with the second.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "GELU by tanh": functools.partial(jax.nn.gelu, approximate=True),
    "GELU": functools.partial(jax.nn.gelu, approximate=False),
    "SiLU": jax.nn.silu,
}


def general_mlp(
    hidden: Sequence[jax.Array],
    *,
    weights: jax.Array,
    activation: str,
    product: Callable[[jax.Array, jax.Array], jax.Array],
    implementation: str,
) -> jax.Array:
    """Returns `product(activation(hidden), weights)`, such as `gelu(hidden) @ weights`. Reverse mode only.

    Args:
      hidden: an array, or gate and up-projection of one shape.
      weights: of the second product.
      activation: a name of `ACTIVATIONS`.
      product: of the activated array and the weights, by which it is linear.
      implementation: a name that `OP.choose` returns.

    Source: arXiv 1606.08415; arXiv 2002.05202, equation 6.
    """
    return OP.run(implementation, hidden, weights, activation, product)


def describe_call(hidden_shape: tuple[int, ...], *, num_hidden: int, dtype: Any) -> CallSpec:
    """Returns the spec of a call: shape, number and dtype of the hidden arrays."""
    return {"hidden_shape": tuple(hidden_shape), "num_hidden": num_hidden, "dtype": jnp.dtype(dtype).name}


def activated(hidden: Sequence[jax.Array], activation: str) -> jax.Array:
    """Returns the operand of the second product."""
    found = ACTIVATIONS[activation](hidden[0])
    return found if len(hidden) == 1 else found * hidden[1]


def _reference(hidden, weights, activation, product):
    return product(activated(hidden, activation), weights)


def _recomputed(hidden, weights, activation, product):
    def run(*args):
        return [_reference(args[:-1], args[-1], activation, product)]

    waiting = [*[True] * len(hidden), False]
    return checkpointed(run, policy=jax.checkpoint_policies.nothing_saveable, waiting=waiting)(*hidden, weights)[0]


OP = Op("mlp")
OP.register(Implementation("reference", _reference, {"*": 5}))
# the backward pass keeps the hidden arrays alone, and computes the activation from them again
OP.register(Implementation("recomputed", _recomputed, {"*": 10}))
