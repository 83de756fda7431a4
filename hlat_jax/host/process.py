"""Signal handling of the commands, and the lock of a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this first, and until then Ctrl-C gives a traceback
    import pathlib
    from collections.abc import Iterator
    from typing import Any

INDEX_FOLDER = "index"  # of the run folder: offsets of the lines of JSONL files; may be deleted at any time
LOCK_FILE = ".lock"
_OF_THE_START = {LOCK_FILE, INDEX_FOLDER, "checkpoints"}
_STOPPING_S = 15.0
_partial: list[pathlib.Path] = []  # folders that an interrupt removes


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with one line on stderr and exit code 130.

    For commands. A KeyboardInterrupt would be lost wherever a library catches or cannot raise it, in imports and in
    callbacks of the garbage collector, and threads of XLA crash in the teardown after it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it stays ignored in a background job
        signal.signal(signal.SIGINT, _end)


def end_interrupted(*, advice: str = "") -> None:
    """Ends this process at once as an interrupted command does; `advice` follows in the same line."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one does not wait for a pipe that nobody reads
    with contextlib.suppress(OSError):
        os.write(2, f"interrupted{advice and f'; {advice}'}\n".encode())
    for folder in _partial:
        shutil.rmtree(folder, ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is none, or this interrupted a write to it
            stream.flush()
    os._exit(130)


def _end(_number: int, _frame: Any) -> None:
    end_interrupted()


@contextlib.contextmanager
def removed_on_interrupt(folder: pathlib.Path) -> Iterator[None]:
    """Removes `folder` when Ctrl-C ends the command in the body, whose `finally` clauses do not run then."""
    _partial.append(folder)
    try:
        yield
    finally:
        _partial.remove(folder)


@contextlib.contextmanager
def raising_interrupts() -> Iterator[None]:
    """Makes Ctrl-C in its body a KeyboardInterrupt, once, for a command that has processes of its own to stop.

    While they stop, which takes seconds, another Ctrl-C has no effect: ending at once would leave semaphores behind.
    A later one ends the command nevertheless.
    """
    first_s = 0.0

    def raise_once(_number: int, _frame: Any) -> None:
        nonlocal first_s
        if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            signal.raise_signal(signal.SIGINT)  # another thread took it; now it waits until this one unblocks it
            return
        if not first_s:
            first_s = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first_s > _STOPPING_S:
            end_interrupted()

    if signal.getsignal(signal.SIGINT) is not _end:
        yield
        return
    signal.signal(signal.SIGINT, raise_once)
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends by itself now
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is raise_once:
            signal.signal(signal.SIGINT, _end)


@contextlib.contextmanager
def only_process(workdir: pathlib.Path) -> Iterator[None]:
    """Locks the run folder: a second process in it would overwrite the rows and saves of the first.

    A new folder is removed after a ValueError, unless the run has written files of its own into it.
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
            raise ValueError(f"another process is training in {workdir}; stop it, or give another --workdir.") from None
        try:
            yield
        except ValueError:
            saved = any((workdir / "checkpoints").glob("*"))
            if is_new and not saved and {path.name for path in workdir.iterdir()} <= _OF_THE_START:
                shutil.rmtree(workdir)
            raise


@contextlib.contextmanager
def closing_quietly(thing: Any) -> Iterator[Any]:
    """Closes `thing` at the end; after an error in the body, errors while closing are dropped."""
    try:
        yield thing
    except BaseException:
        with contextlib.suppress(Exception):
            thing.close()
        raise
    thing.close()


class StopSignals:
    """Turns SIGTERM and SIGINT into `name`, which the loop reads; a second SIGINT ends the process at once."""

    def __init__(self):
        self.name = ""

    def __enter__(self):
        numbers = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # it stays ignored in a background job
            numbers.append(signal.SIGINT)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, _frame):
        if self.name and number == signal.SIGINT:
            if self._before[number] is _end:
                advice = "run the same command to resume from the last checkpoint, or to start again without one"
                end_interrupted(advice=advice)
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                os.write(2, b"SIGINT: saving and stopping after this step; press Ctrl-C again to stop at once\n")
