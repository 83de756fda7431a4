"""The two programs of generation: `prefill` reads prompts and fills a cache of keys and values, `decode` adds a token.

Owns the cache and where each token of a row lies in it. Prompts stand at the left of T slots, so that attention needs
no mask beside the causal one; what is generated goes to slot T and those after it, the same ones in every row, so that
a token is written to the cache by one slice. The slots between a prompt's end and T hold nothing that is ever read.
Over a mesh it is the model of the training step: heads and vocabulary split over tensor, rows over data and fsdp,
matrices gathered over fsdp for use, and layers over pipe, where one stage works at a time.

Shapes: B rows, T slots of a prompt, S slots in all, K kv heads, H head, L layers, V vocab.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ModelConfig
from hlat_jax.generate.sampling import abstract_sampling, sample
from hlat_jax.model import Decoder, KeysValues, Past, bind, param_axes, select_implementations
from hlat_jax.ops.cross_entropy import logits
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.collectives import Shards, gathered, position, shards, summed
from hlat_jax.parallel.replica_sync import Spread
from hlat_jax.parallel.sharding import ROWS, Layout


class Shape(NamedTuple):
    """The static sizes of a generation.

    Attributes:
      num_rows: B; the row degree of the layout divides it.
      prompt_slots: T.
      slots: S; from T on they hold what is generated.
    """

    num_rows: int
    prompt_slots: int
    slots: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys (rotated) and values [L, B, S, K, H] of all layers, in the dtype of the parameters: the policy's."""

    keys: Any
    values: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of the rows, and how their tokens are chosen.

    Attributes:
      lengths: int32 [B], tokens of each prompt, from 1 to T.
      numbers: int32 [B]; rows of different numbers draw different random numbers.
      prompt_slots: int32 scalar, T.
      sampling: as `Sampling.arguments` gives it.
    """

    lengths: Any
    numbers: Any
    prompt_slots: Any
    sampling: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """The newest token of each row, int32 [B], the slot where they belong, an int32 scalar, and the rows."""

    tokens: Any
    slot: Any
    rows: Any


def make_prefill(cfg: ModelConfig, layout: Layout, *, slots: int) -> Callable[..., tuple[Cache, jax.Array]]:
    """Returns the jitted (params, tokens [B, T], Rows) -> (Cache of `slots`, the next token of each row [B]).

    Args:
      cfg: the model.
      layout: where it runs. Without a mesh of several devices, everything is on one.
      slots: S.
    """
    run = Run(serving(cfg, layout.platform), layout)

    def local(params: Any, tokens_BT: jax.Array, rows: Rows) -> tuple[Cache, jax.Array]:
        decoder, num_tokens = bind(params, run.cfg), tokens_BT.shape[1]
        positions_BT = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32), tokens_BT.shape)
        x_BTD, present = run.blocks(decoder, tokens_BT, positions_BT, past=None)
        last_B11 = jnp.clip(rows.lengths - 1, 0, num_tokens - 1)[:, None, None]
        x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1, mode="clip")
        unused = [(0, 0), (0, 0), (0, slots - num_tokens), (0, 0), (0, 0)]
        cache = Cache(*(jnp.pad(part, unused) for part in present))
        return cache, run.next_tokens(decoder, x_B1D, rows, places_B=rows.lengths)

    def prefill(params: Any, tokens_BT: jax.Array, rows: Rows) -> tuple[Cache, jax.Array]:
        return run.everywhere(local, (P(ROWS), _ROW_SPECS), _RESULT_SPECS)(params, tokens_BT, rows)

    return jax.jit(prefill, out_shardings=run.out_shardings)


def make_decode(cfg: ModelConfig, layout: Layout) -> Callable[..., tuple[Cache, jax.Array]]:
    """Returns the jitted (params, Cache, Turn) -> (Cache with the keys and values of that turn, the next tokens [B]).

    The cache is donated. Arguments as `make_prefill`.
    """
    run = Run(serving(cfg, layout.platform), layout)

    def local(params: Any, cache: Cache, turn: Turn) -> tuple[Cache, jax.Array]:
        decoder, rows = bind(params, run.cfg), turn.rows
        slot_1S = jax.lax.broadcasted_iota(jnp.int32, (1, cache.keys.shape[2]), 1)
        generated_1S = (slot_1S >= rows.prompt_slots) & (slot_1S < turn.slot)
        past = Past(cache.keys, cache.values, (slot_1S < rows.lengths[:, None]) | generated_1S)
        positions_B = rows.lengths + turn.slot - rows.prompt_slots
        x_B1D, present = run.blocks(decoder, turn.tokens[:, None], positions_B[:, None], past=past)
        written = (
            jax.lax.dynamic_update_slice_in_dim(old, new, turn.slot, axis=2)
            for old, new in zip((cache.keys, cache.values), present, strict=True)
        )
        return Cache(*written), run.next_tokens(decoder, x_B1D, rows, places_B=positions_B + 1)

    def decode(params: Any, cache: Cache, turn: Turn) -> tuple[Cache, jax.Array]:
        specs = _CACHE_SPEC, Turn(P(ROWS), P(), _ROW_SPECS)
        return run.everywhere(local, specs, _RESULT_SPECS)(params, cache, turn)

    return jax.jit(decode, out_shardings=run.out_shardings, donate_argnums=(1,))


def serving(cfg: ModelConfig, platform: str) -> ModelConfig:
    """Returns the model with implementations that serve prompts of any length.

    A kernel named for training's rows that refuses some others gives way to what `auto` stands for.
    """
    refused = {key: op.refusals(platform, None).get(getattr(cfg, key)) for key, op in OPS.items()}
    cfg = dataclasses.replace(cfg, **{key: "auto" for key, why in refused.items() if why})
    return select_implementations(cfg, platform)


def prefill_arguments(layout: Layout, shape: Shape) -> tuple[Any, Rows]:
    """Returns shapes, dtypes and shardings of what `prefill` takes after the parameters.

    All but the cache come from the host, the same from every process.
    """
    return _replicated((_words(shape.num_rows, shape.prompt_slots), _abstract_rows(shape)), layout)


def decode_arguments(cfg: ModelConfig, layout: Layout, *, dtype: Any, shape: Shape) -> tuple[Cache, Turn]:
    """Returns the same of what `decode` takes after the parameters, which are of `dtype`."""
    dims = (cfg.num_layers, shape.num_rows, shape.slots, cfg.num_kv_heads, cfg.head_dim)
    part = jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(layout.mesh, _CACHE_SPEC))
    turn = Turn(_words(shape.num_rows), _words(), _abstract_rows(shape))
    return Cache(part, part), _replicated(turn, layout)


_CACHE_SPEC = P("pipe", ROWS, None, "tensor_kv", None)
_ROW_SPECS = Rows(P(ROWS), P(ROWS), P(), P())
_RESULT_SPECS = _CACHE_SPEC, P()


@dataclasses.dataclass(frozen=True)
class Run:
    """What programs without gradients share, these two and that of `scoring`: a model and where it lies."""

    cfg: ModelConfig
    layout: Layout

    @property
    def seat(self) -> Shards:
        # a single token cannot be split along the sequence
        return dataclasses.replace(shards(self.layout), sequence_parallel=False)

    @property
    def out_shardings(self) -> tuple[Any, Any]:
        return NamedSharding(self.layout.mesh, _CACHE_SPEC), self.layout.replicated()

    def everywhere(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (params, *args) of all devices from the same of one."""
        if self.layout.mesh.size == 1:
            return local
        return Spread(self.layout, param_axes(self.cfg)).forward(local, in_specs, out_specs)

    def blocks(
        self, decoder: Decoder, tokens_BT: jax.Array, positions_BT: jax.Array, *, past: Past | None
    ) -> tuple[jax.Array, KeysValues]:
        """Returns [B, T, D] after all layers, on every stage, and the keys and values of this stage's."""
        seat = self.seat
        x_BTD = decoder.embedded(tokens_BT, shards=seat)
        y_BTD, present = decoder.caching_blocks(x_BTD, positions_BT, past=past, shards=seat)
        if not seat.pipe:
            return y_BTD, present
        stage = position(seat.pipe)
        for turn in range(1, self.layout.size(seat.pipe)):
            x_BTD = summed(jnp.where(stage == turn - 1, y_BTD, 0), seat.pipe)
            y_BTD, found = decoder.caching_blocks(x_BTD, positions_BT, past=past, shards=seat)
            kept = (jnp.where(stage == turn, new, old) for new, old in zip(found, present, strict=True))
            present = tuple(kept)
        return summed(jnp.where(stage == self.layout.size(seat.pipe) - 1, y_BTD, 0), seat.pipe), present

    def next_tokens(self, decoder: Decoder, x_B1D: jax.Array, rows: Rows, *, places_B: jax.Array) -> jax.Array:
        """Returns the tokens at `places_B`, of the rows of all devices, on every device."""
        seat = self.seat
        head_VD = seat.weight(decoder.head_VD, ("vocab", "embed"))
        logits_BV = gathered(logits(decoder.normed(x_B1D), head_VD)[:, 0], seat.vocab, 1)
        tokens_B = sample(logits_BV, rows.sampling, draws=(rows.numbers, places_B))
        return gathered(tokens_B, self.layout.wide(ROWS), 0)


def _words(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def _abstract_rows(shape: Shape) -> Rows:
    return Rows(_words(shape.num_rows), _words(shape.num_rows), _words(), abstract_sampling())


def _replicated(tree: Any, layout: Layout) -> Any:
    everywhere = layout.replicated()
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), tree)
