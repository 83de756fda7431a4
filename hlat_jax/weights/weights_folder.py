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
from typing import Any

import jax
import numpy as np

from hlat_jax.host import process
from hlat_jax.store import atomic_files
from hlat_jax.store.integrity import seal
from hlat_jax.weights.description import FORMAT, Description
from hlat_jax.weights.path_checks import FILES, WEIGHTS_FILE
from hlat_jax.weights.safetensors_file import DTYPES, Writer, read_header

_ARRAYS = "arrays"


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
def new_weights(
    out: pathlib.Path, described: Description, *, origin: dict[str, Any], files: Mapping[str, pathlib.Path]
) -> Iterator[ParamWriter]:
    """Yields the writer of the parameters; when the body succeeds, checksums are written and the folder gets its name.

    Args:
      out: a path that does not exist, or an empty folder.
      described: the weights; the file name of their tokenizer is a key of `files`.
      origin: where the weights come from; informative.
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
            "format": FORMAT,
            "model": dataclasses.asdict(described.model),
            "step": described.step,
            "tokenizer": pathlib.Path(described.tokenizer).name,
            "begins_with_bos": described.begins_with_bos,
            "stop_ids": described.stop_ids,
            "origin": origin,
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


def stored_leaves(folder: pathlib.Path) -> dict[str, Any]:
    """Returns name of parameter -> `safetensors_file.StoredTensor`."""
    leaves: dict[str, Any] = {}
    for path in sorted((folder / _ARRAYS).iterdir()):
        for name, stored in read_header(path).items():
            if name in leaves or stored.code not in DTYPES:
                fault = "twice" if name in leaves else f"in {stored.code}, which is not one of {', '.join(DTYPES)}"
                raise ValueError(f"{path}: tensor {repr(name)[:100]} occurs {fault}; import or average it again.")
            leaves[name] = stored
    return leaves


def read_leaf(stored: Any, abstract: jax.ShapeDtypeStruct) -> Any:
    """Returns a parameter as NumPy array, or, where `abstract` has a sharding, as a jax array."""
    if abstract.sharding is None:
        return stored.read().astype(abstract.dtype, copy=False)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index
        return stored.read(rows=rows)[(slice(None), *others)].astype(abstract.dtype, copy=False)

    return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)
