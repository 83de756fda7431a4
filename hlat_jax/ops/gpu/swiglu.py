"""SwiGLU by Pallas kernels for NVIDIA GPUs, lowered through Triton: one pass forward, one backward, fp32 inside.

Owns the kernels. What they serve is in `limits`. They have not run on a device here: they are checked in interpret mode
and lowered for `cuda`. The inputs alone are kept for the backward pass. E is the number of elements.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_BLOCK = 1024  # elements of one program: eight for each thread of four warps
_WARPS = 4


def swiglu(gate: jax.Array, *, up: jax.Array, interpret: bool = False) -> jax.Array:
    """Returns `silu(gate) * up` as `ops.swiglu` has it; see `limits.element_refusals`.

    Args:
      gate: any shape.
      up: of the same shape and dtype.
      interpret: run the kernels' bodies with JAX operations, on any platform.
    """
    return _swiglu(gate, up, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _swiglu(gate, up, interpret):
    return _forward(gate, up, interpret)[0]


def _forward(gate, up, interpret):
    (out,) = _over_blocks(_forward_kernel, gate, up, num_out=1, interpret=interpret)
    return out, (gate, up)


def _backward(interpret, residuals, dout):
    return _over_blocks(_backward_kernel, *residuals, dout, num_out=2, interpret=interpret)


_swiglu.defvjp(_forward, _backward)


def _over_blocks(kernel, *arrays, num_out, interpret):
    """Returns what a kernel makes of arrays of one shape, of that shape."""
    like = arrays[0]
    flat = jax.ShapeDtypeStruct((like.size,), like.dtype)
    outs = pl.pallas_call(
        functools.partial(_block_kernel, kernel, num_out),
        out_shape=(flat,) * num_out,
        grid=(pl.cdiv(like.size, _BLOCK),),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name=kernel.__name__.strip("_").replace("kernel", "swiglu"),
    )(*(array.reshape(-1) for array in arrays))
    return tuple(out.reshape(like.shape) for out in outs)


def _block_kernel(kernel, num_out, *refs):
    places_E = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK)
    is_inside_E = places_E < refs[0].shape[0]
    loaded = (plgpu.load(ref.at[places_E], mask=is_inside_E, other=0.0) for ref in refs[:-num_out])
    for ref, out_E in zip(refs[-num_out:], kernel(*(x_E.astype(jnp.float32) for x_E in loaded)), strict=True):
        plgpu.store(ref.at[places_E], out_E.astype(ref.dtype), mask=is_inside_E)


def _forward_kernel(gate_E, up_E):
    return (gate_E * jax.nn.sigmoid(gate_E) * up_E,)


def _backward_kernel(gate_E, up_E, dout_E):
    sigmoid_E = jax.nn.sigmoid(gate_E)
    silu_E = gate_E * sigmoid_E
    return dout_E * up_E * (sigmoid_E + silu_E * (1 - sigmoid_E)), dout_E * silu_E
