"""A batch of packed tokens, its shapes and dtypes, and partial means over it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed tokens with their next-token targets. Every field has shape [B, T].

    Attributes:
      tokens: int32 token ids fed to the model.
      targets: int32 ids of the next tokens. `targets[b, t]` is the token after `tokens[b, : t + 1]`.
      positions: int32 position of each token for rotary embeddings.
      segment_ids: int32 ids of segments. A token attends only to earlier tokens of its segment. None if every row is
        one segment (`concat` packing), so attention skips the comparison.
      weights: float32 weight of each target in the loss, 0 without a target.
    """

    tokens: Any
    targets: Any
    positions: Any
    segment_ids: Any
    weights: Any


class SumAndCount(NamedTuple):
    """A mean before the division. Sums and counts of several parts of a batch can be added, unlike means.

    Attributes:
      total: weighted sum.
      count: number of terms, or the sum of their weights.
    """

    total: Any
    count: Any


def concat_batch(tokens_BT: np.ndarray) -> Batch:
    """Returns the batch of rows [B, T] cut from one stream of tokens, with T - 1 predictions per row and one segment.

    As in HLAT, the last token of a row predicts nothing, so its weight and its target are 0.
    Source: arXiv 2404.10630, published scripts, `logits[:-1]` against `labels[1:]`.
    """
    tokens_BT = np.ascontiguousarray(tokens_BT, dtype=np.int32)
    num_rows, seq_len = tokens_BT.shape
    targets_BT = np.zeros_like(tokens_BT)
    targets_BT[:, :-1] = tokens_BT[:, 1:]
    weights_BT = np.ones((num_rows, seq_len), np.float32)
    weights_BT[:, -1] = 0.0
    positions_BT = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (num_rows, seq_len))
    return Batch(tokens_BT, targets_BT, positions_BT, None, weights_BT)


def segmented_batch(tokens_BT: np.ndarray, segment_ids_BT: np.ndarray) -> Batch:
    """Returns the batch of rows [B, T] of segments that do not attend to each other.

    Ids of segments start at 1, and 0 is padding. Positions restart at 0 in each segment. The last token of a segment
    predicts nothing, so its weight and target are 0. Padding has weight and target 0 too.
    """
    tokens_BT = np.ascontiguousarray(tokens_BT, dtype=np.int32)
    segment_ids_BT = np.ascontiguousarray(segment_ids_BT, dtype=np.int32)
    same_BT = (segment_ids_BT[:, 1:] == segment_ids_BT[:, :-1]) & (segment_ids_BT[:, 1:] > 0)
    targets_BT, weights_BT = np.zeros_like(tokens_BT), np.zeros(tokens_BT.shape, np.float32)
    targets_BT[:, :-1] = np.where(same_BT, tokens_BT[:, 1:], 0)
    weights_BT[:, :-1] = same_BT
    index_BT = np.broadcast_to(np.arange(tokens_BT.shape[1], dtype=np.int32), tokens_BT.shape)
    starts_BT = index_BT.copy()
    starts_BT[:, 1:][same_BT] = 0
    positions_BT = index_BT - np.maximum.accumulate(starts_BT, axis=1)
    return Batch(tokens_BT, targets_BT, positions_BT, segment_ids_BT, weights_BT)


def take_rows(batch: Batch, rows: Any) -> Batch:
    """Returns the batch of the rows at these indices."""
    return jax.tree.map(lambda field: field[rows], batch)


def abstract_batch(num_rows: int, seq_len: int, *, with_segments: bool = False) -> Batch:
    """Returns the shapes and dtypes of a batch of `num_rows` sequences of `seq_len` tokens."""
    ids = jax.ShapeDtypeStruct((num_rows, seq_len), np.int32)
    weights = jax.ShapeDtypeStruct((num_rows, seq_len), np.float32)
    return Batch(ids, ids, ids, ids if with_segments else None, weights)
