"""The ledger of a run: what every second since its first start went to, over all restarts.

Process 0 appends events to EVENTS_FILE and, each second, replaces ALIVE_FILE by what it has spent its time on. A
process that was killed leaves that file behind, and the next one enters it. So what is not accounted for is what passed
between the last second of a process and its death.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from typing import Any

from hlat_jax.host.activity import WAITING, Activity
from hlat_jax.store.atomic_files import read_json

EVENTS_FILE, ALIVE_FILE = "events.jsonl", "alive.json"
# Account of `Activity.spent` -> category; all others are opening the run.
_CATEGORIES = {
    "compiling": "compile",
    "first step": "first step",
    "training": "training",
    "training again": "training again",
    "evaluating": "evaluation",
    "evaluating on tasks": "evaluation",
    "starting to save": "blocked on save",
    "saving": "blocked on save",
    "restoring the checkpoint": "restore",
    "waiting for data": "data wait",
    WAITING: "data wait",
    "stuck": "stuck",
    "stopped": "stopped",
    "unknown": "unknown",
}
CATEGORIES = tuple(dict.fromkeys([*_CATEGORIES.values()]))


class Ledger:
    """The events of this process, the first of its job."""

    def __init__(self, workdir: pathlib.Path, activity: Activity):
        """Begins a life of the run; enters what is left of the one before, if it was killed."""
        self._workdir, self._activity = workdir, activity
        left = _left(workdir)
        if left is not None:
            self.event("died", **left)
        activity.again_until = max([event.get("step", 0) for event in read_events(workdir)], default=0)
        self._began = {"pid": os.getpid(), "began": process_start()}
        self.event("start", **self._began)

    def event(self, name: str, **fields: Any) -> None:
        """Appends an event to the file, and returns once it is on the disk."""
        line = json.dumps({"event": name, "time": time.time(), **fields}) + "\n"
        with open(self._workdir / EVENTS_FILE, "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def beat(self) -> None:
        """Replaces ALIVE_FILE; called each second, by a thread."""
        path = self._workdir / ALIVE_FILE
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(self._account()))
        os.replace(partial, path)

    def end(self, name: str = "end", **fields: Any) -> None:
        """Ends this life."""
        self.event(name, **self._account(), **fields)
        (self._workdir / ALIVE_FILE).unlink(missing_ok=True)

    def _account(self) -> dict[str, Any]:
        spent = {account: round(seconds, 3) for account, seconds in self._activity.spent().items()}
        return {**self._began, "at": time.time(), "step": self._activity.step, "spent": spent}


def _left(workdir: pathlib.Path) -> dict[str, Any] | None:
    try:
        return read_json(workdir / ALIVE_FILE)
    except (OSError, ValueError):
        return None


def read_events(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events of a run, in order; a line that a kill has cut short is left out."""
    path, found = workdir / EVENTS_FILE, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Seconds by category, of `CATEGORIES`; they partition the time since the first start."""

    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        lines = [f"{name:<18} {spent:12.1f} s {spent / self.total_s:7.2%}" for name, spent in self.seconds.items()]
        return "\n".join([*lines, f"{'total':<18} {self.total_s:12.1f} s"])


def goodput(workdir: pathlib.Path) -> Goodput:
    """Returns what the time of a run went to, up to its end or, while it runs, its last second.

    Raises:
      ValueError: the folder has no ledger.
    """
    lives = [event for event in read_events(workdir) if "spent" in event]
    running = _left(workdir)
    lives += [running] if running is not None else []
    if not lives:
        raise ValueError(f"{workdir} has no {EVENTS_FILE}: it is not a run folder, or of an older version.")
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    before: float | None = None
    for life in lives:
        if before is not None:
            seconds["stopped"] += max(life["began"] - before, 0.0)
        spent = dict(life["spent"])
        if stuck_s := life.get("stuck_s", 0.0):
            phase = life["doing"]
            spent[phase] = max(spent.get(phase, 0.0) - stuck_s, 0.0)
            spent["stuck"] = stuck_s
        for account, each in spent.items():
            seconds[_CATEGORIES.get(account, "restore")] += each
        before = life["at"]
        seconds["unknown"] += max(before - life["began"] - sum(spent.values()), 0.0)
    return Goodput(seconds)


def process_start() -> float:
    """Returns the time at which this process began, in seconds since 1970."""
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    boot = time.time() - float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return boot + ticks
