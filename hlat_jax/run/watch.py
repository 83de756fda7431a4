"""`python -m hlat_jax.run watch RUN`: alerts about a run that trains elsewhere.

It reads the files of the run folder and imports no JAX. Times are measured with the clock of this process, because the
clocks of two machines may differ.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

from hlat_jax.config import count_text
from hlat_jax.run.goodput import ALIVE_FILE, COPYING, EVENTS_FILE, complete_step, goodput, newest_saved, read_events
from hlat_jax.store.metrics import ROWS_FILE
from hlat_jax.store.typed_json import read_json

# Alert -> exit code. 1 and 2 are errors of the command itself.
CODES = {"stalled": 3, "spike": 4, "not finite": 5, "store failing": 6, "goodput": 7, "corruption": 8}
_OF_EVENT = {"store_failed": "store failing", "corruption": "corruption"}
_WINDOW, _LEAST = 128, 64  # steps of the mean from which a spike differs, as train.spike_window; and the fewest
_HISTORY_BYTES = 1 << 18  # of rows before the watch, for that mean
_TIMEOUT_S = 10.0  # of the webhook
_LAST_TRIES, _TRY_S = 5, 2.0  # of the webhook at the end of the run


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits beyond which a run is an alert.

    Attributes:
      stalled_s: seconds without a new step or phase. 0 means never.
      spike_sigmas: standard deviations above the mean of the last steps, for runs that look for no spikes themselves.
      goodput: least share of the time spent on new steps. 0 allows any.
      goodput_s: seconds over which that share is measured.
    """

    stalled_s: float = 3600.0
    spike_sigmas: float = 6.0
    goodput: float = 0.0
    goodput_s: float = 3600.0


class Alert(NamedTuple):
    """A key of CODES, and a sentence."""

    kind: str
    text: str


