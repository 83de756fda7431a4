"""From a loss function and an Optax optimizer to a training step: passes, gradients, masking, update, donation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from hlat_jax.batch import SumAndCount, microbatches
from hlat_jax.optimizer import MaskedTransformation, global_norm, masked
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.pipeline import PHASES, pipelined, run_tick, start_ticks
from hlat_jax.parallel.sharding import ROWS
from hlat_jax.parallel.zero import check_params
from hlat_jax.passes import remat, scaling, spikes
from hlat_jax.passes.autocast import autocast, is_fp16
from hlat_jax.passes.remat import Plan
from hlat_jax.passes.residuals import select_residuals
from hlat_jax.passes.rewrite import Rewritten, rewrite
from hlat_jax.precision import NEAREST, Accumulation, Policy, Rounding, cast_tree
from hlat_jax.step_options import (
    LossAux,
    ProgramOptions,
    averaged_aux,
    check_arguments,
    check_divides,
    check_model_state,
    check_shapes,
    checked_loss,
    given_names,
    num_rows,
    resolved,
    row_keys,
    with_dialects,
)

State = dict[str, Any]
LossFn = Callable[..., jax.Array | SumAndCount | tuple[jax.Array | SumAndCount, Any]]
CheckedLossFn = Callable[..., tuple[jax.Array, LossAux]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step: scalars on the device, which the loop reads a step later.

    Attributes:
      loss: float32, mean over the counted tokens of the whole batch, nats per token; where the loss function returns a
        plain mean, the mean over microbatches and devices.
      num_tokens: float32, counted tokens; exact up to 2**24, which `degrees.layout_over` keeps to. None if the loss
        function returns a plain mean: what it counts is not known.
      grad_norm: float32, L2 norm of the mean gradient before clipping.
      param_norm: float32, L2 norm of the weights before the update.
      finite: bool; False: loss, gradient or weights were not finite and the update was masked.
      spike: bool; True: a finite loss or gradient norm far above those before, see `passes.spikes`. None without
        `ProgramOptions.spikes`.
      aux: auxiliary values of the loss function, float32, see `training_program`; None without `has_aux`.
    """

    loss: jax.Array
    num_tokens: jax.Array | None
    grad_norm: jax.Array
    param_norm: jax.Array
    finite: jax.Array
    aux: Any = None
    spike: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one evaluated batch: `loss`, `num_tokens` and `aux` as in `StepMetrics`."""

    loss: jax.Array
    num_tokens: jax.Array | None
    aux: Any = None


class StepFn(Protocol):
    """The type of a step: (state, batch[, learning_rate]) -> (state, StepMetrics)."""

    def __call__(self, state: State, batch: Any, learning_rate: ArrayLike | None = None) -> tuple[State, StepMetrics]:
        """Returns the state after the step, and its metrics."""


@dataclasses.dataclass(frozen=True)
class MicrobatchStep:
    """A step in programs that do not depend on the number of microbatches; it computes what the step in one does.

    Terms, their order and random bits are the same, so the two are equal bit for bit where the compiler rounds them
    alike. It may not: XLA fuses the body of a loop in other ways, see docs/parallelism.md.

    Each microbatch, and with pipeline stages each tick, is dispatched as a program of its own, without waiting for the
    one before. The buffer stays on the devices between steps.

    Attributes:
      start: jitted (inputs, microbatch) -> buffer of zeros: what each device keeps, such as sums of losses, of counted
        tokens and of gradients. It depends on the shapes alone.
      ticks: name -> jitted (buffer, inputs, microbatch) -> buffer with what it computes added; donates the buffer. One,
        `microbatch`, or the phases of `pipeline`.
      update: jitted (state, buffer[, learning_rate]) -> (state, StepMetrics, buffer of zeros); donates the first two.
      shardings: of the buffer: of `number`, and of all else; None: one device.
      num_stages: of a pipeline.
    """

    start: Any
    ticks: Mapping[str, Any]
    update: Any
    shardings: Any = None
    num_stages: int = 1
    _held: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)  # shapes -> buffer; one at most

    def __call__(
        self, state: State, microbatches: Iterable[Any], learning_rate: ArrayLike | None = None
    ) -> tuple[State, StepMetrics]:
        """Returns the state after the step, and its metrics. Rows of microbatch m: see `batch.microbatches`.

        Raises:
          ValueError: no microbatch.
        """
        names, idle, count = list(self.ticks), self.num_stages - 1, 0
        if idle:
            parts = list(microbatches)
            count = len(parts)
            in_turn = [names[0]] * idle + [names[1]] * count + [names[2]] * idle
            dispatches = zip(in_turn, parts + 2 * idle * parts[-1:], strict=False)
        else:  # each is on the devices no sooner than it is dispatched
            dispatches = zip(itertools.repeat(names[0]), microbatches, strict=False)
        inputs, shapes, buffer = self.inputs(state, num_microbatches=np.int32(count)), None, None
        for name, part in dispatches:
            if buffer is None:
                leaves, structure = jax.tree.flatten((inputs, part))
                shapes = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
                buffer = self._held.pop(shapes, None)  # where a program fails, the next step starts from a new one
                self._held.clear()
                buffer = self.start(inputs, part) if buffer is None else buffer
            buffer = self.ticks[name](buffer, inputs, part)
        if buffer is None:
            raise ValueError("microbatches is empty: give a step one or more of them.")
        state, metrics, self._held[shapes] = self.update(state, buffer, learning_rate)
        return state, metrics

    @property
    def programs(self) -> dict[str, Any]:
        """The programs by name, in the order of their first use."""
        return {"start": self.start, **self.ticks, "update": self.update}

    def with_programs(self, programs: Mapping[str, Any]) -> MicrobatchStep:
        """Returns the step with these `programs`, such as compiled ones."""
        ticks = {name: programs[name] for name in self.ticks}
        return dataclasses.replace(self, start=programs["start"], ticks=ticks, update=programs["update"])

    def inputs(self, state: State, *, num_microbatches: Any) -> dict[str, Any]:
        """Returns what `start` and `ticks` read of a step: parts of the state, and for stages the int32 number."""
        opt_state = {key: value for key, value in state["opt_state"].items() if key in ("seed", "loss_scale")}
        found = {"params": state["params"], "step": state["step"], "opt_state": opt_state}
        return found | ({"num_microbatches": num_microbatches} if self.num_stages > 1 else {})

    def abstract_buffer(self, inputs: Any, microbatch: Any) -> Any:
        """Returns the shapes, dtypes and shardings of the buffer, from those of what `start` takes."""
        buffer = jax.eval_shape(self.start, inputs, microbatch)
        if self.shardings is None:
            return buffer
        return {
            key: jax.tree.map(lambda x, of=self.shardings[key]: x.update(sharding=of), buffer[key]) for key in buffer
        }


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """The functions of a training program, and the shardings of its state.

    Attributes:
      init: `(params, *, model_state=None, seed=0) -> state`. The state is {"step", "params", "opt_state": {"inner"
        [, "master"][, "seed"][, "loss_scale"]}[, "model_state"][, "spikes"]}; the uint32 seed is that of the random
        keys and of stochastic rounding, where there are any.
      stages: name of a pass -> the jitted step after it; the last one is `step`.
      eval_step: jitted `(state, batch) -> EvalMetrics`: the loss with `train=False`, `keys=None` and the model state as
        it is, over a batch that divides as those of `step` do. The state is not donated.
      options: those it was built with, with `zero` replaced by the `replica_sync` made from it.
      shardings: of every leaf of the state; None: wherever the parameters are.
      microbatch_step: `step` in programs of one microbatch; None for a loss function that has auxiliary values or takes
        more than (params, microbatch), and for an `options.accumulate` that is not `pipeline.pipelined` over stages.
      plan: the choice that meets the memory budget; None without one.
      rewritten: the loss after `rewrite`, whose `report()` lists what was replaced when it was last traced; None
        without that pass.
    """

    init: Callable[..., State]
    stages: Mapping[str, Callable]
    eval_step: Callable[[State, Any], EvalMetrics]
    options: ProgramOptions
    shardings: Any
    microbatch_step: MicrobatchStep | None = None
    plan: Plan | None = None
    rewritten: Rewritten | None = None

    @property
    def step(self) -> StepFn:
        """The jitted (state, batch[, learning_rate]) -> (state, StepMetrics); donates the state.

        The learning rate is for optimizers that take it as an extra argument; others have a rate or a schedule of their
        own and ignore it.
        """
        return list(self.stages.values())[-1]

    def step_arguments(self, params: Any, batch: Any, *, model_state: Any = None) -> tuple[Any, Any, Any]:
        """Returns the shapes, dtypes and shardings of what `step` takes, from the shapes of what it is made of."""
        state = jax.eval_shape(self.init, params, model_state=model_state)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        replica_sync = self.options.replica_sync
        if replica_sync is None:
            return state, batch, rate
        check_divides(batch, num_devices=replica_sync.layout.size(ROWS), num_microbatches=self.options.num_microbatches)

        def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        rows = replica_sync.layout.rows()
        return jax.tree.map(placed, state, self.shardings), jax.tree.map(lambda leaf: placed(leaf, rows), batch), rate


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    options: ProgramOptions | None = None,
    params: Any = None,
    batch: Any = None,
    model_state: Any = None,
    has_aux: bool = False,
) -> TrainingProgram:
    """Returns the training program of a loss and an optimizer.

    Args:
      loss_fn: (params, microbatch) -> loss. Either the mean over the microbatch, a floating-point scalar: microbatches
        and devices then weigh equally, however much each of them counts. Or `SumAndCount(sum of the losses of the
        counted tokens, count of them)`: the program divides by the count over the whole batch, so that unequal
        microbatches weigh as one batch would. Both are accumulated in fp32. Further parameters without a default are
        given by name:

        - `model_state`: what the model updates itself, such as the statistics of batch norm, a pytree of arrays. The
          function then returns (loss, new model state). Microbatches update it one after another, and devices each for
          their own rows: of floats, the mean over devices is kept. A step that is not finite leaves it unchanged.
        - `keys`: a random key for each row, made from the seed, the step and the index of the row in the batch over all
          devices. What is drawn from it, with `jax.vmap` over rows and keys, is the same on any number of devices and
          microbatches. None in `eval_step`.
        - `train`: True in `step`, False in `eval_step`; a Python bool.
        - `dialects`: see `ProgramOptions`.
      optimizer: an Optax transformation. It gets the mean gradients in fp32, the weights, and the extra arguments
        `learning_rate` (where the step is given one), `grad_norm`, `finite`, and, as for a line search, `value`, `grad`
        and `value_fn`: the loss, those gradients, and weights -> loss of this batch, differentiable.
      options: precision, accumulation, devices, memory; None: fp32 on one device.
      params: shapes of the parameters; needed with `options.zero` or `options.replica_sync`, whose shardings follow
        from them, and with `options.memory_budget`.
      batch: shapes of a batch; needed with `options.memory_budget`. With those of the parameters, the step is traced
        here.
      model_state: shapes of the model state, where the loss function takes one; needed where `params` is.
      has_aux: the loss function returns (loss, auxiliary values), as for `jax.value_and_grad`; with a model state,
        (loss, (new model state, auxiliary values)). The values, a pytree, come out in `StepMetrics.aux` in fp32: each
        array is the mean over microbatches and devices, each `SumAndCount` becomes total / count over the whole batch.

    Raises:
      ValueError: no function, no transformation, parameters that are not floating-point arrays, shapes that an option
        needs are missing, or no program tried fits the budget. The step, before it is compiled: the loss function
        returns anything else, the batch does not divide, or the optimizer needs other extra arguments.
    """
    options = ProgramOptions() if options is None else options
    check_arguments(loss_fn, optimizer, options=options, has_aux=has_aux)
    given = given_names(loss_fn, options)
    check_shapes(given, options=options, params=params, batch=batch, model_state=model_state)
    options = resolved(options, params)
    if options.dialects is not None:
        loss_fn, options = with_dialects(loss_fn, options)
    if options.accumulate is None:
        eval_loss = checked_loss(loss_fn, has_aux=has_aux, given=given, is_training=False)
        loss_fn = checked_loss(loss_fn, has_aux=has_aux, given=given)
    initial, shardings = _initial(optimizer, options, given), None
    if options.replica_sync is not None:
        # of one device too: what reads the state is then compiled once, for before the first step and after it
        shapes = jax.eval_shape(initial, params, model_state=model_state)
        shardings = options.replica_sync.state_shardings(shapes)

    def step_of(loss_fn: Callable) -> Any:
        step = _train_step(loss_fn, optimizer, options, has_keys="keys" in given)
        return _jitted(step, options, None if shardings is None else (shardings, None))

    def microbatch_step_of(loss_fn: Callable) -> MicrobatchStep | None:
        if given or has_aux or not (options.accumulate is None or _has_stages(options)):
            return None
        return _microbatch_step(loss_fn, optimizer, options=options, shardings=shardings)

    stages = {"loss": step_of(loss_fn)}
    rewritten: Rewritten | None = None
    for name, apply in _passes(options).items():
        loss_fn, eval_loss = apply(loss_fn), apply(eval_loss)
        stages[name] = step_of(loss_fn)
        if isinstance(loss_fn, Rewritten):
            rewritten = loss_fn
    program = TrainingProgram(
        init=_initial(optimizer, options, given, shardings=shardings),
        stages=stages,
        eval_step=_no_eval_step if options.accumulate is not None else _eval_step(eval_loss, options),
        options=options,
        shardings=shardings,
        microbatch_step=microbatch_step_of(loss_fn),
        rewritten=rewritten,
    )
    if params is None or batch is None:
        return program
    arguments = program.step_arguments(params, batch, model_state=model_state)
    if options.memory_budget is None:
        list(stages.values())[-1].trace(*arguments)  # raises for a loss function that returns anything else
        return program
    search: dict[str, Any] = {"options": options.remat or remat.RematOptions(), "name": "ProgramOptions.memory_budget"}
    plan = remat.fit(loss_fn, *arguments, budget_bytes=options.memory_budget, step=step_of, **search)
    stages |= {"remat": step_of(plan.fn)}
    return dataclasses.replace(program, stages=stages, microbatch_step=microbatch_step_of(plan.fn), plan=plan)


def _passes(options: ProgramOptions) -> dict[str, Callable[[Callable], Any]]:
    """Returns name -> transformation of the loss, in their order.

    What is replaced has to be as the user wrote it; what autocast narrows decides which residuals are worth keeping.
    """
    passes: dict[str, Callable[[Callable], Any]] = {}
    if options.rewrite:
        passes["rewrite"] = functools.partial(rewrite, platform=options.platform)
    if options.autocast is not None:
        passes["autocast"] = functools.partial(autocast, policy=options.autocast)
    if options.residuals:
        passes["residuals"] = select_residuals
    return passes


def _train_step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, options: ProgramOptions, *, has_keys: bool
) -> Callable:
    """Returns (state, batch, learning_rate=None) -> (state, StepMetrics), the order of a training step."""
    value_and_grad, updated = _value_and_grad(loss_fn, options), _updated(optimizer, options)

    def train_step(state: State, batch: Any, learning_rate: jax.Array | None = None) -> tuple[State, StepMetrics]:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=options.num_microbatches)
        rows, model_state = batch, state.get("model_state")
        if has_keys:
            rows = batch, row_keys(state["opt_state"]["seed"], state["step"], num_rows(batch))
        rounding, scale = _rounding(state, options.policy), _scale(state)

        def of_params(params: Any) -> tuple[tuple, Any]:
            return value_and_grad(params, rows, rounding, scale=scale, model_state=model_state)

        return updated(state, of_params(state["params"]), learning_rate=learning_rate, of_params=of_params)

    return train_step


def _rounding(state: State, policy: Policy) -> Rounding:
    """Returns how the values that a step stores are rounded."""
    if policy.rounding != "stochastic":
        return NEAREST
    return Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))


def _scale(state: State) -> jax.Array | None:
    loss_scale = state["opt_state"].get("loss_scale")
    return None if loss_scale is None else loss_scale.scale


def _updated(optimizer: optax.GradientTransformation, options: ProgramOptions) -> Callable:
    """Returns (state, ((loss sum, LossAux), gradients), *, learning_rate, of_params) -> (state, StepMetrics).

    The gradients are those of `_value_and_grad`, which `of_params` computes at other parameters.
    """
    policy, replica_sync, update = options.policy, options.active_replica_sync, masked(optimizer).update
    is_given_value = not isinstance(optimizer, MaskedTransformation)

    def updated(
        state: State, found: tuple[tuple, Any], *, learning_rate: Any, of_params: Callable
    ) -> tuple[State, StepMetrics]:
        (loss_sum, loss_aux), grads = found
        model_state, rounding, scale = state.get("model_state"), _rounding(state, policy), _scale(state)
        norm = functools.partial(global_norm, in_blocks=options.norm_in_blocks, replica_sync=replica_sync)
        # The norm of the sums, and a product instead of a division: XLA on CPU then scales each gradient where the
        # update reads it, and writes no scaled copy of them all.
        per_token = 1.0 / (loss_aux.count if scale is None else loss_aux.count * scale)
        grad_norm = norm(grads) * per_token
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * per_token, grads)
        weights = state["opt_state"].get("master", state["params"])
        weights = weights if replica_sync is None else replica_sync.shard_like_state(weights)
        param_norm = norm(weights)
        # Comparisons in fp32: a non-finite gradient anywhere makes the norm non-finite. Including the weights' norm
        # also orders it before the update, which XLA then makes in place; it copies all weights otherwise.
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm)
        for leaf in jax.tree.leaves(loss_aux.model_state):
            finite &= jnp.isfinite(leaf).all()

        def mean_loss() -> jax.Array:
            return loss_sum * per_token if scale is not None else loss_sum / loss_aux.count

        applies, spike, window = finite, None, None
        if options.spikes is not None:
            reduced = {"loss": mean_loss(), "grad_norm": grad_norm, "finite": finite}
            spike, window = spikes.observed(state["spikes"], **reduced, policy=options.spikes)
            applies = finite & ~spike if options.spikes.skips else finite
        extra = {"grad_norm": grad_norm, "finite": applies, "rounding": rounding}
        if learning_rate is not None:
            extra["learning_rate"] = learning_rate
        if is_given_value:
            value_fn = _value_fn(lambda weights: of_params(_params_of(weights, options)), scale)
            extra |= {"value": loss_sum * per_token, "grad": grads, "value_fn": value_fn}
        updates, inner = update(grads, state["opt_state"]["inner"], weights, **extra)
        weights = _apply_updates(weights, updates, applies=applies, rounding=rounding)
        opt_state = state["opt_state"] | {"inner": inner}
        if policy.master is not None:
            opt_state["master"] = weights
        if (loss_scale := opt_state.get("loss_scale")) is not None:
            # a batch without counted tokens gives no information on the scale
            moved = scaling.adjusted(loss_scale, finite)
            opt_state["loss_scale"] = scaling.chosen(loss_aux.count > 0, moved, loss_scale)
        params = _params_of(weights, options)
        new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
        if model_state is not None:
            new_state["model_state"] = jax.tree.map(
                lambda new, old: jnp.where(applies, new.astype(old.dtype), old), loss_aux.model_state, model_state
            )
        if window is not None:
            new_state["spikes"] = window
        metrics = StepMetrics(
            loss=mean_loss(),
            num_tokens=None if loss_aux.is_mean else loss_aux.count,
            grad_norm=grad_norm,
            param_norm=param_norm,
            finite=finite,
            spike=spike,
            aux=averaged_aux(loss_aux.aux, num_parts=options.num_microbatches * options.row_degree),
        )
        return new_state, metrics

    return updated


def _params_of(weights: Any, options: ProgramOptions) -> Any:
    """Returns the parameters that the forward pass reads, from the weights that the optimizer updates."""
    params, replica_sync = cast_tree(weights, options.policy.param), options.active_replica_sync
    return params if replica_sync is None else replica_sync.all_gather_params(params)


def _has_stages(options: ProgramOptions) -> bool:
    """Returns whether the step is that of `pipeline`, over a mesh with stages."""
    mesh = None if options.replica_sync is None else options.replica_sync.layout.mesh
    return options.accumulate is pipelined and mesh is not None and dict(mesh.shape).get("pipe", 1) > 1


def _microbatch_step(
    loss_fn: CheckedLossFn, optimizer: optax.GradientTransformation, *, options: ProgramOptions, shardings: Any
) -> MicrobatchStep:
    """Returns the step in programs for one microbatch each, or for one tick of a pipeline."""
    replica_sync, dtype = options.active_replica_sync, options.policy.accumulate
    value_and_grad = _local_value_and_grad(loss_fn, options, num_microbatches=1)
    updated, has_stages = _updated(optimizer, options), _has_stages(options)
    staged: Any = loss_fn  # with stages, what `pipelined` takes

    def start_here(params: Any, rows: Any, *, reduce: Any = None) -> dict[str, Any]:
        if has_stages:
            return start_ticks(staged, params, rows, dtype=dtype)
        shapes = params if reduce is None else jax.eval_shape(reduce, params)
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), shapes)
        return {"totals": SumAndCount(jnp.float32(0.0), jnp.float32(0.0)), "grads": grads}

    def add_here(
        kept: dict[str, Any],
        of_device: tuple,
        rounding: Rounding,
        *,
        number: Any,
        scale: Any,
        num_microbatches: Any,
        name: str,
        reduce: Any = None,
    ) -> dict[str, Any]:
        if has_stages:
            at = {"phase": name, "tick": number, "num_microbatches": num_microbatches, "rounding": rounding}
            return run_tick(staged, kept, of_device, **at)
        given = {"scale": scale, "model_state": None, "reduce": reduce}
        (loss_sum, loss_aux), grads = value_and_grad(*of_device, rounding, **given)
        if loss_aux.is_mean:
            raise ValueError("the steps of single microbatches need a loss function that returns SumAndCount.")
        totals = SumAndCount(kept["totals"].total + loss_sum, kept["totals"].count + loss_aux.count)
        return {"totals": totals, "grads": rounding.at(number).added(kept["grads"], grads)}

    start_kept = start_here if replica_sync is None else replica_sync.start_sums(start_here, dtype=dtype)

    def start_accumulation(inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
        return {"number": jnp.zeros((), jnp.int32), "kept": start_kept(inputs["params"], batch)}

    def adding(name: str, function_name: str) -> Callable:
        local = functools.partial(add_here, name=name)
        add_to_sums = local if replica_sync is None else replica_sync.add_to_sums(local, dtype=dtype)

        def add(buffer: dict[str, Any], inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
            check_divides(batch, num_devices=options.row_degree, num_microbatches=1)
            more = {"number": buffer["number"], "scale": _scale(inputs)}
            more["num_microbatches"] = inputs.get("num_microbatches")
            of_device, rounding = (inputs["params"], batch), _rounding(inputs, options.policy)
            return {"number": buffer["number"] + 1, "kept": add_to_sums(buffer["kept"], of_device, rounding, **more)}

        add.__name__ = function_name
        return _jitted(add, options, placed)

    def no_value(_: Any) -> Any:
        raise ValueError("an optimizer that evaluates the loss again needs the whole batch in one program.")

    def update_step(state: State, buffer: dict[str, Any], learning_rate: Any = None) -> tuple[State, StepMetrics, Any]:
        found = buffer["kept"]["totals"], buffer["kept"]["grads"]
        (loss_sum, count), grads = found if replica_sync is None else replica_sync.reduced_sums(*found, dtype=dtype)
        found = (loss_sum, LossAux(count)), grads
        # not by `start`: Neuron may run a program without collectives on the host
        zeros = jax.tree.map(jnp.zeros_like, buffer)
        return *updated(state, found, learning_rate=learning_rate, of_params=no_value), zeros

    placed = None
    if options.replica_sync is not None:
        layout = options.replica_sync.layout
        per_device = layout.replicated() if replica_sync is None else replica_sync.per_device
        placed = {"number": layout.replicated(), "kept": per_device}
    names = {phase: f"{phase}_tick" for phase in PHASES} if has_stages else {"microbatch": "add_microbatch"}
    after_update = None if shardings is None else (shardings, None, placed)
    return MicrobatchStep(
        start=jax.jit(start_accumulation, out_shardings=placed),
        ticks={name: adding(name, function_name) for name, function_name in names.items()},
        update=_jitted(update_step, options, after_update, donated=(0, 1)),
        shardings=placed,
        num_stages=replica_sync.layout.size(("pipe",)) if has_stages and replica_sync else 1,
    )


def _value_fn(value_and_grad: Callable, scale: jax.Array | None) -> Callable[[Any], jax.Array]:
    """Returns weights -> mean loss of a batch over microbatches and devices, with the program's own derivative."""

    def of_weights(weights: Any) -> tuple[jax.Array, Any]:
        (loss_sum, loss_aux), grads = value_and_grad(weights)
        per_token = 1.0 / (loss_aux.count if scale is None else loss_aux.count * scale)
        return loss_sum * per_token, jax.tree.map(lambda g, w: (g * per_token).astype(w.dtype), grads, weights)

    @jax.custom_vjp
    def value(weights: Any) -> jax.Array:
        return of_weights(weights)[0]

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: cotangent.astype(g.dtype) * g, grads),)

    value.defvjp(of_weights, backward)

    # Optax's line searches refuse extra arguments that the function does not name.
    def value_fn(
        weights: Any, *, learning_rate: Any = None, grad_norm: Any = None, finite: Any = None, rounding: Any = None
    ) -> jax.Array:
        return value(weights)

    return value_fn


