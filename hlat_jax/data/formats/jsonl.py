"""Random access to the texts of a JSONL file through an index of its lines.

The index is built in one pass over the file, which also hashes every byte, in bounded memory. It can be kept in the run
folder: written atomically with a checksum, and memory-mapped when read.
"""

from __future__ import annotations

import array
import errno
import hashlib
import os
import pathlib
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import Snapshot, new_content_hash
from hlat_jax.store import atomic_files

BLANK_BYTES = b" \t\r\n"
_PIECE_BYTES = 1 << 24  # of a long line
_LINES_AT_ONCE = 1 << 16
_HEADER = struct.Struct("<32s32sQ")  # Snapshot.identity, hash of the content, lines
_CHECKSUM_BYTES = 16  # of the header and the numbers; it stands between the two


class LineIndex(NamedTuple):
    """The lines of a file, without blank ones.

    Attributes:
      lines: int64[num_documents, 3], the first byte of a line, the byte after its last, and its number from 1.
      num_rows: lines, blank ones too.
      content_hash: 32 hex digits of all bytes of the file.
    """

    lines: np.ndarray
    num_rows: int
    content_hash: str


def line_index(snapshot: Snapshot, *, folder: pathlib.Path | None = None) -> LineIndex:
    """Returns the index of a file: the one in `folder` if the file has not changed since, else a new one.

    Without `folder`, or if it is not writable, a new index is kept in a temporary file while it is in use.

    Raises:
      ValueError: the file changed while it was indexed.
      OSError: the disk of `folder` is full or broken.
    """
    location = hashlib.blake2b(os.fsencode(snapshot.file.where), digest_size=8).hexdigest()
    name = f"{snapshot.file.name}-{location}.lines"
    if folder is not None:
        kept = _read_index(folder / name, snapshot=snapshot)
        if kept is not None:
            return kept
        try:
            return _new_index(folder / name, snapshot=snapshot)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    with tempfile.TemporaryDirectory() as temporary:  # it stays mapped after it is unlinked
        return _new_index(pathlib.Path(temporary) / name, snapshot=snapshot)


def _scan(snapshot: Snapshot, digest: Any) -> Iterator[tuple[int, int, bool]]:
    """Yields (first byte, byte after the last, whether it is blank) of each line of a file; updates `digest`."""
    start, end, is_blank = 0, 0, True
    with decoding(snapshot.file), snapshot.file.open() as file:
        while piece := file.readline(_PIECE_BYTES):
            digest.update(piece)
            end += len(piece)
            is_blank = is_blank and not piece.strip(BLANK_BYTES)
            if piece.endswith(b"\n"):
                yield start, end - 1, is_blank
                start, is_blank = end, True
    if end > start:
        yield start, end, is_blank  # a last line without a newline


def _new_index(path: pathlib.Path, *, snapshot: Snapshot) -> LineIndex:
    """Writes an index atomically, piece by piece; a process that has mapped the previous one keeps that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.atomic_writer(path) as file:
        _write_lines(file, snapshot=snapshot)
        snapshot.check()
    index = _read_index(path, snapshot=snapshot)
    assert index is not None
    return index


def _write_lines(file: BinaryIO, *, snapshot: Snapshot) -> None:
    num_rows, numbers, digest, checksum = 0, array.array("q"), new_content_hash(), _checksum()

    def flush() -> None:
        checksum.update(numbers)
        file.write(numbers)
        del numbers[:]

    file.write(bytes(_HEADER.size + _CHECKSUM_BYTES))
    for num_rows, (start, end, is_blank) in enumerate(_scan(snapshot, digest), start=1):
        if not is_blank:
            numbers.extend((start, end, num_rows))
        if len(numbers) >= 3 * _LINES_AT_ONCE:
            flush()
    flush()
    file.seek(0)
    header = _HEADER.pack(snapshot.identity.encode(), digest.hexdigest().encode(), num_rows)
    checksum.update(header)
    file.write(header + checksum.digest())


def _checksum() -> Any:
    return hashlib.blake2b(digest_size=_CHECKSUM_BYTES)


def _read_index(path: pathlib.Path, *, snapshot: Snapshot) -> LineIndex | None:
    """Returns the index at `path`; None if it is missing, damaged or of a different version of the file."""
    try:
        with pyarrow.memory_map(os.fsencode(path)) as file:
            buffer = file.read_buffer()  # it stays mapped after the file is closed, so many files can be open
    except FileNotFoundError:
        return None
    begin = _HEADER.size + _CHECKSUM_BYTES
    header, expected, raw = bytes(buffer[: _HEADER.size]), bytes(buffer[_HEADER.size : begin]), buffer[begin:]
    checksum = _checksum()
    checksum.update(raw)
    checksum.update(header)
    if checksum.digest() != expected:
        print(f"index            {path} is damaged, or of another version: it is made again")
        return None
    identity, content_hash, num_rows = _HEADER.unpack(header)
    if identity != snapshot.identity.encode():
        return None
    lines = np.frombuffer(raw, np.int64).reshape(-1, 3)
    return LineIndex(lines, num_rows=num_rows, content_hash=content_hash.decode("ascii"))


class JsonlDocuments:
    """The texts of a JSONL file by number. Rows are counted from 1 over all lines; blank lines are not documents.

    Attributes:
      snapshots: the file, once.
      num_rows: lines, blank ones too.
    """

    def __init__(self, snapshot: Snapshot, *, field: str, index_folder: pathlib.Path | None = None):
        index = line_index(snapshot, folder=index_folder)
        snapshot.content_hash = index.content_hash
        self._snapshot, self._field, self._lines = snapshot, field, index.lines
        self.snapshots, self.num_rows = (snapshot,), index.num_rows

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> str:
        start, end, row = self._lines[index].tolist()
        where = self._snapshot.file.where
        if end - start > records.MAX_RECORD_BYTES:
            self._snapshot.check()
            reason = f"{end - start} bytes in one line, more than {records.MAX_RECORD_BYTES}; is it a JSON array?"
            raise records.BadRecord(where, row, reason)
        return records.json_text(self._snapshot.read(start, end - start), field=self._field, where=where, row=row)

    def locate(self, index: int) -> str:
        """Returns the file and the row of document `index`."""
        return f"{self._snapshot.file}, row {self._lines[index, 2]}"
