"""Reads a Hugging Face folder of the Llama family, and checks every tensor's name, shape and dtype."""

from __future__ import annotations

import dataclasses
import functools
import operator
import pathlib
from collections.abc import Iterable
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.config import ModelConfig, count_text
from hlat_jax.model import abstract_params
from hlat_jax.store.array_reading import Bounds, read_parts
from hlat_jax.store.integrity import INTEGRITY_FILE
from hlat_jax.store.typed_json import check_name, read_json
from hlat_jax.weights import hf_names, path_checks
from hlat_jax.weights.hf_config import model_config, unknown_fields
from hlat_jax.weights.hf_files import INDEX_FILE, SINGLE_FILE
from hlat_jax.weights.safetensors_file import DTYPES, StoredTensor, bits, read_header

_SHOWN = 8  # names in an error


@dataclasses.dataclass(frozen=True)
class HFCheckpoint:
    """A folder with tensors that match its config.json.

    Attributes:
      folder: the folder.
      model: model of its config.json.
      tensors: the tensors, by name.
      dtype: dtype of our parameters.
      warning: a line on the unknown fields of config.json, or "" without any, and for a folder that was imported.
    """

    folder: pathlib.Path
    model: ModelConfig
    tensors: dict[str, StoredTensor]
    dtype: np.dtype
    warning: str

    def arrays(self) -> Any:
        """Returns shape and dtype of our parameters, as nested dicts."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.dtype), abstract_params(self.model))

    def read_param(self, name: str, abstract: jax.ShapeDtypeStruct) -> Any:
        """Returns a parameter by its path as a NumPy array, or as a jax array if `abstract` has a sharding.

        It reads the layers that this process needs, each once, for any number of its devices.
        """
        [entry] = [entry for entry in hf_names.table(self.model) if entry.leaf == name]
        stored = functools.reduce(operator.getitem, name.split("."), self.arrays())

        def fill(parts: dict[Bounds, np.ndarray]) -> None:
            for layer in range(self.model.num_layers if entry.is_stacked else 1):
                wanted = {box: part for box, part in parts.items() if not entry.is_stacked or layer in range(*box[0])}
                if not wanted:
                    continue
                tensors = [as_dtype(self.tensors[name].read(), self.dtype) for name in entry.names(layer)]
                slab = as_dtype(entry.join([bits(tensor) for tensor in tensors]).view(self.dtype), abstract.dtype)
                for limits, part in wanted.items():
                    rows = [slice(*limit) for limit in limits[entry.is_stacked :]]
                    bits(part[layer - limits[0][0]] if entry.is_stacked else part)[...] = bits(slab)[tuple(rows)]

        return read_parts(abstract, fill, stored_shape=stored.shape)


class _Index(TypedDict):
    weight_map: dict[str, str]


def open_checkpoint(folder: pathlib.Path, *, dtype: str = "", fuse_qkv: bool = True) -> HFCheckpoint:
    """Returns a folder's model and tensors, and reads no weights.

    Args:
      folder: a folder with config.json and safetensors, one file or several with an index.
      dtype: dtype of our parameters. "" keeps the dtype of the tensors, with float16 as float32, which is exact.
      fuse_qkv: `fuse_qkv` of the ModelConfig.

    Raises:
      ValueError: a tensor that is missing, left over, or of another shape or dtype, or an unsupported architecture.
    """
    path = folder / "config.json"
    path_checks.check_hugging_face(folder)
    content = read_json(path)
    model = model_config(content, where=str(path), fuse_qkv=fuse_qkv)
    unknown = unknown_fields(content)
    is_imported = (folder / INTEGRITY_FILE).is_file()  # its import has warned
    warning = f"{path} has {count_text(len(unknown), 'unknown field')}, assumed to change no result: {_some(unknown)}."
    tensors = {name: stored for name, stored in _tensors(folder).items() if not name.endswith(hf_names.DERIVED)}
    for name, stored in tensors.items():
        if stored.code not in DTYPES:
            raise ValueError(f"{folder}: tensor {_some([name])} is {stored.code}. Supported are {', '.join(DTYPES)}.")
    head = tensors.pop(hf_names.HEAD, None) if model.tie_embeddings else None
    expected = hf_names.expected_shapes(model)
    shapes = {name: stored.shape for name, stored in tensors.items()}
    wrong = [
        f"{_some([name])} is {_shape_text(shapes, name)}, config.json makes it {_shape_text(expected, name)}"
        for name in dict.fromkeys([*expected, *shapes])
        if shapes.get(name) != expected.get(name)
    ]
    if wrong:
        raise ValueError(
            f"{folder}: {count_text(len(wrong), 'difference')} between the tensors and config.json:\n  "
            + "\n  ".join(wrong[:_SHOWN])
        )
    kept = _dtype(tensors, dtype, folder=folder)
    embedding = tensors[hf_names.EMBEDDING]
    if head and not (head.code == embedding.code and np.array_equal(bits(embedding.read()), bits(head.read()))):
        raise ValueError(
            f"{head.path}: {hf_names.HEAD} differs from {hf_names.EMBEDDING}, but config.json has "
            "tie_word_embeddings=true. Set it to false to keep both."
        )
    return HFCheckpoint(folder, model, tensors, kept, warning if unknown and not is_imported else "")


def as_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the values rounded to a dtype, to nearest, or the same array if the dtype is equal."""
    return values if values.dtype == dtype else values.astype(dtype)


def _tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns every tensor of the folder; the index and the files must agree."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return read_header(folder / SINGLE_FILE)
        others = sorted(path.name for path in folder.glob("*.bin")) or ["no weights"]
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, only {_some(others)}. Fetch the safetensors or save "
            "the model again with transformers, which writes them."
        )
    where = read_json(index, kind=_Index)["weight_map"]
    tensors: dict[str, StoredTensor] = {}
    files = {check_name(name, f"{index}: weight_map[{repr(tensor)[:100]}]") for tensor, name in where.items()}
    for name in sorted(files):
        if not (folder / name).is_file():
            raise ValueError(f"{index} names the file {name}, which is missing. Fetch it.")
        tensors |= read_header(folder / name)
    actual = {name: stored.path.name for name, stored in tensors.items()}
    misplaced = {name for name, _ in actual.items() ^ where.items()}
    if misplaced:
        raise ValueError(f"{index} and its files disagree on {_some(sorted(misplaced))}. Fetch them again.")
    return tensors


def _dtype(tensors: dict[str, StoredTensor], asked: str, *, folder: pathlib.Path) -> np.dtype:
    by_code: dict[str, list[str]] = {}
    for name, stored in tensors.items():
        by_code.setdefault(stored.code, []).append(name)
    if asked:
        return np.dtype(jnp.dtype(asked))
    if len(by_code) > 1:
        kinds = ", ".join(f"{len(those)} {code} such as {those[0]}" for code, those in sorted(by_code.items()))
        raise ValueError(f"{folder} mixes dtypes ({kinds}). Import it with --dtype=float32 or --dtype=bfloat16.")
    [code] = by_code
    return DTYPES["F32"] if code == "F16" else DTYPES[code]


def _shape_text(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = (name if name.isprintable() and len(name) < 100 else repr(name)[:100] for name in names[:_SHOWN])
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
