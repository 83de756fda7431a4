"""Which files a config or a command names: paths, folders, globs and URLs, by the suffixes that are read.

Owns their order and what is refused by name. Refuses to know what is inside a file, but for one thing: a folder that
`python -m hlat_jax.data build` wrote counts as one.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib

from hlat_jax.data.files import MANIFEST_NAME, SHARD_SUFFIX, DataFile, client_errors, filesystem_of, reason

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".arrows", ".ipc", ".feather")
TEXT_SUFFIXES = (".txt", ".md")
KNOWN_SUFFIXES = JSONL_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES + TEXT_SUFFIXES
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
STREAMED_SUFFIXES = (".gz", ".zst")  # of these, the ones that `build` reads


def asset_path(name: str) -> pathlib.Path:
    """Returns the path of a file that ships with the package.

    Raises:
      ValueError: no such file; the message lists those there are.
    """
    folder = pathlib.Path(__file__).resolve().parent.parent / "assets"
    path = folder / name
    if path.parent != folder or not path.is_file():
        shipped = sorted(p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".model"))
        raise ValueError(f"package:{name} does not ship with hlat_jax; there are {', '.join(shipped)}.")
    return path


def resolve_files(spec: str, *, key: str, allow_compressed: bool = False) -> list[DataFile]:
    """Returns the files that `spec` names, in order: as written, and by name within a folder or glob.

    `key` is the config path, for messages. A folder, named or matched by a glob, is searched recursively for known
    suffixes; hidden names are passed over, and a dataset that `build` wrote is one entry. The order depends on names
    below the folder, not on where it lies. `allow_compressed` takes .gz and .zst too, for readers that go through a
    file in order.

    Raises:
      ValueError: an empty spec, nothing found, a compressed file, an unknown suffix, a file named twice, or a folder
        that cannot be listed.
    """
    files: list[DataFile] = []
    for part in (part.strip() for part in spec.split(",")):
        if part:
            is_remote = "://" in part.removeprefix("file://")
            found = _remote_part(part, key=key) if is_remote else _local_part(part, key=key)
            for file in found:
                _check_suffix(file, key=key, allow_compressed=allow_compressed)
            files.extend(found)
    if not files:
        raise ValueError(f"{key}={spec!r} names no files; give files, folders or globs, separated by commas.")
    seen: set[str] = set()
    for file in files:
        place = file.where if file.is_remote else os.path.realpath(file)
        if place in seen:
            raise ValueError(f"{key}={spec!r} names {file} twice; its documents would be repeated within an epoch.")
        seen.add(place)
    return files


def _local_part(part: str, *, key: str) -> list[DataFile]:
    if part.startswith("package:"):
        return [DataFile(asset_path(part.removeprefix("package:")))]
    path = pathlib.Path(part.removeprefix("file://")).expanduser()
    if path.is_dir():
        found = _in_folder(path, key=key)
        if not found:
            raise ValueError(f"{key}: no files under {path} end in {', '.join(KNOWN_SUFFIXES)}.")
        return found
    if path.is_file():
        return [DataFile(path)]
    found, searched = [], set()
    for name in sorted(glob.glob(str(path), recursive=True)):
        if any(os.fspath(parent) in searched for parent in pathlib.Path(name).parents):
            continue  # `**` matches a folder and what lies in it
        if os.path.isdir(name):
            searched.add(os.fspath(pathlib.Path(name)))
            found += _in_folder(pathlib.Path(name), key=key)
        elif os.path.isfile(name):
            found.append(DataFile(name))
    if not found:
        what = "matches no file" if glob.has_magic(part) else "does not exist"
        raise ValueError(f"{key}: {part} {what} (looked from {pathlib.Path.cwd()}).")
    return found


def _in_folder(folder: pathlib.Path, *, key: str) -> list[DataFile]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"{key}: the folder {error.filename} cannot be listed: {reason(error)}.")

    found = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        if _is_built(parent):
            found.append(DataFile(parent, is_built=True))
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [DataFile(os.path.join(parent, name)) for name in names if _is_data(name)]
    return sorted(found, key=lambda file: pathlib.Path(file).relative_to(folder).as_posix())


def _is_built(folder: str | os.PathLike) -> bool:
    """Returns whether `build` wrote this folder; the manifest.json of other programs does not make it ours."""
    path = os.path.join(folder, MANIFEST_NAME)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            manifest = json.loads(file.read())
    except (ValueError, OSError):  # not ours; were it ours and damaged, its shards will be refused without it
        return False
    return isinstance(manifest, dict) and "shards" in manifest and manifest.get("kind") in ("text", "tokens")


def _is_data(name: str) -> bool:
    """Returns whether a name in a folder is data: known, or text that would be lost without a word (a.jsonl.gz)."""
    if name.startswith("."):
        return False
    path = pathlib.PurePosixPath(name)
    suffix, inner = path.suffix.lower(), pathlib.PurePosixPath(path.stem).suffix.lower()
    return suffix in (*KNOWN_SUFFIXES, SHARD_SUFFIX) or (suffix in COMPRESSED_SUFFIXES and inner in KNOWN_SUFFIXES)


def _remote_part(part: str, *, key: str) -> list[DataFile]:
    filesystem, path = filesystem_of(part)

    def data_file(name: str) -> DataFile:
        return DataFile(filesystem.unstrip_protocol(name), filesystem=filesystem)

    def below(folder: str) -> list[str]:
        prefix = folder.rstrip("/")
        names = [(name, name.removeprefix(prefix).lstrip("/").split("/")) for name in filesystem.find(folder)]
        return sorted(name for name, parts in names if not _is_hidden(parts) and _is_data(parts[-1]))

    def matched() -> list[str]:
        found: dict[str, None] = {}  # in order, once: `**` matches a folder and what lies in it
        searched: list[str] = []
        for name, facts in sorted(filesystem.glob(path, detail=True).items()):
            if name.startswith(tuple(searched)):
                continue
            if facts["type"] == "directory":
                searched.append(name.rstrip("/") + "/")
            found |= dict.fromkeys(below(name) if facts["type"] == "directory" else [name])
        return list(found)

    try:
        with client_errors():
            if any(sign in path for sign in "*["):  # `?` begins the query of a web address, such as its signature
                names = matched()
            elif filesystem.isdir(path):
                names = below(path)
            else:
                names = [path] if filesystem.exists(path) else []
    except OSError as error:
        if isinstance(error.__cause__, ImportError):
            raise ValueError(f"{key}: {part} cannot be reached: {error.__cause__}") from None
        raise ValueError(f"{key}: {part} cannot be listed: {reason(error)}.") from None
    return [data_file(name) for name in names] or _nothing(part, key=key)


def _is_hidden(parts: list[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def file_format(file: DataFile) -> str:
    """Returns 'built', 'jsonl', 'text', 'arrow' or 'parquet' for a file that resolve_files let through."""
    if file.is_built:
        return "built"
    name, suffix = file.name.lower(), file.suffix
    if suffix in (".gz", ".zst"):
        suffix = pathlib.PurePosixPath(name.removesuffix(suffix)).suffix
    formats = {"jsonl": JSONL_SUFFIXES, "text": TEXT_SUFFIXES, "arrow": ARROW_SUFFIXES}
    return next((known for known, suffixes in formats.items() if suffix in suffixes), "parquet")


def _nothing(part: str, *, key: str) -> list[DataFile]:
    raise ValueError(f"{key}: {part} holds or matches no files that end in {', '.join(KNOWN_SUFFIXES)}.")


def _check_suffix(file: DataFile, *, key: str, allow_compressed: bool) -> None:
    if file.is_built:
        return
    suffix = file.suffix
    if suffix == SHARD_SUFFIX and file.is_remote:
        raise ValueError(f"{key}: {file}: ArrayRecord is read from local disks only; copy its folder and give that.")
    if suffix == SHARD_SUFFIX:
        raise ValueError(
            f"{key}: {file} is one shard of a dataset, and shards are not read without the manifest.json of their "
            "folder; give the folder, or finish that build by running its command again."
        )
    if suffix in COMPRESSED_SUFFIXES:
        inner = pathlib.PurePosixPath(pathlib.PurePosixPath(file.name).stem).suffix.lower()
        if allow_compressed and suffix in STREAMED_SUFFIXES and inner in JSONL_SUFFIXES + TEXT_SUFFIXES:
            return
        raise ValueError(_compressed_message(file, key=key, inner=inner))
    if suffix not in KNOWN_SUFFIXES:
        known = ", ".join(KNOWN_SUFFIXES)
        raise ValueError(f"{key}: {file} ends in {suffix or 'nothing'!r}; known are {known} and what build writes.")


def _compressed_message(file: DataFile, *, key: str, inner: str) -> str:
    command = {".gz": "gunzip -k", ".zst": "zstd -dk", ".xz": "xz -dk", ".bz2": "bunzip2 -k"}[file.suffix]
    begins = f"{key}: {file} is compressed as a whole"
    if file.suffix in STREAMED_SUFFIXES and inner in JSONL_SUFFIXES + TEXT_SUFFIXES:
        out = file.name.removesuffix(file.suffix).removesuffix(inner) or "dataset"
        return (
            f"{begins}, so no document in it can be read by number. Convert it and train on that: "
            f"python -m hlat_jax.data build {file} --out {out}"
        )
    return f"{begins} in a way that is not read here; unpack it first: {command} {file}"
