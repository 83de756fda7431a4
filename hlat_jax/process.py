"""What a training process owes its operator and its run folder: signals heard, the folder held, things closed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import pathlib
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

INDEX_FOLDER = "index"  # of the run folder: where the lines of JSONL files lie; may be deleted at any time
LOCK_FILE = ".lock"
_OF_THE_START = {LOCK_FILE, INDEX_FOLDER, "checkpoints"}


@contextlib.contextmanager
def only_process(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the run folder: a second process in it would rewrite the rows and saves of the first.

    A command that is refused before the run wrote anything of its own leaves no new folder behind.
    """
    is_new = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK_FILE, "w")  # noqa: SIM115 - held until the run ends
    except OSError as error:
        raise ValueError(f"cannot write to {workdir}: {error.strerror}; give another folder with --workdir.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process trains in {workdir}; stop it, or give another --workdir.") from None
        try:
            yield
        except ValueError:
            saved = any((workdir / "checkpoints").glob("*"))
            if is_new and not saved and {path.name for path in workdir.iterdir()} <= _OF_THE_START:
                shutil.rmtree(workdir)
            raise


@contextlib.contextmanager
def closing_quietly(thing: Any) -> Iterator[Any]:
    """Closes `thing` at the end; after an error, what goes wrong while closing does not take that error's place."""
    try:
        yield thing
    except BaseException:
        with contextlib.suppress(Exception):
            thing.close()
        raise
    thing.close()


@functools.cache  # once in a process: the hook wraps the one before it
def leave_out_echoes_of_failed_saves() -> None:
    """Leaves out the tracebacks that Orbax and TensorStore print around the one error they raise for a failed save.

    The first write that fails ends Orbax's event loop. Its other tasks fail with nobody to await them, and
    TensorStore's threads still report to the closed loop: on a full disk, a screen of them hides what matters.
    """
    hook = sys.unraisablehook

    def print_others(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = print_others
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


class StopSignals:
    """Turns SIGTERM and SIGINT into a wish that the loop reads; a second SIGINT interrupts at once."""

    def __init__(self):
        self.name = ""

    def __enter__(self):
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, _frame):
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
