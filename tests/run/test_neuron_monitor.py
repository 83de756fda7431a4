"""What is read from neuron-monitor's reports. Their shape is that of the user guide; all values are invented."""

import copy
import json
import os
import time

import pytest
from refusals import assert_names

from hlat_jax.run.neuron_monitor import COMMAND, FIELDS, NeuronMonitor, fields_of


def core(percent, *physical):
    parts = {str(index): {"neuroncore_utilization": part} for index, part in enumerate(physical)}
    return {"neuroncore_utilization": percent, "flops": 10} | ({"v3d": parts} if parts else {})


def runtime(pid, cores, *, numerical="numerical"):
    return {
        "pid": pid, "neuron_runtime_tag": "job", "error": "",
        "report": {
            "neuroncore_counters": {"period": 1.0, "error": "", "neuroncores_in_use": cores},
            "execution_stats": {
                "period": 1.0, "error": "",
                "error_summary": {"generic": 1, numerical: 2, "transient": 0, "model": 0, "runtime": 0, "hardware": 4},
                "execution_summary": {"completed": 3},
                "latency_stats": {"total_latency": {"p0": 0.1, "p50": 0.3}, "device_latency": None},
            },
            "memory_used": {
                "period": 1.0, "error": "",
                "neuron_runtime_used_bytes": {"host": 7, "neuron_device": 100, "usage_breakdown": {}},
                "loaded_models": [],
            },
        },
    }  # fmt: skip


def report(*runtimes):
    devices = [
        {"neuron_device_index": index, "mem_ecc_corrected": 1, "mem_ecc_uncorrected": 0, "sram_ecc_uncorrected": index}
        for index in range(2)
    ]
    counters = {"period": 1.0, "error": "", "neuron_devices": devices}
    return {"neuron_runtime_data": list(runtimes), "system_data": {"neuron_hw_counters": counters}}


TRN1 = report(runtime(7, {"0": core(50.0), "1": core(90.0)}))
TRN2 = report(runtime(7, {"0": core(50.0, 10.0, 90.0), "1": core(80.0, 80.0, 80.0)}))


def without(tree, *path, **changes):
    """Returns a copy of a report with the fields at `path` changed."""
    tree = copy.deepcopy(tree)
    node = tree
    for key in path:
        node = node[key]
    node.update(changes)
    return tree


def test_fields_are_those_of_the_guide_and_each_is_read():
    found = fields_of(TRN1, pid=7)
    assert found == {
        "device_utilization": 70.0,
        "device_utilization_min": 50.0,
        "device_memory_bytes": 100,
        "device_host_memory_bytes": 7,
        "device_latency_s": 0.3,
        "device_errors": 7,
        "device_numerical_errors": 2,
        "ecc_corrected": 2,
        "ecc_uncorrected": 1,
    }
    assert tuple(found) == FIELDS
    assert fields_of(TRN2, pid=7)["device_utilization"] == 65.0
    assert fields_of(TRN2, pid=7)["device_utilization_min"] == 10.0  # of physical cores
    assert fields_of(report(runtime(7, {}, numerical="numeric")), pid=7)["device_numerical_errors"] == 2
    path = ("neuron_runtime_data", 0, "report", "execution_stats", "latency_stats")
    assert fields_of(without(TRN1, *path, device_latency={"p50": 0.2}), pid=7)["device_latency_s"] == 0.2


def test_only_the_own_process_counts_if_the_report_has_it():
    both = report(runtime(7, {"0": core(40.0)}), runtime(8, {"1": core(60.0)}))
    assert fields_of(both, pid=8)["device_utilization"] == 60.0
    assert fields_of(both, pid=1)["device_utilization"] == 50.0  # in a container pids are others
    assert fields_of(both, pid=1)["device_memory_bytes"] == 200


def test_group_with_an_error_or_of_another_shape_is_left_out():
    of_runtime = ("neuron_runtime_data", 0)
    for path, changes, gone in (
        ((*of_runtime, "report", "neuroncore_counters"), {"error": "busy"}, "device_utilization"),
        (of_runtime, {"error": "gone"}, "device_errors"),
        (of_runtime, {"report": None}, "device_errors"),
        ((*of_runtime, "report", "memory_used"), {"neuron_runtime_used_bytes": []}, "device_memory_bytes"),
        ((), {"neuron_runtime_data": None, "system_data": 3}, "device_utilization"),
    ):
        whole, found = fields_of(TRN1, pid=7), fields_of(without(TRN1, *path, **changes), pid=7)
        assert gone not in found
        assert found.items() <= whole.items()


def fake(folder, *lines, then="sleep 6000"):
    """Writes a neuron-monitor that prints lines; returns the PATH on which it is found."""
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    script = folder / COMMAND
    script.write_text(f"#!/bin/sh\necho $$ > {folder}/pid\ncat {folder}/lines\n{then}\n")
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def until(condition, timeout_s=600):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_monitor_gives_its_newest_report_and_ends_with_the_run(tmp_path, monkeypatch, capsys):
    of_us = json.dumps(TRN1).replace('"pid": 7', f'"pid": {os.getpid()}')
    monkeypatch.setenv("PATH", fake(tmp_path, of_us, "{torn", of_us.replace("50.0", "10.0"), then="exec sleep 6000"))
    monitor = NeuronMonitor("auto", platform="neuron")
    until(lambda: monitor.row_fields().get("device_utilization") == 50.0)
    assert monitor.row_fields()["device_errors"] == 14
    monitor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert capsys.readouterr().out == ""


def test_a_monitor_that_is_missing_or_ends_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", fake(tmp_path, json.dumps(TRN1), then="exit 3"))
    monitor = NeuronMonitor("on", platform="cpu")
    until(lambda: not monitor._thread.is_alive())
    assert monitor.row_fields() == {}
    monitor.close()
    [line] = capsys.readouterr().out.splitlines()
    assert_names(line, "neuron-monitor", "code 3")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    NeuronMonitor("on", platform="cpu").close()
    assert capsys.readouterr().out.startswith("neuron-monitor ")
    NeuronMonitor("auto", platform="cpu").close()
    NeuronMonitor("off", platform="neuron").close()
    assert capsys.readouterr().out == ""
