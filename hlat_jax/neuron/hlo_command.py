"""`python -m hlat_jax.neuron hlo`: the programs of a config as files that neuronx-cc takes, on any Linux host."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from hlat_jax.host import flags as flags_lib
from hlat_jax.host.neuron_compiler_flags import compiler_flags
from hlat_jax.host.neuron_topology import Topology, checked
from hlat_jax.neuron.rules import TARGETS
from hlat_jax.resolve import resolve

_OF_THE_PLUGIN = ("--cache_dir", "--retry_failed_compilation")  # of what calls the compiler inside of JAX
_SCRIPT = """#!/usr/bin/env bash
# Compiles these programs of {config} with neuronx-cc, without a device. NOT YET RUN: no neuronx-cc was at hand.
# Any Linux host with the compiler: pip install neuronx-cc --extra-index-url=INDEX, the index of the Neuron set-up page.
#   ./compile.sh             all of them
#   ./compile.sh FILE.hlo    one
set -euo pipefail
cd "$(dirname "$0")"
modules=("$@")
[ $# -gt 0 ] || modules=({modules})
for module in "${{modules[@]}}"; do
  folder="${{module%.hlo}}" # the compiler leaves its own files where it runs
  mkdir -p "$folder"
  (cd "$folder" && neuronx-cc compile "../$module" --framework XLA --output "../$folder.neff" \\
    {flags})
done
"""


def main(argv: Sequence[str]) -> int:
    """Writes the modules of a config's programs and the script that compiles them; returns 0."""
    mutable, values = flags_lib.parse(argv, _define)
    config = resolve(mutable)
    if not values.out:
        raise ValueError("--out=DIR is missing: the folder for the modules and compile.sh.")
    folder = _made(values.out)
    os.environ["JAX_PLATFORMS"] = "cpu"  # no accelerator is needed; one that is there stays free
    from hlat_jax.neuron import hlo, hlo_proto, programs
    from hlat_jax.run.compilation import named_programs, traced_programs
    from hlat_jax.step import make_program

    count = values.devices or programs.num_devices(config)
    traced = traced_programs(make_program(config, programs.layout_for_neuron(config, count)))
    compiled = []
    for name in named_programs(config, values.program):
        modules = {f"{name}.whole": hlo.whole(traced[name]().lower(lowering_platforms=("neuron",)))}
        about = {f"{name}.whole": f"the whole program, devices: {count:,}"}
        if count > 1:
            modules[f"{name}.device"], mesh = hlo.of_one_device(name, config, count, max_devices=values.max_devices)
            about[f"{name}.device"] = f"one device of {' x '.join(f'{axis} {size}' for axis, size in mesh.items())}"
        for stem, module in modules.items():
            (folder / f"{stem}.hlo").write_bytes(module)
            size = sum(len(one.instructions) for one in hlo_proto.parse(module).computations)
            print(f"{folder / stem}.hlo  {size:,} instructions, {about[stem]}")
        compiled.append(f"{list(modules)[-1]}.hlo")  # the compiler takes the program of one device
    script = folder / "compile.sh"
    script.write_text(_SCRIPT.format(config=config.name, modules=" ".join(compiled), flags=_flags(values.target)))
    script.chmod(0o755)
    print(f"{script}  calls neuronx-cc on {', '.join(compiled)}; not yet run")
    return 0


def _made(path: str) -> pathlib.Path:
    """Returns the folder, made where it is not there, before the work whose result it is for."""
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={path} cannot be made a folder: {error.strerror}; name another.") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out={path} cannot be written to; name another folder.")
    return folder


def _flags(target: str) -> str:
    flags_of = compiler_flags(checked(Topology(TARGETS[target]))).items()
    kept = [key if value is None else f"{key}={value}" for key, value in flags_of if key not in _OF_THE_PLUGIN]
    return " \\\n    ".join(kept)


def _define(values: flags.FlagValues) -> None:
    names = ["train", "eval", "init", "norms", "prefill", "decode", "generate", "all"]
    flags.DEFINE_string("out", "", "Folder for the modules and compile.sh.", flag_values=values)
    flags.DEFINE_enum("target", "trn1", list(TARGETS), "Device that compile.sh compiles for.", flag_values=values)
    flags.DEFINE_enum("program", "all", names, "Program to write.", flag_values=values)
    flags.DEFINE_integer("devices", 0, "Devices of the mesh; 0: those of the recipe.", 0, flag_values=values)
    flags.DEFINE_integer("max_devices", 64, "Most to partition for, by fewer replicas.", 1, 2048, flag_values=values)
