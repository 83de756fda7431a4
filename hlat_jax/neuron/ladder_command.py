"""Lists programs from one layer to the whole config as commands for a device, `python -m hlat_jax.neuron ladder`."""

from __future__ import annotations

import math
import os
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import Config, count_text
from hlat_jax.facts import compiler_limits
from hlat_jax.facts.core_groups import FINE, server_for, verdict_of_first
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.host.neuron_topology import Topology, lnc_of, resolve_topology
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import parse_config


def main(argv: Sequence[str]) -> int:
    """Prints the rungs of a config with their estimates and commands. Returns 1 if the lint finds an error, else 0."""
    config, values = parse_config(argv, _define)
    topology = resolve_topology(Topology(values.instance, lnc=lnc_of(os.environ)))
    for flag in ("json", "script"):
        flags_lib.check_output(f"--{flag}", values[flag].value)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import ladder

    target = topology.device_key
    count = _devices(config, topology, values.nodes)
    rungs = ladder.rungs(config, num_devices=count, node_devices=topology.devices_per_node, target=target)
    limit = compiler_limits.program_limit(config.train.compiler_flags)
    limits = f"{limit:,} in a program and {compiler_limits.operation_limit(target):,} in an operation"
    counts = f"{count_text(len(rungs), 'rung')}, up to {count_text(count, 'device')}"
    print(f"{config.name} on {topology.instance} at LNC {topology.lnc}: {counts}")
    print(f"Instructions are {compiler_limits.ESTIMATE_NOTE}.")
    print(f"Limits, of public logs or train.compiler_flags: {limits}.")
    levels = ladder.optimization_levels(config, topology)
    again = shlex.quote(levels.override)
    print(f"If neuronx-cc refuses a rung at -O{levels.own}, run it again with {again} (--script does).")
    config_words = flags_lib.config_words(argv)
    folder, rows, seen = f"runs/ladder/{config.name}", [], {}
    for index, rung in enumerate(rungs, 1):
        with show_progress(f"lowering rung {index} of {len(rungs)}"):
            programs = ladder.check_programs(rung, target=target)
        for program in programs.values():
            program["same_as_rung"] = seen.setdefault(program["sha256"], index) if program["sha256"] else index
        workdir = f"{folder}/rung-{index:02}"
        words = ladder.command(rung, config_words, topology=topology, workdir=workdir)
        row = {"what": rung.what, "devices": rung.num_devices, "changes": rung.changes, "command": words}
        rows.append(row | {"programs": programs})
        nodes = math.ceil(rung.num_devices / topology.devices_per_node)
        print(_text(index, rows[-1], (limit, compiler_limits.operation_limit(target)), nodes))
    whole = {"config": config.name, "instance": topology.instance, "lnc": topology.lnc, "rungs": rows}
    flags_lib.write_report(values.json, whole)
    if values.script:
        commands = [(row["what"], row["command"]) for row in rows]
        pathlib.Path(values.script).write_text(ladder.script(config.name, commands, folder=folder, levels=levels))
        pathlib.Path(values.script).chmod(0o755)
    print("\nLowered for Neuron and linted here, but not compiled by neuronx-cc and not yet run.")
    return 1 if any(program["errors"] for row in rows for program in row["programs"].values()) else 0


def _devices(config: Config, topology: Topology, nodes: int) -> int:
    """Returns the devices of the whole: of the nodes asked for, or of the recipe, as one job may take them."""
    from hlat_jax.neuron import programs
    from hlat_jax.parallel.degrees import are_degrees_valid

    node, target = topology.devices_per_node, topology.device_key
    if nodes:
        return nodes * node
    count = programs.num_devices(config, target=target)
    if count >= node:
        return math.ceil(count / node) * node
    for cores in range(count, 0, -1):
        level, _ = verdict_of_first(cores, kind=topology.device_key)
        if level == FINE and are_degrees_valid(config, cores, server=server_for(target, cores)):
            return cores
    return count


def _text(index: int, row: dict[str, Any], limits: tuple[int, int], nodes: int) -> str:
    places = f"{count_text(row['devices'], 'device')} of {count_text(nodes, 'node')}"
    lines = [f"\nrung {index}: {row['what']}, {places}"]
    lines.append(f"  {'program':<12}{'unrolled':>14}{'loops kept':>14}{'largest op':>12}  lint")
    advice = set()
    for name, program in row["programs"].items():
        if program["unrolled"] is None:
            lines.append(f"  {name:<12}{'cannot be lowered':>40}  {', '.join(program['errors'])}")
            continue
        numbers = [compiler_limits.round_estimate(program[key]) for key in ("unrolled", "looped", "largest")]
        rules = ", ".join([f"{rule} (error)" for rule in program["errors"]] + program["warnings"]) or "no warning"
        since = f"; the program of rung {program['same_as_rung']}" if program["same_as_rung"] != index else ""
        lines.append(f"  {name:<12}{numbers[0]:>14}{numbers[1]:>14}{numbers[2]:>12}  {rules}{since}")
        if compiler_limits.may_exceed(program["judged"], limits[0]):
            advice.add(compiler_limits.program_advice([name]))
        if compiler_limits.may_exceed(program["largest"], limits[1]):
            advice.add(compiler_limits.OPERATION_ADVICE)
    lines += [f"  may exceed a limit: {line}" for line in sorted(advice)]
    return "\n".join([*lines, f"  {row['command']}"])


def _define(values: flags.FlagValues) -> None:
    kinds = ", ".join(INSTANCES)
    flags.DEFINE_string("instance", "trn1.32xlarge", f"Instance type of every node: {kinds}.", flag_values=values)
    flags.DEFINE_integer("nodes", 0, "Nodes of the whole. 0 means the recipe's.", 0, flag_values=values)
    flags_lib.define_path(values, "script", "Write a script that runs the rungs in turn to this file.", use="write")
    flags_lib.define_path(values, "json", "Also write the rungs to this file.", use="write")
