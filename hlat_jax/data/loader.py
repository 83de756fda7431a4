"""Loads the batches of a run, in threads that read and tokenize ahead of the training step. Streams defines batch k."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import pathlib
import threading
from collections.abc import Sequence

import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import packing
from hlat_jax.data.retries import Retries
from hlat_jax.data.streams import Definition, RowStream
from hlat_jax.data.tokenizer import Tokenizer


class TrainBatches:
    """An endless iterator of (Batch, position) over `rows` of the global batch, by default all rows.

    A Batch has NumPy arrays [len(rows), seq_len]. The position after it is int64[len(rows), 1 + 6 S] (see streams),
    from which a new TrainBatches continues. Batches do not depend on the number of threads. `__next__` raises an error
    in a document for its batch, and in each later call. Reads that fail for a while are tried again before.

    Attributes:
      manifest: identifies the documents (see streams.joint_manifest). Checkpoints hold it.
      num_documents: the number of documents, over all sources and rows.
      rows: the rows of the global batch that this loader returns.
      row_sources: the number of the source of each row of the last batch, int64[len(rows)].
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        tokenizer: Tokenizer,
        rows: Sequence[int] | None = None,
        position: np.ndarray | None = None,
        index_folder: pathlib.Path | None = None,
        retries: Retries | None = None,
    ):
        self._workers: _RowPrefetcher | None = None
        self._data, self.retries = data, retries or Retries()
        self.row_sources = np.zeros(0, np.int64)
        self.rows = tuple(range(data.batch_size) if rows is None else rows)
        self.definition = Definition(data, tokenizer=tokenizer, index_folder=index_folder, retries=self.retries)
        self.manifest = self.definition.manifest
        self.num_documents = sum(len(source.documents) for source in self.definition.sources)
        self.set_state(position)

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> tuple[batch_lib.Batch, np.ndarray]:
        return make_batch([row for _, row in self.next_rows()]), self._position.copy()

    def next_rows(self) -> list[tuple[int, packing.Row]]:
        """Returns (number of its source, row) for each of `rows` of the next batch."""
        if self._workers is None:
            raise ValueError("these batches are closed.")
        made = self._workers.next_rows()
        self._position = np.stack([position for _, _, position in made])
        self.row_sources = np.asarray([source for source, *_ in made])
        return [(source, row) for source, row, _ in made]

    def get_state(self) -> np.ndarray:
        """Returns the position after the last batch, int64[len(rows), 1 + 6 S]."""
        return self._position.copy()

    def set_state(self, state: np.ndarray | None) -> None:
        """Moves to a position, or to the beginning. Tokenizes at most a document or window per row and source again."""
        position = self.definition.position(state, num_rows=len(self.rows))
        self.close()
        self._position = position
        streams = [self.definition.row(row, position=of_row) for row, of_row in zip(self.rows, position, strict=True)]
        self._workers = _RowPrefetcher(
            streams, num_threads=self._data.num_threads, max_rows_ahead=self._data.prefetch_batches
        )

    def close(self) -> None:
        """Stops the threads and waits for them to finish the document they are tokenizing."""
        if self._workers is not None:
            with self.retries.stop_waiting():
                self._workers.close()
            self._workers = None


def make_batch(rows: Sequence[packing.Row]) -> batch_lib.Batch:
    """Returns the Batch of packed rows, which all have the same packing. Tokens that are not targets have weight 0."""
    tokens = packing.concatenate([row.tokens for row in rows])
    ids_BT, segment_ids = tokens.ids.reshape(len(rows), -1), [row.segment_ids for row in rows]
    is_concat = segment_ids[0] is None
    batch = batch_lib.concat_batch(ids_BT) if is_concat else batch_lib.segmented_batch(ids_BT, np.stack(segment_ids))
    if tokens.is_target is not None:
        batch.weights[:, :-1] *= tokens.is_target.reshape(ids_BT.shape)[:, 1:]
    return batch


class _RowPrefetcher:
    """Threads that make rows of several streams ahead of time.

    Each stream has at most one task in the pool, which makes one row and then submits itself again until the stream is
    `max_rows_ahead` rows ahead: each stream stays in order, and no thread waits for another stream's long document.
    """

    def __init__(self, streams: list[RowStream], *, num_threads: int, max_rows_ahead: int):
        self._streams, self._max_rows_ahead = streams, max_rows_ahead
        self._ready = [collections.deque() for _ in streams]  # (source, row, position after) or an exception
        self._changed = threading.Condition()
        self._busy = [False] * len(streams)
        self._stopping = False
        self._pool = None
        if num_threads:
            self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="hlat-data")
            with self._changed:
                self._submit_all()

    def next_rows(self) -> list[tuple[int, packing.Row, np.ndarray]]:
        """Returns (source, row, position after) of the next row of each stream, or raises the first exception."""
        with self._changed:
            if self._pool is None:
                for ready, stream in zip(self._ready, self._streams, strict=True):
                    ready.extend([] if ready else [_make(stream)])
            self._changed.wait_for(lambda: all(self._ready))
            for ready in self._ready:
                if isinstance(ready[0], Exception):
                    raise ready[0]  # it stays in front, so the next call raises it again
            rows = [ready.popleft() for ready in self._ready]
            self._submit_all()
        return rows

    def close(self) -> None:
        """Stops the threads and waits for the rows they are making."""
        self._stopping = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)  # queued tasks see `_stopping` and return

    def _submit_all(self) -> None:
        """Submits a task for each stream that is not busy, far enough ahead, or at an exception; needs the lock."""
        for index, ready in enumerate(self._ready):
            failed = bool(ready) and isinstance(ready[-1], Exception)
            is_idle = not (self._busy[index] or failed or len(ready) >= self._max_rows_ahead)
            if is_idle and self._pool is not None and not self._stopping:
                self._busy[index] = True
                self._pool.submit(self._work, index)

    def _work(self, index: int) -> None:
        if self._stopping:
            return
        row = _make(self._streams[index])
        with self._changed:
            self._ready[index].append(row)
            self._busy[index] = False
            self._submit_all()
            self._changed.notify_all()


def _make(stream: RowStream) -> tuple[int, packing.Row, np.ndarray] | Exception:
    """Returns (source, row, position after) of the next row, or the exception for the batch of this row."""
    try:
        return (*stream.next_row(), stream.position)
    except Exception as error:
        return error


def batch_hash(batch: batch_lib.Batch, *, rows: Sequence[int]) -> str:
    """Returns 32 hex digits for tokens, targets, segments and weights. `rows` has the numbers in the global batch.

    The hash is the XOR of one digest per row. So the hash of a global batch is the XOR of the hashes of its parts.
    """
    fields = [batch.tokens, batch.targets, batch.weights]
    fields += [] if batch.segment_ids is None else [batch.segment_ids]
    fields = [np.ascontiguousarray(field) for field in fields]
    combined = 0
    for index, row in enumerate(rows):
        digest = hashlib.blake2b(int(row).to_bytes(8, "little"), digest_size=16)
        for field in fields:
            digest.update(field[index].tobytes())
        combined ^= int.from_bytes(digest.digest(), "little")
    return f"{combined:032x}"
