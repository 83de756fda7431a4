"""Arrow IPC files and streams, by record batch, with pyarrow's reader of messages.

HLAT's files are streams of one batch of any size. A local uncompressed batch is memory-mapped, so it takes no memory; a
compressed or remote one is decoded, through the cache that Parquet uses.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow
import pyarrow.ipc

from hlat_jax.data.formats.columns import (
    MAX_PART_BYTES,
    ColumnCache,
    ColumnDocuments,
    TextColumn,
    check_size,
    text_column,
)
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.paths import build_command

MAX_COMPRESSED_BYTES = 64 << 20  # its decompressed size is not known in advance

_FILE_MAGIC = b"ARROW1"
_MAPPED_BYTES = 64 << 10  # of a mapped batch: its pages do not count, only Python objects


class _Batch(NamedTuple):
    """The message of a record batch in a file."""

    start: int
    num_bytes: int
    num_rows: int
    is_mapped: bool


def arrow_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> ColumnDocuments:
    """Returns the texts of an Arrow IPC file or stream by number.

    Raises:
      ValueError: not a complete file or stream, no such column of text, dictionaries, or a batch too large to decode.
    """
    file = snapshot.file
    with decoding(file):
        schema, batches = _index(snapshot, field=field)
        column = text_column(schema, field, where=file.where, dictionaries=False)

    def read(number: int) -> TextColumn:
        batch = batches[number]
        if batch.is_mapped:
            with pyarrow.memory_map(os.fsencode(file)) as mapped:
                raw = mapped.read_buffer().slice(batch.start, batch.num_bytes)  # stays mapped after it is closed
        else:
            raw = pyarrow.py_buffer(snapshot.read(batch.start, batch.num_bytes))
        texts = TextColumn(pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(raw), schema).column(column))
        texts.nbytes = _MAPPED_BYTES if batch.is_mapped else texts.nbytes
        return texts

    def load(number: int) -> TextColumn:
        return cache.get((file.where, number), lambda: read(number))

    rows = [batch.num_rows for batch in batches]
    return ColumnDocuments(snapshot, rows=rows, load=load, field=field, part="record batch")


def _index(snapshot: Snapshot, *, field: str) -> tuple[pyarrow.Schema, list[_Batch]]:
    """Returns the schema and the batches, from one pass over the messages, which of a local file reads no bodies."""
    file, batches = snapshot.file, []
    with _open(file, field) as opened:
        _seek_messages(opened, size=snapshot.size)
        messages = pyarrow.ipc.MessageReader.open_stream(opened)
        schema = pyarrow.ipc.read_schema(messages.read_next_message())
        while True:
            start = opened.tell()
            try:
                message = messages.read_next_message()
            except StopIteration:
                break
            num_bytes, part = opened.tell() - start, f"record batch {len(batches) + 1}"
            if message.type == "dictionary":
                raise ValueError(
                    f"{file} holds dictionaries, which are not read by number. Convert it and train on that: "
                    + build_command(file, out="DIR", text_field=field)
                )
            is_compressed = _is_compressed(message.metadata)
            if is_compressed or file.is_remote:
                limit = MAX_COMPRESSED_BYTES if is_compressed else MAX_PART_BYTES
                check_size(file, part, field=field, num_bytes=num_bytes, limit=limit)
            num_rows = pyarrow.ipc.read_record_batch(message, pyarrow.schema([])).num_rows  # decodes no column
            if num_rows < 0:
                raise pyarrow.ArrowInvalid(f"{part} has {num_rows} rows")
            batches.append(_Batch(start, num_bytes, num_rows, not (is_compressed or file.is_remote)))
        if opened.tell() == start:
            raise pyarrow.ArrowInvalid("no end-of-stream marker: it was truncated, or its writer was not closed")
    return schema, batches


def _open(file: DataFile, field: str) -> Any:
    """Returns a file opened for a pass over its messages: mapped, or remote and with reads of bounded size."""
    if not file.is_remote:
        return pyarrow.memory_map(os.fsencode(file))
    opened = file.open()
    read = opened.read

    def read_bounded(num_bytes: int) -> bytes:
        check_size(file, "a record batch", field=field, num_bytes=num_bytes, limit=MAX_PART_BYTES)
        return read(num_bytes)

    opened.read = read_bounded
    return opened


def _seek_messages(opened: Any, *, size: int) -> None:
    """Seeks to the first message: an IPC file is a stream between a magic string and a footer."""
    if opened.read(len(_FILE_MAGIC)) != _FILE_MAGIC:
        opened.seek(0)
        return
    opened.seek(size - len(_FILE_MAGIC))
    if opened.read(len(_FILE_MAGIC)) != _FILE_MAGIC:
        raise pyarrow.ArrowInvalid("the end of the file is missing")
    opened.seek(8)


def _is_compressed(metadata: pyarrow.Buffer) -> bool:
    """Returns whether a record batch is compressed, which pyarrow does not say. Source: Message.fbs of Arrow 1.5."""

    def field(table: int, number: int) -> int:
        """Returns the offset of a field of a FlatBuffers table; 0 if the field is absent."""
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        entry = 4 + 2 * number
        (vtable_bytes,) = struct.unpack_from("<H", metadata, vtable)
        offset = struct.unpack_from("<H", metadata, vtable + entry)[0] if entry < vtable_bytes else 0
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", metadata)[0], 2)
    record_batch = header + struct.unpack_from("<I", metadata, header)[0]
    return bool(field(record_batch, 3))


def iter_arrow(file: DataFile, field: str) -> Iterator[TextColumn]:
    """Yields the texts of the record batches of a file or stream in order."""
    with file.open() if file.is_remote else pyarrow.memory_map(os.fsencode(file)) as opened:
        is_file = opened.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        opened.seek(0)
        reader = pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)
        column = text_column(reader.schema, field, where=file.where, dictionaries=True)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield TextColumn(batch.column(column))
