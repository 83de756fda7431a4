"""Signal handling of the commands, and the lock of a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import shutil
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this first, and until then Ctrl-C gives a traceback
    import pathlib
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn, TextIO

    from hlat_jax.host.watchdog import Watchdog

INDEX_FOLDER = "index"  # of the run folder: offsets of the lines of JSONL files; may be deleted at any time
LOCK_FILE = ".lock"
_CREATED_AT_START = {LOCK_FILE, INDEX_FOLDER, "checkpoints", "events.jsonl"}
_STOPPING_S = 15.0
_PATIENCE_S = 0.2
_partial: list[pathlib.Path] = []  # folders that an interrupt removes
_pipe: tuple[int, int] | None = None  # gets a byte for each signal; None outside of commands
_ending = threading.Event()
_terminated_s = 0.0  # time.monotonic() of the first SIGTERM or SIGUSR1, whether or not the main thread answered it


def exit_on_interrupt() -> None:
    """Makes Ctrl-C end this process at once, with one line on stderr and exit code 130.

    For commands. A KeyboardInterrupt would be lost if a library catches or cannot raise it, as in imports and in
    callbacks of the garbage collector. Threads of XLA crash in the teardown after it.
    """
    global _pipe
    _open_standard_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it stays ignored in a background job
        signal.signal(signal.SIGINT, _end_on_interrupt)
    elif signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return
    _pipe = os.pipe()
    for end in _pipe:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_leave_signals_alone)  # one line, ours; and a child's SIGTERM is not ours
    threading.Thread(target=_watch, name="hlat-interrupts", daemon=True).start()


def replace_unprintable() -> None:
    """Makes standard output replace text that its encoding lacks, as standard error always does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _open_standard_streams() -> None:
    """Opens /dev/null for each standard stream that is closed; the next file opened would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process


def drop_unwritable() -> None:
    """Makes standard output and error drop text that cannot be written, so that no print ends the process.

    For a command with its results in files. The reader of its output may be gone, or the disk of its log full. Each
    line is written at once, so that it is in a log file while the process works.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(getattr(stream, "buffer", None), (io.BufferedWriter, io.FileIO)):  # else it is in memory
            with contextlib.suppress(OSError):
                stream.flush()
            raw = io.BufferedWriter(_LossyOutput(stream.fileno(), "standard output" if name == "stdout" else ""))
            options = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": True}
            setattr(sys, name, io.TextIOWrapper(raw, **options))


class _LossyOutput(io.RawIOBase):
    """Writes to a descriptor; what fails is dropped, the first time with a line on stderr that has `name`, if any."""

    def __init__(self, descriptor: int, name: str):
        self._descriptor, self._name = descriptor, name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another program made the descriptor, which it shares, non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                if self._name:
                    _say(f"{self._name} cannot be written ({error.strerror}). The run continues and records its rows")
                    self._name = ""
                return len(data)


def is_terminal(stream: TextIO | int) -> bool:
    """Returns whether a stream, or a descriptor, is a terminal that knows control sequences (not TERM=dumb)."""
    is_tty = os.isatty(stream) if isinstance(stream, int) else stream.isatty()
    return is_tty and os.environ.get("TERM") != "dumb"


def _leave_signals_alone() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        handler = signal.getsignal(number)
        if handler is _end_on_interrupt or isinstance(getattr(handler, "__self__", None), StopSignals):
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def ending_when_stopped(code: int) -> Iterator[None]:
    """Makes SIGTERM and SIGUSR1 end this process at once with a code, in a block with nothing to save yet.

    The first process of a container would ignore them by default.
    """

    def end(number: int, _: Any) -> NoReturn:
        _say(f"stopped by {signal.Signals(number).name} before the run was opened: nothing to save")
        os._exit(code)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_interrupted(*, line: str = "interrupted") -> NoReturn:
    """Ends this process at once with code 130, after `line` on stderr. A second call does not wait for the first."""
    if _ending.is_set():  # which may wait for a pipe that nobody reads
        os._exit(130)
    _ending.set()
    _say(line)
    for folder in _partial:
        shutil.rmtree(folder, ignore_errors=True)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # there is none, or this interrupted a write to it
            stream.flush()
    os._exit(130)


def _end_on_interrupt(_number: int, _frame: Any) -> None:
    if _take_interrupt():
        end_interrupted()


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        erased = "\r\x1b[K" * is_terminal(2)  # a progress bar
        os.write(2, f"{erased}{line}\n".encode())


def _watch() -> None:
    """Answers interrupts while the main thread is in C++ code, such as XLA's compiler: no handler of Python runs then.

    Such a handler runs in the main thread only, but the signal is in the pipe at once. Each is answered once, by the
    thread that takes it from the pipe.
    """
    while True:
        select.select(_pipe[:1], [], [])
        time.sleep(_PATIENCE_S)  # the main thread comes first
        handler = signal.getsignal(signal.SIGINT)
        if handler is _end_on_interrupt or isinstance(getattr(handler, "__self__", None), StopSignals):
            threading.Thread(target=handler, args=(signal.SIGINT, None), daemon=True).start()
        else:
            _take_interrupt()


def began_s() -> float:
    """Returns the start of this process in time.monotonic(), or now if the system does not provide it."""
    now_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return now_s - max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return now_s


def seconds_since_stop_signal() -> float:
    """Returns the time since the first SIGTERM or SIGUSR1, even if the main thread has not handled it, or 0."""
    return time.monotonic() - _terminated_s if _terminated_s else 0.0


