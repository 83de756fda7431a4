"""Other layouts for the same nodes: the nearest that fits, and all that fit, ranked by projected step time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from hlat_jax.config import Config
from hlat_jax.facts import hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.core_groups import DISPUTED
from hlat_jax.parallel.degrees import all_degrees, passes, verdicts
from hlat_jax.parallel.sharding import MESH_AXES, abstract_layout
from hlat_jax.plan.floor import Floor, floor, held
from hlat_jax.plan.memory import STAGES_ERROR, TEMPORARIES_ERROR
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.resolve import resolve
from hlat_jax.store.progress import Status

REMATS = ("none", "selective", "full")


def complete(plan: dict[str, Any], config: Config, site: Site) -> dict[str, Any]:
    """Returns the plan; if it may not fit, with the nearest change that surely does, and with what is largest."""
    if plan["fits_surely"]:
        return plan
    memory = plan["device_bytes"]
    binds = max(("params", "opt_state", "gradients", "activations", "workspace"), key=memory.get)
    return plan | {"binds": binds, "change": _nearest_change(config, site)}


def ranked(
    config: Config, site: Site, *, most: int = 10, max_plans: int = 48, status: Status | None = None
) -> dict[str, Any]:
    """Returns the best layouts for these nodes that surely fit, and counts of the search.

    Every combination of degrees, ZeRO-1, sequence parallelism, microbatches and rematerialization is scored by the
    `floor` of its plan. In order of score, those that may be among the best are planned. The score is the projected
    step time, or bytes if the speed of the target is unknown.

    Args:
      config: config of the run.
      site: the nodes.
      most: number of layouts returned, each with its best schedule.
      max_plans: largest number of combinations planned.
      status: progress bar to keep up to date, as if so many were planned.

    Returns:
      {"rows": the best first, those with disputed groups after all others, "by": "step_s" or "total", "layouts": number
      of combinations, "planned": number of those planned, "tight": number of these that fit only by the estimate of
      temporaries, which may be too low, "smallest": fewest bytes of a floor, "budget": bytes of a device, "rest": floor
      of the best combination left out; None if none was left out that could be among the best}.
    """
    target = hardware.target(site.target)
    budget = target.device.memory_bytes - target.device.reserved_bytes
    by = "step_s" if target.device.peak_flops else "total"
    scored = sorted(candidates(config, site), key=lambda pair: (getattr(pair[0], by), pair[0].total))

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        return bool(row["disputed_groups"]), row[by]

    best: dict[tuple, dict[str, Any]] = {}  # row of every choice of degrees
    too_large: list[Config] = []
    tight = 0
    planned, rest, status = 0, None, status or Status()
    for least, candidate in scored:
        if least.total > budget or any(_holds_more(candidate, other) for other in too_large):
            continue
        bound, degrees = getattr(least, by), _degrees(candidate)
        listed = sorted(row[by] for row in best.values() if not row["disputed_groups"])
        if len(listed) >= most and bound >= listed[most - 1]:
            break
        if degrees in best and (_is_disputed(candidate, site), bound) >= rank(best[degrees]):
            continue
        if planned == max_plans:
            rest = bound
            break
        planned += 1
        row = _row(make_plan(candidate, site), candidate)
        status.share, status.text = planned / max_plans, f"{planned} of at most {max_plans} plans"
        if row["upper"] > budget:
            too_large.append(candidate)
            tight += row["total"] <= budget
        elif degrees not in best or rank(row) < rank(best[degrees]):
            best[degrees] = row
    rows = sorted(best.values(), key=rank)[:most]
    result = {"rows": rows, "by": by, "layouts": len(scored), "planned": planned, "budget": budget, "rest": rest}
    return result | {"tight": tight} | {"smallest": min((least.total for least, _ in scored), default=None)}


def _degrees(config: Config) -> tuple[int, ...]:
    return tuple(getattr(config.parallel, axis) for axis in MESH_AXES)


def _is_disputed(config: Config, site: Site) -> bool:
    return site.server is not None and bool(verdicts(config, site.num_devices, site.server)[DISPUTED])


def _holds_more(candidate: Config, other: Config) -> bool:
    """Returns whether a candidate takes at least the memory of another one with the same degrees."""
    ours, theirs = candidate.parallel, other.parallel
    return (
        _degrees(candidate) == _degrees(other)
        and ours.zero1 <= theirs.zero1
        and ours.sequence_parallel <= theirs.sequence_parallel
        and candidate.train.num_microbatches <= other.train.num_microbatches
        and REMATS.index(candidate.model.remat) <= REMATS.index(other.model.remat)
    )


def _row(plan: dict[str, Any], config: Config) -> dict[str, Any]:
    projection = plan.get("projection", {})
    return {
        "layout": plan["layout"],
        "num_microbatches": config.train.num_microbatches,
        "remat": config.model.remat,
        "disputed_groups": plan["disputed_groups"],
        "total": plan["device_bytes"]["total"],
        "upper": plan["device_bytes"]["upper"],
        "budget": plan["device_bytes"]["budget"],
        "step_s": projection.get("step_s"),
        "tokens_per_s": projection.get("tokens_per_s"),
    }


def candidates(config: Config, site: Site) -> Iterator[tuple[Floor, Config]]:
    """Yields (floor of its plan, config) for every layout that passes all checks, with tensor inside a node.

    On Neuron these include the groups of cores that collectives support, see `core_groups`.
    """
    target, server = hardware.target(site.target), site.server
    for degrees in all_degrees(site.num_devices):
        replicas = degrees["data"] * degrees["fsdp"]
        if degrees["tensor"] > target.num_devices or config.data.batch_size % replicas:
            continue
        rows = config.data.batch_size // replicas
        for zero1, sequence_parallel in itertools.product(_switch(degrees["data"]), _switch(degrees["tensor"])):
            parallel = degrees | {"zero1": zero1, "sequence_parallel": sequence_parallel}
            candidate = _changed(config, parallel, train={"num_microbatches": rows})
            if candidate is not None and passes(candidate, site.num_devices, server=server):
                yield from _schedules(candidate, site, rows=rows)


def _switch(degree: int) -> tuple[bool, ...]:
    return (True, False) if degree > 1 else (False,)


def _schedules(config: Config, site: Site, *, rows: int) -> Iterator[tuple[Floor, Config]]:
    """Yields a layout with every number of microbatches that divides its rows and every rematerialization."""
    target = hardware.target(site.target)
    layout = abstract_layout(config.parallel, site.num_devices, num_kv_heads=config.model.num_kv_heads)
    holds = held(config, layout)
    for num_microbatches in (m for m in range(1, rows + 1) if rows % m == 0):
        train = dataclasses.replace(config.train, num_microbatches=num_microbatches)
        for remat in REMATS:
            model = dataclasses.replace(config.model, remat=remat)
            candidate = dataclasses.replace(config, model=model, train=train)
            yield floor(candidate, layout, target=target, holds=holds), candidate


def _changed(config: Config, parallel: dict[str, Any], **sections: dict[str, Any]) -> Config | None:
    """Returns a config with other values, or None if these are invalid together."""
    tree = config.to_dict()
    for name, values in ({"parallel": parallel} | sections).items():
        tree[name] |= values
    if tree["parallel"]["tensor"] > tree["model"]["num_kv_heads"]:
        tree["model"]["fuse_qkv"] = False
    try:
        return resolve(tree)
    except ValueError:
        return None


def _tried(config: Config, site: Site) -> dict[str, Any] | None:
    try:
        return make_plan(config, site)
    except ValueError:
        return None


def _nearest_change(config: Config, site: Site) -> str | None:
    """Returns the mildest change with which the plan surely fits, or None."""
    degrees = {axis: getattr(config.parallel, axis) for axis in ("pipe", "fsdp", "tensor")}
    rows = config.data.batch_size // max(1, site.num_devices // math.prod(degrees.values()))
    changes = [({}, {}, {"num_microbatches": rows}), ({"zero1": True}, {}, {})]
    changes += [({"sequence_parallel": True}, {}, {})] if degrees["tensor"] > 1 else []
    changes += [({}, {"remat": remat}, {}) for remat in REMATS[1:]]
    doubled = [{axis: degree * 2} for axis, degree in degrees.items()]
    changes += [(more | extra, {}, {}) for extra in ({}, {"zero1": True}) for more in doubled]
    changes += [({axis: degree * 4, "zero1": True}, {}, {}) for axis, degree in degrees.items()]
    for parallel, model, train in changes:
        candidate = _changed(config, {"data": -1} | parallel, model=model, train=train)
        plan = None if candidate is None or candidate == config else _tried(candidate, site)
        if plan is not None and plan["fits_surely"]:
            named = {"parallel": parallel, "model": model, "train": train}
            return ", ".join(f"{name}.{key}={value}" for name, part in named.items() for key, value in part.items())
    more = _tried(config, dataclasses.replace(site, nodes=2 * site.nodes)) if site.nodes < 4096 else None
    return f"--nodes={2 * site.nodes}" if more and more["fits_surely"] else None


def ranking(result: dict[str, Any], where: str) -> str:
    """Returns the result of `ranked` for nodes called `where` as a table, the best first, or why there is none."""
    planned, layouts = result["planned"], f"{result['layouts']:,}"
    tight = (
        f"{result['tight']} not ranked: they fit only if temporaries, which are estimated within "
        f"{TEMPORARIES_ERROR:.0%}, with pipeline stages {STAGES_ERROR:.0%}, take no more than the estimate"
    )
    if not result["layouts"]:
        return (
            f"No layout for {where}: no degrees with tensor inside a node pass every check; change the batch or nodes."
        )
    if not result["rows"]:
        budget, smallest = format_bytes(result["budget"]), format_bytes(result["smallest"])
        least = f"none of the {planned} planned, of {layouts}; the smallest needs {smallest} before workspace."
        least += f" {tight}." if result["tight"] else ""
        return f"No layout for {where} fits {budget} per device: {least} Use more nodes."
    has_speed = result["by"] == "step_s"
    title = f"Layouts that fit {where}, by "
    title += "projected step" if has_speed else "memory, as the speed of the device is unknown"
    if any(row["disputed_groups"] for row in result["rows"]):
        title += ", then those marked ?, whose groups of cores pages contradict each other on or do not name"
    title += f"; {planned} of {layouts} planned"
    if result["rest"] is not None:
        least = f"{result['rest']:.3f} s" if has_speed else format_bytes(result["rest"])
        title += f"; the others take at least {least}"
    title += f"; {tight}" if result["tight"] else ""
    lines = [
        title,
        "rank  pipe  data  fsdp  tensor  sequence  zero1  microbatches  remat      memory of a device    "
        "step s    tokens/s",
    ]
    for rank, row in enumerate(result["rows"], 1):
        layout = row["layout"]
        sequence, zero1 = ("yes" if layout[key] else "no" for key in ("sequence_parallel", "zero1"))
        speed = f"{row['step_s']:>8.3f}  {row['tokens_per_s']:>10,.0f}" if row["step_s"] else f"{'-':>8}  {'-':>10}"
        lines.append(
            f"{rank:>4}  {layout['pipe']:>4}  {layout['data']:>4}  {layout['fsdp']:>4}  {layout['tensor']:>6}  "
            f"{sequence:<8}  {zero1:<5}  {row['num_microbatches']:>12}  {row['remat']:<9}  "
            f"{format_bytes(row['total']):>9} of {format_bytes(row['budget'])}  {speed}"
            + ("  ?" if row["disputed_groups"] else "")
        )
    return "\n".join(lines)
