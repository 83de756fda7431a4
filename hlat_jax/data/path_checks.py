"""Checks of the data that a config names, before JAX is imported. The readers check everything else."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Collection
from typing import Any

from hlat_jax.cli.config_files import exists
from hlat_jax.config import DataConfig
from hlat_jax.data.formats.paths import (
    asset_path,
    file_format,
    find_files,
    is_remote_folder,
    is_url,
    not_found,
    refuse_url,
    tokenizer_file,
)
from hlat_jax.data.mixture import parse_sources, stages_of
from hlat_jax.facts.local_paths import check_local
from hlat_jax.resolve import held_out_share
from hlat_jax.store.typed_json import read_json


def check_texts(data: DataConfig, *, keys: Collection[str] = ("train", "validation")) -> None:
    """Raises ValueError for a path in `data.train` or `data.validation` that is a URL or does not exist.

    Lists no folders and makes no network requests.
    """
    for key in sorted(keys):
        spec = vars(data)[key]
        sources = parse_sources(spec, key=f"data.{key}") if spec else {}
        for part in (part.strip() for paths in sources.values() for part in paths.split(",")):
            check_text_path(part, key=f"data.{key}", text_field=data.text_field)


def check_records(data: DataConfig, *, keys: Collection[str] = ("train", "validation")) -> None:
    """Raises ValueError for local datasets that are incomplete, or if the first file has no text under the key.

    Reads the first file of a source if it is JSONL, Parquet or Arrow, and none if bad records are skipped.
    """
    from hlat_jax.data.formats.streaming import check_first  # not at the top: `train --help` does not need pyarrow

    for key in sorted(keys):
        spec = vars(data)[key]
        is_local = spec and not held_out_share(spec) and "://" not in spec
        for paths in parse_sources(spec, key=f"data.{key}").values() if is_local else ():
            file = find_files(paths, key=f"data.{key}", text_field=data.text_field).files[0]
            if data.on_bad_record == "raise" and file_format(file) in ("jsonl", "parquet", "arrow"):
                with contextlib.suppress(OSError):  # which may pass: the run tries again
                    check_first(file, text_field=data.text_field)


def check_mixture(data: DataConfig) -> None:
    """Raises ValueError if `data.mixture` does not describe stages of the sources of `data.train`."""
    stages_of(vars(data), list(parse_sources(data.train, key="data.train")))


def check_text_path(path: str, *, key: str, text_field: str = "text") -> None:
    """Raises ValueError for a URL, a local path that does not exist, or a glob without a match."""
    if path.startswith("package:"):
        asset_path(path.removeprefix("package:"))
        return
    if is_remote_folder(path):  # perhaps a dataset that `build` wrote: the run looks
        return
    if is_url(path):
        refuse_url(path, key=key, text_field=text_field)
    path = check_local(path, key=key)
    if not path or path.endswith("%"):  # a share of data.train
        return
    if not exists(os.path.expanduser(path)):
        raise not_found(path, key=key)


def was_opened(data: DataConfig, workdir: pathlib.Path) -> bool:
    """Returns whether the run in `workdir` has opened the paths of `data` before."""
    return all(recorded_value(workdir, f"data.{key}") == vars(data)[key] for key in ("train", "validation"))


def recorded_value(workdir: pathlib.Path, key: str) -> Any:
    """Returns the value of a key such as data.train in the config that a run folder records, or None without it."""
    section, _, name = key.partition(".")
    try:
        return read_json(workdir / "config.json")[section][name]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_tokenizer(path: str, *, key: str = "data.tokenizer") -> None:
    """Raises ValueError if `path` is set and there is no such file."""
    if path:
        tokenizer_file(path, key=key)
