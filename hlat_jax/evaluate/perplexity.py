"""Sums over whole documents, each token predicted once, by a window that slides by half of itself.

    totals = perplexity.total(documents, predict=predict, num_rows=8, window=1024)

A document begins with a token that is not its own and is not predicted. The first window predicts all that it holds;
every other one goes back by half a window and predicts what is new, so that no prediction but those near the beginning
of a document sees less than half a window before it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.generate.generator import padded_length, padded_rows


@dataclasses.dataclass(frozen=True)
class Document:
    """A text as int32 token ids, the beginning token before them, and its length in bytes of UTF-8."""

    ids: np.ndarray
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over documents.

    Attributes:
      num_documents: of them.
      num_bytes: of UTF-8 text.
      num_tokens: predicted ones, each once.
      num_windows: that were run.
      nats: of all predictions together.
      padded_lengths: of the rows that windows were run in, ascending.
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_windows: int
    nats: float
    padded_lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A piece of a document: its tokens, their targets, and the first place whose target is predicted here."""

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
) -> Totals:
    """Returns the sums over documents.

    Windows are padded to few lengths (powers of two, up to `window`), and run with others of their length. All batches
    of a length have the same number of rows, so that `predict` compiles once for each.

    Args:
      documents: taken one after another; none is held longer than its windows.
      predict: batch -> (sum of the losses in nats, counted tokens), as `step.RunProgram.eval_step`.
      num_rows: of a batch, at most; a multiple of `row_degree`.
      window: tokens in a row, at least 2.
      row_degree: divides the rows of every batch.

    Raises:
      ValueError: there is nothing to predict.
    """
    sizes: list[tuple[int, int]] = []

    def of_all() -> Iterator[Window]:
        for document in documents:
            sizes.append((len(document.ids) - 1, document.num_bytes))
            yield from windows(document.ids, window)

    losses, num_windows, rows_of = [], 0, {}  # rows_of: of the batches of a padded length
    waiting = collections.defaultdict(list)

    def run(length: int) -> None:
        rows = waiting.pop(length)
        count = rows_of.setdefault(length, min(num_rows, padded_rows(len(rows), row_degree)))
        losses.append(float(predict(_batch(rows, count, length))[0]))

    for piece in of_all():
        num_windows += 1
        length = padded_length(len(piece.tokens), window)
        waiting[length].append(piece)
        if len(waiting[length]) == num_rows:
            run(length)
    for length in sorted(waiting, reverse=True):  # what does not fit into memory fails first
        run(length)
    num_tokens = sum(tokens for tokens, _ in sizes)
    if num_tokens == 0:
        raise ValueError(f"{len(sizes)} documents hold no token to predict; give text.")
    num_bytes = sum(num_bytes for _, num_bytes in sizes)
    return Totals(len(sizes), num_bytes, num_tokens, num_windows, math.fsum(losses), tuple(sorted(rows_of)))


def _batch(rows: list[Window], num_rows: int, window: int) -> Batch:
    """Returns a batch whose rows end with zeros that count nothing and that nothing before them sees."""
    tokens_BT, targets_BT = np.zeros((2, num_rows, window), np.int32)
    weights_BT = np.zeros((num_rows, window), np.float32)
    for number, row in enumerate(rows):
        length = len(row.tokens)
        tokens_BT[number, :length], targets_BT[number, :length] = row.tokens, row.targets
        weights_BT[number, row.first : length] = 1.0
    positions_BT = np.broadcast_to(np.arange(window, dtype=np.int32), (num_rows, window))
    return Batch(tokens_BT, targets_BT, positions_BT, None, weights_BT)
