"""Sequential reading of documents, for commands that read all text once: `build` and `tokenizer`.

Reads every format that training reads, and .gz and .zst, which cannot be read by number. Memory holds one record, or
one small batch of a column, whatever the size of the file. Texts and errors are the same as in random access.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.array_record import ArrayRecordDocuments
from hlat_jax.data.formats.arrow import iter_arrow
from hlat_jax.data.formats.built import BuiltTexts, open_built
from hlat_jax.data.formats.columns import TextColumn, cell
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.jsonl import BLANK_BYTES
from hlat_jax.data.formats.parquet import iter_parquet
from hlat_jax.data.formats.paths import STREAMED_SUFFIXES, file_format
from hlat_jax.data.formats.plain_text import paragraph_parts

_CHUNK_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}

Item = tuple[str | records.BadRecord, int | None]


def iter_documents(file: DataFile, *, text_field: str, cut_text: bool = False) -> Iterator[Item]:
    """Yields (text, row) of every document of a file or built dataset; rows count from 1; None for plain text.

    For an unusable record the BadRecord with the reason is yielded, and reading continues with the next one. `cut_text`
    cuts plain text into documents at paragraphs.

    Raises:
      ValueError: a file that is damaged or truncated, has no such column, or holds token ids.
    """
    if cut_text and file_format(file) == "text":
        yield from _text(file, text_field, cut=True)
    else:
        yield from _READERS[file_format(file)](file, text_field)


@contextlib.contextmanager
def _opened(file: DataFile) -> Iterator[BinaryIO]:
    """Yields a file opened for sequential reading, decompressed."""
    with decoding(file), contextlib.ExitStack() as stack:
        raw = stack.enter_context(file.open())
        if file.suffix in STREAMED_SUFFIXES:
            raw = stack.enter_context(pyarrow.CompressedInputStream(raw, _CODECS[file.suffix]))
        yield raw


def _lines(stream: BinaryIO) -> Iterator[list[bytes | bytearray] | None]:
    """Yields each line without its newline, alone in a list; None for one over the limit.

    A caller that pops the line holds the only reference to it, so a long one can be freed while it is decoded.
    """
    line: bytes | bytearray | None = b""
    num_bytes = 0
    while chunk := stream.read(_CHUNK_BYTES):
        for number, piece in enumerate(chunk.split(b"\n")):
            if number:  # a line ended before this piece
                holder, line, num_bytes = None if line is None else [line], b"", 0
                yield holder
            num_bytes += len(piece)
            if num_bytes > records.MAX_RECORD_BYTES:
                line = None
            elif num_bytes == len(piece):
                line = piece
            else:
                line = line if isinstance(line, bytearray) else bytearray(line)
                line += piece  # grows in place
    if num_bytes:
        holder, line = None if line is None else [line], None
        yield holder


def _jsonl(file: DataFile, field: str) -> Iterator[Item]:
    where = file.where
    with _opened(file) as stream:
        for row, holder in enumerate(_lines(stream), start=1):
            if holder is None:
                reason = f"more than {records.MAX_RECORD_BYTES} bytes in one line; is it a JSON array?"
                yield records.bad_record(where, row, reason), row
            elif not holder[0][:1].strip(BLANK_BYTES) and not holder[0].strip(BLANK_BYTES):
                continue
            else:
                try:
                    text = records.json_text(holder.pop(), field=field, where=where, row=row)
                except records.BadRecord as error:
                    text = error
                yield text, row
                del text  # frees it before the next one is read


def _text(file: DataFile, field: str, *, cut: bool = False) -> Iterator[Item]:
    del field  # plain text has none
    raw = bytearray()
    with _opened(file) as stream:
        while len(raw) <= records.MAX_RECORD_BYTES and (chunk := stream.read(_CHUNK_BYTES)):
            raw += chunk
    if len(raw) > records.MAX_RECORD_BYTES:
        reason = f"more than {records.MAX_RECORD_BYTES} bytes in one document; split it."
        yield records.bad_record(file.where, None, reason), None
        return
    try:
        if cut:
            for start, stop in paragraph_parts(raw, file):
                yield records.utf8_text(raw[start:stop], where=file.where, row=None), None
            return
        text = records.utf8_text(raw, where=file.where, row=None)
    except records.BadRecord as error:
        text = error
    del raw
    yield text, None


def _parquet(file: DataFile, field: str) -> Iterator[Item]:
    yield from _cells(iter_parquet(file, field), file=file, field=field)


def _arrow(file: DataFile, field: str) -> Iterator[Item]:
    yield from _cells(iter_arrow(file, field), file=file, field=field)


def _cells(parts: Iterator[TextColumn], *, file: DataFile, field: str) -> Iterator[Item]:
    row = 0
    with decoding(file):
        for part in parts:
            for index in range(len(part)):
                row += 1
                try:
                    text = cell(part, index, field=field, where=file.where, row=row)
                except records.BadRecord as error:
                    text = error
                yield text, row
                del text  # frees it before the next one is read


def _array_record(file: DataFile, field: str) -> Iterator[Item]:
    del field  # a record is its text
    yield from _by_number(ArrayRecordDocuments(Snapshot(file, has_checksums=True)))


def _built(file: DataFile, field: str) -> Iterator[Item]:
    del field  # a document is its text
    documents = open_built(file.where, key="IN", tokenizer_sha256=None)
    if not isinstance(documents, BuiltTexts):
        raise ValueError(f"{file} holds token ids, not text; give the text it was built from.")
    yield from _by_number(documents)


def _by_number(documents: BuiltTexts | ArrayRecordDocuments) -> Iterator[Item]:
    for index in range(len(documents)):
        try:
            text = documents[index]
        except records.BadRecord as error:
            text = error
        yield text, index + 1
        del text


_READERS = {
    "jsonl": _jsonl,
    "text": _text,
    "parquet": _parquet,
    "arrow": _arrow,
    "array_record": _array_record,
    "built": _built,
}
