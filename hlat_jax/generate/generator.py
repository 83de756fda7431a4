"""Continues prompts of token ids with a trained model: for notebooks, for evaluation, for the training loop's samples.

    generator = Generator(cfg, params)
    [ids] = generator([[1, 17, 5]], max_tokens=32, sampling=Sampling(temperature=0.8, seed=1), stop_ids=(eos_id,))

Owns the host's part: the static shapes that prompts are put into, when a row ends, and that the device always has its
next step while the host looks at the last one. What the device does is in `decoding`; text and tokenizers are others'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hlat_jax.config import Config, ModelConfig, ParallelConfig
from hlat_jax.generate.decoding import Rows, Shape, Turn, decode_arguments, make_decode, make_prefill, prefill_arguments
from hlat_jax.generate.sampling import Sampling
from hlat_jax.model import param_axes
from hlat_jax.parallel.sharding import Layout, make_layout

GREEDY = Sampling()
_FEWEST_SLOTS = 64
_PREFIX_TOKENS = 4  # of a sample: BOS, and the mark of a word's beginning, in bytes


class Programs(NamedTuple):
    """`decoding.prefill` and `decoding.decode`, compiled for one shape."""

    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    shape: Shape


class Request(NamedTuple):
    """Prompts as token ids, the most new tokens of each, and the number of each, which names its random numbers."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    numbers: Sequence[int]


class Generator:
    """A model that is ready to generate; compiles its two programs once for each shape."""

    def __init__(
        self,
        cfg: ModelConfig,
        params: Any,
        *,
        layout: Layout | None = None,
        tell: Callable[[str], None] | None = None,
    ):
        """Puts the parameters where they are used.

        Args:
          cfg: the model.
          params: its parameters, as `model.init_params` has them; it computes and caches in their dtype.
          layout: the devices; None: the first one.
          tell: gets a line about each program that is compiled; None: nobody.
        """
        self.cfg = cfg
        self.layout = layout or make_layout(ParallelConfig(), jax.devices()[:1])
        self._tell = tell or (lambda _: None)
        self._compiled: dict[str, Any] = {}
        self.params = jax.device_put(params, param_shardings(cfg, self.layout))

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
        first_number: int = 0,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, without the one of `stop_ids` that ended it; see `stream`."""
        found: list[list[int]] = [[] for _ in prompts]
        options = {"sampling": sampling, "stop_ids": stop_ids, "first_number": first_number}
        for step in self.stream(prompts, max_tokens=max_tokens, **options):
            for ids, token in zip(found, step, strict=True):
                if token is not None and token not in stop_ids:
                    ids.append(token)
        return found

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop_ids: Collection[int] = (),
        first_number: int = 0,
    ) -> Iterator[list[int | None]]:
        """Returns an iterator over steps, each with the new token of every prompt, None where it has ended.

        A row ends with a token of `stop_ids`, after `max_tokens`, or at `model.max_positions`. Row i draws the random
        numbers of (seed, `first_number` + i, place), so what it becomes does not depend on batches.

        Raises:
          ValueError: no prompt, an empty one, one with an id that is no token or without room for a token behind it.
        """
        limits = [self._limit(number, prompt, max_tokens) for number, prompt in enumerate(prompts)]
        if not limits:
            raise ValueError("there is no prompt; give one or more.")
        programs = self._programs(self.shape(prompts, max_tokens=min(max_tokens, self.cfg.max_positions)))
        request = Request(prompts, limits, range(first_number, first_number + len(prompts)))
        return stream(programs, self.params, request, sampling=sampling, stop_ids=stop_ids)

    def shape(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Shape:
        """Returns the shape that prompts are put into: powers of two, so that there are few."""
        prompt_slots = padded_length(max(map(len, prompts)), self.cfg.max_positions)
        slots = prompt_slots + _power_of_two(max_tokens, fewest=_FEWEST_SLOTS)
        return Shape(padded_rows(len(prompts), self.layout.row_degree), prompt_slots, slots)

    def _limit(self, number: int, prompt: Sequence[int], max_tokens: int) -> int:
        """Returns the most tokens that a prompt can be continued by."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1.")
        if not len(prompt):
            raise ValueError(f"prompt {number} has no token; give a word, or the token that begins a document.")
        wrong = [token for token in prompt if not 0 <= token < self.cfg.vocab_size]
        if wrong:
            raise ValueError(
                f"prompt {number} has token {wrong[0]}, and model.vocab_size={self.cfg.vocab_size}: ids lie in "
                f"0..{self.cfg.vocab_size - 1}. Was it encoded by the model's own tokenizer?"
            )
        room = self.cfg.max_positions - len(prompt)
        if room < 1:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; model.max_positions={self.cfg.max_positions} leaves room "
                f"for prompts of at most {self.cfg.max_positions - 1}. Shorten it."
            )
        return min(max_tokens, room)

    def _programs(self, shape: Shape) -> Programs:
        dtype = self.params["embed"].dtype
        prefill = make_prefill(self.cfg, self.layout, slots=shape.slots)
        decode = make_decode(self.cfg, self.layout)
        given = decode_arguments(self.cfg, self.layout, dtype=dtype, shape=shape)
        of_prompts = f"prefill of {shape.num_rows} x {shape.prompt_slots} tokens, {shape.slots} slots"
        return Programs(
            self._compile(of_prompts, prefill, prefill_arguments(self.layout, shape)),
            self._compile(f"decode of {shape.num_rows} x {shape.slots} slots", decode, given),
            shape,
        )

    def _compile(self, name: str, fn: Any, arguments: tuple) -> Any:
        if name not in self._compiled:
            began = time.monotonic()
            self._compiled[name] = fn.trace(self.params, *arguments).lower().compile()
            self._tell(f"compiled {name}, in {time.monotonic() - began:.1f} s")
        return self._compiled[name]


