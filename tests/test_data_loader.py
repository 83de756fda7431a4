"""Batches against an independent packer, for every split among processes, interruption and number of threads."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.config import DataConfig
from hlat_jax.data import loader, sources
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("package:austen_2k.model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Path of 23 documents whose lengths run from 0 to several sequences of 16 tokens; and their texts."""
    chapter = json.loads(sources.asset_path("austen_train.jsonl").open(encoding="utf-8").readline())["text"]
    lengths = [0, 1, 7, 30, 64, 65, 200, 3, 0, 511, 90, 15, 16, 17, 240, 5, 60, 61, 62, 333, 2, 1, 100]
    texts = [f"{i}:" + chapter[i * 300 : i * 300 + n] if n else "" for i, n in enumerate(lengths)]
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path), texts


def data_config(path, **changes):
    fixed = {"train": path, "validation": path, "tokenizer": "package:austen_2k.model"}
    small = {"batch_size": 6, "seq_len": 16, "max_document_chars": 100, "num_threads": 0, "prefetch_batches": 2}
    return dataclasses.replace(DataConfig(), **(fixed | small | changes))


def take(data, num_batches, **options):
    """Returns (Batch, position) pairs of the first batches of a loader, which is closed."""
    batches = loader.TrainBatches(data, tokenizer=TOKENIZER, **options)
    try:
        return [next(batches) for _ in range(num_batches)]
    finally:
        batches.close()


def oracle_tokens(texts, data, *, num_tokens):
    """The definition in plain Python, from the texts alone: [R][num_tokens], without Grain but for its permutation."""
    streams = []
    for row in range(data.batch_size):
        tokens, epoch = [], 0
        while len(tokens) < num_tokens:
            order = list(range(len(texts)))
            if data.shuffle:
                seed = (data.seed + epoch) % 2**32
                order = [index_shuffle(i, max_index=len(texts) - 1, seed=seed, rounds=4) for i in order]
            for document in order[row :: data.batch_size]:
                rest = texts[document]
                while True:
                    tokens += [*TOKENIZER.encode(rest[: data.max_document_chars]).tolist(), 2]
                    rest = rest[data.max_document_chars :]
                    if not rest:
                        break
            epoch += 1
        streams.append(tokens[:num_tokens])
    return np.asarray(streams)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_agree_with_the_plain_python_packer_token_for_token(corpus, shuffle):
    path, texts = corpus
    data = data_config(path, shuffle=shuffle)
    batches = [batch for batch, _ in take(data, 40)]
    tokens = np.concatenate([batch.tokens for batch in batches], axis=1)
    expected = oracle_tokens(texts, data, num_tokens=40 * 16)
    np.testing.assert_array_equal(tokens, expected)
    for number, batch in enumerate(batches):
        row_tokens = expected[:, number * 16 : (number + 1) * 16]
        np.testing.assert_array_equal(batch.targets[:, :-1], row_tokens[:, 1:])
        assert (batch.weights[:, :-1] == 1).all()
        assert (batch.weights[:, -1] == 0).all()


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 8), st.integers(1, 23), st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_any_split_of_the_rows_gives_the_same_global_batches(corpus, num_processes, batch_size, seed, seq_len):
    data = data_config(corpus[0], batch_size=batch_size, seed=seed, seq_len=seq_len)
    whole = take(data, 6)
    parts = [part.tolist() for part in np.array_split(np.arange(batch_size), num_processes) if len(part)]
    split = [take(data, 6, rows=rows) for rows in parts]
    for number, (batch, position) in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([s[number][0].tokens for s in split]), batch.tokens)
        np.testing.assert_array_equal(np.concatenate([s[number][0].targets for s in split]), batch.targets)
        np.testing.assert_array_equal(np.concatenate([s[number][1] for s in split]), position)
        combined = 0
        for rows, part in zip(parts, split, strict=True):
            combined ^= int(loader.batch_hash(part[number][0], rows=rows), 16)
        assert f"{combined:032x}" == loader.batch_hash(batch, rows=range(batch_size))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_state_of_eight_processes_goes_on_under_any_number(corpus, num_processes):
    data = data_config(corpus[0], batch_size=8)
    saved = np.concatenate([take(data, 5, rows=[row])[-1][1] for row in range(8)])
    expected = take(data, 9)[5:]
    for rows in np.array_split(np.arange(8), num_processes):
        resumed = take(data, 4, rows=rows.tolist(), position=saved[rows])
        for (batch, position), (whole, after) in zip(resumed, expected, strict=True):
            np.testing.assert_array_equal(batch.tokens, whole.tokens[rows])
            np.testing.assert_array_equal(position, after[rows])


