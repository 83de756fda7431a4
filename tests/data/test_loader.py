"""Batches against an independent packer, for every split among processes, interruption and number of threads."""

import collections
import contextlib
import dataclasses
import json
import re
import threading

import numpy as np
import packer
import pytest
from data_files import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names, refused

from hlat_jax.config import DataConfig
from hlat_jax.data import held_out, loader, sources
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.streams import EMITTED, NUM_FIELDS, OWED, skipped_records
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("package:austen_2k.model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Path of 23 documents whose lengths run from 1 to several sequences of 16 tokens; and their texts."""
    chapter = json.loads(asset_path("austen_train.jsonl").open(encoding="utf-8").readline())["text"]
    lengths = [0, 1, 7, 30, 64, 65, 200, 3, 0, 511, 90, 15, 16, 17, 240, 5, 60, 61, 62, 333, 2, 1, 100]
    texts = [f"{i}:" + chapter[i * 300 : i * 300 + n] if n else " " for i, n in enumerate(lengths)]
    return str(write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", texts)), texts


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """data.train of three sources of which one is small; and the texts of each."""
    folder = tmp_path_factory.mktemp("three")
    chapter = json.loads(asset_path("austen_train.jsonl").open(encoding="utf-8").readlines()[5])["text"]
    texts, start = {}, 0
    for name, lengths in {"a": [9, 400, 33, 0, 71, 8, 60, 5], "b": [50] * 20, "c": [1, 120, 3, 300, 2, 44, 90]}.items():
        texts[name] = [f"{name}{i}" + chapter[start + i * 400 :][:n] for i, n in enumerate(lengths)]
        start += 4000
        write_jsonl(folder / f"{name}.jsonl", texts[name])
    return ";".join(f"{name}={folder / name}.jsonl" for name in texts), texts


def data_config(path, **changes):
    """A small DataConfig; a path with names gets equal weights and no validation."""
    validation = "" if ";" in path else path
    fixed = {"train": path, "validation": validation, "tokenizer": "package:austen_2k.model"}
    small = {"batch_size": 6, "seq_len": 16, "max_document_chars": 100, "num_threads": 0, "prefetch_batches": 2}
    return dataclasses.replace(DataConfig(), **(fixed | small | changes))


KINDS = ["concat", "documents", "mixed concat", "mixed documents"]


def kind_of(kind, corpus, three, **changes):
    """The config of one source, or of three in two stages, in a packing."""
    mixed = {"mixture": "a=1,b=2,c=1 until_step=7;a=0,b=1,c=3"} if "mixed" in kind else {}
    options = {"packing": kind.split()[-1], "window_documents": 2} | mixed | changes
    return data_config(three[0] if mixed else corpus[0], **options)


def take(data, num_batches, **options):
    """Returns (Batch, position) pairs of the first batches of a loader, which is closed."""
    with contextlib.closing(loader.TrainBatches(data, tokenizer=TOKENIZER, **options)) as batches:
        return [next(batches) for _ in range(num_batches)]


def encode(text):
    return TOKENIZER.encode(text).tolist()


def assert_batches_are(batches, expected):
    """Compares batches with the rows of the plain-Python packer: tokens, and what follows from segments."""
    assert len(batches) == len(expected)
    for batch, rows in zip(batches, expected, strict=True):
        tokens = np.asarray([tokens for tokens, _ in rows])
        assert {field.dtype for field in (batch.tokens, batch.targets, batch.positions)} == {np.dtype(np.int32)}
        assert batch.weights.dtype == np.float32
        np.testing.assert_array_equal(batch.tokens, tokens)
        segments = np.asarray([[1] * len(tokens) if segments is None else segments for tokens, segments in rows])
        if rows[0][1] is None:
            assert batch.segment_ids is None
        else:
            np.testing.assert_array_equal(batch.segment_ids, segments)
        for r, t in np.ndindex(tokens.shape):
            followed = t + 1 < tokens.shape[1] and segments[r, t] == segments[r, t + 1] > 0
            assert batch.weights[r, t] == followed
            assert batch.targets[r, t] == (tokens[r, t + 1] if followed else 0)
            begins = t == 0 or segments[r, t] != segments[r, t - 1] or segments[r, t] == 0
            assert batch.positions[r, t] == (0 if begins else batch.positions[r, t - 1] + 1)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_batches_match_the_reference_packer(corpus, kind, shuffle):
    path, texts = corpus
    data = data_config(path, shuffle=shuffle, packing=kind, window_documents=2)
    batches = [batch for batch, _ in take(data, 40)]
    expected = packer.batches_of({None: texts}, lambda k, tokens: (1,), data, num_batches=40, encode=encode)
    assert_batches_are(batches, expected)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["concat", "documents"]), st.integers(0, 2**32 - 1), st.integers(1, 7), st.integers(2, 40))
