"""From a folder of Hugging Face to a weights folder, or into memory. Owns neither format: it joins the two."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.huggingface import names
from hlat_jax.huggingface.reading import Checkpoint
from hlat_jax.safetensors_file import bits
from hlat_jax.weights import nested
from hlat_jax.weights_folder import About, new_weights

_TOKENIZERS = ("tokenizer.model", "tokenizer.json")  # the native one first: it needs no extra


def import_checkpoint(found: Checkpoint, out: pathlib.Path) -> None:
    """Writes the weights folder `out`, holding one layer of one parameter at a time.

    Raises:
      ValueError: `out` is there already.
    """
    model = found.model
    companions = found.companions()
    present = {path.name for path in companions}
    tokenizer = next((name for name in _TOKENIZERS if name in present), "")
    origin = {"imported_from": str(found.folder.absolute()), "dtypes": sorted({t.code for t in found.tensors.values()})}
    with new_weights(out, about=About(model, 0, tokenizer, origin), files=companions) as leaves:
        for entry in names.table(model):
            shape = (model.num_layers, *entry.shape) if entry.stacked else entry.shape
            with leaves.leaf(entry.leaf, shape, found.dtype) as write:
                for layer, slab in enumerate(found.slabs(entry)):
                    write(slab[None] if entry.stacked else slab, layer)


def params_of(found: Checkpoint) -> dict[str, Any]:
    """Returns the parameters as nested dicts of jax arrays on the default device."""
    params = {}
    for entry in names.table(found.model):
        slabs = found.slabs(entry)
        params[entry.leaf] = jnp.asarray(_stacked(slabs, found, entry) if entry.stacked else next(slabs))
    return nested(params)


def _stacked(slabs: Any, found: Checkpoint, entry: names.Entry) -> np.ndarray:
    whole = np.empty((found.model.num_layers, *entry.shape), found.dtype)
    for layer, slab in enumerate(slabs):
        bits(whole)[layer] = bits(slab)
    return whole
