"""Makes an optimized training program from a loss function by passes, and reports the effect of each.

    program = training_program(loss, optax.adamw(1e-3), autocast="bf16", chunk="64MiB")
    state, metrics = program.step(program.init(params), batch)
    print(program)

Source: the compiler RAF, arXiv 2303.04759, which composes automatic differentiation, casts and rematerialization.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.passes import autocast_pass, chunk_pass, kernels_pass, remat_pass
from hlat_jax.passes.autocast_pass import CastPolicy
from hlat_jax.passes.facade import table
from hlat_jax.passes.jaxpr import variables
from hlat_jax.passes.neuron_simulator import SimulatedCore, simulate_step
from hlat_jax.passes.noise import warn_of_shared_keys
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.passes.remat_pass import RematOptions, RematPlan, temporaries
from hlat_jax.passes.residuals import select_residuals
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


class Pass(NamedTuple):
    """A pass of a program.

    Attributes:
      name: name in the table.
      transform: function from a loss to a loss.
      report: function from the transformed loss to the lines that report the effect of the pass.
    """

    name: str
    transform: Transform
    report: Callable[[Any], str]


def _own_report(loss: Any) -> str:
    return str(loss.report())


def _no_report(_: Any) -> str:
    return ""


class Stage(NamedTuple):
    """A training step after one pass.

    Attributes:
      name: the pass, or "loss" before all passes.
      step: the step.
      report: function that returns the lines that report the effect of the pass.
    """

    name: str
    step: TrainStep
    report: Callable[[], str]


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """A training step, and the steps before and after each pass.

    Attributes:
      stages: the step before all passes and after each pass, in order.
      plan: the choice that meets the memory budget. None without a budget.
      arguments: shapes, dtypes and shardings of the arguments of the step. None if they were not given.
    """

    stages: Sequence[Stage]
    plan: RematPlan | None = None
    arguments: tuple[Any, Any, Any] | None = None

    @property
    def train_step(self) -> TrainStep:
        """The step after all passes."""
        return self.stages[-1].step

    @property
    def init(self) -> Callable[..., State]:
        """See `TrainStep.init`."""
        return self.train_step.init

    @property
    def step(self) -> StepFn:
        """See `TrainStep.step`."""
        return self.train_step.step

    @property
    def eval_step(self) -> Callable[[State, Any], EvalMetrics]:
        """See `TrainStep.eval_step`."""
        return self.train_step.eval_step

    def report(self) -> str:
        """Returns a table of the products, temporaries and changes of the step before the passes and after each.

        Products are counted in one step on one device, by the dtypes of their operands. Temporaries are estimated from
        the trace, see `passes.liveness`. Under a memory budget, the last column has the bytes that XLA allocates.
        """
        if self.arguments is None:
            names = " > ".join(stage.name for stage in self.stages)
            return f"{names}. For figures, give training_program params=... and batch=..."
        traces = ((stage, stage.step.step.trace(*self.arguments)) for stage in self.stages)
        return table([(stage.name, live_jaxpr(traced), stage.report()) for stage, traced in traces], self.arguments)

    def __str__(self) -> str:
        return self.report()


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    autocast: CastPolicy | str | None = None,
    kernels: bool = False,
    chunk: int | str | None = None,
    residuals: bool = False,
    only_if_smaller: Collection[str] = (),
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

    The passes run in the order of their arguments. Kernels and residual selection need the narrow dtypes that autocast
    chooses. Chunks are made only of values that no kernel computes.

    Args:
      loss_fn: loss as for `step.train_step`.
      optimizer: an Optax transformation, as for `step.train_step`.
      autocast: cast policy for a loss function in fp32 and an `options.policy` that computes in fp32, see
        `passes.autocast`. By default it is `options.policy.autocast`. fp16 adds a loss scale, see `step.loss_scale`.
      kernels: whether to call the platform's attention kernel if it takes the call, see `passes.kernels`.
      chunk: size above which intermediates are computed in chunks, "64MiB" or bytes, see `passes.chunk`.
      residuals: whether to recompute cheap intermediates in the backward pass if that keeps fewer bytes, see
        `passes.residuals`.
      only_if_smaller: passes to leave out if XLA allocates more temporaries for the step with the pass, such as
        ("chunk", "residuals"). The step is compiled once without them, and once with each. Needs params and batch.
      memory_budget: limit for the temporaries of the step on one device, "12GiB" or bytes. The values that are saved
        for the backward pass are chosen to fit, see `passes.remat`. If no choice fits, long scans are split in two and
        large intermediates are computed in chunks, before `residuals`. By default the loss function decides.
      remat: options of the choice of saved values.
      simulate: the `--auto-cast` of a Neuron core by which the whole step is rounded, see `passes.neuron_simulator`.
        The core rounds stochastically if `options.policy` rounds in hardware.
      options: precision, accumulation and devices, by default fp32 on one device.
      params: shapes of the parameters, needed with a memory budget, and as for `step.train_step`.
      batch: shapes of a batch, needed with a memory budget. With `params`, the step is traced here.
      model_state: shapes of the model state, as for `step.train_step`.
      has_aux: whether the loss function returns auxiliary values, as for `step.train_step`.

    Raises:
      ValueError: as for `step.train_step`, or an invalid pass, or a budget that no program tried fits.
    """
    autocast = options.policy.autocast if autocast is None else autocast
    before = _passes(autocast=autocast, kernels=kernels, chunk=chunk, platform=options.platform)
    after = [Pass("residuals", select_residuals, _no_report)] if residuals else []
    _check_passes(options, autocast, [*before, *after], memory_budget, remat)
    options = _step_options(options, autocast, memory_budget)
    has_shapes = params is not None and batch is not None
    _check_only_if_smaller(only_if_smaller, [*before, *after], has_shapes=has_shapes, is_scaled=options.loss_scale)
    shapes = {"params": params, "model_state": model_state, "has_aux": has_aux}
    step = train_step(loss_fn, optimizer, transform_step=_simulation(simulate, options), options=options, **shapes)
    plain = [Stage("loss", _warned_of_shared_keys(step, loss_fn, options), str)]
    if params is None or batch is None:
        if memory_budget is not None:
            raise ValueError("memory_budget is compared with the compiled step. Give params=... and batch=... too.")
        return TrainingProgram(_apply_passes(plain, [*before, *after]))
    check_fields(batch)
    shapes_of_batch = jax.tree.map(_shape_of, batch)
    arguments = step.arguments(params, shapes_of_batch, model_state=model_state)
    if only_if_smaller:
        chosen = _smaller(plain, [*before, *after], only_if_smaller, arguments)
        before, after = chosen[: len(before)], chosen[len(before) :]
    stages = _apply_passes(plain, before)
    if memory_budget is not None:
        return _within_budget(stages, after, arguments, memory_budget, remat or RematOptions())
    program = TrainingProgram(_apply_passes(stages, after), arguments=arguments)
    program.train_step.step.trace(*arguments)  # raises for a loss function that returns anything else
    return program