def test_mixtures_match_the_reference_packer(three, kind, seed, batch_size, seq_len):
    spec, texts = three
    until_tokens = batch_size * seq_len * 9
    weights = f"b=1,a=4,c=0 until_step=5;a=1,b=1,c=1 until_tokens={until_tokens};c=0.7,b=0.3,a=0"
    shares = lambda k, n: (4, 1, 0) if k < 5 else (1, 1, 1) if n < until_tokens else (0, 3, 7)  # noqa: E731
    data = data_config(
        spec, mixture=weights, packing=kind, seed=seed, batch_size=batch_size, seq_len=seq_len, window_documents=3
    )
    expected = packer.batches_of(texts, shares, data, num_batches=14, encode=encode)
    assert_batches_are([batch for batch, _ in take(data, 14)], expected)


STAGES = "a=1,b=0 until_tokens=100_000;a=1,b=2 until_step=150;a=0,b=1 until_step=170;a=2,b=1"


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["a=1,b=9", STAGES])
def test_token_shares_follow_the_weights_despite_padding(tmp_path, stages):
    """Rows of `a` hold one document of 139 tokens and rows of `b` are full: by rows, a's share was 38.5 %."""
    for name, num_characters in {"a": 46, "b": 5}.items():  # of three tokens each
        write_jsonl(tmp_path / f"{name}.jsonl", ["\u6f22" * num_characters] * 400)
    train = f"a={tmp_path}/a.jsonl;b={tmp_path}/b.jsonl"
    data = data_config(train, mixture=stages, packing="documents", seq_len=256, batch_size=8)
    sources_of, emitted, bounds = [], [], []
    with contextlib.closing(loader.TrainBatches(data, tokenizer=TOKENIZER)) as batches:
        for _ in range(300):
            rows, position = batches.next_rows(), batches.get_state()
            sources_of.append([source for source, _ in rows])
            counted = [row.spans[-1].stop for _, row in rows]
            emitted.append([sum(n for n, (s, _) in zip(counted, rows, strict=True) if s == own) for own in (0, 1)])
            bounds.append(np.abs(position[:, OWED]).max())
            assert not position[:, OWED].sum(axis=1).any()
            np.testing.assert_array_equal(position[:, EMITTED].sum(axis=0), np.sum(emitted, axis=0))
    emitted = np.asarray(emitted)
    shares = lambda begin, end: emitted[begin:end].sum(axis=0) / emitted[begin:end].sum()  # noqa: E731
    assert max(bounds) <= 2 * data.seq_len
    if stages != STAGES:
        for end in (200, 300):
            np.testing.assert_allclose(shares(0, end), [0.1, 0.9], atol=0.01)
        return
    begins = np.flatnonzero(np.asarray(sources_of).max(axis=1) == 1)[0]  # the first batch with a row of b
    assert abs(emitted[:begins].sum() - 100_000) <= data.batch_size * data.seq_len
    np.testing.assert_allclose(shares(170, 300), [2 / 3, 1 / 3], atol=0.02)  # a stage that takes on what is owed
    assert (np.asarray(sources_of)[150:170] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_skipped_records_match_the_reference_packer(three, tmp_path, kind):
    _, texts = three
    spec, some = [], {}
    for name, own in texts.items():
        some[name] = [None if number % 3 == 1 else text for number, text in enumerate(own)]
        write_jsonl(tmp_path / f"{name}.jsonl", some[name])  # null is a bad record
        spec.append(f"{name}={tmp_path / name}.jsonl")
    data = data_config(
        ";".join(spec), mixture="a=1,b=1,c=2", packing=kind, on_bad_record="skip", batch_size=3, window_documents=3
    )
    taken = take(data, 40)
    expected = packer.batches_of(some, lambda k, tokens: (1, 1, 2), data, num_batches=40, encode=encode)
    assert_batches_are([batch for batch, _ in taken], expected)
    counts = [skipped_records(position) for _, position in taken]
    assert counts == sorted(counts)
    assert counts[-1] > 10
    resumed = take(data, 20, position=taken[19][1])
    assert [skipped_records(position) for _, position in resumed] == counts[20:]
    for name in texts:
        (tmp_path / f"{name}.jsonl").write_text('{"text": null}\n' * 3)
    with refused("'text'", kind=BadRecord):  # rather than to look for a good one for ever
        take(data, 1)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 7), st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_any_split_of_the_rows_gives_the_same_batches(corpus, three, kind, num_processes, batch_size, seed, seq_len):
    data = kind_of(kind, corpus, three, batch_size=batch_size, seed=seed, seq_len=seq_len)
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


