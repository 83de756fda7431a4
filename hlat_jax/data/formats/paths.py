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
from typing import Any, NoReturn, NotRequired, TypedDict

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

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".arrows", ".ipc", ".feather")
TEXT_SUFFIXES = (".txt", ".md")
KNOWN_SUFFIXES = JSONL_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES + TEXT_SUFFIXES + (SHARD_SUFFIX,)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
_OUR_SHARD = re.compile(r"(shard-\d+-of-\d+|task-\d+\.\d+)" + re.escape(SHARD_SUFFIX))  # see build
STREAMED_SUFFIXES = (".gz", ".zst")  # those that `build` reads


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
      files: in order.
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
      ValueError: an empty spec, nothing found, a compressed file, an unknown suffix, a file named twice, a folder that
        cannot be listed, or a dataset together with files it was built from.
    """
    parts = [part.strip() for part in spec.split(",")] if isinstance(spec, str) else list(spec)
    spec = spec if isinstance(spec, str) else " ".join(spec)
    found = FoundFiles([], [], [], [])
    for part in filter(None, parts):
        is_remote = "://" in part.removeprefix("file://")
        files = _remote_part(part, key=key, found=found) if is_remote else _local_part(part, key=key, found=found)
        for file in files:
            _check_suffix(file, key=key, allow_compressed=allow_compressed, text_field=text_field)
        found.files.extend(files)
    if not found.files:
        raise NotFound(f"{key}={spec!r} names no files; give files, folders or globs, separated by commas.")
    _check_no_duplicates(found.files, what=f"{key}={spec!r}")
    return found


def _check_no_duplicates(files: Sequence[DataFile], *, what: str) -> None:
    """Raises ValueError when a file is named twice, or beside a dataset that was built from it."""
    seen: set[str] = set()
    for file in files:
        place = file.where if file.is_remote else os.path.realpath(file)
        if place in seen:
            raise ValueError(f"{what} names {file} twice; its documents would be repeated within an epoch.")
        seen.add(place)
    loose = {file.name: file for file in files if not file.is_built}
    for dataset in (file for file in files if file.is_built):
        built_from = [pathlib.PurePosixPath(name).name for name in _manifest(dataset)["sources"]]
        both = next((loose[name] for name in built_from if name in loose), None)
        if both is not None:
            raise ValueError(
                f"{what} names the dataset {dataset} and {both}, and by its name the dataset was built from that file: "
                "its documents would be repeated. Name one of them, or move the dataset out of the folder of its text."
            )


def _local_part(part: str, *, key: str, found: FoundFiles) -> list[DataFile]:
    if part.startswith("package:"):
        return [DataFile(asset_path(part.removeprefix("package:")))]
    path = pathlib.Path(part.removeprefix("file://")).expanduser()
    if path.is_dir():
        return _in_folder(path, key=key, found=found) or _raise_nothing_found(part, key=key, found=found)
    if path.is_file():
        return [DataFile(path)]
    files, searched = [], set()
    for name in sorted(set(_matches(str(path), repeated=found.links))):
        if any(os.fspath(parent) in searched for parent in pathlib.Path(name).parents):
            continue  # `**` matches a folder and its files
        if os.path.isdir(name):
            searched.add(os.fspath(pathlib.Path(name)))
            files += _in_folder(pathlib.Path(name), key=key, found=found)
        elif os.path.isfile(name):
            files.append(DataFile(name))
    if not files:
        if searched:
            _raise_nothing_found(part, key=key, found=found)
        raise nothing_at(part, key=key)
    return files


def _matches(pattern: str, *, repeated: list[str] | None = None) -> Iterator[str]:
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
    folder: str | os.PathLike, *, onerror: Callable[[OSError], None] | None = None, repeated: list[str] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields what os.walk does, links followed and hidden folders left out, but each folder once by its real path.

    Args:
      folder: where to begin.
      onerror: called for a folder that cannot be listed.
      repeated: receives the links that lead to a folder that was yielded before.
    """
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=onerror):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            if repeated is not None:
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