def _shape_of(leaf: Any) -> Any:
    """Returns the shape and dtype of a NumPy array or a number; anything with a sharding as it is."""
    return leaf if hasattr(leaf, "sharding") else jax.eval_shape(lambda x: x, leaf)


def _passes(*, autocast: CastPolicy | str | None, kernels: bool, chunk: int | str | None, platform: str) -> list[Pass]:
    """Returns the passes before a memory budget, in their order."""
    passes = []
    if autocast is not None:
        passes.append(Pass("autocast", functools.partial(autocast_pass.autocast, policy=autocast), _no_report))
    if kernels:
        passes.append(Pass("kernels", functools.partial(kernels_pass.kernels, platform=platform), _own_report))
    if chunk is not None:
        max_bytes = parse_bytes(chunk, name="chunk")
        passes.append(Pass("chunk", functools.partial(chunk_pass.chunk, max_bytes=max_bytes), _own_report))
    return passes


def _check_passes(
    options: StepOptions,
    autocast: CastPolicy | str | None,
    passes: Sequence[Pass],
    memory_budget: int | str | None,
    remat: RematOptions | None,
) -> None:
    """Raises ValueError for passes that do not go together with each other or with the options of the step."""
    if autocast is not None and options.policy.compute != jnp.float32:
        raise ValueError(
            f"autocast={autocast!r} is for a loss that computes in fp32, and options.policy computes in "
            f"{jnp.dtype(options.policy.compute)}. Give policy=precision.POLICIES['fp32'], or leave autocast out."
        )
    if options.accumulate is not None and (passes or memory_budget):
        raise ValueError("passes need a single loss function, not stages. Leave options.accumulate out.")
    if remat is not None and memory_budget is None:
        raise ValueError("remat needs a memory budget. Give memory_budget='12GiB' too.")
    if memory_budget is not None:
        parse_bytes(memory_budget, name="memory_budget")


def _check_only_if_smaller(
    names: Collection[str], passes: Sequence[Pass], *, has_shapes: bool, is_scaled: bool
) -> None:
    """Raises ValueError for names of passes that were not asked for or cannot be left out, and without shapes."""
    if isinstance(names, str):
        raise ValueError(f"only_if_smaller={names!r} must be a sequence of names. Give ({names!r},).")
    asked = [one.name for one in passes]
    if unknown := [name for name in names if name not in asked]:
        raise ValueError(f"only_if_smaller has {unknown[0]!r}. It takes the passes of this program, {asked}.")
    if "autocast" in names and is_scaled:
        raise ValueError("only_if_smaller cannot leave out autocast='fp16', since the step scales its loss.")
    if names and not has_shapes:
        raise ValueError("only_if_smaller compares compiled steps. Give params=... and batch=... too.")


