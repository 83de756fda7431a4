"""Rows of every packing against the definitions, and resuming at every position.

Their order, and batches of them, are compared with an independent packer in `test_loader`.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.data import packing
from hlat_jax.data.loader import make_batch


class LetterTokenizer:
    """One token a character, so that a test can read the ids."""

    eos_id = 2

    def encode(self, text):
        return np.asarray([ord(letter) for letter in text], np.int32)


def tokens_of(text, *, max_chars=1000):
    """The definition in plain Python: pieces in order, EOS after each, an empty text is one empty piece."""
    tokens, rest = [], text
    while True:
        tokens += [ord(letter) for letter in rest[:max_chars]] + [2]
        rest = rest[max_chars:]
        if not rest:
            return tokens


def is_target(tokens):
    """Of a document with an "a" its letters before "e" are no targets."""
    return [token >= ord("e") or token == 2 or ord("a") not in tokens for token in tokens]


def order(texts):
    return lambda epoch, document: texts[(document + epoch) % len(texts)]  # another in every epoch


def stream_of(kind, texts, *, seq_len=4, max_chars=1000, position=(0, 0, 0, 0), num_window=3, read=None):
    """A stream of "concat" or "documents"."""

    def encode(text):
        pieces = packing.document_tokens(text, tokenizer=LetterTokenizer(), max_chars=max_chars)
        if "a" not in text:
            return map(packing.Tokens, pieces)
        ids = np.concatenate([*pieces])  # whole, as answers are
        return iter([packing.Tokens(ids, np.asarray(is_target(ids.tolist())))])

    options = {"num_documents": len(texts), "encode": encode, "position": np.asarray(position), "seq_len": seq_len}
    if kind == "concat":
        return packing.ConcatStream(read or order(texts), **options)
    return packing.DocumentsStream(read or order(texts), window_documents=num_window, pad_id=2, **options)


KINDS = ("concat", "documents")
TEXTS = st.lists(st.text("abcdefgh", max_size=25), min_size=1, max_size=6)
SOME_BAD = st.lists(st.none() | st.text("abcdefgh", max_size=25), min_size=1, max_size=7).filter(any)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), SOME_BAD, st.integers(2, 9), st.integers(1, 12))
def test_rows_name_their_documents_and_resume_anywhere(kind, texts, seq_len, max_chars):
    options, read = {"seq_len": seq_len, "max_chars": max_chars}, order(texts)
    stream = stream_of(kind, texts, **options)
    positions, rows = [stream.position], []
    for _ in range(12):
        rows.append(stream.next_row())
        positions.append(stream.position)
        covered = 0
        for span in rows[-1].spans:
            tokens = tokens_of(read(span.epoch, span.document), max_chars=max_chars)
            assert span.start == covered < span.stop
            part, stop = rows[-1].tokens[span.start : span.stop], span.token + span.stop - span.start
            assert part.ids.tolist() == tokens[span.token : stop]
            assert part.mask().tolist() == is_target(tokens)[span.token : stop]
            covered = span.stop
        has_mask = any("a" in read(span.epoch, span.document) for span in rows[-1].spans)
        assert (rows[-1].tokens.is_target is not None) == has_mask  # plain text pays for none
        assert covered == (seq_len if rows[-1].segment_ids is None else np.count_nonzero(rows[-1].segment_ids))
    for start, position in enumerate(positions[:-1]):
        resumed = stream_of(kind, texts, position=position, **options)
        for row, after in zip(rows[start : start + 4], positions[start + 1 :], strict=False):
            found = resumed.next_row()
            np.testing.assert_array_equal(found.tokens.ids, row.tokens.ids)
            np.testing.assert_array_equal(found.tokens.mask(), row.tokens.mask())
            np.testing.assert_array_equal(found.segment_ids, row.segment_ids)
            assert found.spans == row.spans
            np.testing.assert_array_equal(resumed.position, after)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), TEXTS, st.integers(2, 9))
def test_a_weight_is_0_where_the_next_token_is_no_target(kind, texts, seq_len):
    stream = stream_of(kind, texts, seq_len=seq_len)
    rows = [stream.next_row() for _ in range(5)]
    batch = make_batch(rows)
    for row, weights in zip(rows, batch.weights.tolist(), strict=True):
        counts = [False] * seq_len
        for span in row.spans:
            targets = is_target(tokens_of(order(texts)(span.epoch, span.document)))
            counts[span.start : span.stop] = targets[span.token : span.token + span.stop - span.start]
            counts[span.start] &= kind == "concat"  # the first token of a segment is given
        assert weights == [*map(float, counts[1:]), 0.0]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), SOME_BAD, st.integers(2, 9))
def test_bad_records_are_counted_at_each_occurrence(kind, texts, seq_len):
    stream = stream_of(kind, texts, seq_len=seq_len)
    while stream.position[0] < 3:
        stream.next_row()
    epoch, document, place, skipped = stream.position.tolist()
    met = sum(order(texts)(e, d) is None for e in range(epoch) for d in range(len(texts)))
    begun = sum(order(texts)(epoch, d) is None for d in range(len(texts)))
    assert met <= skipped <= met + begun
    if document == place == 0:
        assert skipped == met


def test_resuming_reads_one_document_or_window():
    read = []

    def note(epoch, document):
        read.append((epoch, document))
        return "abcdefgh"

    stream = stream_of("concat", range(1000), seq_len=2, read=note, position=[7, 900, 3, 0])
    assert stream.next_row().tokens.ids.tolist() == [ord("d"), ord("e")]
    assert read == [(7, 900)]
    read.clear()
    stream = stream_of("documents", range(1000), seq_len=20, num_window=6, read=note, position=[7, 900, 0, 0])
    for expected in (8, 10, 12):  # 6 documents of 9 tokens make 3 rows of 20
        stream.next_row()
        assert read == [(7, document) for document in range(900, 900 + expected)]
    assert stream.position.tolist() == [7, 906, 0, 0]


def test_an_error_ahead_is_raised_with_the_first_row_of_its_window():
    def read(epoch, document):
        if document == 7:
            raise ValueError("document 7 cannot be read")
        return "abcdefgh"

    stream = stream_of("documents", range(50), seq_len=20, num_window=6, read=read)
    for _ in range(3):
        stream.next_row()
    for _ in range(2):
        with pytest.raises(ValueError, match="document 7"):
            stream.next_row()
    assert stream.position.tolist() == [0, 6, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["concat", "documents"]), TEXTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 12))
def test_the_first_epoch_has_every_token_once(kind, texts, seq_len, num_window, max_chars):
    stream, found = stream_of(kind, texts, seq_len=seq_len, num_window=num_window, max_chars=max_chars), {}
    for row in packing.first_epoch(stream):
        for span in row.spans:
            assert kind == "concat" or span.token % seq_len == 0  # whole cuts
            found.setdefault(span.document, {})[span.token] = row.tokens.ids[span.start : span.stop].tolist()
    expected = {number: tokens_of(text, max_chars=max_chars) for number, text in enumerate(texts)}
    assert {n: [*itertools.chain(*(parts[k] for k in sorted(parts)))] for n, parts in found.items()} == expected
