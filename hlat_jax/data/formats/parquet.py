"""Parquet files, by row group, with pyarrow's reader."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pyarrow
import pyarrow.parquet

from hlat_jax.data.formats.columns import ColumnCache, check_size, check_text_column, column_documents
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.records import FileDocuments

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


def parquet_documents(snapshot: Snapshot, *, field: str, cache: ColumnCache) -> FileDocuments:
    """Returns the texts of a Parquet file by number."""
    file, rows = snapshot.file, []
    with decoding(file), _open(file) as opened:
        check_text_column(opened.schema_arrow, field, where=file.where)
        metadata = opened.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == field)
            check_size(file, f"row group {number + 1}", field=field, num_bytes=num_bytes)
            rows.append(group.num_rows)

    def read(number: int) -> pyarrow.ChunkedArray:
        with _open(file, metadata) as opened:
            return opened.read_row_group(number, columns=[field], use_threads=False).column(0)

    def load(number: int) -> pyarrow.ChunkedArray:
        return cache.get((file.where, number), lambda: read(number))

    return column_documents(snapshot, rows=rows, load=load, field=field)


def iter_parquet(file: DataFile, field: str) -> Iterator[pyarrow.Array]:
    """Yields the texts of a file in order, a few rows at a time."""
    with _open(file) as opened:
        check_text_column(opened.schema_arrow, field, where=file.where)
        for batch in opened.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field], use_threads=False):
            yield batch.column(0)
