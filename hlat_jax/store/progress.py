"""Progress of a long command: a bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from hlat_jax.host import process
from hlat_jax.store.metrics import duration

_BAR_CHARS = 24
_REDRAW_S = 0.2
_LINE_S = 30.0


class Status:
    """Progress that a command updates and a ProgressBar shows: the share done, from 0 to 1, and a text."""

    def __init__(self, text: str = ""):
        self.share, self.text = 0.0, text

    def __call__(self) -> tuple[float, str]:
        return self.share, self.text


@contextlib.contextmanager
def show_progress(text: str) -> Iterator[Status]:
    """Yields a Status, with `text` at first, and shows it on stderr while the block updates it."""
    status = Status(text)
    with ProgressBar(status, stream=sys.stderr):
        yield status


class ProgressBar:
    """A context manager with a thread that shows the result of `read`, (share done from 0 to 1, text).

    A share below the previous one begins another phase with a separate estimate. While it is 0, the time so far is
    shown. On a terminal the bar is redrawn in place and erased at the end. Elsewhere, or if not `in_place`, a line is
    printed every `line_s` (30 s), so a short command prints nothing.
    """

    def __init__(
        self,
        read: Callable[[], tuple[float, str]],
        *,
        stream: TextIO,
        line_s: float | None = None,
        in_place: bool = True,
    ):
        self._read, self._stream = read, stream
        self._is_terminal = in_place and process.is_terminal(stream)
        self._every_s = _REDRAW_S if self._is_terminal else line_s or _LINE_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> ProgressBar:
        self._start_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_terminal:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _show(self) -> None:
        shown, began_s = 0.0, self._start_s
        while not self._ended.wait(self._every_s):
            share, text = self._read()
            began_s = time.monotonic() if share < shown else began_s
            shown, elapsed_s = share, time.monotonic() - began_s
            done, times = f"{share:4.0%}" if share else "    ", duration(elapsed_s) if not share else ""
            if 0.01 <= share < 1:
                times = f"{duration(elapsed_s * (1 - share) / share)} left"
            line = f"{done}  {text}  {times}"
            if self._is_terminal:
                filled = int(share * _BAR_CHARS)
                line = f"\r[{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {line}\x1b[K"
            self._stream.write(line if self._is_terminal else f"{line}\n")  # one: other threads print there too
            self._stream.flush()