def _in_folder(folder: pathlib.Path, *, key: str, found: FoundFiles) -> list[DataFile]:
    def fail(error: OSError) -> None:
        raise NotFound(f"{key}: the folder {error.filename} cannot be listed: {reason(error)}.")

    files = []
    found.folders.append(folder)
    for parent, folders, names in _walk_once(folder, onerror=fail, repeated=found.links):
        if _is_built(parent):
            files.append(DataFile(parent, is_built=True))
            folders.clear()
            continue
        paths = [os.path.join(parent, name) for name in names]
        files += [DataFile(path) for path in _data_paths(paths, found=found)]
    return sorted(files, key=lambda file: pathlib.Path(file).relative_to(folder).as_posix())


def _data_paths(paths: Sequence[str], *, found: FoundFiles) -> list[str]:
    """Returns the paths of data files; adds those that are neither data nor hidden to `found.ignored`."""
    data = []
    for path in paths:
        name = path.rpartition("/")[2]
        if _is_data(name):
            data.append(path)
        elif not name.startswith((".", "_")):
            found.ignored.append(path)
    return data


class _Named(TypedDict):
    name: Any


class _Built(TypedDict):
    kind: str
    shards: list
    sources: NotRequired[list[_Named]]


def _is_built(folder: str | os.PathLike) -> bool:
    """Returns whether `build` wrote this folder; another program's manifest.json does not count."""
    return _manifest(folder)["kind"] in ("text", "tokens")