@pytest.mark.parametrize("num_threads", [0, 2])
def test_restart_from_every_position_gives_the_same_continuation(corpus, num_threads):
    data = data_config(corpus[0], num_threads=num_threads)
    batches = take(data, 45)  # more than three epochs of every stream
    assert batches[-1][1][:, 0].min() >= 3
    for start in range(44):
        resumed = take(data, min(4, 44 - start), position=batches[start][1])
        for (batch, position), (expected, after) in zip(resumed, batches[start + 1 :], strict=False):
            np.testing.assert_array_equal(batch.tokens, expected.tokens)
            np.testing.assert_array_equal(batch.weights, expected.weights)
            np.testing.assert_array_equal(position, after)


def test_get_state_and_set_state_move_one_loader(corpus):
    batches = loader.TrainBatches(data_config(corpus[0], num_threads=2), tokenizer=TOKENIZER)
    next(batches)
    state = batches.get_state()
    ahead = [next(batches)[0].tokens for _ in range(3)]
    batches.set_state(state)
    np.testing.assert_array_equal([next(batches)[0].tokens for _ in range(3)], ahead)
    batches.close()


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 23), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_each_document_appears_exactly_once_in_every_epoch(corpus, batch_size, seed, epoch):
    path, texts = corpus
    data = data_config(path, batch_size=batch_size, seed=seed)
    batches, seen = loader.TrainBatches(data, tokenizer=TOKENIZER), []
    for row in range(batch_size):
        stream = batches._stream(row, position=np.asarray([epoch, 0, 0]))
        seen += [stream._read(epoch, document) for document in range(stream._num_documents)]
    batches.close()
    assert sorted(seen) == sorted(texts)


def test_order_differs_by_epoch_and_by_seed_and_stays_that_of_this_release(corpus):
    """The golden order: were Grain to change its shuffle, running jobs would lose or repeat text at an upgrade."""
    order = {}
    for seed, epoch in ((1234, 0), (1234, 1), (99, 0)):
        batches = loader.TrainBatches(data_config(corpus[0], batch_size=1, seed=seed), tokenizer=TOKENIZER)
        read = batches._stream(0, position=np.asarray([0, 0, 0]))._read
        order[seed, epoch] = [corpus[1].index(read(epoch, document)) for document in range(6)]
        batches.close()
    assert len({tuple(some) for some in order.values()}) == 3
    assert order[1234, 0] == [20, 12, 16, 2, 13, 7]
    assert order[1234, 1] == [7, 4, 0, 21, 10, 18]


def test_threads_and_prefetch_do_not_change_batches(corpus):
    expected = take(data_config(corpus[0]), 30)
    for num_threads, prefetch_batches in ((1, 1), (2, 4), (5, 3)):
        data = data_config(corpus[0], num_threads=num_threads, prefetch_batches=prefetch_batches)
        for (batch, position), (whole, after) in zip(take(data, 30), expected, strict=True):
            np.testing.assert_array_equal(batch.tokens, whole.tokens)
            np.testing.assert_array_equal(position, after)


