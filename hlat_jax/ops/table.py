"""Measured times of implementations: a file that is written once, committed, and honoured by every run that names it.

So numerics do not depend on a race: what was the fastest on the day of the measurement stays chosen. Owns the file and
whose it is. Refuses to measure; that is `tune`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from hlat_jax.ops.registry import OPS
from hlat_jax.store.atomic_files import read_json

_AGAIN = "python -m hlat_jax.plan tune --config=NAME --out=FILE"
PLANNED = "planned"  # the kind of a device that need not exist, as planner.trace has it


@dataclasses.dataclass(frozen=True)
class Entry:
    """One call and what it took.

    Attributes:
      op: key of the op.
      facts: of the call, as JSON has them.
      times: implementation -> median seconds of forward and backward pass.
      winner: the fastest of them.
      passed_over: implementation -> why it was not measured.
      rows_measured: rows of the batch that were timed, where memory or patience has fewer than the call.
    """

    op: str
    facts: Mapping[str, Any]
    times: Mapping[str, float]
    winner: str
    passed_over: Mapping[str, str]
    rows_measured: int

    @property
    def extent(self) -> str:
        """What of the call was timed, as a reason says it; "" for all of it."""
        num_rows = next(value for name, value in self.facts.items() if name.endswith("_shape"))[0]
        return "" if self.rows_measured == num_rows else f" (at {self.rows_measured} of its {num_rows} rows)"


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of a file; see `read`.

    Attributes:
      path: of the file.
      platform: of the device it was made on.
      device_kind: likewise.
      jax: version it was made with.
      entries: all of them.
    """

    path: str
    platform: str
    device_kind: str
    jax: str
    entries: tuple[Entry, ...]

    @property
    def source(self) -> str:
        """What a reason calls the table: its path, and the version of JAX where that was another."""
        return self.path if self.jax == jax.__version__ else f"{self.path}, made with JAX {self.jax}"

    def entry(self, op_key: str, facts: Mapping[str, Any]) -> Entry | None:
        """Returns what a call with these facts took; None: it was not measured."""
        plain = as_json(facts)
        return next((entry for entry in self.entries if entry.op == op_key and entry.facts == plain), None)

    def with_entries(self, found: tuple[Entry, ...]) -> Table:
        """Returns the table with entries in the place of those of the same calls, and after the others."""
        new = [(entry.op, entry.facts) for entry in found]
        kept = tuple(entry for entry in self.entries if (entry.op, entry.facts) not in new)
        return dataclasses.replace(self, entries=kept + found)


def device_kind(device: Any) -> str:
    """Returns what a device is, such as "NVIDIA H200"; of a CPU, which JAX does not tell apart, its model name."""
    if device.platform != "cpu" or device.device_kind == PLANNED:
        return device.device_kind
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return device.device_kind
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else device.device_kind


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts as they look once they have been through a file."""
    return json.loads(json.dumps(facts))


def read(path: str) -> Table:
    """Returns the table in a file.

    Raises:
      ValueError: no such file, or one that is no table: times that are none, or of what the op does not have.
    """
    try:
        tree = read_json(pathlib.Path(path), allow_nan=True)  # refused below, with its entry
        entries = tuple(Entry(**entry) for entry in tree.pop("entries"))
        for number, entry in enumerate(entries):
            _check(entry, f"entry {number}, {entry.op} at {dict(entry.facts)},")
        return Table(path=path, entries=entries, **tree)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); make it with {_AGAIN}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no table of measured times ({error}); make it again with {_AGAIN}.") from error


def _check(entry: Entry, said: str) -> None:
    names = next((op.names for op in OPS.values() if op.key == entry.op), None)
    if names is None:
        raise ValueError(f"{said} is of no op: those are {', '.join(op.key for op in OPS.values())}")
    for name, seconds in entry.times.items():
        if name not in names:
            raise ValueError(f"{said} has a time of {name!r}, which is not one of {', '.join(names)}")
        if not isinstance(seconds, float) or not 0 < seconds < math.inf:
            raise ValueError(f"{said} has {seconds!r} for {name}, which is no float of seconds above 0")
    if type(entry.rows_measured) is not int or not isinstance(entry.passed_over, dict):
        raise ValueError(f"{said} has rows_measured={entry.rows_measured!r}, passed_over={entry.passed_over!r}")
    if not entry.times or entry.winner != min(entry.times, key=entry.times.get):
        raise ValueError(f"{said} has winner {entry.winner!r} and times {dict(entry.times)}")


def read_for(path: str, *, platform: str, kind: str) -> Table:
    """Returns the table in a file for a device.

    Args:
      path: of the file.
      platform: of the device.
      kind: what `device_kind` says of it; PLANNED: it need not exist, and then its platform must be the table's.

    Raises:
      ValueError: as `read`, or a table made on a device of another kind.
    """
    table = read(path)
    if platform != table.platform or kind not in (table.device_kind, PLANNED):
        raise ValueError(
            f"model.ops_table={path} was made on {table.device_kind!r} ({table.platform}) and this is {kind!r} "
            f"({platform}); its times say nothing here. Make one for this device with {_AGAIN}, or set "
            "model.ops_table='' to choose by level."
        )
    return table


def write(table: Table) -> None:
    """Writes the table to its file."""
    tree = dataclasses.asdict(table)
    path = pathlib.Path(tree.pop("path"))
    path.write_text(json.dumps(tree, indent=1) + "\n")
