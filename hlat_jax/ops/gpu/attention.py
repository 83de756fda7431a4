"""Causal attention by kernels for NVIDIA GPUs, cuDNN through JAX, and the Pallas kernel for Triton that JAX ships.

On an H100 both equal float64 up to the rounding of bf16, values and gradients. On a CPU the Pallas kernel is tested in
interpret mode and lowered for `cuda`. cuDNN cannot be traced if it is not installed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hlat_jax.host.jax_compat import pallas_gpu_attention

_TRITON_MULTIPLE = 128  # of the sequence: a block of queries
_TRITON_MAX_HEAD_DIM = {"bfloat16": 128, "float16": 128, "float32": 64}  # held on chip: an H100 has no room for more


def dot_product_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    bias_BNTS: jax.Array | None = None,
    mask_BNTS: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Returns softmax(scale * q k^T + bias) v, [B, T, N, H], over the keys that the masks leave.

    Args:
      q_BTNH: queries.
      k_BSKH: keys.
      v_BSKH: values.
      bias_BNTS: array that is added to the scaled scores, in which B or N may be 1.
      mask_BNTS: bool array, True if a query attends to a key, in which B or N may be 1.
      causal: whether a query attends only to its own and earlier positions.
      window: number of keys that a query attends to, its own included. It needs `causal`.
      scale: factor of the scores, by default 1/sqrt(H).
      implementation: "cudnn", or "xla" for any platform.
    """
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        bias_BNTS,
        mask_BNTS,
        is_causal=causal,
        scale=scale,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def cudnn_unsupported_reasons(
    *, q_shape: tuple[int, ...], num_kv_heads: int, dtype: Any, has_segments: bool, window: int | str | None
) -> list[str]:
    """Returns why cuDNN cannot run a call, forward and backward, see `ops.attention.describe_call`."""
    if has_segments:
        return ["cuDNN supports segment ids (data.packing=documents) only as a T x T mask"]
    if isinstance(window, str):
        return [f"cuDNN has no window that is an argument (window={window})"]
    b, t, _, h = q_shape
    k = jax.ShapeDtypeStruct((b, t, num_kv_heads, h), dtype)
    attend = functools.partial(dot_product_attention, window=window)
    return trace_errors(attend, jax.ShapeDtypeStruct(q_shape, dtype), k, k)


def trace_errors(attend: Callable[..., jax.Array], *operands: Any) -> list[str]:
    """Returns the error of tracing attention and its gradient by the first three operands, or [] if there is none.

    The dtypes and head sizes that cuDNN supports depend on its version and the device.
    """

    def total(*operands: Any) -> jax.Array:
        return attend(*operands).astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(total, (0, 1, 2)), *operands)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return [" ".join(str(error).split())]
    return []


def triton_unsupported_reasons(
    *, q_shape: tuple[int, ...], num_kv_heads: int, dtype: Any, has_segments: bool, window: int | str | None
) -> list[str]:
    """Returns why the Pallas kernel cannot run a call, forward and backward, see `ops.attention.describe_call`."""
    seq_len, head_dim = q_shape[1], q_shape[3]
    reasons = []
    if window is not None:
        reasons.append(f"the kernel does not support a window (window={window})")
    if seq_len % _TRITON_MULTIPLE:
        reasons.append(f"the sequence length {seq_len} is not a multiple of {_TRITON_MULTIPLE}")
    name = jnp.dtype(dtype).name
    if name not in _TRITON_MAX_HEAD_DIM:
        reasons.append(f"dtype {name} is not one of {', '.join(_TRITON_MAX_HEAD_DIM)}")
    elif head_dim > _TRITON_MAX_HEAD_DIM[name]:
        reasons.append(f"model.head_dim={head_dim} is above {_TRITON_MAX_HEAD_DIM[name]} in {name}")
    return reasons


def triton(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_ids_BT: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Returns [B, T, N, H] as `ops.attention`, for calls without `triton_unsupported_reasons`.

    Args:
      q_BTNH: queries, already rotated.
      k_BSKH: keys, repeated here, since the kernel takes one key head per query head.
      v_BSKH: values, repeated too.
      segment_ids_BT: int32 ids of segments, or None.
      interpret: whether to run the kernel's body as JAX operations, which works on any platform.
    """
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, group, axis=2) for x in (k_BSKH, v_BSKH))
    return _mha(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mha(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, interpret):
    return _mha_forward(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, interpret)[0]


def _mha_forward(q_BTNH, k_BSNH, v_BSNH, segment_ids_BT, interpret):
    operands = q_BTNH, k_BSNH, v_BSNH, segment_ids_BT
    options = _kernel_options(q_BTNH.shape[3], interpret=interpret)
    out_BTNH, (*_, lse_BNT) = pallas_gpu_attention()._mha_forward(*operands, **options)
    # named inside the VJP: a remat policy that saves both avoids a second forward pass
    out_BTNH, lse_BNT = checkpoint_name(out_BTNH, "attention_out"), checkpoint_name(lse_BNT, "attention_lse")
    return out_BTNH, (*operands, out_BTNH, lse_BNT)


def _mha_backward(interpret, residuals, dout_BTNH):
    options = _kernel_options(dout_BTNH.shape[3], interpret=interpret)
    return pallas_gpu_attention()._mha_backward(**options, res=residuals, do=dout_BTNH)


_mha.defvjp(_mha_forward, _mha_backward)


def _kernel_options(head_dim: int, *, interpret: bool) -> dict[str, Any]:
    """Returns the static arguments of `_mha_forward` and `_mha_backward`: JAX's defaults, for a causal mask."""
    return {
        "sm_scale": 1 / math.sqrt(head_dim),
        "causal": True,
        "block_sizes": pallas_gpu_attention().BlockSizes.get_default(),
        "backward_pass_impl": "triton",
        "num_warps": None,
        "num_stages": 2,
        "grid": None,
        "interpret": interpret,
        "debug": False,
        "return_residuals": False,
    }
