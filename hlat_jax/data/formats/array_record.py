"""ArrayRecord files whose records are documents in UTF-8, read in place.

The shards that `build` writes are read with their manifest instead: see built.
"""

from __future__ import annotations

import os

from array_record.python import array_record_module

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import Snapshot


def open_reader(path: str | os.PathLike) -> array_record_module.ArrayRecordReader:
    """Returns a reader of single records; raises RuntimeError when the file is damaged."""
    # no read-ahead: only the requested record is read; threads cost more than they save for single records
    options = "readahead_buffer_size:0,max_parallelism:0"
    return array_record_module.ArrayRecordReader(os.fspath(path), options=options, file_reader_buffer_size=1 << 15)


class ArrayRecordDocuments:
    """The texts of an ArrayRecord file by number.

    Attributes:
      snapshots: the file, once.

    Raises:
      ValueError: not an ArrayRecord file, truncated, or empty.
    """

    def __init__(self, snapshot: Snapshot):
        self._snapshot, self.snapshots = snapshot, (snapshot,)
        with decoding(snapshot.file):
            self._reader = open_reader(snapshot.file)
            self._num_records = self._reader.num_records()
        if not self._num_records:  # a truncated file reads as empty
            raise ValueError(f"{snapshot.file} is not a complete ArrayRecord file, or empty; write it again.")

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> str:
        self._snapshot.check()
        try:
            with decoding(self._snapshot.file, part=f"row {index + 1}"):
                raw = self._reader.read([index])[0]
        except (ValueError, OSError):
            self._reader = open_reader(self._snapshot.file)  # one that has failed stays so
            raise
        return records.utf8_text(raw, where=self._snapshot.file.where, row=index + 1)

    def locate(self, index: int) -> str:
        """Returns the file and the row of document `index`."""
        return f"{self._snapshot.file}, row {index + 1}"