@pytest.mark.parametrize("num_threads", [0, 2])
def test_bad_record_raises_at_the_batch_where_it_belongs_and_again(tmp_path, num_threads):
    rows = [json.dumps({"text": "word " * 30}) for _ in range(8)]
    rows[5] = '{"text": "broken'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = data_config(str(tmp_path / "a.jsonl"), batch_size=2, shuffle=False, num_threads=num_threads)
    batches = loader.TrainBatches(data, tokenizer=TOKENIZER)
    tokens_before = sum(len(TOKENIZER.encode(piece)) + 1 for piece in ("word " * 20, "word " * 10)) * 2
    for _ in range(tokens_before // 16):  # row 1 reads documents 1 and 3, then the broken one
        _, position = next(batches)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a.jsonl, row 6: invalid or truncated JSON"):
            next(batches)
    np.testing.assert_array_equal(batches.get_state(), position)
    batches.close()


def test_close_ends_the_threads_and_refuses_more(corpus):
    before = threading.active_count()
    batches = loader.TrainBatches(data_config(corpus[0], num_threads=4), tokenizer=TOKENIZER)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_fewer_documents_than_rows_is_refused(corpus):
    with pytest.raises(ValueError, match=r"23 documents, fewer than data.batch_size=24.*at most 23"):
        loader.TrainBatches(data_config(corpus[0], batch_size=24), tokenizer=TOKENIZER)


def test_rows_position_and_seed_that_do_not_fit_are_refused(corpus):
    data = data_config(corpus[0])
    with pytest.raises(ValueError, match=r"must be some of 0 .. data.batch_size - 1 = 5"):
        loader.TrainBatches(data, tokenizer=TOKENIZER, rows=range(4, 7))
    with pytest.raises(ValueError, match=r"it must be \[6, 3\]"):
        loader.TrainBatches(data, tokenizer=TOKENIZER, position=loader.initial_position(5))
    position = loader.initial_position(6)
    position[5, 1] = 3
    with pytest.raises(ValueError, match=r"row 5 is document 3, but 23 documents in 6 rows leave it 3"):
        loader.TrainBatches(data, tokenizer=TOKENIZER, position=position)
    with pytest.raises(ValueError, match=r"data.seed=-1"):
        loader.TrainBatches(data_config(corpus[0], seed=-1), tokenizer=TOKENIZER)


def test_validation_is_the_whole_text_once_in_order(corpus):
    path, texts = corpus
    data = data_config(path, batch_size=4)
    pieces = [text[i : i + 100] for text in texts for i in range(0, max(len(text), 1), 100)]
    expected = [token for piece in pieces for token in [*TOKENIZER.encode(piece).tolist(), 2]]
    batches = loader.validation_batches(data, tokenizer=TOKENIZER, num_batches=1000)
    assert len(batches) == -(-len(expected) // (4 * 16))
    assert {batch.tokens.shape for batch in batches} == {(4, 16)}
    flat = np.concatenate([batch.tokens.reshape(-1) for batch in batches])
    assert flat[: len(expected)].tolist() == expected
    num_rows, rest = divmod(len(expected), 16)
    assert sum(batch.weights.sum() for batch in batches) == num_rows * 15 + max(rest - 1, 0)
    counted = np.concatenate([batch.targets[batch.weights > 0] for batch in batches])
    assert len(counted) == num_rows * 15 + max(rest - 1, 0)


def test_validation_is_the_same_at_every_call_and_for_every_split(corpus):
    data = data_config(corpus[0], batch_size=4)
    whole = loader.validation_batches(data, tokenizer=TOKENIZER, num_batches=3)
    again = loader.validation_batches(data, tokenizer=TOKENIZER, num_batches=3)
    parts = [loader.validation_batches(data, tokenizer=TOKENIZER, num_batches=3, rows=[r]) for r in range(4)]
    assert len(whole) == 3
    for number, batch in enumerate(whole):
        np.testing.assert_array_equal(again[number].tokens, batch.tokens)
        np.testing.assert_array_equal(np.concatenate([p[number].tokens for p in parts]), batch.tokens)
        np.testing.assert_array_equal(np.concatenate([p[number].weights for p in parts]), batch.weights)
    assert loader.validation_batches(data_config("", validation=""), tokenizer=TOKENIZER, num_batches=3) == []


def test_bits_per_byte_counts_the_bytes_of_the_counted_targets(tmp_path):
    text = "Bytes é, 漢字.\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = data_config(str(tmp_path / "a.txt"), batch_size=1, seq_len=64)
    (batch,) = loader.validation_batches(data, tokenizer=TOKENIZER, num_batches=9)
    first = TOKENIZER.token_bytes[batch.tokens[0, 0]]  # the first token is given, not predicted
    assert (TOKENIZER.token_bytes[batch.targets] * batch.weights).sum() + first == len(text.encode())


def test_batch_hash_sees_tokens_weights_and_the_place_of_a_row(corpus):
    (batch, _), *_ = take(data_config(corpus[0]), 1)
    reference = loader.batch_hash(batch, rows=range(6))
    tokens, weights = batch.tokens.copy(), batch.weights.copy()
    tokens[3, 7] += 1
    weights[2, 1] = 0
    swapped = [1, 0, 2, 3, 4, 5]
    assert loader.batch_hash(batch, rows=range(6)) == reference
    assert loader.batch_hash(dataclasses.replace(batch, tokens=tokens), rows=range(6)) != reference
    assert loader.batch_hash(dataclasses.replace(batch, weights=weights), rows=range(6)) != reference
    assert loader.batch_hash(batch, rows=swapped) != reference
