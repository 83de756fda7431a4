"""The loss over whole documents, each token predicted once, with a window that slides by half its length.

    totals = perplexity.total(documents, predict=predict, num_rows=8, window=1024)

A document begins with BOS or EOS, which is not predicted. The first window predicts all its tokens; each later one
starts half a window before the first token that is not predicted yet, so that every prediction, except those near the
beginning of a document, has at least half a window of context.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.config import counted
from hlat_jax.generate.generator import padded_length, padded_rows
from hlat_jax.store.progress import Status


@dataclasses.dataclass(frozen=True)
class Document:
    """A text as int32 token ids, the first of which is BOS or EOS, and its length in bytes of UTF-8."""

    ids: np.ndarray
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over documents.

    Attributes:
      num_documents: number of documents.
      num_bytes: of UTF-8 text.
      num_tokens: predicted tokens.
      num_windows: windows that were run.
      nats: the loss summed over all predictions.
      padded_lengths: lengths to which windows were padded, ascending.
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_windows: int
    nats: float
    padded_lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of a document: its tokens, their targets, and the first position whose target counts."""

    tokens: np.ndarray
    targets: np.ndarray
    first: int


def windows(ids: np.ndarray, window: int) -> Iterator[Window]:
    """Yields the windows of a document, of at most `window` tokens; together they predict each of `ids[1:]` once."""
    start = done = 0
    while done < len(ids) - 1:
        stop = min(start + window, len(ids) - 1)
        yield Window(ids[start:stop], ids[start + 1 : stop + 1], done - start)
        start, done = stop - window // 2, stop


def total(
    documents: Iterable[Document],
    *,
    predict: Callable[[Batch], tuple[Any, Any]],
    num_rows: int,
    window: int,
    row_degree: int = 1,
    num_documents: int = 1,
    status: Status | None = None,
) -> Totals:
    """Returns the sums over documents.

    Windows are padded to few lengths (powers of two, up to `window`) and batched with others of their length. All
    batches of a length have the same number of rows, so that `predict` compiles once for each length.

    Args:
      documents: read one at a time; each is held only until its windows are run.
      predict: batch -> (sum of the losses in nats, number of tokens), as `program.RunProgram.eval_step` returns it.
      num_rows: the most rows of a batch; a multiple of `row_degree`.
      window: the most tokens of a row, at least 2.
      row_degree: a divisor of the rows of every batch.
      num_documents: the number of documents, for `status`.
      status: the progress, which is kept up to date: the share of the tokens, as if documents were alike.

    Raises:
      ValueError: the documents have no token to predict.
    """
    status = status or Status()
    num_read = num_bytes = num_tokens = num_windows = num_predicted = 0
    losses: list[float] = []
    rows_of: dict[int, int] = {}  # padded length -> rows of its batches
    waiting = collections.defaultdict(list)

    def run(length: int) -> None:
        nonlocal num_predicted
        rows = waiting.pop(length)
        count = rows_of.setdefault(length, min(num_rows, padded_rows(len(rows), row_degree)))
        losses.append(float(predict(_batch(rows, count, length))[0]))
        num_predicted += sum(len(row.tokens) - row.first for row in rows)
        status.share = max(status.share, num_predicted / num_tokens * num_read / num_documents)
        status.text = f"{num_predicted:,} tokens"

    for document in documents:
        num_read += 1
        num_bytes += document.num_bytes
        num_tokens += len(document.ids) - 1
        for piece in windows(document.ids, window):
            num_windows += 1
            length = padded_length(len(piece.tokens), window)
            waiting[length].append(piece)
            if len(waiting[length]) == num_rows:
                run(length)
    for length in sorted(waiting, reverse=True):  # the longest first: what does not fit in memory fails at once
        run(length)
    if num_tokens == 0:
        raise ValueError(f"no token to predict in {counted(num_read, 'document')}; give text.")
    return Totals(num_read, num_bytes, num_tokens, num_windows, math.fsum(losses), tuple(sorted(rows_of)))


def _batch(rows: list[Window], num_rows: int, window: int) -> Batch:
    """Returns a batch of rows padded with zeros of weight 0, which causal attention hides from the tokens before."""
    tokens_BT, targets_BT = np.zeros((2, num_rows, window), np.int32)
    weights_BT = np.zeros((num_rows, window), np.float32)
    for number, row in enumerate(rows):
        length = len(row.tokens)
        tokens_BT[number, :length], targets_BT[number, :length] = row.tokens, row.targets
        weights_BT[number, row.first : length] = 1.0
    positions_BT = np.broadcast_to(np.arange(window, dtype=np.int32), (num_rows, window))
    return Batch(tokens_BT, targets_BT, positions_BT, None, weights_BT)
