"""A trained model on the devices that it is used on, as the command lines of `generate` and `evaluate` ask for it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from absl import flags

from hlat_jax.config import ModelConfig, ParallelConfig

_DEGREES = {"pipe": "Pipeline stages", "data": "Replicas", "fsdp": "Shards of each matrix", "tensor": "Tensor degree"}


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """Parameters in place, with what they belong to.

    Attributes:
      model: their config.
      params: jax arrays where `layout` has them, in the dtype that is stored.
      layout: of the devices.
      tokenizer: a `data.tokenizer.Tokenizer`, the one that they were trained with.
      folder: where they were read from.
      described: a line about them.
    """

    model: ModelConfig
    params: Any
    layout: Any
    tokenizer: Any
    folder: pathlib.Path
    described: str


def define(values: flags.FlagValues) -> None:
    """Declares the flags that `trained_model` reads."""
    flags.DEFINE_string(
        "checkpoint", "", "Run folder, one of its checkpoints, or an imported folder.", flag_values=values
    )
    for axis, what in _DEGREES.items():
        flags.DEFINE_integer(
            f"parallel.{axis}", 1, f"{what} of the mesh; -1: as there are devices for.", flag_values=values
        )


def trained_model(values: flags.FlagValues) -> TrainedModel:
    """Returns the model of a command line, on its mesh; imports JAX.

    Raises:
      ValueError: no --checkpoint, none that is whole, or degrees that do not fit model and devices.
    """
    if not values.checkpoint:
        raise ValueError("--checkpoint=FOLDER is missing; give a run folder such as runs/tiny, or a checkpoint.")
    import jax

    from hlat_jax.degrees import layout_of_model
    from hlat_jax.generator import param_shardings
    from hlat_jax.weights import open_weights

    weights = open_weights(values.checkpoint)
    tokenizer = weights.open_tokenizer()
    parallel = ParallelConfig(**{axis: values[f"parallel.{axis}"].value for axis in _DEGREES})
    layout = layout_of_model(weights.model, parallel, jax.devices())
    params = weights.restore(param_shardings(weights.model, layout))
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in layout.degrees.items())
    dtype = params["embed"].dtype
    described = f"weights          {weights.folder}, step {weights.step}, {dtype}; {mesh}, {layout.platform}"
    return TrainedModel(weights.model, params, layout, tokenizer, weights.folder, described)
