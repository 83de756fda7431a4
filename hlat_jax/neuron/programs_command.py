"""`python -m hlat_jax.neuron programs`: lists the programs of a run and which ones changed since the last run."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.host.neuron_topology import CACHE
from hlat_jax.resolve import select_accumulate
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import take_checked_model


def main(argv: Sequence[str]) -> int:
    """Prints the programs of a config and how they differ from those recorded in a run folder; returns 0."""
    mutable, values = flags_lib.parse(argv, _define)
    workdir = pathlib.Path(values.workdir or f"runs/{mutable.name}")
    take_checked_model(mutable, given=flags_lib.given_keys(values), workdir=workdir)
    config = resolve_with_tokenizer(mutable, workdir=workdir)
    if values.json:
        flags_lib.check_output("--json", values.json)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import changes, programs
    from hlat_jax.parallel.virtual_devices import planned_layout
    from hlat_jax.run.compilation import RECORD_FILE, programs_of_run, recorded, surroundings

    count = values.devices or programs.num_devices(config)
    layout = planned_layout(config, count, platform=values.platform)
    accumulate = select_accumulate(config.train.accumulate, values.platform)
    placement = changes.Placement(values.platform, layout.degrees)
    last, around = recorded(workdir), surroundings(config, values.platform, layout.degrees)
    print(f"{config.name} for {values.platform}, {count:,} devices: {placement}")
    record = f"the last run in {workdir}" if last else f"nothing: {workdir} has no {RECORD_FILE}"
    print(f"compared with    {record}\ncache            {values.cache or 'none'}\n")
    print(_row(("program", "fingerprint", "operations", "arguments", "argument bytes", "cache", "since the last run")))
    found = {}
    for name in programs_of_run(config, accumulate=accumulate, pipe=layout.degrees["pipe"]):
        with show_progress(f"lowering {name}"):
            now = dataclasses.asdict(changes.program_fingerprint(name, config, placement)) | around
        before = last.get(name)
        why = changes.reasons(name, now=now, before=before) if before else []
        since = "new" if why else "the same" if before else "not compiled" if last else "no record"
        cached = _cached(now, before, values.cache)
        found[name] = {key: now[key] for key in ("sha256", "module", "num_ops", "num_arguments", "argument_bytes")}
        found[name] |= {"cached": cached, "since": since, "why": why}
        size = format_bytes(now["argument_bytes"])
        print(_row((name, now["sha256"], f"{now['num_ops']:,}", f"{now['num_arguments']:,}", size, cached, since)))
        print("".join(f"  {line}\n" for line in why), end="")
    print("\nHost work (data, files, plots) compiles nothing. Bytes are totals over the mesh.")
    if values.json:
        whole = {"config": config.name, "platform": values.platform, "devices": count, "programs": found}
        pathlib.Path(values.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 0


def _cached(now: dict[str, Any], before: dict[str, Any] | None, folder: str) -> str:
    """Returns whether JAX's cache contains a program: "yes", "no" or "not known".

    The key of an entry depends on the backend's version, options and devices, so it cannot be computed without them.
    Entries are found by the program's name; the record of a run shows whether the entry is this program.
    """
    names = [path.name for path in pathlib.Path(folder).glob(f"{now['module']}-*")] if folder else []
    if not names:
        return "no"
    same = before is not None and all(now[key] == before[key] for key in ("sha256", "libraries", "platform"))
    return "yes" if same and before["cache"] == folder else "not known"


def _row(cells: Sequence[str]) -> str:
    return "{:<11}{:<18}{:>10}{:>11}{:>16}  {:<11}{}".format(*cells)


def _define(values: flags.FlagValues) -> None:
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", CACHE)
    flags.DEFINE_string("workdir", "", "Run folder to compare with; default runs/NAME.", flag_values=values)
    platforms = ["neuron", "cpu", "gpu", "tpu"]
    flags.DEFINE_enum("platform", "neuron", platforms, "Platform of the devices, as named by JAX.", flag_values=values)
    flags.DEFINE_integer("devices", 0, "Number of devices in the mesh; 0: the recipe's.", 0, flag_values=values)
    flags.DEFINE_string("cache", cache, "Folder of JAX's compilation cache.", flag_values=values)
    flags.DEFINE_string("json", "", "Also write the list to this file.", flag_values=values)
