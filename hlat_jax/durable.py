"""Files that are there whole or not at all, and survive a power cut. Owns the order of flush, sync and rename."""

from __future__ import annotations

import json
import os
import pathlib
from typing import IO, Any


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes or replaces a small file in one step; an error leaves what was there before and nothing beside it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            to_disk(file)
        os.replace(partial, path)
    except OSError as error:  # a full disk does not say which file
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    sync_folder(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes or replaces a file of indented JSON as `write_whole` does."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def to_disk(file: IO) -> None:
    """Returns when everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: pathlib.Path) -> None:
    """Returns when the names in a folder, so a rename there, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
