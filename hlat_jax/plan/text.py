"""A plan as text; every number comes from the plan's dict."""

from __future__ import annotations

from typing import Any

from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.plan.instructions import (
    LIMIT_FLAG,
    NOTE,
    OPERATION_ADVICE,
    PROGRAM_LIMIT,
    program_advice,
    rounded,
)
from hlat_jax.plan.memory import STAGES_ERROR, TEMPORARIES_ERROR, DeviceBytes


def memory_line(memory: DeviceBytes, budget: int) -> str:
    """Returns the line that `train` prints for the memory of a device."""
    verdict = "" if memory.upper <= budget else "; MAY NOT FIT" if memory.total <= budget else "; DOES NOT FIT"
    verdict += ": try python -m hlat_jax.plan --search" if verdict else ""
    return (
        f"memory planned   {format_bytes(memory.total)} of {format_bytes(budget)} on the fullest device: "
        f"{format_bytes(memory.state)} state, {format_bytes(memory.temporaries)} temporaries (estimated){verdict}"
    )


def full(plan: dict[str, Any]) -> str:
    """Returns the whole plan."""
    lines = [_title(plan), *_run_lines(plan), "", "Bytes of one device", *_memory_lines(plan), ""]
    lines += ["Collectives of one step, per device", *_collective_lines(plan), ""]
    lines += _projection_lines(plan) + _published_lines(plan)
    lines += ["", "Saving", *_saving_lines(plan)]
    return "\n".join(lines)


def partitioned(part: dict[str, Any]) -> str:
    """Returns the figures of the program compiled for virtual devices, next to the planned ones."""
    lines = [
        f"Compiled for {part['devices']} virtual CPU devices ({degrees(part['layout'])}), {part['seconds']:.0f} s",
        f"  arguments    {format_bytes(part['argument_bytes'])}, "
        f"planned {format_bytes(part['planned_argument_bytes'])}",
        f"  temporaries  {format_bytes(part['temporary_bytes'])}, "
        f"planned {format_bytes(part['planned_temporary_bytes'])} ({part['policy']} on both sides)",
        f"  {'collectives':<52} {'compiled':>10} {'planned':>10} {'compiled':>12} {'planned':>12}",
    ]
    lines += [
        f"  {row['kind']:<19} {' x '.join(row['axes']):<32} {row['count']:>10,} {row['planned_count']:>10,} "
        f"{format_bytes(row['payload_bytes']):>12} {format_bytes(row['planned_payload_bytes']):>12}"
        for row in part["collectives"]
    ]
    return "\n".join(lines)


def ranking(found: dict[str, Any], where: str) -> str:
    """Returns the table of layouts of `search.ranked` on nodes called `where`, the best first, or why there is none."""
    if not found["layouts"]:
        return (
            f"No layout for {where}: no degrees with tensor inside a node pass every check; change the batch or nodes."
        )
    if not found["rows"]:
        least = f"none of the {found['planned']} planned, of {found['layouts']:,}; the smallest needs "
        least += f"{format_bytes(found['smallest'])} before workspace"
        tight = f" {_tight(found)}." if found["tight"] else ""
        return f"No layout for {where} fits {format_bytes(found['budget'])} per device: {least}.{tight} Use more nodes."
    by = "projected step" if found["by"] == "step_s" else "memory, as the speed of the device is unknown"
    left = ""
    if found["rest"] is not None:
        least = f"{found['rest']:.3f} s" if found["by"] == "step_s" else format_bytes(found["rest"])
        left = f"; the others take at least {least}"
    left += f"; {_tight(found)}" if found["tight"] else ""
    by += _doubtful(found)
    lines = [
        f"Layouts that fit {where}, by {by}; {found['planned']} of {found['layouts']:,} planned{left}",
        "rank  pipe  data  fsdp  tensor  sequence  zero1  microbatches  remat      memory of a device    "
        "step s    tokens/s",
    ]
    for rank, row in enumerate(found["rows"], 1):
        layout = row["layout"]
        speed = f"{row['step_s']:>8.3f}  {row['tokens_per_s']:>10,.0f}" if row["step_s"] else f"{'-':>8}  {'-':>10}"
        lines.append(
            f"{rank:>4}  {layout['pipe']:>4}  {layout['data']:>4}  {layout['fsdp']:>4}  {layout['tensor']:>6}  "
            f"{_yes(layout['sequence_parallel']):<8}  {_yes(layout['zero1']):<5}  {row['num_microbatches']:>12}  "
            f"{row['remat']:<9}  {format_bytes(row['total']):>9} of {format_bytes(row['budget'])}  {speed}"
            + ("  ?" if row["disputed_groups"] else "")
        )
    return "\n".join(lines)


