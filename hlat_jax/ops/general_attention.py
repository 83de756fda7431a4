"""Attention of models other than ours: `attention` with another mask, scale, softcap, dropout or set of keys."""

from __future__ import annotations

import jax

from hlat_jax.ops import chunked_attention
from hlat_jax.ops.chunked_attention import Variant


def general_attention(
    q_BTNH: jax.Array,
    *,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    window: int | None = None,
    variant: Variant,
) -> jax.Array:
    """Returns [B, T, N, H]: `attention` with a `Variant`, in which S may differ from T, in memory linear in T.

    Raises:
      ValueError: arguments of inconsistent shapes, or dropout in causal attention with a mask that may hide every key.
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
    if variant.masks and variant.keep is not None and variant.causal:
        raise ValueError("there is no dropout with a mask that may hide every key from a query.")
    return chunked_attention.attention(
        q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT, window=window, variant=variant
    )
