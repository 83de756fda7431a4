"""The worker processes of a build: what they share, and how one starts and ends.

Imports nothing that a task needs, so that a process ignores Ctrl-C before the libraries of its first task are loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from absl import logging

COUNTS = ("documents", "bytes", "tokens", "bad_records")


class Stopped(Exception):
    """Another task of the build failed."""


class Shared:
    """State shared by the processes of a build: progress counts, whether to stop, and how many tasks are left."""

    def __init__(self, context: Any, *, num_tasks: int, num_cores: int):
        self.counts = context.Array("q", len(COUNTS))
        self.input_bytes = context.Value("q", 0)
        self.stop = context.Event()
        self.num_cores = num_cores
        self._tasks_left = context.Value("q", num_tasks)

    def add(self, counts: dict[str, int]) -> None:
        """Adds to the counts that are shown."""
        with self.counts.get_lock():
            for index, name in enumerate(COUNTS):
                self.counts[index] += counts[name]

    def add_input_bytes(self, num_bytes: int) -> None:
        """Adds to the bytes of inputs that were read."""
        with self.input_bytes.get_lock():
            self.input_bytes.value += num_bytes

    def task_ended(self) -> None:
        """Gives this task's cores to the others."""
        with self._tasks_left.get_lock():
            self._tasks_left.value -= 1

    def num_threads(self) -> int:
        """Returns how many threads a task may use now: the fewer tasks are left, the more each."""
        return max(1, self.num_cores // max(1, min(self._tasks_left.value, self.num_cores)))


_SHARED: Shared | None = None  # of this worker process: locks can be passed when it starts, not with a task


def start_worker(shared: Shared) -> None:
    """Prepares a worker process: it ignores Ctrl-C, which its parent handles, and ends when its parent does."""
    global _SHARED
    _SHARED = shared
    logging.set_verbosity(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def shared_of_worker() -> Shared:
    """Returns what start_worker was given in this process."""
    assert _SHARED is not None, "not in a process that start_worker prepared"
    return _SHARED


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # the parent was killed: a command that resumes its build must find nobody writing
