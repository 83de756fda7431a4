"""The order of the documents of an epoch: Grain's permutation, computed all at once for up to 2**16 documents.

Grain applies a cipher of at least 16 bits repeatedly until the result is below the number of documents, separately for
each document: 4.5 ms for one of nine documents. Here it is applied to all 2**16 numbers at once, in a few ms per epoch.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), for cycle walking; Beaulieu et al., ePrint
2013/404, for the cipher; ISO C++, [rand.util.seedseq], for its keys.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import threading
from collections.abc import Iterator, Sequence

import grain
import numpy as np

_MAX_TABLE = 1 << 16
_NUM_TABLES = 8  # of 64 to 512 KiB each; the rows of a batch may be in different epochs
_MASK = (1 << 32) - 1


class Order:
    """A permutation of the documents 0 .. `num_documents` - 1 for every epoch; thread-safe. `seed` is below 2**32."""

    def __init__(self, num_documents: int, *, seed: int):
        self._num_documents, self._seed = num_documents, seed
        self._lock, self._tables = threading.Lock(), collections.OrderedDict[int, np.ndarray]()
        self._grain = None
        if num_documents > _MAX_TABLE:
            self._grain = grain.MapDataset.range(num_documents).shuffle(seed=seed)
            self._grain[0]  # initializes Grain's statistics before threads read

    def number(self, epoch: int, entry: int) -> int:
        """Returns which document is entry `entry` of an epoch."""
        if self._grain is not None:
            # Grain counts epochs in the index: entry e * n + i of an order is entry i of epoch e
            return int(self._grain[epoch * self._num_documents + entry])
        with self._lock:
            if epoch not in self._tables:
                self._tables[epoch] = permutation(self._num_documents, seed=(self._seed + epoch) % 2**32)
                if len(self._tables) > _NUM_TABLES:
                    self._tables.popitem(last=False)
            return int(self._tables[epoch][entry])


def evenly_spread(total: int) -> Iterator[int]:
    """Yields each number below `total` once, in golden-ratio steps: any first n are about evenly spread."""
    step = round(total * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, total) > 1:
        step += 1
    return (index * step % total for index in range(total))


def evenly_spaced(total: int, count: int) -> Sequence[int]:
    """Returns `count` evenly spaced numbers below `total`, the outer ones half a spacing from the ends."""
    return range(total) if count >= total else ((2 * np.arange(count) + 1) * total // (2 * count)).tolist()


def permutation(num_documents: int, *, seed: int) -> np.ndarray:
    """Returns int32[num_documents]: Grain's index_shuffle of each number, in 4 rounds; at most 2**16 documents."""
    numbers = np.arange(_MAX_TABLE, dtype=np.int32)
    left, right = numbers >> 8, numbers & 255
    keys = [key & 255 for key in _keys(seed)]
    for first, second in (keys[:2], keys[2:]):
        left = left ^ _mix(right) ^ first
        right = right ^ _mix(left) ^ second
    ciphertext = left << 8 | right
    # cycle walking: from each number to the first one below num_documents; each iteration doubles the steps
    walked = np.where(numbers < num_documents, numbers, ciphertext)
    while (found := walked[ciphertext[:num_documents]]).max() >= num_documents:
        walked = walked[walked]
    return found


@functools.cache
def algorithm_hash() -> str:
    """Returns 8 hex digits that change if another release of Grain or of this package permutes differently."""
    few, many = Order(16, seed=1), Order(_MAX_TABLE + 1, seed=1)
    orders = [[order.number(epoch, entry) for entry in range(16)] for order in (few, many) for epoch in (0, 1)]
    return hashlib.blake2b(repr(orders).encode(), digest_size=4).hexdigest()


def _mix(x: np.ndarray) -> np.ndarray:
    def rotated(bits: int) -> np.ndarray:
        return (x << bits | x >> (8 - bits)) & 255

    return rotated(1) & x ^ rotated(2)  # the rotation by 8 is the identity on 8 bits


def _keys(seed: int) -> list[int]:
    """Returns the four numbers that C++'s std::seed_seq generates from one seed."""
    state = [0x8B8B8B8B] * 4
    for k in range(4):
        mixed = state[k] ^ state[(k + 1) % 4] ^ state[k - 1]
        one = 1664525 * (mixed ^ mixed >> 27) & _MASK
        two = one + (1 if k == 0 else k + seed if k == 1 else k) & _MASK
        state[(k + 1) % 4] = state[(k + 1) % 4] + one & _MASK
        state[(k + 2) % 4] = state[(k + 2) % 4] + two & _MASK
        state[k] = two
    for k in range(4):
        mixed = state[k] + state[(k + 1) % 4] + state[k - 1] & _MASK
        one = 1566083941 * (mixed ^ mixed >> 27) & _MASK
        two = one - k & _MASK
        state[(k + 1) % 4] ^= one
        state[(k + 2) % 4] ^= two
        state[k] = two
    return state
