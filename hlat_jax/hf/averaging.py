"""The mean of several checkpoints, parameter by parameter, as in HLAT-70B's last step (arXiv 2404.10630, table IV)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from hlat_jax.hf.exporting import export_checkpoint, seal_all, whole_folder
from hlat_jax.run.resume import settings_of_weights
from hlat_jax.store.config_diff import differences
from hlat_jax.store.progress import Status
from hlat_jax.weights.trained import Weights, leaves_by_name, open_weights

_BLOCK = 1 << 22  # elements: 16 MiB of fp32


def average(paths: Sequence[str | os.PathLike], out: pathlib.Path, *, status: Status | None = None) -> list[Weights]:
    """Writes the mean of checkpoints as the Hugging Face folder `out`, in their dtype, and returns its inputs.

    If a checkpoint has master weights, they are averaged. Means are fp32, and exact if all values of an element are
    equal. So the mean of a checkpoint with itself is bitwise itself. It holds two stacked parameters at a time, in
    fp32, and keeps `status` up to date.

    Raises:
      ValueError: fewer than two checkpoints, different models, dtypes or tokenizers (the message names which), or as
        for `export_checkpoint`.
    """
    if len(paths) < 2:
        raise ValueError(f"{len(paths)} checkpoint to average. Give two or more.")
    averaged = [open_weights(path, masters=True) for path in paths]
    for other in averaged[1:]:
        _require_alike(averaged[0], other)

    def mean_of(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = averaged[0].read(name).astype(np.float32)
        for count, other in enumerate(averaged[1:], start=2):
            _include(mean, other.read(name), count=count)
        return mean.astype(leaf.dtype, copy=False)

    step = max(each.step for each in averaged)
    with whole_folder(out) as partial:
        mean = dataclasses.replace(averaged[0], step=step, read_leaf=mean_of)
        dtypes = [np.dtype(leaf.dtype) for leaf in jax.tree.leaves(mean.arrays)]
        widest = max(dtypes, key=lambda each: each.itemsize).name
        export_checkpoint(mean, partial, dtype=widest, status=status)
        seal_all(partial)
    return averaged


def _include(mean: np.ndarray, values: np.ndarray, *, count: int) -> None:
    """Updates the mean of `count - 1` arrays to that of `count`, in place and in blocks.

    A running mean, not a divided sum: equal values stay equal, bitwise, for any count.
    """
    mean, values = mean.reshape(-1), values.reshape(-1)
    for start in range(0, mean.size, _BLOCK):
        part = mean[start : start + _BLOCK]
        difference = values[start : start + _BLOCK].astype(np.float32) - part
        # where equal, not even -0 + 0
        np.add(part, difference / np.float32(count), out=part, where=difference != 0)


def _require_alike(first: Weights, other: Weights) -> None:
    def comparable(weights: Weights) -> dict[str, str]:
        arrays = leaves_by_name(weights.arrays)
        model = settings_of_weights(weights.model)
        dtypes = {f"dtype of {name}": str(leaf.dtype) for name, leaf in arrays.items()}
        with contextlib.suppress(ValueError):  # without a tokenizer there is nothing to compare
            model["tokenizer sha256"] = weights.open_tokenizer().sha256
        return model | dtypes

    others = differences(comparable(first), comparable(other))
    if others:
        lines = "\n  ".join(
            line.replace("in the checkpoint", "in the first").replace(" now", " there") for line in others
        )
        raise ValueError(f"{first.folder} and {other.folder} cannot be averaged:\n  {lines}")
