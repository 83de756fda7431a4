"""Orthogonalization of the hidden matrices of a decoder, by which Muon updates them.

A hidden matrix is a projection from or to the residual stream in one layer: Q, K, V, output, gate, up or down. Stacked
parameters [L, ...] hold one of each layer, or several that are fused. Embedding, head, norms and biases hold none.
Source: K. Jordan et al., https://kellerjordan.github.io/posts/muon, and for the scale Liu et al., arXiv 2502.16982.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.config import OptimizerConfig
from hlat_jax.parallel import collectives
from hlat_jax.parallel.sharding import Layout, spec

_WIDTHS = ("embed", "kv_embed")  # logical axes of the residual stream: one side of every hidden matrix
_FUSED = ("qkv", "gate")  # the last two along it are key and value, or gate and up; before them are query heads
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_MOST_GATHERED_BYTES = 3 << 30  # of whole matrices on one device: all layers of 7B, and 5 of 70B


def is_hidden(axes: tuple[str, ...]) -> bool:
    """Returns whether a parameter with these logical axes holds hidden matrices."""
    others = set(axes) - {"layers", *_WIDTHS, *_FUSED}
    return axes[0] == "layers" and bool(others) and any(axis in _WIDTHS for axis in axes)


def orthogonalizers(
    param_axes: Any, layout: Layout, *, width: int, config: OptimizerConfig, dtype: Any, unroll: bool
) -> Any:
    """Returns for each parameter the function momentum -> update, or None if it has no hidden matrices.

    The update of a matrix [m, n] is 0.2 sqrt(max(m, n)) `orthogonalize`(momentum), roughly the nearest semi-orthogonal
    matrix, scaled to AdamW's size. Momentum and update are fp32, of the shape of the parameter and sharded like the
    optimizer's state.

    Args:
      param_axes: logical axes of every parameter.
      layout: the mesh.
      width: width of the residual stream, without padding.
      config: options of the optimizer, of which eps is used.
      dtype: dtype of the matrix products.
      unroll: whether the program has a copy for each layer instead of a loop.
    """

    def of_param(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array] | None:
        if not is_hidden(axes):
            return None
        options = {"axes": axes, "layout": layout, "width": width, "config": config, "dtype": dtype, "unroll": unroll}
        local = functools.partial(_orthogonalized, **options)
        if layout.mesh.size == 1:
            return local
        sharding = spec(axes, layout.state_rules)
        return jax.shard_map(local, mesh=layout.mesh, in_specs=(sharding,), out_specs=sharding, check_vma=False)

    return jax.tree.map(of_param, param_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def _orthogonalized(stack: jax.Array, *, axes: tuple[str, ...], **options: Any) -> jax.Array:
    """Returns the updates of this device's part of a stacked parameter."""
    for dim, axis in enumerate(axes):
        if axis in _FUSED:
            sizes = [size for size in (stack.shape[dim] - 2, 1, 1) if size]
            parts = jax.lax.split(stack, sizes, axis=dim)
            return jnp.concatenate([_of_matrices(part, axes=axes, **options) for part in parts], axis=dim)
    return _of_matrices(stack, axes=axes, **options)


def _of_matrices(
    stack: jax.Array,
    *,
    axes: tuple[str, ...],
    layout: Layout,
    width: int,
    config: OptimizerConfig,
    dtype: Any,
    unroll: bool,
) -> jax.Array:
    """Returns the updates of one matrix a layer, [L, D, ...] or [L, ..., D], of which D is the residual stream.

    The matrices of several layers are gathered at a time, and each device orthogonalizes one of them whole: the devices
    that hold a part of it, and replicas.
    """

    def split_over(side: tuple[str, ...]) -> tuple[str, ...]:
        return layout.wide([mesh_axis for axis in side for mesh_axis in layout.state_rules[axis]])

    # Of the width first: its mesh axes reach over nodes, and what they gather is still split over `tensor`. A side
    # split in two dims is gathered in another order than on one device; the update is permuted as the matrix is.
    if axes[1] in _WIDTHS:
        matrices = stack.reshape(*stack.shape[:2], -1)
        splits = [(split_over(axes[1:2]), 1), (split_over(axes[2:]), 2)]
    else:
        matrices = stack.reshape(len(stack), -1, stack.shape[-1])
        splits = [(split_over(axes[-1:]), 2), (split_over(axes[1:-1]), 1)]
    split = splits[0][0] + splits[1][0]
    replicas = tuple(axis for axis in layout.wide(layout.mesh.axis_names) if axis not in (*split, "pipe"))
    num_devices = layout.size(replicas + split)
    whole_bytes = math.prod(matrices.shape[1:]) * layout.size(split) * jnp.dtype(dtype).itemsize
    most = min(num_devices, max(1, _MOST_GATHERED_BYTES // whole_bytes))
    num_at_once = max(num for num in range(1, most + 1) if len(stack) % num == 0)

    def update(x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for mesh_axes, dim in splits:
            x = collectives.all_gather(x, mesh_axes, dim)
        padded = x.shape
        if x.shape[splits[0][1]] > width:
            x = jax.lax.slice_in_dim(x, 0, width, axis=splits[0][1])
        scale = 0.2 * math.sqrt(max(x.shape[1:]))  # elements of about 0.2
        if num_devices == 1:
            return scale * orthogonalize(x, eps=config.eps).astype(jnp.float32)
        index = collectives.axis_index(replicas + split)
        own = jax.lax.dynamic_slice_in_dim(x, jnp.minimum(index, num_at_once - 1), 1)
        is_own = (jnp.arange(num_at_once) == index)[:, None, None]  # of devices beyond their number, none
        x = jnp.where(is_own, orthogonalize(own, eps=config.eps), 0)
        if x.shape != padded:
            x = jnp.pad(x, [(0, size - kept) for size, kept in zip(padded, x.shape, strict=True)])
        for mesh_axes, dim in reversed(splits):
            x = collectives.reduce_scatter(x, mesh_axes, dim)
        return scale * collectives.psum(x, replicas).astype(jnp.float32)

    groups = matrices.reshape(-1, num_at_once, *matrices.shape[1:])
    updates = jnp.stack([update(group) for group in groups]) if unroll else jax.lax.map(update, groups)
    return updates.reshape(stack.shape)


def orthogonalize(x: jax.Array, *, eps: float) -> jax.Array:
    """Returns matrices [..., m, n] with singular values near 1, in their dtype, by Newton-Schulz iterations.

    It divides x by its norm. Five times it sets x = a x + (b A + c A^2) x, with A = x x^T. Singular values end between
    about 0.5 and 1.5. Values below about 1e-3 of the norm stay smaller.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    x = (x / (norm + eps)).astype(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
