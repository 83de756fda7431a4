"""From a loss function to an optimized training program: which passes run, in which order, and what each of them did.

    program = training_program(loss, optax.adamw(1e-3), autocast="bf16", memory_budget="12GiB", params=p, batch=b)
    state, metrics = program.step(program.init(params), batch)
    print(program)

Source: RAF, arXiv 2303.04759, whose compiler composes automatic differentiation, casts and rematerialization.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.passes import autocast as autocast_pass
from hlat_jax.passes import remat as remat_pass
from hlat_jax.passes.autocast import CastPolicy
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.noise import warn_of_shared_keys
from hlat_jax.passes.products import live_jaxpr, products_by_dtype
from hlat_jax.passes.remat import RematOptions, RematPlan
from hlat_jax.passes.residuals import select_residuals
from hlat_jax.passes.rewrite import rewrite as rewrite_pass
from hlat_jax.passes.rounding import SimulatedCore, simulate_step
from hlat_jax.step import (
    FP32,
    EvalMetrics,
    LossFn,
    State,
    StepFn,
    StepOptions,
    TrainStep,
    Transform,
    train_step,
)
from hlat_jax.step.batch_rows import check_fields
from hlat_jax.step.loss_signature import signature_of


class BatchFunction:
    """A jitted function of (state, batch, ...), whose error for a batch with anything but numbers names the field."""

    def __init__(self, jitted: Any):
        self._jitted = jitted

    def __call__(self, state: State, batch: Any, *rest: Any, **named: Any) -> Any:
        try:
            return self._jitted(state, batch, *rest, **named)
        except TypeError:
            check_fields(batch)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """A training step, and what each pass made of it.

    Attributes:
      steps: name of a pass -> the step after it, in their order; "loss" before all of them.
      plan: the choice that meets the memory budget; None without one.
      arguments: shapes, dtypes and shardings of what the step takes; None where they were not given.
    """

    steps: Mapping[str, TrainStep]
    plan: RematPlan | None = None
    arguments: tuple[Any, Any, Any] | None = None

    @property
    def train_step(self) -> TrainStep:
        """The step after all passes."""
        return list(self.steps.values())[-1]

    @property
    def init(self) -> Callable[..., State]:
        """See `TrainStep.init`."""
        return self.train_step.init

    @property
    def step(self) -> StepFn:
        """See `TrainStep.step`."""
        return BatchFunction(self.train_step.step)

    @property
    def eval_step(self) -> Callable[[State, Any], EvalMetrics]:
        """See `TrainStep.eval_step`."""
        return BatchFunction(self.train_step.eval_step)

    def report(self) -> str:
        """Returns a table of the step before the passes and after each: what it computes and holds, what a pass did.

        Products are those of one step on one device, by the dtypes of their operands. Temporaries are estimated from
        the trace, see `passes.liveness`; under a memory budget, the last column has the bytes that XLA allocates.
        """
        if self.arguments is None:
            return f"{' > '.join(self.steps)}: for figures, give training_program params=... and batch=..."
        rows, before = [("pass", "products", "temporaries", "what it did, and did not")], 0
        for name, step in self.steps.items():
            jaxpr = live_jaxpr(step.step.trace(*self.arguments))
            products = [f"{count:,} {dtypes}" for dtypes, count in sorted(products_by_dtype(jaxpr).items())]
            done: Any = self.plan if name == "remat" else step.loss
            lines = str(done.report()).splitlines() if name in ("rewrite", "nest", "chunk", "remat") else []
            temporaries = ""
            if name != "remat":
                held = estimated_temporaries(jaxpr, self.arguments).total
                temporaries = format_bytes(held) + (f" ({held / before - 1:+.0%})" if before else "")
                before = held
            rows += itertools.zip_longest([name], products, [temporaries], lines, fillvalue="")
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        return self.report()


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    rewrite: bool = False,
    autocast: CastPolicy | str | None = None,
    residuals: bool = False,
    memory_budget: int | str | None = None,
    remat: RematOptions | None = None,
    simulate: str | None = None,
    options: StepOptions = FP32,
    params: Any = None,
    batch: Any = None,
    model_state: Any = None,
    has_aux: bool = False,
) -> TrainingProgram:
    """Returns the training program of a loss and an optimizer.

    The passes run in the order of their arguments: rewriting matches what the user wrote, and residual selection needs
    the narrow dtypes that autocast chooses.

    Args:
      loss_fn: loss as for `step.train_step`.
      optimizer: an Optax transformation, as for `step.train_step`.
      rewrite: run our implementations of ops in place of what the loss function computes otherwise, such as attention
        and cross-entropy, see `passes.rewrite`.
      autocast: cast policy for a loss function in fp32 and an `options.policy` that computes in fp32, see
        `passes.autocast`; that of the policy by default. float16 adds a loss scale, see `step.loss_scale`.
      residuals: recompute cheap intermediates in the backward pass where that keeps fewer bytes, see
        `passes.residuals`.
      memory_budget: limit for the temporaries of the step on one device, "12GiB" or bytes; the values that are saved
        for the backward pass are chosen to fit, see `passes.remat`. If no choice fits, long scans are split in two and
        large intermediates are computed in chunks, before autocast. By default the loss function decides.
      remat: options of that choice: regions, least bytes, number of programs.
      simulate: round the whole step as a Neuron core does by its documentation, with this `--auto-cast`, and
        stochastically if `options.policy` rounds in hardware; see `passes.rounding`.
      options: precision, accumulation and devices; fp32 on one device by default.
      params: shapes of the parameters; needed with a memory budget, and as for `step.train_step`.
      batch: shapes of a batch; needed with a memory budget. With those of the parameters, the step is traced here.
      model_state: shapes of the model state, as for `step.train_step`.
      has_aux: whether the loss function returns auxiliary values, as for `step.train_step`.

    Raises:
      ValueError: as `step.train_step`; an invalid pass; no program that was tried fits the budget.
    """
    autocast = options.policy.autocast if autocast is None else autocast
    if autocast is not None and options.policy.compute != jnp.float32:
        raise ValueError(
            f"autocast={autocast!r} is for a loss that computes in fp32, and options.policy computes in "
            f"{jnp.dtype(options.policy.compute)}; give policy=precision.POLICIES['fp32'], or leave autocast out."
        )
    if options.accumulate is not None and (rewrite or residuals or autocast or memory_budget):
        raise ValueError("passes need a single loss function, not stages; leave options.accumulate out.")
    if remat is not None and memory_budget is None:
        raise ValueError("remat needs a memory budget; give memory_budget='12GiB' too.")
    if memory_budget is not None:
        parse_bytes(memory_budget, name="memory_budget")
        if params is None or batch is None:
            raise ValueError("memory_budget is compared with the compiled step: give params=... and batch=...")
        options = dataclasses.replace(options, state_in_place=True)
    transform_step = None
    if simulate is not None:
        core = SimulatedCore(simulate, stochastic_rounding=options.policy.rounding == "hardware")
        transform_step = functools.partial(simulate_step, core=core)
    first: dict[str, Transform] = {}  # nested scans and chunks come after it
    passes: dict[str, Transform] = {}
    if rewrite:
        first["rewrite"] = functools.partial(rewrite_pass, platform=options.platform)
    if autocast is not None:
        passes["autocast"] = functools.partial(autocast_pass.autocast, policy=autocast)
        options = dataclasses.replace(options, loss_scale=options.loss_scale or autocast_pass.is_fp16(autocast))
    if residuals:
        passes["residuals"] = select_residuals
    shapes = {"params": params, "model_state": model_state, "has_aux": has_aux}
    step = train_step(loss_fn, optimizer, transform_step=transform_step, options=options, **shapes)
    num_parts = options.num_microbatches * step.options.row_degree
    if (
        options.replica_sync is None
        and options.accumulate is None
        and (num_parts > 1 or signature_of(loss_fn).has_keys)
    ):
        step = step.transform(functools.partial(warn_of_shared_keys, num_parts=num_parts))
    steps = _apply_passes(step, first | passes)
    plan, arguments = None, None
    if params is not None and batch is not None:
        check_fields(batch)
        arguments = steps["loss"].arguments(params, batch, model_state=model_state)
        if memory_budget is None:
            list(steps.values())[-1].step.trace(*arguments)  # raises for a loss function that returns anything else
        else:
            before = list(_apply_passes(step, first).values())[-1]
            plan = remat_pass.fit(
                before.loss,
                *arguments,
                budget_bytes=memory_budget,
                step=lambda loss: before.with_loss(loss).step,
                options=remat or RematOptions(),
                name="memory_budget",
                passes=tuple(passes.values()),
            )
            steps = _apply_passes(step, {**first, **plan.passes, **passes})
            steps["remat"] = list(steps.values())[-1].with_loss(plan.fn)
            plan = dataclasses.replace(plan, changes=())  # the rows of these passes have them
    return TrainingProgram(steps, plan, arguments)


def _apply_passes(step: TrainStep, passes: Mapping[str, Transform]) -> dict[str, TrainStep]:
    """Returns the step, as "loss", and that after each of the passes in turn."""
    steps = {"loss": step}
    for name, transform in passes.items():
        steps[name] = step = step.transform(transform)
    return steps
