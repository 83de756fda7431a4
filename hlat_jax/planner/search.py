"""Other layouts for the same nodes: the nearest that fits, and all that fit, ranked by their projected step.

Owns which layouts are tried. What each is worth is `report`'s plan of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from hlat_jax import cost
from hlat_jax.config import Config, resolve
from hlat_jax.planner.report import Site, make_plan, site_layout
from hlat_jax.step import abstract_state, state_bytes

REMATS = ("none", "selective", "full")


def complete(plan: dict[str, Any], config: Config, site: Site) -> dict[str, Any]:
    """Returns the plan; one that does not fit with what binds and, where there is one, the nearest change that fits."""
    if plan["fits"]:
        return plan
    memory = plan["device_bytes"]
    binds = max(("params", "opt_state", "gradients", "activations", "workspace"), key=memory.get)
    return plan | {"binds": binds, "change": _nearest_change(config, site)}


def ranked(config: Config, site: Site, *, most: int = 20) -> list[dict[str, Any]]:
    """Returns the layouts of these nodes that fit, the shortest projected step first, at most `most` of them.

    Each layout appears with the mildest rematerialization that fits.
    """
    rows = []
    for layout in candidates(config, site):
        for remat in REMATS:
            candidate = dataclasses.replace(layout, model=dataclasses.replace(layout.model, remat=remat))
            plan = _tried(candidate, site)
            if plan is not None and plan["fits"] and "projection" in plan:
                rows.append(_row(plan, candidate))
                break
    return sorted(rows, key=lambda row: row["step_s"])[:most]


def _row(plan: dict[str, Any], config: Config) -> dict[str, Any]:
    return {
        "layout": plan["layout"],
        "num_microbatches": config.train.num_microbatches,
        "remat": config.model.remat,
        "total": plan["device_bytes"]["total"],
        "budget": plan["device_bytes"]["budget"],
        "step_s": plan["projection"]["step_s"],
        "tokens_per_s": plan["projection"]["tokens_per_s"],
    }


def candidates(config: Config, site: Site) -> Iterator[Config]:
    """Yields the layouts worth a plan: powers of two, tensor inside a node, either pipe or fsdp, state below memory.

    One row of a device is a microbatch: that holds least, and a pipeline wants many. ZeRO-1 wherever there are
    replicas, sequence parallelism wherever there is tensor.
    """
    devices, node = site.num_devices, cost.target(site.target).num_devices
    for tensor, pipe, fsdp in itertools.product(_powers(node), _powers(64), _powers(8 * node)):
        data = devices // (tensor * pipe * fsdp)
        rows = config.data.batch_size // (data * fsdp) if data else 0
        if (pipe > 1 and fsdp > 1) or config.model.num_layers % pipe or rows == 0 or (pipe > rows):
            continue
        degrees = {"tensor": tensor, "pipe": pipe, "fsdp": fsdp, "data": data}
        degrees |= {"zero1": data > 1, "sequence_parallel": tensor > 1}
        candidate = _changed(config, degrees, train={"num_microbatches": rows})
        if candidate is not None and _state_fits(candidate, site):
            yield candidate


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(int(math.log2(max(1, limit))) + 1)]


def _changed(config: Config, parallel: dict[str, Any], **sections: dict[str, Any]) -> Config | None:
    """Returns a config with other values, or None where they do not fit each other."""
    tree = config.to_dict()
    for name, values in ({"parallel": parallel} | sections).items():
        tree[name] |= values
    if tree["parallel"]["tensor"] > tree["model"]["num_kv_heads"]:
        tree["model"]["fuse_qkv"] = False
    try:
        return resolve(tree)
    except ValueError:
        return None


def _state_fits(config: Config, site: Site) -> bool:
    target = cost.target(site.target)
    try:
        return state_bytes(abstract_state(config, site_layout(config, site))) < target.device.memory_bytes
    except ValueError:
        return False


def _tried(config: Config, site: Site) -> dict[str, Any] | None:
    try:
        return make_plan(config, site)
    except ValueError:
        return None


def _nearest_change(config: Config, site: Site) -> str | None:
    """Returns the first change, from the mildest on, after which the plan fits."""
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
        if plan is not None and plan["fits"]:
            named = {"parallel": parallel, "model": model, "train": train}
            return ", ".join(f"{name}.{key}={value}" for name, part in named.items() for key, value in part.items())
    if site.nodes < 4096 and (plan := _tried(config, dataclasses.replace(site, nodes=2 * site.nodes))) and plan["fits"]:
        return f"--nodes={2 * site.nodes}"
    return None
