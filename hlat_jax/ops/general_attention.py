"""Attention of models other than ours: `attention` with another mask, scale, bias, softcap, dropout or set of keys."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops import attention as causal_attention
from hlat_jax.ops.dialect import CallSpec, Implementation, Op

# Finite, so that a masked score minus the row's maximum is never inf - inf.
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Variant:
    """What attention of other models does to its scores and probabilities; the default is `attention`.

    Arrays are [B or 1, N or 1, T or 1, S or 1].

    Attributes:
      causal: whether a query attends only to its own and earlier positions.
      scale: factor of the scores; None: 1/sqrt(H).
      softcap: c: scores become c * tanh(scores / c), before biases and masks. Source: arXiv 2408.00118, section 2.
      biases: floats, added to the scores.
      masks: bool, True where a query may attend to a key, in all of them. A query that attends to no key gets the mean
        of all values, as by `where(mask, scores, -1e9)`.
      keep: bool: the probabilities that dropout keeps, after the softmax.
      keep_factor: of the kept probabilities: 1 / (1 - rate).
    """

    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    biases: Sequence[jax.Array] = ()
    masks: Sequence[jax.Array] = ()
    keep: jax.Array | None = None
    keep_factor: float = 1.0

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what differs from the default, for a CallSpec and for errors."""
        found = {
            "bidirectional": not self.causal,
            "scale": self.scale is not None,
            "softcap": self.softcap is not None,
            "bias": bool(self.biases),
            "mask": bool(self.masks),
            "dropout": self.keep is not None,
        }
        return tuple(name for name, differs in found.items() if differs)


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
      features: of the `Variant`.
    """
    call = causal_attention.describe_call(q_shape, kv_shape[1], dtype=dtype, has_segments=has_segments, window=window)
    return {**call, "num_keys": kv_shape[0], "features": tuple(features)}


def _einsum(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, variant):
    (b, t, n, h), (s, k) = q_BTNH.shape, k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.reshape(b, t, k, n // k, h)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BNTS = scores_BKGTS.reshape(b, n, t, s) * (1 / math.sqrt(h) if variant.scale is None else variant.scale)
    if variant.softcap is not None:
        scores_BNTS = variant.softcap * jnp.tanh(scores_BNTS / variant.softcap)
    for bias_BNTS in variant.biases:
        scores_BNTS += bias_BNTS.astype(jnp.float32)
    masks = list(variant.masks)
    if variant.causal:
        masks.append(_mask(t, s, window=window)[None, None])
    if segment_ids_BT is not None:
        masks.append((segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])[:, None])
    if masks:
        scores_BNTS = jnp.where(functools.reduce(jnp.logical_and, masks), scores_BNTS, _MASKED)
    probs_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    if variant.keep is not None:
        probs_BNTS = jnp.where(variant.keep, probs_BNTS * variant.keep_factor, 0)
    probs_BKGTS = probs_BNTS.astype(v_BSKH.dtype).reshape(scores_BKGTS.shape)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS, v_BSKH, preferred_element_type=jnp.float32)
    return out_BTKGH.astype(q_BTNH.dtype).reshape(b, t, n, h)


def _mask(num_queries: int, num_keys: int, *, window: int | None) -> jax.Array:
    behind = jnp.arange(num_queries)[:, None] - jnp.arange(num_keys)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, variant):
    from hlat_jax.ops import chunked_variant as chunked

    return chunked.attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT=segment_ids_BT, window=window, variant=variant)


def _chunked_unsupported_reasons(*, features: Sequence[str], **_: Any) -> list[str]:
    if {"mask", "dropout"} <= {*features} and "bidirectional" not in features:
        return ["it has no dropout with a mask that may hide every key from a query"]
    return []


OP = Op("attention")
OP.register(Implementation("einsum", _einsum, {"*": 10}))
OP.register(Implementation("chunked", _chunked, {"cpu": 20, "*": 5}, _chunked_unsupported_reasons))