def _smaller(
    plain: Sequence[Stage], passes: Sequence[Pass], names: Collection[str], arguments: tuple[Any, Any, Any]
) -> list[Pass]:
    """Returns the passes. In place of a pass in `names` with which the step is larger is one that changes nothing."""

    @functools.cache
    def held(applied: tuple[Pass, ...]) -> int:
        return temporaries(_apply_passes(plain, applied)[-1].step.step.trace(*arguments))

    chosen: list[Pass] = []
    applied: tuple[Pass, ...] = ()
    for one in passes:
        tried = (*applied, one)
        if one.name in names and held(tried) > held(applied):
            line = f"left out: {format_bytes(held(tried))} with it, {format_bytes(held(applied))} without, as compiled"
            chosen.append(Pass(one.name, _unchanged, functools.partial(_line, line)))
        else:
            chosen.append(one)
            applied = tried
    return chosen


def _unchanged(loss: LossFn) -> LossFn:
    return loss


def _line(line: str, _: Any) -> str:
    return line


def _step_options(
    options: StepOptions, autocast: CastPolicy | str | None, memory_budget: int | str | None
) -> StepOptions:
    """Returns the options that the passes need: a loss scale for fp16, the state in place under a budget."""
    if autocast is not None and autocast_pass.is_fp16(autocast):
        options = dataclasses.replace(options, loss_scale=True)
    return options if memory_budget is None else dataclasses.replace(options, state_in_place=True)


def _simulation(simulate: str | None, options: StepOptions) -> Callable | None:
    """Returns the transformation of a whole step that rounds as a Neuron core does; None without one."""
    if simulate is None:
        return None
    core = SimulatedCore(simulate, stochastic_rounding=options.policy.rounding == "hardware")
    return functools.partial(simulate_step, core=core)


def _warned_of_shared_keys(step: TrainStep, loss_fn: LossFn, options: StepOptions) -> TrainStep:
    """Returns the step with a loss that is warned of if rows in several parts draw from one key."""
    num_parts = options.num_microbatches * step.options.row_degree
    has_own_split = options.replica_sync is not None or options.accumulate is not None
    if has_own_split or (num_parts == 1 and not signature_of(loss_fn).has_keys):
        return step
    return step.transform(functools.partial(warn_of_shared_keys, num_parts=num_parts))


def _apply_passes(stages: Sequence[Stage], passes: Sequence[Pass]) -> list[Stage]:
    """Returns the stages, and one more for each of the passes in turn."""
    stages = list(stages)
    for name, transform, report in passes:
        step = stages[-1].step.transform(transform)
        stages.append(Stage(name, step, functools.partial(report, step.loss)))
    return stages


class _MeasuredStep:
    """The program that a memory budget measured, as the step: a call with or without a rate traces nothing again.

    The trace has a learning rate in fp32. A call without a rate gets one if the program ignores it.
    """

    def __init__(self, program: Any, arguments: tuple[Any, Any, Any]):
        live = live_jaxpr(program.trace(*arguments))  # traced before
        self._program, rate = program, live.invars[-1]
        self._reads_rate = any(rate in variables(each.invars) for each in live.eqns) or rate in live.outvars

    def __call__(self, state: State, batch: Any, learning_rate: Any = None) -> tuple[State, Any]:
        if learning_rate is None:
            return self._program(state, batch) if self._reads_rate else self._program(state, batch, np.float32(0))
        is_number = isinstance(learning_rate, int | float)
        return self._program(state, batch, np.float32(learning_rate) if is_number else learning_rate)

    def __getattr__(self, name: str) -> Any:  # `lower` and the rest of a jitted function, for the arguments as given
        if name == "_program":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._program, name)


def _within_budget(
    stages: Sequence[Stage],
    after: Sequence[Pass],
    arguments: tuple[Any, Any, Any],
    memory_budget: int | str,
    options: RematOptions,
) -> TrainingProgram:
    """Returns the program of the stages, a choice by a memory budget, and the passes `after` the choice."""
    before = stages[-1].step
    plan = remat_pass.fit(
        before.loss,
        *arguments,
        budget_bytes=memory_budget,
        step=lambda loss: before.with_loss(loss).step,
        options=options,
        name="memory_budget",
        passes=tuple(one.transform for one in after),
    )
    changes = [Pass(name, transform, _own_report) for name, transform in plan.passes.items()]
    stages = _apply_passes(stages, [*changes, *after])
    # the rows of these passes have the changes
    plan = dataclasses.replace(plan, changes=(), program=_MeasuredStep(plan.program, arguments))
    step = stages[-1].step.with_loss(plan.fn)
    vars(step)["step"] = plan.program  # in place of the cached property: its trace took seconds
    return TrainingProgram([*stages, Stage("remat", step, lambda: str(plan.report()))], plan, arguments)
