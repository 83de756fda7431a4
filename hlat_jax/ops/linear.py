"""Projections without bias. Owns how an activation meets a matrix; the matrix belongs to the model."""

from __future__ import annotations

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
    x = materialized(x)
    lead, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    out = weight.shape[contract:]
    size = math.prod(inner)
    y = x.reshape(-1, size) @ weight.reshape(size, -1)
    return y.reshape(*lead, *out)


def materialized(x: jax.Array) -> jax.Array:
    """Returns `x`, kept by the compiler as one array.

    XLA on CPU otherwise fuses the norm or activation before a product into several consumers and computes it in each.
    """
    return jax.lax.optimization_barrier(x)
