"""Ranks other layouts for the same nodes that fit by projected step time.

A step takes seconds to trace, so an estimate by arithmetic chooses the layouts to trace. Its bytes leave out loaded
programs and temporaries except gradients and kept activations, its time elementwise work and small collectives.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from hlat_jax.config import Config
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.parallel import rows as rows_lib
from hlat_jax.parallel.degrees import all_degrees, are_degrees_valid
from hlat_jax.parallel.sharding import CONTEXT, TENSOR, Layout
from hlat_jax.plan import roofline
from hlat_jax.plan.collectives import Collective
from hlat_jax.plan.report import Site, make_plan, site_layout
from hlat_jax.precision import POLICIES
from hlat_jax.program import make_program, state_bytes
from hlat_jax.resolve import resolve
from hlat_jax.run import costs
from hlat_jax.store.progress import Status

REMATS = ("none", "selective", "full")


def rank_layouts(
    config: Config, site: Site, *, most: int = 10, max_plans: int = 48, status: Status | None = None
) -> dict[str, Any]:
    """Returns layouts for these nodes that surely fit, each with its best schedule.

    Layouts are planned in the order of their estimated step time, or bytes if the speed of the target is unknown. The
    search ends if `most` fit or `max_plans` are planned. `status` is kept up to date.

    Returns:
      A dict. "rows" has the best first, and rows with disputed groups last. "by" is "step_s" or "total", "budget" the
      bytes of a device. "layouts" and "planned" are the numbers of combinations and of plans.
    """
    target = hardware.node(site.target)
    budget = target.device.program_bytes
    by = "step_s" if target.device.peak_flops else "total"
    scored = sorted(candidates(config, site), key=lambda pair: (getattr(pair[0], by), pair[0].total))
    best: dict[tuple, dict[str, Any]] = {}  # row of every choice of degrees
    too_large: list[tuple] = []
    planned, status = 0, status or Status()
    for estimated, candidate in scored:
        degrees = dataclasses.astuple(candidate.parallel)
        held = candidate.train.num_microbatches, REMATS.index(candidate.model.remat)
        holds_more = any(degrees == d and held[0] <= m and held[1] <= remat for d, m, remat in too_large)
        if estimated.total > budget or degrees in best or holds_more:
            continue
        if len(best) == most or planned == max_plans:
            break
        planned += 1
        plan = make_plan(candidate, site)
        status.share, status.text = planned / max_plans, f"{planned} of at most {max_plans} plans"
        if plan["fits_surely"]:
            best[degrees] = _row(plan, candidate)
        else:
            too_large.append((degrees, *held))
    rows = sorted(best.values(), key=lambda row: (bool(row["disputed_groups"]), row[by]))
    return {"rows": rows, "by": by, "layouts": len(scored), "planned": planned, "budget": budget}


def _row(plan: dict[str, Any], config: Config) -> dict[str, Any]:
    projection = plan.get("projection", {})
    return {
        "layout": plan["layout"],
        "num_microbatches": config.train.num_microbatches,
        "remat": config.model.remat,
        "disputed_groups": plan["disputed_groups"],
        "total": plan["device_bytes"]["total"],
        "budget": plan["device_bytes"]["budget"],
        "step_s": projection.get("step_s"),
        "tokens_per_s": projection.get("tokens_per_s"),
    }


def candidates(config: Config, site: Site) -> Iterator[tuple[Estimate, Config]]:
    """Yields (estimate, config) for every layout that passes all checks, with tensor inside a node.

    ZeRO-1 and sequence parallelism are on if the degrees allow them. The schedules are every number of microbatches
    that divides the rows of a device and every rematerialization. On Neuron only groups of cores that collectives
    support are used, see `core_groups`.
    """
    target = hardware.node(site.target)
    context = max(1, config.parallel.context)
    for degrees in all_degrees(site.num_devices // context, context=context):
        replicas = degrees["data"] * degrees["fsdp"]
        if degrees["tensor"] > target.num_devices() or config.data.batch_size < replicas:
            continue
        rows, is_padded = divmod(config.data.batch_size, replicas)
        tree = config.to_dict()
        tree["parallel"] |= degrees | {
            "zero1": degrees["data"] * context > 1,
            "sequence_parallel": degrees["tensor"] > 1,
        }
        tree["train"]["num_microbatches"] = -1 if is_padded else rows
        tree["model"]["fuse_qkv"] &= degrees["tensor"] <= config.model.num_kv_heads
        try:
            candidate = resolve(tree)
        except ValueError:  # these values are invalid together
            continue
        if not are_degrees_valid(candidate, site.num_devices, server=site.server):
            continue
        layout = site_layout(candidate, site)
        program = make_program(candidate, layout)
        state, attention = program.abstract_state, program.choices["attention"].name
        schedules = [-1] if is_padded else [m for m in range(1, rows + 1) if rows % m == 0]
        for num, remat in itertools.product(schedules, REMATS):
            train = dataclasses.replace(candidate.train, num_microbatches=num)
            model = dataclasses.replace(candidate.model, remat=remat)
            changed = dataclasses.replace(candidate, model=model, train=train)
            yield estimate(changed, layout, target=target, state=state, attention=attention), changed


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a plan by arithmetic.

    Attributes:
      total: the bytes of one device.
      step_s: the seconds of a projected step without overlap, or 0 if the speed of the target is unknown.
    """

    total: int
    step_s: float


