"""Parquet files, by row group, with pyarrow's reader."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

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

_LARGE_BYTES = 32 << 20
_LARGE_DECODING = threading.Lock()
_ROWS_AT_ONCE = 256


@contextlib.contextmanager
def _open(
    file: DataFile, metadata: pyarrow.parquet.FileMetaData | None = None
) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Yields pyarrow's reader of a file, which reads page by page; `metadata` is read if it is not given."""
    source = file.open() if file.is_remote else pyarrow.OSFile(os.fsencode(file))
    options = {"metadata": metadata, "pre_buffer": False, "buffer_size": 1 << 20}
    with source, pyarrow.parquet.ParquetFile(source, **options) as opened:
        yield opened


def parquet_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> ColumnDocuments:
    """Returns the texts of a Parquet file by number.

    Raises:
      ValueError: not a complete Parquet file, no such column of text, or a row group over MAX_PART_BYTES.
    """
    file = snapshot.file
    with decoding(file):
        groups, metadata = _row_groups(file, field)
    for number, group in enumerate(groups, start=1):
        part = f"row group {number}"
        check_size(file, part, field=field, num_bytes=group.num_bytes, limit=MAX_PART_BYTES)

    def load(number: int) -> TextColumn:
        return cache.get((file.where, number), lambda: _read(file, groups[number], field=field, metadata=metadata))

    rows = [group.num_rows for group in groups]
    return ColumnDocuments(snapshot, rows=rows, load=load, field=field, part="row group")


def iter_parquet(file: DataFile, field: str) -> Iterator[TextColumn]:
    """Yields the texts of a file in order: a row group at a time, or a few rows of one over MAX_PART_BYTES."""
    groups, metadata = _row_groups(file, field)
    for group in groups:
        if group.num_bytes <= MAX_PART_BYTES:
            yield _read(file, group, field=field, metadata=metadata)
            continue
        with _open(file, metadata) as opened:
            choice = {"row_groups": [group.number], "columns": [field], "use_threads": False}
            for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, **choice):
                yield TextColumn(batch.column(0))


class _RowGroup(NamedTuple):
    """A row group, and the bytes of its column of text."""

    number: int
    num_rows: int
    num_bytes: int


def _row_groups(file: DataFile, field: str) -> tuple[list[_RowGroup], pyarrow.parquet.FileMetaData]:
    """Returns the row groups of a file whose column `field` holds text, and its metadata."""
    with _open(file) as opened:
        text_column(opened.schema_arrow, field, where=file.where, dictionaries=True)
        metadata, groups = opened.metadata, []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == field)
        groups.append(_RowGroup(number, group.num_rows, num_bytes))
    return groups, metadata


def _read(file: DataFile, group: _RowGroup, *, field: str, metadata: pyarrow.parquet.FileMetaData) -> TextColumn:
    """Returns the column `field` of a row group; large ones are read one at a time.

    pyarrow decodes whole pages, and a dictionary twice, so it briefly holds three copies of a text.
    """
    is_large = group.num_bytes > _LARGE_BYTES
    with _LARGE_DECODING if is_large else contextlib.nullcontext(), _open(file, metadata) as opened:
        column = TextColumn(opened.read_row_group(group.number, columns=[field], use_threads=False).column(0))
    if is_large:
        pyarrow.default_memory_pool().release_unused()
    return column
