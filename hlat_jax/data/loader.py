"""Batches of a run, by definition and in time: which document stands where, and threads that tokenize ahead.

Definition. A batch has R = data.batch_size rows. There are R logical streams; stream r alone fills row r of every
batch. In epoch e, stream r walks the documents order(e)[r], order(e)[r + R], ..., where order(e) is a permutation of
all documents that depends on data.seed and e only (data.shuffle=False: as they lie), and then goes on with epoch e + 1.
So batch k is a pure function of (manifest, seed, k); which process computes which rows is no part of it. The place of a
stream is (epoch, document number in the stream's list, token in that document), so that of a loader is int64[R, 3].

Owns that definition, threads, and the hash of a batch. Refuses to know devices, meshes and checkpoints.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import packing, sources
from hlat_jax.data.tokenizer import Tokenizer


def open_tokenizer(data: DataConfig, *, vocab_size: int | None = None) -> Tokenizer:
    """Returns the config's tokenizer, compared with the model's vocabulary when `vocab_size` is given."""
    return Tokenizer(data.tokenizer, vocab_size=vocab_size)


def initial_position(num_rows: int) -> np.ndarray:
    """Returns int64[num_rows, 3]: the place of every stream before the first batch."""
    return np.zeros((num_rows, len(packing.POSITION_FIELDS)), np.int64)


class TrainBatches(grain.DatasetIterator):
    """An endless Grain iterator of (Batch, position) over `rows` of the global batch; None: all of them.

    Batch: NumPy, [len(rows), seq_len]. position: int64[len(rows), 3], the place of those rows' streams AFTER the batch;
    handed to a new TrainBatches of any rows, it gives the batches that follow. Threads never change a batch. An error
    in a document is raised by `__next__` for the batch that the document would have entered, and again after that.

    Attributes:
      manifest: what the documents are (see sources.open_documents), for the checkpoint.
      num_documents: documents in all, over all rows.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        tokenizer: Tokenizer,
        rows: Sequence[int] | None = None,
        position: np.ndarray | None = None,
    ):
        super().__init__()
        self._workers: _RowsAhead | None = None  # first, for Grain closes what it collects, half-made ones too
        self._data, self._tokenizer = data, tokenizer
        self.rows = tuple(range(data.batch_size) if rows is None else rows)
        if not self.rows or min(self.rows) < 0 or max(self.rows) >= data.batch_size:
            raise ValueError(f"rows={self.rows} must be some of 0 .. data.batch_size - 1 = {data.batch_size - 1}.")
        documents, self.manifest = sources.open_documents(data.train, text_field=data.text_field, key="data.train")
        self.num_documents = len(documents)
        if self.num_documents < data.batch_size:
            raise ValueError(
                f"data.train={data.train!r} holds {self.num_documents} documents, fewer than data.batch_size="
                f"{data.batch_size}; each row of a batch reads documents of its own. Use at most {self.num_documents}."
            )
        self._documents = _ordered(documents, data=data)
        self.set_state(initial_position(len(self.rows)) if position is None else position)

    def __next__(self) -> tuple[batch_lib.Batch, np.ndarray]:
        self._assert_not_closed()
        rows = self._workers.next_rows()
        self._position = np.stack([position for _, position in rows])
        return batch_lib.concat_batch(np.stack([tokens for tokens, _ in rows])), self._position.copy()

    def get_state(self) -> np.ndarray:
        """Returns int64[len(rows), 3]: the position after the batch returned last."""
        return self._position.copy()

    def set_state(self, state: np.ndarray) -> None:
        """Moves to a position; nothing is replayed but the tokenizing of one document a row."""
        position = np.array(state, np.int64)
        if position.shape != (len(self.rows), len(packing.POSITION_FIELDS)) or position.min() < 0:
            raise ValueError(
                f"position has shape {position.shape} and lowest value {position.min(initial=0)}; it must be "
                f"[{len(self.rows)}, {len(packing.POSITION_FIELDS)}] of {packing.POSITION_FIELDS} without negatives."
            )
        if self._workers is not None:
            self._workers.close()
        self._position = position
        streams = [self._stream(row, position=place) for row, place in zip(self.rows, position, strict=True)]
        self._workers = _RowsAhead(
            streams, num_threads=self._data.num_threads, max_rows_ahead=self._data.prefetch_batches
        )

    def close(self) -> None:
        """Stops the threads and waits for them; a document being tokenized is finished first."""
        super().close()
        if self._workers is not None:
            self._workers.close()
            self._workers = None  # Grain closes again when it collects, which may be while the interpreter ends

    def _stream(self, row: int, *, position: np.ndarray) -> packing.ConcatStream:
        documents, num_all, num_rows = self._documents, self.num_documents, self._data.batch_size
        num_own = len(range(row, num_all, num_rows))
        if position[1] >= num_own:
            raise ValueError(
                f"position of row {row} is document {position[1]}, but {num_all} documents in {num_rows} rows leave "
                f"it {num_own}; data.train or data.batch_size is not the one it was saved with."
            )
        return packing.ConcatStream(
            # Grain counts epochs in the index: entry e * n + i of an order is entry i of epoch e
            lambda epoch, document: documents[epoch * num_all + document * num_rows + row],
            num_documents=num_own,
            encode=_encoder(self._data, tokenizer=self._tokenizer),
            seq_len=self._data.seq_len,
            position=position,
        )


