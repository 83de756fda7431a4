"""Export of weights to a folder that transformers loads, compared with its source once it is written.

Holds one stacked parameter at a time, in its stored dtype.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.cli.path_checks import check_new_folder
from hlat_jax.config import ModelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.local_paths import local_path
from hlat_jax.host import process
from hlat_jax.model import abstract_params
from hlat_jax.resolve import export_problem
from hlat_jax.run import costs
from hlat_jax.store import atomic_files
from hlat_jax.store.integrity import seal
from hlat_jax.store.progress import Status
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights import hf_names
from hlat_jax.weights.description import describe_hugging_face
from hlat_jax.weights.hf_config import ARCHITECTURES, architecture, config_json, model_config
from hlat_jax.weights.hf_files import DTYPES, INDEX_FILE, SINGLE_FILE, begins_texts_with_bos, companions
from hlat_jax.weights.hf_reading import as_dtype, open_checkpoint
from hlat_jax.weights.safetensors_file import Writer, bits
from hlat_jax.weights.trained import Weights, leaves_by_name, nest

_NATIVE, _TOKENIZER, _SETTINGS = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
_OF_JSON = "PreTrainedTokenizerFast"
SHARD_BYTES = 5_000_000_000  # of one file, where no tensor is larger


@contextlib.contextmanager
def whole_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder next to `out`, which is renamed to `out` if the body succeeds, otherwise removed.

    Raises:
      ValueError: `out` exists already and is not empty, or cannot be made.
    """
    check_new_folder(out, key="--out")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be created ({error.strerror}). Give another folder.") from None
    try:
        with process.removed_on_interrupt(partial):
            yield partial
            if out.exists():
                out.rmdir()
            os.replace(partial, out)
        atomic_files.sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def seal_all(folder: pathlib.Path) -> None:
    """Writes the checksums of all files of a folder, which are compared when it is opened."""
    seal(folder, [path.name for path in folder.iterdir()])


