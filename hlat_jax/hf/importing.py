"""Import of a Hugging Face folder, to a weights folder or into memory."""

from __future__ import annotations

import os
import pathlib
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax import cost
from hlat_jax.config import ModelConfig
from hlat_jax.data.build.progress import Status
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.weights import hf_names
from hlat_jax.weights.hf_reading import (
    HFCheckpoint,
    added_tokens,
    begins_texts_with_bos,
    ids_that_end_a_text,
    open_checkpoint,
)
from hlat_jax.weights.safetensors_file import bits
from hlat_jax.weights.trained import nested
from hlat_jax.weights.weights_folder import WeightsInfo, new_weights

_NATIVE, _JSON = "tokenizer.model", "tokenizer.json"  # the native one is preferred: it needs no extra package


def load(
    folder: str | os.PathLike, *, dtype: str = "", fuse_qkv: bool = True, strict: bool = False
) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the model in a Hugging Face folder and its parameters as nested dicts of jax arrays.

    Unknown fields of config.json are named in a `UserWarning`.

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
    return found.model, params_of(found)


def import_checkpoint(found: HFCheckpoint, out: pathlib.Path, *, status: Status | None = None) -> None:
    """Writes the weights folder `out`, holding one layer of one parameter at a time; keeps `status` up to date.

    Raises:
      ValueError: `out` exists already, or a file beside the weights is damaged.
    """
    model, status = found.model, status or Status()
    files = {path.name: path for path in found.companions()}
    origin = {"imported_from": str(found.folder.absolute()), "dtypes": sorted({t.code for t in found.tensors.values()})}
    with_bos, stop_ids = begins_texts_with_bos(found.folder), ids_that_end_a_text(found.folder)
    about = WeightsInfo(model, 0, _tokenizer(found), origin, with_bos, stop_ids)
    with new_weights(out, about=about, files=files) as leaves:
        for entry in hf_names.table(model):
            shape = (model.num_layers, *entry.shape) if entry.stacked else entry.shape
            with leaves.leaf(entry.leaf, shape, found.dtype) as write:
                for layer, slab in enumerate(found.slabs(entry)):
                    write(slab[None] if entry.stacked else slab, layer)
                    status.share += slab.size / cost.num_params(model)


def _tokenizer(found: HFCheckpoint) -> str:
    """Returns the name of the tokenizer file; "" if there is none.

    Tokens that were added to a native one, and that the model has rows for, are only in tokenizer.json.
    """
    present = [name for name in (_NATIVE, _JSON) if (found.folder / name).is_file()]
    if len(present) < 2:
        return "".join(present)
    added = added_tokens(found.folder)
    try:
        known = Tokenizer(str(found.folder / _NATIVE)).has_tokens(added)
    except ValueError:  # of another kind than SentencePiece
        return _JSON
    return _NATIVE if known or max(added) >= found.model.vocab_size else _JSON


def params_of(found: HFCheckpoint) -> dict[str, Any]:
    """Returns the parameters as nested dicts of jax arrays on the default device."""
    params = {}
    for entry in hf_names.table(found.model):
        slabs = found.slabs(entry)
        params[entry.leaf] = jnp.asarray(_stacked(slabs, found, entry) if entry.stacked else next(slabs))
    return nested(params)


def _stacked(slabs: Any, found: HFCheckpoint, entry: hf_names.ParamMapping) -> np.ndarray:
    whole = np.empty((found.model.num_layers, *entry.shape), found.dtype)
    for layer, slab in enumerate(slabs):
        bits(whole)[layer] = bits(slab)
    return whole
