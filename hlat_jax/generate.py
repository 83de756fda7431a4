"""Continues text with a trained model: static shapes, one compile, sampling on the host.

Owns the sampling rule. Each new token runs the whole prefix again: right for samples during training, slow for long
texts (a key-value cache belongs here when generation becomes a command).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hlat_jax.config import Config, ModelConfig
from hlat_jax.model import bind
from hlat_jax.ops.cross_entropy import logits

_PREFIX_TOKENS = 4  # BOS, and the mark of a word's beginning, in bytes
_LENGTH_STEP = 128


def sample_text(next_logits: Callable[..., jax.Array], params: Any, tokenizer: Any, *, config: Config) -> str:
    """Returns `train.sample_prompt` and its continuation, sampled at temperature 0.8 until EOS or `sample_tokens`.

    Args:
      next_logits: as `make_next_logits` gives it, for `sample_length` tokens.
      params: parameters of a decoder of `config.model`.
      tokenizer: has encode, decode and eos_id.
      config: prompt, longest continuation, and the seed of the host's generator; the same seed gives the same text.
    """
    train, length = config.train, sample_length(config)
    ids = tokenizer.encode(train.sample_prompt)[: length - 1]
    if len(ids) == 0:
        raise ValueError(f"train.sample_prompt={train.sample_prompt!r} has no token; give a word to start from.")
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    generator = np.random.default_rng(train.seed)

    end = min(len(ids) + train.sample_tokens, length)
    for position in range(len(ids), end):
        scores = np.asarray(next_logits(params, tokens, np.int32(position - 1)), np.float64) / 0.8
        probabilities = np.exp(scores - scores.max())
        token = int(generator.choice(len(scores), p=probabilities / probabilities.sum()))
        if token == tokenizer.eos_id:
            end = position
            break
        tokens[0, position] = token
    return tokenizer.decode(tokens[0, :end])


def sample_length(config: Config) -> int:
    """Returns the tokens of the one shape that a sample is made in: prompt and continuation, what is longer is cut.

    No tokenizer is asked, so that the program is known before there is one: a token of the prompt is taken for a byte.
    Zeros behind the last token change nothing before them.
    """
    most = len(config.train.sample_prompt.encode()) + _PREFIX_TOKENS + config.train.sample_tokens
    return min(-(-most // _LENGTH_STEP) * _LENGTH_STEP, config.model.max_positions)


def make_next_logits(cfg: ModelConfig, *, sharding: Any, platform: str | None = None) -> Callable[..., jax.Array]:
    """Returns the jitted (params, tokens [1, T], index of the last token) -> fp32 logits [V] of the next one.

    Args:
      cfg: the model.
      sharding: of the logits; None: where they are made.
      platform: of the devices; None: the default backend's.
    """

    def next_logits(params: Any, tokens_BT: jax.Array, last: jax.Array) -> jax.Array:
        decoder = bind(params, cfg, platform=platform)
        hidden_BTD = decoder.hidden_states(tokens_BT)
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BTD, last, 1, axis=1)
        return logits(last_B1D, decoder.head_VD)[0, 0]

    return jax.jit(next_logits, out_shardings=sharding)
