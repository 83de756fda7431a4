"""Utilization, memory and errors of the Neuron devices of this node, read from neuron-monitor while a run trains.

neuron-monitor writes one JSON object per line and period. A group of metrics may be missing, or have an `error` text in
place of values. Source: AWS Neuron docs, neuron-monitor user guide, of which the names of the fields are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any

COMMAND = "neuron-monitor"
FIELDS = {
    "device_utilization": "mean over the JAX devices that this process uses, in percent",
    "device_utilization_min": "of the least used one, of its physical cores where they are told apart (trn2)",
    "device_memory_bytes": "on all devices of the node that this process uses",
    "device_host_memory_bytes": "of the runtime, on the host",
    "device_latency_s": "median time of an execution on the device in the last period",
    "device_errors": "executions with an error since the start",
    "device_numerical_errors": "those of them with a numerical error",
    "ecc_corrected": "memory errors that were corrected, as the monitor counts them",
    "ecc_uncorrected": "those that were not",
}
_COUNTED = ("device_errors", "device_numerical_errors")  # of a period in a report


def fields_of(report: Mapping[str, Any], *, pid: int) -> dict[str, float]:
    """Returns those of FIELDS that a report has, errors as counts of its period.

    Args:
      report: one object of neuron-monitor.
      pid: of the process to read; where the report has no such process, as in a container, all are read together.
    """
    runtimes = [one for one in _list(report.get("neuron_runtime_data")) if not one.get("error")]
    mine = [one for one in runtimes if one.get("pid") == pid] or runtimes
    groups = [one.get("report", {}) for one in mine]
    found: dict[str, list[float]] = {name: [] for name in FIELDS}
    for cores in _each(groups, "neuroncore_counters", "neuroncores_in_use"):
        for core in cores.values():
            found["device_utilization"] += _numbers(core, "neuroncore_utilization")
            for part in _dict(_dict(core).get("v3d")).values() or [core]:  # physical cores, or the only one
                found["device_utilization_min"] += _numbers(part, "neuroncore_utilization")
    for used in _each(groups, "memory_used", "neuron_runtime_used_bytes"):
        found["device_memory_bytes"] += _numbers(used, "neuron_device")
        found["device_host_memory_bytes"] += _numbers(used, "host")
    for errors in _each(groups, "execution_stats", "error_summary"):
        found["device_errors"] += _numbers(errors, *errors)
        # the guide's text says numeric, its example numerical
        found["device_numerical_errors"] += _numbers(errors, "numerical", "numeric")
    for latencies in _each(groups, "execution_stats", "latency_stats"):
        median = _dict(latencies.get("device_latency")) or _dict(latencies.get("total_latency"))
        found["device_latency_s"] += _numbers(median, "p50")
    for devices in _each([_dict(report.get("system_data"))], "neuron_hw_counters"):
        for device in _list(devices.get("neuron_devices")):
            for name in ("corrected", "uncorrected"):
                found[f"ecc_{name}"] += _numbers(device, f"mem_ecc_{name}", f"sram_ecc_{name}")
    combine = {"device_utilization": _mean, "device_utilization_min": min, "device_latency_s": max}
    return {name: combine.get(name, sum)(values) for name, values in found.items() if values}


def _each(groups: list[Any], name: str, part: str = "") -> Iterator[dict[str, Any]]:
    """Yields a group of metrics, or a part of it, from each report that has it without an error."""
    for group in groups:
        values = _dict(_dict(group).get(name))
        if values and not values.get("error"):
            yield _dict(values.get(part)) if part else values


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _numbers(values: Any, *names: str) -> list[float]:
    found = (_dict(values).get(name) for name in names)
    return [value for value in found if isinstance(value, (int, float)) and not isinstance(value, bool)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class NeuronMonitor:
    """Runs neuron-monitor, where it is wanted and installed, and keeps its newest report.

    A monitor that is missing, fails or ends is reported in one line and does not end the run.
    """

    def __init__(self, choice: str, *, platform: str):
        """Starts it.

        Args:
          choice: `metrics.neuron_monitor`.
          platform: of the devices; "auto" starts it on neuron alone.
        """
        self._process: subprocess.Popen[str] | None = None
        self._newest: dict[str, float] = {}
        self._counted = dict.fromkeys(_COUNTED, 0.0)
        if choice == "off" or (choice == "auto" and platform != "neuron"):
            return
        path = shutil.which(COMMAND) or shutil.which(COMMAND, path="/opt/aws/neuron/bin")
        if path is None:
            print(f"{COMMAND}   not found: no utilization of the devices in metrics.jsonl (metrics.neuron_monitor)")
            return
        try:  # in a session of its own: Ctrl-C is for the run
            self._process = subprocess.Popen(
                [path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            print(f"{COMMAND}   not started: {error}")
            return
        self._thread = threading.Thread(target=self._read, args=(self._process,), name=COMMAND, daemon=True)
        self._thread.start()

    def row_fields(self) -> dict[str, float]:
        """Returns the FIELDS of the newest report, for a row; none before the first, or after the monitor ended."""
        return dict(self._newest)

    def close(self) -> None:
        """Ends the monitor."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._thread.join(5)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                report = json.loads(line)
            except ValueError:
                continue
            found = fields_of(_dict(report), pid=os.getpid())
            for name in _COUNTED:
                self._counted[name] += found.get(name, 0.0)
                if name in found:
                    found[name] = self._counted[name]
            self._newest = found
        self._newest = {}  # what ended knows nothing of the steps that follow
        if self._process is not None:
            print(f"{COMMAND}   ended with code {process.wait()}: no utilization of the devices from here on")
