"""Sequential reading of documents, for commands that read all text once: `build` and `tokenizer`.

Reads every format that training reads, and .gz and .zst, which cannot be read by number. Memory holds one record, or
one small batch of a column, whatever the size of the file. Texts and errors are the same as in random access.
"""

from __future__ import annotations

import contextlib
import io
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
    kind = file_format(file)
    if kind == "jsonl":
        yield from _jsonl(file, text_field)
    elif kind == "text":
        yield from _text(file, cut=cut_text)
    elif kind in ("parquet", "arrow"):
        columns = iter_parquet if kind == "parquet" else iter_arrow
        yield from _cells(columns(file, text_field), file=file, field=text_field)
    elif kind == "array_record":
        yield from _by_number(ArrayRecordDocuments(Snapshot(file, has_checksums=True)))
    else:
        documents = open_built(file.where, key="IN", tokenizer_sha256=None)
        if not isinstance(documents, BuiltTexts):
            raise ValueError(f"{file} holds token ids, not text; give the text it was built from.")
        yield from _by_number(documents)


@contextlib.contextmanager
def _open(file: DataFile) -> Iterator[BinaryIO]:
    """Yields a file opened for sequential reading, decompressed."""
    with decoding(file), contextlib.ExitStack() as stack:
        raw = stack.enter_context(file.open())
        if file.suffix in STREAMED_SUFFIXES:
            raw = stack.enter_context(pyarrow.CompressedInputStream(raw, _CODECS[file.suffix]))
        yield raw


def _lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yields each line without its end, alone in a list, cut after the limit.

    A caller that pops the line holds the only reference to it, so a long one can be freed while it is decoded.
    """
    buffered = io.BufferedReader(stream, _CHUNK_BYTES)
    while line := buffered.readline(records.MAX_RECORD_BYTES + 1):
        is_whole = line.endswith(b"\n") or len(line) <= records.MAX_RECORD_BYTES
        holder = [line.removesuffix(b"\n")]
        del line
        yield holder
        while not is_whole:  # passes over the rest
            rest = buffered.readline(_CHUNK_BYTES)
            is_whole = rest.endswith(b"\n") or not rest


def _jsonl(file: DataFile, field: str) -> Iterator[Item]:
    where = file.where
    with _open(file) as stream:
        for row, holder in enumerate(_lines(stream), start=1):
            if len(holder[0]) > records.MAX_RECORD_BYTES:
                reason = f"more than {records.MAX_RECORD_BYTES} bytes in one line; is it a JSON array?"
                yield records.BadRecord(where, row, reason), row
            elif holder[0][:1].strip(BLANK_BYTES) or holder[0].strip(BLANK_BYTES):
                try:
                    text = records.json_text(holder.pop(), field=field, where=where, row=row)
                except records.BadRecord as error:
                    text = error
                yield text, row
                del text  # frees it before the next one is read


def _text(file: DataFile, *, cut: bool) -> Iterator[Item]:
    raw = bytearray()
    with _open(file) as stream:
        while len(raw) <= records.MAX_RECORD_BYTES and (chunk := stream.read(_CHUNK_BYTES)):
            raw += chunk
    try:
        if len(raw) > records.MAX_RECORD_BYTES:
            reason = f"more than {records.MAX_RECORD_BYTES} bytes in one document; split it."
            raise records.BadRecord(file.where, None, reason)
        if cut:
            for start, stop in paragraph_parts(raw, file):
                yield records.utf8_text(raw[start:stop], where=file.where, row=None), None
        else:
            text = records.utf8_text(raw, where=file.where, row=None)
            raw.clear()
            yield text, None
    except records.BadRecord as error:
        yield error, None


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


def _by_number(documents: BuiltTexts | ArrayRecordDocuments) -> Iterator[Item]:
    for index in range(len(documents)):
        try:
            text = documents[index]
        except records.BadRecord as error:
            text = error
        yield text, index + 1
        del text
