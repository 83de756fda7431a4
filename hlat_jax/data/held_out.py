"""Batches of held-out text for validation, packed as in training.

They depend only on the text, the tokenizer, the packing and the number of rows, not on the call or the process.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig, count_text
from hlat_jax.data import packing
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.loader import make_batch
from hlat_jax.data.mixture import UNNAMED
from hlat_jax.data.order import evenly_spaced, evenly_spread
from hlat_jax.data.streams import Encoder, Source, joint_manifest, open_sources, packing_stream
from hlat_jax.data.tokenizer import Tokenizer

READ_TOKENS = 2_000_000  # rows are sampled from about this many tokens at most, which takes seconds
_FIRST_DOCUMENTS = 16  # read before the length of the others is estimated
_GROWTH = 8  # limits the estimate of how many more documents to read


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The part of a source that its held-out rows cover.

    Attributes:
      documents, tokens: the numbers of documents with tokens in the rows, and of these tokens with EOS.
      all_documents, all_tokens: the numbers of documents and tokens of the source.
      is_estimate: whether `all_tokens` is estimated from the documents that were read.
      num_rows: the number of rows of a sample, or 0 if the rows hold all of the text.
    """

    documents: int
    all_documents: int
    tokens: int
    all_tokens: int
    is_estimate: bool
    num_rows: int

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        how = f", in {count_text(self.num_rows, 'row')} spread evenly" if self.num_rows else ""
        return (
            f"{self.documents:,} of {count_text(self.all_documents, 'document')}, {self.tokens:,} of "
            f"{about}{count_text(self.all_tokens, 'token')}{how}"
        )


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out batches of one source.

    Attributes:
      batches: the batches of NumPy arrays [len(rows), seq_len].
      num_bytes: the number of UTF-8 bytes of text of the counted targets, over all rows.
    """

    batches: list[batch_lib.Batch]
    num_bytes: int
    num_skipped: int
    coverage: Coverage

    def describe(self, name: str) -> str:
        """Returns the coverage as text, such as '13 of 13 documents, 46,395 of 46,395 tokens'."""
        named = f"source {name}: " if name != UNNAMED else ""
        skipped = f"; {count_text(self.num_skipped, 'bad record')} skipped" if self.num_skipped else ""
        return f"{named}{self.coverage}{skipped}"


def open_held_out(
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    num_batches: int,
    rows: Sequence[int] | None = None,
    rows_per_batch: int | None = None,
    index_folder: pathlib.Path | None = None,
) -> tuple[dict[str, HeldOut], dict[str, Any] | None]:
    """Returns the held-out batches of each source of `data.validation`, and the manifest, or ({}, None) without any.

    The documents of a source, in order, are packed into rows as in training, to the end of the text. If there are more
    than `num_batches` * `data.batch_size` rows, as many evenly spaced rows are used, with a part of each document. If a
    source holds more than READ_TOKENS (or twice the sample), they come from evenly spread documents of that total.

    The last row and batch are filled with EOS of weight 0, so every batch has the same shape.

    Args:
      data: the data of the config.
      tokenizer: the tokenizer of the text.
      num_batches: the largest number of batches of each source, or 0 for all.
      rows: the rows of each batch for this process, by default all.
      rows_per_batch: the batch size for the same rows, by default `data.batch_size`.
      index_folder: the folder that keeps the indices of JSONL files between runs.
    """
    if not data.validation:
        return {}, None
    encode = Encoder(data, tokenizer)
    opened = open_sources(data, key="data.validation", encode=encode, index_folder=index_folder)
    num_together = rows_per_batch or data.batch_size
    own = list(range(num_together) if rows is None else rows)
    held_out = {}
    for source in opened:
        packed, coverage, num_skipped = _rows(source, data, encode=encode, num_rows=num_batches * data.batch_size)
        num_bytes, batches = 0.0, []
        for start in range(0, len(packed), num_together):
            batch, bytes_BT = _batch(packed[start : start + num_together], num_together, data, pad_id=tokenizer.eos_id)
            num_bytes += (bytes_BT[:, 1:] * (batch.weights[:, :-1] > 0)).sum()  # the next token is the target
            batches.append(batch_lib.take_rows(batch, own))
        if not num_bytes:
            raise ValueError(
                f"data.validation={data.validation!r} holds no text to predict. Give more text (of source "
                f"{source.name}), or '' for no validation."
            )
        held_out[source.name] = HeldOut(batches, round(num_bytes), num_skipped, coverage)
    return held_out, joint_manifest(opened)


def _rows(
    source: Source, data: DataConfig, *, encode: Encoder, num_rows: int
) -> tuple[list[tuple[packing.Row, np.ndarray]], Coverage, int]:
    """Returns `num_rows` rows of a source (0: all) with the bytes of text of each token, their coverage, and the number
    of bad records skipped.
    """
    total = len(source.documents)
    limit = max(READ_TOKENS, 2 * num_rows * data.seq_len) if num_rows else None
    documents, num_documents, num_skipped = _read(source, data, encode=encode, limit=limit)
    options = {"num_documents": len(documents), "position": np.zeros(4, np.int64)}
    options["encode"] = lambda document: iter([document[0]])
    stream = packing_stream(data, encode.tokenizer, lambda _, document_index: documents[document_index], **options)
    made = list(packing.first_epoch(stream)) if documents else []
    is_sample = 0 < num_rows < len(made)
    taken = [made[index] for index in evenly_spaced(len(made), num_rows)] if is_sample else made
    spans = [span for row in taken for span in row.spans]
    num_read = sum(span.stop - span.start for row in made for span in row.spans)
    coverage = Coverage(
        documents=len({span.document for span in spans}),
        all_documents=total,
        tokens=sum(span.stop - span.start for span in spans),
        all_tokens=num_read * total // num_documents,
        is_estimate=num_documents < total,
        num_rows=len(taken) if is_sample or num_documents < total else 0,
    )
    packed = []
    for row in taken:
        bytes_T = np.zeros(data.seq_len)
        for span in row.spans:
            stop = span.token + span.stop - span.start
            bytes_T[span.start : span.stop] = documents[span.document][1][span.token : stop]
        packed.append((row, bytes_T))
    return packed, coverage, num_skipped


def _read(
    source: Source, data: DataConfig, *, encode: Encoder, limit: int | None
) -> tuple[list[tuple[packing.Tokens, np.ndarray]], int, int]:
    """Returns (tokens, bytes of text of each token) of documents in the order of the source, the number of documents
    read, bad ones counted, and the number of bad ones.

    Evenly spread documents are read until they hold `limit` tokens, or all if it is None.
    """
    total = len(source.documents)
    order, wanted = evenly_spread(total), total if limit is None else min(total, _FIRST_DOCUMENTS)
    documents: dict[int, tuple[packing.Tokens, np.ndarray]] = {}
    num_read = num_tokens = 0
    while num_read < wanted:
        for document_index in sorted(itertools.islice(order, wanted - num_read)):  # ascending: a row group is read once
            try:
                document = source.documents[document_index]
            except BadRecord:
                if data.on_bad_record != "skip":
                    raise
                continue
            is_text = isinstance(document, str)
            num_bytes = len(document.encode("utf-8")) if is_text else source.documents.text_bytes(document_index)
            tokens = packing.concatenate(list(encode(document)))
            documents[document_index] = tokens, encode.tokenizer.bytes_of(tokens.ids, num_bytes)
            num_tokens += len(tokens)
        num_read = wanted
        if limit is not None and num_tokens < limit:
            wanted = min(total, _GROWTH * num_read, num_read * limit // max(num_tokens, 1) + 1)
    return [documents[document_index] for document_index in sorted(documents)], num_read, num_read - len(documents)


def _batch(
    packed: list[tuple[packing.Row, np.ndarray]], num_rows: int, data: DataConfig, *, pad_id: int
) -> tuple[batch_lib.Batch, np.ndarray]:
    """Returns a batch of `num_rows` rows, the last ones empty, and the bytes of text of each token."""
    padding = packing.Tokens(np.full(data.seq_len, pad_id, np.int32), np.zeros(data.seq_len, bool))
    segment_ids_T = None if data.packing == "concat" else np.zeros(data.seq_len, np.int32)
    rows, bytes_BT = [packing.Row(padding, segment_ids_T, ())] * num_rows, np.zeros((num_rows, data.seq_len))
    for row_index, (row, bytes_T) in enumerate(packed):
        tokens = packing.concatenate([row.tokens, padding[len(row.tokens) :]])  # the last row of `concat` may be short
        rows[row_index], bytes_BT[row_index] = dataclasses.replace(row, tokens=tokens), bytes_T
    return make_batch(rows), bytes_BT
