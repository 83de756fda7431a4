"""Our loss, state and steps: joins model, optimizer and program under a layout, and adds no arithmetic of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hlat_jax.batch import Batch, SumAndCount, abstract_batch
from hlat_jax.config import Config
from hlat_jax.model import Decoder, abstract_params, bind, init_params, param_axes
from hlat_jax.ops.choices import choices, chosen_model
from hlat_jax.ops.cross_entropy import LossOptions, cross_entropy
from hlat_jax.optimizer import adamw, decay_mask, global_norm
from hlat_jax.parallel import collectives
from hlat_jax.parallel.pipeline import Parts, pipelined, pipelined_loss
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.sharding import Layout
from hlat_jax.passes.autocast import autocast
from hlat_jax.precision import POLICIES, cast_tree, policy_on
from hlat_jax.program import ProgramOptions, State, TrainingProgram, training_program


def make_program(config: Config, layout: Layout) -> TrainingProgram:
    """Returns the training program of a config: AdamW on the mean next-token loss over all counted tokens."""
    precision = config.precision
    policy = policy_on(precision.policy, layout.platform, stochastic_rounding=precision.stochastic_rounding)
    optimizer = adamw(
        config.optimizer,
        policy=policy,
        decays=decay_mask(abstract_params(config.model), config.optimizer.decay),
    )
    is_pipelined = layout.size(("pipe",)) > 1
    options = ProgramOptions(
        policy=policy,
        num_microbatches=config.train.num_microbatches,
        accumulate=pipelined if is_pipelined else None,
        autocast=policy.autocast,
        norm_in_blocks=layout.mesh.size == 1 and layout.platform == "cpu",
        spread=ReplicaSync(layout, param_axes(config.model)),
        kernels={f"model.{key}": choice for key, choice in choices(config, layout).items()},
    )
    loss = parts(config, layout, z_loss_weight=config.train.z_loss_weight)
    return training_program(loss, optimizer, options=options, params=abstract_params(config.model))


def make_train_step(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted (state, batch, learning_rate) -> (state, StepMetrics). The state is donated."""
    return make_program(config, layout).step


