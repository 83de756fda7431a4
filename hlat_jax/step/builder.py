"""Builds a training step, loss -> gradients -> update, from a loss function and an Optax optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from hlat_jax.parallel.rows import microbatches
from hlat_jax.parallel.sharding import ROWS
from hlat_jax.parallel.zero import check_params
from hlat_jax.step.batch_rows import check_divides, num_rows, row_keys
from hlat_jax.step.gradients import Sums, make_value_and_grad
from hlat_jax.step.loss_signature import (
    CheckedLossFn,
    LossAux,
    LossFn,
    LossSignature,
    check_model_state,
    checked_loss,
    mean_aux,
    signature_of,
)
from hlat_jax.step.microbatches import MicrobatchStep, make_microbatch_step
from hlat_jax.step.options import FP32, StepOptions
from hlat_jax.step.state import State, jit_donating, make_init, rounding_of, scale_of
from hlat_jax.step.update import StepMetrics, make_update

Transform = Callable[[Callable], Callable]  # a pass: loss -> loss of the same arguments and results


def make_step(
    loss_fn: Callable, optimizer: optax.GradientTransformation, options: StepOptions, *, has_keys: bool
) -> Callable:
    """Returns (state, batch, learning_rate=None) -> (state, StepMetrics), which is loss -> gradients -> update.

    `loss_fn` is (params, rows, model_state) -> (loss sum, LossAux), or with stages the staged loss.
    """
    value_and_grad = make_value_and_grad(loss_fn, options)  # summed over microbatches and devices
    update = make_update(optimizer, options)  # means, norms, masking, new weights, rounding

    def train_step(state: State, batch: Any, learning_rate: jax.Array | None = None) -> tuple[State, StepMetrics]:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=options.num_microbatches)
        rows, model_state = batch, state.get("model_state")
        if has_keys:
            rows = batch, row_keys(state["opt_state"]["seed"], state["step"], num_rows(batch))
        rounding, scale = rounding_of(state, options.policy), scale_of(state)

        def loss_and_grads(params: Any) -> tuple[Sums, Any]:
            return value_and_grad(params, rows, rounding, scale=scale, model_state=model_state)

        computed = loss_and_grads(state["params"])
        return update(state, computed, learning_rate=learning_rate, loss_and_grads=loss_and_grads)

    return train_step


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
      loss_fn: function (params, microbatch) -> loss, see `step.loss_signature`.
      optimizer: an Optax transformation. It gets the mean gradients in fp32, the weights, and the extra arguments
        `grad_norm`, `finite`, and `learning_rate` if the step is given one. For line searches it also gets the loss
        `value`, the gradients `grad`, and the differentiable function `value_fn`, weights -> loss of this batch.
      transforms: functions from loss to loss, such as `functools.partial(autocast, policy="bf16")`, in their order.
      transform_step: function of the whole step, gradients and update included, before it is jitted, such as the
        simulator of `passes.neuron_simulator`. The step then has no `microbatch_step`.
      options: precision, accumulation and devices, by default fp32 on one device.
      params: shapes of the parameters, needed with `options.zero` or `options.replica_sync` for the shardings.
      model_state: shapes of the model state, if the loss function takes one, needed together with `params`.
      has_aux: whether the loss function returns auxiliary values, see `step.loss_signature`.

    Raises:
      ValueError: no function, no transformation, parameters that are not floating-point arrays, or missing shapes that
        an option needs. The step raises it for a loss function with other results, a batch that does not
        divide, or an optimizer with other arguments.
    """
    signature = signature_of(loss_fn, has_aux=has_aux)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is not an Optax transformation. Give one, such as optax.adam(1e-3).")
    _check_shapes(signature, options, params=params, model_state=model_state)
    options, shardings = options.for_params(params), None
    if options.replica_sync is not None:
        # of one device too: what reads the state is then compiled once, for before the first step and after it
        init = make_init(optimizer, options, signature=signature)
        shardings = options.replica_sync.state_shardings(jax.eval_shape(init, params, model_state=model_state))
    loss: Callable = loss_fn
    eval_loss: Callable | None = None
    if options.accumulate is None:
        loss = checked_loss(loss_fn, signature)
        eval_loss = checked_loss(loss_fn, signature, is_training=False)
    step = TrainStep(loss, eval_loss, optimizer, options, signature, shardings, transform_step)
    return functools.reduce(TrainStep.transform, transforms, step)


