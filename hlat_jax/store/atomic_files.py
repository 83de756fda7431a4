"""Atomic, fsynced writes of small files."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import time
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

_KILLED_S = 60.0  # a file that was not written for so long has no writer


@contextlib.contextmanager
def atomic_writer(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yields a new file that replaces `path` atomically at the end of the block, unless the block raises an error."""
    # the token: processes on several hosts of a shared file system may have the same id
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            to_disk(file)
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a read-only file system
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # the error of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_folder(path.parent)


def remove_partial(folder: pathlib.Path) -> None:
    """Removes the unfinished files of writers that were killed, in `folder` and the folders in it.

    A file written in the last minute stays, because another command may be writing it, such as one that indexes text.
    """
    name = f"*.*-{'[0-9a-f]' * 8}.partial"
    for path in (*folder.glob(name), *folder.glob(f"*/{name}")):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished it
            if path.is_file() and time.time() - path.stat().st_mtime > _KILLED_S:
                path.unlink()


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes or replaces a small file atomically. An error keeps the old content and leaves no partial file."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes or replaces a file of indented JSON as `write_whole` does."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def to_disk(file: IO) -> None:
    """Flushes and fsyncs an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Fsyncs a folder, which puts the names in it on the disk, and so a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
