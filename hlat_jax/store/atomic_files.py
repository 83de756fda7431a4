"""Atomic, fsynced writes of small files; checked reading of JSON and of file names from untrusted files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import secrets
import time
from collections.abc import Iterator
from typing import IO, Any, BinaryIO

_MAX_DEPTH = 100  # of nested JSON: far below Python's recursion limit, what is left of which depends on the caller
_MAX_NAME_BYTES = 255
_KILLED_S = 60.0  # a file that was not written for so long has no writer


@contextlib.contextmanager
def atomic_writer(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Yields a new file that replaces `path` atomically at the end of the block; an error keeps the old content."""
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
        if isinstance(error, OSError):  # the error of a full disk does not name the file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_folder(path.parent)


def remove_partial(folder: pathlib.Path) -> None:
    """Removes the unfinished files of writers that were killed, in `folder` and the folders in it.

    A file written in the last minute stays: another command may be at work on it, such as one that indexes text.
    """
    name = f"*.*-{'[0-9a-f]' * 8}.partial"
    for path in (*folder.glob(name), *folder.glob(f"*/{name}")):
        with contextlib.suppress(FileNotFoundError):  # its writer has finished it
            if path.is_file() and time.time() - path.stat().st_mtime > _KILLED_S:
                path.unlink()


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes or replaces a small file atomically; an error keeps the old content and leaves no partial file."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes or replaces a file of indented JSON as `write_whole` does."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: pathlib.Path, *, allow_nan: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file, as `parse_json` does.

    Raises:
      ValueError: it is not a regular file, or not such an object; the message names the file.
      OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():  # to open a FIFO would block
        raise ValueError(f"{path} is not a regular file.")
    return parse_json(path.read_bytes(), where=str(path), allow_nan=allow_nan)


def parse_json(raw: bytes, *, where: str, kind: type = dict, allow_nan: bool = False) -> Any:
    """Returns the JSON object in `raw`, or the array if `kind` is list.

    Raises:
      ValueError: not UTF-8, not JSON, nested too deeply, a key that appears twice, another kind, or, without
        `allow_nan`, a number that is not finite; the message begins with `where`.
    """
    number = float if allow_nan else _finite
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=number, parse_float=number)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {_MAX_DEPTH} levels.") from None
    if not isinstance(found, kind):
        raise ValueError(f"{where} must hold a JSON {'object' if kind is dict else 'array'}.")
    level, depth = [found], 0
    while level:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise ValueError(f"{where} is nested deeper than {_MAX_DEPTH} levels.")
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    return found


def check_name(name: Any, what: str, *, allow_folders: bool = False) -> str:
    """Returns `name`, a file name read from another file, after checking that it stays in that file's folder.

    Args:
      name: of a file; with `allow_folders` its relative path, with / between the parts.
      what: file and field that hold the name, for the error.

    Raises:
      ValueError: not text, empty, absolute, with "." or ".." as a part, with unprintable characters, or longer than
        file systems allow.
    """
    parts = name.split("/") if allow_folders and isinstance(name, str) else [name]
    for part in parts:
        is_plain = isinstance(part, str) and part.isprintable() and "/" not in part and part not in ("", ".", "..")
        if not is_plain or len(part.encode()) > _MAX_NAME_BYTES:
            kind = "a relative path without '.' and '..'" if allow_folders else "a plain name without '/'"
            raise ValueError(f"{what}={repr(name)[:100]} must be {kind}.")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {repr(key)[:100]} appears twice")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:100]} is not a finite number")
    return value


def to_disk(file: IO) -> None:
    """Flushes and fsyncs an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Fsyncs a folder: the names in it, and so a rename there, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
