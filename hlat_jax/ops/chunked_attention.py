"""Attention in memory linear in T: an online softmax over blocks of keys, with a backward pass of its own.

Queries and keys are cut into blocks, and one static loop visits every pair of blocks that is not fully masked: half of
them under a causal mask, a band with a window. The forward pass keeps the output and the log-sum-exp of each query,
from which the backward pass recomputes the probabilities of a pair.

Source: Rabe and Staats, arXiv 2112.05682; the backward pass as Dao et al., arXiv 2205.14135, algorithm 4.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

BLOCK = 256  # of queries, and of keys: one pair's scores are B x N x 256 x 256
_MASKED = -1e30  # finite, so that a masked score minus a maximum is never inf - inf


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_ids_BT: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Returns [B, T, N, H] as `ops.attention`. Reverse mode only."""
    return _attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window)


def block_pairs(num_blocks: int, *, block: int, window: int | None) -> np.ndarray:
    """Returns int32 [pairs, 2]: (query block, key block) that are not fully masked, each query's own block first."""
    num_previous = num_blocks if window is None else -(-(window - 1) // block)  # key blocks before the query's own
    pairs = [(i, j) for i in range(num_blocks) for j in range(i, max(-1, i - num_previous - 1), -1)]
    return np.asarray(pairs, np.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    q_CXUGH, k_CXSH, v_CXSH, ids_CXS = _cut(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    c, x, u, g, h = q_CXUGH.shape

    def visit(sums, pair):
        i, j = pair
        top_XUG, total_XUG, out_XUGH = (_at(total, i) for total in sums)
        scores_XUGS = _scores(_at(q_CXUGH, i), _at(k_CXSH, j), _mask(i, j, u, ids_CXS, window))
        new_top_XUG = jnp.maximum(top_XUG, scores_XUGS.max(axis=-1))
        weights_XUGS = jnp.exp(scores_XUGS - new_top_XUG[..., None])
        shrink_XUG = jnp.exp(top_XUG - new_top_XUG)
        out_XUGH = out_XUGH * shrink_XUG[..., None] + _values(weights_XUGS.astype(v_CXSH.dtype), _at(v_CXSH, j))
        total_XUG = total_XUG * shrink_XUG + weights_XUGS.sum(axis=-1)
        parts = (new_top_XUG, total_XUG, out_XUGH)
        return tuple(_updated(total, i, part) for total, part in zip(sums, parts, strict=True)), None

    start = (
        jnp.full((c, x, u, g), _MASKED, jnp.float32),
        jnp.zeros((c, x, u, g), jnp.float32),
        jnp.zeros((c, x, u, g, h), jnp.float32),
    )
    (top_CXUG, total_CXUG, out_CXUGH), _ = jax.lax.scan(visit, start, block_pairs(c, block=u, window=window))
    out_BTNH = _joined(out_CXUGH / total_CXUG[..., None], q_BTNH.shape).astype(q_BTNH.dtype)
    # named inside the VJP: a remat policy that saves both avoids a second forward pass
    out_BTNH = checkpoint_name(out_BTNH, "attention_out")
    lse_CXUG = checkpoint_name(top_CXUG + jnp.log(total_CXUG), "attention_lse")
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, out_BTNH, lse_CXUG)


def _backward(window, residuals, dout_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, out_BTNH, lse_CXUG = residuals
    q_CXUGH, k_CXSH, v_CXSH, ids_CXS = _cut(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    u, kv_heads = q_CXUGH.shape[2], k_BSKH.shape[2]
    dout_CXUGH = _cut_queries(dout_BTNH, kv_heads)
    inner_BTN1 = (dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    inner_CXUG = _cut_queries(inner_BTN1, kv_heads)[..., 0]
    scale = 1 / math.sqrt(q_BTNH.shape[3])

    def visit(grads, pair):
        i, j = pair
        dq_CXUGH, dk_CXSH, dv_CXSH = grads
        scores_XUGS = _scores(_at(q_CXUGH, i), _at(k_CXSH, j), _mask(i, j, u, ids_CXS, window))
        probs_XUGS = jnp.exp(scores_XUGS - _at(lse_CXUG, i)[..., None])
        dprobs_XUGS = _dot("XUGH,XSH->XUGS", _at(dout_CXUGH, i), _at(v_CXSH, j))
        dscores_XUGS = (probs_XUGS * (dprobs_XUGS - _at(inner_CXUG, i)[..., None]) * scale).astype(q_BTNH.dtype)
        probs_XUGS = probs_XUGS.astype(v_BSKH.dtype)
        dq_XUGH = _dot("XUGS,XSH->XUGH", dscores_XUGS, _at(k_CXSH, j))
        dk_XSH = _dot("XUGS,XUGH->XSH", dscores_XUGS, _at(q_CXUGH, i))
        dv_XSH = _dot("XUGS,XUGH->XSH", probs_XUGS, _at(dout_CXUGH, i))
        dq_CXUGH = _updated(dq_CXUGH, i, _at(dq_CXUGH, i) + dq_XUGH)
        dk_CXSH = _updated(dk_CXSH, j, _at(dk_CXSH, j) + dk_XSH)
        dv_CXSH = _updated(dv_CXSH, j, _at(dv_CXSH, j) + dv_XSH)
        return (dq_CXUGH, dk_CXSH, dv_CXSH), None

    start = tuple(jnp.zeros(operand.shape, jnp.float32) for operand in (q_CXUGH, k_CXSH, v_CXSH))
    pairs = block_pairs(q_CXUGH.shape[0], block=u, window=window)
    (dq_CXUGH, dk_CXSH, dv_CXSH), _ = jax.lax.scan(visit, start, pairs)
    dq_BTNH = _joined(dq_CXUGH, q_BTNH.shape).astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = (
        _joined(grad[:, :, :, None], like.shape).astype(like.dtype)
        for grad, like in ((dk_CXSH, k_BSKH), (dv_CXSH, v_BSKH))
    )
    return dq_BTNH, dk_BSKH, dv_BSKH, None


_attention.defvjp(_forward, _backward)


def _cut(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
    """Returns blocks [C, X, ...] of all operands; X = B * K, and T is padded by masked positions."""
    kv_heads = k_BSKH.shape[2]
    k_CXSH, v_CXSH = (_cut_queries(x, kv_heads)[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    ids_CXS = None
    if segment_ids_BT is not None:
        ids_BTK1 = jnp.broadcast_to(segment_ids_BT[:, :, None, None], (*segment_ids_BT.shape, kv_heads, 1))
        ids_CXS = _cut_queries(ids_BTK1, kv_heads)[:, :, :, 0, 0]
    return _cut_queries(q_BTNH, kv_heads), k_CXSH, v_CXSH, ids_CXS


def _cut_queries(x_BTNH, kv_heads):
    b, t, n, h = x_BTNH.shape
    block = min(BLOCK, t)
    num_blocks = -(-t // block)
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, num_blocks * block - t), (0, 0), (0, 0)))
    x_BCUKGH = x_BTNH.reshape(b, num_blocks, block, kv_heads, n // kv_heads, h)
    return x_BCUKGH.transpose(1, 0, 3, 2, 4, 5).reshape(num_blocks, b * kv_heads, block, n // kv_heads, h)


def _joined(x_CXUGH, shape):
    b, t, n, h = shape
    c, _, u, g, _ = x_CXUGH.shape
    x_BCUKGH = x_CXUGH.reshape(c, b, n // g, u, g, h).transpose(1, 0, 3, 2, 4, 5)
    return x_BCUKGH.reshape(b, c * u, n, h)[:, :t]


def _mask(i, j, block, ids_CXS, window):
    """Returns bool [1 or X, U, 1, S]: the keys of block j that the queries of block i attend to."""
    queries_U1 = i * block + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    keys_1S = j * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    mask_XUS = (queries_U1 >= keys_1S)[None]
    if window is not None:
        mask_XUS &= (queries_U1 - keys_1S < window)[None]
    if ids_CXS is not None:
        mask_XUS &= _at(ids_CXS, i)[:, :, None] == _at(ids_CXS, j)[:, None, :]
    return mask_XUS[:, :, None, :]


def _scores(q_XUGH, k_XSH, mask_XU1S):
    scores_XUGS = _dot("XUGH,XSH->XUGS", q_XUGH, k_XSH) / math.sqrt(q_XUGH.shape[-1])
    return jnp.where(mask_XU1S, scores_XUGS, _MASKED)


def _values(weights_XUGS, v_XSH):
    return _dot("XUGS,XSH->XUGH", weights_XUGS, v_XSH)


def _at(blocks, index):
    return jax.lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _updated(blocks, index, block):
    return jax.lax.dynamic_update_index_in_dim(blocks, block, index, 0)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
