"""Worker processes of a build: their shared state, start and end.

Imports none of the libraries that a task needs, so that a new process ignores Ctrl-C before they are loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

from absl import logging

COUNTS = ("documents", "bytes", "tokens", "bad_records")


class BuildStopped(Exception):
    """Another task of the build failed."""


class SharedState:
    """State shared by the processes of a build: progress counts, the stop event, and the number of unfinished tasks."""

    def __init__(self, context: Any, *, num_tasks: int, num_cores: int):
        self.counts = context.Array("q", len(COUNTS))
        self.input_bytes = context.Value("q", 0)
        self.stop = context.Event()
        self.num_cores = num_cores
        self._tasks_left = context.Value("q", num_tasks)

    def add(self, counts: dict[str, int]) -> None:
        """Adds to the displayed counts."""
        with self.counts.get_lock():
            for index, name in enumerate(COUNTS):
                self.counts[index] += counts[name]

    def add_input_bytes(self, num_bytes: int) -> None:
        """Adds to the number of input bytes read."""
        with self.input_bytes.get_lock():
            self.input_bytes.value += num_bytes

    def finish_task(self) -> None:
        """Frees this task's cores for the remaining tasks."""
        with self._tasks_left.get_lock():
            self._tasks_left.value -= 1

    def num_threads(self) -> int:
        """Returns how many threads a task may use now; more as fewer tasks are left."""
        return max(1, self.num_cores // max(1, min(self._tasks_left.value, self.num_cores)))


_SHARED: SharedState | None = None  # of this worker process; locks can be passed when it starts, but not with a task


def start_worker(shared: SharedState) -> None:
    """Initializes a worker process: it ignores Ctrl-C, which its parent handles, and exits when its parent does."""
    global _SHARED
    _SHARED = shared
    logging.set_verbosity(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def worker_state() -> SharedState:
    """Returns the state that start_worker was given in this process."""
    assert _SHARED is not None, "not in a process that start_worker initialized"
    return _SHARED


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # the parent was killed: no worker may write while another command resumes the build