def with_dtype(content: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the content of a config.json with this dtype, under the key of the file for it."""
    return content | {"dtype" if "dtype" in content else "torch_dtype": dtype}


def export_checkpoint(
    weights: Weights,
    out: pathlib.Path,
    *,
    dtype: str = "",
    shard_bytes: int = SHARD_BYTES,
    status: Status | None = None,
) -> str:
    """Writes the folder `out`, compares it with the weights, bit by bit, and returns its dtype.

    Args:
      weights: weights of a run, or imported weights.
      out: the folder, which must not exist, or be empty.
      dtype: float32 or bfloat16. "" is bfloat16 for a run that began with weights of Hugging Face in bfloat16, else the
        stored dtype.
      shard_bytes: size of the largest file of weights.
      status: progress, which is kept up to date.

    Raises:
      ValueError: `out` exists, or the written folder differs from the weights.
    """
    stored = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(weights.arrays)}
    if not dtype and weights.step and _dtype_of(weights.companions) == "bfloat16":
        dtype = "bfloat16"
    written = np.dtype(jnp.dtype(dtype)) if dtype else max(stored, key=lambda each: each.itemsize)
    status = status or Status()
    with whole_folder(out) as partial:
        _write_companions(weights, partial, dtype=written.name)
        status.text = "writing"
        shapes = hf_names.expected_shapes(weights.model)
        tensors = {name: jax.ShapeDtypeStruct(shape, written) for name, shape in shapes.items()}
        write_tensors(partial, tensors, _tensors(weights), shard_bytes=shard_bytes, status=status)
        status.text, status.share = "comparing", 0.0
        _compare(weights, partial, dtype=written, status=status)
    return written.name


def save(
    params: Any, model: ModelConfig, tokenizer: str | os.PathLike, folder: str | os.PathLike, *, dtype: str = ""
) -> None:
    """Writes parameters to a new folder that transformers loads, and compares it with them, bit by bit.

    Args:
      params: nested dicts of arrays, from `init_params`, `hf.load` or a run. Padding of the vocabulary is left out. One
        array at a time is copied to the host.
      model: the config of the parameters.
      tokenizer: a tokenizer file, or "" for none. If it lies in a Hugging Face folder, the tokenizer, chat template
        and other files next to the weights are copied.
      folder: the folder, which must not exist, or be empty.
      dtype: float32 or bfloat16. "" keeps the dtype of the parameters.

    Raises:
      ValueError: parameters of another model, in another dtype than float32 and bfloat16, or with shards in other
        processes. Also another `dtype`, a model that transformers does not load, or a folder that exists.
    """
    out = local_path(folder, key="folder", use="write")
    if dtype not in ("", *DTYPES):
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}, or '' to keep the dtype.")
    leaves, expected = leaves_by_name(params), leaves_by_name(abstract_params(model))
    for name in sorted(leaves.keys() | expected.keys()):
        theirs, ours = (tree[name].shape if name in tree else "absent" for tree in (leaves, expected))
        is_padded = name in ("embed", "head") and theirs[1:] == ours[1:] and theirs[0] > ours[0]
        if theirs != ours and not is_padded:
            raise ValueError(f"{name} of params is {theirs}, but {ours} in the model. Give the parameters' config.")
    for name, leaf in leaves.items():
        if jnp.dtype(leaf.dtype).name not in DTYPES:
            raise ValueError(f"{name} of params is {leaf.dtype}. Cast it to one of {', '.join(DTYPES)}.")
        if not getattr(leaf, "is_fully_addressable", True):
            raise ValueError(
                f"this process does not hold all of {name} of params. Save a checkpoint with Orbax, and restore it in "
                "one process."
            )
        if leaf.shape != expected[name].shape and np.asarray(leaf)[model.vocab_size :].any():
            raise ValueError(
                f"{name} of params has {leaf.shape[0]} rows, and rows from model.vocab_size={model.vocab_size} on are "
                "not zeros. Give the config of the parameters."
            )
    path = local_path(tokenizer, key="tokenizer") if tokenizer else None
    if path and not path.exists():
        raise ValueError(f"tokenizer={tokenizer} does not exist. Give the model's file or folder, or '' for none.")
    came_with = describe_hugging_face(path, model) if path and path.is_dir() else None
    described = vars(came_with) if came_with else {"tokenizer": str(path or "")}
    weights = Weights(
        **described | {"folder": pathlib.Path("params"), "model": model},
        arrays=nest({name: expected[name].update(dtype=leaf.dtype) for name, leaf in leaves.items()}),
        read_leaf=lambda name, _: np.asarray(leaves[name])[: expected[name].shape[0]],
    )
    export_checkpoint(weights, out, dtype=dtype)


def _dtype_of(companions: pathlib.Path | None) -> str:
    """Returns the dtype that config.json names; "" without one."""
    path = companions and companions / "config.json"
    content = read_json(path) if path and path.is_file() else {}
    return content.get("dtype", content.get("torch_dtype", ""))


def write_tensors(
    folder: pathlib.Path,
    tensors: dict[str, jax.ShapeDtypeStruct],
    values: Iterable[tuple[str, np.ndarray]],
    *,
    shard_bytes: int = SHARD_BYTES,
    status: Status,
) -> None:
    """Writes safetensors in the order of `tensors`, and their index if there are several files.

    `values` has (name, values) of every tensor, in any order and dtype. `status` is kept up to date.
    """
    shards = shards_of(tensors, shard_bytes)
    writers = {file: Writer(folder / file, tensors=part, metadata={"format": "pt"}) for file, part in shards.items()}
    where = {name: file for file, part in shards.items() for name in part}
    num_elements = sum(tensor.size for tensor in tensors.values())
    try:
        for name, tensor in values:
            writers[where[name]].write(name, as_dtype(tensor, tensors[name].dtype))
            status.share += tensor.size / num_elements
            del tensor  # a view, which would keep the whole parameter while the next one is read
    finally:
        for writer in writers.values():
            writer.close()
    for file in shards:
        with open(folder / file, "rb") as written:
            atomic_files.to_disk(written)
    if len(shards) > 1:
        total = sum(tensor.size * tensor.dtype.itemsize for tensor in tensors.values())
        atomic_files.write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})


def _tensors(weights: Weights) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, tensor) for all tensors; one of our parameters is in memory at a time."""
    for entry in hf_names.table(weights.model):
        ours = weights.read(entry.leaf)
        for layer in range(weights.model.num_layers if entry.is_stacked else 1):
            slab = ours[layer] if entry.is_stacked else ours
            for name, tensor in zip(entry.names(layer), entry.split(bits(slab)), strict=True):
                yield name, np.ascontiguousarray(tensor).view(ours.dtype)
        del ours, slab, tensor  # before the next one is read


def shards_of(tensors: dict[str, Any], shard_bytes: int) -> dict[str, dict[str, Any]]:
    """Returns file name, as in transformers -> tensors of the file, in order."""
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if parts[-1] and size + num_bytes > shard_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += num_bytes
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, start=1)}


def _compare(weights: Weights, folder: pathlib.Path, *, dtype: np.dtype, status: Status) -> None:
    """Raises ValueError unless an import of the folder gives the weights, in `dtype`."""
    exported = open_checkpoint(folder)
    if architecture(exported.model) != architecture(weights.model):
        raise ValueError(f"{folder}: config.json describes another model when read back. This is a bug in hlat_jax.")
    for name, ours in _tensors(weights):
        stored = exported.tensors[name]
        if stored.dtype != dtype or not np.array_equal(bits(as_dtype(ours, dtype)), bits(stored.read())):
            raise ValueError(
                f"{folder}: {name} has other values than in {weights.folder} when read back, so nothing was exported. "
                "Check the disk."
            )
        status.share += ours.size / costs.num_params(weights.model)
        del ours  # a view, which would keep the whole parameter while the next one is read