def _doubtful(found: dict[str, Any]) -> str:
    if not any(row["disputed_groups"] for row in found["rows"]):
        return ""
    return ", then those marked ?, whose groups of cores pages contradict each other on or do not name"


def _tight(found: dict[str, Any]) -> str:
    return (
        f"{found['tight']} not ranked: they fit only if temporaries, which are estimated within "
        f"{TEMPORARIES_ERROR:.0%}, with pipeline stages {STAGES_ERROR:.0%}, take no more than the estimate"
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def degrees(layout: dict[str, Any]) -> str:
    """Returns the degrees of a layout that are above one."""
    named = [f"{axis} {layout[axis]}" for axis in ("pipe", "data", "fsdp", "tensor") if layout[axis] > 1]
    extras = [", ZeRO-1"] * layout["zero1"] + [", sequence parallel"] * layout["sequence_parallel"]
    return " x ".join(named or ["one device"]) + "".join(extras)


def _title(plan: dict[str, Any]) -> str:
    layout = plan["layout"]
    return f"{plan['config']} on {plan['nodes']} x {plan['target']}: {layout['devices']:,} devices, {degrees(layout)}"


def _run_lines(plan: dict[str, Any]) -> list[str]:
    run = plan["run"]
    epochs = "" if run["epochs"] is None else f", {run['epochs']:.2f} epochs of the data"
    return [
        f"parameters       {run['params']:,}",
        f"FLOPs per token  {run['flops_per_token_6n']:.4g} (6N), {run['flops_per_token']:.4g} with attention",
        f"steps            {run['steps']:,} of {run['tokens_per_step']:,} tokens: {run['tokens']:,} tokens{epochs}, "
        f"{run['flops']:.3g} FLOPs",
        *_schedule_lines(plan["schedule"]),
        f"programs         {run['programs']} to compile",
        *(instruction_lines(plan["instructions"]) if "instructions" in plan else []),
    ]


def instruction_lines(found: dict[str, Any]) -> list[str]:
    """Returns the estimated instructions of the programs, and a warning with what to change if a limit is below."""
    name, program = max(found["programs"].items(), key=lambda item: item[1]["unrolled"])
    largest = max(one["largest"] for one in found["programs"].values())
    line = f"instructions     about {rounded(program['unrolled'])} in program {name} with every loop unrolled, "
    line += f"{rounded(program['looped'])} with none; {rounded(largest)} in the largest operation ({NOTE})"
    whose = "public logs show" if found["limit"] == PROGRAM_LIMIT else f"{LIMIT_FLAG} and public logs give"
    limits = f"{whose} {found['limit']:,} per program and {found['operation_limit']:,} per operation"
    advice = []
    above = [name for name, one in found["programs"].items() if one["judged"] > found["limit"]]
    if above:
        advice.append(f"  WARNING for {', '.join(above)}: {limits}; {program_advice(above)}")
    if largest > found["operation_limit"]:
        advice.append(f"  WARNING: {limits}; {OPERATION_ADVICE}")
    return [line, *(advice or [f"  below the limits: {limits}"])]


def _schedule_lines(schedule: dict[str, Any]) -> list[str]:
    m, p = schedule["num_microbatches"], schedule["num_stages"]
    line = f"microbatches     {m} of {schedule['rows']} sequence(s) per device, remat {schedule['remat']}"
    if p == 1:
        return [line]
    bubble = f"(p - 1) / (m + p - 1) = {p - 1} / {m + p - 1} = {schedule['bubble']:.1%} of the ticks"
    return [line, f"pipeline         {p} stages, bubble {bubble}"]


def _memory_lines(plan: dict[str, Any]) -> list[str]:
    memory, m = plan["device_bytes"], plan["schedule"]["num_microbatches"]
    logits = format_bytes(memory["logits"])
    notes = {
        "params": "exact",
        "opt_state": "exact",
        "batch": "exact",
        "gradients": "of the batch, exact" if m == 1 else f"sums over {m} microbatches, exact",
        "activations": "kept for the backward pass; estimated",
        "workspace": f"the rest of the peak; estimated. Logits of a microbatch {logits}",
    }
    lines = [f"  {name:<14} {format_bytes(memory[name]):>12}  {note}" for name, note in notes.items()]
    lines.append(
        f"  {'total':<14} {format_bytes(memory['total']):>12}  of a budget of {format_bytes(memory['budget'])}"
    )
    if plan["fits_surely"]:
        return [*lines, "  fits"]
    if plan["fits"]:
        upper, error = format_bytes(memory["upper"]), memory["temporaries_error"]
        lines.append(f"  MAY NOT FIT: temporaries are estimated within {error:.0%}, so it may take {upper}")
    else:
        lines.append(f"  DOES NOT FIT; the largest part is {plan['binds']}")
    change = plan.get("change")
    lines.append(
        f"  nearest change that certainly fits: {change}" if change else "  no single change fits; try --search"
    )
    return lines


def _collective_lines(plan: dict[str, Any]) -> list[str]:
    lines = [f"  {'kind':<19} {'axes':<32} {'group':>5} {'count':>7} {'payload':>12} {'sent':>12}  over"]
    for row in plan["collectives"]:
        axes = " x ".join(row["axes"])
        lines.append(
            f"  {row['kind']:<19} {axes:<32} {row['group']:>5} {row['count']:>7,} "
            f"{format_bytes(row['payload_bytes']):>12} {format_bytes(row['sent_bytes']):>12}  {row['over']}"
        )
    lines += [f"  disputed: {words}" for words in plan["disputed_groups"]]
    return lines if plan["collectives"] else ["  none"]


def _projection_lines(plan: dict[str, Any]) -> list[str]:
    projection = plan.get("projection")
    if projection is None:
        return ["no projection: the speed of this device is unknown"]
    price = "" if projection["price"] is None else f", price {projection['price']:,.0f}"
    return [
        f"step             {projection['step_s']:.3f} s, {projection['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {projection['mfu_6n']:.1%} (6N) ({projection['label']}: {_basis(projection)}, nothing overlapped)",
        *_calibration_lines(projection),
        f"  at full speed products {projection['products']:.3f} s, update {projection['update']:.3f} s, collectives in "
        f"a node {projection['link']:.3f} s, between nodes {projection['network']:.3f} s; the step with all "
        f"collectives overlapped {projection['step_overlapped_s']:.3f} s",
        f"  executed FLOPs are {projection['executed_over_model_flops']:.2f} of the model's: recomputation, idle "
        "ticks, copies of KV heads",
        f"  whole run {projection['days']:.1f} days, {projection['instance_hours']:,.0f} instance hours{price}",
    ]


def _basis(projection: dict[str, Any]) -> str:
    found = projection["calibration"]
    if not found:
        return "products at full speed"
    return f"products at {found['efficiency']:.0%} of full speed, as published for {found['stack']}"


def _calibration_lines(projection: dict[str, Any]) -> list[str]:
    found = projection["calibration"]
    if found is None:
        return ["  not calibrated: no published rows for this kind of device; a real step is slower"]
    where = f"published rows of {found['device']}"
    if found["is_extrapolated"]:
        where += ", extrapolated to this device, for which none are published"
    others = "".join(f"; as for {name} {step:.3f} s" for name, step in found["other_stacks"].items())
    return [
        f"  range {found['step_low_s']:.3f} to {found['step_high_s']:.3f} s: that of models held out of the fits, "
        f"one for each training library, to {where}; error on them: median {found['median_error']:.0%}, worst "
        f"{found['worst_error']:.0%}{others}; at full speed {projection['step_roofline_s']:.3f} s",
    ]


def _published_lines(plan: dict[str, Any]) -> list[str]:
    projection = plan.get("projection")
    if not projection or not projection["published"]:
        return []
    ours = projection["tokens_per_s_and_node"]
    lines = [f"published for trn1.32xlarge, in tokens/s per node; projected here: {ours:,.0f}"]
    return lines + [
        f"  {row['tokens_per_s_and_node']:>8,.0f}  {row['nodes']} nodes, {row['layout']}, sequences of "
        f"{row['seq_len']:,} ({row['source']})"
        for row in projection["published"]
    ]


def _saving_lines(plan: dict[str, Any]) -> list[str]:
    saving = plan["saving"]
    host = f" of {format_bytes(saving['host_memory_bytes'])}" if saving["host_memory_bytes"] else ""
    return [
        f"  checkpoint {format_bytes(saving['checkpoint_bytes'])}, {saving['seconds']:.1f} s at "
        f"{saving['disk_bytes_per_s'] / 1e9:g} GB/s per node",
        f"  host memory at most {format_bytes(saving['host_bytes'])}{host} per node while saving",
    ]
