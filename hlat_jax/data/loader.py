"""Batches of a run, in time: threads that read and tokenize ahead of the training step.

What stands in batch k is defined in streams. Owns threads, the rows of one process, the state of a loader, and the hash
of a batch. Refuses to know devices, meshes and checkpoints.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import packing
from hlat_jax.data.streams import Definition, RowStream
from hlat_jax.data.tokenizer import Tokenizer


class TrainBatches(grain.DatasetIterator):
    """An endless Grain iterator of (Batch, position) over `rows` of the global batch; None: all of them.

    Batch: NumPy, [len(rows), seq_len]. position: int64[len(rows), 1 + 6 S] (see streams), the place of those rows AFTER
    the batch; handed to a new TrainBatches of any rows, it gives the batches that follow. Threads never change a batch.
    An error in a document is raised by `__next__` for the batch that the document would have entered, and again then.

    Attributes:
      definition: the opened sources and their mixture.
      manifest: what the documents are (see streams.joint_manifest), for the checkpoint.
      num_documents: documents in all, over all sources and rows.
      rows: the rows of the global batch that this one makes.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        tokenizer: Tokenizer,
        rows: Sequence[int] | None = None,
        position: np.ndarray | None = None,
        index_folder: pathlib.Path | None = None,
    ):
        super().__init__()
        self._workers: _RowsAhead | None = None  # first, for Grain closes what it collects, half-made ones too
        self._data = data
        self.rows = tuple(range(data.batch_size) if rows is None else rows)
        if not self.rows or min(self.rows) < 0 or max(self.rows) >= data.batch_size:
            raise ValueError(f"rows={self.rows} must be some of 0 .. data.batch_size - 1 = {data.batch_size - 1}.")
        self.definition = Definition(data, tokenizer=tokenizer, index_folder=index_folder)
        self.manifest = self.definition.manifest
        self.num_documents = sum(len(source.documents) for source in self.definition.sources)
        self.set_state(self.definition.initial_position(len(self.rows)) if position is None else position)

    def __next__(self) -> tuple[batch_lib.Batch, np.ndarray]:
        return batch_of([row for _, row in self.next_rows()]), self._position.copy()

    def next_rows(self) -> list[tuple[int, packing.Row]]:
        """Returns what `next` makes a batch of: (number of its source, row) for each of `rows`."""
        self._assert_not_closed()
        made = self._workers.next_rows()
        self._position = np.stack([position for _, _, position in made])
        return [(source, row) for source, row, _ in made]

    def get_state(self) -> np.ndarray:
        """Returns int64[len(rows), 1 + 6 S]: the position after the batch returned last."""
        return self._position.copy()

    def set_state(self, state: np.ndarray) -> None:
        """Moves to a position; nothing is replayed but the tokenizing of one document, or window, a row and source."""
        position = self.definition.checked_position(state, num_rows=len(self.rows))
        if self._workers is not None:
            self._workers.close()
        self._position = position
        streams = [self.definition.row(row, position=place) for row, place in zip(self.rows, position, strict=True)]
        self._workers = _RowsAhead(
            streams, num_threads=self._data.num_threads, max_rows_ahead=self._data.prefetch_batches
        )

    def close(self) -> None:
        """Stops the threads and waits for them; a document being tokenized is finished first."""
        super().close()
        if self._workers is not None:
            self._workers.close()
            self._workers = None  # Grain closes again when it collects, which may be while the interpreter ends


def batch_of(rows: Sequence[packing.Row]) -> batch_lib.Batch:
    """Returns the batch of packed rows, all of one packing."""
    tokens_BT = np.stack([row.tokens for row in rows])
    if rows[0].segment_ids is None:
        return batch_lib.concat_batch(tokens_BT)
    return batch_lib.segmented_batch(tokens_BT, np.stack([row.segment_ids for row in rows]))


class _RowsAhead:
    """Rows of several streams, made ahead by threads.

    Each stream has at most one task in the pool, which makes one row and then queues itself again until the stream is
    `max_rows_ahead` rows ahead: streams stay in order, and no thread waits for another stream's long document.
    """

    def __init__(self, streams: list[RowStream], *, num_threads: int, max_rows_ahead: int):
        self._streams, self._max_rows_ahead = streams, max_rows_ahead
        self._ready = [collections.deque() for _ in streams]  # (source, row, position after) or the exception met
        self._changed = threading.Condition()
        self._busy = [False] * len(streams)
        self._stopping = False
        self._pool = None
        if num_threads:
            self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="hlat-data")
            with self._changed:
                for index in range(len(streams)):
                    self._submit(index)

    def next_rows(self) -> list[tuple[int, packing.Row, np.ndarray]]:
        """Returns (source, row, position after) of the next row of every stream; raises what the first of them met."""
        if self._pool is None:
            for index, ready in enumerate(self._ready):
                if not ready:
                    ready.append(self._make(index))
        else:
            with self._changed:
                self._changed.wait_for(lambda: all(self._ready))
        for ready in self._ready:
            if isinstance(ready[0], BaseException):
                raise ready[0]  # stays at the head, so that asking again raises again
        rows = []
        with self._changed:
            for index, ready in enumerate(self._ready):
                rows.append(ready.popleft())
                self._submit(index)
        return rows

    def close(self) -> None:
        """Stops the threads and waits for the rows they are making."""
        with self._changed:
            self._stopping = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)  # what is still queued sees that it need not begin

    def _make(self, index: int) -> Any:
        stream = self._streams[index]
        try:
            return (*stream.next_row(), stream.position)
        except Exception as error:
            return error  # whatever it is, it belongs to the batch of this row

    def _submit(self, index: int) -> None:
        """Queues the making of one row unless the stream is busy, far enough ahead, or stopped; under the lock."""
        ready = self._ready[index]
        failed = bool(ready) and isinstance(ready[-1], BaseException)
        if self._pool is None or self._stopping or failed or self._busy[index] or len(ready) >= self._max_rows_ahead:
            return
        self._busy[index] = True
        self._pool.submit(self._work, index)

    def _work(self, index: int) -> None:
        if self._stopping:
            return
        row = self._make(index)
        with self._changed:
            self._ready[index].append(row)
            self._busy[index] = False
            self._submit(index)
            self._changed.notify_all()


def batch_hash(batch: batch_lib.Batch, *, rows: Sequence[int]) -> str:
    """Returns 32 hex digits of the tokens, targets, segments and weights of `rows`, the batch's rows in the global one.

    It is the exclusive or of one digest a row, so the hash of a global batch is the exclusive or of those of its parts.
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
