"""Starts a new run from the weights of `train.init_from`: at step 0, with a new optimizer state."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax

from hlat_jax.config import Config, ModelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.ops.registry import OPS
from hlat_jax.store.config_diff import differences
from hlat_jax.weights.init_model import OF_FUNCTION, same_ids
from hlat_jax.weights.trained import Weights, open_weights

# Keys that may differ from the model of the weights: implementations, initialization, and the sequence length.
_FREE = (
    *("max_positions", "init_std", "depth_scaled_init", "layer_loop", "remat", "ops_table", "allow_nki_on_trn1"),
    *OPS,
)
_LLAMA3_SCALING = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions")


def open_start(config: Config, tokenizer: Tokenizer, *, given: Collection[str] = ()) -> Weights:
    """Opens the weights of `train.init_from`, fp32 masters if it has them; reads no arrays yet.

    Args:
      config: of the run.
      tokenizer: of the run.
      given: keys of the command line; of these, the ones in `OF_FUNCTION` may differ from the model of the weights.

    Raises:
      ValueError: missing, damaged, or of another model or vocabulary; the message lists the differences.
    """
    path = config.train.init_from
    try:
        weights = open_weights(path, masters=True, fuse_qkv=config.model.fuse_qkv)
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from None
    changed = {key: getattr(config.model, key) for key in OF_FUNCTION if f"model.{key}" in given}
    expected = dataclasses.replace(weights.model, **changed)
    others = differences(settings_of_weights(expected), settings_of_weights(config.model))
    if others:
        lines = "\n  ".join(others)
        raise ValueError(
            f"train.init_from={path} holds the weights of another model:\n  {lines}\nSet these keys to the values "
            "in the checkpoint, or leave them out; for model.fuse_qkv=False, import the weights with --nofuse_qkv."
        )
    if weights.tokenizer:
        _require_same_vocabulary(weights, tokenizer)
    return weights


def begin(weights: Weights, state: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a new run's state with these weights, and the record of where they come from.

    Dtypes and shardings are those of the randomly initialized weights, which are deleted.
    """

    def read(drawn: Any) -> Any:
        [dtype] = {leaf.dtype for leaf in jax.tree.leaves(drawn)}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, drawn)
        for leaf in jax.tree.leaves(drawn):
            leaf.delete()  # before the weights that replace them are read
        return weights.restore(shardings, dtype=dtype)

    state = state | {"params": read(state["params"])}
    if "master" in state["opt_state"]:
        state["opt_state"] = state["opt_state"] | {"master": read(state["opt_state"]["master"])}
    print(f"weights          from {weights.folder}, step {weights.step}; the optimizer state is new")
    return state, {"folder": str(weights.folder), "step": weights.step}


def settings_of_weights(model: ModelConfig) -> dict[str, Any]:
    """Returns the settings on which the weights of a model depend, by path: all but those in `_FREE`."""
    free = _FREE if model.rope_scaling == "llama3" else _FREE + _LLAMA3_SCALING
    return {f"model.{key}": value for key, value in vars(model).items() if key not in free}


def _require_same_vocabulary(weights: Weights, tokenizer: Tokenizer) -> None:
    theirs = weights.open_tokenizer()
    if not same_ids(theirs, tokenizer):
        raise ValueError(
            f"data.tokenizer={tokenizer.path} is not the tokenizer of train.init_from, {theirs.path}: their ids "
            f"differ. Set data.tokenizer={theirs.path}."
        )
