"""Columns of text: a cache of decoded parts of files, bounded in bytes, and Parquet read by row group."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from hlat_jax.data.formats import records
from hlat_jax.data.formats.files import DataFile, Snapshot, format_error
from hlat_jax.data.formats.paths import build_command
from hlat_jax.facts.byte_sizes import format_bytes

CACHE_BYTES = 256 << 20
MAX_PART_BYTES = 256 << 20
LARGE_BYTES = 32 << 20

BUFFER_BYTES = 1 << 20

_MAX_BATCH_ROWS = 4096
_LARGE_DECODING = threading.Lock()


class ColumnCache:
    """An LRU cache of decoded columns, at most `max_bytes` of them, shared by all files of a corpus; thread-safe.

    Threads that need the same column wait while one of them decodes it; threads that need different ones do not wait.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[Hashable, concurrent.futures.Future] = collections.OrderedDict()
        self._sizes: dict[Hashable, int] = {}  # of those that are decoded

    def get(self, key: Hashable, load: Callable[[], tuple[Any, int]], *, num_bytes: int = 0) -> Any:
        """Returns the column under `key`; on a miss, `load` returns (column, bytes it holds).

        Room for `num_bytes`, the expected size, is made before `load` is called.
        """
        with self._lock:
            future = self._futures.get(key)
            loading = future is None
            if loading:
                self._evict(keep=key, room=num_bytes)
                future = self._futures[key] = concurrent.futures.Future()
            else:
                self._futures.move_to_end(key)
        if not loading:
            return future.result()
        try:
            column, num_bytes = load()
        except BaseException as error:
            with self._lock:
                del self._futures[key]
            future.set_exception(error)
            raise
        future.set_result(column)
        with self._lock:
            self._sizes[key] = num_bytes
            self._num_bytes += num_bytes
            self._evict(keep=key)
        return column

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached columns."""
        return self._num_bytes

    def _evict(self, *, keep: Hashable, room: int = 0) -> None:
        for key in [key for key in self._futures if key in self._sizes]:  # least recently used first
            if self._num_bytes + room <= self._max_bytes:
                return
            if key != keep:
                del self._futures[key]
                self._num_bytes -= self._sizes.pop(key)


def text_column(schema: pyarrow.Schema, field: str, *, where: str, dictionaries: bool) -> int:
    """Returns the index of the column `field` if it holds text.

    Raises:
      ValueError: no such column, or another type; with `dictionaries`, a dictionary of text is accepted.
    """
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is damaged: a column's name is not UTF-8 ({error}); write it again.") from None
    if field not in names:
        raise ValueError(
            f"{where} has no column {field!r}; it has {', '.join(names)}; set data.text_field, or --text_field of a "
            "command."
        )
    if names.count(field) > 1:
        raise ValueError(f"{where} has {names.count(field)} columns {field!r}; remove all but one.")
    kind, types = schema.field(field).type, pyarrow.types
    if dictionaries and types.is_dictionary(kind):
        kind = kind.value_type
    if not any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view)):
        raise ValueError(f"{where}: column {field!r} is {kind}, not string.")
    return schema.get_field_index(field)


class _Strings:
    """An array of strings; invalid offsets raise, where pyarrow would crash the process."""

    def __init__(self, texts: pyarrow.Array):
        texts.validate()
        _, offsets, self._values = texts.buffers()
        width = np.int64 if pyarrow.types.is_large_string(texts.type) else np.int32
        self._offsets = np.zeros(1, width)
        if len(texts):  # an empty array may have no offsets buffer
            whole = np.frombuffer(offsets, width, count=texts.offset + len(texts) + 1)
            self._offsets = whole[texts.offset :]
        self._texts, self._has_nulls = texts, texts.null_count > 0
        self._num_bytes = 0 if self._values is None else self._values.size

    def __getitem__(self, index: int) -> str | None:
        if self._has_nulls and self._texts.slice(index, 1).null_count:
            return None
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        if not 0 <= start <= end <= self._num_bytes:
            raise pyarrow.ArrowInvalid(f"a text lies at bytes {start} to {end} of {self._num_bytes}")
        # not pyarrow's scalar, which copies the bytes of what may be a long document
        return str(self._values.slice(start, end - start), "utf-8") if end > start else ""


class _Values:
    """An array of string views or dictionary codes, validated as a whole because it has no offsets."""

    def __init__(self, texts: pyarrow.Array):
        texts.validate(full=True)
        self._texts = texts

    def __getitem__(self, index: int) -> str | None:
        return self._texts[index].as_py()


class TextColumn:
    """The texts of an Arrow column by row: str or None. The bytes of the column need not be valid.

    Attributes:
      nbytes: bytes of the column.

    Raises:
      pyarrow.ArrowException: the column is inconsistent; on access, a text outside it.
    """

    def __init__(self, column: pyarrow.Array | pyarrow.ChunkedArray):
        chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        plain = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        self._chunks = [_Strings(chunk) if plain else _Values(chunk) for chunk in chunks]
        self._starts = records.starts(len(chunk) for chunk in chunks)
        self.nbytes = column.nbytes

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str | None:
        chunk, number = records.place(self._starts, index)
        return self._chunks[chunk][number]


def cell(column: TextColumn, index: int, *, field: str, where: str, row: int) -> str:
    """Returns one text of a column.

    Raises:
      BadRecord: null, empty, or not UTF-8.
    """
    try:
        text = column[index]
    except UnicodeDecodeError as error:
        reason = f"{field!r} is invalid UTF-8: {error.reason} at byte {error.start}."
        raise records.bad_record(where, row, reason) from None
    return records.checked_text(text, field=field, where=where, row=row)


def too_large(file: DataFile, part: str, *, field: str, num_bytes: int, limit: int) -> ValueError:
    """Returns the error for a part that is too large to be decoded for one document."""
    return ValueError(
        f"{file}, {part}: {format_bytes(num_bytes)} are decoded to read any one document in it, more than "
        f"{format_bytes(limit)}. Convert it and train on that: {build_command(file, out='DIR', text_field=field)}"
    )


class Part(NamedTuple):
    """A row group or record batch: its rows, and its approximate bytes in memory."""

    num_rows: int
    num_bytes: int


class PartedDocuments:
    """The texts of a file in parts, by number: `load(part)` returns the column of a part and its bytes in memory.

    `part_name` names a part in errors. Rows are counted from 1 over the whole file.

    Attributes:
      snapshots: the file, once.
      num_rows: its rows, each a document.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        parts: Sequence[Part],
        load: Callable[[int], tuple[Any, int]],
        cache: ColumnCache,
        field: str,
        part_name: str,
    ):
        self._snapshot, self._load, self._cache = snapshot, load, cache
        self._field, self._part_name, self._parts = field, part_name, parts
        self._starts = records.starts(part.num_rows for part in parts)
        self.snapshots, self.num_rows = (snapshot,), int(self._starts[-1])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        where, (part, number) = self._snapshot.file.where, records.place(self._starts, index)
        self._snapshot.check()
        try:
            key, num_bytes = (where, part, self._field), self._parts[part].num_bytes
            column = self._cache.get(key, lambda: self._load(part), num_bytes=num_bytes)
            return cell(column, number, field=self._field, where=where, row=index + 1)
        except (pyarrow.ArrowException, OSError, EOFError) as error:
            what = f"{where}, {self._part_name} {part + 1}"
            damaged = f"{what}: cannot be read ({error}); write the file again."
            raise format_error(self._snapshot.file, error, damaged=damaged) from None

    def locate(self, index: int) -> str:
        """Returns the file and the row of document `index`."""
        return f"{self._snapshot.file}, row {index + 1}"


