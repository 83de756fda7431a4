"""A file of measured times of implementations, by which `auto` chooses in every run whose config names the file.

Numerics thus do not depend on timings at start-up: the implementation that was fastest when measured stays chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from hlat_jax.facts.local_paths import local_path
from hlat_jax.ops.dialect import CallSpec
from hlat_jax.ops.registry import OPS
from hlat_jax.store.typed_json import read_json

_COMMAND = "python -m hlat_jax.plan tune --config=NAME --out=FILE"
PLANNED = "planned"  # device kind of virtual devices, as in parallel.virtual_devices


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measured times of one call.

    Attributes:
      op: key of the op.
      call: its spec, as read back from JSON.
      times: implementation -> median seconds of forward and backward pass.
      winner: the fastest implementation.
      passed_over: implementation -> why it was not measured.
      rows_measured: rows of the batch that were timed; they can be fewer than the call has.
    """

    op: str
    call: CallSpec
    times: Mapping[str, float]
    winner: str
    passed_over: Mapping[str, str]
    rows_measured: int

    @property
    def extent(self) -> str:
        """The part of the call that was timed, for messages; "" for all of it."""
        num_rows = next(value for name, value in self.call.items() if name.endswith("_shape"))[0]
        return "" if self.rows_measured == num_rows else f" (at {self.rows_measured} of its {num_rows} rows)"


@dataclasses.dataclass(frozen=True)
class Table:
    """The entries of a file; see `read`.

    Attributes:
      path: of the file.
      platform: of the device that was measured.
      device_kind: of that device, see `device_kind`.
      jax: version of JAX.
      entries: the measured calls.
    """

    path: str
    platform: str
    device_kind: str
    jax: str
    entries: tuple[Measurement, ...]

    @property
    def source(self) -> str:
        """The table's name in messages: its path, and its version of JAX where that is not the current one."""
        return self.path if self.jax == jax.__version__ else f"{self.path}, made with JAX {self.jax}"

    def entry(self, op_key: str, call: CallSpec) -> Measurement | None:
        """Returns the measurement of a call; None if it was not measured."""
        plain = as_json(call)
        return next((entry for entry in self.entries if entry.op == op_key and entry.call == plain), None)

    def with_entries(self, measured: tuple[Measurement, ...]) -> Table:
        """Returns the table with new entries appended; they replace those of the same calls."""
        new = [(entry.op, entry.call) for entry in measured]
        kept = tuple(entry for entry in self.entries if (entry.op, entry.call) not in new)
        return dataclasses.replace(self, entries=kept + measured)


def device_kind(device: Any) -> str:
    """Returns the kind of a device, such as "NVIDIA H200"; for a CPU its model name, which JAX does not report."""
    if device.platform != "cpu" or device.device_kind == PLANNED:
        return device.device_kind
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return device.device_kind
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else device.device_kind


def as_json(call: CallSpec) -> dict[str, Any]:
    """Returns the spec of a call as it is read back from a file."""
    return json.loads(json.dumps(call))


def read(path: str) -> Table:
    """Returns the table in a file.

    Raises:
      ValueError: the file is missing or not a table, or has an unknown implementation or a time that is not a positive
        float.
    """
    try:
        # `_check` rejects NaN, naming the entry
        tree = read_json(local_path(path, key="model.ops_table"), allow_nan=True)
        entries = tuple(Measurement(**entry) for entry in tree.pop("entries"))
        for number, entry in enumerate(entries):
            _check(entry, f"entry {number}, {entry.op} at {dict(entry.call)},")
        return Table(path=path, entries=entries, **tree)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); write it with {_COMMAND}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of measured times ({error}); write it again with {_COMMAND}."
        ) from error


def _check(entry: Measurement, where: str) -> None:
    names = next((op.names for op in OPS.values() if op.key == entry.op), None)
    if names is None:
        raise ValueError(f"{where} names an unknown op; ops are {', '.join(op.key for op in OPS.values())}")
    for name, seconds in entry.times.items():
        if name not in names:
            raise ValueError(f"{where} has a time of {name!r}, which is not one of {', '.join(names)}")
        if not isinstance(seconds, float) or not 0 < seconds < math.inf:
            raise ValueError(f"{where} has {seconds!r} for {name}, which must be seconds, a float above 0")


def read_for(path: str, *, platform: str, kind: str) -> Table:
    """Returns the table in a file for a device.

    Args:
      path: of the file.
      platform: of the device.
      kind: its `device_kind`; PLANNED for a virtual device, which fits any table of its platform.

    Raises:
      ValueError: as `read`, or the table was measured on another kind of device.
    """
    table = read(path)
    if platform != table.platform or kind not in (table.device_kind, PLANNED):
        raise ValueError(
            f"model.ops_table={path} was measured on {table.device_kind!r} ({table.platform}) and this device is "
            f"{kind!r} ({platform}). Measure this device with {_COMMAND}, or set model.ops_table='' to choose by level."
        )
    return table


def write(table: Table) -> None:
    """Writes the table to its file."""
    tree = dataclasses.asdict(table)
    path = pathlib.Path(tree.pop("path"))
    path.write_text(json.dumps(tree, indent=1) + "\n")
