"""`python -m hlat_jax.neuron hlo`: writes the programs of a config as input files for neuronx-cc, on any Linux host."""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import Config
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.host.neuron_compiler_flags import compiler_flags, with_config
from hlat_jax.host.neuron_topology import Topology, checked, lnc_of
from hlat_jax.neuron.lint_command import PROGRAMS
from hlat_jax.neuron.rules import TARGETS, target_of
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import take_checked_model

_PLUGIN_FLAGS = ("--cache_dir", "--retry_failed_compilation")  # flags of JAX's Neuron plugin, not of the compiler
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
    """Writes the modules of a config's programs and a script that compiles them; returns 0."""
    mutable, values = flags_lib.parse(argv, _define)
    take_checked_model(mutable, given=flags_lib.given_keys(values))
    config = resolve_with_tokenizer(mutable)
    if not values.out:
        raise ValueError("--out=DIR is missing; name a folder for the modules and compile.sh.")
    is_chip = values.instance in TARGETS  # at its default LNC, as in the lint
    place = checked(Topology(TARGETS.get(values.instance, values.instance), lnc=0 if is_chip else lnc_of(os.environ)))
    folder = flags_lib.make_folder("--out", values.out)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import hlo, hlo_proto, programs
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import named_programs, traced_programs

    target = target_of(place.instance, lnc=place.lnc)
    count = values.devices or programs.num_devices(config, target=target)
    program = make_program(config, programs.layout_for_neuron(config, count, target=target))
    traced = traced_programs(program)
    compiled = []
    for name in named_programs(program, values.program):
        with show_progress(f"lowering {name}"):
            modules = {f"{name}.whole": hlo.whole_module(traced[name]().lower(lowering_platforms=("neuron",)))}
        labels = {f"{name}.whole": f"the whole program, devices: {count:,}"}
        if count > 1:
            with show_progress(f"partitioning {name}"):
                options = {"max_devices": values.max_devices, "target": target}
                modules[f"{name}.device"], mesh = hlo.device_module(name, config, count, **options)
            labels[f"{name}.device"] = f"one device of {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"
        for stem, module in modules.items():
            (folder / f"{stem}.hlo").write_bytes(module)
            size = sum(len(one.instructions) for one in hlo_proto.parse(module).computations)
            print(f"{folder / stem}.hlo  {size:,} instructions, {labels[stem]}")
        compiled.append(f"{list(modules)[-1]}.hlo")  # the compiler takes the module of one device
    script = folder / "compile.sh"
    script.write_text(_SCRIPT.format(config=config.name, modules=" ".join(compiled), flags=_flags(config, place)))
    script.chmod(0o755)
    print(f"{script}  calls neuronx-cc on {', '.join(compiled)}; not yet run")
    return 0


def _flags(config: Config, place: Topology) -> str:
    found = with_config(compiler_flags(place), config.train.compiler_flags, place)
    words = {key: key if value is None else f"{key}={value}" for key, value in found.items()}
    kept = [word for key, word in words.items() if key not in _PLUGIN_FLAGS]
    return " \\\n    ".join(kept)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "Folder for the modules and compile.sh.", flag_values=values)
    flags.DEFINE_enum(
        "instance", "trn1", [*TARGETS, *INSTANCES], "Device for compile.sh to compile for.", flag_values=values
    )
    flags.DEFINE_enum("program", "all", [*PROGRAMS, "all"], "Program to write.", flag_values=values)
    flags.DEFINE_integer("devices", 0, "Number of devices in the mesh; 0: the recipe's.", 0, flag_values=values)
    flags.DEFINE_integer("max_devices", 64, "Most devices to partition for.", 1, 2048, flag_values=values)
