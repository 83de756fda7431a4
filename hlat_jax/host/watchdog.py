"""Watches the phase of the main thread of a run and its duration, since a live run may be stuck.

A hang raises no error. A process that waits for a file system or in a collective sends heartbeats for ever. So another
thread watches the progress of the main thread. See docs/reliability.md.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
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
GAP_S = 5.0  # of a time without a look, this much counts: the whole process may have been stopped, as by Ctrl-Z
_TERM_S, _TERM_FACTOR = 60.0, 3  # after SIGTERM, which is followed by SIGKILL
DUMP_S, _SAY_S = 10.0, 2.0
_MOST_NAMED = 4  # processes in a line


@dataclasses.dataclass(frozen=True)
class Limit:
    """The longest time without progress in a phase.

    Attributes:
      shortest: the multiple of `Watchdog.least_s` that is the lowest limit, unless the phase is learned.
      longest: the multiple of the phase's longest time so far that is the lowest limit.
      learned: the multiple of the longest time that is the limit after the phase was seen three times. It is 0 for
        phases with lengths that do not predict the next.
    """

    shortest: int
    longest: int = 3
    learned: int = 0


_TIMES_UNTIL_LEARNED = 3
# 12 and 72 are an hour and six hours at the default of --stuck_timeout_s, 300.
LIMITS = {
    "training": Limit(12, learned=20),
    "waiting for data": Limit(12, learned=20),
    WAITING: Limit(12),
    "evaluating": Limit(12),
    "starting to save": Limit(12),
    "saving": Limit(12),
}
LIMIT_OF_OTHERS = Limit(72)  # opening, compiling, tasks


class Watchdog:
    """The phase of the main thread and its longest duration, see `LIMITS`. Another thread looks every second.

    Attributes:
      doing: the phase, such as "compiling".
      again_until: the last step that an earlier process of the run trained. Up to it, training is done again.
      least_s: the shortest limit, in seconds, or 0 for no limits.
      began_s: time.monotonic() of the start.
      stuck_s: the seconds without progress of a stuck process, 0 until then.
      beat: the function that enters the account of `seconds_by_account` in the ledger, if there is one.
      problem: the function that returns the problem of the run folder, or "", see `cause`.
      end: the function that ends the process with the reason of an error, or None if the caller of the run does.
    """

    def __init__(self, *, least_s: float = 0.0, began_s: float | None = None):
        """`began_s` is time.monotonic() of the start, by default now."""
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
        """The key of `seconds_by_account` to which the time is added at present."""
        return self._account(self.doing)

    def begin(self, doing: str, *, status: Callable[[], Any] | None = None) -> None:
        """Begins a phase, perhaps the same again. While `status()` changes, it makes progress."""
        now = time.monotonic()
        before, since, *_ = self._phase
        count, longest = self._seen.get(before, (0, 0.0))
        self._seen[before] = count + 1, max(longest, now - since)
        self._phase = doing, now, status, self.seconds_by_account(now_s=now)

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

    def seconds_by_account(self, *, now_s: float | None = None) -> dict[str, float]:
        """Returns account -> seconds, up to `now_s` or now. An account is a phase, "first step" or "training again"."""
        doing, since, _, spent = self._phase
        account, now_s = self._account(doing), now_s or time.monotonic()
        return spent | {account: spent.get(account, 0.0) + now_s - since}

    def end_first_step(self) -> None:
        """Ends the first step of this process after its metrics arrived, as it is dispatched long before."""
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
        limit = LIMITS.get(doing, LIMIT_OF_OTHERS)
        count, longest = self._seen.get(doing, (0, 0.0))
        if limit.learned and count >= _TIMES_UNTIL_LEARNED:
            return max(self.least_s, limit.learned * longest)
        return max(limit.shortest * self.least_s, limit.longest * longest)

    def cause(self) -> str:
        """Returns the problem of the run folder, or "" if there is none, or if a hanging disk does not answer."""
        problems: list[str] = []
        call_within(DUMP_S, lambda: problems.append(self.problem()))
        return problems[0] if problems else ""

    @contextlib.contextmanager
    def ending_without_memory(self) -> Iterator[None]:
        """Ends the process as soon as memory runs out in the block, as closing open files may wait for ever."""
        try:
            yield
        except Exception as error:
            if self.end is not None and out_of_memory(error) is not None:
                self.end(error)
            raise

    def unanswered_s(self, since_sigterm_s: float) -> float:
        """Returns the time without progress of a step after SIGTERM if it is too long, else 0."""
        now = self.snapshot()
        _, longest = self._seen.get(now["doing"], (0, 0.0))
        idle_s = min(since_sigterm_s, now["for_s"])
        is_step = LIMITS.get(now["doing"], LIMIT_OF_OTHERS).learned > 0
        is_late = is_step and idle_s > max(_TERM_S, _TERM_FACTOR * longest)
        return idle_s if is_late and self.least_s else 0.0


def stuck_line(snapshots: dict[int, dict[str, Any]], *, hosts: dict[int, str], where: pathlib.Path | None) -> str:
    """Returns a line that names the stuck processes, or "" if none is stuck, see `Watchdog.snapshot`.

    A process that waits for others is not stuck, unless all wait. Processes that are about to exceed the same limit at
    the same step are named too, as one may wait for another within a phase. The first to stop come first.
    """
    late = {index: seen for index, seen in snapshots.items() if 0 < seen["limit_s"] < seen["for_s"]}
    busy = {index: seen for index, seen in late.items() if seen["doing"] != WAITING}
    if not late or (not busy and len(late) < len(snapshots)):
        return ""
    stuck = busy or late
    phases = {(seen["doing"], seen["step"]) for seen in stuck.values()}
    stuck |= {
        index: seen
        for index, seen in snapshots.items()
        if (seen["doing"], seen["step"]) in phases and seen["for_s"] > seen["limit_s"] / 2
    }
    words = [
        f"process {index} of {len(snapshots)} on {hosts.get(index, '?')} made no progress for {seen['for_s']:.0f} s "
        f"while {seen['doing']}, after step {seen['step']} (limit {seen['limit_s']:.0f} s)"
        for index, seen in sorted(stuck.items(), key=lambda item: (-item[1]["for_s"], item[0]))
    ]
    if len(words) > _MOST_NAMED:
        words[_MOST_NAMED:] = [f"and {len(words) - _MOST_NAMED} more"]
    stacks = f" Stacks of all threads: {where}." if where else ""
    return f"stuck: {'; '.join(words)}.{stacks} Run the same command to resume from the last checkpoint."


def record_stuck(watchdog: Watchdog, *, stuck_s: float, stacks: pathlib.Path | None, process: int) -> None:
    """Enters the time without progress in the ledger, and writes the stacks of all threads to a file of a folder.

    Gives up after some seconds, as a disk may hang too.
    """
    watchdog.stuck_s = stuck_s

    def write() -> None:
        with contextlib.suppress(OSError):
            if watchdog.beat is not None:
                watchdog.beat()
            if stacks is None:
                return
            stacks.mkdir(parents=True, exist_ok=True)
            with open(stacks / f"process-{process}.txt", "a") as file:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), socket.gethostname(), os.getpid(), file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    call_within(DUMP_S, write)


def exit_with(line: str, code: int, *, last: Callable[[], Any] = lambda: None) -> NoReturn:
    """Ends the process without a clean-up that might wait for something that hangs, such as the reader of its output.

    `last`, which takes some seconds at most, is called after the line is printed.
    """
    if not _exiting.acquire(blocking=False):
        time.sleep(6 * DUMP_S)  # another thread ends the process, with a line of its own
    try:
        rest, until_s = f"{line}\n".encode(errors="replace"), time.monotonic() + _SAY_S
        with contextlib.suppress(OSError):
            while rest and select.select([], [2], [], max(until_s - time.monotonic(), 0.0))[1]:
                rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]  # so many bytes do not block
        call_within(_SAY_S, lambda: sys.stdout.flush())
        last()
    finally:
        os._exit(code)


_exiting = _thread.allocate_lock()


def call_within(longest_s: float, work: Callable[[], Any]) -> bool:
    """Calls a function in another thread, and waits for it, but only some seconds if it hangs.

    Returns whether a thread could be started. `threading.Thread.start` would wait for ever for one without memory.
    """
    done = _thread.allocate_lock()
    done.acquire()

    def call() -> None:
        with contextlib.suppress(Exception):
            work()
        done.release()

    try:
        _thread.start_new_thread(call, ())
    except RuntimeError:
        return False
    done.acquire(timeout=longest_s)
    return True
