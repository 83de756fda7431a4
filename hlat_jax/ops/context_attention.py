"""Attention of a device that has a part of the sequence of each row, to the keys and values of all parts.

A row is cut into 2C chunks, and device i of C has chunks i and 2C - 1 - i (`rows.zigzag`). Under a causal mask all
devices then visit the same number of pairs of blocks. Keys and values of all devices are gathered, again in the
backward pass. They stay in the order of the devices, and tables have the place of each block in the row. Documents and
windows are masks of these blocks. Source: Llama 3, arXiv 2407.21783, 3.3.2.
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
    """The places in a row of the queries of a device, and of the keys, in blocks of positions.

    Attributes:
      pairs: int32 [pairs, 2] of (query block, key block) to visit, each query's own block first.
      query_starts: int32 [T / block], position in the row of the first query of each block.
      key_starts: int32 [S / block], position in the row of the first key of each block.
      key_ids_BS: segment ids of the keys, or None.
    """

    pairs: jax.Array
    query_starts: jax.Array
    key_starts: jax.Array
    key_ids_BS: jax.Array | None


def attend_over(layout: Layout, segment_ids_BT: jax.Array | None) -> Callable[..., tuple[jax.Array, None]]:
    """Returns the `model.Attend` of this device's queries to the keys of all devices, for use inside `shard_map`.

    `segment_ids_BT` are the segment ids of this device's tokens.
    """
    axes, degree = layout.wide(CONTEXT), layout.size(CONTEXT)

    def over_parts(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> jax.Array:
        ids_BS = segment_ids_BT
        if ids_BS is not None:
            ids_BS = jax.lax.all_gather(ids_BS, axes, axis=1, tiled=True)
        pairs_CP2, query_starts_CT, key_starts = tables(
            q_BTNH.shape[1] * degree, degree, window if isinstance(window, int) else None
        )
        pairs, query_starts = (jnp.asarray(table)[axis_index(axes)] for table in (pairs_CP2, query_starts_CT))
        return chunked_attention.attention(
            q_BTNH,
            all_gather(k_BTKH, axes, 1),
            all_gather(v_BTKH, axes, 1),
            segment_ids_BT=segment_ids_BT,
            window=window,
            part=Part(pairs, query_starts, jnp.asarray(key_starts), ids_BS),
        )

    # of what the kernel keeps, `attention_out` and `attention_lse` are this device's; the gathered keys are not kept
    policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def attend(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any) -> tuple[jax.Array, None]:
        if isinstance(window, jax.Array):
            run = jax.checkpoint(lambda q, k, v, window: over_parts(q, k, v, window=window), policy=policy)
            return run(q_BTNH, k_BTKH, v_BTKH, window), None
        return jax.checkpoint(functools.partial(over_parts, window=window), policy=policy)(q_BTNH, k_BTKH, v_BTKH), None

    return attend


@functools.lru_cache
def tables(seq_len: int, degree: int, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tables of `Part` for each of C = `degree` devices, which all have the same keys.

    They are (pairs int32 [C, P, 2], query_starts int32 [C, T / block], key_starts int32 [S / block]).
    """
    chunk = seq_len // (2 * degree)
    block = max(size for size in range(1, min(chunk, chunked_attention.BLOCK) + 1) if chunk % size == 0)
    starts = zigzag(seq_len, degree)[::block].astype(np.int32)
    query_starts, last_first = starts.reshape(degree, -1), np.argsort(-starts)
    unmasked = set(map(tuple, block * chunked_attention.block_pairs(seq_len // block, block=block, window=window)))
    of_devices = [
        [(i, j) for i, query in enumerate(queries) for j in last_first if (query, starts[j]) in unmasked]
        for queries in query_starts
    ]
    most = max(map(len, of_devices))
    # with a window some devices have fewer; of the pair that they visit instead, a causal mask hides every score
    hidden = (0, last_first[0])
    pairs = [own + [hidden] * (most - len(own)) for own in of_devices]
    return np.asarray(pairs, np.int32).reshape(degree, most, 2), query_starts, starts
