"""A plan: memory, collectives and projected speed of a run, as a dict of plain values.

Sizes are in bytes, times in seconds; every speed is labelled a projection.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from hlat_jax.config import Config
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.core_groups import DISPUTED, Server, server_of_target
from hlat_jax.parallel.degrees import passes, verdicts
from hlat_jax.parallel.sharding import Layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import instructions, published, roofline, text
from hlat_jax.plan.collectives import counted
from hlat_jax.plan.memory import checkpoint_bytes, device_bytes, host_bytes
from hlat_jax.plan.traffic import traced_collectives
from hlat_jax.program import RunProgram, make_program, programs_of_run, state_bytes
from hlat_jax.run import budget as budget_lib
from hlat_jax.run import costs

PROJECTION = "projection, not measured"


@dataclasses.dataclass(frozen=True)
class Site:
    """The nodes that a run is planned for.

    Attributes:
      target: a name of `hardware.target`.
      nodes: number of nodes.
      disk_bytes_per_s: bandwidth of one node to the checkpoint's disk.
      price_per_hour: of one node; 0: unknown.
      data_tokens: tokens of the training data; 0: unknown.
    """

    target: str
    nodes: int
    disk_bytes_per_s: float = 1e9
    price_per_hour: float = 0.0
    data_tokens: int = 0

    @property
    def num_devices(self) -> int:
        return self.nodes * hardware.target(self.target).num_devices

    @property
    def server(self) -> Server | None:
        """The Neuron servers of the nodes."""
        return server_of_target(self.target, num_devices=self.num_devices)


def site_layout(config: Config, site: Site) -> Layout:
    """Returns the layout of a config on a site.

    Raises:
      ValueError: several nodes of a single machine, or as `degrees.layout_over`, with the nearest number of nodes.
    """
    target = hardware.target(site.target)
    if site.nodes > 1 and not target.network_bytes_per_s:
        raise ValueError(f"--nodes={site.nodes}: --instance={site.target} is a single machine; use --nodes=1.")
    try:
        server, chip = site.server, site.target
        return planned_layout(config, site.num_devices, platform=target.platform, server=server, chip=chip)
    except ValueError as error:
        nodes = _nearest_nodes(config, site) if target.network_bytes_per_s else None
        raise ValueError(f"{error} The config is valid with --nodes={nodes}." if nodes else str(error)) from None


def _nearest_nodes(config: Config, site: Site) -> int | None:
    """Returns the number of nodes nearest to the site's on which a config passes every check; ties go to the larger."""
    numbers = sorted(range(1, max(64, 2 * site.nodes) + 1), key=lambda nodes: (abs(nodes - site.nodes), -nodes))
    devices = site.num_devices // site.nodes
    return next((nodes for nodes in numbers if passes(config, nodes * devices, server=site.server)), None)


def make_plan(config: Config, site: Site) -> dict[str, Any]:
    """Returns the plan of a config on a site, JSON-serializable.

    Raises:
      ValueError: degrees that do not fit the devices or the model, or a batch that they do not divide.
    """
    requested = config.model.remat
    program = budget_lib.estimated(make_program(config, site_layout(config, site)))
    config, layout = program.config, program.layout
    target = hardware.target(site.target)
    jaxpr = live_jaxpr(program.trace_step())
    memory = device_bytes(program, jaxpr=jaxpr)
    found = traced_collectives(jaxpr, layout.mesh)
    budget = target.device.memory_bytes - target.device.reserved_bytes
    plan = {
        "config": config.name,
        "target": site.target,
        "nodes": site.nodes,
        "layout": described(config, layout),
        "run": _run(program, site),
        "schedule": _schedule(config, layout, requested),
        "device_bytes": dataclasses.asdict(memory)
        | {"state": memory.state, "temporaries": memory.temporaries, "total": memory.total}
        | {"upper": memory.upper, "budget": budget},
        "fits": memory.total <= budget,
        "fits_surely": memory.upper <= budget,
        "collectives": _collectives(found, target=target, mesh=layout.mesh),
        "disputed_groups": verdicts(config, site.num_devices, site.server)[DISPUTED] if site.server else [],
        "saving": _saving(program.abstract_state, site),
    }
    if target.platform == "neuron":
        limit = instructions.program_limit(config.train.compiler_flags)
        limits = {"limit": limit, "operation_limit": instructions.operation_limit(site.target)}
        found_instructions = step_instructions(program)
        estimates = {
            name: dataclasses.asdict(one) | {"judged": one.judged(name)} for name, one in found_instructions.items()
        }
        plan["instructions"] = {"programs": estimates} | limits
    if target.device.peak_flops:
        seconds = roofline.projected(jaxpr, found, target=target, mesh=layout.mesh, state_bytes=memory.state)
        plan["projection"] = _projection(config, site, seconds)
    return plan


def described(config: Config, layout: Layout) -> dict[str, Any]:
    """Returns the degrees, the number of devices, and the other splits of a layout."""
    parallel = config.parallel
    splits = {"zero1": parallel.zero1, "sequence_parallel": parallel.sequence_parallel}
    return layout.degrees | {"devices": layout.mesh.size} | splits


def short_plan(program: RunProgram, *, budget: int) -> list[str]:
    """Returns the lines that `train` prints before it compiles its step; `budget`: bytes of one device."""
    jaxpr = live_jaxpr(program.trace_step())
    memory = device_bytes(program, jaxpr=jaxpr)
    lines = [text.memory_line(memory, budget)]
    counts = counted(traced_collectives(jaxpr, program.layout.mesh)).values()
    if counts:
        executions, sent = sum(count.executions for count in counts), sum(count.wire_bytes for count in counts)
        lines.append(f"collectives      {executions:,} per step, {format_bytes(sent)} sent by a device")
    return lines


