"""Columns of text by row: Arrow's, and the row groups of Parquet, which are decoded whole."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Sequence

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

    One column is decoded at a time, which bounds the memory.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._lock = threading.Lock()
        self._columns: collections.OrderedDict[Hashable, pyarrow.ChunkedArray] = collections.OrderedDict()

    def get(self, key: Hashable, load: Callable[[], pyarrow.ChunkedArray]) -> pyarrow.ChunkedArray:
        """Returns the column under `key`, which `load` returns if it is not cached."""
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
            f"{where} must have one column {field!r}; it has {', '.join(schema.names)}; set data.text_field, or "
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
      BadRecord: null, empty, or not UTF-8.
      pyarrow.ArrowException: a text outside the column, with which pyarrow would crash.
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
            f"{format_bytes(MAX_PART_BYTES)}. Convert it and train on that: {build_command(file, text_field=field)}"
        )


def column_documents(
    snapshot: Snapshot, *, rows: Sequence[int], load: Callable[[int], pyarrow.ChunkedArray], field: str
) -> records.FileDocuments:
    """Returns the texts of a file in parts by number; `rows` of each part, whose column `load` returns."""
    starts = records.starts(rows)

    def read(index: int) -> str:
        part, number = records.find_part(starts, index)
        snapshot.check()
        with decoding(snapshot.file, part=f"row {index + 1}"):
            return cell(load(part), number, field=field, where=snapshot.file.where, row=index + 1)

    return records.FileDocuments(snapshot, num_documents=int(starts[-1]), read=read)
