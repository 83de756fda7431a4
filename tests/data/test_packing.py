"""Rows of both packings against the definitions, and resuming at every position."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.batch import segmented_batch
from hlat_jax.data import packing


class LetterTokenizer:
    """One token a character, so that a test can read the ids."""

    eos_id = 2

    def encode(self, text):
        return np.asarray([ord(letter) for letter in text], np.int32)


def tokens_of(text, *, max_chars):
    """The definition in plain Python: pieces in order, EOS after each, an empty text is one empty piece."""
    tokens, rest = [], text
    while True:
        tokens += [ord(letter) for letter in rest[:max_chars]] + [2]
        rest = rest[max_chars:]
        if not rest:
            return tokens


def encoder(max_chars):
    return lambda text: packing.document_tokens(text, tokenizer=LetterTokenizer(), max_chars=max_chars)


def order(texts):
    return lambda epoch, document: texts[(document + epoch) % len(texts)]  # another in every epoch


def concat(texts, *, seq_len, max_chars=1000, position=(0, 0, 0, 0)):
    return packing.ConcatStream(
        order(texts),
        num_documents=len(texts),
        encode=encoder(max_chars),
        seq_len=seq_len,
        position=np.asarray(position),
        max_bad=2 * len(texts),
    )


def documents(texts, *, seq_len, num_window=3, max_chars=1000, position=(0, 0, 0, 0)):
    return packing.DocumentsStream(
        order(texts),
        num_documents=len(texts),
        encode=encoder(max_chars),
        windows=packing.DocumentWindows(seq_len, num_window, 2),
        position=np.asarray(position),
        max_bad=2 * len(texts),
    )


TEXTS = st.lists(st.text("abcdefgh", max_size=25), min_size=1, max_size=6)
SOME_BAD = st.lists(st.none() | st.text("abcdefgh", max_size=25), min_size=1, max_size=7).filter(any)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 9), st.integers(1, 12))
def test_concat_rows_are_exactly_the_concatenation(texts, seq_len, max_chars):
    num_rows = 30
    expected, epoch = [], 0
    while len(expected) < num_rows * seq_len:
        for document in range(len(texts)):
            expected += tokens_of(texts[(document + epoch) % len(texts)], max_chars=max_chars)
        epoch += 1
    stream = concat(texts, seq_len=seq_len, max_chars=max_chars)
    rows = [stream.next_row().tokens for _ in range(num_rows)]
    assert np.concatenate(rows).tolist() == expected[: num_rows * seq_len]
    assert all(row.dtype == np.int32 and row.shape == (seq_len,) for row in rows)


@pytest.mark.parametrize("make", [concat, documents])
@settings(max_examples=40, deadline=None)
@given(SOME_BAD, st.integers(2, 9), st.integers(1, 12))
def test_stream_resumes_from_every_position(make, texts, seq_len, max_chars):
    stream = make(texts, seq_len=seq_len, max_chars=max_chars)
    positions, rows = [stream.position], []
    for _ in range(12):
        rows.append(stream.next_row())
        positions.append(stream.position)
    for start, position in enumerate(positions[:-1]):
        resumed = make(texts, seq_len=seq_len, max_chars=max_chars, position=position)
        for row, after in zip(rows[start:], positions[start + 1 :], strict=True):
            found = resumed.next_row()
            np.testing.assert_array_equal(found.tokens, row.tokens)
            np.testing.assert_array_equal(found.segment_ids, row.segment_ids)
            assert found.spans == row.spans
            np.testing.assert_array_equal(resumed.position, after)


@pytest.mark.parametrize("make", [concat, documents])
@settings(max_examples=40, deadline=None)
@given(SOME_BAD, st.integers(2, 9), st.integers(1, 12))
def test_spans_map_row_tokens_to_documents(make, texts, seq_len, max_chars):
    stream, read = make(texts, seq_len=seq_len, max_chars=max_chars), order(texts)
    for _ in range(12):
        row, covered = stream.next_row(), 0
        for span in row.spans:
            tokens = tokens_of(read(span.epoch, span.document), max_chars=max_chars)
            assert span.start == covered < span.stop
            assert row.tokens[span.start : span.stop].tolist() == tokens[span.token :][: span.stop - span.start]
            covered = span.stop
        assert covered == (seq_len if row.segment_ids is None else np.count_nonzero(row.segment_ids))


@pytest.mark.parametrize("make", [concat, documents])
@settings(max_examples=40, deadline=None)
@given(SOME_BAD, st.integers(2, 9))
def test_bad_records_are_skipped_and_counted_at_each_occurrence(make, texts, seq_len):
    bad = make(texts, seq_len=seq_len)
    while bad.position[0] < 3:
        row = bad.next_row()
        assert None not in [order(texts)(span.epoch, span.document) for span in row.spans]
    epoch, document, place, skipped = bad.position.tolist()
    met = sum(order(texts)(e, d) is None for e in range(epoch) for d in range(len(texts)))
    begun = sum(order(texts)(epoch, d) is None for d in range(len(texts)))
    assert met <= skipped <= met + begun
    if document == place == 0:
        assert skipped == met
    assert make([text or "" for text in texts], seq_len=seq_len).next_row() is not None


@pytest.mark.parametrize("make", [concat, documents])
def test_stream_of_only_bad_records_is_refused(make):
    stream = make([None, None], seq_len=4)
    with pytest.raises(ValueError, match="the last 4 documents of one row are bad records"):
        stream.next_row()


def test_concat_position_after_a_document_end_is_the_next_document():
    stream = concat(["abc", "d"], seq_len=4)
    stream.next_row()
    assert stream.position.tolist() == [0, 1, 0, 0]
    stream = concat(["a", "bcd"], seq_len=3)
    stream.next_row()
    assert stream.position.tolist() == [0, 1, 1, 0]
    stream.next_row()
    assert stream.position.tolist() == [1, 0, 0, 0]


def test_long_document_is_cut_in_order_with_eos_after_each_piece():
    assert list(packing.pieces("abcdefg", max_chars=3)) == ["abc", "def", "g"]
    assert list(packing.pieces("abcdef", max_chars=3)) == ["abc", "def"]
    row = concat(["abcdefg"], seq_len=10, max_chars=3).next_row()
    assert row.tokens.tolist() == [97, 98, 99, 2, 100, 101, 102, 2, 103, 2]
    assert row.spans == (packing.Span(0, 0, 0, 0, 10),)


def reading(read, *, make, position):
    """A stream of a thousand documents that notes in `read` which of them it reads."""

    def note(epoch, document):
        read.append((epoch, document))
        return "abcdefgh"

    options = {"num_documents": 1000, "encode": encoder(100), "position": np.asarray(position), "max_bad": 9}
    if make is concat:
        return packing.ConcatStream(note, seq_len=2, **options)
    return packing.DocumentsStream(note, windows=packing.DocumentWindows(20, 6, 2), **options)


def test_concat_resuming_reads_one_document():
    read = []
    stream = reading(read, make=concat, position=[7, 900, 3, 0])
    assert stream.next_row().tokens.tolist() == [ord("d"), ord("e")]
    assert read == [(7, 900)]


def test_documents_resuming_reads_one_window_and_spreads_reading_the_next():
    read = []
    stream = reading(read, make=documents, position=[7, 900, 0, 0])
    stream.next_row()  # 6 documents of 9 tokens make 3 rows of 20
    assert read == [(7, document) for document in range(900, 908)]
    stream.next_row()
    assert len(read) == 10
    stream.next_row()
    assert len(read) == 12
    assert stream.position.tolist() == [7, 906, 0, 0]


def test_documents_error_ahead_is_raised_with_the_first_row_of_its_window():
    def read(epoch, document):
        if document == 7:
            raise ValueError("document 7 cannot be read")
        return "abcdefgh"

    stream = packing.DocumentsStream(
        read,
        num_documents=50,
        encode=encoder(100),
        windows=packing.DocumentWindows(20, 6, 2),
        position=np.zeros(4, np.int64),
        max_bad=9,
    )
    for _ in range(3):
        stream.next_row()
    for _ in range(2):
        with pytest.raises(ValueError, match="document 7"):
            stream.next_row()
    assert stream.position.tolist() == [0, 6, 0, 0]


def test_empty_document_is_one_eos():
    assert concat(["", "a", ""], seq_len=4).next_row().tokens.tolist() == [2, ord("a"), 2, 2]
    row = documents(["", "a", ""], seq_len=4).next_row()
    assert row.tokens.tolist() == [ord("a"), 2, 2, 2]
    assert row.segment_ids.tolist() == [1, 1, 2, 3]


def test_position_beyond_the_text_is_refused():
    with pytest.raises(ValueError, match="is 6 tokens beyond the end"):
        concat(["abc"], seq_len=2, position=(0, 0, 10, 0)).next_row()
    with pytest.raises(ValueError, match=r"row 3.* is beyond the 2 rows of its window"):
        documents(["abc"], seq_len=2, position=(0, 0, 3, 0)).next_row()


def test_documents_rows_are_windows_packed_best_fit():
    texts = ["a" * 3, "b" * 10, "c" * 5, "d" * 2, "e" * 4, "f" * 6]
    stream = documents(texts, seq_len=8, num_window=5)
    rows = [stream.next_row() for _ in range(5)]
    read = ["".join(chr(token) if token > 2 else "." for token in row.tokens) for row in rows]
    # cuts of 8, 3 (b), 4 (a), 6 (c), 3 (d), 5 (e): b alone, c, then e and its best fit b's rest; a and d
    assert read == ["bbbbbbbb", "ccccc...", "eeee.bb.", "aaa.dd..", "ffffff.."]
    assert [row.segment_ids.tolist() for row in rows] == [
        [1] * 8,
        [1] * 6 + [0] * 2,
        [1] * 5 + [2] * 3,
        [1] * 4 + [2] * 3 + [0],
        [1] * 7 + [0],  # the last window of the epoch is short
    ]
    assert stream.position.tolist() == [1, 0, 0, 0]
    again = list(packing.documents_epoch(texts, encode=encoder(1000), windows=packing.DocumentWindows(8, 5, 2)))
    assert [row.tokens.tolist() for row in again] == [row.tokens.tolist() for row in rows]


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.integers(2, 9), st.integers(1, 4), st.integers(1, 12))
def test_documents_epoch_has_every_token_once_in_whole_pieces(texts, seq_len, num_window, max_chars):
    stream, found = documents(texts, seq_len=seq_len, num_window=num_window, max_chars=max_chars), {}
    while stream.position[0] == 0:
        row = stream.next_row()
        for span in row.spans:
            part = row.tokens[span.start : span.stop].tolist()
            assert span.token % seq_len == 0
            found.setdefault(span.document, {})[span.token] = part
    expected = {number: tokens_of(text, max_chars=max_chars) for number, text in enumerate(texts)}
    assert {n: [*itertools.chain(*(parts[k] for k in sorted(parts)))] for n, parts in found.items()} == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_packs_every_piece_within_capacity_and_its_row_bound(lengths):
    rows = packing.best_fit(lengths, capacity=20)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    fill = [sum(lengths[piece] for piece in row) for row in rows]
    assert all(used <= 20 for used in fill)
    # best-fit decreasing needs at most 11/9 of the optimum and one row more; the sum bounds the optimum from below
    assert len(rows) <= 11 / 9 * max(-(-sum(lengths) // 20), sum(length > 10 for length in lengths)) + 3


def test_segmented_batch_restarts_positions_and_targets_per_segment():
    tokens = np.asarray([[5, 6, 2, 7, 2, 9, 2, 2], [2, 2, 2, 2, 2, 2, 2, 2]])
    segments = np.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [0] * 8])
    batch = segmented_batch(tokens, segments)
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0] * 8]
    assert batch.targets.tolist() == [[6, 2, 0, 2, 0, 0, 0, 0], [0] * 8]
    assert batch.weights.tolist() == [[1, 1, 0, 1, 0, 0, 0, 0], [0] * 8]
    np.testing.assert_array_equal(batch.segment_ids, segments)
    assert {batch.tokens.dtype, batch.targets.dtype, batch.positions.dtype, batch.segment_ids.dtype} == {
        np.dtype(np.int32)
    }
    assert batch.weights.dtype == np.float32