def open_parquet(file: DataFile, **options: Any) -> pyarrow.parquet.ParquetFile:
    """Returns pyarrow's reader of a file.

    Raises:
      ValueError: it is not a complete Parquet file.
    """
    try:
        return pyarrow.parquet.ParquetFile(
            file.open() if file.is_remote else pyarrow.OSFile(os.fsencode(file)), **options
        )
    except (pyarrow.ArrowException, OSError) as error:
        damaged = f"{file} is not a complete Parquet file ({error}); write it again."
        raise format_error(file, error, damaged=damaged) from None


def parquet_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> PartedDocuments:
    """Returns the texts of a Parquet file by number.

    Raises:
      ValueError: not a complete Parquet file, no such column of text, or a row group over MAX_PART_BYTES.
    """
    where = snapshot.file.where
    try:
        with open_parquet(snapshot.file) as file:
            metadata, schema = file.metadata, file.schema_arrow
        text_column(schema, field, where=where, dictionaries=True)
        groups = [group_size(metadata.row_group(number), field) for number in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        damaged = f"{where} is not a complete Parquet file ({error}); write it again."
        raise format_error(snapshot.file, error, damaged=damaged) from None
    for number, group in enumerate(groups, start=1):
        if group.num_rows < 0:
            raise ValueError(f"{where}, row group {number}: {group.num_rows} rows; write the file again.")
        if group.num_bytes > MAX_PART_BYTES:
            options = {"field": field, "num_bytes": group.num_bytes, "limit": MAX_PART_BYTES}
            raise too_large(snapshot.file, f"row group {number}", **options)

    def load(part: int) -> tuple[Any, int]:
        column = read_group(snapshot.file, part, field=field, metadata=metadata)
        return column, column.nbytes

    return PartedDocuments(snapshot, parts=groups, load=load, cache=cache, field=field, part_name="row group")


def read_group(
    file: DataFile, group: int, *, field: str, metadata: pyarrow.parquet.FileMetaData | None = None
) -> TextColumn:
    """Returns the column `field` of one row group of a file, whose `metadata` is read again if it is not given.

    pyarrow decodes whole pages, and a dictionary twice, so it briefly holds three copies of a text. Large groups are
    read one at a time, and the unused memory of pyarrow's pool is then returned to the system.
    """
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_parquet(file, metadata=metadata, pre_buffer=False, buffer_size=BUFFER_BYTES))
        num_rows, num_bytes = group_size(opened.metadata.row_group(group), field)
        if num_bytes > LARGE_BYTES:
            stack.enter_context(_LARGE_DECODING)
        # in batches, because reading a row group at once makes another copy
        batch_rows = min(_MAX_BATCH_ROWS, num_rows // 8 + 1)
        batches = opened.iter_batches(batch_size=batch_rows, row_groups=[group], columns=[field], use_threads=False)
        chunks = [batch.column(0) for batch in batches]
        column = TextColumn(pyarrow.chunked_array(chunks, type=opened.schema_arrow.field(field).type))
    if num_bytes > LARGE_BYTES:
        del batches
        pyarrow.default_memory_pool().release_unused()
    return column


def group_size(group: Any, field: str) -> Part:
    """Returns the rows of a row group, and the decoded bytes of its column `field`."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == field)
    return Part(group.num_rows, num_bytes)
