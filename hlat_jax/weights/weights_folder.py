"""A folder of weights without a run, written by an import or an average; commands take it as a checkpoint.

    weights.json         model, tokenizer, origin
    arrays/NAME.safetensors   one parameter each, stacked over layers
    files/               config.json, generation_config.json, tokenizer files
    integrity.json       sizes and checksums of all of these

The folder appears atomically, under its final name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NotRequired, TypedDict

import jax
import numpy as np

from hlat_jax.config import ModelConfig
from hlat_jax.host import process
from hlat_jax.store import atomic_files
from hlat_jax.store.integrity import damage, seal
from hlat_jax.store.typed_json import Count, check_name, checked, read_json
from hlat_jax.weights.path_checks import FILES, WEIGHTS_FILE
from hlat_jax.weights.safetensors_file import DTYPES, Writer, read_header

_ARRAYS, _FORMAT = "arrays", 1


class _About(TypedDict):
    model: dict
    step: Count
    tokenizer: str
    begins_with_bos: NotRequired[bool | None]
    stop_ids: NotRequired[list[int]]


@dataclasses.dataclass(frozen=True)
class WeightsInfo:
    """The content of weights.json.

    Attributes:
      model: of the parameters.
      step: number of updates.
      tokenizer: name in `files/`; "" without one.
      origin: where the weights come from; informative.
      begins_with_bos: texts begin with BOS; None: not recorded, by an earlier version.
      stop_ids: tokens that end a generated text, besides the tokenizer's EOS.
    """

    model: ModelConfig
    step: int
    tokenizer: str
    origin: dict[str, Any]
    begins_with_bos: bool | None = False
    stop_ids: tuple[int, ...] = ()


class ParamWriter:
    """Writes the parameters of a new folder, one file each, in parts along their first axis."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    @contextlib.contextmanager
    def leaf(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Any]:
        """Yields a function of (values, first row) that writes a part of the parameter `name`."""
        abstract = jax.ShapeDtypeStruct(shape, dtype)
        writer = Writer(self._folder / f"{name}.safetensors", tensors={name: abstract}, metadata={})
        try:
            yield lambda values, first_row=0: writer.write(name, values, first_row=first_row)
        finally:
            writer.close()


@contextlib.contextmanager
def new_weights(out: pathlib.Path, *, about: WeightsInfo, files: Mapping[str, pathlib.Path]) -> Iterator[ParamWriter]:
    """Yields the writer of the parameters; when the body succeeds, checksums are written and the folder gets its name.

    Args:
      out: must not exist, or be empty.
      about: content of weights.json.
      files: name in `files/` -> file to copy there.

    Raises:
      ValueError: `out` exists already, or cannot be made.
    """
    with whole_folder(out) as partial:
        (partial / _ARRAYS).mkdir()
        (partial / FILES).mkdir()
        for name, path in files.items():
            shutil.copyfile(path, partial / FILES / name)
        yield ParamWriter(partial / _ARRAYS)
        content = {
            "format": _FORMAT,
            "model": dataclasses.asdict(about.model),
            "step": about.step,
            "tokenizer": about.tokenizer,
            "begins_with_bos": about.begins_with_bos,
            "stop_ids": about.stop_ids,
            "origin": about.origin,
        }
        atomic_files.write_json(partial / WEIGHTS_FILE, content)
        seal(partial, [str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()])


@contextlib.contextmanager
def whole_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder beside `out`; it is renamed to `out` when the body succeeds, otherwise removed.

    Raises:
      ValueError: `out` exists already and is not empty, or cannot be made.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out={out} exists already; give another folder, or remove it.")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be created: {error.strerror}; give another folder.") from None
    try:
        with process.removed_on_interrupt(partial):
            yield partial
            if out.exists():
                out.rmdir()
            os.replace(partial, out)
        atomic_files.sync_folder(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def is_weights(path: pathlib.Path) -> bool:
    """Returns whether a folder is a weights folder."""
    return (path / WEIGHTS_FILE).is_file()


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the content of weights.json, after comparing all files with their checksums.

    Raises:
      ValueError: damage, or an unknown layout version.
    """
    why = damage(folder, deep=True)
    if why:
        raise ValueError(f"{folder} is damaged ({why}); import or average it again.")
    path = folder / WEIGHTS_FILE
    about = read_json(path)
    if about.get("format") != _FORMAT:
        raise ValueError(
            f"{folder} has layout version {about.get('format')}; this version of hlat_jax reads version {_FORMAT}."
        )
    checked(about, _About, where=str(path))
    if about["tokenizer"]:
        check_name(about["tokenizer"], f"{path}: tokenizer")
    return {"begins_with_bos": None, "stop_ids": []} | about  # earlier versions wrote neither


def stored_leaves(folder: pathlib.Path) -> dict[str, Any]:
    """Returns name of parameter -> `safetensors_file.StoredTensor`."""
    found: dict[str, Any] = {}
    for path in sorted((folder / _ARRAYS).iterdir()):
        for name, stored in read_header(path).items():
            if name in found or stored.code not in DTYPES:
                fault = "twice" if name in found else f"in {stored.code}, which is not one of {', '.join(DTYPES)}"
                raise ValueError(f"{path}: tensor {repr(name)[:100]} occurs {fault}; import or average it again.")
            found[name] = stored
    return found


def read_leaf(stored: Any, abstract: jax.ShapeDtypeStruct) -> Any:
    """Returns a parameter as NumPy array, or, where `abstract` has a sharding, as a jax array."""
    if abstract.sharding is None:
        return stored.read().astype(abstract.dtype, copy=False)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index
        return stored.read(rows=rows)[(slice(None), *others)].astype(abstract.dtype, copy=False)

    return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)
