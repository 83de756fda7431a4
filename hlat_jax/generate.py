"""Continues text with a trained model: static shapes, one compile, sampling on the host.

Owns the sampling rule. Each new token runs the whole prefix again: right for samples during training, slow for long
texts (a key-value cache belongs here when generation becomes a command).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hlat_jax.config import ModelConfig
from hlat_jax.model import bind
from hlat_jax.ops.cross_entropy import logits


def sample_text(params: Any, cfg: ModelConfig, tokenizer: Any, *, prompt: str, num_tokens: int, seed: int = 0) -> str:
    """Returns the prompt and its continuation, sampled at temperature 0.8 until EOS or `num_tokens` new tokens.

    Args:
      params: parameters of a decoder of `cfg`.
      cfg: the model; prompt and continuation are cut to its `max_positions`.
      tokenizer: has encode, decode and eos_id.
      prompt: text to continue, at least one token of it.
      num_tokens: new tokens at most.
      seed: of the host's generator; the same seed gives the same text.
    """
    ids = tokenizer.encode(prompt)[: cfg.max_positions - 1]
    if len(ids) == 0:
        raise ValueError(f"train.sample_prompt={prompt!r} has no token; give a word to start from.")
    length = min(len(ids) + num_tokens, cfg.max_positions)
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    generator = np.random.default_rng(seed)

    sharding = jax.tree.leaves(params)[0].sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    next_logits = make_next_logits(cfg, sharding=everywhere)  # so that every process can read them
    end = length
    for position in range(len(ids), length):
        scores = np.asarray(next_logits(params, tokens, np.int32(position - 1)), np.float64) / 0.8
        probabilities = np.exp(scores - scores.max())
        token = int(generator.choice(len(scores), p=probabilities / probabilities.sum()))
        if token == tokenizer.eos_id:
            end = position
            break
        tokens[0, position] = token
    return tokenizer.decode(tokens[0, :end])


def make_next_logits(cfg: ModelConfig, *, sharding: Any) -> Callable[..., jax.Array]:
    """Returns the jitted (params, tokens [1, T], index of the last token) -> fp32 logits [V] of the next one.

    Args:
      cfg: the model.
      sharding: of the logits; None: where they are made.
    """

    def next_logits(params: Any, tokens_BT: jax.Array, last: jax.Array) -> jax.Array:
        hidden_BTD = bind(params, cfg).hidden_states(tokens_BT)
        last_B1D = jax.lax.dynamic_slice_in_dim(hidden_BTD, last, 1, axis=1)
        return logits(last_B1D, bind(params, cfg).head_VD)[0, 0]

    return jax.jit(next_logits, out_shardings=sharding)