def _manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns `kind` and the names of `sources` of a folder's manifest; kind is '' if `build` did not write it.

    The shards of a dataset whose manifest is damaged are then an error, as single files.
    """
    try:
        manifest = read_json(pathlib.Path(folder) / MANIFEST_NAME, kind=_Built)
        return {"kind": manifest["kind"], "sources": [str(source["name"]) for source in manifest.get("sources", [])]}
    except (ValueError, OSError):
        return {"kind": "", "sources": []}


def _is_data(name: str) -> bool:
    """Returns whether a file in a folder is data. a.jsonl.gz is, so that it is an error and not silently ignored."""
    if name.startswith("."):
        return False
    path = pathlib.PurePosixPath(name)
    suffix, inner = path.suffix.lower(), pathlib.PurePosixPath(path.stem).suffix.lower()
    return suffix in KNOWN_SUFFIXES or (suffix in COMPRESSED_SUFFIXES and inner in KNOWN_SUFFIXES)


def _remote_part(part: str, *, key: str, found: FoundFiles) -> list[DataFile]:
    filesystem, path = filesystem_of(part)

    def data_file(name: str) -> DataFile:
        return DataFile(filesystem.unstrip_protocol(name), filesystem=filesystem)

    def below(folder: str) -> list[str]:
        prefix = folder.rstrip("/")
        names = [(name, name.removeprefix(prefix).lstrip("/").split("/")) for name in filesystem.find(folder)]
        return sorted(_data_paths([name for name, parts in names if not _is_hidden(parts)], found=found))

    def matched() -> list[str]:
        names: dict[str, None] = {}  # ordered, without duplicates: `**` matches a folder and its files
        searched: list[str] = []
        for name, info in sorted(filesystem.glob(path, detail=True).items()):
            if name.startswith(tuple(searched)):
                continue
            if info["type"] == "directory":
                searched.append(name.rstrip("/") + "/")
            names |= dict.fromkeys(below(name) if info["type"] == "directory" else [name])
        return list(names)

    try:
        with client_errors():
            if any(sign in path for sign in "*["):  # not `?`, which begins the query of a URL
                names = matched()
            elif filesystem.isdir(path):
                names = below(path)
            else:
                names = [path] if filesystem.exists(path) else []
    except OSError as error:
        if isinstance(error.__cause__, ImportError):
            raise ValueError(f"{key}: {part} cannot be reached: {error.__cause__}") from None
        raise NotFound(f"{key}: {part} cannot be listed: {reason(error)}.") from None
    return [data_file(name) for name in names] or _raise_nothing_found(part, key=key, found=found)


def _is_hidden(parts: list[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def file_format(file: DataFile) -> str:
    """Returns 'built', 'jsonl', 'text', 'arrow', 'array_record' or 'parquet' for a file of find_files."""
    if file.is_built:
        return "built"
    name, suffix = file.name.lower(), file.suffix
    if suffix in (".gz", ".zst"):
        suffix = pathlib.PurePosixPath(name.removesuffix(suffix)).suffix
    formats = {"jsonl": JSONL_SUFFIXES, "text": TEXT_SUFFIXES, "arrow": ARROW_SUFFIXES, "array_record": (SHARD_SUFFIX,)}
    return next((known for known, suffixes in formats.items() if suffix in suffixes), "parquet")


def _raise_nothing_found(part: str, *, key: str, found: FoundFiles) -> NoReturn:
    ignored = f" ({found.describe_ignored()})" if found.ignored else ""
    raise NotFound(f"{key}: {part} holds or matches no files that end in {', '.join(KNOWN_SUFFIXES)}{ignored}.")


def _check_suffix(file: DataFile, *, key: str, allow_compressed: bool, text_field: str) -> None:
    if file.is_built:
        return
    suffix = file.suffix
    if suffix == SHARD_SUFFIX and file.is_remote:
        raise ValueError(f"{key}: {file}: ArrayRecord is read from local disks only; copy its folder to one.")
    if _OUR_SHARD.fullmatch(file.name):
        raise ValueError(
            f"{key}: {file} is one shard of a dataset; give its folder, with its manifest.json, or finish that build "
            "by running its command again."
        )
    if suffix in COMPRESSED_SUFFIXES:
        inner = pathlib.PurePosixPath(pathlib.PurePosixPath(file.name).stem).suffix.lower()
        if allow_compressed and suffix in STREAMED_SUFFIXES and inner in JSONL_SUFFIXES + TEXT_SUFFIXES:
            return
        raise ValueError(_compressed_message(file, key=key, inner=inner, text_field=text_field))
    if suffix not in KNOWN_SUFFIXES:
        known = ", ".join(KNOWN_SUFFIXES)
        raise ValueError(
            f"{key}: {file} has the suffix {suffix!r}; known are {known} and datasets that build wrote.{_hint(file)}"
        )


def _hint(file: DataFile) -> str:
    if file.suffix != ".json":
        return ""
    name = shlex.quote(file.where)
    lines = shlex.quote(f"{file.where}l")
    return f" If it holds one JSON object per line, rename it to {lines}; a JSON array: jq -c '.[]' {name} > {lines}"


def _compressed_message(file: DataFile, *, key: str, inner: str, text_field: str) -> str:
    command = {".gz": "gunzip -k", ".zst": "zstd -dk", ".xz": "xz -dk", ".bz2": "bunzip2 -k"}[file.suffix]
    start = f"{key}: {file} is compressed as a whole"
    if file.suffix in STREAMED_SUFFIXES and inner in JSONL_SUFFIXES + TEXT_SUFFIXES:
        out = file.name.removesuffix(file.suffix).removesuffix(inner) or "dataset"
        return (
            f"{start}, so its documents cannot be read by number. Convert it and train on that: "
            f"{build_command(file, out=out, text_field=text_field)}"
        )
    return f"{start} in a format that is not supported; unpack it first: {command} {shlex.quote(file.where)}"


def build_command(file: DataFile, *, out: str, text_field: str) -> str:
    """Returns the shell command that converts a file to a dataset."""
    field = "" if text_field == "text" else f" --text_field={shlex.quote(text_field)}"
    return f"python -m hlat_jax.data build {shlex.quote(file.where)} --out {shlex.quote(out)}{field}"
