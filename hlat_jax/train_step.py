"""From a loss function and an Optax optimizer to a training step: gradients, masking, update, donation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from hlat_jax.batch import SumAndCount
from hlat_jax.ops import loss_scale
from hlat_jax.ops.cross_entropy import scaled_losses
from hlat_jax.ops.loss_function import (
    LossAux,
    check_divides,
    check_loss,
    check_model_state,
    given_names,
    mean_aux,
    num_rows,
    row_keys,
)
from hlat_jax.optimizer import (
    MaskedTransformation,
    SpikePolicy,
    detect_spike,
    empty_spike_window,
    global_norm,
    with_extra_args,
)
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.pipeline import PHASES, run_pipeline, run_tick, start_ticks
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.rows import microbatches
from hlat_jax.parallel.sharding import ROWS
from hlat_jax.parallel.zero import check_params, check_stage, make_replica_sync
from hlat_jax.precision import NEAREST, POLICIES, Accumulation, Policy, Rounding, cast_tree

State = dict[str, Any]
LossFn = Callable[..., jax.Array | SumAndCount | tuple[jax.Array | SumAndCount, Any]]
CheckedLossFn = Callable[..., tuple[jax.Array, LossAux]]
Transform = Callable[[Callable], Callable]  # a pass: loss -> loss of the same arguments and results


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
      spike: bool, whether a finite loss or gradient norm is far above those before, see `optimizer.SpikePolicy`. None
        without `StepOptions.spikes`.
      aux: auxiliary values of the loss function, float32, see `train_step`; None without `has_aux`.
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
      shardings: those of the parts of the buffer, `number` and the rest; on one device, None.
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
        """Returns the state after the step, and its metrics. Rows of microbatch m: see `rows.microbatches`.

        Raises:
          ValueError: no microbatch.
        """
        idle, count = self.num_stages - 1, 0
        if idle:
            parts = list(microbatches)
            count = len(parts)
            in_turn = [name for name, times in self.num_dispatches(count).items() for _ in range(times)]
            dispatches = zip(in_turn, parts + 2 * idle * parts[-1:], strict=False)
        else:  # each is on the devices no sooner than it is dispatched
            dispatches = zip(itertools.repeat(*self.ticks), microbatches, strict=False)
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

    def num_dispatches(self, num_microbatches: int) -> dict[str, int]:
        """Returns how often a step dispatches each of `ticks`, in their order."""
        idle = self.num_stages - 1
        return dict(zip(self.ticks, (idle, num_microbatches, idle) if idle else (num_microbatches,), strict=True))

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
        inputs = {"params": state["params"], "step": state["step"], "opt_state": opt_state}
        return inputs | ({"num_microbatches": num_microbatches} if self.num_stages > 1 else {})

    def abstract_buffer(self, inputs: Any, microbatch: Any) -> Any:
        """Returns the shapes, dtypes and shardings of the buffer, from those of what `start` takes."""
        buffer = jax.eval_shape(self.start, inputs, microbatch)
        if self.shardings is None:
            return buffer
        return {
            key: jax.tree.map(lambda x, of=self.shardings[key]: x.update(sharding=of), buffer[key]) for key in buffer
        }


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    Attributes:
      policy: dtypes of storage and accumulation, and the rounding of stored values; fp32 by default.
      num_microbatches: static number of parts into which a batch, or its rows on each device, is split.
      accumulate: function that computes and sums the gradients of the parts, for pipeline stages; `accumulate_grads` by
        default.
      zero: ZeRO stage, 0 to 3, for parameters of any structure on `devices`, see `zero.make_replica_sync`.
      devices: devices for `zero`; all by default.
      bucket_bytes: for `zero`, bytes per device up to which arrays share a collective; with 0 each array has its own.
      replica_sync: mesh, shardings and collectives of your own, instead of `zero`. With neither the step is for one
        device.
      spikes: policy by which steps are skipped or reported whose loss or gradient norm is far above those before, see
        `optimizer.SpikePolicy`; none by default.
      loss_scale: whether the loss is scaled, for gradients in fp16, see `ops.loss_scale`.
      state_in_place: whether XLA on one CPU writes the state of an Optax optimizer after the weights, without a copy of
        the old state. It takes less memory and more time. A `training_program` with a memory budget sets it.

    Raises:
      ValueError: an invalid value, or options that exclude each other.
    """

    policy: Policy = POLICIES["fp32"]
    num_microbatches: int = 1
    accumulate: Callable | None = None
    zero: int | None = None
    devices: Sequence[Any] | None = None
    bucket_bytes: int = 0
    replica_sync: ReplicaSync | None = None
    spikes: SpikePolicy | None = None
    loss_scale: bool = False
    state_in_place: bool = False

    @property
    def active_replica_sync(self) -> ReplicaSync | None:
        """`replica_sync` if it has several devices, else None: on one device, a step has no collectives."""
        return self.replica_sync if self.replica_sync is not None and self.replica_sync.layout.mesh.size > 1 else None

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        if self.devices:
            return self.devices[0].platform
        return jax.default_backend() if self.replica_sync is None else self.replica_sync.layout.platform

    @property
    def row_degree(self) -> int:
        """Over how many devices the rows of a batch are split."""
        return 1 if self.active_replica_sync is None else self.active_replica_sync.layout.row_degree

    def __post_init__(self):
        count = self.num_microbatches
        is_count = isinstance(count, numbers.Integral) and not isinstance(count, bool) and count >= 1
        for name, is_valid, wanted in (
            ("policy", isinstance(self.policy, Policy), "a Policy, such as precision.POLICIES['fp32']"),
            ("num_microbatches", is_count, "an int of 1 or more"),
            ("accumulate", self.accumulate is None or callable(self.accumulate), "a function, or be left out"),
            ("replica_sync", isinstance(self.replica_sync, ReplicaSync | None), "a ReplicaSync"),
            ("spikes", isinstance(self.spikes, SpikePolicy | None), "a SpikePolicy"),
            ("loss_scale", isinstance(self.loss_scale, bool), "True or False"),
            ("state_in_place", isinstance(self.state_in_place, bool), "True or False"),
        ):
            if not is_valid:
                raise ValueError(f"StepOptions.{name}={getattr(self, name)!r} must be {wanted}.")
        if self.zero is not None:
            check_stage(self.zero, self.devices, bucket_bytes=self.bucket_bytes)
        if self.zero is not None and self.replica_sync is not None:
            raise ValueError("StepOptions: zero and replica_sync both shard the parameters; give one of them.")
        if self.zero is None and (self.devices is not None or self.bucket_bytes):
            raise ValueError(
                "StepOptions: devices and bucket_bytes have no effect without zero; give zero=0 to 3 too, or leave "
                "them out: a replica_sync has its own."
            )


