"""Makes a training program from a loss: gradients, accumulation, masking of non-finite steps, update, donation.

Owns the order of a training step. Refuses to know a model, a batch type or an optimizer: a loss is a function of
(params, microbatch), an optimizer is an Optax transformation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hlat_jax.batch import SumAndCount, microbatches
from hlat_jax.ops.registry import OPS
from hlat_jax.optimizer import global_norm, masked
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.sharding import ROWS
from hlat_jax.parallel.zero import check_params, replica_sync
from hlat_jax.passes import remat, scaling
from hlat_jax.passes.autocast import autocast, is_fp16
from hlat_jax.passes.remat import Plan
from hlat_jax.precision import NEAREST, Accumulation, Policy, Rounding, cast_tree
from hlat_jax.program_options import BesideLoss, ProgramOptions, averaged_aux, checked_loss
from hlat_jax.report import Report, report

State = dict[str, Any]
LossFn = Callable[[Any, Any], jax.Array | SumAndCount | tuple[jax.Array | SumAndCount, Any]]
CheckedLossFn = Callable[[Any, Any], tuple[jax.Array, BesideLoss]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one step tells. Scalars on device; nothing here is read until a step later.

    Attributes:
      loss: float32, mean over the counted tokens of the whole batch, nats per token; of a loss function that returns a
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


def accumulated(loss_fn: CheckedLossFn, params: Any, batch: Any, *, sums: Accumulation) -> tuple[tuple, Any]:
    """Returns ((loss sum, BesideLoss), gradients) of a batch whose parts are run one after another.

    Args:
      loss_fn: as `program_options.checked_loss` makes it.
      params: what gradients are of.
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
        (loss, beside), grads = of_part(part)
        totals = totals[0] + loss, totals[1] + beside.count, sums.rounding.at(number).added(totals[2], grads)
        return totals, dataclasses.replace(beside, count=None)

    shapes = params if sums.reduce is None else jax.eval_shape(sums.reduce, params)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, sums.dtype), shapes)
    start = (jnp.float32(0.0), jnp.float32(0.0), zeros)
    numbered = jnp.arange(sums.num_microbatches, dtype=jnp.uint32), microbatches(batch, sums.num_microbatches)
    (loss_sum, count, grads), beside = jax.lax.scan(add, start, numbered)
    beside = jax.tree.map(lambda values: values.sum(0), beside)
    return (loss_sum, dataclasses.replace(beside, count=count)), grads


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """The functions of a training run, and where its state lies.

    Attributes:
      init: (params, *, seed=0) -> state. The state is {"step", "params", "opt_state": {"inner"[, "master"][, "seed"]
        [, "loss_scale"]}}; the uint32 seed is that of stochastic rounding, where the policy has it.
      step: jitted (state, batch, learning_rate) -> (state, StepMetrics); donates the state.
      options: it was built with; what `zero` asks for is a `spread` by then, and on one device nothing.
      shardings: where every leaf of the state lies; None: wherever the parameters are.
      stages: name of a pass -> the step after it; the last one is `step`.
      plan: what the memory budget made of it; None without one.
    """

    init: Callable[..., State]
    step: Callable[[State, Any, jax.Array], tuple[State, StepMetrics]]
    options: ProgramOptions
    shardings: Any
    stages: Mapping[str, Callable]
    plan: Plan | None = None

    def report(self, state: State, batch: Any) -> Report:
        """Returns what each pass did, and what the step sends and holds; compiles it.

        Args:
          state: arrays, or their shapes and shardings.
          batch: likewise.
        """
        layout = None if self.options.spread is None else self.options.spread.layout
        arguments = state, batch, jnp.float32(0.0)
        return report(self, arguments, layout=layout)


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
      params: shapes of the parameters, with `options.zero` or `options.spread`, from which it follows where the state
        lies, and with `options.memory_budget`.
      batch: shapes of a batch, with `options.memory_budget`. With those of the parameters, the step is traced here.
      has_aux: the loss function returns (loss, auxiliary values), as for `jax.value_and_grad`. The values, a pytree,
        come out in `StepMetrics.aux` in fp32: each array is the mean over microbatches and devices, each `SumAndCount`
        becomes total / count over the whole batch.

    Raises:
      ValueError: no function, no transformation, parameters that are no floating-point arrays, shapes that an option
        needs are missing, or a budget that none of the programs tried fits. The step, before it is compiled: the
        loss function returns anything else.
    """
    _check_arguments(loss_fn, optimizer, options=options, params=params, batch=batch, has_aux=has_aux)
    options = _resolved(options, params)
    if options.dialects is not None:
        loss_fn, options = _with_dialects(loss_fn, options)
    if options.accumulate is None:
        loss_fn = checked_loss(loss_fn, has_aux=has_aux)
    optimizer = masked(optimizer)
    made = _initial(optimizer, options.policy, is_scaled=is_fp16(options.autocast))
    # Where the state lies is said for one device too: what reads it is then compiled once, before the first step and
    # after it.
    shardings, compiled = None, {"donate_argnums": 0}
    if options.spread is not None:
        shardings = options.spread.state_shardings(jax.eval_shape(made, params))
        compiled["out_shardings"] = shardings, None
        compiled["compiler_options"] = xla_options.compiler_options(options.spread.layout) or None
        if options.spread.layout.mesh.size == 1:
            options = dataclasses.replace(options, spread=None)

    def init(params: Any, *, seed: Any = 0) -> State:
        check_params(params)
        state = made(params, seed=seed)
        return state if shardings is None else jax.lax.with_sharding_constraint(state, shardings)

    def step_of(loss_fn: Callable) -> Any:
        return jax.jit(_train_step(loss_fn, optimizer, options), **compiled)

    stages = {"loss": step_of(loss_fn)}
    if options.autocast is not None:
        loss_fn = autocast(loss_fn, options.autocast)
        stages["autocast"] = step_of(loss_fn)
    plan = None
    if params is not None and batch is not None:
        arguments = _laid_out(jax.eval_shape(made, params), batch, shardings=shardings, spread=options.spread)
    if options.memory_budget is not None:
        search = {"options": options.remat or remat.Options(), "name": "ProgramOptions.memory_budget"}
        plan = remat.fit(loss_fn, *arguments, budget_bytes=options.memory_budget, step=step_of, **search)
        stages["remat"] = step_of(plan.fn)
    elif params is not None and batch is not None:
        list(stages.values())[-1].trace(*arguments)
    return TrainingProgram(init, list(stages.values())[-1], options, shardings, stages, plan)


def _check_arguments(loss_fn: Any, optimizer: Any, *, options: Any, params: Any, batch: Any, has_aux: Any) -> None:
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is no function of (params, microbatch).")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is no Optax transformation: give one, such as optax.adam(1e-3).")
    if not isinstance(options, ProgramOptions):
        raise ValueError(f"options={options!r}: give ProgramOptions(precision.POLICIES['fp32']).")
    if not isinstance(has_aux, bool):
        raise ValueError(f"has_aux={has_aux!r} must be True or False.")
    if has_aux and options.accumulate is not None:
        raise ValueError("has_aux=True takes a loss function that runs whole; leave options.accumulate out.")
    if options.dialects is not None and not _takes(loss_fn, "dialects"):
        raise ValueError("options.dialects go to the loss function: define it as loss(params, batch, *, dialects).")
    if params is not None:
        check_params(params)
    elif options.zero is not None or options.spread is not None:
        raise ValueError("options.zero or .spread says where parameters lie: give their shapes as params=...")
    if options.memory_budget is not None and (params is None or batch is None):
        raise ValueError("options.memory_budget is held against the compiled step: give params=... and batch=...")


def _takes(function: Callable, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _resolved(options: ProgramOptions, params: Any) -> ProgramOptions:
    """Returns the options with the policy's own autocast, and with a spread in the place of `zero`."""
    changes: dict[str, Any] = {}
    if options.autocast is None:
        changes["autocast"] = options.policy.autocast
    if options.zero is not None:
        devices = jax.devices() if options.devices is None else options.devices
        spread = replica_sync(params, devices, stage=options.zero, bucket_bytes=options.bucket_bytes)
        changes |= {"spread": spread, "zero": None, "devices": None, "bucket_bytes": 0}
    return dataclasses.replace(options, **changes)


