"""Attention in memory linear in T, by an online softmax over blocks of keys, with a custom backward pass.

Queries and keys are cut into blocks, and one static loop visits every pair of blocks that is not fully masked. These
are half of the pairs under a causal mask, or a band with a window. The forward pass keeps the output and, for each
query, the largest score and the sum of exponentials. From these the backward pass recomputes the probabilities of a
pair.

Source: Rabe and Staats, arXiv 2112.05682, and for the backward pass Dao et al., arXiv 2205.14135, algorithm 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hlat_jax.ops.own_backward import with_backward

MASKED = -1e30  # finite, so that a masked score minus the row's maximum is never inf - inf
BLOCK = 256  # of queries, and of keys: one pair's scores are B x N x 256 x 256
_LOWEST = float(np.finfo(np.float32).min)  # of the maximum so far: finite, and not above any finite score


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_ids_BT: jax.Array | None,
    window: int | jax.Array | None,
    part: Any = None,
) -> jax.Array:
    """Returns [B, T, N, H], the same as `ops.attention`.

    With `part`, a `context_attention.Part`, the queries are the part of a row that a device has.
    """
    t, h = q_BTNH.shape[1], q_BTNH.shape[3]
    s, kv_heads = k_BSKH.shape[1:3]
    block = BLOCK if part is None else s // len(part.key_starts)
    static = _Static(
        scale=1 / math.sqrt(h),
        window=window if isinstance(window, int) else None,
        kv_heads=kv_heads,
        block=min(block, t),
    )
    terms = {
        "part": part,
        "ids": None if segment_ids_BT is None else _pad(segment_ids_BT[:, None, :, None], static.block),
        "window": None if isinstance(window, int) else window,
    }
    return _attention(static, q_BTNH, k_BSKH, v_BSKH, terms)


def block_pairs(num_blocks: int, *, block: int, window: int | None) -> np.ndarray:
    """Returns int32 [pairs, 2], (query block, key block) that are not fully masked, each query's own block first."""
    num_previous = num_blocks if window is None else -(-(window - 1) // block)  # key blocks before the query's own
    pairs = [(i, j) for i in range(num_blocks) for j in range(i, max(-1, i - num_previous - 1), -1)]
    return np.asarray(pairs, np.int32)


@dataclasses.dataclass(frozen=True)
class _Static:
    """Static values: factor of the scores, keys in a window (None for all or an array), K, positions in a block."""

    scale: float
    window: int | None
    kv_heads: int
    block: int

    def pairs(self, part: Any, num_blocks: int) -> Any:
        """Returns int32 [pairs, 2]: (query block, key block), of so many query blocks or of a part."""
        return block_pairs(num_blocks, block=self.block, window=self.window) if part is None else part.pairs


def _attention(static, q_BTNH, k_BSKH, v_BSKH, terms):
    leaves, tree = jax.tree.flatten(terms)

    def attention(q_BTNH, k_BSKH, v_BSKH, *terms):
        return forward((q_BTNH, k_BSKH, v_BSKH, *terms), ())[0]

    def forward(args, places):
        out_BTNH, kept = _forward(static, *args[:3], jax.tree.unflatten(tree, args[3:]))
        return [out_BTNH], kept

    def backward(kept, cotangents):
        return dict(enumerate(_backward(static, kept, cotangents[0])))

    return with_backward(attention, forward, backward)(q_BTNH, k_BSKH, v_BSKH, *leaves)[0]


def _forward(static, q_BTNH, k_BSKH, v_BSKH, terms):
    q_CXUGH, k_CXSH, v_CXSH = _cut_operands(static, q_BTNH, k_BSKH, v_BSKH)
    c, x, u, g, h = q_CXUGH.shape

    def visit(sums, pair):
        i, j = pair
        top_XUG, total_XUG, out_XUGH = (_at(total, i) for total in sums)
        scores_XUGS = _scores(static, _at(q_CXUGH, i), _at(k_CXSH, j), terms, pair)
        new_top_XUG = jnp.maximum(top_XUG, scores_XUGS.max(axis=-1))
        weights_XUGS = jnp.exp(scores_XUGS - new_top_XUG[..., None])
        shrink_XUG = jnp.exp(top_XUG - new_top_XUG)
        out_XUGH *= shrink_XUG[..., None]
        out_XUGH += _dot("XUGS,XSH->XUGH", weights_XUGS.astype(v_CXSH.dtype), _at(v_CXSH, j))
        total_XUG = total_XUG * shrink_XUG + weights_XUGS.sum(axis=-1)
        parts = (new_top_XUG, total_XUG, out_XUGH)
        return tuple(_updated(total, i, part) for total, part in zip(sums, parts, strict=True)), None

    sums = (
        jnp.full((c, x, u, g), _LOWEST, jnp.float32),
        jnp.zeros((c, x, u, g), jnp.float32),
        jnp.zeros((c, x, u, g, h), jnp.float32),
    )
    (top_CXUG, total_CXUG, out_CXUGH), _ = jax.lax.scan(visit, sums, static.pairs(terms["part"], c))
    out_CXUGH = out_CXUGH / total_CXUG[..., None]
    out_BTNH = _join(out_CXUGH, q_BTNH.shape).astype(q_BTNH.dtype)
    # named inside the VJP: a remat policy that saves them avoids a second forward pass
    out_BTNH = checkpoint_name(out_BTNH, "attention_out")
    top_CXUG, total_CXUG = (checkpoint_name(x, "attention_lse") for x in (top_CXUG, total_CXUG))
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, terms, out_BTNH, top_CXUG, total_CXUG)


