"""Reads byte ranges of local files and detects files that change during a run. Opens URLs in order, with fsspec."""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Any, BinaryIO

from hlat_jax.store import remote

SHARD_SUFFIX = ".array_record"
MANIFEST_NAME = "manifest.json"
BUILDING_NAME = ".building"  # folder with the shards of an incomplete build

_FINGERPRINT_BLOCK_BYTES = 64 * 1024
_FINGERPRINT_BLOCKS = 16
_VERSIONS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")  # of a URL
_MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)  # when a file is opened first


class NotFound(ValueError):
    """Data does not exist or cannot be listed, by a mistake unless the run has read it before, see Retries."""


class Unreadable(OSError):
    """Existing data cannot be read now. This fault of the file system may pass, see Retries."""


class DataFile:
    """A file or the folder of a built dataset at a local path, or a file at a URL such as s3://bucket/a.jsonl.

    Its string is the name in errors: `copy_of`, the URL of which it is a copy on this machine, or `where`. Nothing is
    read before a method is called.
    """

    __slots__ = ("copy_of", "is_built", "where")

    def __init__(self, where: str | os.PathLike, *, is_built: bool = False):
        self.where, self.is_built, self.copy_of = os.fspath(where), is_built, ""

    def __str__(self) -> str:
        return self.copy_of or self.where

    def __fspath__(self) -> str:
        return self.where

    @property
    def is_remote(self) -> bool:
        """Whether the file is behind a URL, and so read only in order."""
        return "://" in self.where

    @property
    def name(self) -> str:
        """The last part of the path, without the query of a web address (`?...`), which may be a signature."""
        path = self.where.partition("?")[0] if self.is_remote else self.where
        return path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The last suffix of the name in lower case, with the dot."""
        return pathlib.PurePosixPath(self.name).suffix.lower()

    def open(self) -> BinaryIO:
        """Returns the file opened for sequential reading."""
        if not self.is_remote:
            return open(self.where, "rb")
        return remote.open_url(self.where)

    def read_range(self, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start` of a local file, fewer at its end."""
        with open(self.where, "rb") as file:
            file.seek(start)
            return file.read(length)


class Snapshot:
    """The state of a file at its opening. Reads raise an error once the file has changed.

    The size and the time of writing are compared before each read. If only the time differs, the fingerprint decides.

    Attributes:
      size, fingerprint: the bytes of the file, and the digits that `fingerprint` returned for it.
      state: a string that changes if the file is rewritten, also between the blocks of the fingerprint.
      content_hash: 32 hex digits of all bytes, set by a caller that has read them all, else None.

    Raises:
      NotFound: the file does not exist.
      Unreadable: the file cannot be read now.
    """

    __slots__ = ("_written_ns", "content_hash", "file", "fingerprint", "size", "state")

    def __init__(self, file: DataFile):
        self.file, self.content_hash = file, None
        try:
            if file.is_remote:
                filesystem, path = remote.filesystem_of(file.where)
                info = remote.retry(lambda: filesystem.info(path), file.where)
                version = next((str(info[name]) for name in _VERSIONS if name in info), None)
                version = version or remote.retry(lambda: filesystem.ukey(path), file.where)
                self.size, self._written_ns = int(info["size"] or 0), 0
                self.state = self.fingerprint = f"{self.size} {version}"
                return
            stat = os.stat(file)
            self.size, self._written_ns = stat.st_size, stat.st_mtime_ns
            self.fingerprint = fingerprint(file)
        except OSError as error:
            kind = NotFound if isinstance(error, _MISTAKES) else Unreadable
            raise kind(f"{file} cannot be read: {reason(error)}.") from None
        self.state = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {self.fingerprint}"

    @property
    def identity(self) -> str:
        """32 hex digits that identify the location of the file and its state."""
        located = f"{self.file.where}\n{self.state}"
        return hashlib.blake2b(os.fsencode(located), digest_size=16).hexdigest()

    def check(self) -> None:
        """Raises ValueError if the local file changed since it was opened, and Unreadable if it is gone."""
        try:
            stat = os.stat(self.file)
            if stat.st_size != self.size:
                change = f"its size from {self.size} to {stat.st_size} bytes"
            elif stat.st_mtime_ns == self._written_ns:
                return
            elif fingerprint(self.file) == self.fingerprint:
                self._written_ns = stat.st_mtime_ns
                return
            else:
                change = "its content"
        except OSError as error:
            raise unreadable(self.file, error) from None
        raise ValueError(
            f"{self.file} changed {change} since it was opened. Restore it, or start a new run in another --workdir."
        )

    def read(self, start: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `start` of the local file.

        Raises:
          ValueError: the file changed.
          Unreadable: the file cannot be read now.
        """
        self.check()
        try:
            raw = self.file.read_range(start, length)
        except OSError as error:
            raise unreadable(self.file, error) from None
        if len(raw) != length:
            raise ValueError(f"{self.file} was truncated after it was opened. Restore it.")
        return raw


def unreadable(file: DataFile | os.PathLike, error: Exception) -> Unreadable:
    """Returns the error for a file that could be read before."""
    return Unreadable(f"{file} cannot be read any more: {reason(error)}. Restore it.")


def reason(error: Exception) -> str:
    """Returns the message of an error without its file name, in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())


def content_hash(file: DataFile) -> str:
    """Returns 32 hex digits of all bytes of a file."""
    with file.open() as opened:
        return hashlib.file_digest(opened, new_content_hash).hexdigest()


def new_content_hash() -> Any:
    """Returns a new hash object to update with all bytes of a file."""
    return hashlib.blake2b(digest_size=16)


def fingerprint(file: DataFile | str | os.PathLike) -> str:
    """Returns 32 hex digits of the size and of 16 evenly spaced blocks of 64 KiB, with the first and the last block.

    Files up to 1 MiB are hashed whole. An edit between the blocks of a longer file that keeps its size is not detected.
    """
    file = file if isinstance(file, DataFile) else DataFile(file)
    size = os.stat(file).st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    if size <= _FINGERPRINT_BLOCKS * _FINGERPRINT_BLOCK_BYTES:
        digest.update(file.read_range(0, size))
    else:
        last = size - _FINGERPRINT_BLOCK_BYTES
        for block in range(_FINGERPRINT_BLOCKS):
            start = last * block // (_FINGERPRINT_BLOCKS - 1)
            digest.update(file.read_range(start, _FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()
