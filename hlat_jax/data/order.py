"""The order of the documents of an epoch: Grain's permutation, computed all at once for up to 2**16 documents.

Grain enciphers a number of at least 16 bits until the result is below the number of documents, for each document anew:
4.5 ms for one of nine documents. Here the cipher is applied to all 2**16 numbers together, in a few ms per epoch.
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), for the walk; Beaulieu et al., ePrint
2013/404, for the cipher; ISO C++, [rand.util.seedseq], for its keys.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import math
import threading
from collections.abc import Iterator

import grain
import numpy as np

_MAX_LISTED = 1 << 16
_NUM_KEPT = 8  # epochs of 64 to 512 KiB: the rows of a batch are not all in the same one
_MASK = (1 << 32) - 1


class Order:
    """A permutation of the documents 0 .. `num_documents` - 1 for every epoch; thread-safe.

    Raises:
      ValueError: a seed outside 0 .. 2**32 - 1.
    """

    def __init__(self, num_documents: int, *, seed: int):
        self._num_documents, self._seed = num_documents, seed
        self._lock, self._listed = threading.Lock(), collections.OrderedDict[int, np.ndarray]()
        self._grain = grain.MapDataset.range(num_documents).shuffle(seed=seed)
        self._grain[0]  # sets up Grain's statistics before threads read

    def number(self, epoch: int, entry: int) -> int:
        """Returns which document is entry `entry` of an epoch."""
        if self._num_documents > _MAX_LISTED:
            # Grain counts epochs in the index: entry e * n + i of an order is entry i of epoch e
            return int(self._grain[epoch * self._num_documents + entry])
        with self._lock:
            if epoch not in self._listed:
                self._listed[epoch] = permutation(self._num_documents, seed=(self._seed + epoch) % 2**32)
                if len(self._listed) > _NUM_KEPT:
                    self._listed.popitem(last=False)
            return int(self._listed[epoch][entry])


def scattered(total: int) -> Iterator[int]:
    """Yields the numbers below `total`, each once, in steps of the golden section, so about evenly spread."""
    step = round(total * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, total) > 1:
        step += 1
    return (index * step % total for index in range(total))


def permutation(num_documents: int, *, seed: int) -> np.ndarray:
    """Returns int32[num_documents]: Grain's index_shuffle of each number, in 4 rounds; at most 2**16 documents."""
    numbers = np.arange(_MAX_LISTED, dtype=np.int32)
    left, right = numbers >> 8, numbers & 255
    keys = [key & 255 for key in _keys(seed)]
    for first, second in (keys[:2], keys[2:]):
        left = left ^ _mixed(right) ^ first
        right = right ^ _mixed(left) ^ second
    enciphered = left << 8 | right
    # the first number below num_documents on the walk from each, itself included; each iteration doubles the walk
    met = np.where(numbers < num_documents, numbers, enciphered)
    while (found := met[enciphered[:num_documents]]).max() >= num_documents:
        met = met[met]
    return found


@functools.cache
def algorithm_hash() -> str:
    """Returns 8 hex digits that change when another release of Grain, or of this package, permutes differently."""
    few, many = Order(16, seed=1), Order(_MAX_LISTED + 1, seed=1)
    orders = [[order.number(epoch, entry) for entry in range(16)] for order in (few, many) for epoch in (0, 1)]
    return hashlib.blake2b(repr(orders).encode(), digest_size=4).hexdigest()


def _mixed(x: np.ndarray) -> np.ndarray:
    def rotated(bits: int) -> np.ndarray:
        return (x << bits | x >> (8 - bits)) & 255

    return rotated(1) & x ^ rotated(2)  # the rotation by 8 is the identity on 8 bits


def _keys(seed: int) -> list[int]:
    """Returns the four numbers that C++'s std::seed_seq generates from one."""
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