def _check_shapes(signature: LossSignature, options: StepOptions, *, params: Any, model_state: Any) -> None:
    """Raises ValueError for shapes that are missing or cannot be trained, and for stages with more than a loss."""
    if options.accumulate is not None and not signature.is_plain:
        raise ValueError(
            f"{', '.join(signature.given) or 'has_aux=True'} needs a single loss function, not stages. Leave "
            "options.accumulate out."
        )
    if params is not None:
        check_params(params)
    elif options.zero is not None or options.replica_sync is not None:
        raise ValueError("options.zero and .replica_sync shard the parameters. Give their shapes as params=...")
    if model_state is not None:
        check_model_state(model_state, signature)
    elif signature.has_state and params is not None:
        raise ValueError("loss_fn takes a model_state. Give its shapes as model_state=..., like params=...")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvalMetrics:
    """Metrics of one evaluated batch. `loss`, `num_tokens` and `aux` are the same as in `StepMetrics`."""

    loss: jax.Array
    num_tokens: jax.Array | None
    aux: Any = None


class StepFn(Protocol):
    """The type of a step, (state, batch[, learning_rate]) -> (state, StepMetrics)."""

    def __call__(self, state: State, batch: Any, learning_rate: ArrayLike | None = None) -> tuple[State, StepMetrics]:
        """Returns the state after the step, and its metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """A training step, with its init and its evaluation.

    Attributes:
      loss: the loss of `step` after all transforms, (params, rows, model_state) -> (loss sum, LossAux), or with stages
        the staged loss.
      eval_loss: the loss of `eval_step` after all transforms. None with stages.
      optimizer: the Optax transformation.
      options: options that the step was built with, with `zero` replaced by the `replica_sync` made from it.
      signature: signature of the loss function.
      shardings: shardings of every leaf of the state. None if the state follows the parameters.
      transform_step: function of the whole step, see `train_step`.
    """

    loss: Callable
    eval_loss: CheckedLossFn | None
    optimizer: optax.GradientTransformation
    options: StepOptions
    signature: LossSignature
    shardings: Any
    transform_step: Transform | None

    @property
    def init(self) -> Callable[..., State]:
        """`(params, *, model_state=None, seed=0) -> state`, the state before the first step.

        It is {"step", "params", "opt_state": {"inner"[, "master"][, "seed"][, "loss_scale"]}[, "model_state"]
        [, "spikes"]}. The uint32 seed is for random keys and stochastic rounding, if there are any.
        """
        return make_init(self.optimizer, self.options, signature=self.signature, shardings=self.shardings)

    @functools.cached_property
    def step(self) -> Any:  # a StepFn and a jax.stages.Wrapped
        """Jitted function `(state, batch[, learning_rate]) -> (state, StepMetrics)`, which donates the state.

        The learning rate is for optimizers that take it as an extra argument. Others have their own rate or schedule
        and ignore it.
        """
        step = make_step(self.loss, self.optimizer, self.options, has_keys=self.signature.has_keys)
        step = step if self.transform_step is None else self.transform_step(step)
        return jit_donating(step, self.options, shardings=(self.shardings, None))

    @functools.cached_property
    def eval_step(self) -> Callable[[State, Any], EvalMetrics]:
        """Jitted function `(state, batch) -> EvalMetrics`, which does not donate the state.

        It is the loss with `train=False`, `keys=None` and the model state unchanged. The batch divides as for `step`.
        """
        return _no_eval_step if self.eval_loss is None else _make_eval_step(self.eval_loss, self.options)

    @functools.cached_property
    def microbatch_step(self) -> MicrobatchStep | None:
        """`step` in programs of one microbatch.

        None for a loss function that has auxiliary values or takes more than (params, microbatch). Also None for a
        transformed step, and for an `options.accumulate` other than `pipeline.run_pipeline` over stages.
        """
        sums_here = self.options.accumulate is None or self.options.num_stages > 1
        if not sums_here or not self.signature.is_plain or self.transform_step is not None:
            return None
        return make_microbatch_step(self.loss, self.optimizer, self.options, shardings=self.shardings)

    def transform(self, transform: Transform) -> TrainStep:
        """Returns the step with its losses, in training and evaluation, transformed once more."""
        eval_loss = None if self.eval_loss is None else transform(self.eval_loss)
        return dataclasses.replace(self, loss=transform(self.loss), eval_loss=eval_loss)

    def with_loss(self, loss: Callable) -> TrainStep:
        """Returns the step with another `loss` in training, and the same `eval_loss`."""
        return dataclasses.replace(self, loss=loss)

    def arguments(self, params: Any, batch: Any, *, model_state: Any = None) -> tuple[Any, Any, Any]:
        """Returns the shapes, dtypes and shardings of the arguments of `step`, from arrays or their shapes."""
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


def _make_eval_step(loss_fn: CheckedLossFn, options: StepOptions) -> Callable[[State, Any], EvalMetrics]:
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
    raise ValueError("a program of pipeline stages has no eval_step. Evaluate with a single loss function.")
