"""Finds the files that a config or a command names: paths, folders, globs and URLs, by suffix and in order.

A folder that `python -m hlat_jax.data build` wrote counts as one file.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import hlat_jax
from hlat_jax.cli.path_checks import check_file
from hlat_jax.config import counted
from hlat_jax.data.formats.files import (
    MANIFEST_NAME,
    SHARD_SUFFIX,
    DataFile,
    NotFound,
    client_errors,
    filesystem_of,
    reason,
)
from hlat_jax.store.typed_json import read_json

_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".arrows", ".ipc", ".feather"), "arrow"),
    **dict.fromkeys((".txt", ".md"), "text"),
    SHARD_SUFFIX: "array_record",
}
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
STREAMED_SUFFIXES = (".gz", ".zst")  # those that `build` reads
_OUR_SHARD = re.compile(r"(shard-\d+-of-\d+|task-\d+\.\d+)" + re.escape(SHARD_SUFFIX))  # see build


def asset_path(name: str) -> pathlib.Path:
    """Returns the path of a file that ships with the package.

    Raises:
      ValueError: no such file; the message lists those that ship.
    """
    folder = pathlib.Path(hlat_jax.__file__).resolve().parent / "assets"
    path = folder / name
    if path.parent != folder or not path.is_file():
        shipped = sorted(p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".model"))
        raise ValueError(f"package:{name} does not ship with hlat_jax; these do: {', '.join(shipped)}.")
    return path


def tokenizer_file(path: str, *, key: str) -> pathlib.Path:
    """Returns the file of a tokenizer, which may be 'package:NAME'. Raises ValueError if there is none."""
    if path.startswith("package:"):
        return asset_path(path.removeprefix("package:"))
    check_file(path, key=key)
    return pathlib.Path(path).expanduser()


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """The result of find_files.

    Attributes:
      files: the files in order.
      ignored: files in folders with an unknown suffix, except names that begin with "." or "_".
      folders: local folders that were searched.
      links: links to folders that were searched already, which are not searched again.
    """

    files: list[DataFile]
    ignored: list[str]
    folders: list[pathlib.Path]
    links: list[str]

    def describe_ignored(self) -> str:
        """Returns a count of the ignored files and links, as in 'ignored 3 files: no suffix 2, .csv 1', or ''."""
        suffixes = sorted(pathlib.PurePosixPath(name).suffix.lower() or "no suffix" for name in self.ignored)
        counts = ", ".join(f"{suffix} {count:,}" for suffix, count in collections.Counter(suffixes).most_common())
        notes = [f"ignored {counted(len(suffixes), 'file')}: {counts}"] if counts else []
        if self.links:
            more = len(self.links) - 1
            these = f"{self.links[0]} and {more:,} more lead" if more else f"{self.links[0]} leads"
            notes.append(f"each folder is searched once: {these} to one that was searched")
        return "; ".join(notes)


def find_files(
    spec: str | Sequence[str], *, key: str, allow_compressed: bool = False, text_field: str = "text"
) -> FoundFiles:
    """Returns the files that `spec` names, in order: as written, and by name within a folder or glob.

    `spec` is paths separated by commas, or a sequence of paths, in which a comma is part of a name. `key` is the config
    path and `text_field` its key of text, for errors. A folder, named or matched by a glob, is searched recursively for
    known suffixes; hidden names are ignored, and a dataset that `build` wrote is one entry. The order depends on names
    below the folder, not on its location. `allow_compressed` accepts .gz and .zst too, for readers in order.

    Raises:
      ValueError: an empty spec, no files, a compressed file, an unknown suffix, a file named twice, a folder that
        cannot be listed, or a dataset together with files it was built from.
    """
    parts = [part.strip() for part in spec.split(",")] if isinstance(spec, str) else list(spec)
    spec = spec if isinstance(spec, str) else " ".join(spec)
    search = FoundFiles([], [], [], [])
    for part in filter(None, parts):
        is_remote = "://" in part.removeprefix("file://")
        files = _remote_part(part, key=key, search=search) if is_remote else _local_part(part, key=key, search=search)
        for file in files:
            _check_suffix(file, key=key, allow_compressed=allow_compressed, text_field=text_field)
        search.files.extend(files)
    if not search.files:
        raise NotFound(f"{key}={spec!r} names no files; give files, folders or globs, separated by commas.")
    _check_no_duplicates(search.files, what=f"{key}={spec!r}")
    return search


def _check_no_duplicates(files: Sequence[DataFile], *, what: str) -> None:
    """Raises ValueError when a file is named twice, or beside a dataset that was built from it."""
    seen: set[str] = set()
    for file in files:
        location = file.where if file.is_remote else os.path.realpath(file)
        if location in seen:
            raise ValueError(f"{what} names {file} twice; its documents would be repeated within an epoch.")
        seen.add(location)
    loose = {file.name: file for file in files if not file.is_built}
    for dataset in (file for file in files if file.is_built):
        for name in _built_from(dataset) or ():
            if pathlib.PurePosixPath(name).name in loose:
                raise ValueError(
                    f"{what} names the dataset {dataset} and {loose[pathlib.PurePosixPath(name).name]}, from which it "
                    "was built by its name: its documents would be repeated. Name one of them, or move the dataset out "
                    "of the folder of its text."
                )


def _local_part(part: str, *, key: str, search: FoundFiles) -> list[DataFile]:
    if part.startswith("package:"):
        return [DataFile(asset_path(part.removeprefix("package:")))]
    path = pathlib.Path(part.removeprefix("file://")).expanduser()
    names = [str(path)] if path.exists() else sorted(set(_matches(str(path), repeated=search.links)))
    files, searched = [], set()
    for name in names:
        if any(os.fspath(parent) in searched for parent in pathlib.Path(name).parents):
            continue  # `**` matches a folder and its files
        if os.path.isdir(name):
            searched.add(os.fspath(pathlib.Path(name)))
            files += _in_folder(pathlib.Path(name), key=key, search=search)
        elif os.path.isfile(name):
            files.append(DataFile(name))
    if not files:
        raise _nothing_found(part, key=key, search=search) if searched else nothing_at(part, key=key)
    return files


def _matches(pattern: str, *, repeated: list[str]) -> Iterator[str]:
    """Yields the paths that a glob matches as glob.iglob does, but `**` enters each folder once, see _walk_once.

    A `**` at the end matches its folder alone.
    """
    parts = pathlib.Path(pattern).parts
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    for root in filter(os.path.isdir, glob.iglob(os.path.join("", *parts[:at]) or os.curdir)):
        below = [root] if at + 1 == len(parts) else (parent for parent, _, _ in _walk_once(root, repeated=repeated))
        for folder in below:
            yield from _matches(os.path.join(glob.escape(folder), *parts[at + 1 :]), repeated=repeated)


def _walk_once(
    folder: str | os.PathLike, *, repeated: list[str], onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what os.walk does, links followed and hidden folders left out, but each folder once by its real path.

    Args:
      folder: the folder to begin with.
      repeated: a list that receives the links to folders that were yielded before.
      onerror: a function called with the error of a folder that cannot be listed.
    """
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=onerror):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            repeated.append(parent)
            continue
        seen.add(real)
        shown = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(shown, key=lambda name: (os.path.islink(os.path.join(parent, name)), name))
        yield parent, folders, names


