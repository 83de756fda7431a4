"""Resolves `model.remat="budget:12GiB"` to the values that are saved, before the step is compiled.

The budget limits the temporaries of the whole step on one device, as the compiler counts them. If microbatches are
dispatched, it limits the temporaries of the program with a forward and a backward pass, and the arrays kept between
programs. The result is `saved:NAME,...`, an ordinary value of `model.remat`, which is printed, recorded in the run
folder, and reused if the run resumes. Another budget, mesh, device, version of JAX or split of the step into programs
needs a new choice. So does a step that no longer has values of these names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from hlat_jax.config import Config
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.host.console import say
from hlat_jax.host.distributed import exchange
from hlat_jax.passes import remat_pass
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.naming import MissingValues, RematChoice
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.program import RunProgram, make_program, state_bytes

RECORD_FILE = "remat.json"
# Keys that, with the mesh, determine the bytes of a step on one device.
_SHARED = ("zero1", "sequence_parallel", "reduce_gradients", "bucket_bytes", "pipe_exchange")


def choose_remat(program: RunProgram, *, recorded: dict[str, Any] | None) -> tuple[RunProgram, dict | None]:
    """Returns the program with its budget replaced by a choice, and the record of it, or (program, None) without one.

    Every process compiles the same trial programs, and the largest measurement of all processes decides. `recorded` is
    the record in the checkpoint from which the run resumes, if there is one.

    Raises:
      ValueError: none of the trial programs fits the budget.
    """
    config, layout = program.config, program.layout
    if not has_budget(config):
        return program, None
    facts = {
        "asked": config.model.remat,
        "mesh": layout.degrees,
        "parallel": {key: getattr(config.parallel, key) for key in _SHARED},
        "accumulate": program.accumulate,
        "layer_loop": program.model.layer_loop,
        "device": layout.mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
    }
    if recorded is not None and recorded.items() >= facts.items():
        try:
            again = _with_remat(program, recorded["choice"])
            _trace(again)
        except MissingValues:
            say("remat", "chosen again, as the step no longer has the values of the checkpoint's choice")
        else:
            say("remat", f"{recorded['choice']}, from the checkpoint, for {facts['asked']}")
            return again, recorded

    plan = _search(program, lambda traced, _: max(map(int, exchange(str(remat_pass.temporaries(traced))))))
    record = facts | {"choice": _remat_text(plan.choice)}
    keys = ("budget_bytes", "measured_bytes", "predicted_bytes", "flops", "predicted_flops", "plain", "full")
    record |= json.loads(json.dumps({key: getattr(plan, key) for key in keys}))
    say(
        "remat",
        f"{record['choice']}\nfor {facts['asked']}: {format_bytes(plan.measured_bytes)} measured, "
        f"{format_bytes(plan.plain[0])} without remat, {plan.recompute_share:+.1%} FLOPs, {plan.compilations} "
        f"compilations in {plan.seconds:.0f} s",
    )
    return _with_remat(program, record["choice"]), record


def choose_by_estimate(program: RunProgram) -> RunProgram:
    """Returns the program with the choice that fits the budget by the planner's estimate of memory. Compiles nothing.

    If no choice fits by that estimate, the choice is full rematerialization, and the plan reports the excess.
    """
    if not has_budget(program.config):
        return program
    try:
        plan = _search(program, lambda traced, args: estimated_temporaries(live_jaxpr(traced), args).total)
    except remat_pass.BudgetNotMet:
        return _with_remat(program, "full")
    return _with_remat(program, _remat_text(plan.choice))


def has_budget(config: Config) -> bool:
    """Returns whether `model.remat` is a budget."""
    return config.model.parsed_remat.kind == "budget"


def _search(program: RunProgram, measure: Callable[[Any, tuple], int]) -> remat_pass.RematPlan:
    """Returns the plan of the search; `measure`: (traced program, what it takes) -> bytes of its temporaries."""
    arguments: dict[Any, tuple] = {}

    def trace_choice(choice: RematChoice | None) -> Any:
        trace, taken = _trace(_with_remat(program, _remat_text(choice)))
        arguments[trace] = taken
        return trace

    def measure_whole(trace: Any) -> int:
        # the buffer stays between programs, and with stages its size depends on the choice
        held = state_bytes(arguments[trace][0]) if program.accumulate == "programs" else 0
        return held + measure(trace, arguments[trace])

    options = remat_pass.RematOptions(measure=measure_whole, min_bytes=1024)
    return remat_pass.search(trace_choice, budget_bytes=program.config.model.parsed_remat.budget_bytes, options=options)


def _trace(program: RunProgram) -> tuple[Any, tuple]:
    """Returns the trace of the step, or of its program with a forward and a backward pass, and what it takes."""
    if program.accumulate != "programs":
        return program.trace_step(), program.step_arguments
    name = "steady" if program.layout.size(("pipe",)) > 1 else "microbatch"
    return program.trace_microbatch_step(name), program.microbatch_arguments[name]


def _remat_text(choice: RematChoice | None) -> str:
    return "none" if choice is None else str(choice)


def _with_remat(program: RunProgram, choice: str) -> RunProgram:
    model = dataclasses.replace(program.config.model, remat=choice)
    return make_program(dataclasses.replace(program.config, model=model), program.layout)
