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
    found = open_checkpoint(pathlib.Path(folder).expanduser(), dtype=dtype, fuse_qkv=fuse_qkv, strict=strict)
    if found.warning:
        warnings.warn(found.warning, stacklevel=2)
    params = params_of(found)
    for line in found.nonfinite:
        warnings.warn(line, stacklevel=2)
    return found.model, params


def import_checkpoint(found: HFCheckpoint, out: pathlib.Path, *, status: Status | None = None) -> None:
    """Writes the weights folder `out`, holding one layer of one parameter at a time; keeps `status` up to date.

    Raises:
      ValueError: `out` exists already, or a file beside the weights is damaged.
    """
    model, status = found.model, status or Status()
    origin = {"imported_from": str(found.folder.absolute()), "dtypes": sorted({t.code for t in found.tensors.values()})}
    described = describe_hugging_face(found.folder, model)
    with new_weights(out, described, origin=origin, files=companions(found.folder)) as leaves:
        for entry in hf_names.table(model):
            shape = (model.num_layers, *entry.shape) if entry.stacked else entry.shape
            with leaves.leaf(entry.leaf, shape, found.dtype) as write:
                for layer, slab in enumerate(found.slabs(entry)):
                    write(slab[None] if entry.stacked else slab, layer)
                    status.share += slab.size / costs.num_params(model)


def params_of(found: HFCheckpoint) -> dict[str, Any]:
    """Returns the parameters as nested dicts of jax arrays on the default device."""
    arrays = leaves_by_name(found.arrays())
    return nested({name: jnp.asarray(found.read_param(name, array)) for name, array in arrays.items()})
