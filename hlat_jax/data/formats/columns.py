"""Reads columns of text by row, from row groups of Parquet, which are decoded whole, and from Arrow IPC.

Arrow files and streams are memory-mapped. HLAT's files are streams of one batch of any size.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decode_errors
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.paths import build_command
from hlat_jax.facts.byte_sizes import format_bytes

CACHE_BYTES = 256 << 20
MAX_PART_BYTES = 256 << 20
_ROWS_AT_ONCE = 256
_FILE_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class ColumnCache:
    """A thread-safe LRU cache of about `max_bytes` of decoded columns, shared by all files of a corpus.

    One column is decoded at a time, which bounds the memory.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._columns: collections.OrderedDict[Hashable, pyarrow.ChunkedArray] = collections.OrderedDict()

    def get(self, key: Hashable, load: Callable[[], pyarrow.ChunkedArray]) -> pyarrow.ChunkedArray:
        """Returns the column under `key`, from `load` if it is not cached."""
        with self._lock:
            if key not in self._columns:
                self._columns[key] = load()
                self.num_bytes += self._columns[key].nbytes
            self._columns.move_to_end(key)
            while self.num_bytes > self._max_bytes and len(self._columns) > 1:
                self.num_bytes -= self._columns.popitem(last=False)[1].nbytes
            return self._columns[key]


def check_text_column(schema: pyarrow.Schema, field: str, *, where: str) -> None:
    """Raises ValueError unless there is one column `field`, and it holds text or a dictionary of text."""
    if schema.names.count(field) != 1:
        raise ValueError(
            f"{where} must have one column {field!r}, and it has {', '.join(schema.names)}. Set data.text_field, or "
            "--text_field of a command."
        )
    kind, types = schema.field(field).type, pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        raise ValueError(f"{where}: column {field!r} is {kind}, not string.")


def cell(column: pyarrow.Array | pyarrow.ChunkedArray, index: int, *, field: str, where: str, row: int) -> str:
    """Returns one text of a column.

    Raises:
      BadRecord: the text is null, empty, or not UTF-8.
      pyarrow.ArrowException: the text lies outside the column, which would crash pyarrow.
    """
    text = column.slice(index, 1)
    text.validate(full=not (pyarrow.types.is_string(text.type) or pyarrow.types.is_large_string(text.type)))
    try:
        value = text[0].as_py()
    except UnicodeDecodeError as error:
        reason = f"{field!r} is invalid UTF-8: {error.reason} at byte {error.start}."
        raise records.BadRecord(where, row, reason) from None
    return records.check_text(value, field=field, where=where, row=row)


def check_size(file: DataFile, part: str, *, field: str, num_bytes: int) -> None:
    """Raises ValueError for a part that is too large to be decoded for one document."""
    if num_bytes > MAX_PART_BYTES:
        raise ValueError(
            f"{file}, {part}: {format_bytes(num_bytes)} are decoded to read any one document in it, more than "
            f"{format_bytes(MAX_PART_BYTES)}. Convert it and train on that:\n  {build_command(file, text_field=field)}"
        )


def column_documents(
    snapshot: Snapshot, *, rows: Sequence[int], load: Callable[[int], pyarrow.ChunkedArray], field: str
) -> records.Documents:
    """Returns the texts of a file in parts by number. Each part has `rows` rows, and `load` returns its column."""
    starts = records.starts(rows)

    def read(index: int) -> str:
        part, row = records.find_part(starts, index)
        snapshot.check()
        with decode_errors(snapshot.file, part=f"row {index + 1}"):
            return cell(load(part), row, field=field, where=snapshot.file.where, row=index + 1)

    return records.texts_of_rows(snapshot, num_documents=int(starts[-1]), read=read)


@contextlib.contextmanager
def _open_parquet(
    file: DataFile, metadata: pyarrow.parquet.FileMetaData | None = None
) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Yields pyarrow's reader of a file, which reads page by page; `metadata` is read if it is not given."""
    source = file.open() if file.is_remote else pyarrow.OSFile(os.fsencode(file))
    options = {"metadata": metadata, "pre_buffer": False, "buffer_size": 1 << 20}
    with source, pyarrow.parquet.ParquetFile(source, **options) as opened:
        yield opened


def parquet_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> records.Documents:
    """Returns the texts of a Parquet file by number."""
    file, rows = snapshot.file, []
    with decode_errors(file), _open_parquet(file) as opened:
        check_text_column(opened.schema_arrow, field, where=file.where)
        metadata = opened.metadata
        for group_index in range(metadata.num_row_groups):
            group = metadata.row_group(group_index)
            chunks = [group.column(index) for index in range(group.num_columns)]
            num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == field)
            check_size(file, f"row group {group_index + 1}", field=field, num_bytes=num_bytes)
            rows.append(group.num_rows)

    def read(group_index: int) -> pyarrow.ChunkedArray:
        with _open_parquet(file, metadata) as opened:
            return opened.read_row_group(group_index, columns=[field], use_threads=False).column(0)

    def load(group_index: int) -> pyarrow.ChunkedArray:
        return cache.get((file.where, group_index), lambda: read(group_index))

    return column_documents(snapshot, rows=rows, load=load, field=field)


def iter_parquet(file: DataFile, field: str) -> Iterator[pyarrow.Array]:
    """Yields the texts of a file in order, a few rows at a time."""
    with _open_parquet(file) as opened:
        check_text_column(opened.schema_arrow, field, where=file.where)
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field], use_threads=False):
            yield batch.column(0)


def arrow_documents(snapshot: Snapshot, *, field: str) -> records.Documents:
    """Returns the texts of an Arrow IPC file or stream by number. An uncompressed file takes no memory."""
    file, batches, decoded_bytes = snapshot.file, [], 0
    with decode_errors(file), pyarrow.memory_map(os.fsencode(file)) as mapped:
        whole = mapped.read_buffer()  # stays mapped after the file is closed
        for batch in _arrow_batches(pyarrow.BufferReader(whole), field, where=file.where):
            batches.append(batch)
            buffers = filter(None, batch.buffers())
            inside = range(whole.address, whole.address + whole.size)
            decoded_bytes += sum(buffer.size for buffer in buffers if buffer.address not in inside)
            check_size(file, "compressed", field=field, num_bytes=decoded_bytes)
        if not (bytes(whole[:6]) == _FILE_MAGIC or (whole.size >= 8 and bytes(whole[-8:]) == _END_OF_STREAM)):
            raise pyarrow.ArrowInvalid("no end-of-stream marker, as it was truncated, or its writer was not closed")
    return column_documents(snapshot, rows=[len(batch) for batch in batches], load=batches.__getitem__, field=field)


def iter_arrow(file: DataFile, field: str) -> Iterator[pyarrow.Array]:
    """Yields the texts of the record batches of a file or stream in order."""
    with file.open() if file.is_remote else pyarrow.memory_map(os.fsencode(file)) as opened:
        yield from _arrow_batches(opened, field, where=file.where)


def _arrow_batches(opened: pyarrow.NativeFile, field: str, *, where: str) -> Iterator[pyarrow.Array]:
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
