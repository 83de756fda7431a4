"""What the main thread of a run does, since when, and how long that may take: a run that is alive may be stuck.

A hang is not an error: a process that waits for a file system or in a collective sends heartbeats for ever. So what is
watched is the progress of the main thread, by another thread. See docs/reliability.md.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import pathlib
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from hlat_jax.host.limits import out_of_memory

STUCK_CODE = 124  # exit code; launch/restart.sh starts the command again
TERMINATED_CODE = 143  # of a process that SIGTERM ended, to the shell
WAITING = "waiting for the other processes"
_LEARNED = ("training", "waiting for data")  # what every step does alike
_FACTOR, _SEEN = 20, 3  # their limits, once seen so often, in the longest time seen
_SLOWER = 3  # of all else: at least so many times the longest seen
_BRIEF = (*_LEARNED, WAITING, "evaluating", "starting to save", "starting to export", "saving")
_BRIEF_LIMIT, _LONG_LIMIT = 12, 72  # in shortest limits: 1 h and 6 h of 300 s
_TERM_S, _TERM_FACTOR = 60.0, 3  # after SIGTERM, which is followed by SIGKILL
_DUMP_S, _SAY_S = 10.0, 2.0
_NAMED = 4  # at most so many processes in a line
GAP_S = 5.0  # of a time without a look, this much counts: the whole process may have been stopped, as by Ctrl-Z


class Activity:
    """What the main thread does, and for how long.

    The limit of a step, and of the wait for its batch, is 20 times the longest that was seen, but not less than
    `least_s`; until three were seen, and of evaluation and saves, 12 times `least_s`; of all else, such as opening,
    compiling and tasks, 72 times; but none is less than 3 times the longest seen. One other thread looks at it,
    every second.

    Attributes:
      doing: the phase, as in "compiling".
      step: the newest step.
      again_until: the last step that an earlier process of the run has trained: up to it, training is done again.
      least_s: the shortest limit, in seconds; 0: there are none.
      began_s: time.monotonic() of the start.
      stuck_s: how long somebody made no progress when that was found; 0: it was not.
      beat: enters the account of `spent` in the ledger; None: there is no ledger.
      problem: returns what is wrong with the run folder, or ""; see `cause`.
      end: ends the process with the reason of an error; None: whoever called us does.
    """

    def __init__(self, *, least_s: float = 0.0, began_s: float | None = None):
        """`began_s` is time.monotonic() of the start; None: now."""
        self.least_s, self.step, self.again_until = least_s, 0, 0
        self.began_s = time.monotonic() if began_s is None else began_s
        self.stuck_s, self._has_stepped = 0.0, False
        self.beat: Callable[[], None] | None = None
        self.problem: Callable[[], str] = str
        self.end: Callable[[BaseException], NoReturn] | None = None
        # phase, since when, its status, and account -> seconds before it; replaced as one, for the other threads
        self._phase: tuple[str, float, Any, dict[str, float]] = ("opening the run", self.began_s, None, {})
        self._seen: dict[str, tuple[int, float]] = {}  # phase -> (how often, the longest, in seconds)
        self._looked: tuple[Any, Any, float, float] = (None, None, 0.0, 0.0)  # phase, its status, when, its idle time

    @property
    def doing(self) -> str:
        return self._phase[0]

    @property
    def account(self) -> str:
        """The key of `spent` to which the time is added at present."""
        return self._account(self.doing)

    def begin(self, doing: str, *, status: Callable[[], Any] | None = None) -> None:
        """Begins a phase, perhaps the same again; while `status()` changes, it makes progress."""
        now = time.monotonic()
        before, since, *_ = self._phase
        count, longest = self._seen.get(before, (0, 0.0))
        self._seen[before] = count + 1, max(longest, now - since)
        self._phase = doing, now, status, self.spent(now_s=now)

    def snapshot(self) -> dict[str, Any]:
        """Returns {"doing", "step", "for_s": seconds without progress, "limit_s"}."""
        phase, now = self._phase, time.monotonic()
        doing, since, read, _ = phase
        status = read() if read is not None else None
        before, status_before, looked_s, idle_s = self._looked
        if before is not phase:
            idle_s = min(now - since, GAP_S)
        else:
            idle_s = 0.0 if status != status_before else idle_s + min(now - looked_s, GAP_S)
        self._looked = phase, status, now, idle_s
        return {
            "doing": doing,
            "step": self.step,
            "for_s": round(idle_s, 1),
            "limit_s": round(self._limit_s(doing), 1),
        }

    def spent(self, *, now_s: float | None = None) -> dict[str, float]:
        """Returns account -> seconds, up to `now_s` or now: a phase, "first step" or "training again"."""
        doing, since, _, spent = self._phase
        account, now_s = self._account(doing), now_s or time.monotonic()
        return spent | {account: spent.get(account, 0.0) + now_s - since}

    def end_first_step(self) -> None:
        """Ends the first step of this process, whose metrics have arrived: it is dispatched long before."""
        if not self._has_stepped:
            self.begin(self.doing)
            self._has_stepped = True

    def _account(self, doing: str) -> str:
        if doing != "training":
            return doing
        if not self._has_stepped:
            return "first step"
        return "training again" if self.step <= self.again_until else doing

    def _limit_s(self, doing: str) -> float:
        count, longest = self._seen.get(doing, (0, 0.0))
        if doing in _LEARNED and count >= _SEEN:
            return max(self.least_s, _FACTOR * longest)
        return max(self.least_s * (_BRIEF_LIMIT if doing in _BRIEF else _LONG_LIMIT), _SLOWER * longest)

    def cause(self) -> str:
        """Returns what is wrong with the run folder, or "" if nothing is or a disk that hangs does not tell."""
        found: list[str] = []
        _within(_DUMP_S, lambda: found.append(self.problem()))
        return found[0] if found else ""

    @contextlib.contextmanager
    def ending_without_memory(self) -> Iterator[None]:
        """Ends the process as soon as memory has run out in the block: to close what is open may wait for ever."""
        try:
            yield
        except Exception as error:
            if self.end is not None and out_of_memory(error) is not None:
                self.end(error)
            raise

    def unanswered_s(self, since_sigterm_s: float) -> float:
        """Returns for how long a step makes no progress after SIGTERM, if that is too long; else 0."""
        now = self.snapshot()
        _, longest = self._seen.get(now["doing"], (0, 0.0))
        idle_s = min(since_sigterm_s, now["for_s"])
        is_late = now["doing"] in _LEARNED and idle_s > max(_TERM_S, _TERM_FACTOR * longest)
        return idle_s if is_late and self.least_s else 0.0


def stuck_line(snapshots: dict[int, dict[str, Any]], *, hosts: dict[int, str], where: pathlib.Path | None) -> str:
    """Returns a line that names the processes that are stuck, or "" if none is; see `Activity.snapshot`.

    A process that waits for others is not, unless all do. Those that are about to exceed the same limit at the same
    step are named too: one may wait for another inside of a phase. Those that stopped first come first.
    """
    late = {index: one for index, one in snapshots.items() if 0 < one["limit_s"] < one["for_s"]}
    busy = {index: one for index, one in late.items() if one["doing"] != WAITING}
    if not late or (not busy and len(late) < len(snapshots)):
        return ""
    found = busy or late
    places = {(one["doing"], one["step"]) for one in found.values()}
    found |= {
        index: one
        for index, one in snapshots.items()
        if (one["doing"], one["step"]) in places and one["for_s"] > one["limit_s"] / 2
    }
    named = [
        f"process {index} of {len(snapshots)} on {hosts.get(index, '?')} made no progress for {one['for_s']:.0f} s "
        f"while {one['doing']}, after step {one['step']} (limit {one['limit_s']:.0f} s)"
        for index, one in sorted(found.items(), key=lambda item: (-item[1]["for_s"], item[0]))
    ]
    named = [*named[:_NAMED], *([f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else [])]
    stacks = f" Stacks of all threads: {where}." if where else ""
    return f"stuck: {'; '.join(named)}.{stacks} Run the same command to resume from the last checkpoint."


def record_stuck(activity: Activity, *, stuck_s: float, stacks: pathlib.Path | None, process: int) -> None:
    """Enters the time without progress in the ledger, and writes the stacks of all threads to a file of a folder.

    Gives up after some seconds: a disk may hang too.
    """
    activity.stuck_s = stuck_s

    def write() -> None:
        with contextlib.suppress(OSError):
            if activity.beat is not None:
                activity.beat()
            if stacks is None:
                return
            stacks.mkdir(parents=True, exist_ok=True)
            with open(stacks / f"process-{process}.txt", "a") as file:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname(), os.getpid(), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    _within(_DUMP_S, write)


def exit_with(line: str, code: int) -> NoReturn:
    """Ends the process without cleaning up, which might wait for what hangs, such as the reader of its output."""
    if not _exiting.acquire(blocking=False):
        time.sleep(_DUMP_S)  # another thread ends the process, with a line of its own
    rest, until_s = f"{line}\n".encode(errors="replace"), time.monotonic() + _SAY_S
    with contextlib.suppress(OSError):
        while rest and select.select([], [2], [], max(until_s - time.monotonic(), 0.0))[1]:
            rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]  # so many bytes do not block
    _within(_SAY_S, lambda: sys.stdout.flush())
    os._exit(code)


_exiting = _thread.allocate_lock()


def _within(longest_s: float, work: Callable[[], Any]) -> None:
    """Calls a function in another thread, and waits for it or, if the disk or a reader hangs, for some seconds.

    `threading.Thread.start` would wait for ever for a thread that has no memory to start.
    """
    done = _thread.allocate_lock()
    done.acquire()

    def call() -> None:
        with contextlib.suppress(Exception):
            work()
        done.release()

    with contextlib.suppress(RuntimeError):  # no thread can be started
        _thread.start_new_thread(call, ())
        done.acquire(timeout=longest_s)
