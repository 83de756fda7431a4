"""Projections without bias. Owns how an activation meets a matrix; the matrix belongs to the model."""

from __future__ import annotations

import functools
import math

import jax


def linear(x: jax.Array, weight: jax.Array, *, contract: int = 1) -> jax.Array:
    """Returns `x` [B, T, *in] times `weight` [*in, *out] as [B, T, *out], in the dtype of `x`.

    Tokens are flattened to one row axis first: XLA on CPU runs one large product where it would otherwise run a
    batch of small ones, and the backward pass needs no transposed copies.

    Args:
      x: activations; its last `contract` axes are summed over.
      weight: matrix; its first `contract` axes match them.
      contract: how many axes are summed over.
    """
    return _product(materialized(x), weight, contract)


# The backward pass keeps the matrix as it was given: a reshaped one is a new value, which a loop over layers would
# copy and stack for every layer. It computes nothing again.
@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _product(x: jax.Array, weight: jax.Array, contract: int) -> jax.Array:
    lead, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    size = math.prod(inner)
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*lead, *weight.shape[contract:])


def materialized(x: jax.Array) -> jax.Array:
    """Returns `x`, kept by the compiler as one array.

    XLA on CPU otherwise fuses the norm or activation before a product into several consumers and computes it in each.
    """
    return jax.lax.optimization_barrier(x)
