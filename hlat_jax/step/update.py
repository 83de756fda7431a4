"""Computes the next state from the sums of a batch: means, norms, masking, the optimizer's update, rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hlat_jax.optimizer import MaskedTransformation, detect_spike, global_norm, with_extra_args
from hlat_jax.precision import NEAREST, Rounding, cast_tree
from hlat_jax.step import loss_scale
from hlat_jax.step.gradients import Sums
from hlat_jax.step.loss_signature import LossAux, mean_aux
from hlat_jax.step.options import StepOptions
from hlat_jax.step.state import State, rounding_of, scale_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step, which are scalars on the device. The loop reads them a step later.

    Attributes:
      loss: float32 mean over the counted tokens of the whole batch, in nats per token. If the loss function returns a
        plain mean, it is the mean over microbatches and devices.
      num_tokens: float32 number of counted tokens, exact up to 2**24, which `degrees.layout_over` keeps to. None if
        the loss function returns a plain mean, since its number of tokens is not known.
      grad_norm: float32 L2 norm of the mean gradient before clipping.
      param_norm: float32 L2 norm of the weights before the update.
      finite: bool, False if loss, gradient or weights were not finite, so that the update was masked.
      spike: bool, whether a finite loss or gradient norm is far above earlier ones, see `optimizer.SpikePolicy`. None
        without `StepOptions.spikes`.
      aux: float32 auxiliary values of the loss function, see `step.loss_signature`. None without `has_aux`.
      layer_norms: {"grad_norm", "update_norm"}: parameter, or "layers" -> float32 L2 norm, for layers [L]. The gradient
        is the mean before clipping. The update is what the optimizer adds to the weights, before rounding and also if
        it is masked. None without `StepOptions.layer_norms`.
    """

    loss: jax.Array
    num_tokens: jax.Array | None
    grad_norm: jax.Array
    param_norm: jax.Array
    finite: jax.Array
    aux: Any = None
    spike: jax.Array | None = None
    layer_norms: dict[str, dict[str, jax.Array]] | None = None


def make_update(optimizer: optax.GradientTransformation, options: StepOptions) -> Callable:
    """Returns (state, (Sums, gradients), *, learning_rate, loss_and_grads) -> (state, StepMetrics).

    `loss_and_grads` computes (Sums, gradients) at other parameters, see `gradients.make_value_and_grad`.
    """
    update, masks_itself = with_extra_args(optimizer).update, isinstance(optimizer, MaskedTransformation)

    def update_state(
        state: State, computed: tuple[Sums, Any], *, learning_rate: Any, loss_and_grads: Callable
    ) -> tuple[State, StepMetrics]:
        rounding, means = rounding_of(state, options.policy), _means(state, computed, options)
        applies, spike, window = _decide(state, means, options)
        extra = {"grad_norm": means.grad_norm, "finite": applies, "rounding": rounding}
        if learning_rate is not None:
            extra["learning_rate"] = learning_rate
        if not masks_itself:
            value_fn = _value_fn(
                lambda weights: loss_and_grads(_params_of(weights, options, like=state["params"])), means.scale
            )
            extra |= {"value": means.loss_sum * means.per_token, "grad": means.grads, "value_fn": value_fn}
        updates, inner = update(means.grads, state["opt_state"]["inner"], means.weights, **extra)
        weights = _apply_updates(means.weights, updates, like=state["params"], applies=applies, rounding=rounding)
        if not masks_itself:
            stores = _known_after(applies, weights) if _in_blocks(options) and options.state_in_place else applies
            inner = jax.tree.map(lambda new, old: jnp.where(stores, new, old), inner, state["opt_state"]["inner"])
        new_state = _next_state(state, means, weights=weights, inner=inner, applies=applies, options=options)
        if window is not None:
            new_state["spikes"] = window
        metrics = StepMetrics(
            loss=means.loss(),
            num_tokens=None if means.aux.is_mean else means.aux.count,
            grad_norm=means.grad_norm,
            param_norm=means.param_norm,
            finite=means.finite,
            spike=spike,
            aux=mean_aux(means.aux.aux, num_parts=options.num_microbatches * options.row_degree),
            layer_norms=_layer_norms(means.grads, updates, options) if options.layer_norms else None,
        )
        return new_state, metrics

    return update_state


@dataclasses.dataclass(frozen=True)
class _Means:
    """What an update starts from.

    Attributes:
      loss_sum, aux: sums over the batch; the loss is multiplied by `scale`, if there is one.
      per_token: scalar by which sums are multiplied.
      grads: mean gradients, fp32.
      weights: what the optimizer updates: the parameters or their masters, on each device what it updates.
      grad_norm, param_norm: L2 norms, fp32.
      finite: whether loss, gradients, weights and model state are finite.
    """

    loss_sum: jax.Array
    aux: LossAux
    scale: jax.Array | None
    per_token: jax.Array
    grads: Any
    weights: Any
    grad_norm: jax.Array
    param_norm: jax.Array
    finite: jax.Array

    def loss(self) -> jax.Array:
        """Returns the mean loss, unscaled."""
        return self.loss_sum * self.per_token if self.scale is not None else self.loss_sum / self.aux.count


