"""Columns of text by row, in parts that are decoded whole: row groups of Parquet, record batches of Arrow."""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import pyarrow

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.paths import build_command
from hlat_jax.facts.byte_sizes import format_bytes

CACHE_BYTES = 256 << 20
MAX_PART_BYTES = 256 << 20


class ColumnCache:
    """An LRU cache of decoded columns, about `max_bytes` of them, shared by all files of a corpus; thread-safe.

    Threads that need the same column wait while one of them decodes it; threads that need different ones do not wait.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[Hashable, concurrent.futures.Future] = collections.OrderedDict()
        self._sizes: collections.OrderedDict[Hashable, int] = collections.OrderedDict()  # of those that are decoded

    def get(self, key: Hashable, load: Callable[[], TextColumn]) -> TextColumn:
        """Returns the column under `key`, which `load` returns if it is not cached."""
        with self._lock:
            future = self._futures.get(key)
            is_missing = future is None
            if is_missing:
                future = self._futures[key] = concurrent.futures.Future()
            elif key in self._sizes:
                self._sizes.move_to_end(key)
        if is_missing:
            try:
                column = load()
            except BaseException as error:
                with self._lock:
                    del self._futures[key]
                future.set_exception(error)
                raise
            with self._lock:
                self._sizes[key] = column.nbytes
                self.num_bytes += column.nbytes
                while self.num_bytes > self._max_bytes and len(self._sizes) > 1:
                    oldest, num_bytes = self._sizes.popitem(last=False)
                    del self._futures[oldest]
                    self.num_bytes -= num_bytes
            future.set_result(column)
        return future.result()


class TextColumn:
    """The texts of an Arrow column by row: str or None. The bytes of the column need not be valid.

    Attributes:
      nbytes: bytes of memory that the column counts for in a ColumnCache.

    Raises:
      pyarrow.ArrowException: the column is inconsistent; on access, a text outside it.
    """

    def __init__(self, column: pyarrow.Array | pyarrow.ChunkedArray):
        self._chunks = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        self._starts = records.starts(len(chunk) for chunk in self._chunks)
        self.nbytes = column.nbytes
        widths = {pyarrow.string(): np.int32, pyarrow.large_string(): np.int64}
        self._offset_type = widths.get(column.type)  # None of string views and dictionary codes
        for chunk in self._chunks:
            chunk.validate(full=self._offset_type is None)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str | None:
        chunk, number = records.find_part(self._starts, index)
        text = self._chunks[chunk].slice(number, 1)
        if self._offset_type is None or text.null_count:
            return text[0].as_py()
        text.validate()  # pyarrow would crash on offsets outside the column
        _, offsets, values = text.buffers()
        start, end = np.frombuffer(offsets, self._offset_type)[number + self._chunks[chunk].offset :][:2].tolist()
        # not pyarrow's scalar, which copies the bytes of what may be a long document
        return str(values.slice(start, end - start), "utf-8") if end > start else ""


def text_column(schema: pyarrow.Schema, field: str, *, where: str, dictionaries: bool) -> int:
    """Returns the index of the column `field` if it holds text.

    Raises:
      ValueError: no such column, two of them, or another type; with `dictionaries`, a dictionary of text is accepted.
    """
    if schema.names.count(field) != 1:
        raise ValueError(
            f"{where} must have one column {field!r}; it has {', '.join(schema.names)}; set data.text_field, or "
            "--text_field of a command."
        )
    kind, types = schema.field(field).type, pyarrow.types
    if dictionaries and types.is_dictionary(kind):
        kind = kind.value_type
    if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
        raise ValueError(f"{where}: column {field!r} is {kind}, not string.")
    return schema.get_field_index(field)


def cell(column: TextColumn, index: int, *, field: str, where: str, row: int) -> str:
    """Returns one text of a column.

    Raises:
      BadRecord: null, empty, or not UTF-8.
    """
    try:
        text = column[index]
    except UnicodeDecodeError as error:
        reason = f"{field!r} is invalid UTF-8: {error.reason} at byte {error.start}."
        raise records.BadRecord(where, row, reason) from None
    return records.check_text(text, field=field, where=where, row=row)


def check_size(file: DataFile, part: str, *, field: str, num_bytes: int, limit: int) -> None:
    """Raises ValueError for a part that is too large to be decoded for one document."""
    if num_bytes > limit:
        raise ValueError(
            f"{file}, {part}: {format_bytes(num_bytes)} are decoded to read any one document in it, more than "
            f"{format_bytes(limit)}. Convert it and train on that: {build_command(file, out='DIR', text_field=field)}"
        )


class ColumnDocuments:
    """The texts of a file in parts, by number. Rows are counted from 1 over the whole file.

    Attributes:
      snapshots: the file, once.
      num_rows: its rows, each a document.
    """

    def __init__(self, snapshot: Snapshot, *, rows: Sequence[int], load: Callable[[int], Any], field: str, part: str):
        """`rows` of each part; `load` returns the TextColumn of a part; `part` is what a part is called."""
        self._snapshot, self._load, self._field, self._part = snapshot, load, field, part
        self._starts = records.starts(rows)
        self.snapshots, self.num_rows = (snapshot,), int(self._starts[-1])

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> str:
        part, number = records.find_part(self._starts, index)
        self._snapshot.check()
        with decoding(self._snapshot.file, part=f"{self._part} {part + 1}"):
            return cell(self._load(part), number, field=self._field, where=self._snapshot.file.where, row=index + 1)

    def locate(self, index: int) -> str:
        """Returns the file and the row of document `index`."""
        return f"{self._snapshot.file}, row {index + 1}"