def _with_dialects(loss_fn: Callable, options: ProgramOptions) -> tuple[LossFn, ProgramOptions]:
    """Returns the loss function with the implementations that were chosen, and options that report them."""
    platform = jax.default_backend() if options.spread is None else options.spread.layout.platform
    chosen = {key: OPS[key].choose(name, platform) for key, name in options.dialects.items()}
    names = {key: choice.name for key, choice in chosen.items()}

    @functools.wraps(loss_fn)
    def with_names(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch, dialects=names)

    reported = {OPS[key].key: choice for key, choice in chosen.items()}
    return with_names, dataclasses.replace(options, kernels={**options.kernels, **reported})


def _laid_out(state: Any, batch: Any, *, shardings: Any, spread: ReplicaSync | None) -> tuple:
    """Returns the shapes and shardings of a step's arguments."""
    if spread is not None:
        state = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, shardings
        )
        rows = spread.layout.rows()
        batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch)
    return state, batch, jax.ShapeDtypeStruct((), jnp.float32)


def _initial(optimizer: optax.GradientTransformation, policy: Policy, *, is_scaled: bool) -> Callable[..., State]:
    def made(params: Any, *, seed: Any = 0) -> State:
        params = jax.tree.map(jnp.copy, params)  # the state is donated, what the caller has is not
        weights = cast_tree(params, policy.master or policy.param)
        # copies: what an optimizer keeps of the weights must not be the buffer that is donated as the weights
        opt_state = {"inner": optimizer.init(jax.tree.map(jnp.copy, weights))}
        if policy.master is not None:
            opt_state["master"] = weights
        if policy.rounding != "nearest":
            opt_state["seed"] = jnp.asarray(seed, jnp.uint32)
        if is_scaled:
            opt_state["loss_scale"] = scaling.initial()
        return {"step": jnp.zeros((), jnp.int32), "params": cast_tree(params, policy.param), "opt_state": opt_state}

    return made