FP32 = StepOptions()


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A training step, and what belongs to it.

    Attributes:
      init: `(params, *, model_state=None, seed=0) -> state`. The state is {"step", "params", "opt_state": {"inner"
        [, "master"][, "seed"][, "loss_scale"]}[, "model_state"][, "spikes"]}; the uint32 seed is that of the random
        keys and of stochastic rounding, where there are any.
      step: jitted `(state, batch[, learning_rate]) -> (state, StepMetrics)`; donates the state. The learning rate is
        for optimizers that take it as an extra argument; others have a rate or a schedule of their own and ignore it.
      eval_step: jitted `(state, batch) -> EvalMetrics`: the loss with `train=False`, `keys=None` and the model state as
        it is, over a batch that divides as those of `step` do. The state is not donated.
      microbatch_step: `step` in programs of one microbatch; None for a loss function that has auxiliary values or takes
        more than (params, microbatch), and for an `options.accumulate` that is not `pipeline.run_pipeline` over stages.
      options: options that the step was built with, with `zero` replaced by the `replica_sync` made from it.
      shardings: shardings of every leaf of the state; None where they are those of the parameters.
      loss: the loss of `step`, after all transforms: (params, rows, model_state) -> (loss sum, LossAux), or with stages
        the staged loss.
    """

    init: Callable[..., State]
    step: Any  # a jitted StepFn
    eval_step: Callable[[State, Any], EvalMetrics]
    microbatch_step: MicrobatchStep | None
    options: StepOptions
    shardings: Any
    loss: Callable
    _eval_loss: Callable | None
    _build: Callable[[Callable, Callable | None], TrainStep]

    def transform(self, transform: Transform) -> TrainStep:
        """Returns the step whose losses, in training and evaluation, are transformed once more."""
        return self._build(transform(self.loss), None if self._eval_loss is None else transform(self._eval_loss))

    def with_loss(self, loss: Callable) -> TrainStep:
        """Returns the step of another `loss`; that of evaluation stays."""
        return self._build(loss, self._eval_loss)

    def arguments(self, params: Any, batch: Any, *, model_state: Any = None) -> tuple[Any, Any, Any]:
        """Returns the shapes, dtypes and shardings of what `step` takes, from the shapes of what it is made of."""
        state = jax.eval_shape(self.init, params, model_state=model_state)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        replica_sync = self.options.replica_sync
        if replica_sync is None:
            return state, batch, rate
        check_divides(batch, num_devices=replica_sync.layout.size(ROWS), num_microbatches=self.options.num_microbatches)

        def place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        layout = replica_sync.layout
        rows = NamedSharding(layout.mesh, layout.batch_spec)
        return jax.tree.map(place, state, self.shardings), jax.tree.map(lambda leaf: place(leaf, rows), batch), rate


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    transforms: Sequence[Transform] = (),
    transform_step: Transform | None = None,
    options: StepOptions = FP32,
    params: Any = None,
    model_state: Any = None,
    has_aux: bool = False,
) -> TrainStep:
    """Returns the training step of a loss and an optimizer. `passes.compile` builds on it and knows the passes.

    Args:
      loss_fn: (params, microbatch) -> loss. Either the mean over the microbatch, a floating-point scalar: microbatches
        and devices then weigh equally, however much each of them counts. Or `SumAndCount(sum of the losses of the
        counted tokens, count of them)`: the step divides by the count over the whole batch, so that unequal
        microbatches weigh as one batch would. Both are accumulated in fp32. Further parameters without a default are
        given by name:

        - `model_state`: what the model updates itself, such as the statistics of batch norm, a pytree of arrays. The
          function then returns (loss, new model state). Microbatches update it one after another, and devices each for
          their own rows: of floats, the mean over devices is kept. A step that is not finite leaves it unchanged.
        - `keys`: a random key for each row, made from the seed, the step and the index of the row in the batch over all
          devices. What is drawn from it, with `jax.vmap` over rows and keys, is the same on any number of devices and
          microbatches. None in `eval_step`.
        - `train`: True in `step`, False in `eval_step`; a Python bool.
      optimizer: an Optax transformation. It gets the mean gradients in fp32, the weights, and the extra arguments
        `learning_rate` (where the step is given one), `grad_norm`, `finite`, and, as for a line search, `value`, `grad`
        and `value_fn`: the loss, those gradients, and weights -> loss of this batch, differentiable.
      transforms: functions from loss to loss, such as `functools.partial(autocast, policy="bf16")`, in their order.
      transform_step: function of the whole step, gradients and update included, before it is jitted, such as the
        simulator of `passes.rounding`; the step then has no `microbatch_step`.
      options: precision, accumulation and devices; fp32 on one device by default.
      params: shapes of the parameters; needed with `options.zero` or `options.replica_sync`, whose shardings follow
        from them.
      model_state: shapes of the model state, where the loss function takes one; needed where `params` is.
      has_aux: whether the loss function returns (loss, auxiliary values), as for `jax.value_and_grad`; with a model
        state, (loss, (new model state, auxiliary values)). The values, a pytree, come out in `StepMetrics.aux` in fp32:
        each array is the mean over microbatches and devices, each `SumAndCount` becomes total / count over the batch.

    Raises:
      ValueError: no function, no transformation, parameters that are not floating-point arrays, or shapes that an
        option needs are missing. The step, before it is compiled: the loss function returns anything else, the batch
        does not divide, or the optimizer needs other extra arguments.
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function of (params, microbatch).")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is not an Optax transformation: give one, such as optax.adam(1e-3).")
    given = given_names(loss_fn)
    if options.accumulate is not None and (given or has_aux):
        raise ValueError(
            f"{', '.join(given) or 'has_aux=True'} needs a single loss function, not stages; leave options.accumulate "
            "out."
        )
    if params is not None:
        check_params(params)
    elif options.zero is not None or options.replica_sync is not None:
        raise ValueError("options.zero and .replica_sync shard the parameters: give their shapes as params=...")
    if model_state is not None:
        check_model_state(model_state, given)
    elif "model_state" in given and params is not None:
        raise ValueError("loss_fn takes a model_state: give its shapes as model_state=..., as those of the parameters.")
    if options.zero is not None:
        devices = jax.devices() if options.devices is None else options.devices
        replica_sync = make_replica_sync(params, devices, stage=options.zero, bucket_bytes=options.bucket_bytes)
        options = dataclasses.replace(options, replica_sync=replica_sync, zero=None, devices=None, bucket_bytes=0)
    loss: Callable = loss_fn
    eval_loss: Callable | None = None
    if options.accumulate is None:
        loss = check_loss(loss_fn, has_aux=has_aux, given=given)
        eval_loss = check_loss(loss_fn, has_aux=has_aux, given=given, is_training=False)
    shardings = None
    if options.replica_sync is not None:
        # of one device too: what reads the state is then compiled once, for before the first step and after it
        shapes = jax.eval_shape(_make_init(optimizer, options, given), params, model_state=model_state)
        shardings = options.replica_sync.state_shardings(shapes)

    def build(loss: Callable, eval_loss: Callable | None) -> TrainStep:
        step = _train_step(loss, optimizer, options, has_keys="keys" in given)
        if transform_step is not None:
            step = transform_step(step)
        is_splittable = (
            transform_step is None
            and not given
            and not has_aux
            and (options.accumulate is None or _has_stages(options))
        )
        return TrainStep(
            init=_make_init(optimizer, options, given, shardings=shardings),
            step=_jit(step, options, None if shardings is None else (shardings, None)),
            eval_step=_no_eval_step if eval_loss is None else _eval_step(eval_loss, options),
            microbatch_step=_microbatch_step(loss, optimizer, options=options, shardings=shardings)
            if is_splittable
            else None,
            options=options,
            shardings=shardings,
            loss=loss,
            _eval_loss=eval_loss,
            _build=build,
        )

    return functools.reduce(TrainStep.transform, transforms, build(loss, eval_loss))


