"""Causal attention by the NKI kernels of nkilib.

Each kernel is a JAX primitive. Its default lowering is the XLA reference in this file, in the kernel's layouts. Its
lowering for platform `neuron` calls the kernel. So values, gradients and layouts are tested on any platform, and the
calls by lowering. The kernels themselves have not been run.

Since SDK 2.29 AWS documents NKI for trn2 and trn3 only, so `chips` refuses these kernels on other chips.

Source of the contracts: nki-library e9ef98f (attention_cte) and 092a49d (attention_bwd), nkilib.core.attention. A test
compares the calls with them.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from hlat_jax.host.jax_compat import mlir

PARTITIONS = 128  # rows of on-chip memory, over which a kernel distributes the positions of the sequence
_MAX_HEAD_DIM = 128
_MAX_SEQ_LEN = 131_072
_MAX_BATCH = 512  # rows times heads that the forward kernel takes
_BACKWARD_MULTIPLE = 512  # of keys
_DTYPES = ("bfloat16", "float16", "float32")


def unsupported_reasons(
    *, q_shape: tuple[int, ...], num_kv_heads: int, dtype: Any, has_segments: bool, window: int | str | None
) -> list[str]:
    """Returns why the kernels cannot run a call, forward and backward, see `ops.attention.describe_call`."""
    num_rows, seq_len, num_heads, head_dim = q_shape
    reasons = []
    if window is not None:
        reasons.append(f"the kernel supports a window (window={window}) only with a scale of 1")
    if head_dim > _MAX_HEAD_DIM:
        reasons.append(f"model.head_dim={head_dim} is above {_MAX_HEAD_DIM}")
    if seq_len % _BACKWARD_MULTIPLE:
        reasons.append(f"the sequence length {seq_len} is not a multiple of {_BACKWARD_MULTIPLE}")
    if seq_len > _MAX_SEQ_LEN:
        reasons.append(f"the sequence length {seq_len} is above {_MAX_SEQ_LEN}")
    if num_rows * num_heads > _MAX_BATCH:
        reasons.append(f"{num_rows} rows x {num_heads} heads on one device are above {_MAX_BATCH}")
    if jnp.dtype(dtype).name not in _DTYPES:
        reasons.append(f"dtype {jnp.dtype(dtype).name} is not one of {', '.join(_DTYPES)}")
    return reasons


def attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, segment_ids_BT: jax.Array | None = None
) -> jax.Array:
    """Returns [B, T, N, H] as `ops.attention`, for calls without `unsupported_reasons`.

    The kernels take the first and the last position that a query sees. So equal segment ids must be next to each other,
    as with `data.packing=documents`. An id that comes back after another id counts as a new segment.
    """
    return _attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)


@jax.custom_vjp
def _attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
    _register_lowerings()
    b, t, n, h = q_BTNH.shape
    bounds = () if segment_ids_BT is None else segment_bounds(segment_ids_BT)
    of_heads = (jnp.broadcast_to(bound_BT[:, None], (b, n, t)).reshape(b * n, t, 1) for bound_BT in bounds)
    operands = _heads_in_rows(q_BTNH), _heads_in_rows(k_BSKH).swapaxes(1, 2), _heads_in_rows(v_BSKH)
    out_ZTH, neg_max, recip_sum = _forward_p.bind(*operands, *of_heads, scale=1 / math.sqrt(h))
    out_BNTH = out_ZTH.reshape(b, n, t, h)
    return out_BNTH.swapaxes(1, 2), (q_BTNH, k_BSKH, v_BSKH, out_BNTH, log_sum_exp(neg_max, recip_sum), bounds)


def _backward(residuals, dout_BTNH):
    q_BTNH, k_BSKH, v_BSKH, out_BNTH, lse, bounds = residuals
    b, _, n, h = q_BTNH.shape
    operands = [_positions_last(x) for x in (q_BTNH, k_BSKH, v_BSKH)]
    operands += [out_BNTH.swapaxes(2, 3), _positions_last(dout_BTNH), lse.reshape(b, n, PARTITIONS, -1)]
    grads = _backward_p.bind(*operands, *bounds, scale=1 / math.sqrt(h))
    # [B, heads, H, T] -> [B, T, heads, H]; None: segment ids have no gradient
    return *(grad.transpose(0, 3, 1, 2) for grad in grads), None


_attention.defvjp(_forward, _backward)


def log_sum_exp(neg_max: jax.Array, recip_sum: jax.Array) -> jax.Array:
    """Returns max + log(sum of exp(score - max)) from the statistics that the forward kernel returns."""
    return -(neg_max + jnp.log(recip_sum))


def segment_bounds(segment_ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first position of each token's segment, and the first position after it, each fp32 [B, T].

    It uses only static slices and maxima, because cumulative operations lower to `reduce_window`, a lint warning.
    """
    t = segment_ids_BT.shape[1]
    is_first = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    positions_T = jax.lax.broadcasted_iota(jnp.float32, (t,), 0)  # exact: the longest row has 2^17 positions
    first_BT = jnp.where(is_first, positions_T, 0)
    # of the later positions only; the last segment of a row ends with it
    end_BT = jnp.pad(jnp.where(is_first, positions_T, t)[:, 1:], ((0, 0), (0, 1)), constant_values=t)
    distance = 1
    while distance < t:
        first_BT = jnp.maximum(first_BT, jnp.pad(first_BT[:, :-distance], ((0, 0), (distance, 0))))
        shifted_BT = jnp.pad(end_BT[:, distance:], ((0, 0), (0, distance)), constant_values=t)
        end_BT = jnp.minimum(end_BT, shifted_BT)
        distance *= 2
    return first_BT, end_BT


