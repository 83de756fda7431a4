"""Sums over whole documents, each token predicted once, by a window that slides by half of itself.

    totals = perplexity.total(documents, predict=predict, num_rows=8, window=1024)

Owns which tokens are predicted from which. A document begins with a token that is not its own and is not predicted.
The first window predicts all that it holds; every other one goes back by half a window and predicts what is new, so
that no prediction but those near the beginning of a document sees less than half a window before it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hlat_jax.batch import Batch


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
    """

    num_documents: int
    num_bytes: int
    num_tokens: int
    num_windows: int
    nats: float


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
    documents: Iterable[Document], *, predict: Callable[[Batch], tuple[Any, Any]], num_rows: int, window: int
) -> Totals:
    """Returns the sums over documents.

    Args:
      documents: taken one after another; none is held longer than its windows.
      predict: batch -> (sum of the losses in nats, counted tokens), as `step.make_eval_step`.
      num_rows: of the batches.
      window: tokens in a row, at least 2.

    Raises:
      ValueError: there is nothing to predict.
    """
    sizes: list[tuple[int, int]] = []

    def of_all() -> Iterator[Window]:
        for document in documents:
            sizes.append((len(document.ids) - 1, document.num_bytes))
            yield from windows(document.ids, window)

    losses, num_windows, pieces = [], 0, of_all()
    while rows := list(itertools.islice(pieces, num_rows)):
        losses.append(float(predict(_batch(rows, num_rows, window))[0]))
        num_windows += len(rows)
    num_tokens = sum(tokens for tokens, _ in sizes)
    if num_tokens == 0:
        raise ValueError(f"{len(sizes)} documents hold no token to predict; give text.")
    return Totals(len(sizes), sum(num_bytes for _, num_bytes in sizes), num_tokens, num_windows, math.fsum(losses))


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
