"""Reads utilization, memory and errors of the Neuron devices of this node from neuron-monitor while a run trains.

neuron-monitor writes one JSON object per line and period. A group of metrics may be missing, or have an `error` text in
place of values. Source: AWS Neuron docs, neuron-monitor user guide. Field names follow that guide.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import threading
from typing import Any

from hlat_jax.host.console import say

COMMAND = "neuron-monitor"
FIELDS = (
    "device_utilization",  # mean over the JAX devices that this process uses, in percent
    "device_utilization_min",  # of the least used one, of its physical cores where they are told apart (trn2)
    "device_memory_bytes",  # on all devices of the node that this process uses
    "device_host_memory_bytes",  # of the runtime, on the host
    "device_latency_s",  # median time of an execution on the device in the last period
    "device_errors",  # executions with an error since the start
    "device_numerical_errors",  # those of them with a numerical error
    "ecc_corrected",  # memory errors that were corrected, as the monitor counts them
    "ecc_uncorrected",  # those that were not
)
_COUNTED = ("device_errors", "device_numerical_errors")  # of a period in a report


def fields_of(report: Any, *, pid: int) -> dict[str, float]:
    """Returns the FIELDS that one object of neuron-monitor has, with errors as counts of its period.

    They belong to the process `pid`. If there is no such process, as in a container, all processes are read together.
    """
    values: dict[str, list[float]] = {name: [] for name in FIELDS}

    def add(name: str, *numbers: Any) -> None:
        values[name] += [value for value in numbers if type(value) in (int, float)]

    runtimes = [runtime for runtime in _list(_get(report, "neuron_runtime_data")) if not _get(runtime, "error")]
    for runtime in [runtime for runtime in runtimes if _get(runtime, "pid") == pid] or runtimes:
        for core in _dict(_get(runtime, "report", "neuroncore_counters", "neuroncores_in_use")).values():
            physical = _dict(_get(core, "v3d")).values() or [core]
            add("device_utilization", _get(core, "neuroncore_utilization"))
            add("device_utilization_min", *(_get(part, "neuroncore_utilization") for part in physical))
        used = _get(runtime, "report", "memory_used", "neuron_runtime_used_bytes")
        add("device_memory_bytes", _get(used, "neuron_device"))
        add("device_host_memory_bytes", _get(used, "host"))
        executions = _get(runtime, "report", "execution_stats")
        add("device_errors", *_dict(_get(executions, "error_summary")).values())
        for name in ("numerical", "numeric"):  # the guide's text says numeric, its example numerical
            add("device_numerical_errors", _get(executions, "error_summary", name))
        latencies = _get(executions, "latency_stats")
        add("device_latency_s", _get(_get(latencies, "device_latency") or _get(latencies, "total_latency"), "p50"))
    for device in _list(_get(report, "system_data", "neuron_hw_counters", "neuron_devices")):
        for name in ("corrected", "uncorrected"):
            add(f"ecc_{name}", _get(device, f"mem_ecc_{name}"), _get(device, f"sram_ecc_{name}"))
    combine = {"device_utilization": statistics.fmean, "device_utilization_min": min, "device_latency_s": max}
    return {name: combine.get(name, sum)(numbers) for name, numbers in values.items() if numbers}


def _get(value: Any, *path: str) -> Any:
    """Returns the part of a report at a path; None where there is none, or a group of metrics has an error."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict) and value.get("error"):
            return None
    return value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class NeuronMonitor:
    """Runs neuron-monitor, if it is configured and installed, and keeps its newest report.

    A monitor that is missing, fails or ends is reported in one line and does not end the run.
    """

    def __init__(self, choice: str, *, platform: str):
        """Starts it; `choice` is `metrics.neuron_monitor`, whose "auto" starts it on the platform neuron alone."""
        self._process: subprocess.Popen[str] | None = None
        self._newest: dict[str, float] = {}
        self._counted = dict.fromkeys(_COUNTED, 0.0)
        if choice == "off" or (choice == "auto" and platform != "neuron"):
            return
        path = shutil.which(COMMAND) or shutil.which(COMMAND, path="/opt/aws/neuron/bin")
        if path is None:
            say(COMMAND, "not found, so metrics.jsonl has no utilization of the devices (metrics.neuron_monitor)")
            return
        try:  # in a session of its own: Ctrl-C is for the run
            self._process = subprocess.Popen(
                [path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            say(COMMAND, f"not started: {error}")
            return
        self._thread = threading.Thread(target=self._read, args=(self._process,), name=COMMAND, daemon=True)
        self._thread.start()

    def row_fields(self) -> dict[str, float]:
        """Returns the FIELDS of the newest report for a row, or none before the first and after the monitor's end."""
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
            fields = fields_of(report, pid=os.getpid())
            for name in _COUNTED:
                self._counted[name] += fields.get(name, 0.0)
                if name in fields:
                    fields[name] = self._counted[name]
            self._newest = fields
        self._newest = {}  # what ended knows nothing of the steps that follow
        if self._process is not None:
            say(COMMAND, f"ended with code {process.wait()}, so rows have no utilization from here on")
