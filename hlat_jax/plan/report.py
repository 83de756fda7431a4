"""Plans memory, collectives and projected speed of a run, as a dict of plain values and as text.

Sizes are in bytes, and times in seconds. Every speed is labelled a projection.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax

from hlat_jax.config import Config, count_text
from hlat_jax.facts import compiler_limits, hardware, measured_rates
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.chips import chip_of
from hlat_jax.facts.core_groups import DISPUTED, Server, server_of_node
from hlat_jax.parallel import rows as rows_lib
from hlat_jax.parallel.degrees import are_degrees_valid, nearest_nodes, verdicts
from hlat_jax.parallel.sharding import MESH_AXES, Layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import instructions, launches, roofline
from hlat_jax.plan.collectives import Collective, count_collectives, traced_collectives
from hlat_jax.plan.memory import DeviceBytes, checkpoint_bytes, device_bytes, host_bytes, program_bytes
from hlat_jax.program import RunProgram, make_program, programs_of_run, state_bytes
from hlat_jax.run import budget as budget_lib
from hlat_jax.run import costs

PROJECTION = "projection, not measured"


@dataclasses.dataclass(frozen=True)
class Site:
    """The nodes that a run is planned for.

    Attributes:
      target: the name of a node for `hardware.node`.
      disk_bytes_per_s: the bandwidth of one node to the checkpoint's disk.
      price_per_hour: the price of one node, or 0 if it is unknown.
    """

    target: str
    nodes: int
    disk_bytes_per_s: float = 1e9
    price_per_hour: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.nodes * hardware.node(self.target).num_devices()

    @property
    def server(self) -> Server | None:
        """The Neuron servers of the nodes, or None."""
        return server_of_node(hardware.node(self.target), num_devices=self.num_devices)


def site_layout(config: Config, site: Site) -> Layout:
    """Returns the layout of a config on a site.

    Raises:
      ValueError: the site has several nodes of a single machine, or `degrees.layout_over` raises. The message names the
        nearest numbers of nodes that pass.
    """
    target = hardware.node(site.target)
    if site.nodes > 1 and not target.network:
        raise ValueError(f"--nodes={site.nodes}: --instance={site.target} is a single machine. Use --nodes=1.")
    options = {"platform": target.platform, "server": site.server, "chip": site.target}
    try:
        return planned_layout(config, site.num_devices, **options)
    except ValueError as error:
        near = []
        if target.network and not are_degrees_valid(config, site.num_devices, server=site.server):
            near = nearest_nodes(config, site.nodes, node_devices=target.num_devices(), server=site.server)
        if not near:
            raise
        counts = " and ".join(count_text(count, "node") for count in near)
        raise ValueError(f"{error} With the degrees of the config, {counts} pass.") from None


def make_plan(config: Config, site: Site) -> dict[str, Any]:
    """Returns the plan of a config on a site, JSON-serializable.

    Raises:
      ValueError: the degrees do not fit the devices or the model, or do not divide the batch.
    """
    requested = config.model.remat
    program = budget_lib.choose_by_estimate(make_program(config, site_layout(config, site)))
    config, layout = program.config, program.layout
    target = hardware.node(site.target)
    jaxpr = live_jaxpr(program.trace_step())
    memory, counts = device_bytes(program, jaxpr=jaxpr), {}
    if target.platform == "neuron":
        counts = step_instructions(program)
        judged = {name: count.count_for_limit(name) for name, count in counts.items()}
        memory = dataclasses.replace(memory, programs=program_bytes(judged.values()))
    collectives = traced_collectives(jaxpr, layout.mesh)
    budget = target.device.program_bytes
    saved_bytes = checkpoint_bytes(program.abstract_state)
    plan = {
        "config": config.name,
        "target": site.target,
        "nodes": site.nodes,
        "layout": layout_dict(config, layout),
        "run": _run(program),
        "schedule": _schedule(config, layout, requested),
        "device_bytes": dataclasses.asdict(memory)
        | {"state": memory.state, "temporaries": memory.temporaries, "total": memory.total}
        | {"upper": memory.upper, "budget": budget},
        "attention": _attention(program, target),
        "fits": memory.total <= budget,
        "fits_surely": memory.upper <= budget,
        "collectives": _collectives(collectives, target=target, mesh=layout.mesh),
        "disputed_groups": verdicts(config, site.num_devices, site.server)[DISPUTED] if site.server else [],
        "saving": {
            "checkpoint_bytes": saved_bytes,
            "disk_bytes_per_s": site.disk_bytes_per_s,
            "seconds": saved_bytes / (site.disk_bytes_per_s * site.nodes),
            "host_bytes": host_bytes(program.abstract_state, target.num_devices()),
            "host_memory_bytes": target.host_bytes,
        },
    }
    if target.platform == "neuron":
        plan["instructions"] = {
            "programs": {name: dataclasses.asdict(count) | {"judged": judged[name]} for name, count in counts.items()},
            "limit": compiler_limits.program_limit(config.train.compiler_flags),
            "operation_limit": compiler_limits.operation_limit(site.target),
        }
        plan["launches"] = launches.count_launches(program, target)
    if target.device.peak_flops:
        seconds = roofline.project(jaxpr, collectives, target=target, mesh=layout.mesh, state_bytes=memory.state)
        seconds = dataclasses.replace(seconds, launch=plan.get("launches", {}).get("seconds") or 0.0)
        plan["projection"] = _projection(config, site, seconds)
    return plan


def _attention(program: RunProgram, target: hardware.Instance) -> dict[str, Any]:
    """Returns the choice of attention, and where a kernel is much faster on this chip, what others measured."""
    choice, config = program.choices["attention"], program.config
    found: dict[str, Any] = {"implementation": choice.name, "because": choice.because}
    if chip_of(target.target) == "trn2" and choice.name != "nki" and config.data.seq_len >= measured_rates.LONG_ROW:
        keys = ("measured_row", "measured_share", "kernel_share")
        found |= dict(zip(keys, measured_rates.attention_shares(config.data.seq_len), strict=True))
        found["against_kernel"] = choice.passed_over["nki"]
    return found


def layout_dict(config: Config, layout: Layout) -> dict[str, Any]:
    """Returns the degrees, the number of devices, and the other splits of a layout."""
    parallel = config.parallel
    splits = {"zero1": parallel.zero1, "sequence_parallel": parallel.sequence_parallel}
    return layout.degrees | {"devices": layout.mesh.size} | splits


def short_plan(program: RunProgram, *, budget: int) -> list[str]:
    """Returns the lines that `train` prints before it compiles its step. `budget` is the bytes of one device."""
    jaxpr = live_jaxpr(program.trace_step())
    memory = device_bytes(program, jaxpr=jaxpr)
    lines = [memory_line(memory, budget)]
    counts = count_collectives(traced_collectives(jaxpr, program.layout.mesh)).values()
    if counts:
        executions, sent = sum(count.executions for count in counts), sum(count.wire_bytes for count in counts)
        lines.append(f"collectives      {executions:,} per step, {format_bytes(sent)} sent by a device")
    return lines


def _run(program: RunProgram) -> dict[str, Any]:
    config = program.config
    model, data, train = config.model, config.data, config.train
    step_tokens = data.batch_size * data.seq_len
    tokens = step_tokens * train.num_steps
    return {
        "params": costs.num_params(model),
        "flops_per_token_6n": costs.flops_per_token_6n(model),
        "flops_per_token": costs.flops_per_token(model, data.seq_len),
        "tokens_per_step": step_tokens,
        "steps": train.num_steps,
        "tokens": tokens,
        "flops": costs.flops_per_token(model, data.seq_len) * tokens,
        "programs": len(programs_of_run(program)),
    }


def _schedule(config: Config, layout: Layout, requested: str) -> dict[str, Any]:
    num_microbatches, num_stages = rows_lib.num_microbatches(config, layout), layout.degrees["pipe"]
    num_rows = rows_lib.replica_rows(config.data.batch_size, layout)
    return {
        "num_microbatches": num_microbatches,
        "rows": num_rows // num_microbatches,
        "padding_rows": num_rows * layout.row_degree - config.data.batch_size,
        # a budget is resolved by an estimate here; the run itself measures
        "remat": requested if requested == config.model.remat else f"{requested}, estimated as {config.model.remat}",
        "num_stages": num_stages,
        "bubble": (num_stages - 1) / (num_microbatches + num_stages - 1),
    }


def step_instructions(program: RunProgram) -> dict[str, instructions.Instructions]:
    """Returns program -> estimated instructions, for a step and, if the run has it, `eval`.

    Arrays outside `shard_map` are split like the moments.
    """
    updated = program.abstract_state["opt_state"]
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(updated))
    traced = {"train": program.trace_step}
    if program.accumulate == "programs":
        names = (*program.training.microbatch_step.ticks, "update")
        traced = {name: functools.partial(program.trace_microbatch_step, name) for name in names}
    if program.config.has_eval_step:
        traced["eval"] = program.trace_eval_step
    num_shards = whole / state_bytes(updated)
    estimate = functools.partial(instructions.estimate_instructions, num_shards=num_shards)
    return {name: estimate(live_jaxpr(trace())) for name, trace in traced.items()}


def _collectives(collectives: list[Collective], *, target: hardware.Instance, mesh: Any) -> list[dict[str, Any]]:
    rows = []
    for (kind, axes), count in count_collectives(collectives).items():
        nodes, members = roofline.node_spread(axes, mesh=mesh, node_size=target.num_devices())
        over = (
            "inside a node" if nodes == 1 else f"{count_text(nodes, 'node')}, {count_text(members, 'device')} in each"
        )
        group = math.prod(mesh.shape[axis] for axis in axes)
        row = {"kind": kind, "axes": list(axes), "group": group, "over": over, "count": count.executions}
        rows.append(row | {"payload_bytes": count.payload_bytes, "sent_bytes": round(count.wire_bytes)})
    return rows


def _calibration(site: Site, seconds: roofline.Seconds) -> dict[str, Any] | None:
    """Returns the range of the step over all stacks of the chip, if the projection is calibrated."""
    target = hardware.node(site.target)
    names = roofline.stacks_of(target)
    if not names:
        return None
    stacks = {name: roofline.STACKS[name] for name in names}
    steps = {name: dataclasses.replace(seconds, efficiency=stack.efficiency).step for name, stack in stacks.items()}
    ends = [factor * steps[name] for name, stack in stacks.items() for factor in stack.step_range]
    chip = stacks[names[0]].chip
    return {
        "stack": names[0],
        "chip": chip,
        "efficiency": seconds.efficiency,
        "other_stacks": {name: steps[name] for name in names[1:]},
        "step_low_s": min(ends),
        "step_high_s": max(ends),
        "is_extrapolated": target.device != hardware.DEVICES[chip],
    }


def _projection(config: Config, site: Site, seconds: roofline.Seconds) -> dict[str, Any]:
    target = hardware.node(site.target)
    tokens = config.data.batch_size * config.data.seq_len
    peak = target.device.peak_flops * site.num_devices
    hours = seconds.step * config.train.num_steps / 3600
    model_flops = costs.flops_per_token(config.model, config.data.seq_len) * tokens
    return {
        "label": PROJECTION,
        **dataclasses.asdict(seconds),
        "step_s": seconds.step,
        "step_roofline_s": seconds.roofline,
        "step_overlapped_s": seconds.overlapped_step,
        "calibration": _calibration(site, seconds),
        "tokens_per_s": tokens / seconds.step,
        "tokens_per_s_and_node": tokens / seconds.step / site.nodes,
        "mfu_6n": costs.flops_per_token_6n(config.model) * tokens / seconds.step / peak,
        "mfu": model_flops / seconds.step / peak,
        "executed_over_model_flops": seconds.flops * site.num_devices / model_flops,
        "days": hours / 24,
        "instance_hours": hours * site.nodes,
        "price": hours * site.nodes * site.price_per_hour or None,
    }


def memory_line(memory: DeviceBytes, budget: int) -> str:
    """Returns the line that `train` prints for the memory of a device."""
    verdict = ""
    if memory.upper > budget:
        verdict = f"; {'MAY' if memory.total <= budget else 'DOES'} NOT FIT: try python -m hlat_jax.plan --search"
    return (
        f"memory planned   {format_bytes(memory.total)} of {format_bytes(budget)} on the fullest device: "
        f"{format_bytes(memory.state)} state, {format_bytes(memory.temporaries)} temporaries (estimated){verdict}"
    )


def as_text(plan: dict[str, Any]) -> str:
    """Returns the whole plan as text."""
    layout, run, schedule, saving = (plan[key] for key in ("layout", "run", "schedule", "saving"))
    m, p, pipeline = schedule["num_microbatches"], schedule["num_stages"], []
    num_rows = layout["data"] * layout["fsdp"] * m * schedule["rows"]
    padding = f"{schedule['padding_rows']:,} of {count_text(num_rows, 'sequence')}"
    if p > 1:
        bubble = f"(p - 1) / (m + p - 1) = {p - 1} / {m + p - 1} = {schedule['bubble']:.1%} of the ticks"
        pipeline = [f"pipeline         {p} stages, bubble {bubble}"]
    degrees = " x ".join(f"{axis} {layout[axis]}" for axis in MESH_AXES if layout[axis] > 1) or "one device"
    devices = count_text(layout["devices"], "device")
    splits = ", ZeRO-1" * layout["zero1"] + ", sequence parallel" * layout["sequence_parallel"]
    host = f" of {format_bytes(saving['host_memory_bytes'])}" if saving["host_memory_bytes"] else ""
    return "\n".join([
        f"{plan['config']} on {plan['nodes']} x {plan['target']}: {devices}, {degrees}{splits}",
        f"parameters       {run['params']:,}",
        f"FLOPs per token  {run['flops_per_token_6n']:.4g} (6N), {run['flops_per_token']:.4g} with attention",
        f"steps            {run['steps']:,} of {run['tokens_per_step']:,} tokens: {run['tokens']:,} tokens, "
        f"{run['flops']:.3g} FLOPs",
        f"microbatches     {m} of {count_text(schedule['rows'], 'sequence')} per device, remat {schedule['remat']}",
        *([f"padding          {padding} are zeros of weight 0"] if schedule["padding_rows"] else []),
        *pipeline,
        f"programs         {run['programs']} to compile",
        *_attention_lines(plan["attention"]),
        *(instruction_lines(plan["instructions"]) if "instructions" in plan else []),
        *(launches.launch_lines(plan["launches"]) if "launches" in plan else []),
        "\nBytes of one device",
        *_memory_lines(plan["device_bytes"], num_microbatches=m),
        "\nCollectives of one step, per device",
        *_collective_lines(plan),
        "",
        *(_projection_lines(plan["projection"]) if "projection" in plan else ["no projection: the speed is unknown"]),
        f"\nSaving\n  checkpoint {format_bytes(saving['checkpoint_bytes'])}, {saving['seconds']:.1f} s at "
        f"{saving['disk_bytes_per_s'] / 1e9:g} GB/s per node\n"
        f"  host memory at most {format_bytes(saving['host_bytes'])}{host} per node while saving",
    ])  # fmt: skip


def _attention_lines(attention: dict[str, Any]) -> list[str]:
    lines = [f"attention        {attention['implementation']} ({attention['because']})"]
    if "measured_row" in attention:
        row, share, kernel = (attention[key] for key in ("measured_row", "measured_share", "kernel_share"))
        lines.append(
            f"  SLOW: its scores go through memory. With rows of {row:,}, others reached {share:.1%} of a trn2 chip's "
            f"peak in a forward pass,\n  and {kernel:.0%} with a kernel. Not nki: {attention['against_kernel']}."
        )
    return lines


def instruction_lines(estimates: dict[str, Any]) -> list[str]:
    """Returns the estimated instructions of the programs, and a warning with advice if they exceed a limit."""
    programs, limit, operation_limit = (estimates[key] for key in ("programs", "limit", "operation_limit"))
    name, program = max(programs.items(), key=lambda item: item[1]["unrolled"])
    largest = max(counts["largest"] for counts in programs.values())
    unrolled, looped, operation = map(compiler_limits.round_estimate, (program["unrolled"], program["looped"], largest))
    line = f"instructions     about {unrolled} in program {name} with every loop unrolled, {looped} with none; "
    line += f"{operation} in the largest operation ({compiler_limits.ESTIMATE_NOTE})"
    is_public = limit == compiler_limits.PROGRAM_LIMIT
    whose = "public logs show" if is_public else f"{compiler_limits.LIMIT_FLAG} and public logs give"
    limits = f"{whose} {limit:,} per program and {operation_limit:,} per operation"
    advice, within = [], f"MAY EXCEED a limit, being within {compiler_limits.ROOM} of it"
    above = [name for name, counts in programs.items() if compiler_limits.may_exceed(counts["judged"], limit)]
    if above:
        exceeds = any(programs[name]["judged"] > limit for name in above)
        word = f"{'WARNING' if exceeds else f'{within},'} for {', '.join(above)}"
        advice.append(f"  {word}: {limits}; {compiler_limits.program_advice(above)}")
    if compiler_limits.may_exceed(largest, operation_limit):
        word = "WARNING" if largest > operation_limit else within
        advice.append(f"  {word}: {limits}; {compiler_limits.OPERATION_ADVICE}")
    return [line, *(advice or [f"  below the limits: {limits}"])]


def _memory_lines(memory: dict[str, Any], *, num_microbatches: int) -> list[str]:
    sums = f"sums over {num_microbatches} microbatches, exact" if num_microbatches > 1 else "of the batch, exact"
    notes = dict.fromkeys(("params", "opt_state", "batch"), "exact") | {
        "gradients": sums,
        "activations": "kept for the backward pass; estimated",
        "workspace": f"the rest of the peak; estimated. Logits of a microbatch {format_bytes(memory['logits'])}",
        "programs": "code and rings of the loaded programs; estimated",
        "total": f"of a budget of {format_bytes(memory['budget'])}",
    }
    if not memory["programs"]:
        del notes["programs"]
    verdict = "fits"
    if memory["total"] > memory["budget"]:
        largest = max(("params", "opt_state", "gradients", "activations", "workspace", "programs"), key=memory.get)
        verdict = f"DOES NOT FIT; the largest part is {largest}; --search plans other layouts"
    elif memory["upper"] > memory["budget"]:
        error, upper = memory["temporaries_error"], format_bytes(memory["upper"])
        verdict = f"MAY NOT FIT: temporaries are estimated within {error:.0%}, so it may take {upper}"
        verdict += "; --search plans other layouts"
    return [f"  {name:<14} {format_bytes(memory[name]):>12}  {note}" for name, note in notes.items()] + [f"  {verdict}"]


def _collective_lines(plan: dict[str, Any]) -> list[str]:
    lines = [f"  {'kind':<19} {'axes':<32} {'group':>5} {'count':>7} {'payload':>12} {'sent':>12}  over"]
    for row in plan["collectives"]:
        payload, sent = format_bytes(row["payload_bytes"]), format_bytes(row["sent_bytes"])
        sizes = f"{row['group']:>5} {row['count']:>7,} {payload:>12} {sent:>12}  {row['over']}"
        lines.append(f"  {row['kind']:<19} {' x '.join(row['axes']):<32} {sizes}")
    lines += [f"  disputed: {words}" for words in plan["disputed_groups"]]
    return lines if plan["collectives"] else ["  none"]


def _measured_lines(calibration: dict[str, Any] | None) -> list[str]:
    if calibration is None:
        return []
    chip = calibration["chip"]
    low, high = (f"{share:.0%}" for share in measured_rates.PRODUCT_SHARES[chip])
    slowest, fastest = (f"{rate / 1e9:g}" for rate in measured_rates.STEP_MEMORY_BYTES_PER_S[chip])
    shares = low if low == high else f"{low} to {high}"
    rates = slowest if slowest == fastest else f"{slowest} to {fastest}"
    rate = hardware.DEVICES[chip].memory_bytes_per_s / 1e9
    return [
        f"  others measured on {chip}: products alone {shares} of peak, memory within a step {rates} of {rate:.0f} GB/s"
    ]


def _projection_lines(projection: dict[str, Any]) -> list[str]:
    basis, error = "full speed", "not calibrated: no published rows for this kind of device; a real step is slower"
    if calibration := projection["calibration"]:
        chip = calibration["chip"]
        source = {"trn1": "published for", "trn2": "others measured with"}[chip]
        basis = f"{calibration['efficiency']:.0%} of full speed, as {source} {calibration['stack']}"
        rows = {"trn1": "published rows of trn1", "trn2": "rows that others measured on one chip of trn2"}[chip]
        where = ", extrapolated to this device" * calibration["is_extrapolated"]
        median, worst = roofline.ERRORS[chip]
        others = "".join(f"; as for {name} {step:.3f} s" for name, step in calibration["other_stacks"].items())
        low, high = calibration["step_low_s"], calibration["step_high_s"]
        error = (
            f"range {low:.3f} to {high:.3f} s, by held-out {rows}{where}; error on them median {median:.0%}, worst "
            f"{worst:.0%}{others}; at full speed {projection['step_roofline_s']:.3f} s"
        )
    price = "" if projection["price"] is None else f", price {projection['price']:,.0f}"
    return [
        f"step             {projection['step_s']:.3f} s, {projection['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {projection['mfu_6n']:.1%} (6N) ({projection['label']}: products at {basis}, nothing overlapped)",
        f"  {error}",
        *_measured_lines(projection["calibration"]),
        f"  at full speed products {projection['products']:.3f} s, update {projection['update']:.3f} s, collectives in "
        f"a node {projection['link']:.3f} s, between nodes {projection['network']:.3f} s; launches "
        f"{projection['launch']:.3f} s; the step with all "
        f"collectives overlapped {projection['step_overlapped_s']:.3f} s",
        f"  executed FLOPs are {projection['executed_over_model_flops']:.2f} of the model's: recomputation, idle "
        "ticks, copies of KV heads",
        f"  whole run {projection['days']:.1f} days, {projection['instance_hours']:,.0f} instance hours{price}",
    ]
