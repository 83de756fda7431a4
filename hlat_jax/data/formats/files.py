"""Reads byte ranges of files, local or behind a URL (with fsspec), and detects files that change during a run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

SHARD_SUFFIX = ".array_record"
MANIFEST_NAME = "manifest.json"

_FINGERPRINT_BLOCK_BYTES = 64 * 1024
_FINGERPRINT_BLOCKS = 16
_MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)  # when a file is opened first


class NotFound(ValueError):
    """Data that does not exist or cannot be listed: a mistake, unless the run has read it before; see Retries."""


class Unreadable(OSError):
    """Data that is there, or was, and cannot be read now: a fault of the file system, which may pass; see Retries."""


class DataFile:
    """A file, or the folder of a built dataset, at a local path or behind a URL such as s3://bucket/a.jsonl.

    `where` is its name in errors. A local file is path-like. Nothing is read before a method is called. Exceptions of a
    client library become Unreadable, unless they are an OSError that says more.
    """

    __slots__ = ("_filesystem", "is_built", "where")

    def __init__(self, where: str | os.PathLike, *, filesystem: Any = None, is_built: bool = False):
        self.where = os.fspath(where)
        self.is_built = is_built
        self._filesystem = filesystem
        if filesystem is None and "://" in self.where:
            self._filesystem = filesystem_of(self.where)[0]

    def __str__(self) -> str:
        return self.where

    def __fspath__(self) -> str:
        if self.is_remote:
            raise ValueError(f"{self.where} is remote and has no local path; copy it to a local disk.")
        return self.where

    @property
    def is_remote(self) -> bool:
        """Whether it is read with fsspec."""
        return self._filesystem is not None

    @property
    def name(self) -> str:
        """The last part of the path, without the query of a web address (`?...`), which may be a signature."""
        path = self.where.partition("?")[0] if self.where.startswith(("http://", "https://")) else self.where
        return path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of the name in lower case, with the dot."""
        return pathlib.PurePosixPath(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """Returns the file opened for sequential reading."""
        if not self.is_remote:
            return open(self.where, "rb")
        with client_errors():
            return _RemoteFile(self._filesystem.open(self.where, "rb"))

    def state(self) -> tuple[int, str, str]:
        """Returns (bytes, a version that changes when the file is rewritten, a version that cannot be set back)."""
        if not self.is_remote:
            stat = os.stat(self.where)
            return stat.st_size, str(stat.st_mtime_ns), str(stat.st_ctime_ns)
        with client_errors():
            info = self._filesystem.info(self.where)
        if info.get("size") is None:
            raise ValueError(f"{self.where}: its server does not report its size; copy it to a local disk.")
        names = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
        return int(info["size"]), next((str(info[name]) for name in names if name in info), ""), ""

    def read_range(self, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`, fewer at the end of the file."""
        if self.is_remote:
            with client_errors():
                return self._filesystem.cat_file(self.where, start=start, end=start + length) if length else b""
        with open(self.where, "rb") as file:
            file.seek(start)
            return file.read(length)


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Converts exceptions of a client library to Unreadable, but a missing file or permission."""
    try:
        yield
    except _MISTAKES:
        raise
    except Exception as error:
        text = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise Unreadable(text) from error


class _RemoteFile:
    """A file opened by a client library, whose exceptions are converted as `client_errors` does."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._file, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*args: Any, **options: Any) -> Any:
            with client_errors():
                return attribute(*args, **options)

        return call

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Snapshot:
    """The state of a file when it was opened; reads raise once the file has changed.

    A local file is checked before each read. Another size is a change. If only its times differ, it is unchanged if its
    content hash is the same; without that hash, if its fingerprint is the same and either covers the whole file or the
    file was not written (links and permissions change a time too). A remote file is checked when it is opened, and a
    read that returns too few bytes is a change.

    Attributes:
      content_hash: 32 hex digits of all bytes, which a caller sets that has read them all, else None.
      has_checksums: whether its format detects changed bytes.

    Raises:
      NotFound: the file does not exist.
      Unreadable: it cannot be read now.
    """

    __slots__ = ("_times", "content_hash", "file", "fingerprint", "has_checksums", "size")

    def __init__(self, file: DataFile, *, has_checksums: bool = False):
        self.file, self.has_checksums, self.content_hash = file, has_checksums, None
        try:
            self.size, *self._times = file.state()
            self.fingerprint = fingerprint(file, size=self.size)
        except OSError as error:
            kind = NotFound if isinstance(error, _MISTAKES) else Unreadable
            raise kind(f"{file} cannot be read: {reason(error)}.") from None

    @property
    def state(self) -> str:
        """A string that changes when the file is rewritten, also between the blocks of the fingerprint."""
        return f"{self.size}\n{self._times}\n{self.fingerprint}"

    @property
    def identity(self) -> str:
        """32 hex digits of the location of the file and its state."""
        located = f"{self.file.where}\n{self.state}"
        return hashlib.blake2b(os.fsencode(located), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raises ValueError if a local file changed since it was opened, Unreadable if it is away."""
        if self.file.is_remote:
            return
        try:
            size, *times = self.file.state()
            if (size, times) == (self.size, self._times):
                return
            if size != self.size:
                what = f"its size from {self.size} to {size} bytes"
            elif self._is_same(was_written=times[0] != self._times[0]):
                self._times = times
                return
            else:
                what = "its content (or was rewritten with the same size, so that its content cannot be compared)"
        except OSError as error:
            raise unreadable(self.file, error) from None
        raise ValueError(
            f"{self.file} changed {what} since it was opened; restore it, or start a new run in another --workdir."
        )

    def _is_same(self, *, was_written: bool) -> bool:
        if self.content_hash is not None:
            return content_hash(self.file) == self.content_hash
        is_fully_covered = self.has_checksums or self.size <= _FINGERPRINT_BLOCKS * _FINGERPRINT_BLOCK_BYTES
        return (is_fully_covered or not was_written) and fingerprint(self.file, size=self.size) == self.fingerprint

    def read(self, start: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `start`.

        Raises:
          ValueError: the file changed.
          Unreadable: it cannot be read now.
        """
        self.check()
        try:
            raw = self.file.read_range(start, length)
        except OSError as error:
            raise unreadable(self.file, error) from None
        if len(raw) != length:
            raise ValueError(
                f"{self.file} ends {length - len(raw)} bytes before byte {start + length}: it was truncated after it "
                "was opened; restore it, or start a new run in another --workdir."
            )
        return raw


def unreadable(file: DataFile | os.PathLike, error: Exception) -> Unreadable:
    """Returns the error for a file that could be read before."""
    return Unreadable(f"{file} cannot be read any more: {reason(error)}. Restore it.")


def reason(error: Exception) -> str:
    """Returns the message of an error without its file name, in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())


def filesystem_of(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL and the path in it.

    Raises:
      ValueError: fsspec, or the package with which it reads this kind of URL, is not installed.
    """
    try:
        import fsspec.core

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{url}: {scheme}:// needs fsspec and a further package: {error}. Install it with pip."
        ) from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}; give a local path or a URL that fsspec knows.") from None


def content_hash(file: DataFile) -> str:
    """Returns 32 hex digits of all bytes of a file."""
    with file.open() as opened:
        return hashlib.file_digest(opened, new_content_hash).hexdigest()


def new_content_hash() -> Any:
    """Returns a new hash object to update with all bytes of a file."""
    return hashlib.blake2b(digest_size=16)


def fingerprint(file: DataFile | str | os.PathLike, *, size: int | None = None) -> str:
    """Returns 32 hex digits of the size and of 16 evenly spaced blocks of 64 KiB, first and last among them.

    Files up to 1 MiB are hashed whole. An edit between the blocks of a longer file that keeps its size is not detected.
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