def _backward(static, residuals, dout_BTNH):
    q_BTNH, k_BSKH, v_BSKH, terms, out_BTNH, top_CXUG, total_CXUG = residuals
    q_CXUGH, k_CXSH, v_CXSH = _cut_operands(static, q_BTNH, k_BSKH, v_BSKH)
    dout_CXUGH = _cut(dout_BTNH, static)
    inner_BTN1 = (dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    inner_CXUG = _cut(inner_BTN1, static)[..., 0]

    def visit(grads, pair):
        i, j = pair
        dq_CXUGH, dk_CXSH, dv_CXSH = grads
        q_XUGH, dout_XUGH = _at(q_CXUGH, i), _at(dout_CXUGH, i)
        k_XSH, v_XSH = _at(k_CXSH, j), _at(v_CXSH, j)
        scores_XUGS = _scores(static, q_XUGH, k_XSH, terms, pair)
        probs_XUGS = jnp.exp(scores_XUGS - _at(top_CXUG, i)[..., None]) / _at(total_CXUG, i)[..., None]
        dprobs_XUGS = _dot("XUGH,XSH->XUGS", dout_XUGH, v_XSH)
        dscores_XUGS = probs_XUGS * (dprobs_XUGS - _at(inner_CXUG, i)[..., None])
        dscores_XUGS = (dscores_XUGS * static.scale).astype(q_BTNH.dtype)
        dq_XUGH = _dot("XUGS,XSH->XUGH", dscores_XUGS, k_XSH)
        dk_XSH = _dot("XUGS,XUGH->XSH", dscores_XUGS, q_XUGH)
        dv_XSH = _dot("XUGS,XUGH->XSH", probs_XUGS.astype(v_BSKH.dtype), dout_XUGH)
        dq_CXUGH = _updated(dq_CXUGH, i, _at(dq_CXUGH, i) + dq_XUGH)
        dk_CXSH = _updated(dk_CXSH, j, _at(dk_CXSH, j) + dk_XSH)
        dv_CXSH = _updated(dv_CXSH, j, _at(dv_CXSH, j) + dv_XSH)
        return (dq_CXUGH, dk_CXSH, dv_CXSH), None

    start = tuple(jnp.zeros(operand.shape, jnp.float32) for operand in (q_CXUGH, k_CXSH, v_CXSH))
    (dq_CXUGH, dk_CXSH, dv_CXSH), _ = jax.lax.scan(visit, start, static.pairs(terms["part"], len(q_CXUGH)))
    dq_BTNH = _join(dq_CXUGH, q_BTNH.shape).astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = (
        _join(grad[:, :, :, None], like.shape).astype(like.dtype)
        for grad, like in ((dk_CXSH, k_BSKH), (dv_CXSH, v_BSKH))
    )
    return dq_BTNH, dk_BSKH, dv_BSKH


def _cut_operands(static, q_BTNH, k_BSKH, v_BSKH):
    """Returns blocks [C, X, ...]; X = B * K, and T and S are padded to whole blocks."""
    k_CXSH, v_CXSH = (_cut(x, static)[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    return _cut(q_BTNH, static), k_CXSH, v_CXSH


def _cut(x_BTNH, static):
    (b, t, n, h), block, kv_heads = x_BTNH.shape, static.block, static.kv_heads
    num_blocks = -(-t // block)
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, num_blocks * block - t), (0, 0), (0, 0)))
    x_BCUKGH = x_BTNH.reshape(b, num_blocks, block, kv_heads, n // kv_heads, h)
    return x_BCUKGH.transpose(1, 0, 3, 2, 4, 5).reshape(num_blocks, b * kv_heads, block, n // kv_heads, h)


def _join(x_CXUGH, shape):
    b, t, n, h = shape
    c, _, u, g, _ = x_CXUGH.shape
    x_BCUKGH = x_CXUGH.reshape(c, b, n // g, u, g, h).transpose(1, 0, 3, 2, 4, 5)
    return x_BCUKGH.reshape(b, c * u, n, h)[:, :t]


def _pad(x_BNTS, block):
    """Returns a term with T padded to whole blocks."""
    return jnp.pad(x_BNTS, ((0, 0), (0, 0), (0, -x_BNTS.shape[2] % block), (0, 0)))


def _scores(static, q_XUGH, k_XSH, terms, pair):
    """Returns the scores in one pair of blocks, [X, U, G, S], and MASKED where a query does not attend to a key."""
    i, j = pair
    (_, u, g, _), s = q_XUGH.shape, k_XSH.shape[1]
    scores_XUGS = _dot("XUGH,XSH->XUGS", q_XUGH, k_XSH) * static.scale
    scores = scores_XUGS.reshape(-1, static.kv_heads, u, g, s)
    part = terms["part"]
    queries = (i * u if part is None else part.query_starts[i]) + jax.lax.broadcasted_iota(jnp.int32, (u, 1, 1), 0)
    keys = (j * s if part is None else part.key_starts[j]) + jax.lax.broadcasted_iota(jnp.int32, (1, 1, s), 2)
    mask = queries >= keys  # which hides the padding too
    window = terms["window"] if static.window is None else static.window
    if window is not None:
        mask &= queries - keys < window
    if terms["ids"] is not None:
        queries_ids = jax.lax.dynamic_slice_in_dim(terms["ids"], i * u, u, 2)[:, :, :, None]
        key_ids = terms["ids"] if part is None else part.key_ids_BS[:, None, :, None]
        keys_ids = jax.lax.dynamic_slice_in_dim(key_ids, j * s, s, 2)[:, :, None, None, :, 0]
        mask = mask & (queries_ids == keys_ids)
    return jnp.where(mask, scores, MASKED).reshape(scores_XUGS.shape)


def _at(blocks, index):
    return jax.lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _updated(blocks, index, block):
    return jax.lax.dynamic_update_index_in_dim(blocks, block, index, 0)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