def _train_step(loss_fn: Callable, optimizer: optax.GradientTransformation, options: ProgramOptions) -> Callable:
    policy, spread = options.policy, options.spread
    value_and_grad = _value_and_grad(loss_fn, options)
    num_parts = options.num_microbatches * (1 if spread is None else spread.layout.size(ROWS))

    def train_step(state: State, batch: Any, learning_rate: jax.Array) -> tuple[State, StepMetrics]:
        rounding = NEAREST
        if policy.rounding == "stochastic":
            rounding = Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))
        loss_scale = state["opt_state"].get("loss_scale")
        scale = None if loss_scale is None else loss_scale.scale
        (loss_sum, beside), grads = value_and_grad(state["params"], batch, rounding, scale)
        norm = functools.partial(global_norm, in_blocks=options.norm_in_blocks, spread=spread)
        # The norm of the sums, and a product instead of a division: XLA on CPU then scales each gradient where the
        # update reads it, and writes no scaled copy of them all.
        per_token = 1.0 / (beside.count if scale is None else beside.count * scale)
        grad_norm = norm(grads) * per_token
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * per_token, grads)
        weights = state["opt_state"].get("master", state["params"])
        weights = weights if spread is None else spread.shard_like_state(weights)
        param_norm = norm(weights)
        # Comparisons in fp32: a non-finite gradient anywhere makes the norm non-finite. That the weights' norm is asked
        # too orders it before the update, which XLA then makes in place; it copies all weights otherwise.
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm)

        extra = {"learning_rate": learning_rate, "grad_norm": grad_norm, "finite": finite, "rounding": rounding}
        updates, inner = optimizer.update(grads, state["opt_state"]["inner"], weights, **extra)
        weights = _moved(weights, updates, finite=finite, rounding=rounding)
        opt_state = state["opt_state"] | {"inner": inner}
        if policy.master is not None:
            opt_state["master"] = weights
        if loss_scale is not None:
            # a batch that counts nothing tells nothing of the scale
            moved = scaling.adjusted(loss_scale, finite)
            opt_state["loss_scale"] = scaling.chosen(beside.count > 0, moved, loss_scale)
        params = cast_tree(weights, policy.param)
        params = params if spread is None else spread.all_gather_params(params)
        new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
        metrics = StepMetrics(
            loss_sum * per_token if scale is not None else loss_sum / beside.count,
            None if beside.is_mean else beside.count,
            grad_norm,
            param_norm,
            finite,
            averaged_aux(beside.aux, num_parts=num_parts),
        )
        return new_state, metrics

    return train_step


def _value_and_grad(loss_fn: Callable, options: ProgramOptions) -> Callable[..., tuple[tuple, Any]]:
    dtype, spread = options.policy.accumulate, options.spread
    loss_fn = loss_fn if spread is None else spread.with_gathered_params(loss_fn)

    def local(params: Any, batch: Any, rounding: Rounding, *, scale: Any, reduce: Any = None) -> tuple[tuple, Any]:
        def scaled(params: Any, part: Any) -> tuple[jax.Array, BesideLoss]:
            loss_sum, beside = loss_fn(params, part)
            return loss_sum * scale, beside

        sums = Accumulation(options.num_microbatches, dtype, rounding, reduce)
        if options.accumulate is not None:
            (loss_sum, count), grads = options.accumulate(loss_fn, params, batch, sums=sums)
            return (loss_sum, BesideLoss(count)), grads
        if scale is None:
            return accumulated(loss_fn, params, batch, sums=sums)
        with scaling.applied():
            return accumulated(scaled, params, batch, sums=sums)

    if spread is not None:
        return spread.value_and_grad(local, dtype=dtype)
    return lambda params, batch, rounding, scale: local(params, batch, rounding, scale=scale)


def _moved(weights: Any, updates: Any, *, finite: jax.Array, rounding: Rounding) -> Any:
    exact = jax.tree.map(lambda weight, update: weight.astype(jnp.float32) + update, weights, updates)

    def move(path, weight, moved):
        written = rounding.write(moved, weight.dtype, name="weights" + jax.tree_util.keystr(path))
        return jnp.where(finite, written, weight)

    return jax.tree_util.tree_map_with_path(move, weights, exact)
