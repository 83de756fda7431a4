"""Our loss, state and steps: joins model, optimizer and program under a layout, and adds no arithmetic of its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.model import abstract_params, bind, init_params, param_axes, select_implementations
from hlat_jax.ops.cross_entropy import cross_entropy
from hlat_jax.optimizer import adamw, decay_mask
from hlat_jax.precision import POLICIES, cast_tree
from hlat_jax.program import ProgramOptions, State, TrainingProgram, training_program
from hlat_jax.sharding import Layout


def make_program(config: Config, layout: Layout) -> TrainingProgram:
    """Returns the training program of a config: AdamW on the mean next-token loss over all counted tokens."""
    policy = POLICIES[config.precision.policy]
    optimizer = adamw(
        config.optimizer,
        policy=policy,
        decays=decay_mask(abstract_params(config.model), config.optimizer.decay),
    )
    alone = layout.mesh.size == 1
    options = ProgramOptions(
        policy=policy,
        num_microbatches=config.train.num_microbatches,
        norm_in_blocks=alone and layout.platform == "cpu",
    )
    loss = loss_fn(config, layout, z_loss_weight=config.train.z_loss_weight)
    if not alone:
        unsharded = training_program(loss, optimizer, options=options)
        shardings = state_shardings(config, layout, jax.eval_shape(unsharded.init, abstract_params(config.model)))
        options = dataclasses.replace(options, state_shardings=shardings)
    return training_program(loss, optimizer, options=options)


def make_train_step(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted (state, batch, learning_rate) -> (state, StepMetrics). The state is donated."""
    return make_program(config, layout).step


def make_eval_step(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted (params, batch) -> (sum of the losses in nats, counted tokens), without z-loss."""
    loss = loss_fn(config, layout, z_loss_weight=0.0)

    def eval_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss(params, batch)

    return jax.jit(eval_step)


def loss_fn(config: Config, layout: Layout, *, z_loss_weight: float) -> Callable[[Any, Batch], tuple]:
    """Returns (params, batch) -> (sum of the losses of the counted targets, their number), fp32 scalars."""
    compute = POLICIES[config.precision.policy].compute
    model = select_implementations(config.model, layout.platform)

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        decoder = bind(cast_tree(params, compute), model)
        hidden_BTD = decoder.hidden_states(
            batch.tokens, batch.positions, segment_ids_BT=batch.segment_ids, constrain=layout.constrain
        )
        return cross_entropy(
            hidden_BTD,
            head_VD=decoder.head_VD,
            targets_BT=batch.targets,
            weights_BT=batch.weights,
            z_loss_weight=z_loss_weight,
            implementation=decoder.cfg.cross_entropy,
        )

    return loss


def init_state(config: Config, layout: Layout) -> State:
    """Returns the state before the first step, drawn on the devices that will hold it."""
    program = make_program(config, layout)

    def initial(key):
        return program.init(init_params(config.model, key))

    shardings = state_shardings(config, layout, jax.eval_shape(initial, _key(config)))
    return jax.jit(initial, out_shardings=shardings)(_key(config))


def abstract_state(config: Config, layout: Layout) -> State:
    """Returns the shapes, dtypes and shardings of the state; allocates nothing."""
    shapes = jax.eval_shape(make_program(config, layout).init, abstract_params(config.model))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(config, layout, shapes),
    )


def state_shardings(config: Config, layout: Layout, state: State) -> State:
    """Returns the sharding of every leaf: parameters by their axes, whatever mirrors a parameter likewise."""
    axes = param_axes(config.model)
    params = jax.tree.map(layout.param_sharding, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    mirrors = jax.tree.map(layout.state_sharding, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    structure = jax.tree.structure(state["params"])

    def like_params(subtree) -> bool:
        return jax.tree.structure(subtree) == structure

    opt_state = jax.tree.map(
        lambda subtree: mirrors if like_params(subtree) else layout.replicated(),
        state["opt_state"],
        is_leaf=like_params,
    )
    return {"step": layout.replicated(), "params": params, "opt_state": opt_state}


def state_bytes(state: State) -> int:
    """Returns the bytes of a state, abstract or real, that the fullest device holds."""

    def on_one_device(leaf):
        shape = leaf.shape
        if isinstance(leaf.sharding, NamedSharding):
            shape = leaf.sharding.shard_shape(shape)
        return jnp.dtype(leaf.dtype).itemsize * math.prod(shape)

    return sum(on_one_device(leaf) for leaf in jax.tree.leaves(state))


def _key(config: Config) -> jax.Array:
    return jax.random.key(config.train.seed, impl="rbg")
