"""A folder of weights alone: what an import or an average leaves, for every command that asks for a checkpoint.

    weights.json         model, tokenizer, origin
    arrays/NAME.safetensors   one parameter each, stacked over layers: any library of that format reads it
    files/               what came along: config.json, generation_config.json, tokenizer
    integrity.json       sizes and sums of all of these

Owns this layout. It is there whole or not at all.
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

from hlat_jax.config import ModelConfig
from hlat_jax.host import process
from hlat_jax.store import atomic_files
from hlat_jax.store.integrity import damage, seal
from hlat_jax.weights.safetensors_file import DTYPES, Writer, read_header

WEIGHTS_FILE, FILES = "weights.json", "files"
_ARRAYS, _FORMAT = "arrays", 1


@dataclasses.dataclass(frozen=True)
class WeightsInfo:
    """What a weights folder says of itself.

    Attributes:
      model: of the parameters.
      step: updates they have seen.
      tokenizer: name in `files/`; "" when there is none.
      origin: where they come from, for people.
      begins_with_bos: texts begin with BOS; None: a folder that was written before this was noted does not say.
      stop_ids: tokens that end a generated text, beside the tokenizer's EOS.
    """

    model: ModelConfig
    step: int
    tokenizer: str
    origin: dict[str, Any]
    begins_with_bos: bool | None = False
    stop_ids: tuple[int, ...] = ()


class ParamWriter:
    """Writes the parameters of a folder under way, one file each, in parts along their first axis."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    @contextlib.contextmanager
    def leaf(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Any]:
        """Gives a function of (values, first row) that writes a part of the parameter `name`."""
        abstract = jax.ShapeDtypeStruct(shape, dtype)
        writer = Writer(self._folder / f"{name}.safetensors", tensors={name: abstract}, metadata={})
        try:
            yield lambda values, first_row=0: writer.write(name, values, first_row=first_row)
        finally:
            writer.close()


@contextlib.contextmanager
def new_weights(out: pathlib.Path, *, about: WeightsInfo, files: Mapping[str, pathlib.Path]) -> Iterator[ParamWriter]:
    """Gives what writes the parameters; when the body ends well, the folder is summed and gets its name.

    Args:
      out: must not be there, or be empty.
      about: what the folder says of itself.
      files: name in `files/` -> what is copied there.

    Raises:
      ValueError: `out` is there already, or cannot be made.
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
    """Gives an empty folder beside `out` that takes its name when the body ends well, and is removed when not.

    Raises:
      ValueError: `out` is there already and not empty, or cannot be made.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"--out={out} is there already; give another folder, or remove it.")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--out={out} cannot be made: {error.strerror}.") from None
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
    """Returns whether a folder is one of weights."""
    return (path / WEIGHTS_FILE).is_file()


def read_about(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the content of weights.json once every file was compared with its sum.

    Raises:
      ValueError: damage, or a layout that this version does not know.
    """
    why = damage(folder, deep=True)
    if why:
        raise ValueError(f"{folder} is damaged ({why}); make it again.")
    path = folder / WEIGHTS_FILE
    about = atomic_files.read_json(path)
    if about.get("format") != _FORMAT:
        raise ValueError(f"{folder} has layout {about.get('format')}; this version of hlat_jax reads {_FORMAT}.")
    about = {"begins_with_bos": None, "stop_ids": []} | about  # folders of before these two were noted have neither
    kinds = {"model": dict, "step": int, "tokenizer": str, "begins_with_bos": bool | None, "stop_ids": list}
    for key, kind in kinds.items():
        if key not in about or not isinstance(about[key], kind):
            what = getattr(kind, "__name__", kind)
            raise ValueError(f"{path}: {key}={repr(about.get(key))[:100]} must be {what}; make the folder again.")
    if any(type(token) is not int for token in about["stop_ids"]):
        raise ValueError(f"{path}: stop_ids={repr(about['stop_ids'])[:100]} must be token ids; make the folder again.")
    if about["tokenizer"]:
        atomic_files.check_name(about["tokenizer"], f"{path}: tokenizer")
    return about


def stored_leaves(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the `safetensors_file.StoredTensor` of every parameter by its name."""
    found: dict[str, Any] = {}
    for path in sorted((folder / _ARRAYS).iterdir()):
        for name, stored in read_header(path).items():
            if name in found or stored.code not in DTYPES:
                fault = "twice" if name in found else f"in {stored.code}, which is not one of {', '.join(DTYPES)}"
                raise ValueError(f"{path}: tensor {repr(name)[:100]} is there {fault}; make the folder again.")
            found[name] = stored
    return found


def read_leaf(stored: Any, abstract: jax.ShapeDtypeStruct) -> Any:
    """Returns a parameter in NumPy, or, where `abstract` has a sharding, in a jax array of what this process holds."""
    if abstract.sharding is None:
        return stored.read().astype(abstract.dtype, copy=False)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        rows, *others = index
        return stored.read(rows=rows)[(slice(None), *others)].astype(abstract.dtype, copy=False)

    return jax.make_array_from_callback(abstract.shape, abstract.sharding, part)
