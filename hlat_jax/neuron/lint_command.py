"""Checks the programs of a config for operations that Neuron does not support, `python -m hlat_jax.neuron lint`."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import count_text
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.host.neuron_topology import Topology, lnc_of, resolve_topology
from hlat_jax.neuron.rules import LINTED
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import parse_config

_STEP = ("train", "start", "microbatch", "warm_up", "steady", "cool_down", "update")
# target of LINTED -> instance type and LNC of a node that has it
_NODES = {"trn1": ("trn1.32xlarge", 1), "trn2": ("trn2.48xlarge", 2), "trn2-lnc1": ("trn2.48xlarge", 1)}
PROGRAMS = (*_STEP, "eval", "norms", "digest", "digest_sums", "prefill", "decode", "generate")


def main(argv: Sequence[str]) -> int:
    """Prints the findings for the programs of a config. Returns 1 if one is an error, else 0."""
    config, values = parse_config(argv, _define)
    target = topology_of(values.instance).device_key
    flags_lib.check_output("--json", values.json)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import programs
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import named_programs, traced_programs

    count = values.devices or programs.num_devices(config, target=target)
    program = make_program(config, programs.layout_for_neuron(config, count, target=target))
    traced = traced_programs(program)
    print(f"{config.name} for {target}, {count_text(count, 'device')}: {mesh_text(program.layout.degrees)}")
    reports = {}
    for name in named_programs(program, values.program):
        began = time.monotonic()
        with show_progress(f"checking {name}"):
            findings = programs.findings(name, traced[name](), program=program, target=target)
        rows = [dataclasses.asdict(f) | {"explained": programs.EXPLAINED.get((name, f.rule), "")} for f in findings]
        reports[name] = {"findings": rows, "seconds": time.monotonic() - began}
        print(_text(name, reports[name]))
    whole = {"config": config.name, "target": target, "devices": count, "programs": reports}
    flags_lib.write_report(values.json, whole)
    rows = [row for report in reports.values() for row in report["findings"]]
    print(f"\n{config.name}: {_counts(rows)}. Lowered for Neuron, but not compiled by neuronx-cc and not yet run.")
    return 1 if any(row["severity"] == "error" for row in rows) else 0


def topology_of(name: str) -> Topology:
    """Returns a node of an instance type at the LNC of the environment, or of a target of LINTED at its own."""
    instance, lnc = _NODES.get(name) or (name, lnc_of(os.environ))
    return resolve_topology(Topology(instance, lnc=lnc))


def define_programs(values: flags.FlagValues) -> None:
    """Declares the flags that choose the programs of a config and their target."""
    options = {"flag_values": values}
    flags.DEFINE_enum("instance", "trn1", [*LINTED, *INSTANCES], "Device or instance of the programs.", **options)
    flags.DEFINE_enum("program", "all", [*PROGRAMS, "all"], "One program, or all.", **options)
    flags.DEFINE_integer("devices", 0, "Number of devices in the mesh. 0 means the recipe's.", 0, **options)


def _define(values: flags.FlagValues) -> None:
    define_programs(values)
    flags_lib.define_path(values, "json", "Also write the findings to this file.", use="write")


def _text(name: str, report: dict[str, Any]) -> str:
    lines = [f"\n{name}: {_counts(report['findings'])} ({report['seconds']:.1f} s)"]
    for row in report["findings"]:
        if row["severity"] == "info":
            continue
        times = f" x{row['count']}" if row["count"] > 1 else ""
        lines.append(f"  {row['severity']:<8}{row['rule']:<6}{row['op']}{times}: {row['what']}")
        lines += [f"      at {row['line']}"] if row["line"] else []
        lines += [f"      {key}: {row[key]}" for key in ("why", "instead", "source")]
        if row["explained"] and row["severity"] == "warning":
            lines.append(f"      accepted here: {row['explained']}")
    infos = [row for row in report["findings"] if row["severity"] == "info"]
    for rule in dict.fromkeys(row["rule"] for row in infos):
        first, *others = [row for row in infos if row["rule"] == rule]
        count = first["count"] + sum(row["count"] for row in others)
        lines.append(f"  {'info':<8}{rule:<6}{first['op']} x{count}: {first['what']}")
    return "\n".join(lines)


def _counts(rows: list[dict[str, Any]]) -> str:
    def of(severity: str) -> int:
        return sum(row["severity"] == severity for row in rows)

    accepted = sum(row["severity"] == "warning" and bool(row["explained"]) for row in rows)
    return f"{of('error')} errors, {of('warning')} warnings ({accepted} accepted), {of('info')} infos"


def mesh_text(degrees: Mapping[str, int]) -> str:
    """Returns the degrees of a mesh, for people."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
