"""Attention of models other than ours: `attention` with another mask, scale, softcap, dropout or set of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from hlat_jax.ops import attention, chunked_attention
from hlat_jax.ops.attention_variant import Variant
from hlat_jax.ops.dialect import CallSpec, Implementation, Op


def general_attention(
    q_BTNH: jax.Array,
    *,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    implementation: str,
    window: int | None = None,
    variant: Variant,
) -> jax.Array:
    """Returns [B, T, N, H]: `attention` with a `Variant`, in which S may differ from T; `OP` has its names.

    Raises:
      ValueError: arguments of inconsistent shapes or dtypes, or that the implementation cannot serve.
    """
    (b, t, n, h), (_, s, k, _) = q_BTNH.shape, k_BSKH.shape
    is_square = s == t or (segment_ids_BT is None and not variant.causal)
    if not is_square or k_BSKH.shape != v_BSKH.shape or k_BSKH.shape != (b, s, k, h) or n % k:
        raise ValueError(
            f"queries {q_BTNH.shape}, keys {k_BSKH.shape}, values {v_BSKH.shape}: shapes must be [B, T, N, H] and "
            "[B, S, K, H], where K divides N; S must be T in causal attention and with segment ids."
        )
    if window is not None and (window < 1 or not variant.causal):
        raise ValueError(f"window={window} must be at least 1 (the query's own position) and causal, or None.")
    call = describe_call(
        q_BTNH.shape,
        k_BSKH.shape[1:3],
        dtype=q_BTNH.dtype,
        has_segments=segment_ids_BT is not None,
        window=window,
        features=variant.features,
    )
    return OP.run(implementation, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, variant, **call)


def describe_call(
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, int],
    *,
    dtype: Any,
    has_segments: bool,
    window: int | None = None,
    features: Sequence[str] = (),
) -> CallSpec:
    """Returns the spec of a call of `general_attention`.

    Args:
      q_shape: (B, T, N, H) of the queries on one device.
      kv_shape: (S, K) of the keys on one device.
      dtype: of queries, keys and values.
      has_segments: see `attention.describe_call`.
      window: see `attention`.
      features: those of the `Variant`.
    """
    call = attention.describe_call(q_shape, kv_shape[1], dtype=dtype, has_segments=has_segments, window=window)
    return {**call, "num_keys": kv_shape[0], "features": tuple(features)}


def _einsum(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, variant):
    return attention.reference(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT, window=window, variant=variant)


def _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, variant):
    return chunked_attention.attention(
        q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT, window=window, variant=variant
    )


def _chunked_unsupported_reasons(*, features: Sequence[str], **_: Any) -> list[str]:
    if {"mask", "dropout"} <= {*features} and "bidirectional" not in features:
        return ["it has no dropout with a mask that may hide every key from a query"]
    return []


OP = Op("attention")
OP.register(Implementation("einsum", _einsum, {"*": 10}))
OP.register(Implementation("chunked", _chunked, {"cpu": 20, "*": 5}, _chunked_unsupported_reasons))