def make_eval_step(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted (params, batch) -> sum of the losses in nats and counted tokens, without z-loss."""
    loss = parts(config, layout, z_loss_weight=0.0)
    cast = POLICIES[config.precision.policy].autocast
    if cast is not None:
        loss = autocast(loss, cast)
    if layout.size(("pipe",)) > 1:
        loss = functools.partial(pipelined_loss, loss, num_microbatches=config.train.num_microbatches)
    if layout.mesh.size > 1:
        loss = ReplicaSync(layout, param_axes(config.model)).loss(loss)

    def eval_step(params: Any, batch: Batch) -> SumAndCount:
        return loss(params, batch)

    return jax.jit(eval_step)


def parts(config: Config, layout: Layout, *, z_loss_weight: float) -> Parts:
    """Returns (params, batch) -> sum of the losses of the counted targets and their number, fp32 scalars, in its parts.

    Over a mesh it is the loss of one device, for use inside the `shard_map` of `replica_sync.ReplicaSync`.
    """
    compute = POLICIES[config.precision.policy].compute
    model = chosen_model(config, layout)
    ctx = collectives.parallel_context(layout)
    options = LossOptions(model.cross_entropy, z_loss_weight, ctx)

    def cast_and_bind(params: Any) -> Decoder:
        return bind(cast_tree(params, compute), model)

    def embed(decoder: Decoder, batch: Batch) -> jax.Array:
        return decoder.embed_tokens(batch.tokens, ctx=ctx)

    def stage(decoder: Decoder, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        return decoder.apply_layers(x_BTD, batch.positions, segment_ids_BT=batch.segment_ids, ctx=ctx)

    def loss(decoder: Decoder, x_BTD: jax.Array, batch: Batch) -> SumAndCount:
        return cross_entropy(
            decoder.apply_final_norm(x_BTD),
            head_VD=decoder.gather_head(ctx=ctx),
            targets_BT=batch.targets,
            weights_BT=batch.weights,
            options=options,
        )

    return Parts(bind=cast_and_bind, embed=embed, stage=stage, loss=loss)


def make_norms(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted state -> norms, fp32, by part: the parameters, and whatever the optimizer keeps of them.

    Of the parameters and of fp32 masters the L2 norm, which a step masks on; of Adam's moments the mean magnitude,
    which is finite wherever every element is (the L2 norm of squared gradients overflows in a healthy state). A part
    has the structure of the parameters, or is a floating-point array by itself. A state of which a norm is not finite
    cannot be trained on, and is not worth saving. Each device sums what it holds; then one all-reduce.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, make_program(config, layout).shardings)
    in_blocks = layout.mesh.size == 1 and layout.platform == "cpu"
    weights = ("params", "opt_state.master")

    def copies(spec: PartitionSpec) -> int:
        return layout.size(set(layout.mesh.axis_names) - set(jax.tree.leaves(tuple(spec))))

    def squares(held: list[tuple[jax.Array, int]]) -> jax.Array:
        return sum(jnp.square(global_norm(leaf, in_blocks=in_blocks)) / num for leaf, num in held)

    def magnitudes(held: list[tuple[jax.Array, int]]) -> jax.Array:
        size = sum(leaf.size * layout.mesh.size // num for leaf, num in held)
        # divided one by one, finite elements have a finite sum
        return sum(jnp.sum(jnp.abs(leaf.astype(jnp.float32)) / float(size * num)) for leaf, num in held)

    def local(state: State) -> dict[str, jax.Array]:
        params = jax.tree.structure(state["params"])
        parts, structure = jax.tree_util.tree_flatten_with_path(
            state, is_leaf=lambda tree: jax.tree.structure(tree) == params
        )
        sums = {}
        for (path, part), spec in zip(parts, structure.flatten_up_to(specs), strict=True):
            if jnp.issubdtype(jax.tree.leaves(part)[0].dtype, jnp.floating):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                nums = jax.tree.leaves(jax.tree.map(lambda _, of: copies(of), part, spec))
                held = list(zip(jax.tree.leaves(part), nums, strict=True))
                sums[name] = (squares if name in weights else magnitudes)(held)
        whole = collectives.psum(jnp.stack(list(sums.values())), layout.wide(layout.mesh.axis_names))
        return {name: jnp.sqrt(x) if name in weights else x for name, x in zip(sums, whole, strict=True)}

    def state_norms(state: State) -> dict[str, jax.Array]:
        return jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)(
            state
        )

    return jax.jit(state_norms, out_shardings=layout.replicated())


def init_state(config: Config, layout: Layout) -> State:
    """Returns the state before the first step, drawn on the devices that will hold it."""
    return make_init(config, layout)(*init_arguments(config))


def make_init(config: Config, layout: Layout) -> Callable[..., Any]:
    """Returns the jitted uint32 seed -> state before the first step, with the weights of that seed's rbg key.

    The key is made here, as `jax.random.key` makes it: outside, that is three programs more, a compile each on Neuron.
    """
    program = make_program(config, layout)

    def initial(seed):
        high = jnp.zeros((), jnp.uint32)
        key = jax.random.wrap_key_data(jnp.stack([high, seed, high, seed]), impl="rbg")
        return program.init(init_params(config.model, key), seed=seed)

    return jax.jit(initial, out_shardings=program.shardings)


def init_arguments(config: Config) -> tuple[np.uint32]:
    """Returns what `make_init`'s function takes: the seed of the weights, which stochastic rounding keeps too."""
    return (np.uint32(config.train.seed & 0xFFFFFFFF),)


def abstract_state(config: Config, layout: Layout) -> State:
    """Returns the shapes, dtypes and shardings of the state; allocates nothing."""
    program = make_program(config, layout)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(program.init, abstract_params(config.model)),
        program.shardings,
    )


def step_arguments(config: Config, layout: Layout) -> tuple[Any, Any, Any]:
    """Returns the shapes, dtypes and shardings of (state, batch, learning rate)."""
    with_segments = config.data.packing == "documents"
    batch = abstract_batch(config.data.batch_size, config.data.seq_len, with_segments=with_segments)
    rows = layout.rows()
    batch = jax.tree.map(lambda field: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=rows), batch)
    return abstract_state(config, layout), batch, jax.ShapeDtypeStruct((), jnp.float32)


def traced_step(config: Config, layout: Layout) -> Any:
    """Returns the trace of `make_train_step`; its `.lower()` needs devices that exist."""
    return make_train_step(config, layout).trace(*step_arguments(config, layout))


def state_bytes(state: State) -> int:
    """Returns the bytes of a state, abstract or real, that the fullest device holds."""

    def on_one_device(leaf):
        shape = leaf.shape
        if isinstance(leaf.sharding, NamedSharding):
            shape = leaf.sharding.shard_shape(shape)
        return jnp.dtype(leaf.dtype).itemsize * math.prod(shape)

    return sum(on_one_device(leaf) for leaf in jax.tree.leaves(state))
