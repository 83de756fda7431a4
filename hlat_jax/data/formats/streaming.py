"""Reads documents in order, for `build` and `tokenizer`, which read all text once.

Reads every format that training reads, and .gz, .zst and URLs, which cannot be read by number. Memory holds one
record, or one small batch of a column, whatever the size of the file. Texts and errors are the same as by number.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from typing import BinaryIO

import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.array_record import array_record_documents
from hlat_jax.data.formats.built import open_built
from hlat_jax.data.formats.columns import cell, iter_arrow, iter_parquet
from hlat_jax.data.formats.decoding import decode_errors
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.paths import STREAMED_SUFFIXES, file_format
from hlat_jax.data.formats.plain_text import paragraph_parts

MANY_BAD = 1000  # first records of a file among which one that is not bad is looked for
_CHUNK_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}

Item = tuple[str | records.BadRecord, int | None]


def iter_documents(file: DataFile, *, text_field: str, cut_text: bool = False) -> Iterator[Item]:
    """Yields (text, row) of every document of a file or built dataset. Rows count from 1, and are None for plain text.

    For an unusable record the BadRecord with the reason is yielded, and reading continues with the next one. `cut_text`
    cuts plain text into documents at paragraphs.
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
        yield from _by_number(array_record_documents(Snapshot(file)))
    else:
        documents = open_built(file.where, key="IN", tokenizer_sha256=None)
        if documents.text_bytes is not None:
            raise ValueError(f"{file} holds token ids, not text. Give the text it was built from.")
        yield from _by_number(documents)


def check_first(file: DataFile, *, text_field: str) -> None:
    """Raises BadRecord for the first document of a file if the first thousand are all unusable."""
    first = None
    for document, _ in itertools.islice(iter_documents(file, text_field=text_field), MANY_BAD):
        if not isinstance(document, records.BadRecord):
            return
        first = first or document
    if first is not None:
        raise first


def _or_bad(read: Callable[[], str]) -> str | records.BadRecord:
    """Returns `read()`, or the BadRecord that it raises."""
    try:
        return read()
    except records.BadRecord as error:
        return error


@contextlib.contextmanager
def _open(file: DataFile) -> Iterator[BinaryIO]:
    """Yields a file opened for sequential reading, decompressed."""
    with decode_errors(file), contextlib.ExitStack() as stack:
        raw = stack.enter_context(file.open())
        if file.suffix in STREAMED_SUFFIXES:
            raw = stack.enter_context(pyarrow.CompressedInputStream(raw, _CODECS[file.suffix]))
        yield io.BufferedReader(raw, _CHUNK_BYTES)


def _jsonl(file: DataFile, field: str) -> Iterator[Item]:
    where, limit, row = file.where, records.MAX_RECORD_BYTES, 0
    with _open(file) as stream:
        while line := stream.readline(limit + 1):
            row += 1
            is_blank, line = line.isspace(), line.removesuffix(b"\n")
            if len(line) > limit:
                while (rest := stream.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield records.BadRecord(where, row, f"more than {limit} bytes in one line, as in a JSON array."), row
            elif not is_blank:
                yield _or_bad(lambda: records.json_text(line, field=field, where=where, row=row)), row  # noqa: B023


def _text(file: DataFile, *, cut: bool) -> Iterator[Item]:
    where, limit = file.where, records.MAX_RECORD_BYTES
    with _open(file) as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        yield records.BadRecord(where, None, f"more than {limit} bytes in one document. Split it."), None
    elif not cut:
        yield _or_bad(lambda: records.utf8_text(raw, where=where, row=None)), None
    else:
        try:
            for start, stop in paragraph_parts(raw, file):
                yield records.utf8_text(raw[start:stop], where=where, row=None), None
        except records.BadRecord as error:
            yield error, None


def _cells(parts: Iterator[pyarrow.Array], *, file: DataFile, field: str) -> Iterator[Item]:
    row = 0
    with decode_errors(file):
        for part in parts:
            for index in range(len(part)):
                row += 1
                options = {"field": field, "where": file.where, "row": row}
                yield _or_bad(lambda: cell(part, index, **options)), row  # noqa: B023


def _by_number(documents: records.Documents) -> Iterator[Item]:
    for index in range(len(documents)):
        yield _or_bad(lambda: documents[index]), index + 1  # noqa: B023