def tile(x_ZT: jax.Array) -> jax.Array:
    """Returns [Z, 128, T / 128] from [Z, T], with position t at [t % 128, t // 128], as in the kernels."""
    z, t = x_ZT.shape
    return x_ZT.reshape(z, t // PARTITIONS, PARTITIONS).swapaxes(1, 2)


def untile(x: jax.Array) -> jax.Array:
    """Returns [..., T] from [..., 128, T / 128], the inverse of `tile`."""
    return x.swapaxes(-1, -2).reshape(*x.shape[:-2], -1)


def _heads_in_rows(x_BTNH):
    b, t, n, h = x_BTNH.shape
    return x_BTNH.swapaxes(1, 2).reshape(b * n, t, h)


def _positions_last(x_BTNH):
    return x_BTNH.transpose(0, 2, 3, 1)


# The references, in the layouts of the kernels. Z stands for B * N, Y for B * K, R for the N / K queries per key head.


def _reference_forward(q_ZTH, k_YHS, v_YSH, *bounds_ZT1, scale):
    z, t, h = q_ZTH.shape
    y = k_YHS.shape[0]
    q_YRTH = q_ZTH.reshape(y, z // y, t, h)
    scores = jnp.einsum("YRTH,YHS->YRTS", q_YRTH, k_YHS, preferred_element_type=jnp.float32) * scale
    visible = _visible(t, *(bound.reshape(y, z // y, t) for bound in bounds_ZT1))
    scores = jnp.where(visible, scores, -1e30)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    probs = (weights / total).astype(v_YSH.dtype)
    out = jnp.einsum("YRTS,YSH->YRTH", probs, v_YSH, preferred_element_type=jnp.float32)
    return out.reshape(z, t, h).astype(q_ZTH.dtype), tile(-top.reshape(z, t)), tile(1 / total.reshape(z, t))


def _reference_backward(*operands, scale):
    q_BNHT, k_BKHS, v_BKHS, out_BNHT, dout_BNHT, lse, *bounds_BT = operands
    b, n, h, t = q_BNHT.shape
    k = k_BKHS.shape[1]
    q, out, dout = (x.reshape(b, k, n // k, h, t) for x in (q_BNHT, out_BNHT, dout_BNHT))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("BKRHT,BKHS->BKRTS", q, k_BKHS) * scale
    visible = _visible(t, *(bound[:, None, None] for bound in bounds_BT))
    probs = jnp.where(visible, jnp.exp(scores - untile(lse).reshape(b, k, n // k, t, 1)), 0)
    dprobs = product("BKRHT,BKHS->BKRTS", dout, v_BKHS)
    inner = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=3)
    dscores = (probs * (dprobs - inner[..., None]) * scale).astype(q.dtype)
    dq = product("BKRTS,BKHS->BKRHT", dscores, k_BKHS).reshape(q_BNHT.shape)
    dk = product("BKRTS,BKRHT->BKHS", dscores, q)
    dv = product("BKRTS,BKRHT->BKHS", probs.astype(q.dtype), dout)
    return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def _visible(t, *bounds):
    """Returns bool [..., T, S]: keys up to the query's position and, with bounds [..., T], within them."""
    keys = jax.lax.broadcasted_iota(jnp.int32, (t, t), 1)
    visible = jax.lax.broadcasted_iota(jnp.int32, (t, t), 0) >= keys
    if bounds:
        first, end = (bound[..., None] for bound in bounds)
        visible = visible & (keys >= first) & (keys < end)
    return visible


# The kernels, imported when a program is lowered for Neuron.


def _kernel_forward(q_ZTH, k_YHS, v_YSH, *bounds_ZT1, scale):
    kernel = importlib.import_module("nkilib.core.attention.attention_cte").attention_cte
    bounds = dict(zip(("bound_min", "bound_max"), bounds_ZT1, strict=False))
    return kernel[_num_cores()](
        q_ZTH, k_YHS, v_YSH, scale=scale, causal_mask=True, tp_q=True, cache_softmax=True, **bounds
    )


def _kernel_backward(*operands, scale):
    kernel = importlib.import_module("nkilib.core.attention.attention_bwd").attention_bwd
    q, k, v, out, dout, lse, *bounds_BT = operands
    bounds = dict(zip(("bound_min", "bound_max"), bounds_BT, strict=False))
    # mixed_precision: sums and softmax in fp32, as the op's contract requires; not the default
    return kernel[_num_cores()](
        q, k, v, out, dout, lse, use_causal_mask=True, mixed_precision=True, softmax_scale=scale, **bounds
    )


def _num_cores() -> int:
    """Returns the physical cores of a JAX device (LNC), the grid that a kernel is launched over.

    Raises:
      ValueError: neither the environment nor a device gives it.
    """
    given = os.environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        kind = jax.devices("neuron")[0].device_kind
    except RuntimeError:
        raise ValueError(
            "NKI kernels are launched over the physical cores of a device. There is no Neuron device here, so set "
            "NEURON_LOGICAL_NC_CONFIG to the number: 2 on trn2 and trn3 as they come, else 1."
        ) from None
    return 2 if kind.lower().endswith("d") else 1  # NC_v3d: a device of two cores; NC_v3: of one


def _primitive(name, reference):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.reference = reference  # for what counts its work: passes.jaxpr.reference_jaxpr

    def abstract(*avals, scale):
        outs = jax.eval_shape(functools.partial(reference, scale=scale), *avals)
        return [jax.core.ShapedArray(out.shape, out.dtype) for out in outs]

    primitive.def_impl(lambda *args, scale: jax.jit(functools.partial(primitive.bind, scale=scale))(*args))
    primitive.def_abstract_eval(abstract)
    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=True))
    return primitive


_forward_p = _primitive("nki_attention_forward", _reference_forward)
_backward_p = _primitive("nki_attention_backward", _reference_backward)


@functools.cache
def _register_kernels() -> None:
    for primitive, kernel in ((_forward_p, _kernel_forward), (_backward_p, _kernel_backward)):
        mlir.register_lowering(primitive, mlir.lower_fun(kernel, multiple_results=True), platform="neuron")


def _register_lowerings() -> None:
    """Registers the kernels' lowering for `neuron`; without the plugin, JAX has no such platform."""
    try:
        _register_kernels()
    except NotImplementedError:
        return
