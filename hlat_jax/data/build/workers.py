"""The processes of a build: what they share, and how one starts and ends.

Refuses to import what a task needs until it has one, so that a process is quiet before libraries are loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import threading
from typing import Any

from absl import logging

COUNTS = ("documents", "bytes", "tokens", "bad_records")


class Stopped(Exception):
    """Another task of the build failed."""


class Shared:
    """What the processes of a build share: counts to be shown, whether to stop, and how many tasks are left."""

    def __init__(self, context: Any, *, num_tasks: int, num_cores: int):
        self.counts = context.Array("q", len(COUNTS))
        self.input_bytes = context.Value("q", 0)
        self.stop = context.Event()
        self.num_cores = num_cores
        self._tasks_left = context.Value("q", num_tasks)

    def add(self, counts: dict[str, int]) -> None:
        """Adds to what is shown."""
        with self.counts.get_lock():
            for index, name in enumerate(COUNTS):
                self.counts[index] += counts[name]

    def add_input_bytes(self, num_bytes: int) -> None:
        """Adds to the bytes of inputs that are done."""
        with self.input_bytes.get_lock():
            self.input_bytes.value += num_bytes

    def task_ended(self) -> None:
        """Leaves this task's cores to the others."""
        with self._tasks_left.get_lock():
            self._tasks_left.value -= 1

    def num_threads(self) -> int:
        """Returns how many threads a task may use now: when few tasks are left, each has more of the cores."""
        return max(1, self.num_cores // max(1, min(self._tasks_left.value, self.num_cores)))


_SHARED: Shared | None = None  # of this worker process; locks reach it when it starts, not with a task


def start_worker(shared: Shared) -> None:
    """Prepares a worker process: it hears no Ctrl-C, which its parent answers, and ends when its parent does."""
    global _SHARED
    _SHARED = shared
    logging.set_verbosity(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # killed: whoever runs the command again must not meet us writing


def run_in_worker(task: Any, folder: pathlib.Path, options: Any) -> list[dict[str, Any]]:
    """Runs a task in a process that start_worker has prepared."""
    from hlat_jax.data.build import build_task

    return build_task.run(task, folder=folder, options=options, shared=_SHARED)