def _ordered(documents: grain.MapDataset, *, data: DataConfig) -> grain.MapDataset:
    """Returns the documents in the order of each epoch, by number; a permutation costs no memory."""
    if not data.shuffle:
        return documents
    if not 0 <= data.seed < 2**32:
        raise ValueError(f"data.seed={data.seed} must lie in 0 .. 2**32 - 1.")
    return documents.shuffle(seed=data.seed)


def _encoder(data: DataConfig, *, tokenizer: Tokenizer) -> Any:
    return functools.partial(packing.document_tokens, tokenizer=tokenizer, max_chars=data.max_document_chars)


class _RowsAhead:
    """Rows of several streams, made ahead by threads.

    Each stream has at most one task in the pool, which makes one row and then queues itself again until the stream is
    `max_rows_ahead` rows ahead: streams stay in order, and no thread waits for another stream's long document.
    """

    def __init__(self, streams: list[packing.ConcatStream], *, num_threads: int, max_rows_ahead: int):
        self._streams, self._max_rows_ahead = streams, max_rows_ahead
        self._ready = [collections.deque() for _ in streams]  # (tokens, position) or the exception met
        self._changed = threading.Condition()
        self._busy = [False] * len(streams)
        self._stopping = False
        self._pool = None
        if num_threads:
            self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="hlat-data")
            with self._changed:
                for index in range(len(streams)):
                    self._submit(index)

    def next_rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns (tokens, position after) of the next row of every stream; raises what the first of them met."""
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
            return stream.next_row(), stream.position
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


def validation_batches(
    data: DataConfig, *, tokenizer: Tokenizer, num_batches: int, rows: Sequence[int] | None = None
) -> list[batch_lib.Batch]:
    """Returns up to `num_batches` batches of held-out text, the same ones at every call; [] when there is none.

    One stream over all documents as they lie, cut into rows that fill batch after batch. It ends with the text: the
    last row and batch are filled up with EOS of weight 0, so every batch has the shape [len(rows), seq_len]. Training
    does not move it. `rows` takes the rows of one process out of each batch.

    Raises:
      ValueError: see sources.open_documents and the errors of single documents.
    """
    if not data.validation:
        return []
    documents, _ = sources.open_documents(data.validation, text_field=data.text_field, key="data.validation")
    rows = tuple(range(data.batch_size) if rows is None else rows)
    encode = _encoder(data, tokenizer=tokenizer)
    cuts = _cut(
        (tokens for index in range(len(documents)) for tokens in encode(documents[index])), seq_len=data.seq_len
    )
    batches = []
    for _ in range(num_batches):
        taken = [cut for _, cut in zip(range(data.batch_size), cuts, strict=False)]
        if not taken:
            break
        taken += [np.zeros(0, np.int32)] * (data.batch_size - len(taken))
        batches.append(_padded_batch([taken[row] for row in rows], seq_len=data.seq_len, pad_id=tokenizer.eos_id))
    return batches


def _cut(arrays: Iterator[np.ndarray], *, seq_len: int) -> Iterator[np.ndarray]:
    """Yields consecutive cuts of `seq_len` tokens; the last one is shorter, and left out if it predicts nothing."""
    rest = np.zeros(0, np.int32)
    for array in arrays:
        rest = np.concatenate([rest, array])
        num_whole = len(rest) // seq_len * seq_len
        yield from rest[:num_whole].reshape(-1, seq_len)
        rest = rest[num_whole:]
    if len(rest) > 1:
        yield rest


def _padded_batch(cuts: list[np.ndarray], *, seq_len: int, pad_id: int) -> batch_lib.Batch:
    tokens_BT = np.full((len(cuts), seq_len), pad_id, np.int32)
    for row, cut in enumerate(cuts):
        tokens_BT[row, : len(cut)] = cut
    batch = batch_lib.concat_batch(tokens_BT)
    for row, cut in enumerate(cuts):
        batch.weights[row, max(len(cut) - 1, 0) :] = 0.0
    return batch


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
