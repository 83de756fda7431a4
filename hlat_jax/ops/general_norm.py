"""LayerNorm and RMSNorm of models other than ours: over any axis, with gain and bias or without."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops.dialect import CallSpec, Implementation, Op


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is normalized, and how.

    Attributes:
      axis: that is normalized over, 0 or more.
      eps: added to the variance or mean square, under the root.
      is_centered: LayerNorm, which subtracts the mean; otherwise RMSNorm.
      dtype: of the result.
    """

    axis: int
    eps: float
    is_centered: bool
    dtype: Any


def general_norm(
    x: jax.Array, *, gain: jax.Array | None, bias: jax.Array | None, variant: Variant, implementation: str
) -> jax.Array:
    """Returns `(x - mean) / root(variance + eps) * gain + bias`, all of it in fp32 before it is rounded to the dtype.

    Args:
      x: any shape and float dtype; float64 is computed in float64.
      gain: of the rank of `x`, of size 1 but for the axis; None: 1.
      bias: likewise; None: 0.
      variant: static.
      implementation: a name that `OP.choose` returns.

    Source: arXiv 1607.06450; arXiv 1910.07467 for RMSNorm.
    """
    return OP.run(implementation, x, gain, bias, variant)


def describe_call(x_shape: tuple[int, ...], *, dtype: Any) -> CallSpec:
    """Returns the spec of a call: shape and dtype of `x`."""
    return {"x_shape": tuple(x_shape), "dtype": jnp.dtype(dtype).name}


def _statistics(x, variant):
    """Returns (mean or 0.0, inverse root), of size 1 along the axis."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=variant.axis, keepdims=True) if variant.is_centered else 0.0
    variance = jnp.mean(jnp.square(wide - mean), axis=variant.axis, keepdims=True)
    return mean, jax.lax.rsqrt(variance + variant.eps)


def _forward(x, gain, bias, variant):
    mean, inverse = _statistics(x, variant)
    y = (x.astype(inverse.dtype) - mean) * inverse
    y = y if gain is None else y * gain.astype(y.dtype)
    y = y if bias is None else y + bias.astype(y.dtype)
    return y.astype(variant.dtype), (x, mean, inverse, gain, bias)


def _reference(x, gain, bias, variant):
    return _forward(x, gain, bias, variant)[0]


_from_statistics = jax.custom_vjp(_reference, nondiff_argnums=(3,))


def _backward(variant, residuals, dy):
    x, mean, inverse, gain, bias = residuals
    others = tuple(axis for axis in range(x.ndim) if axis != variant.axis)
    normalized = (x.astype(inverse.dtype) - mean) * inverse
    dy = dy.astype(inverse.dtype)
    dgain = None if gain is None else jnp.sum(dy * normalized, axis=others, keepdims=True).astype(gain.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=others, keepdims=True).astype(bias.dtype)
    dy = dy if gain is None else dy * gain.astype(dy.dtype)
    average = functools.partial(jnp.mean, axis=variant.axis, keepdims=True)
    dx = dy - normalized * average(dy * normalized)
    dx = (dx - average(dy) if variant.is_centered else dx) * inverse
    return dx.astype(x.dtype), dgain, dbias


_from_statistics.defvjp(_forward, _backward)

OP = Op("norm")
OP.register(Implementation("reference", _reference, {"*": 5}))
# the backward pass keeps `x` and, per position, one or two numbers
OP.register(Implementation("statistics", _from_statistics, {"*": 10}))
