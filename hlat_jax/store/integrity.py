"""Writes checksums of a folder's files once the folder is complete, and compares them before it is read.

The processes of a job divide the files among themselves, and all return the same result.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Iterable
from typing import Annotated, TypedDict

from hlat_jax.store import atomic_files
from hlat_jax.store.typed_json import Count, read_json

INTEGRITY_FILE = "integrity.json"
_BLOCK_BYTES = 1 << 20
_SMALL_FILE_BYTES = 1 << 20


class _Sums(TypedDict):
    files: dict[str, Annotated[list[Count], "[bytes, CRC-32]", lambda sums: len(sums) == 2]]


def seal(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Fsyncs files of a folder and writes their sizes and CRC-32 sums to `integrity.json` in it."""
    names = sorted(names)
    with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
        sums = list(pool.map(lambda name: size_and_crc(folder / name, flush=True), names))
    atomic_files.write_json(folder / INTEGRITY_FILE, {"files": dict(zip(names, sums, strict=True))})


def damage(folder: pathlib.Path, *, deep: bool) -> str:
    """Returns the damage of a sealed folder in words, or "" without damage.

    Compares all sizes and the sums of small files, with `deep` the sums of all files. Processes share the files.
    """
    import jax  # not at the top: checks before it is imported use this module

    from hlat_jax.host import distributed

    share = slice(jax.process_index(), None, jax.process_count())
    problem = json.dumps(damage_of_share(folder, share, deep=deep))
    return next(filter(None, json.loads(f"[{','.join(distributed.exchange(problem))}]")), "")


def damage_of_share(folder: pathlib.Path, share: slice, *, deep: bool) -> str:
    """Returns the damage of one share of the sorted files of a sealed folder, see `damage`. Imports no JAX."""
    try:
        sums = read_json(folder / INTEGRITY_FILE, kind=_Sums)["files"]
        with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
            items = sorted(sums.items())[share]
            problems = pool.map(lambda item: _file_damage(folder, item[0], item[1], deep=deep), items)
            return next(filter(None, problems), "")
    except PermissionError:
        raise  # not readable by this user, which is not damage
    except (OSError, ValueError) as error:  # a file is missing, or stands where the folder should be
        return str(error).rstrip(".")


def size_and_crc(path: pathlib.Path, *, flush: bool = False) -> list[int]:
    """Returns the size in bytes and the CRC-32 of a file. With `flush` its data is fsynced first."""
    size = crc = 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        if flush:
            os.fsync(file.fileno())  # a rename must not reach the disk before the data it stands for
        while count := file.readinto(block):
            size += count
            crc = zlib.crc32(block[:count], crc)
    return [size, crc]


def _file_damage(folder: pathlib.Path, name: str, expected: list[int], *, deep: bool) -> str:
    size, crc = expected
    found_bytes = os.stat(folder / name).st_size
    if found_bytes != size:
        return f"{name} has {found_bytes:,} bytes instead of {size:,}"
    if (deep or size <= _SMALL_FILE_BYTES) and size_and_crc(folder / name)[1] != crc:
        return f"{name} has other content than was written"
    return ""


def _num_threads() -> int:
    return min(4, os.cpu_count() or 1)