def estimate(config: Config, layout: Layout, *, target: hardware.Instance, state: Any, attention: str) -> Estimate:
    """Returns the estimate of `report.make_plan` of a config under a layout.

    `state` is the abstract state under that layout, `attention` the implementation chosen for the target.
    """
    model, policy = config.model, POLICIES[config.precision.policy]
    pipe, tensor, num_microbatches = (
        layout.degrees["pipe"],
        layout.degrees["tensor"],
        rows_lib.num_microbatches(config, layout),
    )
    params, num_bytes = state_bytes(state["params"]), state_bytes(state)
    ticks, num_layers = num_microbatches + pipe - 1, model.num_layers // pipe
    tokens = rows_lib.replica_rows(config.data.batch_size, layout) // num_microbatches * config.data.seq_len
    tokens //= layout.degrees["context"]
    itemsize = jnp.dtype(policy.products).itemsize
    gradients = params // jnp.dtype(policy.param).itemsize * jnp.dtype(policy.accumulate).itemsize
    if layout.reduce_gradients == "microbatch":
        gradients = state_bytes(state["opt_state"]["inner"]["mu"])
    width = model.embed_dim // (tensor if layout.sequence_parallel else 1)  # the layer's input, or its norm
    if model.remat != "full":
        width += (2 * (model.num_heads + model.num_kv_heads) * model.head_dim + 2 * model.mlp_dim) // tensor
    if model.remat == "none" and attention == "einsum":
        width += model.num_heads // tensor * config.data.seq_len
    slots = 2 * pipe - 1 if pipe > 1 else 1
    total = num_bytes + gradients + slots * num_layers * tokens * width * itemsize
    if not target.device.peak_flops:
        return Estimate(total, 0.0)
    # of one device, with the idle ticks of a pipeline
    flops = ticks * tokens * costs.flops_per_token(model, config.data.seq_len) / (pipe * tensor)
    flops *= 4 / 3 if model.remat == "full" else 1
    seconds = flops / target.device.peak_flops + 2 * num_bytes / target.device.memory_bytes_per_s
    seconds /= roofline.efficiency(target)
    again, runs, x_bytes = model.remat != "none", ticks * num_layers, tokens * model.embed_dim * itemsize
    weights = params // num_layers * layout.size(("fsdp",))
    kv_heads = max(1, model.num_kv_heads // tensor)
    keys_and_values = 2 * tokens * layout.size(CONTEXT) * kv_heads * model.head_dim * itemsize
    for axes, kind, sent, trips in (
        (TENSOR, "all-reduce", x_bytes, (4 + again) * runs),
        (("fsdp",), "all-gather", weights, (1 + again) * runs),
        (("fsdp",), "reduce-scatter", weights, runs),
        (CONTEXT, "all-gather", keys_and_values, (2 + again) * runs),
        (CONTEXT, "reduce-scatter", keys_and_values, runs),
        (("data", *CONTEXT), "all-reduce", gradients, 1),
        (("pipe",), "all-reduce", x_bytes // (tensor if layout.sequence_parallel else 1), 4 * num_microbatches),
    ):
        if wide := layout.wide(axes):
            collective = Collective(kind, wide, layout.size(wide), sent)
            seconds += trips * roofline.collective_seconds(collective, target=target, mesh=layout.mesh)[1]
    return Estimate(total, seconds)


def ranking_table(result: dict[str, Any], where: str) -> str:
    """Returns the result of `rank_layouts` for nodes called `where` as a table, or a line if no layout fits."""
    planned, layouts = result["planned"], f"{result['layouts']:,}"
    if not result["rows"]:
        budget = format_bytes(result["budget"])
        return (
            f"No layout for {where} surely fits {budget} per device: {planned} were planned, of {layouts} that pass "
            "every check with tensor inside a node. Change the batch or the number of nodes."
        )
    by = "projected step" if result["by"] == "step_s" else "memory, as the speed of the device is unknown"
    title = f"Layouts that fit {where}, by {by}; {planned} of {layouts} planned"
    if (context := result["rows"][0]["layout"]["context"]) > 1:
        title += f"; parallel.context={context}"
    if any(row["disputed_groups"] for row in result["rows"]):
        title += "; of those marked ? pages contradict each other on the groups of cores or do not name them"
    lines = [
        title,
        "rank  pipe  data  fsdp  tensor  microbatches  remat      memory of a device    step s    tokens/s",
    ]
    for rank, row in enumerate(result["rows"], 1):
        layout = row["layout"]
        speed = f"{row['step_s']:>8.3f}  {row['tokens_per_s']:>10,.0f}" if row["step_s"] else f"{'-':>8}  {'-':>10}"
        lines.append(
            f"{rank:>4}  {layout['pipe']:>4}  {layout['data']:>4}  {layout['fsdp']:>4}  {layout['tensor']:>6}  "
            f"{row['num_microbatches']:>12}  {row['remat']:<9}  "
            f"{format_bytes(row['total']):>9} of {format_bytes(row['budget'])}  {speed}"
            + ("  ?" if row["disputed_groups"] else "")
        )
    return "\n".join(lines)