def files_of(tokenizer: Tokenizer) -> dict[str, pathlib.Path]:
    """Returns the files of a tokenizer by their names in transformers, the tokenizer itself first."""
    if not tokenizer.is_json:
        return {_NATIVE: tokenizer.path}
    beside = {name: tokenizer.path.with_name(name) for name in (_SETTINGS, "special_tokens_map.json")}
    return {_TOKENIZER: tokenizer.path} | {name: path for name, path in beside.items() if path.is_file()}


def _write_companions(weights: Weights, folder: pathlib.Path, *, dtype: str) -> None:
    """Writes config.json, the files that came along with weights of Hugging Face, and otherwise the tokenizer."""
    beside, path = weights.companions, folder / "config.json"
    came_along = companions(beside) if beside else {}
    theirs = read_json(came_along[path.name]) if path.name in came_along else {}
    for name, source in came_along.items():
        shutil.copyfile(source, folder / name)
    has_tokenizer = not {_NATIVE, _TOKENIZER}.isdisjoint(came_along)
    ids: dict[str, int | None] = {}
    if weights.tokenizer and (weights.step or not (has_tokenizer and theirs)):
        tokenizer = weights.open_tokenizer()
        ids = {"bos_token_id": tokenizer.bos_id if tokenizer.bos_id >= 0 else None, "eos_token_id": tokenizer.eos_id}
        for name, source in () if has_tokenizer else files_of(tokenizer).items():
            if name not in came_along:
                shutil.copyfile(source, folder / name)
        as_trained = has_tokenizer and begins_texts_with_bos(beside) == weights.begins_with_bos
        if not as_trained and (weights.step or _SETTINGS not in came_along):  # else it was given for an import
            _add_no_tokens(folder, tokenizer)
            if weights.begins_with_bos:
                _add_bos(folder, tokenizer)
    is_theirs = theirs.get("model_type") in ARCHITECTURES and (
        architecture(model_config(theirs, where=str(came_along[path.name]))) == architecture(weights.model)
    )
    if is_theirs:
        content = with_dtype(theirs, dtype)
    else:
        ids |= {key: value for key, value in theirs.items() if key.endswith("_token_id")}
        content = config_json(weights.model, dtype=dtype, token_ids=ids)
    if (content["model_type"] == "llama" or not is_theirs) and (problem := export_problem(weights.model)):
        raise ValueError(f"{weights.folder} cannot be exported: {problem}.")
    atomic_files.write_json(path, content)
    if "generation_config.json" not in came_along:
        generation = {key: content[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in content}
        atomic_files.write_json(folder / "generation_config.json", {"_from_model_config": True} | generation)


def _add_no_tokens(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Changes tokenizer.json and its settings so that no special tokens are added to a text."""
    settings, path = folder / _SETTINGS, folder / _TOKENIZER
    plain = {"tokenizer_class": _OF_JSON} if tokenizer.is_json else tokenizer.transformers_config()
    content_of_settings = read_json(settings) if settings.is_file() else plain
    atomic_files.write_json(settings, content_of_settings | {"add_bos_token": False, "add_eos_token": False})
    if not path.is_file():
        return
    content = read_json(path)
    after = content.get("post_processor")
    content["post_processor"] = _drop_templates(after)
    if content["post_processor"] != after:
        atomic_files.write_json(path, content)


def _add_bos(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Changes tokenizer.json and its settings, which add no tokens, so that BOS begins each text, as in training."""
    bos, path = tokenizer.token(tokenizer.bos_id), folder / _TOKENIZER
    settings = read_json(folder / _SETTINGS)
    atomic_files.write_json(folder / _SETTINGS, settings | {"add_bos_token": True, "bos_token": bos})
    if not path.is_file():
        return
    content = read_json(path)
    texts = [[{"Sequence": {"id": name, "type_id": 0}}] for name in "AB"]
    first = [{"SpecialToken": {"id": bos, "type_id": 0}}]
    added = {
        "type": "TemplateProcessing",
        "single": first + texts[0],
        "pair": first + texts[0] + first + texts[1],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }
    after = content["post_processor"]
    content["post_processor"] = {"type": "Sequence", "processors": [after, added]} if after else added
    atomic_files.write_json(path, content)


def _drop_templates(after: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a post-processor without the parts that add tokens; of the library's kinds only ByteLevel adds none."""
    if after is None or after["type"] == "ByteLevel":
        return after
    left = [part for part in map(_drop_templates, after.get("processors", [])) if part]
    return after | {"processors": left} if left else None
