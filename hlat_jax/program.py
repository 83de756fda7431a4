"""Makes a training program from a loss: gradients, accumulation, masking of non-finite steps, update, donation.

Owns the order of a training step. Refuses to know a model, a batch type or an optimizer: a loss is a function of
(params, microbatch), an optimizer is an Optax transformation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hlat_jax.batch import microbatches
from hlat_jax.collectives import Spread
from hlat_jax.optimizer import global_norm, masked
from hlat_jax.passes.autocast import CastPolicy, autocast
from hlat_jax.precision import NEAREST, Policy, Rounding, cast_tree

State = dict[str, Any]
LossFn = Callable[[Any, Any], tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one step tells. Scalars on device; nothing here is read until a step later.

    Attributes:
      loss: float32, mean over the counted tokens of the whole batch, nats per token.
      num_tokens: float32, counted tokens; exact below 2**24.
      grad_norm: float32, L2 norm of the mean gradient before clipping.
      param_norm: float32, L2 norm of the weights before the update.
      finite: bool; False: loss, gradient or weights were not finite and the update was masked.
    """

    loss: jax.Array
    num_tokens: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array
    finite: jax.Array


def accumulated(
    loss_fn: LossFn, params: Any, batch: Any, *, num_microbatches: int, dtype: Any, rounding: Rounding = NEAREST
) -> tuple[tuple, Any]:
    """Returns ((loss sum, count), gradients) of a batch whose parts are run one after another.

    Args:
      loss_fn: as for `training_program`.
      params: what gradients are of.
      batch: fields with rows in front.
      num_microbatches: static number of parts, see `batch.microbatches`.
      dtype: of the sum of the gradients of several parts.
      rounding: how each of the sums is written.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    if num_microbatches == 1:
        (loss_sum, num_tokens), grads = grad_fn(params, batch)
        return (loss_sum, num_tokens), grads

    def add(sums, numbered):
        number, microbatch = numbered
        (loss, tokens), grads = grad_fn(params, microbatch)
        return (sums[0] + loss, sums[1] + tokens, rounding.at(number).added(sums[2], grads)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
    start = (jnp.float32(0.0), jnp.float32(0.0), zeros)
    numbered = jnp.arange(num_microbatches, dtype=jnp.uint32), microbatches(batch, num_microbatches)
    loss_sum, num_tokens, grads = jax.lax.scan(add, start, numbered)[0]
    return (loss_sum, num_tokens), grads


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """How a program is built.

    Attributes:
      policy: what is stored, accumulated and rounded.
      num_microbatches: static count of parts a batch is split into; with a mesh, the rows of each device are.
      accumulate: how gradients of the parts are made and summed: `accumulated`, or what pipeline stages need instead.
      norm_in_blocks: see `optimizer.global_norm`.
      spread: the mesh and what lies where; None: one device.
      state_shardings: shardings of the state, as returned by `init`; None: wherever the inputs are.
      autocast: how the loss, fp32 throughout, is cast (see `passes.autocast`), for a policy that computes in fp32;
        None: the loss has the dtypes that it gives itself.
    """

    policy: Policy
    num_microbatches: int = 1
    accumulate: Callable = accumulated
    norm_in_blocks: bool = False
    spread: Spread | None = None
    state_shardings: Any = None
    autocast: CastPolicy | str | None = None


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """The two functions of a training run.

    Attributes:
      init: (params, *, seed=0) -> state. The state is {"step", "params", "opt_state": {"inner"[, "master"][, "seed"]}};
        the uint32 seed is that of stochastic rounding, where the policy has it.
      step: jitted (state, batch, learning_rate) -> (state, StepMetrics); donates the state.
    """

    init: Callable[..., State]
    step: Callable[[State, Any, jax.Array], tuple[State, StepMetrics]]


def training_program(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, *, options: ProgramOptions
) -> TrainingProgram:
    """Returns the training program of a loss and an optimizer.

    Args:
      loss_fn: (params, microbatch) -> (sum of the losses of the counted tokens, count of them), fp32 scalars. The
        program divides by the count over the whole batch, so unequal microbatches weigh as one batch would.
      optimizer: an Optax transformation. It gets the mean gradients in fp32, the weights, and the extra arguments
        `learning_rate`, `grad_norm` and `finite`; a transformation with a schedule of its own ignores them.
      options: precision, accumulation, shardings.
    """
    optimizer = masked(optimizer)
    policy = options.policy

    def init(params: Any, *, seed: Any = 0) -> State:
        weights = cast_tree(params, policy.master or policy.param)
        opt_state = {"inner": optimizer.init(weights)}
        if policy.master is not None:
            opt_state["master"] = weights
        if policy.rounding != "nearest":
            opt_state["seed"] = jnp.asarray(seed, jnp.uint32)
        return {"step": jnp.zeros((), jnp.int32), "params": cast_tree(params, policy.param), "opt_state": opt_state}

    spread = options.spread
    value_and_grad = _value_and_grad(loss_fn, options)

    def train_step(state: State, batch: Any, learning_rate: jax.Array) -> tuple[State, StepMetrics]:
        rounding = NEAREST
        if policy.rounding == "stochastic":
            rounding = Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))
        (loss_sum, num_tokens), grads = value_and_grad(state["params"], batch, rounding)
        norm = functools.partial(global_norm, in_blocks=options.norm_in_blocks, spread=spread)
        # The norm of the sums, and a product instead of a division: XLA on CPU then scales each gradient where the
        # update reads it, and writes no scaled copy of them all.
        per_token = 1.0 / num_tokens
        grad_norm = norm(grads) * per_token
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) * per_token, grads)
        weights = state["opt_state"].get("master", state["params"])
        weights = weights if spread is None else spread.split(weights)
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
        params = cast_tree(weights, policy.param)
        params = params if spread is None else spread.publish(params)
        new_state = {"step": state["step"] + 1, "params": params, "opt_state": opt_state}
        metrics = StepMetrics(loss_sum / num_tokens, num_tokens, grad_norm, param_norm, finite)
        return new_state, metrics

    shardings = {} if options.state_shardings is None else {"out_shardings": (options.state_shardings, None)}
    return TrainingProgram(init, jax.jit(train_step, donate_argnums=0, **shardings))


def _value_and_grad(loss_fn: LossFn, options: ProgramOptions) -> Callable[[Any, Any, Rounding], tuple[tuple, Any]]:
    dtype = options.policy.accumulate
    if options.autocast is not None:
        loss_fn = autocast(loss_fn, options.autocast)

    def local(params: Any, batch: Any, rounding: Rounding) -> tuple[tuple, Any]:
        parts = {"num_microbatches": options.num_microbatches, "dtype": dtype}
        return options.accumulate(loss_fn, params, batch, rounding=rounding, **parts)

    return local if options.spread is None else options.spread.value_and_grad(local, dtype=dtype)


def _moved(weights: Any, updates: Any, *, finite: jax.Array, rounding: Rounding) -> Any:
    exact = jax.tree.map(lambda weight, update: weight.astype(jnp.float32) + update, weights, updates)

    def move(path, weight, moved):
        written = rounding.write(moved, weight.dtype, name="weights" + jax.tree_util.keystr(path))
        return jnp.where(finite, written, weight)

    return jax.tree_util.tree_map_with_path(move, weights, exact)
