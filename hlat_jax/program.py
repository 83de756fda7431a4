"""From a loss function and an Optax optimizer to a training step: passes, gradients, masking, update, donation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from hlat_jax.batch import SumAndCount, microbatches
from hlat_jax.optimizer import global_norm, masked
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.sharding import ROWS
from hlat_jax.parallel.zero import check_params
from hlat_jax.passes import remat, scaling
from hlat_jax.passes.autocast import autocast, is_fp16
from hlat_jax.passes.remat import Plan
from hlat_jax.precision import NEAREST, Accumulation, Rounding, cast_tree
from hlat_jax.program_options import (
    LossAux,
    ProgramOptions,
    averaged_aux,
    check_arguments,
    checked_loss,
    resolved,
    with_dialects,
)

State = dict[str, Any]
LossFn = Callable[[Any, Any], jax.Array | SumAndCount | tuple[jax.Array | SumAndCount, Any]]
CheckedLossFn = Callable[[Any, Any], tuple[jax.Array, LossAux]]


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
      aux: auxiliary values of the loss function, float32, see `training_program`; None without `has_aux`.
    """

    loss: jax.Array
    num_tokens: jax.Array | None
    grad_norm: jax.Array
    param_norm: jax.Array
    finite: jax.Array
    aux: Any = None


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """The functions of a training program, and the shardings of its state.

    Attributes:
      init: `(params, *, seed=0) -> state`. The state is {"step", "params", "opt_state": {"inner"[, "master"]
        [, "seed"][, "loss_scale"]}}; the uint32 seed is that of stochastic rounding, where the policy has it.
      stages: name of a pass -> the jitted step after it; the last one is `step`.
      options: those it was built with, with `zero` replaced by the `replica_sync` made from it.
      shardings: of every leaf of the state; None: wherever the parameters are.
      plan: the choice that meets the memory budget; None without one.
    """

    init: Callable[..., State]
    stages: Mapping[str, Callable]
    options: ProgramOptions
    shardings: Any
    plan: Plan | None = None

    @property
    def step(self) -> Callable[[State, Any, ArrayLike], tuple[State, StepMetrics]]:
        """The jitted (state, batch, learning_rate) -> (state, StepMetrics); donates the state."""
        return list(self.stages.values())[-1]

    def step_arguments(self, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        """Returns the shapes, dtypes and shardings of what `step` takes, from the shapes of parameters and a batch."""
        state, rate = jax.eval_shape(self.init, params), jax.ShapeDtypeStruct((), jnp.float32)
        replica_sync = self.options.replica_sync
        if replica_sync is None:
            return state, batch, rate

        def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        rows = replica_sync.layout.rows()
        return jax.tree.map(placed, state, self.shardings), jax.tree.map(lambda leaf: placed(leaf, rows), batch), rate


def training_program(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    options: ProgramOptions,
    params: Any = None,
    batch: Any = None,
    has_aux: bool = False,
) -> TrainingProgram:
    """Returns the training program of a loss and an optimizer.

    Args:
      loss_fn: (params, microbatch) -> loss. Either the mean over the microbatch, a floating-point scalar: microbatches
        and devices then weigh equally, however much each of them counts. Or `SumAndCount(sum of the losses of the
        counted tokens, count of them)`: the program divides by the count over the whole batch, so that unequal
        microbatches weigh as one batch would. Both are accumulated in fp32.
      optimizer: an Optax transformation. It gets the mean gradients in fp32, the weights, and the extra arguments
        `learning_rate`, `grad_norm` and `finite`; a transformation with a schedule of its own ignores them.
      options: precision, accumulation, devices, memory.
      params: shapes of the parameters; needed with `options.zero` or `options.replica_sync`, whose shardings follow
        from them, and with `options.memory_budget`.
      batch: shapes of a batch; needed with `options.memory_budget`. With those of the parameters, the step is traced
        here.
      has_aux: the loss function returns (loss, auxiliary values), as for `jax.value_and_grad`. The values, a pytree,
        come out in `StepMetrics.aux` in fp32: each array is the mean over microbatches and devices, each `SumAndCount`
        becomes total / count over the whole batch.

    Raises:
      ValueError: no function, no transformation, parameters that are not floating-point arrays, shapes that an option
        needs are missing, or no program tried fits the budget. The step, before it is compiled: the loss function
        returns anything else.
    """
    check_arguments(loss_fn, optimizer, options=options, params=params, batch=batch, has_aux=has_aux)
    options = resolved(options, params)
    if options.dialects is not None:
        loss_fn, options = with_dialects(loss_fn, options)
    if options.accumulate is None:
        loss_fn = checked_loss(loss_fn, has_aux=has_aux)
    optimizer, shardings = masked(optimizer), None
    if options.replica_sync is not None:
        # of one device too: what reads the state is then compiled once, for before the first step and after it
        shardings = options.replica_sync.state_shardings(jax.eval_shape(_initial(optimizer, options), params))

    def step_of(loss_fn: Callable) -> Any:
        return _jitted(_train_step(loss_fn, optimizer, options), options, shardings)

    stages = {"loss": step_of(loss_fn)}
    if options.autocast is not None:
        loss_fn = autocast(loss_fn, options.autocast)
        stages["autocast"] = step_of(loss_fn)
    init = _initial(optimizer, options, shardings=shardings)
    program = TrainingProgram(init=init, stages=stages, options=options, shardings=shardings)
    if params is None or batch is None:
        return program
    arguments = program.step_arguments(params, batch)
    if options.memory_budget is None:
        list(stages.values())[-1].trace(*arguments)  # raises for a loss function that returns anything else
        return program
    search: dict[str, Any] = {"options": options.remat or remat.RematOptions(), "name": "ProgramOptions.memory_budget"}
    plan = remat.fit(loss_fn, *arguments, budget_bytes=options.memory_budget, step=step_of, **search)
    return dataclasses.replace(program, stages=stages | {"remat": step_of(plan.fn)}, plan=plan)


def _train_step(loss_fn: Callable, optimizer: optax.GradientTransformation, options: ProgramOptions) -> Callable:
    """Returns (state, batch, learning_rate) -> (state, StepMetrics), the order of a training step."""
    policy, replica_sync = options.policy, options.active_replica_sync
    value_and_grad = _value_and_grad(loss_fn, options)
    num_parts = options.num_microbatches * (1 if replica_sync is None else replica_sync.layout.size(ROWS))

    def train_step(state: State, batch: Any, learning_rate: jax.Array) -> tuple[State, StepMetrics]:
        rounding = NEAREST
        if policy.rounding == "stochastic":
            rounding = Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))
        loss_scale = state["opt_state"].get("loss_scale")
        scale = None if loss_scale is None else loss_scale.scale
        (loss_sum, loss_aux), grads = value_and_grad(state["params"], batch, rounding, scale)
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

        extra = {"learning_rate": learning_rate, "grad_norm": grad_norm, "finite": finite, "rounding": rounding}
        updates, inner = optimizer.update(grads, state["opt_state"]["inner"], weights, **extra)
        weights = _apply_updates(weights, updates, finite=finite, rounding=rounding)
        opt_state = state["opt_state"] | {"inner": inner}
        if policy.master is not None:
            opt_state["master"] = weights
        if loss_scale is not None:
            # a batch without counted tokens gives no information on the scale
            moved = scaling.adjusted(loss_scale, finite)
            opt_state["loss_scale"] = scaling.chosen(loss_aux.count > 0, moved, loss_scale)
        params = cast_tree(weights, policy.param)
        params = params if replica_sync is None else replica_sync.all_gather_params(params)
        new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
        metrics = StepMetrics(
            loss=loss_sum * per_token if scale is not None else loss_sum / loss_aux.count,
            num_tokens=None if loss_aux.is_mean else loss_aux.count,
            grad_norm=grad_norm,
            param_norm=param_norm,
            finite=finite,
            aux=averaged_aux(loss_aux.aux, num_parts=num_parts),
        )
        return new_state, metrics

    return train_step


