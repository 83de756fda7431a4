"""Attention of a device that has a part of the sequence of each row, to the keys and values of all parts.

A row is cut into 2C chunks, and device i of C has chunks i and 2C - 1 - i (`rows.zigzag`): under a causal mask all have
equally many pairs of blocks to visit, of each device's keys. Keys stay in the order of the devices; tables have where
each block stands in the row. Documents and windows are masks of these blocks. Only its own keys are kept for the
backward pass.

- `all_gather`: keys and values of all devices are gathered, again in the backward pass. AWS documents gathers between
  all cores. Source: Llama 3, arXiv 2407.21783, 3.3.2.
- `ring`: those of one device at a time pass by, in C turns; in the backward pass with the sums of their gradients. A
  device holds two parts of the keys, not C; AWS documents permutes between linked cores only. Source: Liu et al.,
  arXiv 2310.01889.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import chunked_attention
from hlat_jax.parallel.collectives import all_gather, axis_index
from hlat_jax.parallel.rows import zigzag
from hlat_jax.parallel.sharding import CONTEXT, Layout


class Part(NamedTuple):
    """Where the queries of a device stand in a row, and the keys, in blocks of positions.

    Attributes:
      pairs: int32 [pairs, 2] of each turn: (query block, key block) to visit, each query's own block first.
      query_starts: int32 [T / block], position in the row of the first query of each block.
      key_starts: int32 [turns, S / block], of the keys of each turn.
      key_ids_BS: segment ids of the keys of the first turn, or None.
    """

    pairs: Sequence[jax.Array]
    query_starts: jax.Array
    key_starts: jax.Array
    key_ids_BS: jax.Array | None


def attend_over(layout: Layout, segment_ids_BT: jax.Array | None) -> Callable[..., tuple[jax.Array, None]]:
    """Returns the `model.Attend` of this device's queries and everyone's keys, for use inside `shard_map`.

    `segment_ids_BT` are those of this device.
    """
    axes, degree = layout.wide(CONTEXT), layout.size(CONTEXT)
    is_ring = layout.context_exchange == "ring"

    def over_parts(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> jax.Array:
        k_BSKH, v_BSKH, ids_BS = k_BTKH, v_BTKH, segment_ids_BT
        if not is_ring:
            k_BSKH, v_BSKH = all_gather(k_BTKH, axes, 1), all_gather(v_BTKH, axes, 1)
            ids_BS = None if ids_BS is None else jax.lax.all_gather(ids_BS, axes, axis=1, tiled=True)
        bounds = q_BTNH.shape[1] * degree, degree, window if isinstance(window, int) else None
        pairs, query_starts, key_starts = jax.tree.map(
            lambda table: jnp.asarray(table)[axis_index(axes)], tables(*bounds, is_ring=is_ring)
        )
        return chunked_attention.attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            segment_ids_BT=segment_ids_BT,
            window=window,
            part=Part(pairs, query_starts, key_starts, ids_BS),
            visit_all=in_turns,
        )

    # of what the kernel keeps, `attention_out` and `attention_lse` are this device's; the gathered keys are not kept
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> tuple[jax.Array, None]:
        if is_ring:
            return over_parts(q_BTNH, k_BTKH, v_BTKH, window=window), None
        if isinstance(window, jax.Array):
            run = jax.checkpoint(lambda q, k, v, window: over_parts(q, k, v, window=window), policy=policy)
            return run(q_BTNH, k_BTKH, v_BTKH, window), None
        return jax.checkpoint(functools.partial(over_parts, window=window), policy=policy)(q_BTNH, k_BTKH, v_BTKH), None

    return attend


def in_turns(visit: Callable[..., Any], terms: dict[str, Any], sums: Any) -> tuple[Any, Any]:
    """Returns (sums of queries, sums of keys) after `visit` of all pairs of blocks, for `chunked_attention`.

    Between turns keys, their segment ids and their sums go to the next device, and the sums home after the last.
    """
    (of_queries, of_keys), part, keys = sums, terms["part"], terms["keys"]
    key_ids = None if part.key_ids_BS is None else part.key_ids_BS[:, None, :, None]
    degree = len(part.pairs)
    to_next = [(index, (index + 1) % degree) for index in range(degree)]
    passed_on = functools.partial(jax.tree.map, lambda x: jax.lax.ppermute(x, CONTEXT, to_next))
    for turn, pairs in enumerate(part.pairs):
        if turn:
            keys, key_ids, of_keys = passed_on((keys, key_ids, of_keys))
        here = terms | {"keys": keys, "key_ids": key_ids, "key_starts": part.key_starts[turn]}
        (of_queries, of_keys), _ = jax.lax.scan(functools.partial(visit, here), (of_queries, of_keys), pairs)
    return of_queries, passed_on(of_keys) if degree > 1 else of_keys


@functools.lru_cache
def tables(
    seq_len: int, degree: int, window: int | None, *, is_ring: bool
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Returns what `Part` has, for each of C = `degree` devices.

    (pairs of each turn int32 [C, pairs, 2], query_starts int32 [C, T / block], key_starts int32 [C, turns, S / block]).
    """
    chunk = seq_len // (2 * degree)
    block = max(size for size in range(1, min(chunk, chunked_attention.BLOCK) + 1) if chunk % size == 0)
    query_starts = zigzag(seq_len, degree)[::block].reshape(degree, -1).astype(np.int32)
    if is_ring:  # each device begins with its own
        sources = (np.arange(degree)[:, None] - np.arange(degree)) % degree
        key_starts = query_starts[sources]
    else:
        key_starts = np.broadcast_to(query_starts.reshape(-1), (degree, 1, seq_len // block))
    unmasked = set(map(tuple, block * chunked_attention.block_pairs(seq_len // block, block=block, window=window)))

    def pairs_of(queries: np.ndarray, keys: np.ndarray) -> list[tuple[int, int]]:
        last_first = np.argsort(-keys)
        return [(i, j) for i, query in enumerate(queries) for j in last_first if (query, keys[j]) in unmasked]

    turns = []
    for turn in range(key_starts.shape[1]):
        of_devices = [pairs_of(*starts) for starts in zip(query_starts, key_starts[:, turn], strict=True)]
        most = max(map(len, of_devices))
        # with a window some devices have fewer; of the pairs that they visit instead, a causal mask hides every score
        hidden = [(0, np.argmax(keys)) for keys in key_starts[:, turn]]
        of_devices = [own + [none] * (most - len(own)) for own, none in zip(of_devices, hidden, strict=True)]
        turns.append(np.asarray(of_devices, np.int32).reshape(degree, most, 2))
    return turns, query_starts, key_starts
