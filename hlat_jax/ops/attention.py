"""Causal grouped-query attention on packed rows, with its contract, XLA implementations, and registrations."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops import chunked_attention
from hlat_jax.ops.chunked_attention import MASKED
from hlat_jax.ops.dialect import CallSpec, Implementation, Op

BY_LAYER = "by layer"  # in the spec of a call: a window that is an argument of the program
_MIN_BLOCK = 128
_MAX_BLOCKS = 8


def attention(
    q_BTNH: jax.Array,
    *,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    implementation: str,
    window: int | jax.Array | None = None,
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(H) + mask) v, [B, T, N, H], in the dtype of `q_BTNH`.

    A query attends to the keys at its own and earlier positions of its row that have its segment id. Query head n uses
    key-value head `n // (N / K)`. Products take the input dtype and accumulate in fp32. Scaling and the softmax are
    fp32. Probabilities are rounded to the dtype of the values before the second product.

    Args:
      q_BTNH: queries, already rotated.
      k_BSKH: keys, with S = T, and K a divisor of N.
      v_BSKH: values.
      segment_ids_BT: int32 ids of segments, or None if every row is one segment.
      implementation: a name that `OP.choose` returns.
      window: number of keys that a query attends to, its own included, or None for all. It is an int32 scalar if layers
        of one program differ, and no block of keys is then skipped. Source: arXiv 2310.06825, section 2.

    Raises:
      ValueError: arguments of inconsistent shapes or dtypes, or that the implementation cannot take.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window={window} must be at least 1 (the query's own position), or None.")
    described = BY_LAYER if isinstance(window, jax.Array) else window
    has_segments = segment_ids_BT is not None
    call = describe_call(q_BTNH.shape, k_BSKH.shape[2], dtype=q_BTNH.dtype, has_segments=has_segments, window=described)
    return OP.run(implementation, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, **call)


def describe_call(
    q_shape: tuple[int, ...], num_kv_heads: int, *, dtype: Any, has_segments: bool, window: int | str | None = None
) -> CallSpec:
    """Returns the spec of a call.

    Args:
      q_shape: shape (B, T, N, H) of the queries on one device, with S = T.
      num_kv_heads: number of KV heads on one device.
      dtype: dtype of queries, keys and values.
      has_segments: whether rows hold several documents, which must not attend to each other.
      window: number of keys as in `attention`, or BY_LAYER for a scalar.
    """
    return {
        "q_shape": tuple(q_shape),
        "num_kv_heads": num_kv_heads,
        "dtype": jnp.dtype(dtype).name,
        "has_segments": has_segments,
        "window": window,
    }


def common_window(windows: Sequence[int], num_keys: int) -> int | str | None:
    """Returns the window of all layers as `describe_call` takes it, from the window of each of `num_keys` keys."""
    return BY_LAYER if len(set(windows)) > 1 else windows[0] if windows[0] < num_keys else None


def _check(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
    b, t, n, h = q_BTNH.shape if q_BTNH.ndim == 4 else (0, 0, 0, 0)
    k = k_BSKH.shape[2] if k_BSKH.ndim == 4 else 1
    is_one_dtype = q_BTNH.dtype == k_BSKH.dtype == v_BSKH.dtype
    is_fitting = k_BSKH.shape == v_BSKH.shape == (b, t, k, h) and n % k == 0 and is_one_dtype
    if not is_fitting or (segment_ids_BT is not None and segment_ids_BT.shape != (b, t)):
        given = {"queries": q_BTNH, "keys": k_BSKH, "values": v_BSKH, "segment ids": segment_ids_BT}
        args = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in given.items() if x is not None)
        raise ValueError(
            f"attention does not take {args}. Give queries [B, T, N, H], keys and values [B, T, K, H] of one "
            "dtype, N a multiple of K, ids [B, T]."
        )


def _einsum(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    b, t, n, h = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(b, t, k_BSKH.shape[2], -1, h)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    mask_BTS = _causal_mask(t, t, window=window)[None]
    if segment_ids_BT is not None:
        mask_BTS = mask_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS / math.sqrt(h), MASKED)
    probs_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS, v_BSKH, preferred_element_type=jnp.float32)
    return out_BTKGH.astype(q_BTNH.dtype).reshape(b, t, n, h)


def _blocked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    if isinstance(window, jax.Array):
        return jax.checkpoint(_in_blocks)(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window)
    return jax.checkpoint(_in_blocks, static_argnums=4)(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window)


def _in_blocks(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    """Queries in static blocks, each against its unmasked keys, with batch and key-value heads merged.

    The backward pass recomputes the scores of each block. On CPU that costs less than storing them in new memory.
    """
    b, t, n, h = q_BTNH.shape
    k = k_BSKH.shape[2]
    g = n // k
    q_XTGH = q_BTNH.reshape(b, t, k, g, h).transpose(0, 2, 1, 3, 4).reshape(b * k, t, g, h)
    k_XSH = k_BSKH.transpose(0, 2, 1, 3).reshape(b * k, t, h)
    v_XSH = v_BSKH.transpose(0, 2, 1, 3).reshape(b * k, t, h)
    segments_XT = None if segment_ids_BT is None else jnp.repeat(segment_ids_BT, k, axis=0)
    outs = []
    for start, stop in block_bounds(t):
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        segments = None if segments_XT is None else segments_XT[:, first:stop]
        block = functools.partial(_attend_block, start=start - first, window=window)
        outs.append(block(q_XTGH[:, start:stop], k_XSH[:, first:stop], v_XSH[:, first:stop], segments))
    out_XTGH = jnp.concatenate(outs, axis=1)
    return out_XTGH.reshape(b, k, t, g, h).transpose(0, 2, 1, 3, 4).reshape(b, t, n, h)


def block_bounds(seq_len: int) -> list[tuple[int, int]]:
    """Returns (start, stop) of the query blocks of "blocked", at most 8 of at least 128 queries except the last."""
    size = max(_MIN_BLOCK, -(-seq_len // _MAX_BLOCKS))
    return [(start, min(start + size, seq_len)) for start in range(0, seq_len, size)]


def _attend_block(q_XUGH, k_XSH, v_XSH, segments_XS, *, start: int, window: int | jax.Array | None):
    x, u, g, h = q_XUGH.shape
    s = k_XSH.shape[1]
    q_XRH = q_XUGH.reshape(x, u * g, h)  # rows: queries of the block times heads that share keys
    scores_XRS = jax.lax.dot_general(q_XRH, k_XSH, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    mask = _causal_mask(u, s, offset=start, window=window)[None]
    if segments_XS is not None:
        mask &= segments_XS[:, start:, None] == segments_XS[:, None, :]
    mask = jnp.broadcast_to(mask[:, :, None, :], (mask.shape[0], u, g, s)).reshape(-1, u * g, s)
    scores_XRS = jnp.where(mask, scores_XRS * (1 / math.sqrt(h)), MASKED)
    probs_XRS = jax.nn.softmax(scores_XRS, axis=-1).astype(v_XSH.dtype)
    out_XRH = jax.lax.dot_general(probs_XRS, v_XSH, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return out_XRH.astype(q_XUGH.dtype).reshape(x, u, g, h)


def _causal_mask(num_queries: int, num_keys: int, *, offset: int = 0, window: int | jax.Array | None) -> jax.Array:
    queries = jax.lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 0) + offset
    keys = jax.lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 1)
    return queries >= keys if window is None else (queries >= keys) & (queries - keys < window)


def _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    return chunked_attention.attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT, window=window)


def _imported(module: str, name: str) -> Callable[..., Any]:
    """Returns a function of a module of kernels, imported when it is called."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


