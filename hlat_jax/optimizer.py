"""AdamW and Muon with clipping, as one Optax transformation with a maskable update, learning rates, and spikes.

The learning rate is computed on the host and passed in, so that the compiled step does not depend on the horizon.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hlat_jax.config import OptimizerConfig
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.precision import NEAREST, Policy

_SUM_BLOCK = 1 << 15  # elements: 128 KiB of fp32
_LEAST_SPREAD = 1e-4  # of the mean of a window: one of equal values would otherwise never take a new level


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """Returns the learning rate of update `step`, counted from 0.

    With p = min((step - decay_start) / (horizon_steps - decay_start), 1), the rate is peak_lr times

        step / warmup_steps                        in the warm-up
        1                                          until decay_start
        max(min_lr_ratio, (1 + cos(pi * p)) / 2)   then, with schedule "cosine"
        max(min_lr_ratio, 1 - sqrt(p))             then, with cooldown "sqrt"
        max(min_lr_ratio, 1 - p)                   then, otherwise

    Source: HLAT's published scheduler (7b/scheduler.py), arXiv 2404.10630 III-A, and cooldowns, arXiv 2405.18392.
    """
    if step < config.warmup_steps:
        return config.peak_lr * step / config.warmup_steps
    if step < config.decay_start:
        return config.peak_lr
    decay_steps = config.horizon_steps - config.decay_start
    progress = min((step - config.decay_start) / decay_steps, 1.0)
    if config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = max(config.horizon_steps - step, 0) / decay_steps  # 1 - progress would lose digits near the end
        if config.cooldown == "sqrt":
            share /= 1.0 + math.sqrt(progress)  # 1 - sqrt(progress)
    return config.peak_lr * max(config.min_lr_ratio, share)


def global_norm(tree: Any, *, in_blocks: bool = False, replica_sync: ReplicaSync | None = None) -> jax.Array:
    """Returns the L2 norm over every element of every leaf, in fp32.

    Args:
      tree: arrays of any float dtype.
      in_blocks: whether to sum as `sum_in_blocks` does, for arrays on one CPU.
      replica_sync: the mesh and the shardings of the arrays, which are then not summed in blocks. None on one device.
    """
    if replica_sync is not None:
        return jnp.sqrt(replica_sync.global_sum(_sum_of_squares, tree))
    if in_blocks:
        return jnp.sqrt(sum_in_blocks(jnp.square, tree))
    return jnp.sqrt(sum(_sum_of_squares(leaf) for leaf in jax.tree.leaves(tree)))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def sum_in_blocks(term: Callable[[jax.Array], jax.Array], tree: Any) -> jax.Array:
    """Returns the sum of `term`, elementwise and in fp32, over every element of every leaf.

    One cache-sized block of partial sums takes the whole blocks of all leaves, one after another. XLA on CPU otherwise
    writes the terms of a leaf to memory and compiles a tree of sums for it. The rest of each leaf is written to memory
    here too. Hundreds of leaves of as many shapes take longer to compile.
    """
    sums, rest = jnp.zeros(_SUM_BLOCK, jnp.float32), []
    for leaf in jax.tree.leaves(tree):
        flat = leaf.reshape(-1)
        num_blocks = flat.size // _SUM_BLOCK if flat.size < 2**31 else 0  # offsets of blocks are int32
        if num_blocks:
            starts = _SUM_BLOCK * jnp.arange(num_blocks, dtype=jnp.int32)
            sums, _ = jax.lax.scan(functools.partial(_add_block, term, flat), sums, starts)
        rest.append(term(flat[num_blocks * _SUM_BLOCK :].astype(jnp.float32)))
    return jnp.sum(jnp.concatenate([sums, *rest]))


def _add_block(term: Callable[[jax.Array], jax.Array], flat: jax.Array, sums: jax.Array, start: jax.Array) -> Any:
    block = jax.lax.dynamic_slice(flat, (start,), (_SUM_BLOCK,))
    return sums + term(block.astype(jnp.float32)), None


class MaskedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation with the extra argument `finite`. If it is False, the state is unchanged."""


