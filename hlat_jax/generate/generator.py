"""Generation from prompts of token ids, for notebooks, evaluation and the samples of a training run.

    generator = Generator(cfg, params)
    [ids] = generator([[1, 17, 5]], max_tokens=32, sampling=Sampling(temperature=0.8, seed=1), stop_ids=(eos_id,))

This is the host side: it pads prompts to static shapes, decides when a row ends, and dispatches each step before it
reads the tokens of the previous one. The programs on the device are in `decoding`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import abc
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.config import Config, ModelConfig, ParallelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.cache import KVCache
from hlat_jax.generate.decoding import (
    DecodeInput,
    GenerationShape,
    PromptRows,
    decode_arguments,
    has_separate_layers,
    make_decode,
    make_prefill,
    prefill_arguments,
    separate_layers,
)
from hlat_jax.generate.sampling import Sampling
from hlat_jax.model import pad_vocabulary, param_axes
from hlat_jax.parallel.sharding import Layout, make_layout

GREEDY = Sampling()
_FEWEST_SLOTS = 64
_PREFIX_TOKENS = 4  # of a sample: BOS, and the marker of a word's beginning, in bytes


class Programs(NamedTuple):
    """The programs of `make_prefill` (or `prefill_by`) and `make_decode` of `decoding`, compiled for one shape."""

    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    shape: GenerationShape


class Generator:
    """A model with its parameters on the devices. It compiles its two programs once for each shape."""

    def __init__(self, cfg: ModelConfig, params: Any, *, layout: Layout | None = None):
        """Puts the parameters on the devices.

        Args:
          cfg: the model.
          params: parameters as `model.init_params` returns them. The model computes and caches in their dtype.
          layout: the devices, by default the first one.
        """
        self.cfg = cfg
        self.layout = layout or make_layout(ParallelConfig(), jax.devices()[:1])
        self._compiled: dict[Any, Any] = {}
        self.params = place_params(params, cfg, self.layout)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
        first_number: int = 0,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, without the token of `stop_ids` that ended it, see `stream`."""
        steps = self.stream(
            prompts,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            first_number=first_number,
        )
        ids, _ = collect_tokens(steps, num_prompts=len(prompts), stop_ids=stop_ids)
        return ids

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
        first_number: int = 0,
    ) -> abc.Generator[list[int | None], None, None]:
        """Returns an iterator over steps, each with the new token of every prompt, or None after its end.

        A row ends with a token of `stop_ids`, after `max_tokens`, or at `model.max_positions`. Row i draws the random
        numbers of (seed, `first_number` + i, position), so its text does not depend on the batches of prompts.

        Args:
          prompts: token ids of each prompt.
          max_tokens: most new tokens of a prompt.
          sampling: options of sampling.
          stop_ids: tokens that end a row.
          first_number: number of the first prompt.

        Raises:
          ValueError: no prompts, or one that is empty, has an id outside the vocabulary, or leaves no room.
        """
        limits = [self._limit(index, prompt, max_tokens) for index, prompt in enumerate(prompts)]
        if not limits:
            raise ValueError("prompts is empty. Give at least one.")
        separate = has_separate_layers(self.layout)
        of_decode = separate_layers(self.params, self.cfg, self.layout) if separate else self.params
        shape = self.shape(prompts, max_tokens=min(max_tokens, self.cfg.max_positions))
        shape = shape._replace(penalized=self.cfg.vocab_size if sampling.repetition_penalty != 1 else 0)
        programs = self._programs(shape, of_decode, loop="unroll" if separate else self.cfg.layer_loop)
        return stream(
            programs,
            self.params,
            prompts,
            limits=limits,
            first_number=first_number,
            sampling=sampling,
            stop_ids=stop_ids,
            of_decode=of_decode,
        )

    def shape(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> GenerationShape:
        """Returns the shape that prompts are padded to, with powers of two, so that few programs are compiled."""
        prompt_slots = padded_length(max(map(len, prompts)), self.cfg.max_positions)
        slots = prompt_slots + _power_of_two(max_tokens, fewest=_FEWEST_SLOTS)
        replicas = self.layout.row_degree
        return GenerationShape(replicas * _power_of_two(-(-len(prompts) // replicas)), prompt_slots, slots)

    def _limit(self, index: int, prompt: Sequence[int], max_tokens: int) -> int:
        """Returns the maximum of new tokens of a prompt."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1.")
        if not 0 < len(prompt) < self.cfg.max_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, but model.max_positions={self.cfg.max_positions} leaves "
                f"room for prompts of 1 to {self.cfg.max_positions - 1}."
            )
        if not 0 <= min(prompt) <= max(prompt) < self.cfg.vocab_size:
            raise ValueError(
                f"prompt {index} has ids from {min(prompt)} to {max(prompt)}, but they must be below model.vocab_size="
                f"{self.cfg.vocab_size}. Encode it with the model's own tokenizer."
            )
        return min(max_tokens, self.cfg.max_positions - len(prompt))

    def _programs(self, shape: GenerationShape, of_decode: Any, *, loop: str) -> Programs:
        if shape not in self._compiled:
            prefill = make_prefill(self.cfg, self.layout, slots=shape.slots)
            decode = make_decode(dataclasses.replace(self.cfg, layer_loop=loop), self.layout)
            given = decode_arguments(self.cfg, self.layout, dtype=self.params["embed"].dtype, shape=shape)
            self._compiled[shape] = Programs(
                prefill.trace(self.params, *prefill_arguments(self.layout, shape)).lower().compile(),
                decode.trace(of_decode, *given).lower().compile(),
                shape,
            )
        return self._compiled[shape]


def collect_tokens(
    steps: abc.Generator[list[int | None], None, None],
    *,
    num_prompts: int,
    stop_ids: Collection[int],
    is_stopped: Callable[[int, list[int]], bool] = lambda _row, _ids: False,
) -> tuple[list[list[int]], list[str]]:
    """Returns the new tokens of each prompt, without the token that ended it, and its end, eos, stop or length.

    Args:
      steps: result of `Generator.stream`, which is closed as soon as every prompt has ended.
      num_prompts: number of prompts.
      stop_ids: tokens that end a row.
      is_stopped: function (row, its tokens so far) -> whether the row ends here.
    """
    ids: list[list[int]] = [[] for _ in range(num_prompts)]
    ended = [""] * num_prompts
    with contextlib.closing(steps):
        for step in steps:
            for row in (row for row, reason in enumerate(ended) if not reason):
                token = step[row]
                if token is None:
                    ended[row] = "length"
                elif token in stop_ids:
                    ended[row] = "eos"
                else:
                    ids[row].append(token)
                    ended[row] = "stop" if is_stopped(row, ids[row]) else ""
            if all(ended):
                break
    return ids, [reason or "length" for reason in ended]


def param_shardings(cfg: ModelConfig, layout: Layout) -> Any:
    """Returns the shardings of a model's parameters under a layout."""
    return jax.tree.map(layout.param_sharding, param_axes(cfg), is_leaf=lambda leaf: isinstance(leaf, tuple))


def place_params(params: Any, cfg: ModelConfig, layout: Layout) -> Any:
    """Returns parameters on the devices of a layout, with the rows that pad the vocabulary."""
    return jax.device_put(pad_vocabulary(params, cfg, layout), param_shardings(cfg, layout))


def stream(
    programs: Programs,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    first_number: int,
    sampling: Sampling,
    stop_ids: Collection[int],
    of_decode: Any = None,
) -> abc.Generator[list[int | None], None, None]:
    """Yields the new token of every prompt, or None after its end, like `Generator.stream`, with compiled programs.

    Args:
      programs: programs of a shape that the prompts fit.
      params: parameters for prefill.
      prompts: token ids of each prompt.
      limits: the maximum of new tokens of each prompt.
      first_number: the number of the first prompt. Numbers seed the random draws.
      sampling: options of sampling, which are checked here.
      stop_ids: tokens that end a row.
      of_decode: parameters for decode, by default `params`.
    """
    of_decode = params if of_decode is None else of_decode
    first_slot, left = programs.shape.prompt_slots, list(limits)
    tokens_BT, rows = _rows(prompts, programs.shape, sampling, first_number=first_number)
    cache, tokens_B = programs.prefill(params, tokens_BT, rows)
    try:
        for slot in range(first_slot, first_slot + max(left)):
            following = None
            if max(left) > 1:  # dispatched before this token is read
                if rows.seen is not None:
                    rows = dataclasses.replace(rows, seen=_add_seen(rows.seen, tokens_B))
                cache, following = programs.decode(of_decode, cache, DecodeInput(tokens_B, np.int32(slot), rows))
            tokens = np.asarray(tokens_B)[: len(left)].tolist()
            yield [token if more else None for token, more in zip(tokens, left, strict=True)]
            left = [0 if token in stop_ids else max(more - 1, 0) for token, more in zip(tokens, left, strict=True)]
            if not any(left):
                return
            tokens_B = following
    finally:
        jax.block_until_ready(cache)  # programs over several processes must not overlap


def prefill_by(decode: Callable[..., Any], cache: KVCache) -> Callable[..., Any]:
    """Returns a prefill for one prompt that reads it token by token with `decode`.

    So a run that prints short samples has one program less to compile.

    Args:
      decode: the compiled program of `make_decode`.
      cache: shapes, dtypes and shardings of the cache of `decode`.
    """

    def zeros(part: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            part.shape, part.sharding, lambda index: np.zeros(part.sharding.shard_shape(part.shape), part.dtype)
        )

    def prefill(params: Any, tokens_BT: np.ndarray, rows: PromptRows) -> tuple[KVCache, jax.Array]:
        own: KVCache = jax.tree.map(zeros, cache)
        tokens_B: Any = None
        read = dataclasses.replace(rows, lengths=np.zeros_like(rows.lengths), prompt_slots=np.int32(0))
        for slot in range(rows.lengths.max()):
            own, tokens_B = decode(params, own, DecodeInput(tokens_BT[:, slot], np.int32(slot), read))
            jax.block_until_ready(tokens_B)  # on CPUs, many programs at once may wait for each other in collectives
        return own, tokens_B

    return prefill


@jax.jit
def _add_seen(seen_BV: jax.Array, tokens_B: jax.Array) -> jax.Array:
    return seen_BV | (jax.lax.broadcasted_iota(jnp.int32, seen_BV.shape, 1) == tokens_B[:, None])


def sample_text(programs: Programs, params: Any, tokenizer: Tokenizer, *, config: Config) -> str:
    """Returns `train.sample_prompt` and its continuation, sampled at temperature 0.8 until EOS or `sample_tokens`.

    The programs have the shape `sample_shape`. The same `train.seed` gives the same text.
    """
    train = config.train
    first = [tokenizer.bos_id] if config.data.prepend_bos else []
    prompt = [*first, *tokenizer.encode(train.sample_prompt).tolist()][: config.model.max_positions - 1]
    if not prompt:
        raise ValueError(f"train.sample_prompt={train.sample_prompt!r} encodes to no tokens. Give at least a word.")
    limit = min(train.sample_tokens, config.model.max_positions - len(prompt))
    sampling = Sampling(temperature=0.8, seed=train.seed)
    if limit == 0:
        return tokenizer.decode(np.asarray(prompt))
    stop_ids = (tokenizer.eos_id,)
    steps = stream(programs, params, [prompt], limits=[limit], first_number=0, sampling=sampling, stop_ids=stop_ids)
    return tokenizer.decode(np.asarray(prompt + [token for [token] in steps if token != tokenizer.eos_id]))


def sample_shape(config: Config, layout: Layout) -> GenerationShape:
    """Returns the shape of the samples of a run.

    It does not depend on the tokenizer, which is opened later. Every byte of the prompt counts as a token.
    """
    prompt_slots = padded_length(len(config.train.sample_prompt.encode()) + _PREFIX_TOKENS, config.model.max_positions)
    slots = prompt_slots + _power_of_two(config.train.sample_tokens, fewest=_FEWEST_SLOTS)
    return GenerationShape(layout.row_degree, prompt_slots, slots)


def _rows(
    prompts: Sequence[Sequence[int]], shape: GenerationShape, sampling: Sampling, *, first_number: int
) -> tuple[np.ndarray, PromptRows]:
    """Returns tokens [B, T] and the rows; those without a prompt have one token, whose results are ignored."""
    tokens_BT = np.zeros((shape.num_rows, shape.prompt_slots), np.int32)
    lengths_B, numbers_B = np.ones(shape.num_rows, np.int32), np.zeros(shape.num_rows, np.int32)
    seen_BV = np.zeros((shape.num_rows, shape.penalized), bool) if shape.penalized else None
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        lengths_B[row], numbers_B[row] = len(prompt), first_number + row
        if seen_BV is not None:
            seen_BV[row, list(prompt)] = True
    return tokens_BT, PromptRows(lengths_B, numbers_B, np.int32(shape.prompt_slots), sampling.arguments(), seen_BV)


def padded_length(num_tokens: int, max_positions: int) -> int:
    """Returns the length that rows of at most `num_tokens` are padded to."""
    return min(_power_of_two(num_tokens, fewest=_FEWEST_SLOTS), max_positions)


def _power_of_two(value: int, *, fewest: int = 1) -> int:
    return max(fewest, 1 << max(value - 1, 0).bit_length())
