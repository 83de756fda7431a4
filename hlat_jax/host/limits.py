"""Finds errors of refused memory, threads and open files, also in threads that nobody awaits.

A thread without memory for its first frame of Python never reports its start, and a callback without memory never wakes
its event loop. A waiter for one of them, such as a save, waits for ever.
"""

from __future__ import annotations

import collections
import errno
import resource
import sys
import threading
from typing import Any

from hlat_jax.facts.byte_sizes import format_bytes

# in errors of Python, C++ and XLA, and of TensorStore, which has RESOURCE_EXHAUSTED in those of a full disk too
_MARKS = ("can't start new thread", "bad_alloc", "RESOURCE_EXHAUSTED")
_NO_MEMORY = f"os_error_code='{errno.ENOMEM}'"


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """Returns the error of refused memory or a refused thread in the chain of causes, or None."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM or _NO_MEMORY in str(error):
            return error
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS):
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def describe(error: BaseException) -> str:
    """Returns a line on an error of `out_of_memory`, with the limits of this process."""
    reason = (str(error).splitlines() or [""])[0]
    limits = [format_bytes(soft) + " of address space (ulimit -v)" for soft in _soft_limit(resource.RLIMIT_AS)]
    if "thread" in reason:
        limits += [f"{soft:,} processes and threads (ulimit -u)" for soft in _soft_limit(resource.RLIMIT_NPROC)]
    return f"out of memory{': ' * bool(reason)}{reason}" + (f" (limits: {', '.join(limits)})" if limits else "")


def too_many_files(code: int | None) -> str:
    """Returns advice for an errno of too many open files, or "" for other errnos."""
    if code != errno.EMFILE:
        return ""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f" (raise the limit of {soft:,} open files with ulimit -n {4 * soft})"


def _soft_limit(kind: int) -> list[int]:
    soft, _ = resource.getrlimit(kind)
    return [] if soft == resource.RLIM_INFINITY else [soft]


class UnawaitedErrors:
    """Records errors of threads and callbacks that nobody awaits, within a `with` block."""

    def __init__(self):
        self._waiting: collections.deque[Any] = collections.deque()

    def __enter__(self) -> UnawaitedErrors:
        self._before = sys.unraisablehook, threading.excepthook
        # in C: a hook in Python has no memory for its frame in a thread that has none for its first
        sys.unraisablehook = self._waiting.append
        threading.excepthook = self._handle_thread
        return self

    def __exit__(self, *_) -> None:
        sys.unraisablehook, threading.excepthook = self._before
        self._take_out_of_memory()

    def raise_out_of_memory(self) -> None:
        """Raises an error of `out_of_memory` if there was one since the last call. Other errors are printed."""
        if (error := self._take_out_of_memory()) is not None:
            raise error

    def _take_out_of_memory(self) -> BaseException | None:
        first = None
        while self._waiting:
            unraisable = self._waiting.popleft()
            # a MemoryError may have no value yet
            error = unraisable.exc_value or unraisable.exc_type()
            if out_of_memory(error) is None:
                self._before[0](unraisable)
            first = first or out_of_memory(error)
        return first

    def _handle_thread(self, args: Any) -> None:
        if out_of_memory(args.exc_value) is None:
            self._before[1](args)
        else:
            self._waiting.append(args)
