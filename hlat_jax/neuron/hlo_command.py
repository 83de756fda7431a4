"""`python -m hlat_jax.neuron hlo`: lists the programs of a run, and writes them as input files for neuronx-cc."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import Config, count_text
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.host.neuron_compiler_flags import compiler_flags, with_config
from hlat_jax.host.neuron_topology import Topology, lnc_of, resolve_topology
from hlat_jax.neuron.lint_command import PROGRAMS, mesh_text
from hlat_jax.neuron.rules import target_of
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import parse_config

_PLUGIN_FLAGS = ("--retry_failed_compilation",)  # flags of Neuron's plugins, not of the compiler
_CHIPS = {"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge"}  # chip -> instance type that its programs are for
_SCRIPT = """#!/usr/bin/env bash
# Compiles these programs of {config} with neuronx-cc, without a device. NOT YET RUN: neuronx-cc was not available.
# Needs a Linux host and: pip install neuronx-cc --extra-index-url=INDEX (the index on Neuron's set-up page).
#   ./compile.sh             compiles all modules
#   ./compile.sh FILE.hlo    compiles one module
set -euo pipefail
cd "$(dirname "$0")"
modules=("$@")
[ $# -gt 0 ] || modules=({modules})
for module in "${{modules[@]}}"; do
  folder="${{module%.hlo}}" # the compiler writes its own files to the working directory
  mkdir -p "$folder"
  (cd "$folder" && neuronx-cc compile "../$module" --framework XLA --output "../$folder.neff" \\
    {flags})
done
"""


def main(argv: Sequence[str]) -> int:
    """Lists the programs of a config; with --out writes their modules and a script that compiles them; returns 0."""
    config, values = parse_config(argv, _define)
    workdir = pathlib.Path(values.workdir or f"runs/{config.name}")
    is_chip = values.instance in _CHIPS  # at its default LNC, as in the lint
    place = resolve_topology(
        Topology(_CHIPS.get(values.instance, values.instance), lnc=0 if is_chip else lnc_of(os.environ))
    )
    folder = pathlib.Path(values.out) if values.out else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import programs
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import RECORD_FILE, fingerprint, named_programs, read_record, traced_programs

    target = target_of(place.instance, lnc=place.lnc)
    count = values.devices or programs.num_devices(config, target=target)
    program = make_program(config, programs.layout_for_neuron(config, count, target=target))
    traced, last = traced_programs(program), read_record(workdir)
    print(f"{config.name} for {target}, {count_text(count, 'device')}: {mesh_text(program.layout.degrees)}")
    print(f"compared with {f'the last run in {workdir}' if last else f'nothing: {workdir} has no {RECORD_FILE}'}\n")
    print(f"{'program':<11}{'fingerprint':<18}since the last run")
    names = named_programs(program, values.program)
    for name in names:
        with show_progress(f"lowering {name}"):
            now = fingerprint(traced[name]().lower(lowering_platforms=("neuron",)))
        print(f"{name:<11}{now:<18}{_since(now, last.get(name), has_record=bool(last))}")
    print("\nHost work (initial weights, data, files, plots) compiles nothing.")
    if folder is not None:
        _write_modules(names, config, place, folder=folder, num_devices=count, max_devices=values.max_devices)
    return 0


def _since(sha256: str, before: Mapping[str, Any] | None, *, has_record: bool) -> str:
    """Returns how a program differs from what the last run compiled."""
    if before is None:
        return "not compiled" if has_record else "no record"
    if before["platform"] != "neuron":
        return f"ran on {before['platform']}"
    return "the same" if before["sha256"] == sha256 else "new"


def _write_modules(
    names: Sequence[str], config: Config, place: Topology, *, folder: pathlib.Path, num_devices: int, max_devices: int
) -> None:
    """Writes the module that one device runs of each program, and the script that compiles them."""
    from hlat_jax.neuron import hlo, hlo_proto

    target = target_of(place.instance, lnc=place.lnc)
    for name in names:
        with show_progress(f"partitioning {name}"):
            module, degrees = hlo.device_module(name, config, num_devices, max_devices=max_devices, target=target)
        (folder / f"{name}.hlo").write_bytes(module)
        size = sum(len(one.instructions) for one in hlo_proto.parse(module).computations)
        print(f"{folder / name}.hlo  {size:,} instructions, one device of {mesh_text(degrees)}")
    compiler = with_config(compiler_flags(place), config.train.compiler_flags, place)
    words = [key if value is None else f"{key}={value}" for key, value in compiler.items() if key not in _PLUGIN_FLAGS]
    modules, script = " ".join(f"{name}.hlo" for name in names), folder / "compile.sh"
    script.write_text(_SCRIPT.format(config=config.name, modules=modules, flags=" \\\n    ".join(words)))
    script.chmod(0o755)
    print(f"{script}  calls neuronx-cc on {modules}; not yet run")


def _define(values: flags.FlagValues) -> None:
    about = "Folder for the modules and compile.sh; by default nothing is written."
    flags_lib.define_path(values, "out", about, use="write")
    about = "Run folder whose last programs to compare with; default runs/NAME."
    flags_lib.define_path(values, "workdir", about)
    flags.DEFINE_enum(
        "instance", "trn1", [*_CHIPS, *INSTANCES], "Device that the programs are for.", flag_values=values
    )
    flags.DEFINE_enum("program", "all", [*PROGRAMS, "all"], "Program to list and write.", flag_values=values)
    flags.DEFINE_integer("devices", 0, "Number of devices in the mesh; 0: the recipe's.", 0, flag_values=values)
    flags.DEFINE_integer("max_devices", 64, "Most devices to partition for.", 1, 2048, flag_values=values)
