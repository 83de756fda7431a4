"""Whatever the documents, rows, seed and packing: a run may stop after any batch and resume with any processes."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.config import DataConfig
from hlat_jax.data import packing
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("package:austen_2k.model")
NUM_BATCHES = 9


@st.composite
def corpora(draw):
    """(texts, DataConfig without data.train): documents of a token to several sequences, some in several pieces."""
    seq_len = draw(st.integers(2, 24))
    lengths = draw(st.lists(st.integers(1, 6 * seq_len), min_size=1, max_size=14))
    texts = [f"{number}{'ab, ' * length}"[: 1 + length] for number, length in enumerate(lengths)]
    data = DataConfig(
        tokenizer="package:austen_2k.model",
        batch_size=draw(st.integers(1, len(texts))),
        seq_len=seq_len,
        seed=draw(st.integers(0, 2**32 - 1)),
        packing=draw(st.sampled_from(["concat", "documents"])),
        window_documents=draw(st.integers(1, 4)),
        max_document_chars=draw(st.sampled_from([5, 1000])),
        num_threads=draw(st.sampled_from([0, 2])),
    )
    return texts, data


def taken(data, num_batches, **options):
    """[(rows, position)] of the next batches; and the number, in the corpus, of an entry of a row's stream."""
    with contextlib.closing(TrainBatches(data, tokenizer=TOKENIZER, **options)) as batches:
        found = [([row for _, row in batches.next_rows()], batches.get_state()) for _ in range(num_batches)]
    return found, batches.definition


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(corpora(), st.data())
def test_run_resumed_anywhere_on_any_number_of_processes_is_identical(tmp_path_factory, corpus, choose):
    texts, data = corpus
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = dataclasses.replace(data, train=str(path))
    whole, definition = taken(data, NUM_BATCHES)

    for stop in range(NUM_BATCHES - 1):
        num_processes = choose.draw(st.integers(1, 8))
        for part in np.array_split(np.arange(data.batch_size), num_processes):
            if not len(part):
                continue
            position = whole[stop][1][part]
            resumed, _ = taken(data, min(2, NUM_BATCHES - stop - 1), rows=part.tolist(), position=position)
            for (rows, after), (expected, after_whole) in zip(resumed, whole[stop + 1 :], strict=False):
                np.testing.assert_array_equal(after, after_whole[part])
                for row, number in zip(rows, part, strict=True):
                    np.testing.assert_array_equal(row.tokens, expected[number].tokens)
                    np.testing.assert_array_equal(row.segment_ids, expected[number].segment_ids)
                    assert row.spans == expected[number].spans

    met = {}
    for rows, _ in whole:
        for number, row in enumerate(rows):
            for span in row.spans:
                document = definition.document(0, row=number, epoch=span.epoch, entry=span.document)
                ids = row.tokens[span.start : span.stop].tolist()
                met.setdefault(span.epoch, {}).setdefault(document, []).append((span.token, ids))
    for epoch in range(int(whole[-1][1][:, 1].min())):  # those that every row has behind it
        assert sorted(met[epoch]) == list(range(len(texts)))
        for document, parts in met[epoch].items():
            pieces = packing.pieces(texts[document], max_chars=data.max_document_chars)
            tokens = [token for piece in pieces for token in [*TOKENIZER.encode(piece).tolist(), TOKENIZER.eos_id]]
            assert [token for _, ids in sorted(parts) for token in ids] == tokens