def _value_and_grad(loss_fn: Callable, options: ProgramOptions) -> Callable[..., tuple[tuple, Any]]:
    """Returns (params, batch, rounding, scale) -> ((loss sum, LossAux), gradients) of a batch over all devices."""
    dtype, replica_sync = options.policy.accumulate, options.active_replica_sync
    loss_fn = loss_fn if replica_sync is None else replica_sync.with_gathered_params(loss_fn)

    def local(params: Any, batch: Any, rounding: Rounding, *, scale: Any, reduce: Any = None) -> tuple[tuple, Any]:
        def scaled(params: Any, part: Any) -> tuple[jax.Array, LossAux]:
            loss_sum, loss_aux = loss_fn(params, part)
            return loss_sum * scale, loss_aux

        sums = Accumulation(options.num_microbatches, dtype, rounding, reduce)
        if options.accumulate is not None:
            (loss_sum, count), grads = options.accumulate(loss_fn, params, batch, sums=sums)
            return (loss_sum, LossAux(count)), grads
        if scale is None:
            return accumulated(loss_fn, params, batch, sums=sums)
        with scaling.applied():
            return accumulated(scaled, params, batch, sums=sums)

    if replica_sync is not None:
        return replica_sync.value_and_grad(local, dtype=dtype)
    return lambda params, batch, rounding, scale: local(params, batch, rounding, scale=scale)