def _means(state: State, computed: tuple[Sums, Any], options: StepOptions) -> _Means:
    """Returns the means and norms of the sums of a batch."""
    ((loss_sum, aux), grads), scale, replica_sync = computed, scale_of(state), options.active_replica_sync
    norm = functools.partial(global_norm, in_blocks=_in_blocks(options), replica_sync=replica_sync)
    # The norm of the sums, and a product instead of a division: XLA on CPU then scales each gradient where the update
    # reads it, and writes no scaled copy of them all.
    per_token = 1.0 / (aux.count if scale is None else aux.count * scale)
    # A backward pass makes the gradients of the last layers first. Summed in the other order, the first sum waits for
    # the whole pass, and XLA puts off every gradient of weights, with the recomputed activations that it reads.
    in_order = grads if replica_sync is not None else jax.tree.leaves(grads)[::-1]
    grad_norm = norm(in_order) * per_token
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) * per_token, grads)
    weights = state["opt_state"].get("master", state["params"])
    weights = weights if replica_sync is None else replica_sync.shard_like_state(weights)
    param_norm = norm(weights)
    # Comparisons in fp32: a non-finite gradient anywhere makes the norm non-finite. Including the weights' norm also
    # orders it before the update, which XLA then makes in place; it copies all weights otherwise.
    finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm)
    for leaf in jax.tree.leaves(aux.model_state):
        finite &= jnp.isfinite(leaf).all()
    return _Means(loss_sum, aux, scale, per_token, grads, weights, grad_norm, param_norm, finite)


def _layer_norms(grads: Any, updates: Any, options: StepOptions) -> dict[str, dict[str, jax.Array]]:
    """Returns `StepMetrics.layer_norms`, by one all-reduce of all of them."""
    assert options.replica_sync is not None  # `StepOptions` checks it
    sums = options.replica_sync.sums_of_squares_by_layer({"grad_norm": grads, "update_norm": updates})
    return jax.tree.map(jnp.sqrt, sums)


def _in_blocks(options: StepOptions) -> bool:
    """Returns whether norms are summed in blocks and the state is written in place: on one CPU."""
    return options.active_replica_sync is None and options.platform == "cpu"


def _decide(
    state: State, means: _Means, options: StepOptions
) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array] | None]:
    """Returns (whether the update applies, whether the step is a spike, the next window of spikes)."""
    if options.spikes is None:
        return means.finite, None, None
    reduced = {"loss": means.loss(), "grad_norm": means.grad_norm, "finite": means.finite}
    spike, window = detect_spike(state["spikes"], **reduced, policy=options.spikes)
    return means.finite & ~spike if options.spikes.skips else means.finite, spike, window


def _next_state(
    state: State, means: _Means, *, weights: Any, inner: Any, applies: jax.Array, options: StepOptions
) -> State:
    """Returns the state after the update, without the window of spikes."""
    opt_state, scale = state["opt_state"] | {"inner": inner}, state["opt_state"].get("loss_scale")
    if options.policy.master is not None:
        opt_state["master"] = weights
    if scale is not None:
        is_counted = means.aux.count > 0  # else the batch says nothing about the scale
        opt_state["loss_scale"] = loss_scale.choose(is_counted, loss_scale.adjust(scale, means.finite), scale)
    params = _params_of(weights, options, like=state["params"])
    new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
    if "model_state" in state:
        new_state["model_state"] = jax.tree.map(
            lambda new, old: jnp.where(applies, new.astype(old.dtype), old), means.aux.model_state, state["model_state"]
        )
    return new_state


def _params_of(weights: Any, options: StepOptions, *, like: Any) -> Any:
    """Returns the parameters that the forward pass reads, of the shapes of `like`, from the optimizer's weights."""
    params, replica_sync = cast_tree(weights, options.policy.param), options.active_replica_sync
    return params if replica_sync is None else replica_sync.all_gather_params(params, like=like)


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
        weights: Any,
        *,
        learning_rate: Any = None,
        grad_norm: Any = None,
        finite: Any = None,
        rounding: Rounding = NEAREST,
    ) -> jax.Array:
        return value(weights)

    return value_fn


def _apply_updates(weights: Any, updates: Any, *, like: Any, applies: jax.Array, rounding: Rounding) -> Any:
    """Returns weights + updates in the dtypes of the weights, or the weights themselves if `applies` is False.

    `like` has the shapes of the weights without padding.
    """
    exact = jax.tree.map(lambda weight, update: weight.astype(jnp.float32) + update, weights, updates)

    def apply(path, *of_leaf):
        weight, exact, leaf = of_leaf
        written = rounding.write(exact, weight.dtype, name="weights" + jax.tree_util.keystr(path), shape=leaf.shape)
        return jnp.where(applies, written, weight)

    return jax.tree_util.tree_map_with_path(apply, weights, exact, like)


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
