"""The two jitted programs of generation: `prefill` reads prompts and fills the cache, `decode` adds a token.

Prompts are left-aligned in T slots, so that attention only needs the causal mask. Generated tokens go to slot T and
later slots, the same in every row, so that one slice writes a token to the cache. The slots between a prompt's end and
T are never read. Over a mesh the model is sharded as in the training step. One stage of `pipe` works at a time.

Shapes: B rows, T slots of a prompt, S slots in all, K kv heads, H head, L layers, V vocab.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ModelConfig
from hlat_jax.generate.cache import KVCache, apply_layers_with_cache
from hlat_jax.generate.sampling import Sampling, abstract_sampling, penalize_repetition, sample
from hlat_jax.model import Decoder, abstract_params, bind, param_axes
from hlat_jax.ops.cross_entropy import logits
from hlat_jax.ops.registry import OPS, select_implementations
from hlat_jax.parallel import collectives
from hlat_jax.parallel.collectives import ParallelContext, parallel_context
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.sharding import ROWS, Layout


class GenerationShape(NamedTuple):
    """The static sizes of a generation.

    Attributes:
      num_rows: number of rows B, which the row degree of the layout divides.
      prompt_slots: number of slots of a prompt, T.
      slots: number of all slots, S. Slots from T on hold generated tokens.
      penalized: size of the vocabulary under a repetition penalty, or 0 without one.
    """

    num_rows: int
    prompt_slots: int
    slots: int
    penalized: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptRows:
    """The rows of a batch of prompts, and the options of sampling.

    Attributes:
      lengths: int32 [B], number of tokens of each prompt, from 1 to T.
      numbers: int32 [B], number of each row, which seeds its random draws.
      prompt_slots: int32 scalar, T.
      sampling: result of `Sampling.arguments`.
      seen: bool [B, V], the tokens that a row has had, under a repetition penalty. None without one.
    """

    lengths: Any
    numbers: Any
    prompt_slots: Any
    sampling: Sampling
    seen: Any = None


class DecodeInput(NamedTuple):
    """The newest token of each row, int32 [B], their slot in the cache, an int32 scalar, and the `PromptRows`."""

    tokens: Any
    slot: Any
    rows: PromptRows


def make_prefill(cfg: ModelConfig, layout: Layout, *, slots: int) -> Any:
    """Returns the jitted (params, tokens [B, T], PromptRows) -> (KVCache of `slots`, the next tokens [B])."""
    model = ShardedDecoder(serving(cfg, layout.platform), layout)

    def local(params: Any, tokens_BT: jax.Array, rows: PromptRows) -> tuple[KVCache, jax.Array]:
        decoder, num_tokens = bind(params, model.cfg), tokens_BT.shape[1]
        positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), tokens_BT.shape)
        x_BTD, new = model.apply_layers(decoder, tokens_BT, positions_BT)
        last_B11 = jnp.clip(rows.lengths - 1, 0, num_tokens - 1)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1, mode="clip")
        unused = [(0, 0), (0, 0), (0, slots - num_tokens), (0, 0), (0, 0)]
        cache = jax.tree.map(lambda part: jnp.pad(part, unused), new)
        return cache, model.next_tokens(decoder, x_B1D, rows, positions_B=rows.lengths)

    def prefill(params: Any, tokens_BT: jax.Array, rows: PromptRows) -> tuple[KVCache, jax.Array]:
        return model.shard_map(local, (P(ROWS), _row_specs(rows)), _RESULT_SPECS)(params, tokens_BT, rows)

    return jax.jit(prefill, out_shardings=model.out_shardings)


def make_decode(cfg: ModelConfig, layout: Layout) -> Any:
    """Returns the jitted (params, KVCache, DecodeInput) -> (KVCache with the new keys and values, the next tokens [B]).

    The cache is donated. The parameters may also be the result of `separate_layers`, for a model with
    `layer_loop="unroll"`.
    """
    model = ShardedDecoder(serving(cfg, layout.platform), layout)

    def local(params: Any, cache: KVCache, given: DecodeInput) -> tuple[KVCache, jax.Array]:
        tokens_B, slot, rows = given
        if isinstance(params["layers"], list):
            params = params | {"layers": _stack_layers(params["layers"], model.cfg)}
        decoder = bind(params, model.cfg)
        slot_1S = jax.lax.broadcasted_iota(jnp.int32, (1, cache.keys.shape[2]), 1)
        generated_1S = (slot_1S >= rows.prompt_slots) & (slot_1S < slot)
        visible_BS = (slot_1S < rows.lengths[:, None]) | generated_1S
        positions_B = rows.lengths + slot - rows.prompt_slots
        tokens_B1, positions_B1 = tokens_B[:, None], positions_B[:, None]

        def visible(window: Any) -> jax.Array:
            if window is None:
                return visible_BS
            distance_BS = jnp.where(generated_1S, slot - slot_1S, positions_B1 - slot_1S)
            return visible_BS & (distance_BS < window)

        x_B1D, new = model.apply_layers(decoder, tokens_B1, positions_B1, cache=cache, visible=visible)
        written = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2), cache, new)
        return written, model.next_tokens(decoder, x_B1D, rows, positions_B=positions_B + 1)

    def decode(params: Any, cache: KVCache, given: DecodeInput) -> tuple[KVCache, jax.Array]:
        specs = _CACHE_SPEC, DecodeInput(P(ROWS), P(), _row_specs(given.rows))
        return model.shard_map(local, specs, _RESULT_SPECS)(params, cache, given)

    return jax.jit(decode, out_shardings=model.out_shardings, donate_argnums=(1,))


def has_separate_layers(layout: Layout) -> bool:
    """Returns whether decoding should get the matrices of each layer from `separate_layers`.

    XLA on CPU copies the slice of a stacked matrix that a layer needs. It also fuses a reshape into a product with a
    single row, which then reads the matrix column by column. That takes 8 ms instead of 0.5 ms for 576 x 3,072.
    """
    return layout.platform == "cpu" and layout.mesh.size == 1


def separate_layers(params: Any, cfg: ModelConfig, layout: Layout) -> Any:
    """Returns parameters on CPU with `layers` as a list, and their matrices [contracted, output].

    They share the memory of the stacked parameters if a layer begins at a multiple of 64 bytes.
    """

    def separate(stacked: jax.Array, axes: tuple[str, ...]) -> list[jax.Array]:
        # through an array of its own, which forgets the view: an array with a view cannot be donated without a copy
        alias = jax.make_array_from_single_device_arrays(stacked.shape, stacked.sharding, [stacked])
        layers = np.asarray(alias)
        if len(axes) > 2:
            num_outputs = stacked.shape[-1] if axes[-1] == "embed" else math.prod(stacked.shape[2:])
            layers = layers.reshape(len(layers), -1, num_outputs)
        return [jax.device_put(layer, layout.replicated_sharding()) for layer in layers]

    leaves, structure = jax.tree.flatten(params["layers"])
    axes = structure.flatten_up_to(param_axes(cfg)["layers"])
    layers = [jax.tree.unflatten(structure, layer) for layer in zip(*map(separate, leaves, axes), strict=True)]
    return params | {"layers": layers}


def _stack_layers(layers: list[Any], cfg: ModelConfig) -> Any:
    """Returns what `separate_layers` took apart. Under `layer_loop="unroll"` XLA neither stacks nor takes apart."""

    def stack(declared: jax.ShapeDtypeStruct, *of_layers: jax.Array) -> jax.Array:
        return jnp.stack([layer.reshape(declared.shape[1:]) for layer in of_layers])

    return jax.tree.map(stack, abstract_params(cfg)["layers"], *layers)


def serving(cfg: ModelConfig, platform: str) -> ModelConfig:
    """Returns the model with implementations that support prompts of any length.

    An implementation that was chosen for training and does not support every length is replaced by the choice of
    `auto`.
    """
    refused = {key: op.refusals(platform, None).get(getattr(cfg, key)) for key, op in OPS.items()}
    cfg = dataclasses.replace(cfg, **{key: "auto" for key, reason in refused.items() if reason})
    return select_implementations(cfg, platform)


def prefill_arguments(layout: Layout, shape: GenerationShape) -> tuple[Any, PromptRows]:
    """Returns shapes, dtypes and shardings of the arguments of `prefill` after the parameters."""
    return _replicate((_int32(shape.num_rows, shape.prompt_slots), _abstract_rows(shape)), layout)


def decode_arguments(cfg: ModelConfig, layout: Layout, *, dtype: Any, shape: GenerationShape) -> tuple[Any, Any]:
    """Returns shapes, dtypes and shardings of the arguments of `decode` after the parameters, which have `dtype`."""
    dims = (cfg.num_layers, shape.num_rows, shape.slots, cfg.num_kv_heads, cfg.head_dim)
    part = jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(layout.mesh, _CACHE_SPEC))
    given = DecodeInput(_int32(shape.num_rows), _int32(), _abstract_rows(shape))
    return KVCache(part, part), _replicate(given, layout)


_CACHE_SPEC = P("pipe", ROWS, None, "tensor_kv", None)
_RESULT_SPECS = _CACHE_SPEC, P()


def _row_specs(rows: PromptRows) -> PromptRows:
    return PromptRows(P(ROWS), P(ROWS), P(), P(), None if rows.seen is None else P(ROWS))


@dataclasses.dataclass(frozen=True)
class ShardedDecoder:
    """A model under a layout, for programs without gradients, which are these two and the one in `scoring`."""

    cfg: ModelConfig
    layout: Layout

    @property
    def ctx(self) -> ParallelContext:
        # a single token cannot be split along the sequence
        return dataclasses.replace(parallel_context(self.layout), sequence_parallel=False, context_degree=1)

    @property
    def out_shardings(self) -> tuple[Any, Any]:
        return NamedSharding(self.layout.mesh, _CACHE_SPEC), self.layout.replicated_sharding()

    def shard_map(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns `local`, a function of (params, *args) on one device, as a function over all devices."""
        if self.layout.mesh.size == 1:
            return local
        return ReplicaSync(self.layout, param_axes(self.cfg)).forward(local, in_specs, out_specs)

    def apply_layers(
        self,
        decoder: Decoder,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        cache: KVCache | None = None,
        visible: Callable[[Any], jax.Array] | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Returns [B, T, D] after all layers, on every stage, and the keys and values of this stage's layers.

        Args:
          decoder: decoder bound to this device's parameters.
          tokens_BT: new tokens.
          positions_BT: int32 positions of the tokens.
          cache: the cache of earlier tokens, see `cache.apply_layers_with_cache`.
          visible: function of a window that returns the slots that the new token attends to.
        """
        ctx = self.ctx

        def stage(x_BTD: jax.Array) -> tuple[jax.Array, KVCache]:
            return apply_layers_with_cache(decoder, x_BTD, positions_BT, cache=cache, visible=visible, ctx=ctx)

        y_BTD, new = stage(decoder.embed_tokens(tokens_BT, ctx=ctx))
        if not ctx.pipe:
            return y_BTD, new
        index = collectives.axis_index(ctx.pipe)
        for turn in range(1, self.layout.size(ctx.pipe)):
            y_BTD, of_stage = stage(collectives.psum(jnp.where(index == turn - 1, y_BTD, 0), ctx.pipe))
            new = jax.tree.map(lambda own, old, turn=turn: jnp.where(index == turn, own, old), of_stage, new)
        return collectives.psum(jnp.where(index == self.layout.size(ctx.pipe) - 1, y_BTD, 0), ctx.pipe), new

    def next_tokens(self, decoder: Decoder, x_B1D: jax.Array, rows: PromptRows, *, positions_B: jax.Array) -> jax.Array:
        """Returns the tokens at `positions_B`, of the rows of all devices, on every device."""
        ctx = self.ctx
        head_VD = decoder.gather_head(ctx=ctx)
        # of two axes: with three, XLA on CPU transposes the head before each product
        logits_BV = logits(decoder.apply_final_norm(x_B1D)[:, 0], head_VD)
        logits_BV = collectives.all_gather(logits_BV, ctx.vocab, 1)[:, : self.cfg.vocab_size]  # no padding
        if rows.seen is not None:
            logits_BV = penalize_repetition(logits_BV, rows.seen, rows.sampling.repetition_penalty)
        tokens_B = sample(logits_BV, rows.sampling, draws=(rows.numbers, positions_B))
        return collectives.all_gather(tokens_B, self.layout.wide(ROWS), 0)


def _int32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def _abstract_rows(shape: GenerationShape) -> PromptRows:
    sampling = abstract_sampling(is_penalized=shape.penalized > 0)
    seen = jax.ShapeDtypeStruct((shape.num_rows, shape.penalized), jnp.bool) if shape.penalized else None
    return PromptRows(_int32(shape.num_rows), _int32(shape.num_rows), _int32(), sampling, seen)


def _replicate(tree: Any, layout: Layout) -> Any:
    sharding = layout.replicated_sharding()
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
