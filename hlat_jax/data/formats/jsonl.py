"""Random access to the texts of a JSONL file through an index of its lines.

The index is built in one pass over the file, which also hashes every byte, in bounded memory. It can be kept in the run
folder: written atomically with a checksum, and memory-mapped when read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import struct
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import Snapshot, new_content_hash
from hlat_jax.store import atomic_files

_CHUNK_BYTES = 1 << 24
BLANK_BYTES = b" \t\r\n"
_MAX_BLANK_BYTES = 80  # a longer line of spaces fails as JSON, with its row
_HEADER = struct.Struct("<8s32s32sQ")  # magic, Snapshot.identity, hash of the content, lines
_CHECKSUM_BYTES = 16  # of the header and the numbers; it stands between the two
_MAGIC = b"hlatidx4"


class LineIndex:
    """The lines of a file, without blank ones.

    Attributes:
      lines: int64[num_documents, 3], the first byte of a line, the byte after its last, and its number from 1.
      num_rows: lines, blank ones too.
      content_hash: 32 hex digits of all bytes of the file.
    """

    def __init__(self, lines: np.ndarray, *, num_rows: int, content_hash: str):
        self.lines, self.num_rows, self.content_hash = lines, num_rows, content_hash


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


def _scan(snapshot: Snapshot, digest: Any) -> Iterator[np.ndarray]:
    """Yields int64[n, 3] of the lines that end in each chunk of a file, as LineIndex.lines but blank lines with a
    negative number; updates `digest`."""
    num_rows, start, offset, carried = 0, 0, 0, b""
    with decoding(snapshot.file), snapshot.file.open() as file:
        while offset <= snapshot.size:
            chunk = file.read(min(_CHUNK_BYTES, snapshot.size - offset))
            if not chunk and offset < snapshot.size:
                raise ValueError(f"{snapshot.file} shrank while it was indexed; start again when it is complete.")
            digest.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset
            if not chunk and start < snapshot.size:
                ends = np.asarray([snapshot.size])  # a last line without a newline
            starts = np.concatenate([[start], ends + 1])
            lines = np.stack([starts[:-1], ends, num_rows + 1 + np.arange(len(ends))], axis=1)
            view, view_start = carried + chunk, offset - len(carried)
            for line in np.flatnonzero(lines[:, 1] - lines[:, 0] <= _MAX_BLANK_BYTES):
                if not view[lines[line, 0] - view_start : lines[line, 1] - view_start].strip(BLANK_BYTES):
                    lines[line, 2] *= -1
            yield lines
            if not chunk:
                return
            num_rows, start, offset = num_rows + len(lines), int(starts[-1]), offset + len(chunk)
            carried = view[-_MAX_BLANK_BYTES:]


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
    num_rows, digest, checksum = 0, new_content_hash(), _checksum()
    file.write(bytes(_HEADER.size + _CHECKSUM_BYTES))
    for lines in _scan(snapshot, digest):
        raw = lines[lines[:, 2] > 0].astype("<i8").tobytes()
        checksum.update(raw)
        file.write(raw)
        num_rows += len(lines)
    file.seek(0)
    header = _HEADER.pack(_MAGIC, snapshot.identity.encode(), digest.hexdigest().encode(), num_rows)
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
    _, identity, content_hash, num_rows = _HEADER.unpack(header)
    if identity != snapshot.identity.encode():
        return None
    lines = np.frombuffer(raw, "<i8").reshape(-1, 3)
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
