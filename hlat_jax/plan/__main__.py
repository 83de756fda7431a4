"""Plans memory, collectives and speed of a run, `python -m hlat_jax.plan --config=NAME --instance=TYPE --nodes=N`.

Needs no accelerator, as the training step is traced for virtual devices. See `plan.ops_command` for `plan choices`, and
`plan.nodes_command` for `plan nodes`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.facts import hardware
from hlat_jax.plan import nodes_command, ops_command
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.init_model import parse_config


def main(argv: Sequence[str]) -> int:
    """Prints the plan that the command line asks for, or runs the verb `choices` or `nodes`.

    Returns the exit code, which is 3 for a plan that does not fit.
    """
    if argv and not argv[0].startswith("-"):
        verbs = {"choices": ops_command.main, "nodes": nodes_command.main}
        return verbs[flags_lib.choose_verb(argv, verbs, usage="")](argv[1:])
    if any(word in ("--help", "-h") for word in argv):
        print("Usage: plan --config=NAME [flags], or plan choices --config=NAME for the implementation of each op,")
        print("or plan nodes --config=NAME --nodes=N for the most nodes, up to N, that the run can use.\n")
    config, values = parse_config(argv, _define)
    hardware.node(values.instance)
    if not 0 < values.disk_gb_per_s < math.inf:
        raise ValueError(f"--disk_gb_per_s={values.disk_gb_per_s} must be above 0.")
    flags_lib.check_output("--json", values.json)
    os.environ["JAX_PLATFORMS"] = "cpu"  # leaves an accelerator of this machine free
    from hlat_jax.plan import report, search

    site = report.Site(
        target=values.instance,
        nodes=values.nodes,
        disk_bytes_per_s=values.disk_gb_per_s * 1e9,
        price_per_hour=values.price_per_hour,
    )
    with show_progress("tracing the step"):
        plan = report.make_plan(config, site)
    print(report.as_text(plan), flush=True)
    if values.search:
        with show_progress("weighing layouts") as status:
            plan["search"] = search.rank_layouts(config, site, status=status)
        print("\n" + search.ranking_table(plan["search"], f"{site.nodes} x {site.target}"))
    flags_lib.write_report(values.json, plan)
    return 0 if plan["fits"] else 3


def _define(values: flags.FlagValues) -> None:
    names = ", ".join([*hardware.NODES, "cpu"])
    flags.DEFINE_string("instance", "trn1.32xlarge", f"Node to plan for: {names}.", flag_values=values)
    flags.DEFINE_integer("nodes", 1, "Number of nodes.", 1, flag_values=values)
    flags_lib.define_path(values, "json", "Also write the plan to this file.", use="write")
    flags.DEFINE_bool("search", False, "Try other layouts on the same nodes.", flag_values=values)
    flags.DEFINE_float("price_per_hour", 0.0, "Price of one node. 0 means unknown.", 0, flag_values=values)
    flags.DEFINE_float("disk_gb_per_s", 1.0, "Bandwidth of one node to the checkpoint's disk.", flag_values=values)


if __name__ == "__main__":
    flags_lib.main(main)
