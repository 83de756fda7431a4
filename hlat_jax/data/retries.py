"""Reads again, for about a minute, after a fault of the file system that may pass."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from hlat_jax.data.formats.files import Unreadable

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 25.0)  # before each further try
_MINUTE_S = 60.0
_POLL_S = 0.1

T = TypeVar("T")


class Retries:
    """Calls a function that reads, and again after each of WAITS_S if it raises Unreadable. Thread-safe.

    A failure is a line on stderr, at most one a minute. After the last try of a read, all reads are tried only once for
    a minute, since otherwise every stream would wait in its turn.
    """

    def __init__(self, interrupted: Callable[[], bool] = lambda: False):
        """`interrupted`: returns True when waiting should stop and the error be raised."""
        self._interrupted = interrupted
        self._lock = threading.Lock()
        self._count, self._said_s, self._waits_until_s, self._tries_once_until_s = 0, -math.inf, 0.0, 0.0

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
    def stop_waiting(self) -> Iterator[None]:
        """Ends all waiting, for the length of the block."""
        self._tries_once_until_s = math.inf
        try:
            yield
        finally:
            self._tries_once_until_s = 0.0

    def __call__(self, read: Callable[[], T], *, errors: tuple[type[Exception], ...] = (Unreadable,)) -> T:
        """Returns `read()`, which may be called several times, or raises its last error, as an Unreadable.

        `errors` are the exceptions after which it is called again.
        """
        for wait_s in WAITS_S:
            try:
                return read()
            except errors as error:
                if not self._wait(wait_s, error):
                    raise _unreadable(error) from None
        try:
            return read()
        except errors as error:
            self._tries_once_until_s = max(self._tries_once_until_s, time.monotonic() + _MINUTE_S)
            raise _unreadable(error) from None

    def _wait(self, wait_s: float, error: Exception) -> bool:
        """Returns whether it has waited for all the time."""
        now = time.monotonic()
        if now < self._tries_once_until_s:
            return False
        until = now + wait_s
        with self._lock:
            self._count += 1
            self._waits_until_s = max(self._waits_until_s, until)
            is_new = now - self._said_s > _MINUTE_S
            self._said_s = now if is_new else self._said_s
        if is_new:
            print(f"warning: {error} Trying again for up to {sum(WAITS_S):.0f} s.", file=sys.stderr, flush=True)
        while (now := time.monotonic()) < until:
            if self._interrupted() or now < self._tries_once_until_s:
                return False
            time.sleep(min(until - now, _POLL_S))
        return True


def _unreadable(error: Exception) -> Unreadable:
    return error if isinstance(error, Unreadable) else Unreadable(str(error))
