"""Joins the processes of a job, exchanges text between their hosts, and ends all processes if one fails.

One process per node. Messages go from host to host through JAX's coordination service, which process 0 runs. No device
takes part, so nothing here waits for a step or delays one. Only process 0 prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from hlat_jax.host.jax_compat import global_state
from hlat_jax.host.limits import UnawaitedErrors, describe, out_of_memory
from hlat_jax.host.process import seconds_since_stop_signal
from hlat_jax.host.rendezvous import RendezvousError, meet
from hlat_jax.host.watchdog import (
    DUMP_S,
    GAP_S,
    STUCK_CODE,
    TERMINATED_CODE,
    Watchdog,
    call_within,
    exit_with,
    record_stuck,
    stuck_line,
)

_EXCHANGE, _ALIVE, _FAILED, _LEFT = "hlat_jax/exchange", "hlat_jax/alive", "hlat_jax/failed", "hlat_jax/left"
_NO_TIMEOUT_MS = 2**31 - 1  # of an exchange: the watch ends a process whose peers have died
_REPORT_S = 5.0  # for a request to a service that may be frozen
_GRACE_S = 1.0  # for a process to report an error of its own rather than that of another
_OWN_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # no other process can have caused these
_exchange_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and the number of this process.

    Attributes:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes: the number of processes, at least 2. One process has no job.
      process_id: the number of this process, 0 .. num_processes - 1.
      peer_timeout_s: the time without a heartbeat of one process after which all end.
    """

    coordinator: str
    num_processes: int
    process_id: int
    join_timeout_s: int
    peer_timeout_s: int


