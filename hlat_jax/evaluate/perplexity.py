"""Documents cut into windows that slide by half their length, so that each token is predicted once.

A document begins with BOS or EOS, which is not predicted. The first window predicts all its tokens; each later one
starts half a window before the first token that is not predicted yet, so that every prediction, except those near the
beginning of a document, has at least half a window of context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
    """A text as int32 token ids, the first of which is BOS or EOS, and its length in bytes of UTF-8."""

    ids: np.ndarray
    num_bytes: int


def windows(ids: np.ndarray, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (context, continuation), which `scoring.Scorer` takes: together they predict each of `ids[1:]` once.

    A model reads at most `window` tokens of a pair, all but its last.
    """
    start = done = 0
    while done < len(ids) - 1:
        stop = min(start + window, len(ids) - 1)
        yield ids[start : done + 1], ids[done + 1 : stop + 1]
        start, done = stop - window // 2, stop
