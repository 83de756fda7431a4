"""Sums of a folder's files: written when it is whole, compared before it is believed.

Owns what counts as damage and how it is said. Refuses to know what the files hold. The processes of a job share the
files out among themselves and agree on what they found.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Iterable

import jax

from hlat_jax import distributed

INTEGRITY_FILE = "integrity.json"
_BLOCK_BYTES = 1 << 24
_SMALL_FILE_BYTES = 1 << 20


def seal(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Brings files of a folder to the disk and writes their sizes and sums beside them."""
    names = sorted(names)
    with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
        sums = list(pool.map(lambda name: size_and_crc(folder / name, flush=True), names))
    with open(folder / INTEGRITY_FILE, "w") as file:
        json.dump({"files": dict(zip(names, sums, strict=True))}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def damage(folder: pathlib.Path, *, deep: bool) -> str:
    """Returns what is wrong with a sealed folder, "" when nothing is: shallow looks at sizes and sums small files."""
    try:
        files = json.loads((folder / INTEGRITY_FILE).read_bytes())["files"]
        shared = sorted(files.items())[jax.process_index() :: jax.process_count()]
        with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
            found = pool.map(lambda item: _file_damage(folder, item[0], item[1], deep=deep), shared)
            problem = next(filter(None, found), "")
    except FileNotFoundError:
        problem = f"{INTEGRITY_FILE} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = f"{INTEGRITY_FILE} is unreadable"
    return next(filter(None, json.loads(f"[{','.join(distributed.exchange(json.dumps(problem)))}]")), "")


def size_and_crc(path: pathlib.Path, *, flush: bool = False) -> list[int]:
    """Returns the bytes and the CRC-32 of a file; `flush`: and returns when both are on the disk."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())  # a rename must not reach the disk before the data it stands for
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _file_damage(folder: pathlib.Path, name: str, expected: list[int], *, deep: bool) -> str:
    size, crc = expected
    try:
        found = os.stat(folder / name).st_size
        if found != size:
            return f"{name} has {found:,} bytes instead of {size:,}"
        if (deep or size <= _SMALL_FILE_BYTES) and size_and_crc(folder / name)[1] != crc:
            return f"{name} has other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except PermissionError:
        raise  # whoever may not read it knows nothing about damage
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""


def _num_threads() -> int:
    return min(4, os.cpu_count() or 1)
