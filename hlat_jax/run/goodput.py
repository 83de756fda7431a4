"""Accounts for every second of a run since its first start by category, over all restarts.

A life is one process 0 of the run, from its start to its end. It appends events to EVENTS_FILE, and a thread replaces
ALIVE_FILE by the account of the life each second. A killed life leaves that file, and the next life enters it in the
events. So a killed life's time after its last account, a second at most, counts as stopped. See docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, TypedDict

from hlat_jax.config import count_text
from hlat_jax.host.watchdog import WAITING, Watchdog
from hlat_jax.store.atomic_files import to_disk
from hlat_jax.store.metrics import duration
from hlat_jax.store.typed_json import Seconds, read_json, read_lines

EVENTS_FILE, ALIVE_FILE = "events.jsonl", "alive.json"
COPYING = "copying the last checkpoint"  # account of the time after the last save
_USEFUL, _UNKNOWN, _STUCK, _STOPPED, _OTHER = "training", "unknown", "stuck", "stopped", "opening and closing"
# Account of `Watchdog.seconds_by_account` -> category; all others are _OTHER.
_CATEGORIES = {
    "training": _USEFUL,
    "training again": "training again",
    "first step": "first step",
    "compiling": "compile",
    "checking the devices": "device checks",
    "evaluating": "evaluation",
    "evaluating on tasks": "evaluation",
    "starting to save": "blocked on save",
    "saving": "blocked on save",
    "restoring the checkpoint": "restore",
    "fetching the checkpoint": "restore",
    COPYING: "blocked on save",
    "waiting for data": "data wait",
    WAITING: "data wait",
    _STUCK: _STUCK,
    _STOPPED: _STOPPED,
}
CATEGORIES = tuple(dict.fromkeys([*_CATEGORIES.values(), _OTHER, _UNKNOWN]))
_PERIOD_S = 1.0
_JOIN_S = 5.0  # for an entry that a disk does not take


class _Start(TypedDict):
    pid: int
    host: str
    began: Seconds


class _Account(_Start):
    life_s: Seconds
    step: int
    spent: dict[str, Seconds]


class _Event(TypedDict):
    event: str
    time: Seconds


class _StartEvent(_Event, _Start): ...


class _StepEvent(_Event):
    step: int


class _EndEvent(_Event):
    life: _Account


_KINDS = {"start": _StartEvent, "saved": _StepEvent, "rewound": _StepEvent, "died": _EndEvent, "end": _EndEvent}
_KINDS["complete"] = _StepEvent


class Ledger:
    """The ledger of process 0 within a `with` block, which begins with `begin` or the first event."""

    def __init__(self, workdir: pathlib.Path, watchdog: Watchdog):
        """Changes nothing."""
        self._workdir, self._watchdog = workdir, watchdog
        self._beating, self._over = threading.Lock(), threading.Event()
        self._has_begun, self._complete_step = False, 0
        self._thread = threading.Thread(target=self._run, name="hlat-ledger", daemon=True)
        self._earlier: list[dict[str, Any]] = []
        began = time.time() - (time.monotonic() - watchdog.began_s)
        self._began = {"pid": os.getpid(), "host": socket.gethostname(), "began": began}

    def __enter__(self):
        return self

    def begin(self) -> None:
        """Enters this start, and the death of the previous life if that life could not."""
        if self._has_begun:
            return
        self._has_begun = True
        left = _unfinished_life(self._workdir)
        if left is not None and "spent" not in _recorded_lives(self._workdir).get(_process(left), {}):
            self.event("died", life=left)
        self._earlier = list(_recorded_lives(self._workdir).values())
        self._watchdog.again_until = max((life.get("step", 0) for life in self._earlier), default=0)
        self.event("start", **self._began, versions=_versions())
        self.beat()
        self._watchdog.beat = self.beat
        self._thread.start()

    def __exit__(self, _type, error, _traceback):
        if not self._thread.is_alive():
            return
        self._over.set()
        self._thread.join(_JOIN_S)
        self._watchdog.beat = None
        with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
            if self._complete_step and error is None:
                self.event("complete", step=self._complete_step)
            self.event("end", life=self._life(), error=f"{type(error).__name__}: {error}" if error else "")
            (self._workdir / ALIVE_FILE).unlink(missing_ok=True)

    def finish(self, step: int) -> None:
        """Enters at the end that the run is complete, unless an earlier life did and this one enters nothing else."""
        self._complete_step = step
        if not complete_step(read_events(self._workdir)):
            self.begin()

    def event(self, name: str, **fields: Any) -> None:
        """Appends an event to the file, and returns after it is on the disk."""
        self.begin()
        line = json.dumps({"event": name, "time": time.time(), **fields}).encode() + b"\n"
        with open(self._workdir / EVENTS_FILE, "ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else b"\n" + line  # a kill has cut the line before short
            file.write(line)
            to_disk(file)

    def goodput(self) -> Goodput:
        """Returns the time of the run by category, up to now."""
        self.begin()
        return _partition([*self._earlier, self._life()])

    def beat(self) -> None:
        """Replaces ALIVE_FILE."""
        path = self._workdir / ALIVE_FILE
        partial = path.with_suffix(".partial")
        with self._beating:
            partial.write_text(json.dumps(self._life()))
            os.replace(partial, path)

    def _life(self) -> dict[str, Any]:
        watchdog, spent = self._watchdog, self._watchdog.seconds_by_account()
        if stuck_s := min(watchdog.stuck_s, spent.get(watchdog.account, 0.0)):
            spent[watchdog.account] -= stuck_s
            spent[_STUCK] = stuck_s
        return {
            **self._began,
            "at": time.time(),
            "life_s": time.monotonic() - watchdog.began_s,
            "step": watchdog.step,
            "doing": watchdog.doing,
            "spent": {account: round(seconds, 4) for account, seconds in spent.items()},
        }

    def _run(self) -> None:
        while not self._over.wait(_PERIOD_S):
            with contextlib.suppress(OSError):  # the disk is full, or the folder gone: the loop says so
                self.beat()


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The time of a run by category, from its first start to its last entry.

    Attributes:
      seconds: each of `CATEGORIES` -> seconds. They add up to that time.
      num_starts: the number of lives of the run.
    """

    seconds: dict[str, float]
    num_starts: int

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Each category -> its share of the time."""
        return {name: seconds / max(self.total_s, 1e-9) for name, seconds in self.seconds.items()}

    def line(self) -> str:
        """Returns one line with the shares of at least 0.1 %, the largest first."""
        shares = sorted(self.shares.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{share:.1%} {name}" for name, share in shares if share >= 0.001)
        return f"{parts}, {duration(self.total_s)} in {count_text(self.num_starts, 'start')}"

    def __str__(self) -> str:
        rows, total_s = [*self.seconds.items(), ("total", self.total_s)], max(self.total_s, 1e-9)
        return "\n".join(f"{name:<20}{seconds:>14,.1f} s{seconds / total_s:>9.2%}" for name, seconds in rows)


def goodput(workdir: pathlib.Path) -> Goodput:
    """Returns the time of a run by category, up to its end or, while it runs, its last entry.

    Raises:
      ValueError: the folder has no ledger.
    """
    lives, left = _recorded_lives(workdir), _unfinished_life(workdir)
    if not lives:
        raise ValueError(f"{workdir} has no {EVENTS_FILE}. It is not a run folder, or an older version wrote it.")
    if left is not None and "spent" not in (life := lives.get(_process(left), left)):
        life.update(left)
    return _partition(list(lives.values()))


def _partition(lives: Sequence[dict[str, Any]]) -> Goodput:
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for life, later in itertools.zip_longest(lives, lives[1:]):
        spent = life.get("spent", {})
        for account, each in spent.items():
            seconds[_CATEGORIES.get(account, _OTHER)] += each
        seconds[_UNKNOWN] += max(life.get("life_s", 0.0) - sum(spent.values()), 0.0)
        if later is not None:
            ended = life["began"] + life.get("life_s", 0.0)
            between_s = max(later["began"] - ended, 0.0)
            if "spent" not in life:  # nothing is known but when it began
                seconds[_UNKNOWN] += between_s
                continue
            stuck_s = min(max(life.get("killed", ended) - ended, 0.0), between_s)
            seconds[_STUCK] += stuck_s
            seconds[_STOPPED] += between_s - stuck_s
    return Goodput(seconds, len(lives))


def read_events(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events of a run in order, without torn or damaged lines."""
    lines = read_lines(workdir / EVENTS_FILE, lambda event: _KINDS.get(str(event.get("event")), _Event))
    return [line.row for line in lines if line.row is not None]


