"""What the main thread of a run does, since when, and how long that may take: a run that is alive may be stuck.

A hang is not an error: a process that waits for a file system or in a collective sends heartbeats for ever. So what is
watched is the progress of the main thread, by another thread. See docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

STUCK_CODE = 124  # exit code; launch/restart.sh starts the command again
TERMINATED_CODE = 143  # of a process that SIGTERM ended, to the shell
WAITING = "waiting for the other processes"
_UNSEEN = {"compiling": 72.0}  # limits of what was not yet seen three times, in shortest limits: 6 h and 1 h of 300 s
_UNSEEN_OTHER = 12.0
_FACTOR = 20  # of limits by the longest time seen
_SEEN = 3
_DUMP_S = 10.0
_GAP_S = 5.0  # of a time without a look, this much counts: the whole process may have been stopped, as by Ctrl-Z


class Activity:
    """What the main thread does, and for how long.

    The limit of a phase is 12 times `least_s` at first, of compilation 72 times; once the phase was seen three times,
    20 times the longest, but not less than `least_s`. One other thread looks at it, every second.

    Attributes:
      doing: the phase, as in "compiling".
      step: the newest step.
      again_until: the last step that an earlier process of the run has trained: up to it, training is done again.
      least_s: the shortest limit, in seconds; 0: there are none.
    """

    def __init__(self, *, least_s: float = 0.0):
        self.least_s, self.step, self.again_until = least_s, 0, 0
        self._spent: dict[str, float] = {}  # account -> seconds
        self._phase = ("opening the run", time.monotonic(), None)  # replaced as one, for the other threads
        self._seen: dict[str, tuple[int, float]] = {}  # phase -> (how often, the longest, in seconds)
        self._looked: tuple[Any, Any, float, float] = (None, None, 0.0, 0.0)  # phase, its status, when, its idle time

    @property
    def doing(self) -> str:
        return self._phase[0]

    def begin(self, doing: str, *, status: Callable[[], Any] | None = None) -> None:
        """Begins a phase, perhaps the same again; while `status()` changes, it makes progress."""
        now = time.monotonic()
        before, since, _ = self._phase
        count, longest = self._seen.get(before, (0, 0.0))
        self._seen[before] = count + 1, max(longest, now - since)
        account = self._account(before)
        self._spent = self._spent | {account: self._spent.get(account, 0.0) + now - since}
        self._phase = doing, now, status

    def snapshot(self) -> dict[str, Any]:
        """Returns {"doing", "step", "for_s": seconds without progress, "limit_s"}."""
        phase, now = self._phase, time.monotonic()
        doing, since, read = phase
        status = read() if read is not None else None
        before, status_before, looked_s, idle_s = self._looked
        if before is not phase:
            idle_s = min(now - since, _GAP_S)
        else:
            idle_s = 0.0 if status != status_before else idle_s + min(now - looked_s, _GAP_S)
        self._looked = phase, status, now, idle_s
        return {
            "doing": doing,
            "step": self.step,
            "for_s": round(idle_s, 1),
            "limit_s": round(self._limit_s(doing), 1),
        }

    def spent(self) -> dict[str, float]:
        """Returns account -> seconds, up to now: a phase, "first step" or "training again"."""
        spent, (doing, since, _) = self._spent, self._phase
        account = self._account(doing)
        return spent | {account: spent.get(account, 0.0) + time.monotonic() - since}

    def _account(self, doing: str) -> str:
        if doing != "training":
            return doing
        if "first step" not in self._spent:
            return "first step"
        return "training again" if self.step <= self.again_until else doing

    def _limit_s(self, doing: str) -> float:
        count, longest = self._seen.get(doing, (0, 0.0))
        if count < _SEEN:
            return self.least_s * _UNSEEN.get(doing, _UNSEEN_OTHER)
        return max(self.least_s, _FACTOR * longest)


def stuck_line(snapshots: dict[int, dict[str, Any]], *, hosts: dict[int, str], where: pathlib.Path | None) -> str:
    """Returns a line that names the processes that are stuck, or "" if none is; see `Activity.snapshot`.

    A process that waits for others is not, unless all do.
    """
    late = {index: one for index, one in snapshots.items() if 0 < one["limit_s"] < one["for_s"]}
    busy = {index: one for index, one in late.items() if one["doing"] != WAITING}
    if not late or (not busy and len(late) < len(snapshots)):
        return ""
    named = [
        f"process {index} of {len(snapshots)} on {hosts.get(index, '?')} made no progress for {one['for_s']:.0f} s "
        f"while {one['doing']}, after step {one['step']} (limit {one['limit_s']:.0f} s)"
        for index, one in sorted((busy or late).items())
    ]
    stacks = f" Stacks of all threads: {where}." if where else ""
    return f"stuck: {'; '.join(named)}.{stacks} Run the same command to resume from the last checkpoint."


def write_stacks(folder: pathlib.Path | None, process: int) -> None:
    """Writes the stacks of all threads to a file of the folder, or gives up after some seconds: a disk may hang too."""
    if folder is None:
        return

    def write() -> None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"process-{process}.txt", "a") as file:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname(), os.getpid(), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_DUMP_S)


def exit_with(line: str, code: int) -> NoReturn:
    """Ends the process without cleaning up, which might wait for what hangs."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)
    os._exit(code)
