"""Reads ArrayRecord files in place, with a document in UTF-8 in each record.

The shards that `build` writes are read with their manifest instead, see built.
"""

from __future__ import annotations

import os

from array_record.python import array_record_module

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decode_errors
from hlat_jax.data.formats.files import Snapshot


def open_reader(path: str | os.PathLike) -> array_record_module.ArrayRecordReader:
    """Returns a reader of single records. Raises RuntimeError if the file is damaged."""
    # no read-ahead: only the requested record is read; threads cost more than they save for single records
    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(os.fspath(path), options=options, file_reader_buffer_size=1 << 15)


def array_record_documents(snapshot: Snapshot) -> records.Documents:
    """Returns the texts of an ArrayRecord file by number."""
    file = snapshot.file
    with decode_errors(file):
        reader = open_reader(file)
        num_records = reader.num_records()
    if not num_records:  # a truncated file reads as empty
        raise ValueError(f"{file} is not a complete ArrayRecord file, or empty. Write it again.")

    def read(index: int) -> str:
        nonlocal reader
        snapshot.check()
        try:
            with decode_errors(file, part=f"row {index + 1}"):
                raw = reader.read([index])[0]
        except (ValueError, OSError):
            reader = open_reader(file)  # one that has failed stays so
            raise
        return records.utf8_text(raw, where=file.where, row=index + 1)

    return records.texts_of_rows(snapshot, num_documents=num_records, read=read)