def _value_and_grad(loss_fn: Callable, options: ProgramOptions) -> Callable[..., tuple[tuple, Any]]:
    """Returns (params, rows, rounding, *, scale, model_state) -> ((loss sum, LossAux), gradients) over all devices."""
    replica_sync, local = options.active_replica_sync, _local_value_and_grad(loss_fn, options)
    if replica_sync is None:
        return local
    mean_shares = replica_sync.mean_shares

    def local_shares(*args: Any, **given: Any) -> tuple[tuple, Any]:
        (loss_sum, loss_aux), grads = local(*args, **given)
        return (loss_sum, dataclasses.replace(loss_aux, model_state=mean_shares(loss_aux.model_state))), grads

    return replica_sync.value_and_grad(local_shares, dtype=options.policy.accumulate)


def _local_value_and_grad(
    loss_fn: Callable, options: ProgramOptions, *, num_microbatches: int | None = None
) -> Callable[..., tuple[tuple, Any]]:
    """Returns the same on one device; `num_microbatches`: of the rows, None: those of the options."""
    dtype, replica_sync = options.policy.accumulate, options.active_replica_sync
    num_microbatches = options.num_microbatches if num_microbatches is None else num_microbatches
    loss_fn = loss_fn if replica_sync is None else replica_sync.with_gathered_params(loss_fn)

    def local(
        params: Any, rows: Any, rounding: Rounding, *, scale: Any, model_state: Any, reduce: Any = None
    ) -> tuple[tuple, Any]:
        def scaled(params: Any, *args: Any) -> tuple[jax.Array, LossAux]:
            loss_sum, loss_aux = loss_fn(params, *args)
            return loss_sum * scale, loss_aux

        sums = Accumulation(num_microbatches, dtype, rounding, reduce)
        if options.accumulate is not None:
            (loss_sum, count), grads = options.accumulate(loss_fn, params, rows, sums=sums)
            return (loss_sum, LossAux(count)), grads
        if scale is None:
            return accumulated(loss_fn, params, rows, sums=sums, model_state=model_state)
        with scaling.applied():
            return accumulated(scaled, params, rows, sums=sums, model_state=model_state)

    return local


