"""The program of a run: the model's loss, the optimizer and a layout joined into init, step, eval step and norms."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hlat_jax.batch import Batch, SumAndCount, abstract_batch
from hlat_jax.config import Config, ModelConfig, select
from hlat_jax.model import Decoder, abstract_params, bind, init_layer, init_params, pad_vocabulary, param_axes
from hlat_jax.ops import muon
from hlat_jax.ops.choices import choices, with_choices
from hlat_jax.ops.context_attention import attend_over
from hlat_jax.ops.cross_entropy import LossOptions, cross_entropy
from hlat_jax.ops.dialect import Choice
from hlat_jax.optimizer import SpikePolicy, adamw, decay_mask, sum_in_blocks
from hlat_jax.parallel import collectives
from hlat_jax.parallel.digests import make_digest
from hlat_jax.parallel.host_arrays import place_constant, place_values
from hlat_jax.parallel.pipeline import PHASES, StagedLoss, pipelined_loss, run_pipeline
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.rows import num_microbatches, pad_rows, replica_rows, shard_batch, shard_microbatches
from hlat_jax.parallel.sharding import Layout
from hlat_jax.passes import naming
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.compile import training_program
from hlat_jax.precision import cast_tree, policy_on
from hlat_jax.step import MicrobatchStep, State, StepOptions, TrainStep

# A sample's prompt of no more bytes is read by `decode`, in less time than `prefill` takes to compile.
_SHORT_PROMPT_BYTES = 64
# precision.simulate -> `--auto-cast` of the simulated core
SIMULATED = {"none": None, "neuron": "none", "neuron_all": "all"}


@dataclasses.dataclass(frozen=True)
class RunProgram:
    """The program of a run, built once, with its functions, their shapes, and the choices behind them.

    Attributes:
      config: the config of the run.
      layout: the mesh, of real or planned devices.
      choices: key of ModelConfig -> the chosen implementation, and why the others do not run.
      model: `config.model` with every `auto` replaced by its choice.
      accumulate: `config.train.accumulate` with `auto` replaced by its choice.
      num_microbatches: `config.train.num_microbatches` with -1 replaced by the rows of a replica.
      training: init and step for given parameters.
      init: jitted function of a uint32 seed -> state before the first step, with weights drawn from the seed's rbg key.
      eval_step: jitted function (params, batch) -> sum of the losses in nats and counted tokens, without z-loss.
      norms: jitted function of a state -> fp32 norms by part, see `_state_norms`.
      digest: jitted function (state, probe) -> digests of the arrays on each device, see `digests.make_digest`.
    """

    config: Config
    layout: Layout
    choices: Mapping[str, Choice]
    model: ModelConfig
    accumulate: str
    num_microbatches: int
    training: TrainStep
    init: jax.stages.Wrapped
    eval_step: jax.stages.Wrapped
    norms: jax.stages.Wrapped
    digest: jax.stages.Wrapped

    @property
    def step(self) -> jax.stages.Wrapped:
        """The jitted (state, batch, learning_rate) -> (state, StepMetrics), one program. The state is donated."""
        return self.training.step

    @property
    def run_step(self) -> Callable[..., Any]:
        """The step of the run: (state, what `shard` returns, learning_rate) -> (state, StepMetrics)."""
        return self.microbatch_step if self.accumulate == "programs" else self.training.step

    @property
    def microbatch_step(self) -> MicrobatchStep:
        """The step in programs of one microbatch. A run that simulates a core has none."""
        step = self.training.microbatch_step
        assert step is not None  # `check_simulated` refuses a run that would dispatch it
        return step

    def shard(self, batch: Batch) -> Batch | Iterator[Batch]:
        """Returns this process's rows as `run_step` takes them, the batch on devices, or its microbatches in turn."""
        batch = pad_rows(batch, self.layout, num_rows=self.config.data.batch_size)
        if self.accumulate == "programs":
            return shard_microbatches(batch, self.layout, num_microbatches=self.num_microbatches)
        return shard_batch(batch, self.layout)

    @property
    def seed(self) -> np.uint32:
        """The argument of `init`, which is the seed of the weights and of stochastic rounding."""
        return np.uint32(self.config.train.seed & 0xFFFFFFFF)

    @functools.cached_property
    def step_arguments(self) -> tuple[Any, Any, Any]:
        """The shapes, dtypes and shardings of (state, batch, learning rate). Nothing is allocated."""
        data = self.config.data
        num_rows = self.layout.row_degree * replica_rows(data.batch_size, self.layout)
        batch = abstract_batch(num_rows, data.seq_len, with_segments=data.packing == "documents")
        return self.training.arguments(abstract_params(self.config.model, layout=self.layout), batch)

    @property
    def abstract_state(self) -> State:
        """The shapes, dtypes and shardings of the state."""
        return self.step_arguments[0]

    def trace_step(self) -> Any:
        """Returns the trace of `step`, which JAX keeps. Its `.lower()` needs devices that exist."""
        state, batch, learning_rate = self.step_arguments
        return self.step.trace(state, batch, learning_rate)

    @functools.cached_property
    def microbatch_arguments(self) -> dict[str, tuple]:
        """Name of a program of `training.microbatch_step` -> shapes, dtypes and shardings of its arguments."""
        state, batch, learning_rate = self.step_arguments
        step, num = self.microbatch_step, self.num_microbatches
        part = jax.tree.map(lambda field: field.update(shape=(field.shape[0] // num, *field.shape[1:])), batch)
        inputs = step.inputs(state, num_microbatches=jax.ShapeDtypeStruct((), jnp.int32))
        buffer = step.abstract_buffer(inputs, part)
        ticks = dict.fromkeys(step.ticks, (buffer, inputs, part))
        return {"start": (inputs, part), **ticks, "update": (state, buffer, learning_rate)}

    @property
    def num_eval_parts(self) -> int:
        """Number of parts of a batch for `eval_step`: its microbatches, which fit; with stages 1."""
        return self.num_microbatches if self.layout.size(("pipe",)) == 1 else 1

    def trace_eval_step(self) -> Any:
        """Returns the trace of `eval_step` for one of `num_eval_parts` of a batch."""
        state, batch, _ = self.step_arguments
        num = self.num_eval_parts
        part = jax.tree.map(lambda field: field.update(shape=(field.shape[0] // num, *field.shape[1:])), batch)
        return self.eval_step.trace(state["params"], part)

    def trace_microbatch_step(self, name: str) -> Any:
        """Returns the trace of one of `training.microbatch_step.programs`."""
        return self.microbatch_step.programs[name].trace(*self.microbatch_arguments[name])

    @property
    def inits_on_host(self) -> bool:
        """Whether the host draws the initial weights, as on Neuron. Its compiler took over 280 GB for 305 M weights.

        Source: a public script for a 9.7B Llama on 224 cores of trn1, see docs/trainium.md.
        """
        return self.layout.platform == "neuron"

    def init_state(self) -> State:
        """Returns the state before the first step, drawn on the devices that hold it, or on the host for Neuron."""
        return host_state(self) if self.inits_on_host else self.init(self.seed)


def programs_of_run(program: RunProgram) -> list[str]:
    """Returns the names of the programs that training compiles for its devices.

    Reading data, writing files and plotting happen on the host and compile nothing.
    """
    config, ticks = program.config, PHASES if program.layout.size(("pipe",)) > 1 else ("microbatch",)
    names = ["start", *ticks, "update"] if program.accumulate == "programs" else ["train"]
    names += [*([] if program.inits_on_host else ["init"]), "norms", "digest"]
    names += ["digest_sums"] if config.train.check_devices_every_steps else []
    names += ["eval"] if config.has_eval_step else []
    return names + sample_programs(config.train.sample_prompt)


def sample_programs(prompt: str) -> list[str]:
    """Returns the names of the programs of a run's samples, by their prompt."""
    num_bytes = len(prompt.encode())
    return ["prefill"] * (num_bytes > _SHORT_PROMPT_BYTES) + ["decode"] * (num_bytes > 0)


def make_program(config: Config, layout: Layout) -> RunProgram:
    """Returns the program of a config, with AdamW or Muon on the mean next-token loss over all counted tokens.

    Raises:
      ValueError: an implementation that cannot run, see `choices.choices`, or hardware that does not round.
    """
    chosen = choices(config, layout)
    model = with_choices(config.model, chosen, platform=layout.platform)
    precision, params = config.precision, abstract_params(config.model, layout=layout)
    check_simulated(config, layout)
    platform = layout.platform if precision.simulate == "none" else "neuron"
    policy = policy_on(precision.policy, platform, stochastic_rounding=precision.stochastic_rounding)
    if config.train.check_devices_every_steps and policy.rounding == "hardware":
        raise ValueError(
            f"train.check_devices_every_steps={config.train.check_devices_every_steps} needs a device that repeats its "
            "bits, and this one rounds stochastically. Set precision.stochastic_rounding='software', or unset this key."
        )
    train, spikes = config.train, None
    if train.spikes != "off":
        spikes = SpikePolicy(skips=train.spikes == "skip", sigmas=train.spike_sigmas, window=train.spike_window)
    replica_sync = ReplicaSync(layout, param_axes(config.model))
    options = StepOptions(
        policy=policy,
        num_microbatches=num_microbatches(config, layout),
        spikes=spikes,
        accumulate=run_pipeline if layout.size(("pipe",)) > 1 else None,
        replica_sync=replica_sync,
        layer_norms=config.metrics.layer_norms,
    )
    loss = functools.partial(model_loss, model, layout, compute=policy.compute)
    orthogonalizers = None
    if config.optimizer.name == "muon":
        numerics = {
            "width": config.model.embed_dim,
            "config": config.optimizer,
            "dtype": policy.products,
            "unroll": model.layer_loop == "unroll",
        }
        orthogonalizers = muon.orthogonalizers(param_axes(config.model), layout, **numerics)
    decays = decay_mask(params, config.optimizer.decay)
    training = training_program(
        loss(z_loss_weight=train.z_loss_weight),
        adamw(config.optimizer, policy=policy, decays=decays, orthogonalizers=orthogonalizers, like=params),
        simulate=SIMULATED[precision.simulate],
        options=options,
        params=params,
    ).train_step
    return RunProgram(
        config=config,
        layout=layout,
        choices=chosen,
        model=model,
        accumulate=select("accumulate", train.accumulate, layout.platform),
        num_microbatches=options.num_microbatches,
        training=training,
        init=_init(config, layout, training),
        eval_step=_eval_step(loss(z_loss_weight=0.0), training.options, cast=policy.autocast),
        norms=_state_norms(layout, training),
        digest=jax.jit(make_digest(layout.mesh, training.shardings, shapes=replica_sync.unpadded_shapes)),
    )


def check_simulated(config: Config, layout: Layout) -> None:
    """Raises ValueError for a simulated core on a real one, and for a step in several programs."""
    simulate = config.precision.simulate
    if simulate != "none" and layout.platform == "neuron":
        raise ValueError(
            f"precision.simulate={simulate!r} is not for a Neuron device, which rounds by itself. Set it to 'none', or "
            "run on a CPU or GPU."
        )
    if simulate != "none" and select("accumulate", config.train.accumulate, layout.platform) == "programs":
        raise ValueError(
            f"precision.simulate={simulate!r} needs a step in one program, not train.accumulate='programs'. Set "
            "train.accumulate='scan'."
        )


def model_loss(model: ModelConfig, layout: Layout, *, compute: Any, z_loss_weight: float) -> StagedLoss:
    """Returns (params, batch) -> sum of the losses of the counted targets and their number, fp32 scalars, in stages.

    Over a mesh it is the loss of one device, for use inside the `shard_map` of `replica_sync.ReplicaSync`. `model` has
    no `auto`, and computes in the dtype `compute`. `z_loss_weight` is as in `LossOptions`.
    """
    ctx = collectives.parallel_context(layout)
    options = LossOptions(model.cross_entropy, z_loss_weight, ctx, model.vocab_size)
    checkpoint, remat = None, model.parsed_remat
    if remat.kind == "saved":
        checkpoint = functools.partial(naming.checkpointed, choice=naming.RematChoice(remat.saved), region="whole")

    def cast_and_bind(params: Any) -> Decoder:
        return bind(cast_tree(params, compute), model)

    def embed(decoder: Decoder, batch: Batch) -> jax.Array:
        return decoder.embed_tokens(batch.tokens, ctx=ctx)

    def stage(decoder: Decoder, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        more = {"segment_ids_BT": batch.segment_ids, "checkpoint": checkpoint, "ctx": ctx}
        if ctx.context_degree > 1:
            more["attend"] = attend_over(layout, batch.segment_ids)
        return decoder.apply_layers(x_BTD, batch.positions, **more)

    def loss(decoder: Decoder, x_BTD: jax.Array, batch: Batch) -> SumAndCount:
        return cross_entropy(
            decoder.apply_final_norm(x_BTD),
            head_VD=decoder.gather_head(ctx=ctx),
            targets_BT=batch.targets,
            weights_BT=batch.weights,
            options=options,
        )

    return StagedLoss(bind=cast_and_bind, embed=embed, stage=stage, loss=loss, exchange=layout.pipe_exchange)


def _eval_step(staged: StagedLoss, options: StepOptions, *, cast: str | None) -> jax.stages.Wrapped:
    loss: Callable[..., SumAndCount] = staged if cast is None else autocast(staged, cast)
    if options.accumulate is run_pipeline:
        loss = functools.partial(pipelined_loss, staged, num_microbatches=options.num_microbatches)
    if options.active_replica_sync is not None:
        loss = options.active_replica_sync.loss(loss)

    def eval_step(params: Any, batch: Batch) -> SumAndCount:
        return loss(params, batch)

    return jax.jit(eval_step)


def host_state(program: RunProgram, *, draws: bool = True) -> State:
    """Returns the state before the first step, bitwise as `init` makes it on CPU, without programs for its devices.

    One parameter after another is drawn on the CPU of this process, each layer by itself, in the dtypes of the state.

    Args:
      program: the program of a run, for any platform.
      draws: whether to draw the weights. Otherwise they are the jax.ShapeDtypeStruct of `abstract_state`.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(program.abstract_state)
    placed, indices_by_weight = [target for _, target in leaves], collections.defaultdict[str, list[int]](list)
    for index, (path, target) in enumerate(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if weight := re.fullmatch(r"(?:params|opt_state\.master)\.(.+)", name):
            indices_by_weight[weight[1]].append(index)
        else:
            placed[index] = place_constant(target, program.seed if name == "opt_state.seed" else 0)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for name, indices in indices_by_weight.items() if draws else ():
            targets = [placed[index] for index in indices]
            arrays = place_values(targets, _host_draw(program, name, targets), is_stacked=name.startswith("layers."))
            for index, array in zip(indices, arrays, strict=True):
                placed[index] = array
    return jax.tree.unflatten(structure, placed)


def _host_draw(program: RunProgram, name: str, targets: list[jax.ShapeDtypeStruct]) -> Callable[[int], Any]:
    """Returns layer -> values of the parameter `name` in the dtype of each target, NumPy."""
    model, (first, *rest) = program.config.model, name.split(".")

    @jax.jit
    def draw(seed: jax.Array, layer: jax.Array) -> list[jax.Array]:
        key = _init_key(seed)
        params = {first: init_layer(model, key, layer)} if first == "layers" else init_params(model, key)
        value: Any = functools.reduce(operator.getitem, rest, params[first])
        return [value.astype(target.dtype) for target in targets]

    return lambda layer: jax.device_get(draw(program.seed, np.int32(layer)))


def _init_key(seed: jax.Array) -> jax.Array:
    """Returns the key that `jax.random.key` makes of a uint32 seed, inside a program."""
    high = jnp.zeros((), jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([high, seed, high, seed]), impl="rbg")


def _init(config: Config, layout: Layout, training: TrainStep) -> jax.stages.Wrapped:
    def initial(seed):
        params = pad_vocabulary(init_params(config.model, _init_key(seed)), config.model, layout)
        is_padded = layout.vocab_rows(config.model.vocab_size) > config.model.vocab_size
        for name in [table for table in ("embed", "head") if is_padded and table in params]:
            # padded whole on each device: a pad along a split dimension exchanges borders
            params[name] = jax.lax.with_sharding_constraint(params[name], layout.replicated_sharding())
        return training.init(params, seed=seed)

    return jax.jit(initial, out_shardings=training.shardings)


_L2_PARTS = ("params", "opt_state.master")


def _state_norms(layout: Layout, training: TrainStep) -> jax.stages.Wrapped:
    """Returns the jitted state -> fp32 norm by part: parameters, masters, moments, window of spikes.

    Of `_L2_PARTS` it is the L2 norm, which a step masks on. Of the others it is the mean magnitude, which is finite
    wherever every element is: the L2 norm of squared gradients overflows in a healthy state. A state of which a norm is
    not finite cannot be trained on, and is not worth saving. Each device sums what it holds; then one all-reduce.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, training.shardings)

    def local(state: State) -> dict[str, jax.Array]:
        of_parts = _state_parts(specs)
        sums = {name: _share_of_norm(name, part, of_parts[name], layout) for name, part in _state_parts(state).items()}
        whole = collectives.psum(jnp.stack(list(sums.values())), layout.wide(layout.mesh.axis_names))
        return {name: jnp.sqrt(x) if name in _L2_PARTS else x for name, x in zip(sums, whole, strict=True)}

    def state_norms(state: State) -> dict[str, jax.Array]:
        return jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)(
            state
        )

    return jax.jit(state_norms, out_shardings=layout.replicated_sharding())


def _state_parts(state: State) -> dict[str, Any]:
    """Returns the floating-point parts of the state of a run by name; of their shardings, if it is a state of these."""
    opt_state = state["opt_state"]
    parts = {"opt_state.inner.mu": opt_state["inner"]["mu"], "opt_state.inner.nu": opt_state["inner"]["nu"]}
    parts |= {"opt_state.master": opt_state["master"]} if "master" in opt_state else {}
    parts |= {"params": state["params"]}
    return parts | ({"spikes.values": state["spikes"]["values"]} if "spikes" in state else {})


def _share_of_norm(name: str, part: Any, specs: Any, layout: Layout) -> jax.Array:
    """Returns what this device adds to the sum of squares of a part, or to its mean magnitude."""
    leaves, num_devices = jax.tree.leaves(part), layout.mesh.size
    split_axes = [set(jax.tree.leaves(tuple(spec))) for spec in jax.tree.leaves(specs)]
    num_copies = [layout.size(tuple(set(layout.mesh.axis_names) - axes)) for axes in split_axes]
    num_elements = sum(leaf.size * num_devices // num for leaf, num in zip(leaves, num_copies, strict=True))

    def term(x: jax.Array) -> jax.Array:
        if name in _L2_PARTS:
            return jnp.square(x)
        return jnp.abs(x) / float(num_elements)  # divided one by one, finite elements have a finite sum

    if num_devices == 1 and layout.platform == "cpu":
        return sum_in_blocks(term, leaves)
    share: Any = sum(
        jnp.sum(term(leaf.astype(jnp.float32))) / num for leaf, num in zip(leaves, num_copies, strict=True)
    )
    return share


def state_bytes(state: State) -> int:
    """Returns the bytes of a state, abstract or real, that the fullest device holds."""

    def on_one_device(leaf):
        shape = leaf.shape
        if isinstance(leaf.sharding, NamedSharding):
            shape = leaf.sharding.shard_shape(shape)
        return jnp.dtype(leaf.dtype).itemsize * math.prod(shape)

    return sum(on_one_device(leaf) for leaf in jax.tree.leaves(state))