def resolve_job(
    coordinator: str,
    num_processes: int | None,
    process_id: int | None,
    *,
    join_timeout_s: int,
    peer_timeout_s: int,
) -> Job | None:
    """Returns the job that the flags of a command describe, or None for one process.

    Raises:
      ValueError: only some of the first three are given, or one is out of range.
    """
    given = {"--coordinator": coordinator or None, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing. Several processes need all of {', '.join(given)}, or none.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator={coordinator} must be HOST:PORT of process 0, such as node-1:41001.")
    if num_processes < 1:
        raise ValueError(f"--num_processes={num_processes} must be at least 1.")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id={process_id} must lie in 0 .. {num_processes - 1} (--num_processes - 1).")
    for name, seconds, lowest in (("join", join_timeout_s, 1), ("peer", peer_timeout_s, 2)):
        if seconds < lowest:
            raise ValueError(f"--{name}_timeout_s={seconds} must be at least {lowest}.")
    if num_processes == 1:
        return None
    return Job(coordinator, num_processes, process_id, join_timeout_s, peer_timeout_s)


@contextlib.contextmanager
def join(job: Job | None, *, watchdog: Watchdog | None = None, stacks: pathlib.Path | None = None) -> Iterator[None]:
    """Joins the job for the length of the block, which must enclose every other use of JAX. Does nothing without a job.

    All processes leave the block after every process has reached its end. An error in one block ends all processes at
    once, without returning. Each prints a line with the reason and exits with code 2 for a ValueError, the user's
    mistake, else with 1. No heartbeat for `peer_timeout_s`, or (code 124) no progress by `watchdog`, does the same.

    Args:
      job: the job, or None for a single process.
      watchdog: the phases of the main thread of this process, which are watched if they have limits.
      stacks: the folder for the stacks of all threads of a process that is stuck.
    """
    watchdog = watchdog or Watchdog()
    if job is None:
        over, watchdog.end = threading.Event(), lambda error: exit_with(_without_memory(error, watchdog), 1)
        with UnawaitedErrors() as errors:
            watched = (watchdog, stacks, over, errors)
            threading.Thread(target=_watch_alone, args=watched, name="hlat-watch", daemon=True).start()
            try:
                with watchdog.ending_without_memory():
                    yield
            finally:
                over.set()
                watchdog.end = None
        return
    _initialize(job)
    watch = _Watch(job, watchdog=watchdog, stacks=stacks)
    watchdog.end = watch.end_all
    if job.process_id != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    with watch.errors:
        try:
            yield
            barrier()
        except BaseException as error:
            watch.end_all(error)
        watch.stop()
    jax.distributed.shutdown()


def is_first() -> bool:
    """Returns whether this is process 0, the only one that prints and writes."""
    return jax.process_index() == 0


def exchange(message: str) -> list[str]:
    """Returns the messages of all processes, by process. All call this all-gather of strings at the same points.

    It needs three short requests per process, 3 ms for two processes and 17 ms for sixteen on one busy machine.
    """
    count = jax.process_count()
    if count == 1:
        return [message]
    client, index = global_state.client, next(_exchange_numbers)
    client.key_value_set(f"{_EXCHANGE}/{index}/{jax.process_index()}", message)
    client.wait_at_barrier(_EXCHANGE, _NO_TIMEOUT_MS)
    messages = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{_EXCHANGE}/{index}/")}
    if is_first() and index > 0:
        # all processes have read the previous messages, as all have passed this barrier
        client.key_value_delete(f"{_EXCHANGE}/{index - 1}/")
    return [messages[index] for index in range(count)]


def barrier() -> None:
    """Returns after every process has called it."""
    exchange("-")


def barrier_of_threads(name: str, *, timeout_ms: int) -> None:
    """Returns after every process has called it with this name. For threads other than the main thread."""
    global_state.client.wait_at_barrier(f"hlat_jax/thread/{name}", timeout_ms)


def _initialize(job: Job) -> None:
    """Connects the processes, or ends this one with a line that says which are missing, or one too many."""
    where = f"process {job.process_id} of {job.num_processes} on {socket.gethostname()}"
    try:
        timeouts = {"timeout_s": job.join_timeout_s, "busy_s": 2 * job.peer_timeout_s}  # until an earlier job ends
        meet(job.coordinator, job.num_processes, job.process_id, **timeouts)
    except RendezvousError as error:
        exit_with(f"error: {error}", error.code)
    line = (
        f"error: {where} met the others at --coordinator={job.coordinator}, but JAX's service there did not connect "
        f"them within {job.join_timeout_s} s (--join_timeout_s)."
    )
    # JAX itself would abort with a C++ stack trace
    timer = threading.Timer(job.join_timeout_s, lambda: exit_with(line, 1))
    timer.daemon = True
    timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # its SIGTERM handler would replace ours
    try:
        jax.distributed.initialize(
            job.coordinator,
            job.num_processes,
            job.process_id,
            cluster_detection_method="deactivate",  # variables of Slurm or Open MPI do not override the flags
            initialization_timeout=job.join_timeout_s + 60,
            heartbeat_timeout_seconds=2 * job.peer_timeout_s + 60,  # our watch is earlier, with a clearer message
        )
    except jax.errors.JaxRuntimeError as error:  # another program took the port in between
        exit_with(f"error: {where} at --coordinator={job.coordinator}: {str(error).splitlines()[0]}", 1)
    timer.cancel()


def _watch_alone(
    watchdog: Watchdog, stacks: pathlib.Path | None, over: threading.Event, errors: UnawaitedErrors
) -> None:
    """Ends the only process of a run when it makes no progress, or a thread of it found no memory."""
    with watchdog.ending_without_memory():
        while not over.wait(1.0):
            errors.raise_out_of_memory()
            now = watchdog.snapshot()
            line = stuck_line({0: now}, hosts={0: socket.gethostname()}, where=stacks)
            if line:
                if problem := watchdog.cause():
                    exit_with(f"error: {problem}", 2)
                record_stuck(watchdog, stuck_s=now["for_s"], stacks=stacks, process=0)
                exit_with(f"error: {line}", STUCK_CODE)
            _end_terminated(watchdog, stacks, 0)


def _without_memory(error: BaseException, watchdog: Watchdog) -> str:
    """Returns the line of a process that memory was refused to, see `out_of_memory`."""
    reason = describe(out_of_memory(error) or error)
    where = f"while {watchdog.doing}, after step {watchdog.step}"
    return f"error: {reason}, {where}. Run the same command to resume from the last checkpoint."


def _end_terminated(watchdog: Watchdog, stacks: pathlib.Path | None, process: int) -> None:
    """Ends this process if it got a signal to stop and its step has made no progress since."""
    idle_s = watchdog.unanswered_s(seconds_since_stop_signal())
    if idle_s:
        record_stuck(watchdog, stuck_s=idle_s, stacks=stacks, process=process)
        where = f"while {watchdog.doing}, after step {watchdog.step}"
        line = f"error: no progress for {idle_s:.0f} s after a signal to stop, {where}."
        exit_with(line if stacks is None else f"{line} Stacks of all threads: {stacks}.", TERMINATED_CODE)


class _Watch:
    """A thread that sends heartbeats to the other processes, and ends this one when one died, failed or is stuck."""

    def __init__(self, job: Job, *, watchdog: Watchdog, stacks: pathlib.Path | None):
        self._job, self._client = job, global_state.client
        self._watchdog, self._stacks = watchdog, stacks
        self._answered_s = time.monotonic()
        self._period_s = min(1.0, job.peer_timeout_s / 8)
        self._gap_s = min(GAP_S, job.peer_timeout_s / 4)
        self._over, self._ending, self.errors = threading.Event(), threading.Event(), UnawaitedErrors()
        self._me = f"process {job.process_id} of {job.num_processes} on {socket.gethostname()}"
        watch = watchdog.ending_without_memory()(self._look)
        self._thread = threading.Thread(target=watch, name="hlat-watch", daemon=True)
        self._thread.start()
        if job.process_id != 0:
            threading.Thread(target=self._watch_coordinator, name="hlat-watch-coordinator", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread and waits for it."""
        self._over.set()
        self._thread.join()

    def end_all(self, error: BaseException) -> NoReturn:
        """Ends this process and reports the reason to the others, see `join`."""
        runtime, is_memory = _runtime_error(error), out_of_memory(error)
        if runtime and not runtime.startswith(_OWN_ERRORS):  # perhaps because a peer died: the watch will name it soon
            time.sleep(self._job.peer_timeout_s + 3 * self._period_s + _GRACE_S)
        self._ending.set()
        code = 2 if isinstance(error, ValueError) else 1
        is_ours = isinstance(error, (ValueError, OSError, RuntimeError)) and not runtime
        line = f"error: {error}" if is_ours else "".join(traceback.format_exception(error)).rstrip()
        reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
        if is_memory is not None:
            code, line, reason = 1, _without_memory(is_memory, self._watchdog), describe(is_memory)
        self._report(code, f"{self._me} stopped: {reason}")
        self._leave(line, code)

    def _look(self) -> None:
        last_seen: dict[str, tuple[str, float]] = {}  # process -> (its last heartbeat, when it arrived)
        looked_s = time.monotonic()
        for count in itertools.count():
            try:
                own = {"count": count, "host": socket.gethostname(), **self._watchdog.snapshot()}
                self._client.key_value_set(f"{_ALIVE}/{self._job.process_id}", json.dumps(own), allow_overwrite=True)
                heartbeats = self._client.key_value_dir_get(f"{_ALIVE}/")
                failure = self._failure()
                self._answered_s = time.monotonic()
            except Exception as error:
                if not self._over.is_set():
                    if out_of_memory(error) is not None and not str(error).startswith(_OWN_ERRORS):
                        raise
                    self._lost_coordinator(error)
                return
            now = time.monotonic()
            if now - looked_s > self._gap_s + self._period_s:  # this process was stopped: it has heard nobody
                last_seen = {name: (text, since + now - looked_s) for name, (text, since) in last_seen.items()}
            looked_s = now
            for key, heartbeat in heartbeats:
                name = key.rpartition("/")[2]
                if name not in last_seen or last_seen[name][0] != heartbeat:
                    last_seen[name] = (heartbeat, now)
            if self._over.is_set():
                return
            if not self._ending.is_set():
                self.errors.raise_out_of_memory()
            if failure is not None:
                if not self._ending.wait(_GRACE_S):  # else this process is about to report a reason of its own
                    self._leave(**failure | {"line": f"error: {failure['line']}"})
                return
            self._check_heartbeats(last_seen, now)
            self._check_progress({int(name): json.loads(text) for name, (text, _) in last_seen.items()})
            if not self._ending.is_set():
                _end_terminated(self._watchdog, self._stacks, self._job.process_id)

    def _watch_coordinator(self) -> None:
        """Ends this process when the service does not answer, as where process 0 is frozen: requests have no limit."""
        limit_s = self._job.peer_timeout_s + self._period_s + _GRACE_S
        answered_s, looked_s, silent_s = self._answered_s, time.monotonic(), 0.0
        while not self._over.wait(self._period_s):
            now = time.monotonic()
            silent_s = silent_s + min(now - looked_s, self._gap_s) if answered_s == self._answered_s else 0.0
            answered_s, looked_s = self._answered_s, now
            if silent_s > limit_s:
                self._lost_coordinator(TimeoutError(f"no answer for {limit_s:.0f} s (--peer_timeout_s)"))

    def _check_progress(self, snapshots: dict[int, dict[str, Any]]) -> None:
        if len(snapshots) < self._job.num_processes or self._ending.is_set():
            return
        hosts = {index: seen["host"] for index, seen in snapshots.items()}
        line = stuck_line(snapshots, hosts=hosts, where=self._stacks)
        if line:
            self._ending.set()
            if problem := self._watchdog.cause():
                self._report(2, problem)
                self._leave(f"error: {problem}", 2)
            stuck_s = max(seen["for_s"] for seen in snapshots.values())
            self._report(STUCK_CODE, line, stuck_s=stuck_s)
            self._leave(f"error: {line}", STUCK_CODE, stuck_s=stuck_s)

    def _failure(self) -> dict[str, Any] | None:
        """Waits for one period; returns the failure that another process reported, or None."""
        try:
            return json.loads(self._client.blocking_key_value_get(_FAILED, int(self._period_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def _check_heartbeats(self, last_seen: dict[str, tuple[str, float]], now: float) -> None:
        silent = sorted(int(name) for name, (_, since) in last_seen.items() if now - since > self._job.peer_timeout_s)
        if not silent or self._ending.is_set():
            return
        named = " and ".join(map(str, silent))
        line = (
            f"process{'es' if len(silent) > 1 else ''} {named} of {self._job.num_processes} sent no heartbeat for "
            f"{self._job.peer_timeout_s} s (--peer_timeout_s), as it was killed or lost the network, so all end. Run "
            "the same command to resume from the last checkpoint."
        )
        silent_s = max(now - since for _, since in last_seen.values())
        self._report(1, line, stuck_s=silent_s, absent=len(silent))
        self._leave(f"error: {line}", 1, stuck_s=silent_s, absent=len(silent))

    def _lost_coordinator(self, error: Exception) -> None:
        if not self._ending.is_set():
            first = str(error).splitlines()[0]
            where = f"process 0 of {self._job.num_processes} at {self._job.coordinator}"
            exit_with(f"error: {where} does not answer: {first}", 1)

    def _report(self, code: int, line: str, *, stuck_s: float = 0.0, absent: int = 0) -> None:
        self._tell(_FAILED, json.dumps({"code": code, "line": line, "stuck_s": stuck_s, "absent": absent}))

    def _tell(self, key: str, value: str) -> None:
        """Sets a key; fails where another process was first, and gives up where process 0 is frozen."""
        with contextlib.suppress(Exception):
            if not call_within(_REPORT_S, lambda: self._client.key_value_set(key, value)):
                self._client.key_value_set(key, value)

    def _leave(self, line: str, code: int, *, stuck_s: float | None = None, absent: int = 0) -> NoReturn:
        """Prints, records the time without progress, if any is given, and exits; process 0 after those not absent.

        JAX aborts a process with a C++ stack as soon as its service is gone, which process 0 runs.
        """

        def end() -> None:
            if stuck_s is not None:
                stacks = self._stacks if code == STUCK_CODE else None
                record_stuck(self._watchdog, stuck_s=stuck_s, stacks=stacks, process=self._job.process_id)
            self._tell(f"{_LEFT}/{self._job.process_id}", "-")
            until = time.monotonic() + DUMP_S + 3 * _GRACE_S  # a disk may hang for one of them
            while self._job.process_id == 0 and time.monotonic() < until:
                left = len(self._client.key_value_dir_get(f"{_LEFT}/"))
                time.sleep(_GRACE_S / 4)  # after the last one too: it may not have had the answer yet
                if left >= self._job.num_processes - absent:
                    break

        exit_with(line, code, last=end)


def _runtime_error(error: BaseException | None) -> str:
    """Returns the message of JAX's runtime, if it raised this error or one that caused it; else ""."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""
