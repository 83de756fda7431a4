"""Finds the files that a config or a command names by paths, folders, globs and URLs, by suffix and in order.

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
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import hlat_jax
from hlat_jax.cli.path_checks import check_file, fetch_first
from hlat_jax.config import count_text
from hlat_jax.data.formats.files import (
    BUILDING_NAME,
    MANIFEST_NAME,
    SHARD_SUFFIX,
    DataFile,
    NotFound,
    Unreadable,
    reason,
)
from hlat_jax.data.formats.parts import check_parts, part_of_folder, require_all_parts
from hlat_jax.facts.local_paths import is_bucket, local_path
from hlat_jax.store import remote
from hlat_jax.store.typed_json import read_json

_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".arrows", ".ipc", ".feather"), "arrow"),
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".bin", ".idx"), "megatron"),  # beside each other
    ".npy": "npy",
    SHARD_SUFFIX: "array_record",
}
_COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
STREAMED_SUFFIXES = (".gz", ".zst")  # those that `build` reads
_OUR_SHARD = re.compile(r"(shard-\d+-of-\d+|task-\d+\.\d+)" + re.escape(SHARD_SUFFIX))  # see build


def asset_path(name: str) -> pathlib.Path:
    """Returns the path of a file that ships with the package."""
    folder = pathlib.Path(hlat_jax.__file__).resolve().parent / "assets"
    path = folder / name
    if path.parent != folder or not path.is_file():
        shipped = sorted(p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".model"))
        raise ValueError(f"package:{name} does not ship with hlat_jax. Use one of {', '.join(shipped)}.")
    return path


def tokenizer_file(path: str, *, key: str) -> pathlib.Path:
    """Returns the file of a tokenizer, which may be 'package:NAME'. Raises ValueError if there is none."""
    if path.startswith("package:"):
        return asset_path(path.removeprefix("package:"))
    check_file(path, key=key, advice=fetch_first(path))
    return local_path(path, key=key)


@dataclasses.dataclass(frozen=True)
class FoundFiles:
    """The result of find_files.

    Attributes:
      ignored: the files in folders with an unknown suffix, except names that begin with "." or "_".
    """

    files: list[DataFile]
    ignored: list[str]
    folders: list[pathlib.Path]

    def describe_ignored(self) -> str:
        """Returns a count of the ignored files, as in 'ignored 3 files: no suffix 2, .csv 1', or ''."""
        suffixes = sorted(pathlib.PurePosixPath(name).suffix.lower() or "no suffix" for name in self.ignored)
        counts = ", ".join(f"{suffix} {count:,}" for suffix, count in collections.Counter(suffixes).most_common())
        return f"ignored {count_text(len(suffixes), 'file')}: {counts}" if counts else ""


def find_files(spec: str | Sequence[str], *, key: str, in_order: bool = False, text_field: str = "text") -> FoundFiles:
    """Returns the files that `spec` names, in the order as written, and by name within a folder or glob.

    `spec` is paths separated by commas, or a sequence of paths, in which a comma is part of a name. `key` is the config
    path and `text_field` its key of text, for errors. A folder, named or matched by a glob, is searched recursively for
    known suffixes. Hidden names are ignored, and a dataset that `build` wrote is one entry. The order depends on names
    below the folder, not on its location. `in_order` accepts URLs, .gz and .zst too, for readers in order.
    """
    parts = [part.strip() for part in spec.split(",")] if isinstance(spec, str) else list(spec)
    spec = spec if isinstance(spec, str) else " ".join(spec)
    search = FoundFiles([], [], [])
    for part in filter(None, parts):
        urls = {part: ""}  # by the path of the local copy
        if not in_order and is_remote_folder(part):
            urls = _copies_of_built(part, key=key, text_field=text_field)
        elif is_url(part) and not in_order:
            refuse_url(part, key=key, text_field=text_field)
        files = []
        for name, url in urls.items():
            found = (_remote_files if is_url(name) else _local_files)(name, key=key, search=search)
            for file in found if url else ():
                file.copy_of = url + file.where.removeprefix(name)
            files += found
        if not files:
            ignored = f" ({search.describe_ignored()})" if search.ignored else ""
            raise NotFound(f"{key}: {part} has no files that end in {', '.join(_FORMATS)}{ignored}.")
        for file in files:
            _check_suffix(file, key=key, in_order=in_order, text_field=text_field)
        search.files.extend(files)
    if not search.files:
        raise NotFound(f"{key}={spec!r} names no files. Give files, folders or globs, separated by commas.")
    locations = collections.Counter(file.where if file.is_remote else os.path.realpath(file) for file in search.files)
    for location, count in locations.items():
        if count > 1:
            raise ValueError(f"{key}={spec!r} names {location} twice, and would repeat its documents. Name it once.")
    check_parts(search.files, key=key)
    return search


def _local_files(part: str, *, key: str, search: FoundFiles) -> list[DataFile]:
    if part.startswith("package:"):
        return [DataFile(asset_path(part.removeprefix("package:")))]
    path = local_path(part, key=key)
    names = [path] if path.exists() else _matches(path)
    if not names:
        raise not_found(part, key=key)
    files, searched = [], set()
    for name in names:
        if name.is_file() and searched.isdisjoint(name.parents):
            file = DataFile(name.with_suffix(".bin") if name.suffix == ".idx" else name)
            files += [] if file.where in map(str, files) else [file]  # `ids.*` matches both
        elif name.is_dir() and searched.isdisjoint(name.parents):  # `**` matches a folder and its files
            searched.add(name)
            files += _folder_files(name, key=key, search=search)
    return files


def _matches(pattern: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths that a glob matches, by name; hidden ones are left out, and `**` follows no links."""
    parts = pattern.parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), None)
    if first is None:
        return []
    root, below = pathlib.Path(*parts[:first]), parts[first:]

    def num_hidden(names: Sequence[str]) -> int:
        return sum(name.startswith(".") for name in names)

    matches = set(root.glob(os.path.join(*below)))
    shown = (path for path in matches if num_hidden(path.relative_to(root).parts) <= num_hidden(below))
    return sorted(shown, key=str)