def _take_interrupt() -> bool:
    """Returns whether there is an interrupt to answer, and takes it."""
    global _terminated_s
    if _pipe is None:
        return True
    with contextlib.suppress(BlockingIOError):
        while number := os.read(_pipe[0], 1):
            if number[0] == signal.SIGINT:
                return True
            if number[0] in (signal.SIGTERM, signal.SIGUSR1):
                _terminated_s = _terminated_s or time.monotonic()
    if threading.current_thread() is not threading.main_thread():
        return False
    if _ending.is_set():
        time.sleep(_STOPPING_S)  # another thread ends this process: write nothing more
    at_present = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    signal.set_wakeup_fd(at_present, warn_on_full_buffer=False)
    return at_present != _pipe[1]  # an event loop, such as Orbax's, takes all signals while it runs


@contextlib.contextmanager
def removed_on_interrupt(folder: pathlib.Path) -> Iterator[None]:
    """Removes `folder` if Ctrl-C ends the command in the body. `finally` clauses in the body do not run then."""
    _partial.append(folder)
    try:
        yield
    finally:
        _partial.remove(folder)


@contextlib.contextmanager
def only_process(workdir: pathlib.Path) -> Iterator[None]:
    """Locks the run folder, as a second process in it would overwrite the rows and saves of the first.

    A new folder is removed after a ValueError, unless the run has written files into it.
    """
    is_new = not workdir.exists()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK_FILE, "w")  # noqa: SIM115 - held until the run ends
    except OSError as error:
        raise ValueError(f"cannot write to {workdir}: {error.strerror}. Give another folder with --workdir.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is training in {workdir}. Stop it, or give another --workdir.") from None
        try:
            yield
        except ValueError:
            if is_new and _is_same_file(lock.fileno(), workdir / LOCK_FILE):  # else the folder is away, or another
                saved = any((workdir / "checkpoints").glob("*"))
                if not saved and {path.name for path in workdir.iterdir()} <= _CREATED_AT_START:
                    shutil.rmtree(workdir)
            raise


def _is_same_file(descriptor: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def closing_quietly(thing: Any) -> Iterator[Any]:
    """Closes `thing` at the end. After an error in the body, errors while closing are dropped."""
    try:
        yield thing
    except BaseException:
        with contextlib.suppress(Exception):
            thing.close()
        raise
    thing.close()


class StopSignals:
    """Turns SIGTERM, SIGUSR1, SIGHUP and SIGINT into `name`, which the loop reads.

    SIGINT prints a line on stderr. It ends the process at once if nothing is `unfinished`. A second SIGINT always does.

    Attributes:
      name: the signal that came first, "" before it.
      unfinished: the work that the run finishes before it stops, "" while an immediate end loses nothing.
      saved_step: the step of the newest checkpoint, 0 without one.
    """

    def __init__(self, watchdog: Watchdog | None = None, *, alone: bool = True):
        """`alone` says that no other process would wait for this one: otherwise it ends only where all of them do."""
        from hlat_jax.host.watchdog import Watchdog

        self.name, self.unfinished, self.saved_step = "", "", 0
        self.watchdog, self._alone = watchdog or Watchdog(), alone

    @property
    def doing(self) -> str:
        """The phase of the run, such as "compiling"."""
        return self.watchdog.doing

    def __enter__(self):
        numbers = [signal.SIGTERM, signal.SIGUSR1]
        for number in (signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # in a background job, or under nohup
                numbers.append(number)
        self._before = {number: signal.signal(number, self._ask) for number in numbers}
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def phase(
        self, doing: str, *, unfinished: str | None = None, status: Callable[[], Any] | None = None
    ) -> Iterator[None]:
        """Tells the watchdog, the ledger and the message after Ctrl-C the phase of the run in the block.

        After an error the phase stays, so that messages name the phase of the error.

        Args:
          doing: the phase, such as "compiling". The previous phase begins again after the block.
          unfinished: the attribute for the length of the block. By default it stays.
          status: a function with a result that changes while the block makes progress.
        """
        doing_before, unfinished_before = self.doing, self.unfinished
        self.watchdog.begin(doing, status=status)
        if unfinished is not None:
            self.unfinished = unfinished
        yield
        self.watchdog.begin(doing_before)
        if unfinished is not None:
            self.unfinished = unfinished_before

    def _ask(self, number, _frame):
        if number != signal.SIGINT:
            self.name = self.name or signal.Signals(number).name
            if number == signal.SIGHUP:  # the terminal was closed, and to write to it is an error
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for stream in self._terminals:
                    os.dup2(nowhere, stream)
                os.close(nowhere)
        elif self._is_in_a_command() and not _take_interrupt():
            return
        elif self.name:
            last = "run the same command to resume from the last checkpoint, or to start again without one"
            self._stop(f"interrupted, {last}")
        elif self._alone and not self.unfinished:
            last = f"the last checkpoint is step {self.saved_step}" if self.saved_step else "there is no checkpoint yet"
            self._stop(f"interrupted while {self.doing} with nothing to save, and {last}")
        else:
            self.name = "SIGINT"
            what = f", finishing {self.unfinished}" if self.unfinished else f" while {self.doing}, all processes stop"
            _say(f"interrupted{what}. Press Ctrl-C again to stop at once")

    def _stop(self, line: str) -> NoReturn:
        if self._is_in_a_command():
            end_interrupted(line=line)
        raise KeyboardInterrupt

    def _is_in_a_command(self) -> bool:
        return self._before[signal.SIGINT] is _end_on_interrupt
