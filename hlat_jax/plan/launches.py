"""Counts the launches of a step and their arrays from the traces of its programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hlat_jax.facts import launch_costs
from hlat_jax.facts.hardware import Instance
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.program import RunProgram


def count_launches(program: RunProgram, target: Instance) -> dict[str, Any]:
    """Returns the arrays and launches of the programs of a step, of norms and of evaluation, with the launch costs.

    The result is JSON-serializable. Each of `programs` has the numbers of arrays, `inputs` and `outputs`, and the
    launches `per_step` with their `seconds`. Donated arrays count twice. Seconds are None without a measurement.
    """
    config, mesh = program.config, program.layout.mesh
    traced: dict[str, Callable[[], Any]] = {"train": program.trace_step}
    per_step = {"train": 1}
    if program.accumulate == "programs":
        step = program.training.microbatch_step
        traced = {name: functools.partial(program.trace_microbatch_step, name) for name in step.programs}
        per_step = step.num_dispatches(program.num_microbatches) | {"update": 1}
    traced["norms"] = functools.partial(program.norms.trace, program.abstract_state)
    if config.has_eval_step:
        traced["eval"] = program.trace_eval_step
    ms, counts = launch_costs.collective_launch_ms(target.device_key(), mesh.size), {}
    for name, make_trace in traced.items():
        trace, times = make_trace(), per_step.get(name, 0)
        arrays = {"inputs": len(trace.jaxpr.in_avals), "outputs": len(trace.jaxpr.out_avals)}
        launch_ms = ms if traced_collectives(live_jaxpr(trace), mesh) else launch_costs.PLAIN_LAUNCH_MS
        counts[name] = arrays | {"per_step": times, "seconds": None if ms is None else times * launch_ms / 1e3}
    seconds = None if ms is None else sum(row["seconds"] for row in counts.values())
    return {"programs": counts, "per_step": sum(per_step.values()), "seconds": seconds}


def launch_lines(launches: dict[str, Any]) -> list[str]:
    """Returns the launches of a step and their arrays, and a warning if a launch has too many."""
    programs, cost = launches["programs"], "their fixed cost has not been measured on this device"
    if launches["seconds"] is not None:
        cost = f"at least {launches['seconds'] * 1e3:.1f} ms, as others measured (facts/launch_costs.py)"
    dispatched = " + ".join(f"{row['per_step']} x {name}" for name, row in programs.items() if row["per_step"])
    name, most = max(programs.items(), key=lambda item: max(item[1]["inputs"], item[1]["outputs"]))
    arrays = f"at most {most['inputs']} into and {most['outputs']} out of a launch ({name})"
    limit = launch_costs.MOST_ARRAYS
    above = [name for name, row in programs.items() if max(row["inputs"], row["outputs"]) > limit]
    if above:
        arrays += f"; WARNING for {', '.join(above)}: above {limit}, a launch of 512 took 50 times as long elsewhere"
    return [f"launches         {launches['per_step']} per step ({dispatched}); {cost}", f"arrays           {arrays}"]