def adamw(
    config: OptimizerConfig, *, policy: Policy, decays: Any, orthogonalizers: Any = None, like: Any = None
) -> MaskedTransformation:
    """Returns clipping by global norm and AdamW, fused into one pass over the parameters, with Muon for some of them.

    With g the gradient times min(1, clip_norm / (grad_norm + 1e-6)), update n of AdamW is

        mu = beta1 * mu + (1 - beta1) * g,   nu = beta2 * nu + (1 - beta2) * g^2
        -learning_rate * (mu / (1 - beta1^n) / (sqrt(nu / (1 - beta2^n)) + eps) + weight_decay * param)

    All arithmetic is fp32, and moments are stored in `policy.moment`.

    Args:
      config: betas, eps, decay, clip.
      policy: dtype of the moments.
      decays: tree of bools with the structure of the parameters, True if weight decay applies.
      orthogonalizers: tree with the structure of the parameters, with the function momentum -> update of each parameter
        that Muon updates, see `ops.muon`, and None for AdamW. By default all are None. Muon has no second moment.
      like: the shapes of the parameters without padding. By default the parameters have none.

    The update takes the extra arguments `learning_rate`, `grad_norm` (norm of the same gradients), `finite` (bool
    scalar) and `rounding` (of the moments, by default to nearest). If `finite` is False, the moments are unchanged.
    Source: Loshchilov and Hutter, arXiv 1711.05101, with decoupled decay as in torch.optim.AdamW. Muon's momentum, with
    bias corrections, is the same as in optax.contrib.muon.
    """
    if orthogonalizers is None:
        orthogonalizers = jax.tree.map(lambda _: None, decays)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=policy.moment), params)
        nu = jax.tree.map(lambda zero, muon: None if muon else jnp.copy(zero), zeros, orthogonalizers)
        return {"count": jnp.zeros((), jnp.int32), "mu": zeros, "nu": nu}

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if "learning_rate" not in extra:
            raise ValueError("this AdamW needs a learning rate. Call step(state, batch, learning_rate).")
        finite, rounding = extra["finite"], extra.get("rounding", NEAREST)
        count = jnp.where(finite, state["count"] + 1, state["count"])
        # after a masked first step the count is 0, and the bias corrections would be 0
        steps = jnp.maximum(count, 1).astype(jnp.float32)
        scale = jnp.float32(1.0)
        if config.clip_norm:
            scale = jnp.minimum(1.0, config.clip_norm / (extra["grad_norm"] + 1e-6))

        def decayed(moment, beta, value, *, name, shape):
            new = beta * moment.astype(jnp.float32) + (1.0 - beta) * value
            return jnp.where(finite, rounding.write(new, policy.moment, name=name, shape=shape), moment)

        def moments(path, *of_leaf):
            grad, mu, nu, leaf = of_leaf
            grad = grad.astype(jnp.float32) * scale
            place = jax.tree_util.keystr(path)
            stored = (
                decayed(
                    mu, config.muon_beta if nu is None else config.beta1, grad, name="mu" + place, shape=leaf.shape
                ),
                nu if nu is None else decayed(nu, config.beta2, jnp.square(grad), name="nu" + place, shape=leaf.shape),
            )
            # otherwise XLA on CPU fuses the old moments into the weight update, and copies them for that
            return jax.lax.optimization_barrier(stored)

        # 1 - beta^n by expm1: at n = 1 the direct form loses half the digits of fp32
        corrections = _one_minus_power(config.beta1, steps), _one_minus_power(config.beta2, steps)

        def nesterov(mu, grad):
            beta = config.muon_beta
            mean = beta * mu.astype(jnp.float32) / _one_minus_power(beta, steps + 1.0)
            return mean + (1.0 - beta) * (grad.astype(jnp.float32) * scale) / _one_minus_power(beta, steps)

        def step(mu, nu, param, decay, grad, orthogonalize):
            rate = extra["learning_rate"]
            if orthogonalize is not None:
                direction, rate = orthogonalize(nesterov(mu, grad)), config.muon_lr_ratio * rate
            else:
                mean, square = mu.astype(jnp.float32) / corrections[0], nu.astype(jnp.float32) / corrections[1]
                direction = mean / (jnp.sqrt(square) + config.eps)
            if decay:
                direction = direction + config.weight_decay * param.astype(jnp.float32)
            return -rate * direction

        pairs = jax.tree_util.tree_map_with_path(
            moments, grads, state["mu"], state["nu"], grads if like is None else like
        )
        mu, nu = (jax.tree.map(lambda _, pair, i=i: pair[i], grads, pairs) for i in (0, 1))
        updates = jax.tree.map(step, mu, nu, params, decays, grads, orthogonalizers)
        return updates, {"count": count, "mu": mu, "nu": nu}

    return MaskedTransformation(init, update)


