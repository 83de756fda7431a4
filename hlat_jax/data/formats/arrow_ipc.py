"""Arrow IPC files and streams read in place, a record batch at a time.

HLAT's files are streams of one batch of any size. A local uncompressed batch is memory-mapped, so it takes no memory; a
compressed or remote one is decoded, through the cache that Parquet uses. Message headers are parsed here because
pyarrow.ipc cannot skip a message body (it would download a remote file, or allocate a batch before it can be refused)
and does not say whether a batch is compressed. Source: Arrow columnar format 1.5, "Serialization and Interprocess
Communication", and its Message.fbs.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.ipc

from hlat_jax.data.formats.columns import (
    MAX_PART_BYTES,
    ColumnCache,
    Part,
    PartedDocuments,
    TextColumn,
    text_column,
    too_large,
)
from hlat_jax.data.formats.files import DataFile, Snapshot, format_error
from hlat_jax.data.formats.paths import build_command

MAX_COMPRESSED_BYTES = 64 << 20  # its decompressed size is not known in advance

FILE_MAGIC = b"ARROW1"
_MAPPED_PART_BYTES = 64 << 10  # memory-mapped pages do not count, only Python objects
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3  # MessageHeader
_BATCH_FIELDS = np.dtype([("start", "<i8"), ("bytes", "<i8"), ("rows", "<i8"), ("compressed", "?")])


class IncompleteArrow(ValueError):
    """Bytes that are not an Arrow message, or a truncated one."""


def arrow_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> PartedDocuments:
    """Returns the texts of an Arrow IPC file or stream by number.

    Raises:
      ValueError: not a complete file or stream, no such column of text, dictionaries, or a batch too large to decode.
    """
    file = snapshot.file
    try:
        schema, batches = _index(snapshot, field=field)
    except (IncompleteArrow, pyarrow.ArrowException, OSError, struct.error, IndexError) as error:
        damaged = f"{file} is not a complete Arrow file or stream ({error}); write it again."
        raise format_error(file, error, damaged=damaged) from None
    column = text_column(schema, field, where=file.where, dictionaries=False)
    for number, batch in enumerate(batches):
        limit = MAX_COMPRESSED_BYTES if batch["compressed"] else MAX_PART_BYTES
        if batch["bytes"] > limit and (batch["compressed"] or file.is_remote):
            num_bytes = int(batch["bytes"])
            raise too_large(file, f"record batch {number + 1}", field=field, num_bytes=num_bytes, limit=limit)

    def load(part: int) -> tuple[Any, int]:
        start, num_bytes = int(batches[part]["start"]), int(batches[part]["bytes"])
        if is_mapped[part]:
            with pyarrow.memory_map(os.fsencode(file)) as mapped:
                raw = mapped.read_buffer().slice(start, num_bytes)  # stays mapped after the file is closed
        else:
            raw = pyarrow.py_buffer(snapshot.read(start, num_bytes))
        batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(raw), schema)
        texts = TextColumn(batch.column(column))
        return texts, _MAPPED_PART_BYTES if is_mapped[part] else max(texts.nbytes, num_bytes)

    is_mapped = [not (file.is_remote or batch["compressed"]) for batch in batches]
    parts = [
        Part(int(batch["rows"]), _MAPPED_PART_BYTES if mapped else int(batch["bytes"]))
        for batch, mapped in zip(batches, is_mapped, strict=True)
    ]
    return PartedDocuments(snapshot, parts=parts, load=load, cache=cache, field=field, part_name="record batch")


def _index(snapshot: Snapshot, *, field: str) -> tuple[pyarrow.Schema, np.ndarray]:
    """Returns the schema, and _BATCH_FIELDS of every record batch: position and contents of its message."""
    schema, batches = None, []
    with snapshot.file.open() as file:
        start = _first_message(file, size=snapshot.size)
        while (metadata := _metadata(file, start, size=snapshot.size)) is not None:
            kind, body_bytes, header = _parse_message(metadata)
            end = file.tell() + body_bytes
            if end > snapshot.size:
                raise IncompleteArrow(f"the message at byte {start} ends {end - snapshot.size} bytes beyond the file")
            if kind == _SCHEMA and schema is None:
                file.seek(start)
                schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(file.read(end - start)))
            elif kind == _DICTIONARY_BATCH:
                raise ValueError(
                    f"{snapshot.file} holds dictionaries, which are not read by number. Convert it and train on that: "
                    + build_command(snapshot.file, out="DIR", text_field=field)
                )
            elif kind == _RECORD_BATCH:
                rows = _field(metadata, header, 0)
                num_rows = struct.unpack_from("<q", metadata, rows)[0] if rows else 0
                if num_rows < 0:
                    raise IncompleteArrow("a record batch with a negative number of rows")
                batches.append((start, end - start, num_rows, bool(_field(metadata, header, 3))))
            start = end
    if schema is None:
        raise IncompleteArrow("no schema")
    return schema, np.asarray(batches, _BATCH_FIELDS)


def _first_message(file: BinaryIO, *, size: int) -> int:
    """Returns where the messages begin: an IPC file is a stream between a magic string and a footer."""
    if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
        return 0
    file.seek(size - len(FILE_MAGIC))
    if file.read(len(FILE_MAGIC)) != FILE_MAGIC:
        raise IncompleteArrow("the end of the file is missing")
    return 8


def _metadata(file: BinaryIO, start: int, *, size: int) -> bytes | None:
    """Returns the metadata of the message at `start`, leaving `file` at its body; None at the end of the stream."""
    file.seek(start)
    prefix = file.read(8)
    if len(prefix) < 8:
        raise IncompleteArrow("no end-of-stream marker: it was truncated, or its writer was not closed")
    continuation, length = struct.unpack("<Ii", prefix)
    if continuation != 0xFFFFFFFF or length < 0:
        raise IncompleteArrow(f"no message at byte {start}")
    if length == 0:
        return None
    if start + len(prefix) + length > size:
        raise IncompleteArrow(f"the message at byte {start} is cut off")
    return file.read(length)


def _parse_message(metadata: bytes) -> tuple[int, int, int]:
    """Returns the kind of a message, the length of its body, and the offset of its header table in the metadata."""
    (message,) = struct.unpack_from("<I", metadata)
    kind, header, body = (_field(metadata, message, number) for number in (1, 2, 3))
    if not kind or not header:
        raise IncompleteArrow("a message without a header")
    (body_bytes,) = struct.unpack_from("<q", metadata, body) if body else (0,)
    if body_bytes < 0:
        raise IncompleteArrow("a message body of negative length")
    return metadata[kind], body_bytes, header + struct.unpack_from("<I", metadata, header)[0]


def _field(metadata: bytes, table: int, number: int) -> int:
    """Returns the offset of a field of a FlatBuffers table; 0 if the field is absent."""
    vtable = table - struct.unpack_from("<i", metadata, table)[0]
    (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < vtable_bytes else 0
    return table + offset if offset else 0


def open_arrow(file: DataFile) -> pyarrow.RecordBatchReader | pyarrow.ipc.RecordBatchFileReader:
    """Returns pyarrow's reader of a file or stream, for sequential reading."""
    opened = file.open() if file.is_remote else pyarrow.memory_map(os.fsencode(file))
    try:
        is_file = opened.read(len(FILE_MAGIC)) == FILE_MAGIC
        opened.seek(0)
        return pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)
    except (pyarrow.ArrowException, OSError) as error:
        damaged = f"{file} is not a complete Arrow file or stream ({error}); write it again."
        raise format_error(file, error, damaged=damaged) from None