def _run(program: RunProgram, site: Site) -> dict[str, Any]:
    config = program.config
    model, data, train = config.model, config.data, config.train
    step_tokens = data.batch_size * data.seq_len
    tokens = step_tokens * train.num_steps
    programs = programs_of_run(config, accumulate=program.accumulate, pipe=program.layout.size(("pipe",)))
    return {
        "params": costs.num_params(model),
        "flops_per_token_6n": costs.flops_per_token_6n(model),
        "flops_per_token": costs.flops_per_token(model, data.seq_len),
        "tokens_per_step": step_tokens,
        "steps": train.num_steps,
        "tokens": tokens,
        "flops": costs.flops_per_token(model, data.seq_len) * tokens,
        "epochs": tokens / site.data_tokens if site.data_tokens else None,
        "programs": len(programs),
    }


def _schedule(config: Config, layout: Layout, requested: str) -> dict[str, Any]:
    num_microbatches, num_stages = config.train.num_microbatches, layout.degrees["pipe"]
    return {
        "num_microbatches": num_microbatches,
        "rows": config.data.batch_size // (layout.row_degree * num_microbatches),
        # a budget is resolved by an estimate here; the run itself measures
        "remat": requested if requested == config.model.remat else f"{requested}, estimated as {config.model.remat}",
        "num_stages": num_stages,
        "bubble": (num_stages - 1) / (num_microbatches + num_stages - 1),
    }


def step_instructions(program: RunProgram) -> dict[str, instructions.Instructions]:
    """Returns program -> estimated instructions, for a step and, where validation is on, `eval`.

    What is outside `shard_map` is split as the moments are.
    """
    updated = program.abstract_state["opt_state"]
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(updated))
    traced = {"train": program.trace_step}
    if program.accumulate == "dispatch":
        names = (*program.training.microbatch_step.ticks, "update")
        traced = {name: functools.partial(program.trace_microbatch_step, name) for name in names}
    if program.config.data.validation:
        traced["eval"] = program.trace_eval_step
    num_shards = whole / state_bytes(updated)
    return {name: instructions.estimated(live_jaxpr(trace()), num_shards=num_shards) for name, trace in traced.items()}


def _collectives(found: list, *, target: hardware.Target, mesh: Any) -> list[dict[str, Any]]:
    rows = []
    for (kind, axes), count in counted(found).items():
        nodes, members = roofline.spread_over_nodes(axes, mesh=mesh, node_size=target.num_devices)
        over = "inside a node" if nodes == 1 else f"{nodes} nodes, {members} devices in each"
        group = math.prod(mesh.shape[axis] for axis in axes)
        row = {"kind": kind, "axes": list(axes), "group": group, "over": over, "count": count.executions}
        rows.append(row | {"payload_bytes": count.payload_bytes, "sent_bytes": round(count.wire_bytes)})
    return rows


def _saving(state: Any, site: Site) -> dict[str, Any]:
    target = hardware.target(site.target)
    total = checkpoint_bytes(state)
    return {
        "checkpoint_bytes": total,
        "disk_bytes_per_s": site.disk_bytes_per_s,
        "seconds": total / (site.disk_bytes_per_s * site.nodes),
        "host_bytes": host_bytes(state, target.num_devices),
        "host_memory_bytes": target.host_bytes,
    }


def _calibration(site: Site, seconds: roofline.Seconds) -> dict[str, Any] | None:
    """Returns the held-out errors of the projection and the range of the step over all stacks; None: not calibrated."""
    if seconds.efficiency == 1.0:
        return None
    steps = {
        name: dataclasses.replace(seconds, efficiency=found.efficiency).step for name, found in roofline.STACKS.items()
    }
    ends = [factor * steps[name] for name, found in roofline.STACKS.items() for factor in found.step_range]
    return {
        "stack": roofline.STACK,
        "efficiency": seconds.efficiency,
        "other_stacks": {name: step for name, step in steps.items() if name != roofline.STACK},
        "median_error": roofline.MEDIAN_ERROR,
        "worst_error": roofline.WORST_ERROR,
        "device": roofline.CALIBRATED_DEVICE,
        "step_low_s": min(ends),
        "step_high_s": max(ends),
        "is_extrapolated": hardware.target(site.target).device != hardware.DEVICES[roofline.CALIBRATED_DEVICE],
    }


def _projection(config: Config, site: Site, seconds: roofline.Seconds) -> dict[str, Any]:
    target = hardware.target(site.target)
    tokens = config.data.batch_size * config.data.seq_len
    peak = target.device.peak_flops * site.num_devices
    hours = seconds.step * config.train.num_steps / 3600
    model_flops = costs.flops_per_token(config.model, config.data.seq_len) * tokens
    return {
        "label": PROJECTION,
        **dataclasses.asdict(seconds),
        "step_s": seconds.step,
        "step_roofline_s": seconds.roofline,
        "step_overlapped_s": seconds.overlapped,
        "calibration": _calibration(site, seconds),
        "tokens_per_s": tokens / seconds.step,
        "tokens_per_s_and_node": tokens / seconds.step / site.nodes,
        "mfu_6n": costs.flops_per_token_6n(config.model) * tokens / seconds.step / peak,
        "mfu": model_flops / seconds.step / peak,
        "executed_over_model_flops": seconds.flops * site.num_devices / model_flops,
        "days": hours / 24,
        "instance_hours": hours * site.nodes,
        "price": hours * site.nodes * site.price_per_hour or None,
        "published": [
            dataclasses.asdict(row) | {"tokens_per_s_and_node": row.tokens_per_s_and_node}
            for row in published.nearest(costs.num_params(config.model))
        ],
    }
