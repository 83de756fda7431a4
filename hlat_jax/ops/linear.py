"""Column- and row-parallel matrix products without bias, as in Megatron-LM."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax

from hlat_jax.parallel.collectives import SINGLE_DEVICE, ParallelContext

Axes = tuple[str, ...]


def column_parallel(equation: str, x_BTD: jax.Array, param: Any, ctx: ParallelContext) -> jax.Array:
    """Returns the einsum of `x_BTD` and a matrix with output axes split over `tensor`.

    It enters the tensor region, so the product reads the whole sequence, and the gradient of `x_BTD` is summed.

    Args:
      equation: equation such as "BTD,DKXH->BTKXH", which contracts the last axes of the first operand with the first
        axes of the second, in order.
      x_BTD: activations.
      param: the matrix, an `nnx.Param` with its logical axes in the metadata `out_sharding`.
      ctx: shardings of the matrix and the activations.

    Source: Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3.
    """
    return column_parallel_products((equation,), x_BTD, (param,), ctx=ctx)[0]


def column_parallel_products(
    equations: tuple[str, ...], x_BTD: jax.Array, params: tuple[Any, ...], *, ctx: ParallelContext
) -> tuple[jax.Array, ...]:
    """Returns `column_parallel` of one `x_BTD` with several matrices, which enters the tensor region once."""
    weights, axes = tuple(param[...] for param in params), tuple(map(_logical_axes, params))
    return _products(materialize(x_BTD), weights, equations, axes, ctx, True)


def row_parallel(equation: str, x: jax.Array, param: Any, ctx: ParallelContext) -> jax.Array:
    """Returns the einsum of `x` and a matrix with contracted axes split over `tensor`, [B, T, D] between blocks.

    It leaves the tensor region, so the product is summed over `tensor`. Arguments are as for `column_parallel`.
    """
    (y_BTD,) = _products(materialize(x), (param[...],), (equation,), (_logical_axes(param),), ctx, False)
    return y_BTD if ctx == SINGLE_DEVICE else ctx.leave_tensor_region(y_BTD)  # whose VJP forward mode cannot use


def materialize(x: jax.Array) -> jax.Array:
    """Returns `x` behind an optimization barrier, so that it is computed once.

    XLA on CPU otherwise fuses the norm or activation before a product into each of its consumers.
    """
    return jax.lax.optimization_barrier(x)


# Under `jax.checkpoint` the residuals are the matrices as stored, which the backward pass gathers again if they are
# sharded. Reshaped or gathered ones would be new values, which a scan over layers would copy and stack for every layer.
# No product is recomputed.
@functools.partial(jax.checkpoint, static_argnums=(2, 3, 4, 5), prevent_cse=False)
def _products(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    equations: tuple[str, ...],
    axes: tuple[Axes, ...],
    ctx: ParallelContext,
    enters: bool,
) -> tuple[jax.Array, ...]:
    if ctx != SINGLE_DEVICE:
        weights = tuple(ctx.gather_weight(weight, names) for weight, names in zip(weights, axes, strict=True))
        x = ctx.enter_tensor_region(x) if enters else x
    left, right, out = re.split(",|->", equations[0])
    num_contracted = (len(left) + len(right) - len(out)) // 2
    # One product of two matrices, tokens by contracted size, instead of `jnp.einsum`: XLA on CPU would otherwise run a
    # batch of small products, and the backward pass would need transposed copies.
    lead, contracted = x.shape[: x.ndim - num_contracted], x.shape[x.ndim - num_contracted :]
    size = math.prod(contracted)
    rows = x.reshape(-1, size)
    return tuple((rows @ w.reshape(size, -1)).reshape(*lead, *w.shape[num_contracted:]) for w in weights)


def _logical_axes(param: Any) -> Axes:
    # one layer's slice has no axis of layers
    return tuple(axis for axis in param.get_metadata("out_sharding") if axis != "layers")