def _train_step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, options: StepOptions, *, has_keys: bool
) -> Callable:
    """Returns (state, batch, learning_rate=None) -> (state, StepMetrics), the order of a training step."""
    value_and_grad, update_state = _value_and_grad(loss_fn, options), _make_update(optimizer, options)

    def train_step(state: State, batch: Any, learning_rate: jax.Array | None = None) -> tuple[State, StepMetrics]:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=options.num_microbatches)
        rows, model_state = batch, state.get("model_state")
        if has_keys:
            rows = batch, row_keys(state["opt_state"]["seed"], state["step"], num_rows(batch))
        rounding, scale = _rounding(state, options.policy), _scale(state)

        def of_params(params: Any) -> tuple[tuple, Any]:
            return value_and_grad(params, rows, rounding, scale=scale, model_state=model_state)

        return update_state(state, of_params(state["params"]), learning_rate=learning_rate, of_params=of_params)

    return train_step


def _rounding(state: State, policy: Policy) -> Rounding:
    """Returns how the values that a step stores are rounded."""
    if policy.rounding != "stochastic":
        return NEAREST
    return Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))


def _scale(state: State) -> jax.Array | None:
    held = state["opt_state"].get("loss_scale")
    return None if held is None else held.scale


def _make_update(optimizer: optax.GradientTransformation, options: StepOptions) -> Callable:
    """Returns (state, ((loss sum, LossAux), gradients), *, learning_rate, of_params) -> (state, StepMetrics).

    The gradients are those of `_value_and_grad`, which `of_params` computes at other parameters.
    """
    policy, replica_sync, update = options.policy, options.active_replica_sync, with_extra_args(optimizer).update
    masks_itself = isinstance(optimizer, MaskedTransformation)

    def update_state(
        state: State, computed: tuple[tuple, Any], *, learning_rate: Any, of_params: Callable
    ) -> tuple[State, StepMetrics]:
        (loss_sum, loss_aux), grads = computed
        model_state, rounding, scale = state.get("model_state"), _rounding(state, policy), _scale(state)
        in_blocks = replica_sync is None and options.platform == "cpu"
        norm = functools.partial(global_norm, in_blocks=in_blocks, replica_sync=replica_sync)
        # The norm of the sums, and a product instead of a division: XLA on CPU then scales each gradient where the
        # update reads it, and writes no scaled copy of them all.
        per_token = 1.0 / (loss_aux.count if scale is None else loss_aux.count * scale)
        # A backward pass makes the gradients of the last layers first. Summed in the other order, the first sum waits
        # for the whole pass, and XLA puts off every gradient of weights, with the recomputed activations that it reads.
        in_order = grads if replica_sync is not None else jax.tree.leaves(grads)[::-1]
        grad_norm = norm(in_order) * per_token
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
            spike, window = detect_spike(state["spikes"], **reduced, policy=options.spikes)
            applies = finite & ~spike if options.spikes.skips else finite
        extra = {"grad_norm": grad_norm, "finite": applies, "rounding": rounding}
        if learning_rate is not None:
            extra["learning_rate"] = learning_rate
        if not masks_itself:
            value_fn = _value_fn(lambda weights: of_params(_params_of(weights, options)), scale)
            extra |= {"value": loss_sum * per_token, "grad": grads, "value_fn": value_fn}
        updates, inner = update(grads, state["opt_state"]["inner"], weights, **extra)
        weights = _apply_updates(weights, updates, applies=applies, rounding=rounding)
        if not masks_itself:
            before = state["opt_state"]["inner"]
            stores = _known_after(applies, weights) if in_blocks and options.state_in_place else applies
            inner = jax.tree.map(lambda new, old: jnp.where(stores, new, old), inner, before)
        opt_state = state["opt_state"] | {"inner": inner}
        if policy.master is not None:
            opt_state["master"] = weights
        if scale is not None:
            # a batch without counted tokens gives no information on the scale
            before = opt_state["loss_scale"]
            opt_state["loss_scale"] = loss_scale.choose(loss_aux.count > 0, loss_scale.adjust(before, finite), before)
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
            aux=mean_aux(loss_aux.aux, num_parts=options.num_microbatches * options.row_degree),
        )
        return new_state, metrics

    return update_state


