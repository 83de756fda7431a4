"""Import of a Hugging Face folder, to a weights folder or into memory."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

import jax.numpy as jnp

from hlat_jax.config import ModelConfig
from hlat_jax.run import costs
from hlat_jax.store.progress import Status
from hlat_jax.weights import hf_names
from hlat_jax.weights.description import describe_hugging_face
from hlat_jax.weights.hf_files import companions
from hlat_jax.weights.hf_reading import HFCheckpoint, open_checkpoint
from hlat_jax.weights.trained import leaves_by_name, nested
from hlat_jax.weights.weights_folder import new_weights


def load(
    folder: str | os.PathLike, *, dtype: str = "", fuse_qkv: bool = True, strict: bool = False
) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model in a Hugging Face folder and its parameters as nested dicts of jax arrays.

    Unknown fields of config.json, and tensors that are not finite, are named in a `UserWarning`.

    Args:
      folder: with config.json and safetensors.
      dtype: of the parameters; "": the dtype of the files, with float16 as float32.
      fuse_qkv: as ModelConfig's.
      strict: raise for unknown fields of config.json.

    Raises:
      ValueError: see `weights.hf_reading.open_checkpoint`.
    """
    checkpoint = open_checkpoint(pathlib.Path(folder).expanduser(), dtype=dtype, fuse_qkv=fuse_qkv, strict=strict)
    if checkpoint.warning:
        warnings.warn(checkpoint.warning, stacklevel=2)
    params = params_of(checkpoint)
    for line in checkpoint.nonfinite:
        warnings.warn(line, stacklevel=2)
    return checkpoint.model, params


def import_checkpoint(checkpoint: HFCheckpoint, out: pathlib.Path, *, status: Status | None = None) -> None:
    """Writes the weights folder `out`, holding one layer of one parameter at a time; keeps `status` up to date.

    Raises:
      ValueError: `out` exists already, or a file beside the weights is damaged.
    """
    model, status = checkpoint.model, status or Status()
    origin = {
        "imported_from": str(checkpoint.folder.absolute()),
        "dtypes": sorted({t.code for t in checkpoint.tensors.values()}),
    }
    described = describe_hugging_face(checkpoint.folder, model)
    with new_weights(out, described, origin=origin, files=companions(checkpoint.folder)) as leaves:
        for entry in hf_names.table(model):
            shape = (model.num_layers, *entry.shape) if entry.stacked else entry.shape
            with leaves.leaf(entry.leaf, shape, checkpoint.dtype) as write:
                for layer, slab in enumerate(checkpoint.slabs(entry)):
                    write(slab[None] if entry.stacked else slab, layer)
                    status.share += slab.size / costs.num_params(model)


def params_of(checkpoint: HFCheckpoint) -> dict[str, Any]:
    """Returns the parameters as nested dicts of jax arrays on the default device."""
    arrays = leaves_by_name(checkpoint.arrays())
    return nested({name: jnp.asarray(checkpoint.read_param(name, array)) for name, array in arrays.items()})
