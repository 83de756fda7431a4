"""What `model.remat="budget:12GiB"` stands for: chosen before the step is compiled, printed, and kept with the run.

The budget is for the temporaries of the whole step on one device, as the compiler counts them. It becomes a choice of
names, `saved:NAME,...`, which is a value of `model.remat` like any other: so the step knows nothing of budgets, a
printed choice can be set in a config, and a resumed run computes with the very choice of its checkpoint.

Owns when a choice is made anew: for another budget, mesh, device or JAX, or where the step has no longer values of its
names. How it is made is in `passes.remat`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from hlat_jax.byte_sizes import format_bytes, parse_bytes
from hlat_jax.config import REMAT_BUDGET, Config
from hlat_jax.host.distributed import exchange, is_first
from hlat_jax.parallel.sharding import Layout
from hlat_jax.passes import remat
from hlat_jax.passes.liveness import temporaries
from hlat_jax.passes.naming import MissingValues, RematChoice
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.step import step_arguments, traced_step

RECORD_FILE = "remat.json"
# What beside the mesh says how much of a step lies on a device.
_SHARED = ("zero1", "sequence_parallel", "reduce_gradients", "bucket_bytes")


def resolved(config: Config, layout: Layout, *, recorded: dict[str, Any] | None) -> tuple[Config, dict | None]:
    """Returns the config with a choice in the place of a budget, and its record; both unchanged where none is asked.

    Every process compiles the same programs, and the largest of their measurements counts.

    Args:
      config: of the run.
      layout: over the devices that there are.
      recorded: what this returned for the checkpoint that the run goes on from; None: there is none.

    Raises:
      ValueError: none of the programs tried fits the budget.
    """
    if not is_asked(config):
        return config, None
    facts = {
        "asked": config.model.remat,
        "mesh": layout.degrees,
        "parallel": {key: getattr(config.parallel, key) for key in _SHARED},
        "device": layout.mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
    }
    if recorded is not None and recorded.items() >= facts.items():
        again = _with(config, recorded["choice"])
        try:
            traced_step(again, layout)
        except MissingValues:
            _tell("remat            chosen anew: the step no longer has values that the checkpoint's choice names")
        else:
            _tell(f"remat            {recorded['choice']}, as the checkpoint has it for {facts['asked']}")
            return again, recorded

    def measured(traced: Any) -> int:
        return max(map(int, exchange(str(remat.temporaries(traced)))))

    plan = _searched(config, layout, measured)
    record = facts | {"choice": _written(plan.choice)}
    keys = ("budget_bytes", "measured_bytes", "predicted_bytes", "flops", "predicted_flops", "plain", "full")
    record |= json.loads(json.dumps({key: getattr(plan, key) for key in keys}))
    _tell(
        f"remat            {record['choice']}\n"
        f"                 for {facts['asked']}: {format_bytes(plan.measured_bytes)} measured, "
        f"{format_bytes(plan.plain[0])} without; {plan.recompute_share:+.1%} FLOPs; {plan.compilations} compilations "
        f"in {plan.seconds:.0f} s"
    )
    return _with(config, record["choice"]), record


def estimated(config: Config, layout: Layout) -> Config:
    """Returns the config with the choice that the planner's estimate of memory makes; compiles nothing.

    Where no choice tried fits the budget by that estimate, it is full rematerialization; the plan reports the excess.
    """
    if not is_asked(config):
        return config
    arguments = step_arguments(config, layout)
    try:
        plan = _searched(config, layout, lambda traced: temporaries(live_jaxpr(traced), arguments).total)
    except remat.BudgetNotMet:
        return _with(config, "full")
    return _with(config, _written(plan.choice))


def is_asked(config: Config) -> bool:
    """Returns whether a config has a budget in the place of a choice."""
    return config.model.remat.startswith(REMAT_BUDGET)


def _searched(config: Config, layout: Layout, measure: Any) -> remat.Plan:
    budget = parse_bytes(config.model.remat.removeprefix(REMAT_BUDGET), name="model.remat: the budget")

    def traced(choice: RematChoice | None) -> Any:
        return traced_step(_with(config, _written(choice)), layout)

    return remat.search(traced, budget_bytes=budget, options=remat.Options(measure=measure, min_bytes=1024))


def _written(choice: RematChoice | None) -> str:
    return "none" if choice is None else str(choice)


def _with(config: Config, choice: str) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=choice))


def _tell(line: str) -> None:
    if is_first():
        print(line)
