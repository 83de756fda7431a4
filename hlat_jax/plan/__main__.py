"""`python -m hlat_jax.plan --config=NAME --instance=trn1.32xlarge --nodes=64`: memory, collectives and speed of a run.

Needs no accelerator: the training step is traced for virtual devices. `plan tune` and `plan choices` time and choose
implementations of ops, see `plan.ops_command`.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts import hardware
from hlat_jax.host.neuron_topology import lnc_of
from hlat_jax.plan import ops_command
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import take_checked_model


def main(argv: Sequence[str]) -> int:
    """Prints the plan that the command line asks for, or runs the verb `tune` or `choices`.

    Returns the exit code, which is 3 for a plan that does not fit.
    """
    if argv and not argv[0].startswith("-"):
        return ops_command.main(argv)
    if any(word in ("--help", "-h") for word in argv):
        print("Usage: plan --config=NAME [flags], or plan tune|choices --config=NAME: times and choices of each op.\n")
    mutable, values = flags_lib.parse(argv, _define)
    take_checked_model(mutable, given=flags_lib.given_keys(values))
    config = resolve_with_tokenizer(mutable)
    _check_flags(values)
    target = at_lnc(values.instance, os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leaves an accelerator of this machine free
    from hlat_jax.plan import aot, report, search

    site = report.Site(
        target=target,
        nodes=values.nodes,
        disk_bytes_per_s=values.disk_gb_per_s * 1e9,
        price_per_hour=values.price_per_hour,
        data_tokens=values.data_tokens,
    )
    with show_progress("tracing the step"):
        plan = search.complete(report.make_plan(config, site), config, site)
    print(report.as_text(plan), flush=True)
    if values.partition:
        try:
            with show_progress("compiling for virtual devices"):
                plan["partition"] = aot.partition(config, site)
        except RuntimeError as error:  # the compiler failed, not the command: code 1
            print(f"error: {error}", file=sys.stderr)
            return 1
        print("\n" + aot.partition_text(plan["partition"]))
    if values.search:
        with show_progress("weighing layouts") as status:
            plan["search"] = search.ranked(config, site, status=status)
        print("\n" + search.ranking(plan["search"], f"{site.nodes} x {site.target}"))
    if values.json:
        pathlib.Path(values.json).write_text(json.dumps(plan, indent=1) + "\n")
    return 0 if plan["fits"] else 3


def _check_flags(values: flags.FlagValues) -> None:
    hardware.target(values.instance)
    if not 0 < values.disk_gb_per_s < math.inf:
        raise ValueError(f"--disk_gb_per_s={values.disk_gb_per_s} must be above 0.")
    if values.json:
        flags_lib.check_output("--json", values.json)


def at_lnc(target: str, environ: Mapping[str, str]) -> str:
    """Returns the target of `hardware.TARGETS` for a node at the LNC of the environment.

    The variable counts for nodes that have several LNCs; for others it is that of another machine.
    """
    instance = hardware.INSTANCES.get(target)
    if instance is None or len(instance.lncs) == 1:
        return target
    planned = {lnc: f"{target}-lnc{lnc}" for lnc in instance.lncs if f"{target}-lnc{lnc}" in hardware.TARGETS}
    planned[instance.lncs[0]] = target
    lnc = lnc_of(environ) or instance.lncs[0]
    if lnc not in planned:
        allowed = " or ".join(map(str, sorted(planned)))
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={lnc}: {target} can be planned at LNC {allowed}; unset it.")
    return planned[lnc]


def _define(values: flags.FlagValues) -> None:
    names = ", ".join([*hardware.TARGETS, "cpu"])
    flags.DEFINE_string("instance", "trn1.32xlarge", f"Node to plan for: {names}.", flag_values=values)
    flags.DEFINE_integer("nodes", 1, "Number of nodes.", 1, flag_values=values)
    flags.DEFINE_string("json", "", "Also write the plan to this file.", flag_values=values)
    flags.DEFINE_bool("search", False, "Try other layouts on the same nodes.", flag_values=values)
    flags.DEFINE_bool("partition", False, "Compile for virtual CPU devices and compare.", flag_values=values)
    flags.DEFINE_float("price_per_hour", 0.0, "Price of one node; 0: unknown.", 0, flag_values=values)
    flags.DEFINE_float("disk_gb_per_s", 1.0, "Bandwidth of one node to the checkpoint's disk.", flag_values=values)
    flags.DEFINE_integer("data_tokens", 0, "Tokens of the training data; 0: unknown.", 0, flag_values=values)


if __name__ == "__main__":
    flags_lib.main(main)
