"""Batches of held-out text: the same ones at every call, in the packing that the model is trained with.

Owns which text a validation looks at. Training does not move it; no seed and no weight changes it.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax import batch as batch_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import packing, sources
from hlat_jax.data.loader import batch_of
from hlat_jax.data.streams import Source, encoder, joint_manifest, open_sources, windows
from hlat_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The held-out batches of one source.

    Attributes:
      batches: NumPy, [len(rows), seq_len].
      num_bytes: UTF-8 bytes of the text that the counted targets stand for, over all rows.
      num_skipped: bad records passed over.
    """

    batches: list[batch_lib.Batch]
    num_bytes: int
    num_skipped: int


def open_held_out(
    data: DataConfig,
    *,
    tokenizer: Tokenizer,
    num_batches: int,
    rows: Sequence[int] | None = None,
    index_folder: pathlib.Path | None = None,
) -> tuple[dict[str, HeldOut], dict[str, Any] | None]:
    """Returns up to `num_batches` batches of each source of `data.validation`, and the manifest; ({}, None) without.

    The documents of a source as they lie fill row after row and batch after batch, and end with the text: what is
    missing in the last row and batch is EOS of weight 0, so every batch has the shape [len(rows), seq_len]. `rows`
    takes the rows of one process out of each batch; None: all.

    Raises:
      ValueError: see streams.open_sources and the errors of single documents; a source with nothing to predict.
    """
    if not data.validation:
        return {}, None
    opened = open_sources(data, key="data.validation", tokenizer=tokenizer, index_folder=index_folder)
    rows = list(range(data.batch_size) if rows is None else rows)
    found = {}
    for source in opened:
        whole, num_skipped = _batches(source, data, tokenizer=tokenizer, num_batches=num_batches)
        num_bytes = counted_bytes(whole, tokenizer.token_bytes)
        if not num_bytes:
            raise ValueError(
                f"data.validation={data.validation!r} holds no text to predict; give more, or ''"
                + (f" (source {source.name})." if len(opened) > 1 else ".")
            )
        found[source.name] = HeldOut([batch_lib.take_rows(batch, rows) for batch in whole], num_bytes, num_skipped)
    return found, joint_manifest(opened)


def counted_bytes(batches: Sequence[batch_lib.Batch], token_bytes: np.ndarray) -> int:
    """Returns the bytes of text of all targets with a weight; `token_bytes` [V] has the bytes of each token id."""
    return int(sum((token_bytes[batch.targets] * (batch.weights > 0)).sum(dtype=np.int64) for batch in batches))


def _batches(
    source: Source, data: DataConfig, *, tokenizer: Tokenizer, num_batches: int
) -> tuple[list[batch_lib.Batch], int]:
    """Returns the whole batches of one source, and the bad records passed over on the way."""
    skipped: list[sources.BadRecord] = []
    documents = _documents(source, skips=data.on_bad_record == "skip", skipped=skipped)
    if data.packing == "documents":
        make_rows = packing.packed_once(documents, encode=encoder(data, tokenizer), windows=windows(data, tokenizer))
        padding = np.full(data.seq_len, tokenizer.eos_id, np.int32)
        make, empty = batch_of, packing.Row(padding, np.zeros_like(padding), ())
    else:
        arrays = (tokens for document in documents for tokens in encoder(data, tokenizer)(document))
        # a last token alone predicts nothing
        make_rows = (tokens for tokens in packing.cut(arrays, seq_len=data.seq_len) if len(tokens) > 1)
        make, empty = _Padded(data.seq_len, tokenizer.eos_id), np.zeros(0, np.int32)
    batches = []
    for _ in range(num_batches):
        taken = list(itertools.islice(make_rows, data.batch_size))
        if not taken:
            break
        batches.append(make(taken + [empty] * (data.batch_size - len(taken))))
    return batches, len(skipped)


def _documents(source: Source, *, skips: bool, skipped: list[sources.BadRecord]) -> Iterator[str | np.ndarray]:
    """Yields the documents as they lie; bad records are collected in `skipped` when `skips`, else raised."""
    for index in range(len(source.documents)):
        try:
            document = source.documents[index]
        except sources.BadRecord as error:
            if not skips:
                raise
            skipped.append(error)
            continue
        yield document


@dataclasses.dataclass(frozen=True)
class _Padded:
    """Makes a `concat` batch of rows of which the last may be short."""

    seq_len: int
    pad_id: int

    def __call__(self, cuts: list[np.ndarray]) -> batch_lib.Batch:
        tokens_BT = np.full((len(cuts), self.seq_len), self.pad_id, np.int32)
        for row, tokens in enumerate(cuts):
            tokens_BT[row, : len(tokens)] = tokens
        batch = batch_lib.concat_batch(tokens_BT)
        for row, tokens in enumerate(cuts):
            batch.weights[row, max(len(tokens) - 1, 0) :] = 0.0
        return batch
