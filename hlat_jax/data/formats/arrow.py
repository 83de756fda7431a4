"""Arrow IPC files and streams, memory-mapped: HLAT's files are streams of one batch of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow
import pyarrow.ipc

from hlat_jax.data.formats.columns import check_size, check_text_column, column_documents
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.records import FileDocuments

_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_documents(snapshot: Snapshot, *, field: str) -> FileDocuments:
    """Returns the texts of an Arrow IPC file or stream by number; uncompressed ones take no memory."""
    file, batches, decoded_bytes = snapshot.file, [], 0
    with decoding(file), pyarrow.memory_map(os.fsencode(file)) as mapped:
        whole = mapped.read_buffer()  # stays mapped after the file is closed
        for batch in _read_batches(pyarrow.BufferReader(whole), field, where=file.where):
            batches.append(batch)
            buffers = filter(None, batch.buffers())
            inside = range(whole.address, whole.address + whole.size)
            decoded_bytes += sum(buffer.size for buffer in buffers if buffer.address not in inside)
            check_size(file, "compressed", field=field, num_bytes=decoded_bytes)
        if not (bytes(whole[:6]) == _FILE_MAGIC or (whole.size >= 8 and bytes(whole[-8:]) == _END_OF_STREAM)):
            raise pyarrow.ArrowInvalid("no end-of-stream marker: it was truncated, or its writer was not closed")
    return column_documents(snapshot, rows=[len(batch) for batch in batches], load=batches.__getitem__, field=field)


def iter_arrow(file: DataFile, field: str) -> Iterator[pyarrow.Array]:
    """Yields the texts of the record batches of a file or stream in order."""
    with file.open() if file.is_remote else pyarrow.memory_map(os.fsencode(file)) as opened:
        yield from _read_batches(opened, field, where=file.where)


def _read_batches(opened: pyarrow.NativeFile, field: str, *, where: str) -> Iterator[pyarrow.Array]:
    is_file = opened.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    opened.seek(0)
    open_reader = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    with open_reader(opened) as reader:
        check_text_column(reader.schema, field, where=where)
        index = reader.schema.get_field_index(field)
    opened.seek(0)
    with open_reader(opened, options=pyarrow.ipc.IpcReadOptions(included_fields=[index])) as reader:
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield batch.column(0)