def not_found(path: str, *, key: str) -> NotFound:
    """Returns the error for a local path of text that does not exist, or a glob without a match."""
    problem = "matches no file" if glob.has_magic(path) else "does not exist"
    advice = fetch_first(path, options=" --repo-type dataset")
    return NotFound(f"{key}: {path} {problem} (looked from {pathlib.Path.cwd()}).{advice}")


def _folder_files(folder: pathlib.Path, *, key: str, search: FoundFiles) -> list[DataFile]:
    def fail(error: OSError) -> None:
        raise NotFound(f"{key}: the folder {error.filename} cannot be listed: {reason(error)}.")

    files, seen = [], set()
    search.folders.append(folder)
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        is_building = BUILDING_NAME in folders
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if os.path.realpath(parent) in seen:  # a link that leads back
            folders.clear()
        elif _is_built(parent):
            files.append(DataFile(parent, is_built=True))
            folders.clear()
        elif is_building:
            raise NotFound(
                f"{key}: the dataset {parent} is not complete. Wait for its build, or run the command of a build that "
                "was ended again."
            )
        else:
            files += map(DataFile, _data_paths((os.path.join(parent, name) for name in names), search=search))
        seen.add(os.path.realpath(parent))
    return sorted(files, key=lambda file: pathlib.Path(file).relative_to(folder).as_posix())


def _data_paths(paths: Iterable[str], *, search: FoundFiles) -> Iterator[str]:
    """Yields the paths of data files; adds those that are neither data nor hidden to `search.ignored`."""
    for path in paths:
        name = path.rpartition("/")[2]
        kind = _FORMATS.get(_data_suffix(name), "npy")
        is_pair = kind == "megatron" and all(os.path.isfile(path[:-4] + each) for each in (".bin", ".idx"))
        # other .bin, and .npy, are ignored: beside text they hold anything; a.jsonl.gz is an error
        if not name.startswith(".") and (is_pair or kind not in ("megatron", "npy")):
            if not name.endswith(".idx"):
                yield path
        elif not name.startswith((".", "_")):
            search.ignored.append(path)


def _is_built(folder: str | os.PathLike) -> bool:
    """Returns whether `build` wrote this folder, and not another program that writes a manifest.json."""
    try:
        manifest = read_json(pathlib.Path(folder) / MANIFEST_NAME)
    except (ValueError, OSError):
        return False
    return manifest.get("kind") in ("text", "tokens") and "shards" in manifest


def _data_suffix(name: str) -> str:
    """Returns the suffix of the format of a file, in lower case: ".jsonl" of a.jsonl and of a.jsonl.gz."""
    path = pathlib.PurePosixPath(name.lower())
    return pathlib.PurePosixPath(path.stem).suffix if path.suffix in _COMPRESSED_SUFFIXES else path.suffix