def nothing_at(path: str, *, key: str) -> NotFound:
    """Returns the error for a local path of text that does not exist, or a glob without a match."""
    what = "matches no file" if glob.has_magic(path) else "does not exist"
    return NotFound(f"{key}: {path} {what} (looked from {pathlib.Path.cwd()}).")


def _in_folder(folder: pathlib.Path, *, key: str, search: FoundFiles) -> list[DataFile]:
    def fail(error: OSError) -> None:
        raise NotFound(f"{key}: the folder {error.filename} cannot be listed: {reason(error)}.")

    files = []
    search.folders.append(folder)
    for parent, folders, names in _walk_once(folder, onerror=fail, repeated=search.links):
        if _built_from(parent) is not None:
            files.append(DataFile(parent, is_built=True))
            folders.clear()
            continue
        paths = [os.path.join(parent, name) for name in names]
        files += [DataFile(path) for path in _data_paths(paths, search=search)]
    return sorted(files, key=lambda file: pathlib.Path(file).relative_to(folder).as_posix())


def _data_paths(paths: Sequence[str], *, search: FoundFiles) -> list[str]:
    """Returns the paths of data files; adds those that are neither data nor hidden to `search.ignored`."""
    data = []
    for path in paths:
        name = path.rpartition("/")[2]
        if not name.startswith(".") and _data_suffix(name) in _FORMATS:  # a.jsonl.gz is an error, and not ignored
            data.append(path)
        elif not name.startswith((".", "_")):
            search.ignored.append(path)
    return data


class _NamedSource(TypedDict):
    name: Any