def _eval_step(loss_fn: CheckedLossFn, options: ProgramOptions) -> Callable[[State, Any], EvalMetrics]:
    replica_sync, num_microbatches = options.active_replica_sync, options.num_microbatches

    def local(params: Any, batch: Any, model_state: Any) -> tuple[jax.Array, LossAux]:
        if num_microbatches == 1:
            return loss_fn(params, batch, model_state)
        found = jax.lax.map(lambda part: loss_fn(params, part, model_state), microbatches(batch, num_microbatches))
        return jax.tree.map(lambda values: values.sum(0), found)

    loss = local if replica_sync is None else replica_sync.loss(replica_sync.with_gathered_params(local))

    def eval_step(state: State, batch: Any) -> EvalMetrics:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=num_microbatches)
        loss_sum, loss_aux = loss(state["params"], batch, state.get("model_state"))
        return EvalMetrics(
            loss=loss_sum / loss_aux.count,
            num_tokens=None if loss_aux.is_mean else loss_aux.count,
            aux=averaged_aux(loss_aux.aux, num_parts=num_microbatches * options.row_degree),
        )

    return jax.jit(eval_step)


def _no_eval_step(state: State, batch: Any) -> EvalMetrics:
    raise ValueError("a program of pipeline stages has no eval_step; evaluate with a single loss function.")


