"""Imports a Hugging Face folder, into a checked copy with checksums, or into memory."""

from __future__ import annotations

import os
import pathlib
import shutil
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.config import ModelConfig
from hlat_jax.hf.exporting import seal_all, whole_folder, with_dtype, write_tensors
from hlat_jax.store import atomic_files
from hlat_jax.store.bucket import local_copy
from hlat_jax.store.progress import Status
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights.description import describe_hugging_face
from hlat_jax.weights.hf_files import companions
from hlat_jax.weights.hf_reading import HFCheckpoint, open_checkpoint
from hlat_jax.weights.trained import leaves_by_name, nest


def load(folder: str | os.PathLike, *, dtype: str = "", fuse_qkv: bool = True) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model in a Hugging Face folder and its parameters as nested dicts of jax arrays.

    A `UserWarning` names unknown fields of config.json.

    Args:
      folder: a folder with config.json and safetensors.
      dtype: dtype of the parameters. "" keeps the dtype of the files, with float16 as float32.
      fuse_qkv: `fuse_qkv` of the ModelConfig.

    Raises:
      ValueError: see `weights.hf_reading.open_checkpoint`.
    """
    checkpoint = open_checkpoint(local_copy(folder, key="folder"), dtype=dtype, fuse_qkv=fuse_qkv)
    if checkpoint.warning:
        warnings.warn(checkpoint.warning, stacklevel=2)
    arrays = leaves_by_name(checkpoint.arrays())
    params = nest({name: jnp.asarray(checkpoint.read_param(name, array)) for name, array in arrays.items()})
    return checkpoint.model, params


def import_checkpoint(checkpoint: HFCheckpoint, out: pathlib.Path, *, status: Status | None = None) -> None:
    """Writes the Hugging Face folder `out`, with checksums, a tensor at a time, and keeps `status` up to date.

    Raises:
      ValueError: `out` exists already, or a file next to the weights is damaged.
    """
    describe_hugging_face(checkpoint.folder, checkpoint.model)
    dtype = checkpoint.dtype
    tensors = {name: jax.ShapeDtypeStruct(stored.shape, dtype) for name, stored in checkpoint.tensors.items()}
    values = ((name, stored.read()) for name, stored in checkpoint.tensors.items())
    with whole_folder(out) as partial:
        for name, path in companions(checkpoint.folder).items():
            shutil.copyfile(path, partial / name)
        content = read_json(partial / "config.json")
        atomic_files.write_json(partial / "config.json", with_dtype(content, dtype.name))
        write_tensors(partial, tensors, values, status=status or Status())
        seal_all(partial)
