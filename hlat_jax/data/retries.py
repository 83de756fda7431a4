"""Reading again, for about a minute, after a fault of the file system that may pass."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from hlat_jax.data.formats.files import Unreadable

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 25.0)  # before each further try
_SILENT_S = 60.0
_POLL_S = 0.1

T = TypeVar("T")


class Retries:
    """Calls a function that reads again where it raises Unreadable, after each of WAITS_S; thread-safe.

    A failure is a line on stderr, at most one a minute. Once something was given up, all is tried only once until that
    can be read: else every stream would wait for a minute in its turn, and one that reads ahead for each of its rows.
    """

    def __init__(self, interrupted: Callable[[], bool] = lambda: False):
        """`interrupted`: whether all waiting ends at once, and the error is raised."""
        self._interrupted, self._ended = interrupted, False
        self._lock = threading.Lock()
        self._count, self._said_s, self._waits_until_s = 0, -math.inf, 0.0
        self._given_up: set[Hashable] = set()

    @property
    def progress(self) -> float:
        """Changes while a thread waits for its next try, and not while a read hangs."""
        return min(time.monotonic(), self._waits_until_s)

    def take_count(self) -> int:
        """Returns the number of further tries since the last call."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Ends all waiting, for the length of the block, and forgets what was given up."""
        self._ended = True
        try:
            yield
        finally:
            self._given_up.clear()
            self._ended = False

    def __call__(
        self, read: Callable[[], T], *, key: Hashable = None, errors: tuple[type[Exception], ...] = (Unreadable,)
    ) -> T:
        """Returns `read()`, or raises its last error, as an Unreadable.

        Args:
          read: a function that may be called several times.
          key: an identifier of what is read.
          errors: the exceptions after which it is called again.
        """
        for wait_s in (*WAITS_S, None):
            try:
                result = read()
            except errors as caught:
                error = caught
            else:
                self._given_up.discard(key)
                return result
            if wait_s is None:
                self._given_up.add(key)
            if self._given_up or not self._wait(wait_s, error):
                break
        raise error if isinstance(error, Unreadable) else Unreadable(str(error))

    def _wait(self, wait_s: float, error: Exception) -> bool:
        """Returns whether it has waited for all the time."""
        now = time.monotonic()
        until = now + wait_s
        with self._lock:
            self._count += 1
            self._waits_until_s = max(self._waits_until_s, until)
            is_new = now - self._said_s > _SILENT_S
            self._said_s = now if is_new else self._said_s
        if is_new:
            print(f"warning: {error} Trying again for up to {sum(WAITS_S):.0f} s.", file=sys.stderr, flush=True)
        while (left_s := until - time.monotonic()) > 0:
            if self._interrupted() or self._ended:
                return False
            time.sleep(min(left_s, _POLL_S))
        return True
