"""`concat` rows against the concatenation they are defined by, and going on from every position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def stream_of(texts, *, seq_len, max_chars=1000, position=(0, 0, 0)):
    tokenizer = LetterTokenizer()
    return packing.ConcatStream(
        lambda epoch, document: texts[(document + epoch) % len(texts)],  # an order of its own in every epoch
        num_documents=len(texts),
        encode=lambda text: packing.document_tokens(text, tokenizer=tokenizer, max_chars=max_chars),
        seq_len=seq_len,
        position=np.asarray(position),
    )


TEXTS = st.lists(st.text("abcdefgh", max_size=25), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 9), st.integers(1, 12))
def test_rows_are_exactly_the_concatenation(texts, seq_len, max_chars):
    num_rows = 30
    expected, epoch = [], 0
    while len(expected) < num_rows * seq_len:
        for document in range(len(texts)):
            expected += tokens_of(texts[(document + epoch) % len(texts)], max_chars=max_chars)
        epoch += 1
    stream = stream_of(texts, seq_len=seq_len, max_chars=max_chars)
    rows = [stream.next_row() for _ in range(num_rows)]
    assert np.concatenate(rows).tolist() == expected[: num_rows * seq_len]
    assert all(row.dtype == np.int32 and row.shape == (seq_len,) for row in rows)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(2, 9), st.integers(1, 12))
def test_stream_goes_on_from_every_position(texts, seq_len, max_chars):
    stream = stream_of(texts, seq_len=seq_len, max_chars=max_chars)
    positions, rows = [stream.position], []
    for _ in range(20):
        rows.append(stream.next_row())
        positions.append(stream.position)
    for start, position in enumerate(positions[:-1]):
        resumed = stream_of(texts, seq_len=seq_len, max_chars=max_chars, position=position)
        for row, after in zip(rows[start:], positions[start + 1 :], strict=True):
            np.testing.assert_array_equal(resumed.next_row(), row)
            np.testing.assert_array_equal(resumed.position, after)


def test_position_after_a_row_that_ends_with_its_document_is_the_next_document():
    stream = stream_of(["abc", "d"], seq_len=4)
    stream.next_row()
    assert stream.position.tolist() == [0, 1, 0]
    stream = stream_of(["a", "bcd"], seq_len=3)
    stream.next_row()
    assert stream.position.tolist() == [0, 1, 1]
    stream.next_row()
    assert stream.position.tolist() == [1, 0, 0]


def test_long_document_is_cut_in_order_with_eos_after_each_piece():
    assert list(packing.pieces("abcdefg", max_chars=3)) == ["abc", "def", "g"]
    assert list(packing.pieces("abcdef", max_chars=3)) == ["abc", "def"]
    stream = stream_of(["abcdefg"], seq_len=10, max_chars=3)
    assert stream.next_row().tolist() == [97, 98, 99, 2, 100, 101, 102, 2, 103, 2]


def test_resuming_reads_one_document():
    read = []

    def note(epoch, document):
        read.append((epoch, document))
        return "abcdefgh"

    stream = packing.ConcatStream(
        note,
        num_documents=1000,
        encode=lambda text: packing.document_tokens(text, tokenizer=LetterTokenizer(), max_chars=100),
        seq_len=2,
        position=np.asarray([7, 900, 3]),
    )
    assert stream.next_row().tolist() == [ord("d"), ord("e")]
    assert read == [(7, 900)]


def test_empty_document_is_one_eos():
    assert stream_of(["", "a", ""], seq_len=4).next_row().tolist() == [2, ord("a"), 2, 2]


def test_position_behind_the_end_of_a_document_is_refused():
    with pytest.raises(ValueError, match="lies 6 tokens behind the end"):
        stream_of(["abc"], seq_len=2, position=(0, 0, 10)).next_row()