def with_extra_args(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with the extra arguments of a program, or `adamw` as it is.

    If `finite` is False, the state of other transformations is not masked. The caller selects with `where`, because
    `optax.apply_if_finite` uses `cond`, which Neuron does not support.
    """
    if isinstance(optimizer, MaskedTransformation):
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        try:
            return inner.update(grads, state, params, **extra)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the optimizer's update, which gets the extra arguments {', '.join(extra)}, raised "
                f"{type(error).__name__}: {error}"
            ) from error

    return optax.GradientTransformationExtraArgs(inner.init, update)


def decay_mask(params: Any, decay: str) -> Any:
    """Returns a tree of bools, True for parameters to which weight decay applies.

    Args:
      params: parameters or their shapes. The key of a norm's scale ends in `norm`, and the key of a bias in `bias`.
      decay: 'all', as in HLAT, or 'matrices', which excludes the norms' scales and biases.
    """

    def decays(path, _):
        return decay == "all" or not any(str(key.key).endswith(("norm", "bias")) for key in path)

    return jax.tree_util.tree_map_with_path(decays, params)


def _one_minus_power(beta: float, steps: jax.Array) -> jax.Array:
    return -jnp.expm1(steps * math.log(beta)) if beta else jnp.ones_like(steps)


@dataclasses.dataclass(frozen=True)
class SpikePolicy:
    """The definition of a spike of the loss or the gradient norm, and whether a step with a spike is skipped.

    Attributes:
      skips: whether the update of a step with a spike is masked, like a step that is not finite, or only reported.
      sigmas: standard deviations above the mean of the window, from where a value is a spike.
      window: number of steps in the window. It decides once it has half of them, and at least 2.

    Raises:
      ValueError: `sigmas` is not above 0, or a window of less than 2 steps.
    """

    skips: bool = True
    sigmas: float = 6.0
    window: int = 128

    def __post_init__(self):
        if not 0 < self.sigmas < math.inf or self.window < 2:
            raise ValueError(
                f"SpikePolicy(sigmas={self.sigmas}, window={self.window}) is invalid. Give sigmas above 0, such as "
                "6.0, and a window of 2 steps or more, such as 128."
            )


def empty_spike_window(policy: SpikePolicy) -> dict[str, jax.Array]:
    """Returns a window without values, a part of the train state.

    It is {"values": fp32[2, window], oldest first, "count": int32, the number of values that are set}.
    """
    return {"values": jnp.zeros((2, policy.window), jnp.float32), "count": jnp.zeros((), jnp.int32)}


def detect_spike(
    state: dict[str, jax.Array], *, loss: jax.Array, grad_norm: jax.Array, finite: jax.Array, policy: SpikePolicy
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (whether this step is a spike, the window with its loss and gradient norm).

    A value is a spike if it exceeds the limit mean + sigmas * std of the values in the window. All devices take the
    same decision, because the values are reduced over them. A step that is not finite is no spike and does not enter
    the window, which a NaN would spoil. A spike enters the window as the limit that it exceeds, skipped or not. With
    its own value, one spike of 1e6 would hide all others for a whole window. If spikes did not enter, a lasting new
    level would be a spike for ever. So the limit rises with each spike, and a new level is normal after some tens of
    steps.

    Source: OLMo-core's SkipStepOptimizer (6 standard deviations of 128 steps, loss or gradient norm).
    """
    values, count = state["values"], state["count"]
    new = jnp.stack([loss, grad_norm])[:, None]
    is_set = jnp.arange(policy.window) >= policy.window - count
    num = jnp.maximum(count, 2).astype(jnp.float32)
    mean = jnp.sum(jnp.where(is_set, values, 0.0), axis=1, keepdims=True) / num
    squares = jnp.sum(jnp.where(is_set, jnp.square(values - mean), 0.0), axis=1, keepdims=True)
    sigma = jnp.maximum(jnp.sqrt(squares / (num - 1.0)), _LEAST_SPREAD * jnp.abs(mean))
    limit = jnp.where(count >= max(2, policy.window // 2), mean + policy.sigmas * sigma, jnp.inf)
    entered = jnp.concatenate([values[:, 1:], jnp.minimum(new, limit)], axis=1)
    window = {
        "values": jnp.where(finite, entered, values),
        "count": jnp.where(finite, jnp.minimum(count + 1, policy.window), count),
    }
    return finite & jnp.any(new > limit), window