def complete_step(events: Sequence[dict[str, Any]]) -> int:
    """Returns the last step of a run whose newest start made it and ended its copies, or 0."""
    last: dict[str, Any] = next((event for event in events[::-1] if event["event"] in ("start", "complete")), {})
    return last.get("step", 0)


def _versions() -> dict[str, str]:
    """Returns the versions of the packages that decide what a run computes."""
    found = {}
    for name in ("hlat_jax", "jax", "jaxlib", "libneuronxla", "neuronx-cc"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def newest_saved(events: Sequence[dict[str, Any]]) -> int:
    """Returns the step of the newest checkpoint in the events of a run, or 0 without one."""
    saved: set[int] = set()
    for event in events:
        if event["event"] == "saved":
            saved.add(event["step"])
        elif event["event"] == "rewound":
            saved = {step for step in saved if step <= event["step"]}
    return max(saved, default=0)


def _recorded_lives(workdir: pathlib.Path) -> dict[tuple, dict[str, Any]]:
    """Returns process -> life of the events; one that has ended has an account, and maybe the time of a kill."""
    lives: dict[tuple, dict[str, Any]] = {}
    for event in read_events(workdir):
        if event["event"] == "start":
            lives[_process(event)] = event
        elif event["event"] == "killed" and lives:  # by launch/restart.sh
            list(lives.values())[-1]["killed"] = event["time"]
        elif event["event"] in ("died", "end"):
            lives.setdefault(_process(event["life"]), {}).update(event["life"])  # {}: the line of its start is damaged
    return lives


def _unfinished_life(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the account that a life has left behind or, if it runs, still replaces; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(workdir / ALIVE_FILE, kind=_Account)
    return None


def _process(life: dict[str, Any]) -> tuple:
    return life["pid"], life["host"], life["began"]
