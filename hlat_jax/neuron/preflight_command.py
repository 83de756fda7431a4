"""`python -m hlat_jax.neuron preflight --config=70b --nodes=64 --out=DIR`: a step's collectives for nccom-test."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.core_groups import FINE, REFUSED, verdict
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.host import neuron_topology
from hlat_jax.neuron.rules import target_of
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import take_checked_model

_OTHERS = ("init", "norms", "eval", "prefill", "decode")  # programs that are not part of a step


def main(argv: Sequence[str]) -> int:
    """Writes the folder, or prints the results in it; returns 1 if a result is missing or not as expected, else 0."""
    mutable, values = flags_lib.parse(argv, _define)
    take_checked_model(mutable, given=flags_lib.given_keys(values))
    config = resolve_with_tokenizer(mutable)
    if not values.out:
        raise ValueError("--out=DIR is missing; name a folder for the input of nccom-test and its results.")
    if values.results:
        return _show_results(pathlib.Path(values.out))
    place = neuron_topology.checked(
        neuron_topology.Topology(values.instance, lnc=neuron_topology.lnc_of(os.environ), coordinator="first")
    )
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron import partitioned, preflight, programs
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import named_programs, traced_programs

    per_node = place.devices_per_node
    target = target_of(values.instance, lnc=place.lnc)
    count = values.nodes * per_node or programs.num_devices(config, target=target)
    if count % per_node:
        raise ValueError(
            f"config {config.name} takes {count} devices, which fill no whole number of {values.instance} with "
            f"{per_node} each; give --nodes, or other degrees."
        )
    folder = flags_lib.make_folder("--out", values.out)
    program = make_program(config, programs.layout_for_neuron(config, count, target=target))
    traced = traced_programs(program)
    names = [name for name in named_programs(program, "all") if name not in _OTHERS]
    with show_progress("lowering the step"):
        lowered = [traced[name]().lower(lowering_platforms=("neuron",)) for name in names]
    with show_progress("reading its collectives"):
        modules = [one.compiler_ir("stablehlo").operation for one in lowered]
        ranks = [device.id for device in program.layout.mesh.devices.flat]
        found = preflight.cases(modules, ranks=ranks)
    about = {"config": config.name, "instance": values.instance, "nodes": count // per_node}
    preflight.write(folder, found, about=about | {"devices_per_node": per_node, "lnc": place.lnc})
    for case in found:
        spanned = case.spanned_nodes(per_node)
        where = "within a node" if spanned == 1 else f"over {spanned} nodes"
        sizes = ", ".join(map(format_bytes, case.measured))
        print(f"{case.name:<40} {len(case.groups):>5} x {case.groups.shape[1]:<4} {where:<14} {sizes}")
        if case.operation == "permute":
            problem = partitioned.permute_problem(case.groups, target=target)
            level = REFUSED if problem else FINE
        else:
            level, problem = verdict(case.groups, programs.server_for(target, count))
        if level != FINE:
            print(f"{'':<40} {level} by the pages: {problem}")
    print(f"{folder / preflight.SCRIPT}  runs nccom-test on them; not yet run")
    return 0


def _show_results(folder: pathlib.Path) -> int:
    from hlat_jax.neuron import preflight

    _, found = preflight.read(folder)
    rows = preflight.results(folder, found)
    for row in rows:
        shown = row.problem or f"{row.microseconds:,.1f} us, {row.bus_gb_per_s:.2f} GB/s by the bus factor"
        print(f"{row.case.name:<40} {format_bytes(row.size):>10}  {shown}")
    bad = sum(bool(row.problem) for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} measured as expected")
    return 1 if bad else 0


def _define(values: flags.FlagValues) -> None:
    kinds = ", ".join(INSTANCES)
    flags.DEFINE_string("instance", "trn1.32xlarge", f"Instance type of every node: {kinds}.", flag_values=values)
    flags.DEFINE_integer("nodes", 0, "Nodes of the job; 0: the recipe's.", 0, flag_values=values)
    flags.DEFINE_string("out", "", "Folder for the input of nccom-test, a script, and its results.", flag_values=values)
    flags.DEFINE_bool("results", False, "Print the results that the script has left in --out.", flag_values=values)
