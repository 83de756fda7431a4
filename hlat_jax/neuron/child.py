"""Runs checks in a child process, so that a fault which kills or stops the process ends only one check."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from hlat_jax.neuron.probes import FAILED, NOT_HERE, Outcome, first_line


def outcomes(
    checks: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = 300.0
) -> Iterator[tuple[str, Outcome]]:
    """Yields (check, outcome) of each check in order, as each ends.

    One child runs the checks one after another. If it dies or stops, the check that it ran has failed, and another
    child runs the rest. Call this before JAX starts in this process, as a Neuron core belongs to one process at a time.

    Args:
      checks: functions that return an `Outcome`, as "module:function", or "module:function:argument" for one string.
      environ: the environment of the child.
      timeout_s: the limit of one check, and of the start of JAX.
    """
    left = list(checks)
    while left:
        for outcome in _one_child(tuple(left), environ, timeout_s):
            yield left.pop(0), outcome


def _one_child(checks: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> Iterator[Outcome]:
    """Yields the outcomes of the checks up to one that kills the child; of all of them if JAX cannot start."""
    receive, send = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(receive) as answers:
        command = [sys.executable, "-m", "hlat_jax.neuron.child", str(send), *checks]
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        child = subprocess.Popen(command, env=dict(environ), pass_fds=[send], start_new_session=True, **streams)
        os.close(send)
        try:
            for index in range(-1, len(checks)):  # -1: the start of JAX
                began = time.monotonic()
                timer = threading.Timer(timeout_s, _kill, [child])
                timer.start()
                answer = answers.readline()
                timer.cancel()
                if not answer:
                    is_late = time.monotonic() - began >= timeout_s
                    reason = f"no answer within {timeout_s:g} s" if is_late else _end(child, output)
                    ended = Outcome(FAILED, reason, "do not train on this machine")
                    yield from [ended] * (1 if index >= 0 else len(checks))
                    return
                if index >= 0:
                    yield Outcome(*json.loads(answer))
                elif error := json.loads(answer):
                    missing = Outcome(NOT_HERE, f"JAX does not start: {error}", "see the check `devices`")
                    yield from [missing] * len(checks)
                    return
        finally:
            _kill(child)


def _end(child: subprocess.Popen, output: IO[bytes]) -> str:
    """Returns how a child ended, with the last line that it printed."""
    code = child.wait()
    output.seek(0)
    last = (output.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    return f"the process ended {how}: {last[:200]}"


def _kill(child: subprocess.Popen) -> None:
    """Ends a child and the compilers that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _serve(send: int, checks: Sequence[str]) -> None:
    """Runs checks in the child; writes to `send` one JSON line for the start of JAX, and one for each outcome."""
    os.set_inheritable(send, False)  # a compiler that outlives this process must not keep the pipe open
    import jax  # not at the top: the parent must not start it

    with os.fdopen(send, "w", buffering=1) as answers:
        try:
            jax.local_devices()
        except RuntimeError as error:
            print(json.dumps(first_line(error)), file=answers)
            return
        print(json.dumps(""), file=answers)
        for check in checks:
            module, function, *argument = check.split(":")
            try:
                outcome = getattr(importlib.import_module(module), function)(*argument)
            except Exception as error:  # whatever the error, the later checks still run
                outcome = Outcome(FAILED, first_line(error), "do not train on this machine")
            print(json.dumps(outcome), file=answers)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