class _Manifest(TypedDict):
    """What tells a manifest.json that `build` wrote from one of another program."""

    kind: Literal["text", "tokens"]
    shards: list
    sources: NotRequired[list[_NamedSource]]


def _built_from(folder: str | os.PathLike) -> list[str] | None:
    """Returns the names of the files that a dataset was built from; None if `build` did not write this folder.

    The shards of a dataset whose manifest is damaged are then an error, as single files.
    """
    try:
        manifest = read_json(pathlib.Path(folder) / MANIFEST_NAME, kind=_Manifest)
    except (ValueError, OSError):
        return None
    return [str(source["name"]) for source in manifest.get("sources", [])]


def _data_suffix(name: str) -> str:
    """Returns the suffix of the format of a file, in lower case: ".jsonl" of a.jsonl and of a.jsonl.gz."""
    path = pathlib.PurePosixPath(name.lower())
    return pathlib.PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSED_SUFFIXES else path.suffix


def _remote_part(part: str, *, key: str, search: FoundFiles) -> list[DataFile]:
    filesystem, path = filesystem_of(part)
    names: dict[str, None] = {}  # ordered, without duplicates: `**` matches a folder and its files
    searched: tuple[str, ...] = ()
    try:
        with client_errors():
            is_glob = any(sign in path for sign in "*[")  # not `?`, which begins the query of a URL
            for name in sorted(filesystem.glob(path)) if is_glob else [path]:
                if name.startswith(searched):
                    continue
                below = [name]
                if filesystem.isdir(name):
                    folder = name.rstrip("/") + "/"
                    searched += (folder,)
                    shown = [file for file in filesystem.find(name) if "/." not in f"/{file.removeprefix(folder)}"]
                    below = sorted(_data_paths(shown, search=search))
                elif not filesystem.exists(name):
                    continue
                names |= dict.fromkeys(below)
    except OSError as error:
        if isinstance(error.__cause__, ImportError):
            raise ValueError(f"{key}: {part} cannot be reached: {error.__cause__}") from None
        raise NotFound(f"{key}: {part} cannot be listed: {reason(error)}.") from None
    if not names:
        raise _nothing_found(part, key=key, search=search)
    return [DataFile(filesystem.unstrip_protocol(name), filesystem=filesystem) for name in names]


def file_format(file: DataFile) -> str:
    """Returns 'built', 'jsonl', 'text', 'arrow', 'array_record' or 'parquet'; '' of a file that find_files refuses."""
    return "built" if file.is_built else _FORMATS.get(_data_suffix(file.name), "")


def _nothing_found(part: str, *, key: str, search: FoundFiles) -> NotFound:
    ignored = f" ({search.describe_ignored()})" if search.ignored else ""
    return NotFound(f"{key}: {part} holds or matches no files that end in {', '.join(_FORMATS)}{ignored}.")


def _check_suffix(file: DataFile, *, key: str, allow_compressed: bool, text_field: str) -> None:
    if file.is_built:
        return
    kind, is_compressed = file_format(file), file.suffix in _COMPRESSED_SUFFIXES
    if kind == "array_record" and file.is_remote:
        raise ValueError(f"{key}: {file}: ArrayRecord is read from local disks only; copy its folder to one.")
    if _OUR_SHARD.fullmatch(file.name):
        raise ValueError(
            f"{key}: {file} is one shard of a dataset; give its folder, with its manifest.json, or finish that build "
            "by running its command again."
        )
    if is_compressed and file.suffix in STREAMED_SUFFIXES and kind in ("jsonl", "text"):
        if allow_compressed:
            return
        out = file.name.removesuffix(file.suffix).rpartition(".")[0] or "dataset"
        raise ValueError(
            f"{key}: {file} is compressed as a whole, so its documents cannot be read by number. Convert it and train "
            f"on that: {build_command(file, out=out, text_field=text_field)}"
        )
    if is_compressed or not kind:
        raise ValueError(
            f"{key}: {file} has the suffix {file.suffix!r}; known are {', '.join(_FORMATS)} and datasets that build "
            "wrote, also .gz and .zst of JSONL and text for build. Unpack what is compressed otherwise; JSON with one "
            "object per line is .jsonl."
        )


def build_command(file: DataFile, *, out: str, text_field: str) -> str:
    """Returns the shell command that converts a file to a dataset."""
    field = "" if text_field == "text" else f" --text_field={shlex.quote(text_field)}"
    return f"python -m hlat_jax.data build {shlex.quote(file.where)} --out {shlex.quote(out)}{field}"
