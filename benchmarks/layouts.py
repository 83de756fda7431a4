"""Do the real layouts compile, does the planner know their memory, and how would they scale?

    python benchmarks/layouts.py [--only 7b-32,70b-256] [--json layouts.json]

Compiles the step of `7b` and `70b` for virtual CPU devices from abstract arrays: 7b at TP 8 over 32 and 256 devices,
70b at TP 32 x PP 8 over 256 and 512, each with the load of HLAT's replica. Prints seconds, argument bytes and
temporaries beside the planner's. On CPU bf16 arrays grow copies in fp32, so all are compared under the fp32 policy.
Then, from arithmetic alone: tokens per second and node from 4 to 256 nodes of trn1.32xlarge, beside Figure 5 of the
paper. Nothing here ran on Trainium.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import jax

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.cli.flags import check_output
from hlat_jax.facts.names import nearest
from hlat_jax.ops.choices import chosen_model
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.report import Site, layout_dict, make_plan
from hlat_jax.program import make_program, state_bytes
from hlat_jax.resolve import resolve

TARGET, NODE_DEVICES, TOLERANCE = "trn1.32xlarge", 32, 0.15
# name -> (config, devices, microbatches of one sequence: HLAT's load of a replica)
CASES = {
    "7b-32": ("7b", 32, 4),
    "7b-256": ("7b", 256, 4),
    "70b-256": ("70b", 256, 32),
    "70b-512": ("70b", 512, 32),
}
# Relative cost of 4 M tokens by nodes. Source: HLAT, arXiv 2404.10630, Figure 5, digitized.
PAPER_COST = {
    "7b": {4: 0.554, 8: 0.563, 16: 0.581, 32: 0.627, 64: 0.754},
    "70b": {8: 6.94, 16: 6.96, 32: 7.12, 64: 7.42},
}


def case_config(name: str, num_devices: int, num_microbatches: int) -> config_lib.Config:
    """Returns a shipped config cut to so many devices, each replica with its microbatches of one sequence."""
    c = config_files.load(name)
    c.parallel.data = num_devices // (c.parallel.tensor * c.parallel.pipe)
    c.train.num_microbatches = num_microbatches
    c.data.batch_size = c.parallel.data * num_microbatches
    return resolve(c)


def compiled(name: str) -> dict:
    """Returns what compiling a case gave, beside the plan."""
    config, num_devices, num_microbatches = CASES[name]
    config = case_config(config, num_devices, num_microbatches)
    return partition(config, num_devices) | {"case": name}


def partition(config: config_lib.Config, num_devices: int) -> dict:
    """Returns figures of the step compiled for virtual CPU devices in a subprocess, beside the planned ones."""
    config = dataclasses.replace(config, precision=config_lib.PrecisionConfig("fp32"))
    flags = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
    flags += " --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    words, task = [sys.executable, __file__, "--compile"], json.dumps(config.to_dict())
    done = subprocess.run(words, input=task, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for {num_devices} virtual CPU devices failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_here(config: config_lib.Config) -> dict:
    """Returns the result of `partition`; runs in a process that has the CPU devices of the layout."""
    start = time.monotonic()
    layout = layout_over(config, jax.devices())
    model = chosen_model(config, layout, platform="neuron")
    # layers in a loop, unless unrolled ones were asked for: the same collectives, compiled in seconds
    model = dataclasses.replace(model, layer_loop=config.model.layer_loop)
    if model.attention in ("cudnn", "nki", "triton"):  # kernels that a CPU does not have; no collective is in them
        model = dataclasses.replace(model, attention="auto")
    config = dataclasses.replace(config, model=model)
    program = make_program(config, layout)
    arguments, traced = program.step_arguments, program.trace_step()
    memory = traced.lower().compile().memory_analysis()
    return {
        "layout": layout_dict(config, layout),
        "seconds": time.monotonic() - start,
        "argument_bytes": memory.argument_size_in_bytes,
        "planned_argument_bytes": state_bytes(arguments[0]) + state_bytes(arguments[1]) + 4,
        "temporary_bytes": memory.temp_size_in_bytes,
        "planned_temporary_bytes": estimated_temporaries(live_jaxpr(traced), arguments).total,
    }


def scaling(name: str) -> list[tuple[int, float, float | None]]:
    """Returns (nodes, projected efficiency, the paper's) of a global batch of 1,024 sequences."""
    rows, paper = [], PAPER_COST[name]
    first = min(paper)
    for nodes in (4, 8, 16, 32, 64, 128, 256):
        if nodes < first:
            continue
        c = config_files.load(name)
        c.parallel.data = nodes * NODE_DEVICES // (c.parallel.tensor * c.parallel.pipe)
        c.train.num_microbatches = c.data.batch_size // c.parallel.data
        plan = make_plan(resolve(c), Site(TARGET, nodes))
        rows.append((nodes, plan["projection"]["tokens_per_s_and_node"]))
    return [(n, rate / rows[0][1], paper[first] / paper[n] if n in paper else None) for n, rate in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases, by commas")
    parser.add_argument("--json", help="also write what was compiled to this file")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        print(json.dumps(compile_here(resolve(json.load(sys.stdin)))))
        return 0
    names = args.only.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"--only={name}: no such case. {nearest(name, CASES)}")
    if args.json:
        try:
            check_output("--json", args.json)
        except ValueError as error:
            parser.error(str(error))
    found = [compiled(name) for name in names]
    print(f"{'case':9}{'compile s':>10}{'argument GB':>13}{'planned':>9}{'temp GB':>9}{'planned':>9}{'ratio':>7}")
    for row in found:
        ratio = row["planned_temporary_bytes"] / row["temporary_bytes"]
        row["agrees"] = row["argument_bytes"] == row["planned_argument_bytes"] and abs(ratio - 1) <= TOLERANCE
        sizes = (row[key] / 1e9 for key in ("argument_bytes", "planned_argument_bytes"))
        temporaries = (row[key] / 1e9 for key in ("temporary_bytes", "planned_temporary_bytes"))
        print(
            f"{row['case']:9}{row['seconds']:10.1f}{next(sizes):13.3f}{next(sizes):9.3f}"
            f"{next(temporaries):9.2f}{next(temporaries):9.2f}{ratio:7.2f}{'' if row['agrees'] else '  DIFFERS'}"
        )
    for name, paper in PAPER_COST.items():
        print(f"\n{name} on trn1.32xlarge, 1,024 sequences a step: tokens/s and node over those of {min(paper)} nodes")
        print("  nodes  projection, not measured   paper, Figure 5")
        for nodes, projected, published in scaling(name):
            print(f"  {nodes:5}{projected:26.3f}{'' if published is None else f'{published:18.3f}'}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(row["agrees"] for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
