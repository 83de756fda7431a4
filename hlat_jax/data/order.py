"""Orders of documents. Shuffled orders come from Grain."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import grain
import numpy as np


class Order:
    """A permutation of the documents 0 .. `num_documents` - 1 for every epoch; thread-safe. `seed` is below 2**32."""

    def __init__(self, num_documents: int, *, seed: int):
        self._num_documents = num_documents
        self._numbers = grain.MapDataset.range(num_documents).shuffle(seed=seed)
        self._numbers[0]  # initializes Grain's statistics before threads read

    def number(self, epoch: int, entry: int) -> int:
        """Returns the number of the document at entry `entry` of an epoch."""
        # Grain counts epochs in the index: entry e * n + i of an order is entry i of epoch e
        return int(self._numbers[epoch * self._num_documents + entry])


def evenly_spread(total: int) -> Iterator[int]:
    """Yields each number below `total` once, in golden-ratio steps, so that any first n are about evenly spread."""
    step = round(total * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, total) > 1:
        step += 1
    return (index * step % total for index in range(total))


def evenly_spaced(total: int, count: int) -> Sequence[int]:
    """Returns `count` evenly spaced numbers below `total`, the outer ones half a spacing from the ends."""
    return range(total) if count >= total else ((2 * np.arange(count) + 1) * total // (2 * count)).tolist()


@functools.cache
def algorithm_hash() -> str:
    """Returns 8 hex digits that change if another release of Grain permutes differently."""
    few, many = Order(16, seed=1), Order((1 << 16) + 1, seed=1)
    orders = [[order.number(epoch, entry) for entry in range(16)] for order in (few, many) for epoch in (0, 1)]
    return hashlib.blake2b(repr(orders).encode(), digest_size=4).hexdigest()
