"""Makes the state of a training step, reads its parts, and jits functions that donate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hlat_jax.optimizer import empty_spike_window
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.zero import check_params
from hlat_jax.precision import NEAREST, Policy, Rounding, cast_tree
from hlat_jax.step import loss_scale
from hlat_jax.step.loss_signature import LossSignature, check_model_state
from hlat_jax.step.options import StepOptions

State = dict[str, Any]  # see `TrainStep.init`


def make_init(
    optimizer: optax.GradientTransformation,
    options: StepOptions,
    *,
    signature: LossSignature,
    shardings: Any = None,
) -> Callable[..., State]:
    """Returns `TrainStep.init`. Without shardings, its state is on the parameters' devices."""
    policy = options.policy

    def init(params: Any, *, model_state: Any = None, seed: Any = 0) -> State:
        check_params(params)
        if model_state is not None:
            check_model_state(model_state, signature)
        elif signature.has_state:
            raise ValueError("loss_fn takes a model_state. Call init(params, model_state=...) with its first value.")
        weights = cast_tree(params, policy.master or policy.param)
        if options.active_replica_sync is not None:
            weights = options.active_replica_sync.pad_like_state(weights)
        opt_state: dict[str, Any] = {"inner": _copy(optimizer.init(weights))}
        if policy.master is not None:
            opt_state["master"] = _copy(weights)
        if policy.rounding != "nearest" or signature.has_keys:
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
    for index, leaf in enumerate(leaves):  # an array that nobody else holds is freed before the next is copied
        leaves[index] = jnp.copy(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf
    return jax.tree.unflatten(structure, leaves)


def rounding_of(state: State, policy: Policy) -> Rounding:
    """Returns the rounding of the values that a step stores."""
    if policy.rounding != "stochastic":
        return NEAREST
    return Rounding((state["opt_state"]["seed"], state["step"].astype(jnp.uint32)))


def scale_of(state: State) -> jax.Array | None:
    """Returns the factor of the loss, or None if it is not scaled."""
    held = state["opt_state"].get("loss_scale")
    return None if held is None else held.scale


def jit_donating(
    fn: Callable, options: StepOptions, *, shardings: Any, donated: tuple[int, ...] = (0,)
) -> jax.stages.Wrapped:
    """Returns the jitted function with the compiler options of its devices.

    It donates its arguments at `donated`. If `options` have a `replica_sync`, its results have these `shardings`.
    """
    keep_unused = len(donated) > 1  # else what is donated and only overwritten would be allocated again
    if options.replica_sync is None:
        return jax.jit(fn, donate_argnums=donated, keep_unused=keep_unused)
    compiler_options = xla_options.compiler_options(options.replica_sync.layout) or None
    return jax.jit(
        fn,
        donate_argnums=donated,
        keep_unused=keep_unused,
        out_shardings=shardings,
        compiler_options=compiler_options,
    )
