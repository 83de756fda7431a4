"""Several processes that train as one: how they meet, what they tell each other, and how all end when one does.

One process per node. What is said here goes from host to host through the coordination service of JAX, which process 0
runs; no device takes part, so nothing here waits for a step or makes one wait. Process 0 alone prints.

Owns joining, exchange between hosts, and the watch over the others. Refuses to know what is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from hlat_jax.host.jax_compat import global_state

_SAID, _ALIVE, _FAILED, _LEFT = "hlat_jax/said", "hlat_jax/alive", "hlat_jax/failed", "hlat_jax/left"
_FOR_EVER_MS = 2**31 - 1  # of an exchange: the watch ends those whose peers have died
_GRACE_S = 1.0  # for a process to name an error of its own before it repeats that of another
_OWN_ERRORS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # no other process can have caused these
_turns = itertools.count()


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes that train together, and which of them this one is.

    Attributes:
      coordinator: HOST:PORT on which process 0 listens.
      num_processes: at least 2; one process has nobody to join.
      process_id: 0 .. num_processes - 1.
      join_timeout_s: the longest wait for the others at the start.
      peer_timeout_s: the longest silence of another process before all end.
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
    """Returns the job that the flags of a command describe; None for one process.

    Raises:
      ValueError: some of the three are given and not all, or one is out of its range.
    """
    given = {"--coordinator": coordinator or None, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing: several processes need all of {', '.join(given)}, or none.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator={coordinator} must be HOST:PORT of process 0, such as node-1:41001.")
    if num_processes < 1:
        raise ValueError(f"--num_processes={num_processes} must be at least 1.")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process_id={process_id} must lie in 0 .. {num_processes - 1}: --num_processes - 1.")
    for name, seconds, lowest in (("join", join_timeout_s, 1), ("peer", peer_timeout_s, 2)):
        if seconds < lowest:
            raise ValueError(f"--{name}_timeout_s={seconds} must be at least {lowest}.")
    if num_processes == 1:
        return None
    return Job(coordinator, num_processes, process_id, join_timeout_s, peer_timeout_s)


@contextlib.contextmanager
def joined(job: Job | None) -> Iterator[None]:
    """Joins the job for the length of the block, which must enclose every other use of JAX; None: does nothing.

    With a job the end is the same in all processes. When every one has come to the end of its block, all go on. An
    error in one block ends every process at once, without returning: each prints a line that says why, and exits with
    2 for a ValueError, the user's, else with 1. So does a process that is silent for `peer_timeout_s`.
    """
    if job is None:
        yield
        return
    _initialize(job)
    watch = _Watch(job)
    if job.process_id != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    try:
        yield
        barrier()
    except BaseException as error:
        watch.end_all(error)
    watch.stop()
    jax.distributed.shutdown()


def is_first() -> bool:
    """Returns whether this is process 0, which prints and writes for all."""
    return jax.process_index() == 0


def exchange(said: str) -> list[str]:
    """Returns what every process said, by process; all call it at the same points, and return when the last has.

    It costs three short messages a process: 3 ms for two processes and 17 ms for sixteen on one busy machine.
    """
    count = jax.process_count()
    if count == 1:
        return [said]
    client, turn = global_state.client, next(_turns)
    client.key_value_set(f"{_SAID}/{turn}/{jax.process_index()}", said)
    client.wait_at_barrier(_SAID, _FOR_EVER_MS)
    found = {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{_SAID}/{turn}/")}
    if is_first() and turn > 0:
        client.key_value_delete(f"{_SAID}/{turn - 1}/")  # everyone has read it: all are past the barrier of this turn
    return [found[index] for index in range(count)]


def barrier() -> None:
    """Returns when every process has called it."""
    exchange("-")


def barrier_of_threads(name: str, *, timeout_ms: int) -> None:
    """Returns when every process has called it with this name: for threads beside the main one."""
    global_state.client.wait_at_barrier(f"hlat_jax/thread/{name}", timeout_ms)


def _initialize(job: Job) -> None:
    """Connects the processes, or ends this one with a line that says who was waited for."""
    where = f"process {job.process_id} of {job.num_processes} on {socket.gethostname()}"
    what = "waited for the others to come to it" if job.process_id == 0 else "did not reach process 0"
    line = (
        f"error: {where} {what} at --coordinator={job.coordinator} for {job.join_timeout_s} s (--join_timeout_s). "
        "Check that every node runs the same command, that the port is free on the first and that the others reach it."
    )
    timer = threading.Timer(job.join_timeout_s, lambda: _exit(line, 1))  # JAX itself would abort with a stack of C++
    timer.daemon = True
    timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # its handler of SIGTERM would take the place of ours
    jax.distributed.initialize(
        job.coordinator,
        job.num_processes,
        job.process_id,
        cluster_detection_method="deactivate",  # no variable of Slurm or Open MPI overrules the flags
        initialization_timeout=job.join_timeout_s + 60,
        heartbeat_timeout_seconds=2 * job.peer_timeout_s + 60,  # our watch is first, and has a clearer word
    )
    timer.cancel()


class _Watch:
    """A thread that tells the others that this process lives, and ends it when one of them died or failed."""

    def __init__(self, job: Job):
        self._job, self._client = job, global_state.client
        self._period_s = min(1.0, job.peer_timeout_s / 8)
        self._over, self._ending = threading.Event(), threading.Event()
        self._me = f"process {job.process_id} of {job.num_processes} on {socket.gethostname()}"
        self._thread = threading.Thread(target=self._run, name="hlat-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._over.set()
        self._thread.join()

    def end_all(self, error: BaseException) -> NoReturn:
        """Ends this process and tells the others why; see `joined`."""
        runtime = _runtime_error(error)
        if runtime and not runtime.startswith(_OWN_ERRORS):  # the echo of a peer that died? The watch will name it soon
            time.sleep(self._job.peer_timeout_s + 3 * self._period_s + _GRACE_S)
        self._ending.set()
        code = 2 if isinstance(error, ValueError) else 1
        is_ours = isinstance(error, (ValueError, OSError, RuntimeError)) and not runtime
        line = str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip()
        self._tell(code, f"{self._me} stopped: {line if is_ours else f'{type(error).__name__}: {error}'}")
        self._leave(f"error: {line}" if is_ours else line, code)

    def _run(self) -> None:
        heard: dict[str, tuple[str, float]] = {}  # process -> (its last sign of life, when it was new to us)
        for count in itertools.count():
            try:
                self._client.key_value_set(f"{_ALIVE}/{self._job.process_id}", str(count), allow_overwrite=True)
                signs = self._client.key_value_dir_get(f"{_ALIVE}/")
                failure = self._failure()
            except Exception as error:
                if not self._over.is_set():
                    self._lost_coordinator(error)
                return
            now = time.monotonic()
            for key, sign in signs:
                name = key.rpartition("/")[2]
                if name not in heard or heard[name][0] != sign:
                    heard[name] = (sign, now)
            if self._over.is_set():
                return
            if failure is not None:
                self._repeat(failure)
                return
            self._check_silence(heard, now)

    def _failure(self) -> dict[str, Any] | None:
        """Returns what ends the job, waiting for it one period; None when nothing does."""
        try:
            return json.loads(self._client.blocking_key_value_get(_FAILED, int(self._period_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def _check_silence(self, heard: dict[str, tuple[str, float]], now: float) -> None:
        silent = sorted(int(name) for name, (_, since) in heard.items() if now - since > self._job.peer_timeout_s)
        if not silent or self._ending.is_set():
            return
        named = " and ".join(map(str, silent))
        line = (
            f"process{'es' if len(silent) > 1 else ''} {named} of {self._job.num_processes} gave no sign of life for "
            f"{self._job.peer_timeout_s} s (--peer_timeout_s): killed, or cut off. All processes end; the same command "
            "goes on from the last checkpoint."
        )
        self._tell(1, line)
        self._leave(f"error: {line}", 1, absent=silent)

    def _repeat(self, failure: dict[str, Any]) -> None:
        """Ends this process for the reason of another, unless it is about to name its own."""
        if not self._ending.wait(_GRACE_S):
            self._leave(f"error: {failure['line']}", failure["code"])

    def _lost_coordinator(self, error: Exception) -> None:
        if not self._ending.is_set():
            first = str(error).splitlines()[0]
            _exit(f"error: process 0 of {self._job.num_processes} at {self._job.coordinator} is gone: {first}", 1)

    def _tell(self, code: int, line: str) -> None:
        with contextlib.suppress(Exception):  # another was first, or nobody can hear it
            self._client.key_value_set(_FAILED, json.dumps({"code": code, "line": line}))

    def _leave(self, line: str, code: int, *, absent: list[int] | None = None) -> NoReturn:
        """Prints and exits; process 0, without whom nobody hears anything, when the others have left or time is up."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_LEFT}/{self._job.process_id}", "-")
            others = self._job.num_processes - len(absent or [])
            until = time.monotonic() + 5 * _GRACE_S
            while self._job.process_id == 0 and time.monotonic() < until:
                if len(self._client.key_value_dir_get(f"{_LEFT}/")) >= others:
                    break
                time.sleep(0.05)
        _exit(line, code)


def _exit(line: str, code: int) -> NoReturn:
    """Ends the process as it stands: what would be tidied up on the way might wait for processes that are gone."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)
    os._exit(code)


def _runtime_error(error: BaseException | None) -> str:
    """Returns what JAX's runtime said, when it raised this error or one that caused it; else ""."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""