def _remote_files(part: str, *, key: str, search: FoundFiles) -> list[DataFile]:
    """Returns the file at a URL, those that its glob matches, or those in its folder."""
    filesystem, path = remote.filesystem_of(part)
    try:
        if any(sign in path for sign in "*["):  # not `?`, which begins the query of a URL
            names = sorted(remote.retry(lambda: filesystem.glob(path), part))
        elif _data_suffix(DataFile(part).name):
            names = [path]
        else:
            names = sorted(_data_paths(remote.retry(lambda: filesystem.find(path), part), search=search))
    except OSError as error:
        kind = Unreadable if isinstance(error, remote.RemoteError) else NotFound
        raise kind(f"{key}: {part} cannot be listed: {reason(error)}.") from None
    return [DataFile(filesystem.unstrip_protocol(name)) for name in names]


def file_format(file: DataFile) -> str:
    """Returns 'built' or a format of _FORMATS, or '' for a file that find_files refuses."""
    return "built" if file.is_built else _FORMATS.get(_data_suffix(file.name), "")


def _check_suffix(file: DataFile, *, key: str, in_order: bool, text_field: str) -> None:
    if file.is_built:
        return
    kind, is_compressed = file_format(file), file.suffix in _COMPRESSED_SUFFIXES
    if _OUR_SHARD.fullmatch(file.name):
        raise ValueError(
            f"{key}: {file} is one shard of a dataset. Give its folder, with its manifest.json, or finish that build "
            "by running its command again."
        )
    is_readable = not is_compressed or (file.suffix in STREAMED_SUFFIXES and kind in ("jsonl", "text"))
    if kind in ("megatron", "npy") and in_order:
        raise ValueError(f"{key}: {file} holds token ids. Train on them in place with data.train={file}.")
    if not kind or not is_readable or (kind in ("array_record", "megatron", "npy") and file.is_remote):
        raise ValueError(
            f"{key}: {file} has the suffix {file.suffix!r}. Use {', '.join(_FORMATS)}, a built dataset or, for build, "
            "JSONL or text as .gz or .zst, with ArrayRecord and token ids on local disks."
        )
    if not in_order and is_compressed:
        raise _not_by_number(file, key=key, text_field=text_field)


def is_remote_folder(path: str) -> bool:
    """Returns whether a path is the URL of a folder in a bucket, perhaps of a dataset that `build` wrote."""
    return is_bucket(path) and not glob.has_magic(path) and not _data_suffix(DataFile(path).name)


def _copies_of_built(url: str, *, key: str, text_field: str) -> dict[str, str]:
    """Copies a dataset that `build` wrote to a bucket, or each of its parts. Returns their URLs by the paths here."""
    from hlat_jax.store.bucket import Bucket, local_copy  # not at the top: most runs need no bucket

    bucket = Bucket(url, key=key)
    try:
        if bucket.read(MANIFEST_NAME) is not None:
            return {str(local_copy(url, key=key)): bucket.url}
        suffix = f"/{MANIFEST_NAME}"
        folders = sorted(name.removesuffix(suffix) for name in bucket.sizes() if name.endswith(suffix))
        if not any(map(part_of_folder, folders)):
            refuse_url(url, key=key, text_field=text_field)
        require_all_parts(folders, url=url, key=key)  # before anything is fetched
        parts = [f"{bucket.url}/{folder}" for folder in folders]
        return {str(local_copy(part, key=key)): part for part in parts}
    except OSError as error:
        kind = Unreadable if isinstance(error, remote.RemoteError) else NotFound
        raise kind(f"{key}: {url} cannot be read: {reason(error)}.") from None


def is_url(path: str) -> bool:
    """Returns whether a path of text is a URL, and not a local one."""
    return "://" in path and not path.lower().startswith("file://")


def refuse_url(url: str, *, key: str, text_field: str = "text") -> NoReturn:
    """Raises ValueError for a URL of text to train on or to evaluate. Makes no network request."""
    if is_remote_folder(url):
        raise ValueError(
            f"{key}: {url} is no dataset of `data build`. Build one from text in a bucket with\n  "
            f"{build_command(DataFile(url), text_field=text_field)}"
        )
    file = DataFile(url)
    if _data_suffix(file.name):
        _check_suffix(file, key=key, in_order=False, text_field=text_field)
    raise _not_by_number(file, key=key, text_field=text_field)


def _not_by_number(file: DataFile, *, key: str, text_field: str) -> ValueError:
    return ValueError(
        f"{key}: {file} cannot be read by number, as it is compressed or behind a URL. Convert it and train on "
        f"that:\n  {build_command(file, text_field=text_field)}"
    )


def build_command(file: DataFile, *, text_field: str) -> str:
    """Returns the shell command that converts a file to a dataset."""
    field = "" if text_field == "text" else f" --text_field={shlex.quote(text_field)}"
    out = file.name.partition(".")[0]
    out = "dataset" if not out or glob.has_magic(out) else out
    return f"python -m hlat_jax.data build {shlex.quote(file.where)} --out {shlex.quote(out)}{field}"