class Watch:
    """Looks at a run again and again. Rows and events from before it are no alerts.

    Attributes:
      step: the newest step that has a row or that the run is at.
      is_complete: whether the run has made its last step and ended its copies.
    """

    def __init__(self, workdir: pathlib.Path, limits: Limits):
        """Raises ValueError if the folder is not that of a run."""
        self._workdir, self._limits = workdir, limits
        self._rows = workdir / ROWS_FILE
        self.is_complete = False
        events = read_events(workdir)
        self._num_events = len(events)
        if not events:
            raise ValueError(f"RUN={workdir} has no {EVENTS_FILE}: it is not a run folder, or its run has not begun.")
        self._windows = {key: collections.deque[float](maxlen=_WINDOW) for key in ("loss", "grad_norm")}
        self._inode, self._offset = self._state_of_rows()
        self._offset = max(self._offset - _HISTORY_BYTES, 0)
        rows = self._new_rows(())
        for row in rows:
            self._is_spike(row)
        steps = [row["step"] for row in rows if "loss" in row] or [
            event["life"]["step"] for event in events if "life" in event
        ]
        self.step = steps[-1] if steps else 0
        self._progress: Any = None
        self._since_s, self._told = 0.0, set[str]()
        self._trained: collections.deque[tuple[float, float]] = collections.deque()  # (when, seconds of training)

    def look(self, now_s: float) -> list[Alert]:
        """Returns the new alerts. `now_s` is the time of a clock that does not jump.

        Raises:
          ValueError: the events of the run are gone.
        """
        events, alive = read_events(self._workdir), None
        if not events:
            raise ValueError(f"{self._workdir / EVENTS_FILE} is gone, or empty now. Was the run folder moved?")
        with contextlib.suppress(OSError, ValueError):
            alive = read_json(self._workdir / ALIVE_FILE)
        new = events[self._num_events :]
        self._num_events = len(events)
        rows = [row for row in self._new_rows(events) if "loss" in row]
        last_step = complete_step(events)
        self.is_complete = bool(last_step)
        self.step = max(alive.get("step", 0) if alive else 0, rows[-1]["step"] if rows else self.step, last_step)
        alerts = self._of_rows(rows)
        for event in new:
            if kind := _OF_EVENT.get(event["event"]):
                facts = {key: value for key, value in event.items() if key not in ("event", "time")}
                alerts.append(Alert(kind, ", ".join(f"{key} {value}" for key, value in facts.items())))
        if not self.is_complete:
            alerts += self._stalled(now_s, alive, events[-1]) + self._goodput(now_s)
        return alerts

    def _of_rows(self, rows: Sequence[dict[str, Any]]) -> list[Alert]:
        alerts = []
        broken = [row for row in rows if row.get("nonfinite")]
        spikes = [row for row in rows if self._is_spike(row) and not row.get("nonfinite")]
        for kind, found in (("not finite", broken), ("spike", spikes)):
            if found:
                more = f", and {count_text(len(found) - 1, 'step')} after it" if len(found) > 1 else ""
                values = f"loss {found[0]['loss']:.4g}, gradient norm {found[0].get('grad_norm', math.nan):.4g}"
                alerts.append(Alert(kind, f"step {found[0]['step']}: {values}{more}"))
        return alerts

    def _is_spike(self, row: dict[str, Any]) -> bool:
        """Returns whether the run, or if it looks for none the statistics here, find a spike in a row."""
        found = False
        for key, window in self._windows.items():
            value = row.get(key, math.nan)
            if math.isfinite(value):
                if len(window) >= _LEAST:
                    most = statistics.fmean(window) + self._limits.spike_sigmas * statistics.pstdev(window)
                    found, value = found or value > most, min(value, most)
                window.append(value)
        return bool(row.get("spike", found))

    def _stalled(self, now_s: float, alive: dict[str, Any] | None, last: dict[str, Any]) -> list[Alert]:
        doing = alive.get("doing", "") if alive else ""
        if (progress := (self.step, doing, self._num_events, self._offset)) != self._progress:
            self._progress, self._since_s = progress, now_s
            self._told.discard("stalled")
        idle_s = now_s - self._since_s
        if not 0 < self._limits.stalled_s <= idle_s or "stalled" in self._told:
            return []
        self._told.add("stalled")
        if doing == COPYING:
            text = f"the copy of the last checkpoint, step {self.step}, has not ended for {idle_s:.0f} s"
            return [Alert("store failing", f"{text}. The run folder has it. If the run has ended, run it again")]
        state = f"while {doing}" if doing else "and no process trains"
        state += f" ({last['error']})" if last.get("error") else ""
        return [Alert("stalled", f"no progress for {idle_s:.0f} s after step {self.step}, {state}")]

    def _goodput(self, now_s: float) -> list[Alert]:
        if not self._limits.goodput:
            return []
        trained = self._trained
        trained.append((now_s, goodput(self._workdir).seconds["training"]))
        while len(trained) > 1 and now_s - trained[1][0] >= self._limits.goodput_s:
            trained.popleft()
        over_s = now_s - trained[0][0]
        share = (trained[-1][1] - trained[0][1]) / over_s if over_s > 0 else 1.0
        if over_s < self._limits.goodput_s or share >= self._limits.goodput:
            if share >= self._limits.goodput:
                self._told.discard("goodput")
            return []
        if "goodput" in self._told:
            return []
        self._told.add("goodput")
        return [Alert("goodput", f"{share:.1%} of the last {over_s:.0f} s, below {self._limits.goodput:.1%}")]

    def _state_of_rows(self) -> tuple[int, int]:
        """Returns (inode, bytes) of the file of rows, or zeros without one."""
        with contextlib.suppress(FileNotFoundError):
            stat = os.stat(self._rows)
            return stat.st_ino, stat.st_size
        return 0, 0

    def _new_rows(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows since the last call. After a resumption, with a new file, it returns the added rows."""
        (inode, size), after = self._state_of_rows(), -1
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, after = inode, 0, _resumed_step(events)
        if size == self._offset:
            return []
        with open(self._rows, "rb") as file:
            file.seek(self._offset)
            raw = file.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # a damaged line
                row = json.loads(line)
                if isinstance(row, dict) and row.get("step", -1) > after:
                    rows.append(row)
        return rows


def _resumed_step(events: Sequence[dict[str, Any]]) -> int:
    """Returns the step of the checkpoint from which the newest start resumed."""
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    end = starts[-1] if starts else 0
    is_rewound = [event["event"] for event in events[end + 1 : end + 2]] == ["rewound"]
    return newest_saved([*events[:end], *(events[end + 1 : end + 2] if is_rewound else ())])


def check_webhook(url: str) -> None:
    """Raises ValueError unless `url` is a web address or "". The message leaves out the path, which may be secret."""
    parts = urllib.parse.urlsplit(url)
    if url and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError(f"--webhook={parts.scheme}:... must begin with http:// or https:// and name a host.")


def watch(workdir: pathlib.Path, limits: Limits, *, webhook: str = "", every_s: float = 10.0) -> int:
    """Watches until the run is complete, and returns 0. Without a webhook, the exit code of the first alert ends it.

    Raises:
      ValueError: the folder is not that of a run, or its events vanish.
      OSError: the webhook did not take an alert until the run was complete.
    """
    seen, pending = Watch(workdir, limits), collections.deque[Alert]()
    tries = 0
    while True:
        if not pending or not seen.is_complete:
            for alert in seen.look(time.monotonic()):
                print(f"{alert.kind}: {alert.text}", flush=True)
                if not webhook:
                    return CODES[alert.kind]
                pending.append(alert)
        while pending and not (problem := _send(webhook, pending[0], workdir=workdir, step=seen.step)):
            pending.popleft()
        if seen.is_complete and not pending:
            print(f"complete: {workdir} is at step {seen.step}.")
            return 0
        if pending:
            host = urllib.parse.urlsplit(webhook).hostname
            print(f"the webhook on {host} did not take an alert: {problem}. It is tried again.", file=sys.stderr)
            tries += seen.is_complete
            if tries >= _LAST_TRIES:
                raise OSError(f"the webhook on {host} did not take {count_text(len(pending), 'alert')}: {problem}")
        time.sleep(min(every_s, _TRY_S) if seen.is_complete else every_s)


def _send(url: str, alert: Alert, *, workdir: pathlib.Path, step: int) -> str:
    """Posts an alert as JSON, with `text` for chats. Returns why it was not taken, or ""."""
    text = f"{workdir.name}: {alert.kind}: {alert.text}"
    body = {"text": text, "run": str(workdir), "alert": alert.kind, "step": step, "code": CODES[alert.kind]}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}"
    except OSError as error:  # URLError and timeouts are
        return " ".join(str(getattr(error, "reason", error)).split())
