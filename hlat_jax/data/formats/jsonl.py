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
from typing import Any, BinaryIO

import numpy as np
import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.files import Snapshot, new_content_hash
from hlat_jax.store import atomic_files

_CHUNK_BYTES = 1 << 24
BLANK_BYTES = b" \t\r\n"
_MAX_BLANK_BYTES = 80  # a longer line of spaces fails as JSON, with its row
_HEADER = struct.Struct("<8s32s32sQQ")  # magic, Snapshot.identity, hash of the content, documents, blank lines
_CHECKSUM_BYTES = 16  # of the header and the numbers; it stands between the two
_MAGIC = b"hlatidx3"


class LineIndex:
    """The byte ranges of the lines of a file, without blank lines.

    Attributes:
      spans: int64[num_documents, 2], first byte of the line and the byte after its last, without the line end.
      blanks: int64[num_blank_lines], for each blank line the number of documents before it, ascending.
      content_hash: 32 hex digits of all bytes of the file.
    """

    def __init__(self, spans: np.ndarray, blanks: np.ndarray, *, content_hash: str):
        self.spans, self.blanks, self.content_hash = spans, blanks, content_hash

    def row(self, index: int) -> int:
        """Returns the line number in the file, from 1, of document `index`."""
        return index + 1 + int(np.searchsorted(self.blanks, index, side="right"))


def line_index(snapshot: Snapshot, *, folder: pathlib.Path | None = None) -> LineIndex:
    """Returns the index of a file: the one in `folder` if the file has not changed since, else a new one.

    If `folder` is not writable, a new index is kept in a temporary file while it is in use.

    Raises:
      ValueError: the file changed while it was indexed.
      OSError: the disk of `folder` is full or broken.
    """
    if folder is None:
        digest = new_content_hash()
        parts = list(_scan(snapshot, digest))
        spans, blanks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return LineIndex(spans, blanks, content_hash=digest.hexdigest())
    place = hashlib.blake2b(os.fsencode(snapshot.file.where), digest_size=8).hexdigest()
    path = pathlib.Path(folder) / f"{snapshot.file.name}-{place}.lines"
    kept = _read_index(path, snapshot=snapshot)
    if kept is not None:
        return kept
    try:
        _write_index(path, snapshot=snapshot)
        kept = _read_index(path, snapshot=snapshot)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        with tempfile.TemporaryDirectory() as temporary:  # it stays mapped after it is unlinked
            path = pathlib.Path(temporary) / path.name
            _write_index(path, snapshot=snapshot)
            kept = _read_index(path, snapshot=snapshot)
    assert kept is not None
    return kept


def _scan(snapshot: Snapshot, digest: Any) -> Any:
    """Yields (spans, blanks) of the lines that end in each chunk of the file, as in LineIndex; updates `digest`."""
    num_documents, start, offset, carried = 0, 0, 0, b""
    with snapshot.opened() as file:
        while offset <= snapshot.size:
            chunk = file.read(min(_CHUNK_BYTES, snapshot.size - offset))
            if not chunk and offset < snapshot.size:
                raise ValueError(f"{snapshot.file} shrank while it was indexed; start again when it is complete.")
            digest.update(chunk)
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset
            if not chunk and start < snapshot.size:
                ends = np.asarray([snapshot.size])  # a last line without a newline
            spans = np.empty((len(ends), 2), np.int64)
            spans[:, 1], spans[1:, 0] = ends, ends[:-1] + 1
            spans[:1, 0] = start
            view, view_start = carried + chunk, offset - len(carried)
            blank = [
                line
                for line in np.flatnonzero(spans[:, 1] - spans[:, 0] <= _MAX_BLANK_BYTES)
                if not view[spans[line, 0] - view_start : spans[line, 1] - view_start].strip(BLANK_BYTES)
            ]
            keep = np.ones(len(spans), bool)
            keep[blank] = False
            before = num_documents + np.cumsum(keep)[blank] if blank else np.zeros(0)
            yield spans[keep], before.astype(np.int64)
            num_documents += int(keep.sum())
            if len(ends):
                start = int(ends[-1]) + 1
            if not chunk:
                return
            offset += len(chunk)
            carried = view[-_MAX_BLANK_BYTES:]


def _write_index(path: pathlib.Path, *, snapshot: Snapshot) -> None:
    """Writes an index atomically, piece by piece; a process that has mapped the previous one keeps that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.atomic_writer(path) as file:
        _write_parts(file, snapshot=snapshot)
        snapshot.check()


def _write_parts(file: BinaryIO, *, snapshot: Snapshot) -> None:
    file.write(bytes(_HEADER.size + _CHECKSUM_BYTES))
    num_documents, blanks, digest, checksum = 0, [], new_content_hash(), _checksum()

    def write(numbers: np.ndarray) -> None:
        raw = numbers.astype("<i8").tobytes()
        checksum.update(raw)
        file.write(raw)

    for spans, blank in _scan(snapshot, digest):
        write(spans)
        num_documents += len(spans)
        blanks.append(blank)
    blanks = np.concatenate(blanks)
    write(blanks)
    file.seek(0)
    hashes = snapshot.identity.encode(), digest.hexdigest().encode()
    header = _HEADER.pack(_MAGIC, *hashes, num_documents, len(blanks))
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
    if len(header) == _HEADER.size and header[:8] != _MAGIC:  # of another release
        return None
    checksum = _checksum()
    checksum.update(raw)
    checksum.update(header)
    if checksum.digest() != expected:
        print(f"index            {path} is damaged: it is made again")
        return None
    _, identity, content_hash, num_documents, num_blanks = _HEADER.unpack(header)
    if identity != snapshot.identity.encode():
        return None
    numbers = np.frombuffer(raw, "<i8")
    assert len(numbers) == 2 * num_documents + num_blanks
    spans, blanks = np.split(numbers, [2 * num_documents])
    return LineIndex(spans.reshape(-1, 2), blanks, content_hash=content_hash.decode("ascii"))


class JsonlDocuments:
    """The texts of a JSONL file by number. Rows are counted from 1 over all lines; blank lines are not documents.

    Attributes:
      snapshots: the file, once.
      num_rows: lines, blank ones too.
    """

    def __init__(self, snapshot: Snapshot, *, field: str, index_folder: pathlib.Path | None = None):
        self._snapshot, self._field = snapshot, field
        self._index = line_index(snapshot, folder=index_folder)
        snapshot.content_hash = self._index.content_hash
        self.snapshots, self.num_rows = (snapshot,), len(self._index.spans) + len(self._index.blanks)

    def __len__(self) -> int:
        return len(self._index.spans)

    def __getitem__(self, index: int) -> str:
        start, end = (int(place) for place in self._index.spans[index])
        where, row = self._snapshot.file.where, self._index.row(index)
        if end - start > records.MAX_RECORD_BYTES:
            self._snapshot.check()
            reason = f"{end - start} bytes in one line, more than {records.MAX_RECORD_BYTES}; is it a JSON array?"
            raise records.bad_record(where, row, reason)
        return records.json_text(self._snapshot.read(start, end - start), field=self._field, where=where, row=row)

    def locate(self, index: int) -> str:
        """Returns the file and the row of document `index`."""
        return f"{self._snapshot.file}, row {self._index.row(index)}"
