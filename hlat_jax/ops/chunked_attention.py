"""Attention in memory linear in T: an online softmax over blocks of keys, with a backward pass of its own.

Queries and keys are cut into blocks, and one static loop visits every pair of blocks that is not fully masked: half of
them under a causal mask, a band with a window. The forward pass keeps the output and, for each query, the largest score
and the sum of exponentials, from which the backward pass recomputes the probabilities of a pair. Masks and what dropout
keeps are read block by block.

Source: Rabe and Staats, arXiv 2112.05682; the backward pass as Dao et al., arXiv 2205.14135, algorithm 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hlat_jax.ops.own_backward import with_backward

MASKED = -1e30  # finite, so that a masked score minus the row's maximum is never inf - inf
BLOCK = 256  # of queries, and of keys: one pair's scores are B x N x 256 x 256
_LOWEST = float(np.finfo(np.float32).min)  # of the maximum so far: finite, and not above any finite score


@dataclasses.dataclass(frozen=True)
class Variant:
    """What attention of other models does to its scores and probabilities; the default is `ops.attention`.

    Arrays are [B or 1, N or 1, T or 1, S or 1].

    Attributes:
      causal: whether a query attends only to its own and earlier positions.
      scale: factor of the scores, 1/sqrt(H) if it is None.
      softcap: c: scores become c * tanh(scores / c), before masks. Source: arXiv 2408.00118, section 2.
      masks: bool, True where a query may attend to a key, in all of them. A query that attends to no key gets the mean
        of all values, as by `where(mask, scores, -1e9)`.
      keep: bool: the probabilities that dropout keeps, after the softmax.
      keep_factor: factor of the kept probabilities: 1 / (1 - rate).
    """

    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    masks: Sequence[jax.Array] = ()
    keep: jax.Array | None = None
    keep_factor: float = 1.0


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_ids_BT: jax.Array | None,
    window: int | jax.Array | None,
    variant: Variant,
    part: Any = None,
) -> jax.Array:
    """Returns [B, T, N, H]: `ops.attention`, also of models other than ours, in which S may differ from T.

    With a `context_attention.Part`, of the queries of a row that a device has.

    Raises:
      ValueError: dropout in causal attention with a mask that may hide every key from a query.
    """
    if variant.masks and variant.keep is not None and variant.causal:
        raise ValueError("there is no dropout with a mask that may hide every key from a query.")
    t, h = q_BTNH.shape[1], q_BTNH.shape[3]
    s, kv_heads = k_BSKH.shape[1:3]
    block = BLOCK if part is None else s // len(part.key_starts)
    scale = 1 / math.sqrt(h) if variant.scale is None else variant.scale
    static = _Static(
        **vars(variant) | {"masks": (), "keep": None, "scale": scale},
        window=window if isinstance(window, int) else None,
        num_keys=s,
        kv_heads=kv_heads,
        blocks=(min(block, t), min(block, s)),
    )
    terms = {
        "part": part,
        "masks": tuple(_pad(mask, static.blocks) for mask in variant.masks),
        "keep": None if variant.keep is None else _pad(variant.keep, static.blocks),
        "ids": None if segment_ids_BT is None else _pad(segment_ids_BT[:, None, :, None], static.blocks),
        "window": None if isinstance(window, int) else window,
    }
    return _attention(static, q_BTNH, k_BSKH, v_BSKH, terms)


def block_pairs(num_blocks: int, *, block: int, window: int | None) -> np.ndarray:
    """Returns int32 [pairs, 2]: (query block, key block) that are not fully masked, each query's own block first."""
    num_previous = num_blocks if window is None else -(-(window - 1) // block)  # key blocks before the query's own
    pairs = [(i, j) for i in range(num_blocks) for j in range(i, max(-1, i - num_previous - 1), -1)]
    return np.asarray(pairs, np.int32)


@dataclasses.dataclass(frozen=True)
class _Static(Variant):
    """A variant without its arrays, and with its scale."""

    window: int | None = None
    num_keys: int = 0  # S, without padding
    kv_heads: int = 0
    blocks: tuple[int, int] = (0, 0)  # positions in a block of queries, of keys

    def pairs(self, part: Any, num_blocks: int) -> Any:
        """Returns int32 [pairs, 2]: (query block, key block); of so many query blocks."""
        if part is not None:
            return part.pairs
        if self.causal:
            return block_pairs(num_blocks, block=self.blocks[0], window=self.window)
        num_key_blocks = -(-self.num_keys // self.blocks[1])
        return np.asarray([(i, j) for i in range(num_blocks) for j in range(num_key_blocks)], np.int32)


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
        scores_XUGS, _, _ = _scores(static, _at(q_CXUGH, i), _at(k_CXSH, j), terms, pair)
        new_top_XUG = jnp.maximum(top_XUG, scores_XUGS.max(axis=-1))
        weights_XUGS = jnp.exp(scores_XUGS - new_top_XUG[..., None])
        shrink_XUG = jnp.exp(top_XUG - new_top_XUG)
        kept_XUGS = _kept(static, weights_XUGS, terms, pair).astype(v_CXSH.dtype)
        out_XUGH = out_XUGH * shrink_XUG[..., None] + _dot("XUGS,XSH->XUGH", kept_XUGS, _at(v_CXSH, j))
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
    if _skips_masked_keys(static, terms):
        is_empty_CXUG = top_CXUG == MASKED
        mean_XH = v_BSKH.astype(jnp.float32).mean(axis=1).reshape(x, h)
        out_CXUGH = jnp.where(is_empty_CXUG[..., None], mean_XH[:, None, None], out_CXUGH)
        total_CXUG = jnp.where(is_empty_CXUG, jnp.inf, total_CXUG)  # for the backward pass: no weight on scores
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
        scores_XUGS, slope_XUGS, mask_XUGS = _scores(static, q_XUGH, k_XSH, terms, pair)
        probs_XUGS = jnp.exp(scores_XUGS - _at(top_CXUG, i)[..., None]) / _at(total_CXUG, i)[..., None]
        dprobs_XUGS = _kept(static, _dot("XUGH,XSH->XUGS", dout_XUGH, v_XSH), terms, pair)
        dscores_XUGS = probs_XUGS * (dprobs_XUGS - _at(inner_CXUG, i)[..., None])
        if terms["masks"]:  # a query that attends to no key has probabilities of masked ones
            dscores_XUGS = jnp.where(mask_XUGS, dscores_XUGS, 0)
        dscores_XUGS = (dscores_XUGS * static.scale * slope_XUGS).astype(q_BTNH.dtype)
        kept_XUGS = _kept(static, probs_XUGS, terms, pair).astype(v_BSKH.dtype)
        dq_XUGH = _dot("XUGS,XSH->XUGH", dscores_XUGS, k_XSH)
        dk_XSH = _dot("XUGS,XUGH->XSH", dscores_XUGS, q_XUGH)
        dv_XSH = _dot("XUGS,XUGH->XSH", kept_XUGS, dout_XUGH)
        dq_CXUGH = _updated(dq_CXUGH, i, _at(dq_CXUGH, i) + dq_XUGH)
        dk_CXSH = _updated(dk_CXSH, j, _at(dk_CXSH, j) + dk_XSH)
        dv_CXSH = _updated(dv_CXSH, j, _at(dv_CXSH, j) + dv_XSH)
        return (dq_CXUGH, dk_CXSH, dv_CXSH), None

    start = tuple(jnp.zeros(operand.shape, jnp.float32) for operand in (q_CXUGH, k_CXSH, v_CXSH))
    (dq_CXUGH, dk_CXSH, dv_CXSH), _ = jax.lax.scan(visit, start, static.pairs(terms["part"], len(q_CXUGH)))
    if _skips_masked_keys(static, terms):
        dout_XUGH = jnp.where(jnp.isinf(total_CXUG)[..., None], dout_CXUGH.astype(jnp.float32), 0)
        dv_CXSH += (dout_XUGH.sum(axis=(0, 2, 3)) / static.num_keys)[:, None]
    dq_BTNH = _join(dq_CXUGH, q_BTNH.shape).astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = (
        _join(grad[:, :, :, None], like.shape).astype(like.dtype)
        for grad, like in ((dk_CXSH, k_BSKH), (dv_CXSH, v_BSKH))
    )
    return dq_BTNH, dk_BSKH, dv_BSKH


def _skips_masked_keys(static: _Static, terms: dict[str, Any]) -> bool:
    """Returns whether a query that attends to no key may skip keys, over which its output is the mean."""
    return static.causal and bool(terms["masks"])


def _cut_operands(static, q_BTNH, k_BSKH, v_BSKH):
    """Returns blocks [C, X, ...]; X = B * K, and T and S are padded to whole blocks."""
    k_CXSH, v_CXSH = (_cut(x, static, of_keys=True)[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    return _cut(q_BTNH, static), k_CXSH, v_CXSH


def _cut(x_BTNH, static, *, of_keys=False):
    (b, t, n, h), block, kv_heads = x_BTNH.shape, static.blocks[of_keys], static.kv_heads
    num_blocks = -(-t // block)
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, num_blocks * block - t), (0, 0), (0, 0)))
    x_BCUKGH = x_BTNH.reshape(b, num_blocks, block, kv_heads, n // kv_heads, h)
    return x_BCUKGH.transpose(1, 0, 3, 2, 4, 5).reshape(num_blocks, b * kv_heads, block, n // kv_heads, h)


def _join(x_CXUGH, shape):
    b, t, n, h = shape
    c, _, u, g, _ = x_CXUGH.shape
    x_BCUKGH = x_CXUGH.reshape(c, b, n // g, u, g, h).transpose(1, 0, 3, 2, 4, 5)
    return x_BCUKGH.reshape(b, c * u, n, h)[:, :t]


def _pad(x_BNTS, blocks):
    """Returns a term with T and S padded to whole blocks, where it has them."""
    pads = [(0, 0), (0, 0)]
    pads += [(0, -size % block if size > 1 else 0) for size, block in zip(x_BNTS.shape[2:], blocks, strict=True)]
    return jnp.pad(x_BNTS, pads)


def _part(x_BNTS, static, pair):
    """Returns a term in one pair of blocks: [B or 1, K or 1, U or 1, G or 1, S or 1]."""
    for axis, block, index in zip((2, 3), static.blocks, pair, strict=True):
        if x_BNTS.shape[axis] > 1:
            x_BNTS = jax.lax.dynamic_slice_in_dim(x_BNTS, index * block, block, axis)
    b, n, u, s = x_BNTS.shape
    x_BKGUS = x_BNTS.reshape(b, static.kv_heads if n > 1 else 1, -1, u, s)
    return x_BKGUS.swapaxes(2, 3)


def _scores(static, q_XUGH, k_XSH, terms, pair):
    """Returns (scores, the derivative of the softcap, bool mask or None) in one pair of blocks, as [X, U, G, S]."""
    i, j = pair
    (_, u, g, _), s = q_XUGH.shape, k_XSH.shape[1]
    scores_XUGS = _dot("XUGH,XSH->XUGS", q_XUGH, k_XSH) * static.scale
    slope_XUGS = 1.0
    if static.softcap is not None:
        tanh_XUGS = jnp.tanh(scores_XUGS / static.softcap)
        scores_XUGS, slope_XUGS = static.softcap * tanh_XUGS, 1 - jnp.square(tanh_XUGS)
    scores = scores_XUGS.reshape(-1, static.kv_heads, u, g, s)
    part = terms["part"]
    queries = (i * u if part is None else part.query_starts[i]) + jax.lax.broadcasted_iota(jnp.int32, (u, 1, 1), 0)
    keys = (j * s if part is None else part.key_starts[j]) + jax.lax.broadcasted_iota(jnp.int32, (1, 1, s), 2)
    masks = [_part(mask, static, pair) for mask in terms["masks"]]
    if static.causal:
        masks.append(queries >= keys)
        window = terms["window"] if static.window is None else static.window
        if window is not None:
            masks.append(queries - keys < window)
    if terms["ids"] is not None:
        queries_ids = jax.lax.dynamic_slice_in_dim(terms["ids"], i * u, u, 2)[:, :, :, None]
        key_ids = terms["ids"] if part is None else part.key_ids_BS[:, None, :, None]
        keys_ids = jax.lax.dynamic_slice_in_dim(key_ids, j * s, s, 2)[:, :, None, None, :, 0]
        masks.append(queries_ids == keys_ids)
    mask = functools.reduce(jnp.logical_and, masks) if masks else None
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
        mask = jnp.broadcast_to(mask, scores.shape).reshape(scores_XUGS.shape)
    if static.num_keys % s and not static.causal:  # a causal mask hides the padding
        scores = jnp.where(keys < static.num_keys, scores, -jnp.inf)
    return scores.reshape(scores_XUGS.shape), slope_XUGS, mask


def _kept(static, x_XUGS, terms, pair):
    """Returns the values that dropout keeps, scaled, and 0 for the others."""
    if terms["keep"] is None:
        return x_XUGS
    _, u, g, s = x_XUGS.shape
    values = x_XUGS.reshape(-1, static.kv_heads, u, g, s)
    return jnp.where(_part(terms["keep"], static, pair), values * static.keep_factor, 0).reshape(x_XUGS.shape)


def _at(blocks, index):
    return jax.lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _updated(blocks, index, block):
    return jax.lax.dynamic_update_index_in_dim(blocks, block, index, 0)


_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
