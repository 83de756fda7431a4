"""Files by name and their bytes by range: what a spec names, local or behind a URL, and whether it is still the same.

Owns paths, folders, globs, URLs (through fsspec), fingerprints, and noticing that a file changed under a run. Refuses
to know what is inside a file, but for one thing: a folder that `python -m hlat_jax.data build` wrote counts as one.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".arrows", ".ipc", ".feather")
TEXT_SUFFIXES = (".txt", ".md")
KNOWN_SUFFIXES = JSONL_SUFFIXES + PARQUET_SUFFIXES + ARROW_SUFFIXES + TEXT_SUFFIXES
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
STREAMED_SUFFIXES = (".gz", ".zst")  # of these, the ones that `build` reads
SHARD_SUFFIX = ".array_record"
MANIFEST_NAME = "manifest.json"

_FINGERPRINT_BLOCK_BYTES = 64 * 1024
_FINGERPRINT_BLOCKS = 16


class DataFile:
    """A file, or the folder of a built dataset, at a local path or behind a URL such as s3://bucket/a.jsonl.

    `where` is how messages name it. Local ones are path-like. Nothing is read before a method asks for it. Whatever a
    client library raises when it reads is an OSError here.
    """

    __slots__ = ("_filesystem", "is_built", "where")

    def __init__(self, where: str | os.PathLike, *, filesystem: Any = None, is_built: bool = False):
        self.where = os.fspath(where)
        self.is_built = is_built
        self._filesystem = filesystem
        if filesystem is None and "://" in self.where:
            self._filesystem = _filesystem(self.where)[0]

    def __str__(self) -> str:
        return self.where

    def __fspath__(self) -> str:
        if self.is_remote:
            raise ValueError(f"{self.where} is remote and has no path on this machine; copy it to a local disk.")
        return self.where

    @property
    def is_remote(self) -> bool:
        """Whether fsspec reads it."""
        return self._filesystem is not None

    @property
    def name(self) -> str:
        """The last part of the path; what follows `?` in a web address, such as a signature, is no part of it."""
        path = self.where.partition("?")[0] if self.where.startswith(("http://", "https://")) else self.where
        return path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of the name in lower case, with its dot."""
        return pathlib.PurePosixPath(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """Returns the file opened for reading bytes in order."""
        if not self.is_remote:
            return open(self.where, "rb")
        with _client_errors():
            return _RemoteFile(self._filesystem.open(self.where, "rb"))

    def state(self) -> tuple[int, str]:
        """Returns the size in bytes and what changes when the file is written again."""
        if not self.is_remote:
            facts = os.stat(self.where)
            return facts.st_size, str(facts.st_mtime_ns)
        with _client_errors():
            facts = self._filesystem.info(self.where)
        if facts.get("size") is None:
            raise OSError("its server does not say how long it is; copy it to a local disk")
        names = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
        return int(facts["size"]), next((str(facts[name]) for name in names if name in facts), "")

    def read_range(self, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`, fewer where the file ends before."""
        if self.is_remote:
            with _client_errors():
                return self._filesystem.cat_file(self.where, start=start, end=start + length) if length else b""
        descriptor = os.open(self.where, os.O_RDONLY)
        try:
            return _pread(descriptor, length=length, start=start)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Makes an OSError of whatever else a client library raises, for each has exceptions of its own."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class _RemoteFile:
    """A file that a client library opened, with its errors as OSError."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._file, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **options: Any) -> Any:
            with _client_errors():
                return attribute(*args, **options)

        return call

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _pread(descriptor: int, *, length: int, start: int) -> bytes:
    """Returns `length` bytes from `start`; one call may give fewer than asked (Linux stops at 2 GiB)."""
    raw = os.pread(descriptor, length, start)
    while len(raw) < length:
        more = os.pread(descriptor, length - len(raw), start + len(raw))
        if not more:
            break
        raw += more
    return raw


class Snapshot:
    """A file as it was when it was opened; whatever reads through this raises once the file is another.

    A local file is looked at before each read: another size is a change, another time of writing is one if the
    fingerprint differs too. A remote one is looked at when it is opened, and its reads must not come back short.

    Raises:
      ValueError: the file is not there.
    """

    __slots__ = ("_version", "file", "fingerprint", "size")

    def __init__(self, file: DataFile):
        self.file = file
        try:
            self.size, self._version = file.state()
            self.fingerprint = fingerprint(file, size=self.size)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {_reason(error)}.") from None

    @property
    def identity(self) -> str:
        """32 hex digits that change when the file is written again, also where the fingerprint does not look."""
        facts = f"{self.file.where}\n{self.size}\n{self._version}\n{self.fingerprint}"
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raises ValueError if a local file is not the one that was opened."""
        if self.file.is_remote:
            return
        try:
            size, version = self.file.state()
            if (size, version) == (self.size, self._version):
                return
            if size == self.size and fingerprint(self.file, size=size) == self.fingerprint:
                self._version = version  # touched, or copied back
                return
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read any more: {_reason(error)}. Restore it.") from None
        what = "its content" if size == self.size else f"its size from {self.size} to {size} bytes"
        raise ValueError(
            f"{self.file} changed {what} since it was opened; restore it, or start again in another --workdir."
        )

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Yields the file opened for reading bytes in order; an OSError within becomes a ValueError that names it."""
        try:
            with self.file.open() as file:
                yield file
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read to its end: {_reason(error)}. Restore it.") from None

    def read(self, start: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `start`.

        Raises:
          ValueError: the file changed, shrank or went away.
        """
        self.check()
        try:
            raw = self.file.read_range(start, length)
        except OSError as error:
            raise ValueError(f"{self.file} cannot be read any more: {_reason(error)}. Restore it.") from None
        if len(raw) != length:
            raise ValueError(
                f"{self.file} ends {length - len(raw)} bytes before byte {start + length}, which it had when it was "
                "opened; restore it, or start again in another --workdir."
            )
        return raw


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


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
        raise ValueError(f"{key}: the folder {error.filename} cannot be listed: {_reason(error)}.")

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


def _filesystem(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL and the path in it.

    Raises:
      ValueError: fsspec, or the package through which it reads this kind of URL, is not installed.
    """
    try:
        import fsspec.core

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{url}: {scheme}:// is read through fsspec and a package of its own: {error}. Install it with pip."
        ) from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}; give a local path or a URL that fsspec knows.") from None


def _remote_part(part: str, *, key: str) -> list[DataFile]:
    filesystem, path = _filesystem(part)

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
        with _client_errors():
            if any(sign in path for sign in "*["):  # `?` begins the query of a web address, such as its signature
                names = matched()
            elif filesystem.isdir(path):
                names = below(path)
            else:
                names = [path] if filesystem.exists(path) else []
    except OSError as error:
        if isinstance(error.__cause__, ImportError):
            raise ValueError(f"{key}: {part} cannot be reached: {error.__cause__}") from None
        raise ValueError(f"{key}: {part} cannot be listed: {_reason(error)}.") from None
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


def fingerprint(file: DataFile | str | os.PathLike, *, size: int | None = None) -> str:
    """Returns 32 hex digits of the size and of 16 evenly spaced blocks of 64 KiB, first and last among them.

    Files up to 1 MiB are hashed whole. An edit between the blocks of a longer file that keeps its size goes unseen.
    """
    file = file if isinstance(file, DataFile) else DataFile(file)
    size = file.state()[0] if size is None else size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    if size <= _FINGERPRINT_BLOCKS * _FINGERPRINT_BLOCK_BYTES:
        digest.update(file.read_range(0, size))
    else:
        last = size - _FINGERPRINT_BLOCK_BYTES
        for block in range(_FINGERPRINT_BLOCKS):
            start = last * block // (_FINGERPRINT_BLOCKS - 1)
            digest.update(file.read_range(start, _FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()