@pytest.mark.quick_cases("mixed documents", "concat")
@pytest.mark.parametrize("kind", KINDS)
def test_restart_from_every_position_continues_alike(corpus, three, kind):
    data = kind_of(kind, corpus, three, batch_size=4)
    batches = take(data, 40)
    assert batches[-1][1][:, 1::NUM_FIELDS].max(axis=1).min() >= 2  # epochs of the source that is furthest
    for num_threads, prefetch_batches in ((0, 1), (1, 1), (5, 3)):
        data = dataclasses.replace(data, num_threads=num_threads, prefetch_batches=prefetch_batches)
        rows = [0, 1, 2, 3] if num_threads else [1, 3]  # a process with its own rows
        resumed = loader.TrainBatches(data, tokenizer=TOKENIZER, position=batches[7][1][rows], rows=rows)
        for start in range(7 + num_threads, 38, 3):
            resumed.set_state(batches[start][1][rows])
            for (batch, position), (expected, after) in zip(resumed, batches[start + 1 : start + 4], strict=False):
                np.testing.assert_array_equal(batch.tokens, expected.tokens[rows])
                np.testing.assert_array_equal(batch.weights, expected.weights[rows])
                np.testing.assert_array_equal(position, after[rows])
        resumed.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_bad_record_raises_at_its_own_batch_every_time(tmp_path, num_threads):
    rows = [json.dumps({"text": "word " * 30}) for _ in range(8)]
    rows[5] = '{"text": "broken'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = data_config(str(tmp_path / "a.jsonl"), batch_size=2, shuffle=False, num_threads=num_threads)
    batches = loader.TrainBatches(data, tokenizer=TOKENIZER)
    tokens_before = sum(len(TOKENIZER.encode(piece)) + 1 for piece in ("word " * 20, "word " * 10)) * 2
    for _ in range(tokens_before // 16):  # row 1 reads documents 1 and 3, then the broken one
        _, position = next(batches)
    for _ in range(2):
        with refused("a.jsonl, row 6", kind=BadRecord):
            next(batches)
    np.testing.assert_array_equal(batches.get_state(), position)
    batches.close()


def test_close_stops_threads_and_refuses_further_batches(corpus):
    before = set(threading.enumerate())
    batches = loader.TrainBatches(data_config(corpus[0], num_threads=4), tokenizer=TOKENIZER)
    next(batches)
    own = set(threading.enumerate()) - before
    assert own
    batches.close()
    batches.close()
    assert not [thread for thread in own if thread.is_alive()]
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_fewer_documents_than_rows_is_refused(corpus, three):
    with refused("data.train", "c.jsonl", "7 documents", "data.batch_size=8"):
        loader.TrainBatches(data_config(three[0], batch_size=8, mixture="a=1,b=1,c=0"), tokenizer=TOKENIZER)
    with refused("23 documents", "data.batch_size=24"):
        loader.TrainBatches(data_config(corpus[0], batch_size=24), tokenizer=TOKENIZER)


def validation(data, *, num_batches, **options):
    """The held-out batches of the only source."""
    [found] = held_out.open_held_out(data, tokenizer=TOKENIZER, num_batches=num_batches, **options)[0].values()
    return found.batches


def test_validation_is_the_whole_text_once_in_order(corpus):
    path, texts = corpus
    data = data_config(path, batch_size=4)
    pieces = [text[i : i + 100] for text in texts for i in range(0, max(len(text), 1), 100)]
    expected = [token for piece in pieces for token in [*TOKENIZER.encode(piece).tolist(), 2]]
    batches = validation(data, num_batches=1000)
    assert len(batches) == -(-len(expected) // (4 * 16))
    assert {batch.tokens.shape for batch in batches} == {(4, 16)}
    flat = np.concatenate([batch.tokens.reshape(-1) for batch in batches])
    assert flat[: len(expected)].tolist() == expected
    num_rows, rest = divmod(len(expected), 16)
    assert sum(batch.weights.sum() for batch in batches) == num_rows * 15 + max(rest - 1, 0)
    counted = np.concatenate([batch.targets[batch.weights > 0] for batch in batches])
    assert len(counted) == num_rows * 15 + max(rest - 1, 0)


def test_document_validation_predicts_all_but_first_tokens(corpus):
    path, texts = corpus
    data = data_config(path, batch_size=4, packing="documents", window_documents=5)
    batches = validation(data, num_batches=1000)
    cuts = [len(tokens[i : i + 16]) for tokens in (packer.tokens_of(t, data, encode) for t in texts)
            for i in range(0, len(tokens), 16)]  # fmt: skip
    assert sum(batch.weights.sum() for batch in batches) == sum(cuts) - len(cuts)
    assert sum((batch.segment_ids > 0).sum() for batch in batches) == sum(cuts)
    assert {batch.segment_ids.shape for batch in batches} == {(4, 16)}
    one_epoch = packer.batches_of({None: texts}, lambda k, tokens: (1,), data_config(path, batch_size=1, shuffle=False,
                                  packing="documents", window_documents=5), num_batches=8, encode=encode)  # fmt: skip
    found = np.concatenate([batch.tokens for batch in batches[:2]])
    np.testing.assert_array_equal(found, [tokens for ((tokens, _),) in one_epoch])


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_validation_does_not_depend_on_the_row_split(corpus, kind):
    data = data_config(corpus[0], batch_size=4, packing=kind)
    whole, again = (validation(data, num_batches=3) for _ in range(2))
    parts = [validation(data, num_batches=3, rows=[r]) for r in range(4)]
    assert len(whole) == 3
    for number, batch in enumerate(whole):
        np.testing.assert_array_equal(again[number].tokens, batch.tokens)
        np.testing.assert_array_equal(np.concatenate([p[number].tokens for p in parts]), batch.tokens)
        np.testing.assert_array_equal(np.concatenate([p[number].weights for p in parts]), batch.weights)
    without = data_config("", validation="")
    assert held_out.open_held_out(without, tokenizer=TOKENIZER, num_batches=3) == ({}, None)


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_limited_validation_samples_all_documents(tmp_path, kind):
    """20 documents of one letter each, recognizable in the decoded rows."""
    letters = "abcdefghijklmnopqrst"
    texts = [f" {letter}" * (150 + 10 * number) for number, letter in enumerate(letters)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    data = data_config(str(path), batch_size=4, packing=kind, max_document_chars=500_000)
    [found] = held_out.open_held_out(data, tokenizer=TOKENIZER, num_batches=12)[0].values()
    shares = collections.Counter("".join(TOKENIZER.decode(row) for batch in found.batches for row in batch.tokens))
    assert [batch.tokens.shape for batch in found.batches] == [(4, 16)] * 12
    whole = sum(map(len, texts)) / 2
    sample = sum(shares[letter] for letter in letters)
    for letter, text in zip(letters, texts, strict=True):  # its share of the rows, to about a row
        assert shares[letter] / sample == pytest.approx(len(text) / 2 / whole, abs=1.5 * 16 / sample)
    num_tokens = sum(len(TOKENIZER.encode(text)) + 1 for text in texts)
    num_taken = sum(int((batch.segment_ids > 0).sum()) if kind == "documents" else 64 for batch in found.batches)
    assert_names(str(found.coverage), "20 of 20 documents", f"{num_taken:,} of {num_tokens:,} tokens", "48 rows")


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_validation_of_a_large_text_reads_even_samples(tmp_path, monkeypatch, kind):
    texts = [f"Document {number:04} ends here." for number in range(1000)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    num_each = len(TOKENIZER.encode(texts[0])) + 1
    monkeypatch.setattr(held_out, "READ_TOKENS", 100 * num_each)
    read, get = [], sources.Corpus.__getitem__
    monkeypatch.setattr(sources.Corpus, "__getitem__", lambda self, number: read.append(number) or get(self, number))
    data = data_config(str(tmp_path / "a.jsonl"), batch_size=4, packing=kind, seq_len=2 * num_each)
    [found] = held_out.open_held_out(data, tokenizer=TOKENIZER, num_batches=3)[0].values()
    assert len(read) <= 110  # 16 first, by whose length about 100 are enough
    seen = [int(number) for batch in found.batches for row in batch.tokens
            for number in re.findall(r"Document (\d{4}) ends", TOKENIZER.decode(row))]  # fmt: skip
    assert 12 <= len(seen) <= 24
    assert np.diff([-40, *sorted(seen), 1040]).max() < 130
    estimated = int(re.search(r"of about ([\d,]+) tokens", str(found.coverage))[1].replace(",", ""))
    assert estimated == pytest.approx(1000 * num_each, rel=0.01)


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_validation_skips_bad_records_and_pads_with_empty_rows(tmp_path, kind):
    text = "Bytes é, 漢字.\n"
    path = write_jsonl(tmp_path / "a.jsonl", [text, None])
    data = data_config(str(path), batch_size=3, packing=kind, seq_len=64)
    with refused("a.jsonl, row 2", "'text'", kind=BadRecord):
        validation(data, num_batches=3)
    data = dataclasses.replace(data, on_bad_record="skip")
    [found] = held_out.open_held_out(data, tokenizer=TOKENIZER, num_batches=0)[0].values()
    [batch] = found.batches
    assert found.num_skipped == 1
    assert (batch.tokens[1:] == TOKENIZER.eos_id).all()
    assert (batch.weights[1:] == 0).all()
    first = TOKENIZER.token_bytes[batch.tokens[0, 0]]  # the first token is given, not predicted
    assert found.num_bytes + first == len(text.encode())


def test_single_source_batches_match_golden_hashes():
    """Golden hashes of tiny's batches, recorded before there were mixtures and windows."""
    data = DataConfig(train="package:austen_train.jsonl", tokenizer="package:austen_2k.model", batch_size=4)
    hashes = [loader.batch_hash(batch, rows=range(4)) for batch, _ in take(data, 3)]
    assert hashes == [
        "16f4dae5c050c18a231129a16dce3cee",
        "8760b6fa201c4868acd29b681255e96d",
        "e31938043ef2633fd523c94db4afe0d7",
    ]
    data = dataclasses.replace(data, batch_size=6, seq_len=64, max_document_chars=3000, seed=7)
    hashes = [loader.batch_hash(batch, rows=range(6)) for batch, _ in take(data, 40)]
    assert (hashes[0], hashes[-1]) == ("69d95094cfc4d3d43e44bfc466321de4", "b1036c58280121f7bb73ed9f0c1f9b50")
    held = validation(dataclasses.replace(data, validation="package:austen_validation.jsonl"), num_batches=0)
    # recorded on data.validation = austen_validation.jsonl
    assert loader.batch_hash(held[0], rows=range(6)) == "e300e5e613948fefc26d6238cc5c9891"
