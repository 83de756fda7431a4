"""Reads plain-text files, as one document each or cut into documents at paragraphs."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence

import numpy as np

from hlat_jax.data.formats import records
from hlat_jax.data.formats.files import DataFile, Snapshot

_PART_BYTES = 4096  # about 1,000 tokens
_MIN_PARTS = 64  # of a short file, if its paragraphs are short enough
_LONGEST_IN_PARTS = 16
_BLANK_LINES, _LINE_ENDS = re.compile(rb"\r?\n[ \t\r]*\n\s*"), re.compile(rb"\r?\n\s*")


def text_documents(files: Sequence[DataFile], *, cut: bool) -> records.Documents:
    """Returns documents by number, each a plain-text file, or whole paragraphs without the blank lines between."""
    snapshots = tuple(Snapshot(file) for file in files)
    spans = [np.asarray([[0, snapshot.size]]) for snapshot in snapshots]
    if cut:
        parts = (list(paragraph_parts(_read_whole(each), each.file)) for each in snapshots)
        spans = [np.asarray(of_file, np.int64).reshape(-1, 2) for of_file in parts]
    starts = records.starts(len(of_file) for of_file in spans)

    def locate(index: int) -> str:
        file, part = records.find_part(starts, index)
        start, stop = spans[file][part]
        return f"{snapshots[file].file}" + (f", bytes {start} to {stop}" if cut else "")

    def read(index: int) -> str:
        file, part = records.find_part(starts, index)
        start, stop = spans[file][part].tolist()
        raw = snapshots[file].read(start, stop - start) if cut else _read_whole(snapshots[file])
        return records.utf8_text(raw, where=locate(index), row=None)

    return records.Documents(snapshots=snapshots, num_documents=int(starts[-1]), read=read, locate=locate)


def _read_whole(snapshot: Snapshot) -> bytes:
    if snapshot.size > records.MAX_RECORD_BYTES:
        reason = f"{snapshot.size} bytes in one document, more than {records.MAX_RECORD_BYTES}. Split it."
        raise records.BadRecord(snapshot.file.where, None, reason)
    return snapshot.read(0, snapshot.size)


def paragraph_parts(raw: bytes | bytearray, file: DataFile) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of parts of whole paragraphs. A part of more than 64 KiB is cut at line ends.

    A part ends with the first paragraph, or line, that brings it to 4 KiB. In a text of less than 256 KiB, a 64th and a
    quarter of its size take the place of 4 KiB and 64 KiB. `raw` is the content of the file.
    """
    records.utf8_text(raw, where=file.where, row=None)
    if b"\0" in raw:
        raise ValueError(
            f"{file} holds NUL bytes, so it is not UTF-8. Give text, or convert it with iconv -f UTF-16 -t UTF-8."
        )
    least = min(_PART_BYTES, len(raw) // _MIN_PARTS)
    begin = len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0
    for start, stop in _cut(raw, begin, len(raw), separator=_BLANK_LINES, least=least):
        if stop - start > _LONGEST_IN_PARTS * least:
            yield from _cut(raw, start, stop, separator=_LINE_ENDS, least=least)
        else:
            yield start, stop


def _cut(raw: bytes, start: int, end: int, *, separator: re.Pattern[bytes], least: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of parts of raw[start:end], of at least `least` bytes, ended by `separator`."""
    for match in separator.finditer(raw, start, end):
        if match.start() - start >= least and raw[start : match.start()].strip():
            yield start, match.start()
            start = match.end()
    if raw[start:end].strip():
        yield start, end
