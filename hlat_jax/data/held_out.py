"""Batches of held-out text, in the packing that the model is trained with.

They depend on the text, the tokenizer, and on how rows are made and how many, and on nothing else: they are the same
at every call and in every process.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import packing, sources
from hlat_jax.data.loader import batch_of
from hlat_jax.data.mixture import UNNAMED
from hlat_jax.data.streams import Source, encoder, joint_manifest, open_sources, windows
from hlat_jax.data.tokenizer import Tokenizer

READ_TOKENS = 2_000_000  # a sample is taken from all documents, or from about so many tokens of them: seconds of work
_PILOT_DOCUMENTS = 64  # by which the length of a document is estimated


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a source its held-out rows cover.

    Attributes:
      documents, tokens: those with a token in the rows, and these tokens, EOS counted.
      all_documents, all_tokens: of the source.
      is_estimate: `all_tokens` is, from the documents that were read.
      num_rows: where they are a sample; else 0.
    """

    documents: int
    all_documents: int
    tokens: int
    all_tokens: int
    is_estimate: bool
    num_rows: int

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        how = f", in {self.num_rows:,} rows spread evenly" if self.num_rows else ""
        return (
            f"{self.documents:,} of {self.all_documents:,} documents, {self.tokens:,} of {about}{self.all_tokens:,} "
            f"tokens{how}"
        )


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out batches of one source.

    Attributes:
      batches: NumPy, [len(rows), seq_len].
      num_bytes: UTF-8 bytes of the text that the counted targets stand for, over all rows.
      num_skipped: bad records skipped.
      coverage: what the rows cover.
    """

    batches: list[batch_lib.Batch]
    num_bytes: int
    num_skipped: int
    coverage: Coverage

    def described(self, name: str) -> str:
        """Returns what is covered, as in '13 of 13 documents, 46,395 of 46,395 tokens'."""
        named = f"source {name}: " if name != UNNAMED else ""
        return f"{named}{self.coverage}" + (f"; {self.num_skipped:,} bad records skipped" if self.num_skipped else "")


def open_held_out(
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    num_batches: int,
    rows: Sequence[int] | None = None,
    rows_per_batch: int | None = None,
    index_folder: pathlib.Path | None = None,
) -> tuple[dict[str, HeldOut], dict[str, Any] | None]:
    """Returns the held-out batches of each source of `data.validation`, and the manifest; ({}, None) without.

    The documents of a source as they lie are packed into rows, as in training, to the end of the text. All rows are
    taken if `num_batches` is 0 or more than there are; else `num_batches` * `data.batch_size` of them at equal
    distances, so that each document has its share. Where a source holds more than READ_TOKENS (or twice the sample),
    the rows are those of documents at equal distances: so many that they hold about that much.

    What is missing in the last row and batch is EOS of weight 0, so every batch has the same shape.

    Args:
      data: the config of the run.
      tokenizer: of the run.
      num_batches: of each source, at most; 0: all.
      rows: the rows of one process out of each batch; None: all.
      rows_per_batch: puts the same rows into batches of another size; None: `data.batch_size`.
      index_folder: keeps the indices of JSONL files between runs.

    Raises:
      ValueError: see streams.open_sources and the errors of single documents; a source with nothing to predict.
    """
    if not data.validation:
        return {}, None
    opened = open_sources(data, key="data.validation", tokenizer=tokenizer, index_folder=index_folder)
    num_together = rows_per_batch or data.batch_size
    own = range(num_together) if rows is None else rows
    found = {}
    for source in opened:
        taken, coverage, num_skipped = _rows(source, data, tokenizer=tokenizer, num_rows=num_batches * data.batch_size)
        num_bytes, batches = 0, []
        for start in range(0, len(taken), num_together):
            batch = _batch(taken[start : start + num_together], num_together, data, pad_id=tokenizer.eos_id)
            num_bytes += counted_bytes(batch, tokenizer.token_bytes)
            batches.append(batch_lib.take_rows(batch, list(own)))
        if not num_bytes:
            raise ValueError(
                f"data.validation={data.validation!r} holds no text to predict; give more, or ''"
                + (f" (source {source.name})." if len(opened) > 1 else ".")
            )
        found[source.name] = HeldOut(batches, num_bytes, num_skipped, coverage)
    return found, joint_manifest(opened)


def counted_bytes(batch: batch_lib.Batch, token_bytes: np.ndarray) -> int:
    """Returns the bytes of text of all targets with a weight; `token_bytes` [V] has the bytes of each token id."""
    return int((token_bytes[batch.targets] * (batch.weights > 0)).sum(dtype=np.int64))


def _rows(
    source: Source, data: DataConfig, *, tokenizer: Tokenizer, num_rows: int
) -> tuple[list[packing.Row], Coverage, int]:
    """Returns `num_rows` rows of a source (0: all), what they cover, and the bad records skipped on the way."""
    encode, total = encoder(data, tokenizer), len(source.documents)
    skips, skipped = data.on_bad_record == "skip", []
    numbers: Iterable[int] = range(total)
    if num_rows and total > _PILOT_DOCUMENTS:
        pilot = _documents(source, _spread(total, _PILOT_DOCUMENTS), skips=skips, skipped=[])
        num_tokens = sum(len(tokens) for document in pilot for tokens in encode(document))
        limit = max(READ_TOKENS, 2 * num_rows * data.seq_len)
        numbers = _spread(total, min(total, limit * _PILOT_DOCUMENTS // max(num_tokens, 1) + 1))
    documents = _documents(source, numbers, skips=skips, skipped=skipped)
    if data.packing == "documents":
        made = packing.packed_once(documents, encode=encode, windows=windows(data, tokenizer))
    else:
        made = packing.cut_once(documents, encode=encode, seq_len=data.seq_len)
    made = list(made)
    is_sample = 0 < num_rows < len(made)
    taken = [made[index] for index in _spread(len(made), num_rows)] if is_sample else made
    spans = [span for row in taken for span in row.spans]
    num_read = sum(span.stop - span.start for row in made for span in row.spans)
    coverage = Coverage(
        documents=len({span.document for span in spans}),
        all_documents=total,
        tokens=sum(span.stop - span.start for span in spans),
        all_tokens=num_read * total // len(numbers),
        is_estimate=len(numbers) < total,
        num_rows=len(taken) if is_sample or len(numbers) < total else 0,
    )
    return taken, coverage, len(skipped)


def _spread(total: int, count: int) -> Sequence[int]:
    """Returns `count` of the numbers below `total` at equal distances, the outer ones half of that from the ends."""
    return range(total) if count >= total else ((2 * np.arange(count) + 1) * total // (2 * count)).tolist()


def _documents(
    source: Source, numbers: Iterable[int], *, skips: bool, skipped: list[sources.BadRecord]
) -> Iterator[str | np.ndarray]:
    """Yields the documents of these numbers; bad records are collected in `skipped` when `skips`, else raised."""
    for number in numbers:
        try:
            document = source.documents[number]
        except sources.BadRecord as error:
            if not skips:
                raise
            skipped.append(error)
            continue
        yield document


def _batch(rows: list[packing.Row], num_rows: int, data: DataConfig, *, pad_id: int) -> batch_lib.Batch:
    """Returns `num_rows` rows, the last ones empty; the last row of `concat` may be short."""
    padding, no_segments = np.full(data.seq_len, pad_id, np.int32), np.zeros(data.seq_len, np.int32)
    has_segments = data.packing == "documents"
    empty = packing.Row(padding, no_segments if has_segments else None, ())
    whole = [dataclasses.replace(row, tokens=np.append(row.tokens, padding[len(row.tokens) :])) for row in rows]
    batch = batch_of(whole + [empty] * (num_rows - len(rows)))
    if not has_segments:
        for number in range(num_rows):
            length = len(rows[number].tokens) if number < len(rows) else 0
            batch.weights[number, max(length - 1, 0) :] = 0.0
    return batch
