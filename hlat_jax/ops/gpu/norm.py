"""RMSNorm by Pallas kernels for NVIDIA GPUs, lowered through Triton: one pass forward, one backward.

Owns the kernels and their layout. What they serve is in `limits`. They have not run on a device here: they are checked
in interpret mode and lowered for `cuda`. A row is read once and stays in registers, so nothing but x is kept for the
backward pass. Shapes: R rows, D width, P programs, C columns (D up to the next power of two, which Triton asks for).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_ROWS = 32  # of one program of the backward pass, which adds their gradients of the scale
_COLUMNS_PER_WARP = 512
_MAX_WARPS = 16


def rms_norm(x: jax.Array, *, scale: jax.Array, eps: float, interpret: bool = False) -> jax.Array:
    """Returns [..., D] as `ops.norm` has it; see `limits.row_refusals`.

    Args:
      x: [..., D].
      scale: [D].
      eps: added to the mean square.
      interpret: run the kernels' bodies with JAX operations, on any platform.
    """
    return _rms_norm(x, scale, eps, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, scale, eps, interpret):
    return _forward(x, scale, eps, interpret)[0]


def _forward(x, scale, eps, interpret):
    x_RD = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct(x_RD.shape, x.dtype)
    y_RD = _call(_forward_kernel, out, programs=x_RD.shape[0], eps=eps, interpret=interpret)(x_RD, scale)
    return y_RD.reshape(x.shape), (x, scale)


def _backward(eps, interpret, residuals, dy):
    x, scale = residuals
    x_RD = x.reshape(-1, x.shape[-1])
    programs = pl.cdiv(x_RD.shape[0], _ROWS)
    out = (
        jax.ShapeDtypeStruct(x_RD.shape, x.dtype),
        jax.ShapeDtypeStruct((programs, x_RD.shape[1]), jnp.float32),
    )
    run = _call(_backward_kernel, out, programs=programs, eps=eps, interpret=interpret)
    dx_RD, dscale_PD = run(x_RD, scale, dy.reshape(x_RD.shape))
    return dx_RD.reshape(x.shape), jnp.sum(dscale_PD, axis=0).astype(scale.dtype)


_rms_norm.defvjp(_forward, _backward)


def _call(kernel, out, *, programs, eps, interpret):
    columns = pl.next_power_of_2(jax.tree.leaves(out)[0].shape[1])
    warps = min(max(columns // _COLUMNS_PER_WARP, 1), _MAX_WARPS)
    return pl.pallas_call(
        functools.partial(kernel, columns=columns, eps=eps),
        out_shape=out,
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=kernel.__name__.strip("_").replace("kernel", "rms_norm"),
    )


def _forward_kernel(x_ref, scale_ref, y_ref, *, columns, eps):
    row, cols_C = pl.program_id(0), jnp.arange(columns)
    is_inside_C = cols_C < x_ref.shape[1]
    unit_C, _ = _unit_row(x_ref, row, columns=columns, eps=eps)
    scale_C = _rounded(_load(scale_ref.at[cols_C], is_inside_C), y_ref.dtype)
    plgpu.store(y_ref.at[row, cols_C], (_rounded(unit_C, y_ref.dtype) * scale_C).astype(y_ref.dtype), mask=is_inside_C)


def _backward_kernel(*refs, columns, eps):
    x_ref, scale_ref, dy_ref, dx_ref, dscale_ref = refs
    program, cols_C = pl.program_id(0), jnp.arange(columns)
    num_rows, width = x_ref.shape
    is_inside_C = cols_C < width
    scale_C = _rounded(_load(scale_ref.at[cols_C], is_inside_C), x_ref.dtype)

    def add_row(row, dscale_C):
        unit_C, inverse_rms = _unit_row(x_ref, row, columns=columns, eps=eps)
        dy_C = _load(dy_ref.at[row, cols_C], is_inside_C)
        dunit_C = dy_C * scale_C
        # turning x in its own direction changes nothing: that part of the gradient falls out
        dx_C = inverse_rms * (dunit_C - unit_C * (jnp.sum(dunit_C * unit_C) / width))
        plgpu.store(dx_ref.at[row, cols_C], dx_C.astype(dx_ref.dtype), mask=is_inside_C)
        return dscale_C + dy_C * _rounded(unit_C, x_ref.dtype)

    first, zeros_C = program * _ROWS, jnp.zeros((columns,), jnp.float32)
    dscale_C = jax.lax.fori_loop(first, jnp.minimum(first + _ROWS, num_rows), add_row, zeros_C)
    plgpu.store(dscale_ref.at[program, cols_C], dscale_C, mask=is_inside_C)


def _unit_row(x_ref, row, *, columns, eps):
    """Returns `x / rms(x)` of a row, fp32, 0 beyond its width, and `1 / rms(x)`."""
    cols_C, width = jnp.arange(columns), x_ref.shape[1]
    x_C = _load(x_ref.at[row, cols_C], cols_C < width)
    inverse_rms = jax.lax.rsqrt(jnp.sum(x_C * x_C) / width + eps)
    return x_C * inverse_rms, inverse_rms


def _load(ref, mask_C):
    return plgpu.load(ref, mask=mask_C, other=0.0).astype(jnp.float32)


def _rounded(x_C, dtype):
    # to the dtype and back: products of two bf16 are exact in fp32, and are then rounded once
    return x_C.astype(dtype).astype(jnp.float32)
