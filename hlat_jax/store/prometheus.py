"""The newest figures of a run as a file for node exporter's textfile collector.

Source: Prometheus, "Exposition formats", text-based format; node_exporter, "Textfile Collector".
"""

from __future__ import annotations

import collections
import os
import pathlib
import re
import time
from typing import Any

PROMETHEUS_FILE = "metrics.prom"
_PERIOD_S = 1.0  # between two writes: the collector reads the file a few times a minute
_COUNTED = ("nonfinite", "spike")  # of a row; a gauge of the last row alone would miss most of them


class PrometheusFile:
    """Writes rows to RUN/metrics.prom. It is a sink of `metrics.MetricsLog`.

    Every number of a row is a gauge `hlat_GROUP_KEY{run="NAME"}`. The label `part` has the rest of a key with a slash.
    Counters begin at 0 with each start, as Prometheus expects.
    """

    def __init__(self, workdir: pathlib.Path, *, num_steps: int):
        """Writes nothing yet. `num_steps` is the last step of the run, so that a rule can tell its end from a stall."""
        self._path, self._run, self._written_s = workdir / PROMETHEUS_FILE, workdir.resolve().name, float("-inf")
        self._gauges: dict[str, dict[str, float]] = {"hlat_train_num_steps": {"": num_steps}}  # name -> part -> value
        self._counts = collections.Counter(dict.fromkeys(_COUNTED, 0))

    def write(self, group: str, row: dict[str, Any]) -> None:
        """Takes the numbers of a row, and writes the file once a second."""
        for key, value in row.items():
            if isinstance(value, (int, float)):
                name, _, part = key.partition("/")
                self._gauges.setdefault(_name(group, name), {})[part] = float(value)
        self._gauges[_name(group, "time_seconds")] = {"": time.time()}
        if group == "train":
            self._counts.update({name: int(row.get(name, 0)) for name in _COUNTED})
        if time.monotonic() - self._written_s >= _PERIOD_S:
            self.close()

    def write_text(self, tag: str, step: int, text: str) -> None:
        """Does nothing: Prometheus has no texts."""

    def close(self) -> None:
        """Replaces the file."""
        series = [(name, "gauge", parts) for name, parts in self._gauges.items()]
        series += [(_name("train", f"{name}_total"), "counter", {"": self._counts[name]}) for name in _COUNTED]
        lines = []
        for name, kind, parts in series:
            lines.append(f"# TYPE {name} {kind}")
            for part, value in parts.items():
                label = f',part="{_escape(part)}"' if part else ""
                lines.append(f'{name}{{run="{_escape(self._run)}"{label}}} {value!r}')
        partial = self._path.with_suffix(".partial")  # the collector reads *.prom
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(partial, self._path)
        self._written_s = time.monotonic()


def _name(group: str, key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", f"hlat_{group}_{key}")


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