def accumulated(loss_fn: CheckedLossFn, params: Any, batch: Any, *, sums: Accumulation) -> tuple[tuple, Any]:
    """Returns ((loss sum, LossAux), gradients) of a batch whose parts are run one after another.

    Args:
      loss_fn: as `program_options.checked_loss` makes it.
      params: with respect to which gradients are taken.
      batch: fields with rows in front.
      sums: number of parts, see `batch.microbatches`, and how their gradients are summed.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def of_part(part):
        found, grads = value_and_grad(params, part)
        return found, grads if sums.reduce is None else sums.reduce(grads)

    if sums.num_microbatches == 1:
        return of_part(batch)

    def add(totals, numbered):
        number, part = numbered
        (loss, loss_aux), grads = of_part(part)
        totals = totals[0] + loss, totals[1] + loss_aux.count, sums.rounding.at(number).added(totals[2], grads)
        return totals, dataclasses.replace(loss_aux, count=None)

    shapes = params if sums.reduce is None else jax.eval_shape(sums.reduce, params)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, sums.dtype), shapes)
    start = (jnp.float32(0.0), jnp.float32(0.0), zeros)
    numbered = jnp.arange(sums.num_microbatches, dtype=jnp.uint32), microbatches(batch, sums.num_microbatches)
    (loss_sum, count, grads), loss_aux = jax.lax.scan(add, start, numbered)
    loss_aux = jax.tree.map(lambda values: values.sum(0), loss_aux)
    return (loss_sum, dataclasses.replace(loss_aux, count=count)), grads


def _apply_updates(weights: Any, updates: Any, *, finite: jax.Array, rounding: Rounding) -> Any:
    """Returns weights + updates in the dtypes of the weights; the weights themselves where `finite` is False."""
    exact = jax.tree.map(lambda weight, update: weight.astype(jnp.float32) + update, weights, updates)

    def apply(path, weight, updated):
        written = rounding.write(updated, weight.dtype, name="weights" + jax.tree_util.keystr(path))
        return jnp.where(finite, written, weight)

    return jax.tree_util.tree_map_with_path(apply, weights, exact)


def _initial(
    optimizer: optax.GradientTransformation, options: ProgramOptions, *, shardings: Any = None
) -> Callable[..., State]:
    """Returns (params, *, seed=0) -> the state before the first step; without shardings, on the parameters' devices."""
    policy = options.policy

    def init(params: Any, *, seed: Any = 0) -> State:
        check_params(params)
        params = jax.tree.map(jnp.copy, params)  # the state is donated, the caller's parameters are not
        weights = cast_tree(params, policy.master or policy.param)
        # copies: what an optimizer keeps of the weights must not be the buffer that is donated as the weights
        opt_state: dict[str, Any] = {"inner": optimizer.init(jax.tree.map(jnp.copy, weights))}
        if policy.master is not None:
            opt_state["master"] = weights
        if policy.rounding != "nearest":
            opt_state["seed"] = jnp.asarray(seed, jnp.uint32)
        if is_fp16(options.autocast):
            opt_state["loss_scale"] = scaling.initial()
        state = {"step": jnp.zeros((), jnp.int32), "params": cast_tree(params, policy.param), "opt_state": opt_state}
        return state if shardings is None else jax.lax.with_sharding_constraint(state, shardings)

    return init


def _jitted(train_step: Callable, options: ProgramOptions, shardings: Any) -> Any:
    if options.replica_sync is None:
        return jax.jit(train_step, donate_argnums=0)
    compiler_options = xla_options.compiler_options(options.replica_sync.layout) or None
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=compiler_options)