def _params_of(weights: Any, options: StepOptions) -> Any:
    """Returns the parameters that the forward pass reads, from the weights that the optimizer updates."""
    params, replica_sync = cast_tree(weights, options.policy.param), options.active_replica_sync
    return params if replica_sync is None else replica_sync.all_gather_params(params)


def _has_stages(options: StepOptions) -> bool:
    """Returns whether the step is that of `pipeline`, over a mesh with stages."""
    mesh = None if options.replica_sync is None else options.replica_sync.layout.mesh
    return options.accumulate is run_pipeline and mesh is not None and dict(mesh.shape).get("pipe", 1) > 1


def _microbatch_step(
    loss_fn: CheckedLossFn, optimizer: optax.GradientTransformation, *, options: StepOptions, shardings: Any
) -> MicrobatchStep:
    """Returns the step in programs for one microbatch each, or for one tick of a pipeline."""
    replica_sync, dtype = options.active_replica_sync, options.policy.accumulate
    value_and_grad = _local_value_and_grad(loss_fn, options, num_microbatches=1)
    update_state, has_stages = _make_update(optimizer, options), _has_stages(options)
    staged: Any = loss_fn  # with stages, what `run_pipeline` takes

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
        return {"totals": totals, "grads": rounding.at(number).add(kept["grads"], grads)}

    start_kept = start_here if replica_sync is None else replica_sync.start_sums(start_here, dtype=dtype)

    def start_accumulation(inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
        return {"number": jnp.zeros((), jnp.int32), "kept": start_kept(inputs["params"], batch)}

    def make_tick(name: str, function_name: str) -> Callable:
        local = functools.partial(add_here, name=name)
        add_to_sums = local if replica_sync is None else replica_sync.add_to_sums(local, dtype=dtype)

        def add(buffer: dict[str, Any], inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
            check_divides(batch, num_devices=options.row_degree, num_microbatches=1)
            more = {"number": buffer["number"], "scale": _scale(inputs)}
            more["num_microbatches"] = inputs.get("num_microbatches")
            of_device, rounding = (inputs["params"], batch), _rounding(inputs, options.policy)
            return {"number": buffer["number"] + 1, "kept": add_to_sums(buffer["kept"], of_device, rounding, **more)}

        add.__name__ = function_name
        return _jit(add, options, placed)

    def no_value(_: Any) -> Any:
        raise ValueError("an optimizer that evaluates the loss again needs the whole batch in one program.")

    def update_step(state: State, buffer: dict[str, Any], learning_rate: Any = None) -> tuple[State, StepMetrics, Any]:
        sums = buffer["kept"]["totals"], buffer["kept"]["grads"]
        (loss_sum, count), grads = sums if replica_sync is None else replica_sync.reduced_sums(*sums, dtype=dtype)
        sums = (loss_sum, LossAux(count)), grads
        # not by `start`: Neuron may run a program without collectives on the host
        zeros = jax.tree.map(jnp.zeros_like, buffer)
        return *update_state(state, sums, learning_rate=learning_rate, of_params=no_value), zeros

    placed = None
    if options.replica_sync is not None:
        layout = options.replica_sync.layout
        per_device = layout.replicated_sharding() if replica_sync is None else replica_sync.per_device
        placed = {"number": layout.replicated_sharding(), "kept": per_device}
    names = {phase: f"{phase}_tick" for phase in PHASES} if has_stages else {"microbatch": "add_microbatch"}
    after_update = None if shardings is None else (shardings, None, placed)
    return MicrobatchStep(
        start=jax.jit(start_accumulation, out_shardings=placed),
        ticks={name: make_tick(name, function_name) for name, function_name in names.items()},
        update=_jit(update_step, options, after_update, donated=(0, 1)),
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


def _value_and_grad(loss_fn: Callable, options: StepOptions) -> Callable[..., tuple[tuple, Any]]:
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
    loss_fn: Callable, options: StepOptions, *, num_microbatches: int | None = None
) -> Callable[..., tuple[tuple, Any]]:
    """Returns what `_value_and_grad` does, for the rows of one device; `num_microbatches` may replace the options'."""
    dtype, replica_sync = options.policy.accumulate, options.active_replica_sync
    num_microbatches = options.num_microbatches if num_microbatches is None else num_microbatches
    loss_fn = loss_fn if replica_sync is None else replica_sync.with_gathered_params(loss_fn)

    def local(
        params: Any, rows: Any, rounding: Rounding, *, scale: Any, model_state: Any, reduce: Any = None
    ) -> tuple[tuple, Any]:
        def scaled_loss(params: Any, *args: Any) -> tuple[jax.Array, LossAux]:
            loss_sum, loss_aux = loss_fn(params, *args)
            return loss_sum * scale, loss_aux

        sums = Accumulation(num_microbatches, dtype, rounding, reduce)
        if options.accumulate is not None:
            (loss_sum, count), grads = options.accumulate(loss_fn, params, rows, sums=sums)
            return (loss_sum, LossAux(count)), grads
        if scale is None:
            return accumulate_grads(loss_fn, params, rows, sums=sums, model_state=model_state)
        with scaled_losses():
            return accumulate_grads(scaled_loss, params, rows, sums=sums, model_state=model_state)

    return local


def _eval_step(loss_fn: CheckedLossFn, options: StepOptions) -> Callable[[State, Any], EvalMetrics]:
    replica_sync, num_microbatches = options.active_replica_sync, options.num_microbatches

    def local(params: Any, batch: Any, model_state: Any) -> tuple[jax.Array, LossAux]:
        if num_microbatches == 1:
            return loss_fn(params, batch, model_state)
        parts = jax.lax.map(lambda part: loss_fn(params, part, model_state), microbatches(batch, num_microbatches))
        return jax.tree.map(lambda values: values.sum(0), parts)

    loss = local if replica_sync is None else replica_sync.loss(replica_sync.with_gathered_params(local))

    def eval_step(state: State, batch: Any) -> EvalMetrics:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=num_microbatches)
        loss_sum, loss_aux = loss(state["params"], batch, state.get("model_state"))
        return EvalMetrics(
            loss=loss_sum / loss_aux.count,
            num_tokens=None if loss_aux.is_mean else loss_aux.count,
            aux=mean_aux(loss_aux.aux, num_parts=num_microbatches * options.row_degree),
        )

    return jax.jit(eval_step)


def _no_eval_step(state: State, batch: Any) -> EvalMetrics:
    raise ValueError("a program of pipeline stages has no eval_step; evaluate with a single loss function.")


def accumulate_grads(
    loss_fn: CheckedLossFn, params: Any, rows: Any, *, sums: Accumulation, model_state: Any = None
) -> tuple[tuple, Any]:
    """Returns ((loss sum, LossAux), gradients) of a batch whose parts are run one after another.

    Args:
      rows: fields with rows in front.
      sums: number of parts, see `rows.microbatches`, and how their gradients are summed.
      model_state: of the first part; each returns that of the next.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def of_part(part, model_state):
        sums_of_part, grads = value_and_grad(params, part, model_state)
        return sums_of_part, grads if sums.reduce is None else sums.reduce(grads)

    if sums.num_microbatches == 1:
        return of_part(rows, model_state)

    def add(totals, numbered):
        number, part = numbered
        (loss, loss_aux), grads = of_part(part, totals[3])
        loss_sum, count, summed, _ = totals
        totals = loss_sum + loss, count + loss_aux.count, sums.rounding.at(number).add(summed, grads)
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

    def apply(path, weight, exact):
        written = rounding.write(exact, weight.dtype, name="weights" + jax.tree_util.keystr(path))
        return jnp.where(applies, written, weight)

    return jax.tree_util.tree_map_with_path(apply, weights, exact)


def _known_after(flag: jax.Array, arrays: Any) -> jax.Array:
    """Returns the bool scalar, computed so that XLA knows it only when the arrays exist.

    What it selects is then written after the arrays. XLA on CPU otherwise copies the old state of an optimizer before
    it writes over it, because the new weights may read it later: of Adam, two arrays of the size of the weights.
    """

    def num_bits(leaf: jax.Array) -> jax.Array:  # in its first number, at most 64
        first = jax.lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(())
        bits = jax.lax.bitcast_convert_type(first, f"uint{8 * leaf.dtype.itemsize}")
        return jax.lax.population_count(bits).astype(jnp.float32)

    counts = jnp.array([num_bits(leaf) for leaf in jax.tree.leaves(arrays) if leaf.size], jnp.float32)
    return flag & (counts @ counts <= 64**2 * counts.size)  # true; a product is computed once, not in every reader


def _make_init(
    optimizer: optax.GradientTransformation,
    options: StepOptions,
    given: Sequence[str],
    *,
    shardings: Any = None,
) -> Callable[..., State]:
    """Returns `TrainStep.init`; without shardings, its state is on the parameters' devices."""
    policy = options.policy

    def init(params: Any, *, model_state: Any = None, seed: Any = 0) -> State:
        check_params(params)
        if model_state is not None:
            check_model_state(model_state, given)
        elif "model_state" in given:
            raise ValueError("loss_fn takes a model_state: give init(params, model_state=...) its first value.")
        weights = cast_tree(params, policy.master or policy.param)
        opt_state: dict[str, Any] = {"inner": _copy(optimizer.init(weights))}
        if policy.master is not None:
            opt_state["master"] = _copy(weights)
        if policy.rounding != "nearest" or "keys" in given:
            opt_state["seed"] = jnp.array(seed, jnp.uint32)
        if options.loss_scale:
            opt_state["loss_scale"] = loss_scale.initial()
        params = _copy(cast_tree(params, policy.param))
        state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt_state": opt_state}
        if model_state is not None:
            state["model_state"] = _copy(model_state)
        if options.spikes is not None:
            state["spikes"] = empty_spike_window(options.spikes)
        return state if shardings is None else jax.lax.with_sharding_constraint(state, shardings)

    return init


def _copy(tree: Any) -> Any:
    """Returns the tree with its arrays copied: the state is donated, what the caller or the optimizer holds is not."""
    leaves, structure = jax.tree.flatten(tree)
    del tree
    for place, leaf in enumerate(leaves):  # an array that nobody else holds is freed before the next is copied
        leaves[place] = jnp.copy(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
    return jax.tree.unflatten(structure, leaves)


def _jit(step: Callable, options: StepOptions, shardings: Any, *, donated: tuple[int, ...] = (0,)) -> Any:
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