def accumulated(
    loss_fn: CheckedLossFn, params: Any, rows: Any, *, sums: Accumulation, model_state: Any = None
) -> tuple[tuple, Any]:
    """Returns ((loss sum, LossAux), gradients) of a batch whose parts are run one after another.

    Args:
      loss_fn: as `step_options.checked_loss` makes it.
      params: with respect to which gradients are taken.
      rows: fields with rows in front.
      sums: number of parts, see `batch.microbatches`, and how their gradients are summed.
      model_state: of the first part; each returns that of the next.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def of_part(part, model_state):
        found, grads = value_and_grad(params, part, model_state)
        return found, grads if sums.reduce is None else sums.reduce(grads)

    if sums.num_microbatches == 1:
        return of_part(rows, model_state)

    def add(totals, numbered):
        number, part = numbered
        (loss, loss_aux), grads = of_part(part, totals[3])
        loss_sum, count, summed, _ = totals
        totals = loss_sum + loss, count + loss_aux.count, sums.rounding.at(number).added(summed, grads)
        return (*totals, loss_aux.model_state), dataclasses.replace(loss_aux, count=None, model_state=None)

    shapes = params if sums.reduce is None else jax.eval_shape(sums.reduce, params)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, sums.dtype), shapes)
    start = (jnp.float32(0.0), jnp.float32(0.0), zeros, model_state)
    numbered = jnp.arange(sums.num_microbatches, dtype=jnp.uint32), microbatches(rows, sums.num_microbatches)
    (loss_sum, count, grads, model_state), loss_aux = jax.lax.scan(add, start, numbered)
    loss_aux = jax.tree.map(lambda values: values.sum(0), loss_aux)
    return (loss_sum, dataclasses.replace(loss_aux, count=count, model_state=model_state)), grads


def _apply_updates(weights: Any, updates: Any, *, applies: jax.Array, rounding: Rounding) -> Any:
    """Returns weights + updates in the dtypes of the weights; the weights themselves where `applies` is False."""
    exact = jax.tree.map(lambda weight, update: weight.astype(jnp.float32) + update, weights, updates)

    def apply(path, weight, updated):
        written = rounding.write(updated, weight.dtype, name="weights" + jax.tree_util.keystr(path))
        return jnp.where(applies, written, weight)

    return jax.tree_util.tree_map_with_path(apply, weights, exact)


def _initial(
    optimizer: optax.GradientTransformation,
    options: ProgramOptions,
    given: Sequence[str],
    *,
    shardings: Any = None,
) -> Callable[..., State]:
    """Returns `TrainingProgram.init`; without shardings, its state is on the parameters' devices."""
    policy = options.policy

    def init(params: Any, *, model_state: Any = None, seed: Any = 0) -> State:
        check_params(params)
        if model_state is not None:
            check_model_state(model_state, given)
        elif "model_state" in given:
            raise ValueError("loss_fn takes a model_state: give init(params, model_state=...) its first value.")
        weights = cast_tree(params, policy.master or policy.param)
        opt_state: dict[str, Any] = {"inner": _copied(optimizer.init(weights))}
        if policy.master is not None:
            opt_state["master"] = _copied(weights)
        if policy.rounding != "nearest" or "keys" in given:
            opt_state["seed"] = jnp.array(seed, jnp.uint32)
        if is_fp16(options.autocast):
            opt_state["loss_scale"] = scaling.initial()
        params = _copied(cast_tree(params, policy.param))
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": opt_state}
        if model_state is not None:
            state["model_state"] = _copied(model_state)
        if options.spikes is not None:
            state["spikes"] = spikes.initial(options.spikes)
        return state if shardings is None else jax.lax.with_sharding_constraint(state, shardings)

    return init


def _copied(tree: Any) -> Any:
    """Returns the tree with its arrays copied: the state is donated, what the caller or the optimizer holds is not."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for place, leaf in enumerate(leaves):  # an array that nobody else holds is freed before the next is copied
        leaves[place] = jnp.copy(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
    return jax.tree.unflatten(structure, leaves)


def _jitted(step: Callable, options: ProgramOptions, shardings: Any, *, donated: tuple[int, ...] = (0,)) -> Any:
    """Returns the jitted step, with the compiler options of its devices."""
    keep_unused = len(donated) > 1  # else what is donated and only overwritten would be allocated again
    if options.replica_sync is None:
        return jax.jit(step, donate_argnums=donated, keep_unused=keep_unused)
    compiler_options = xla_options.compiler_options(options.replica_sync.layout) or None
    return jax.jit(
        step,
        donate_argnums=donated,
        keep_unused=keep_unused,
        out_shardings=shardings,
        compiler_options=compiler_options,
    )