def param_shardings(cfg: ModelConfig, layout: Layout) -> Any:
    """Returns where a layout has the parameters of a model."""
    return jax.tree.map(layout.param_sharding, param_axes(cfg), is_leaf=lambda leaf: isinstance(leaf, tuple))


def stream(
    programs: Programs, params: Any, request: Request, *, sampling: Sampling, stop_ids: Collection[int]
) -> Iterator[list[int | None]]:
    """Yields the new token of every prompt, None where it has ended: `Generator.stream` for programs of one shape.

    Args:
      programs: whose shape holds the request.
      params: as the programs take them.
      request: what to continue.
      sampling: see `Sampling`; checked here.
      stop_ids: tokens that end a row.
    """
    first_slot, left = programs.shape.prompt_slots, list(request.limits)
    tokens_BT, rows = _rows(request, programs.shape, sampling)
    cache, tokens_B = programs.prefill(params, tokens_BT, rows)
    try:
        for slot in range(first_slot, first_slot + max(left)):
            following = None
            if max(left) > 1:  # asked of the device before this token is looked at
                cache, following = programs.decode(params, cache, Turn(tokens_B, np.int32(slot), rows))
            found = np.asarray(tokens_B)[: len(left)].tolist()
            yield [token if more else None for token, more in zip(found, left, strict=True)]
            left = [0 if token in stop_ids else max(more - 1, 0) for token, more in zip(found, left, strict=True)]
            if not any(left):
                return
            tokens_B = following
    finally:
        jax.block_until_ready(cache)  # of several processes none may start another program beside this one


def sample_text(programs: Programs, params: Any, tokenizer: Any, *, config: Config) -> str:
    """Returns `train.sample_prompt` and its continuation, sampled at temperature 0.8 until EOS or `sample_tokens`.

    Args:
      programs: of `sample_shape`.
      params: parameters of a decoder of `config.model`.
      tokenizer: has encode, decode and eos_id.
      config: prompt, longest continuation and seed; the same seed gives the same text.
    """
    train = config.train
    prompt = tokenizer.encode(train.sample_prompt).tolist()[: config.model.max_positions - 1]
    if not prompt:
        raise ValueError(f"train.sample_prompt={train.sample_prompt!r} has no token; give a word to start from.")
    limit = min(train.sample_tokens, config.model.max_positions - len(prompt))
    sampling = Sampling(temperature=0.8, seed=train.seed)
    if limit == 0:
        return tokenizer.decode(np.asarray(prompt))
    steps = stream(programs, params, Request([prompt], [limit], [0]), sampling=sampling, stop_ids=(tokenizer.eos_id,))
    return tokenizer.decode(np.asarray(prompt + [token for [token] in steps if token != tokenizer.eos_id]))


def sample_shape(config: Config, layout: Layout) -> Shape:
    """Returns the one shape that samples of a run are made in.

    No tokenizer is asked, so that the programs are known before there is one: a token of the prompt is taken for a
    byte.
    """
    prompt_slots = padded_length(len(config.train.sample_prompt.encode()) + _PREFIX_TOKENS, config.model.max_positions)
    slots = prompt_slots + _power_of_two(config.train.sample_tokens, fewest=_FEWEST_SLOTS)
    return Shape(layout.row_degree, prompt_slots, slots)


def _rows(request: Request, shape: Shape, sampling: Sampling) -> tuple[np.ndarray, Rows]:
    """Returns tokens [B, T] and what is known of the rows; those without a prompt are one token that nobody reads."""
    tokens_BT = np.zeros((shape.num_rows, shape.prompt_slots), np.int32)
    lengths_B, numbers_B = np.ones(shape.num_rows, np.int32), np.zeros(shape.num_rows, np.int32)
    for row, prompt in enumerate(request.prompts):
        tokens_BT[row, : len(prompt)] = prompt
        lengths_B[row], numbers_B[row] = len(prompt), request.numbers[row]
    return tokens_BT, Rows(lengths_B, numbers_B, np.int32(shape.prompt_slots), sampling.arguments())


def padded_length(num_tokens: int, max_positions: int) -> int:
    """Returns the places that rows of at most `num_tokens` are put into."""
    return min(_power_of_two(num_tokens, fewest=_FEWEST_SLOTS), max_positions)


def padded_rows(num_rows: int, row_degree: int) -> int:
    """Returns the rows of a batch that `num_rows` are put into: a power of two on each replica."""
    return row_degree * _power_of_two(-(-num_rows // row_degree))


def _power_of_two(number: int, *, fewest: int = 1) -> int:
    return max(fewest, 1 << max(number - 1, 0).bit_length())
