"""Attention of a device that has a part of the sequence of each row: keys and values of all parts, gathered.

A row is cut into 2C chunks, and device i of C has chunks i and 2C - 1 - i (`rows.zigzag`): under a causal mask all have
equally many pairs of blocks to visit. Keys stay in the order in which they are gathered; a table has where each block
stands in the row. Documents and windows are masks of these blocks. Only its own keys are kept for the backward pass,
which gathers again.

A ring that passes keys from device to device would hold fewer at a time; AWS documents permutes between cores that are
linked only, and gathers between all.

Source: Llama 3, arXiv 2407.21783, 3.3.2, which gathers too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
      pairs: int32 [pairs, 2]: (query block, key block) to visit, each query's own block first.
      query_starts: int32 [T / block], position in the row of the first query of each block.
      key_starts: int32 [S / block].
      key_ids_BS: segment ids of the keys, or None.
    """

    pairs: jax.Array
    query_starts: jax.Array
    key_starts: jax.Array
    key_ids_BS: jax.Array | None


def attend_over(layout: Layout, segment_ids_BT: jax.Array | None) -> Callable[..., tuple[jax.Array, None]]:
    """Returns the `model.Attend` of this device's queries and everyone's keys, for use inside `shard_map`.

    `segment_ids_BT` are those of this device.
    """
    axes, degree = layout.wide(CONTEXT), layout.size(CONTEXT)

    def gathered(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> jax.Array:
        k_BSKH, v_BSKH = all_gather(k_BTKH, axes, 1), all_gather(v_BTKH, axes, 1)
        ids_BS = None if segment_ids_BT is None else jax.lax.all_gather(segment_ids_BT, axes, axis=1, tiled=True)
        bounds = q_BTNH.shape[1] * degree, degree, window if isinstance(window, int) else None
        pairs, query_starts, key_starts = block_tables(*bounds)
        index = axis_index(axes)
        return chunked_attention.attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            segment_ids_BT=segment_ids_BT,
            window=window,
            variant=chunked_attention.Variant(),
            part=Part(jnp.asarray(pairs)[index], jnp.asarray(query_starts)[index], jnp.asarray(key_starts), ids_BS),
        )

    # of what the kernel keeps, `attention_out` and `attention_lse` are this device's; the gathered keys are not kept
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> tuple[jax.Array, None]:
        if isinstance(window, jax.Array):
            run = jax.checkpoint(lambda q, k, v, window: gathered(q, k, v, window=window), policy=policy)
            return run(q_BTNH, k_BTKH, v_BTKH, window), None
        return jax.checkpoint(functools.partial(gathered, window=window), policy=policy)(q_BTNH, k_BTKH, v_BTKH), None

    return attend


@functools.lru_cache
def block_tables(seq_len: int, degree: int, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what `Part` has, for each of C = `degree` devices.

    (pairs int32 [C, pairs, 2], query_starts int32 [C, T / block], key_starts int32 [S / block]).
    """
    chunk = seq_len // (2 * degree)
    block = max(size for size in range(1, min(chunk, chunked_attention.BLOCK) + 1) if chunk % size == 0)
    key_starts = zigzag(seq_len, degree)[::block].astype(np.int32)
    query_starts = key_starts.reshape(degree, -1)
    place = {start // block: number for number, start in enumerate(key_starts)}  # of each block of the row, in the keys
    visited: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    for query, key in chunked_attention.block_pairs(seq_len // block, block=block, window=window):
        device, number = divmod(place[query], query_starts.shape[1])
        visited[device].append((number, place[key]))
    most, last = max(map(len, visited)), place[seq_len // block - 1]
    # with a window some devices have fewer; of the pairs that they visit instead, a causal mask hides every score
    pairs = [own + [(0, last)] * (most - len(own)) for own in visited]
    return np.asarray(pairs, np.int32), query_starts, key_starts
