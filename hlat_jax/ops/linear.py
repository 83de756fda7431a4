"""Projections without bias. Owns how an activation meets a matrix; the matrix belongs to the model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax

Gather = Callable[[jax.Array, tuple[jax.Array, ...]], tuple[jax.Array, tuple[jax.Array, ...]]]


def linear(x: jax.Array, weight: jax.Array, *, contract: int = 1, gather: Gather | None = None) -> jax.Array:
    """Returns `x` [B, T, *in] times `weight` [*in, *out] as [B, T, *out], in the dtype of `x`.

    Tokens are flattened to one row axis first: XLA on CPU runs one large product where it would otherwise run a
    batch of small ones, and the backward pass needs no transposed copies.

    Args:
      x: activations; its last `contract` axes are summed over.
      weight: matrix; its first `contract` axes match them.
      contract: how many axes are summed over.
      gather: see `linears`.
    """
    return linears(x, (weight,), contract=contract, gather=gather)[0]


def linears(
    x: jax.Array, weights: tuple[jax.Array, ...], *, contract: int = 1, gather: Gather | None = None
) -> tuple[jax.Array, ...]:
    """Returns the products of one `x` with several matrices, each as `linear` has it.

    Args:
      x: activations.
      weights: matrices.
      contract: how many axes are summed over.
      gather: (x, weights) -> what the products read, where this device holds parts of them. The backward pass keeps
        the parts and gathers again.
    """
    return _products(materialized(x), weights, contract, gather)


# The backward pass keeps the matrix as it was given: a reshaped one is a new value, which a loop over layers would
# copy and stack for every layer. It computes nothing again.
@functools.partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _products(
    x: jax.Array, weights: tuple[jax.Array, ...], contract: int, gather: Gather | None
) -> tuple[jax.Array, ...]:
    if gather is not None:
        x, weights = gather(x, weights)
    lead, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    size = math.prod(inner)
    rows = x.reshape(-1, size)
    return tuple((rows @ w.reshape(size, -1)).reshape(*lead, *w.shape[contract:]) for w in weights)


def materialized(x: jax.Array) -> jax.Array:
    """Returns `x`, kept by the compiler as one array.

    XLA on CPU otherwise fuses the norm or activation before a product into several consumers and computes it in each.
    """
    return jax.lax.optimization_barrier(x)