_NKI, _GPU = "hlat_jax.ops.nki.attention", "hlat_jax.ops.gpu.attention"


# What a kernel does not take, its `unsupported_reasons` reject.
def _nki(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, _):
    return _imported(_NKI, "attention")(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT)


def _cudnn(q_BTNH, k_BSKH, v_BSKH, _, window):
    return _imported(_GPU, "dot_product_attention")(q_BTNH, k_BSKH, v_BSKH, window=window)


def _triton(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, _):
    return _imported(_GPU, "triton")(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT)


OP = Op("model.attention")
OP.register(Implementation("einsum", _einsum, {"*": 10}))
# XLA on cpu does not fuse attention: skipping the masked half of the scores is faster there
OP.register(Implementation("blocked", _blocked, {"cpu": 20, "*": 5}))
# takes less memory for long rows but is slower: only an explicit name or a measured table selects it
OP.register(Implementation("chunked", _chunked, {"*": 4}))
# `nki` has not run on a device; with the other two a step of 160m takes 0.39 and 0.44 of einsum's time on an H100
OP.register(Implementation("nki", _nki, {"neuron": 1}, _imported(_NKI, "unsupported_reasons")))
OP.register(Implementation("cudnn", _cudnn, {"cuda": 20}, _imported(_GPU, "cudnn_unsupported_reasons")))
OP.register(Implementation("triton", _triton, {"cuda": 15}, _imported(_GPU, "triton_unsupported_reasons")))
