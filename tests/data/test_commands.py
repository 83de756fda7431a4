"""The commands of `python -m hlat_jax.data`: their words, the tokenizer they train, the table they print."""

import io
import json
import re

import numpy as np
import pytest
import sentencepiece
from data_files import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names, assert_refused, refused

from hlat_jax.cli import config_files
from hlat_jax.data import packing, sources
from hlat_jax.data.build import stats, tokenizer_training
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve
from hlat_jax.store import progress

AUSTEN = "package:austen_train.jsonl"


def austen_texts():
    documents = sources.open_corpus(AUSTEN, text_field="text", key="data.train")
    return [documents[index] for index in range(len(documents))]


def test_invalid_command_lines_are_refused(data_here, tmp_path):
    out = f"--out={tmp_path}/o"
    for words, facts in (
        (["biuld"], ("'build'",)),
        (["build", AUSTEN, out, "--tokeniser=x"], ("--tokeniser", "'--tokenizer'")),
        (["build", out], ("inputs",)),
        (["build", AUSTEN], ("--out",)),
        (["build", AUSTEN, out, "--on_bad_record=perhaps"], ("--on_bad_record=perhaps",)),
        (["build", AUSTEN, out, "--shard_mb=0"], ("--shard_mb=0",)),
        (["tokenizer", AUSTEN, f"--out={tmp_path}/x"], (f"--out={tmp_path}/x", ".model")),
        (["peek", "--config=tiny"], ("--step=None",)),
        (["peek", "--config=tiny", "--step=1", "--row=4"], ("--row=4", "data.batch_size", "1")),
    ):
        assert_refused(data_here(*words), *facts)
    assert data_here()[0] == 2
    assert list(tmp_path.iterdir()) == []
    code, printed, _ = data_here("build", "--help")
    assert (code, "--shard_mb" in printed) == (0, True)


def test_build_command_says_how_to_train_on_its_dataset(data_here, tmp_path):
    words = ("build", AUSTEN, "--out", tmp_path / "o", "--tokenizer=package:austen_2k.model", "--shard_mb=1")
    code, out, err = data_here(*words)
    assert (code, err) == (0, "")
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    assert (manifest["documents"], len(manifest["shards"])) == (257, 4)
    assert_names(out, "257 documents", f"{manifest['tokens']:,} tokens", f"--config.data.train={tmp_path / 'o'}")
    before = (tmp_path / "o" / "manifest.json").stat().st_mtime_ns
    assert data_here(*words)[0] == 0
    assert (tmp_path / "o" / "manifest.json").stat().st_mtime_ns == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The path of a tokenizer of 500 tokens from the novels."""
    path = tmp_path_factory.mktemp("model") / "t.model"
    tokenizer_training.train([AUSTEN], out=path, vocab_size=500, sample_bytes=500_000)
    return path


# U+2581 is SentencePiece's own mark of a space
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.one_of(texts, st.text(" \n\tab<s>/")), min_size=1))
def test_trained_tokenizer_round_trips(trained, texts):
    tokenizer = Tokenizer(str(trained))
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())  # so bits per byte are exact
        assert not set(ids) & {0, 1, 2}


def test_trained_tokenizer_has_llama_special_ids_and_byte_tokens(trained):
    tokenizer = Tokenizer(str(trained), vocab_size=500)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    pieces = [processor.id_to_piece(i) for i in range(500)]
    assert pieces[:3] == ["<unk>", "<s>", "</s>"]
    assert sum(piece.startswith("<0x") for piece in pieces) == 256
    assert [pieces[token] for token in tokenizer.encode("\n\n")] == ["\n", "\n"]
    text = austen_texts()[0]
    assert len(tokenizer.encode(text)) < 0.6 * len(text.encode())


def test_tokenizer_command_refuses_what_it_cannot_train_on(data_here, tmp_path):
    out = tmp_path / "new" / "t.model"
    code, printed, _ = data_here("tokenizer", AUSTEN, "--vocab_size=500", f"--out={out}", "--sample_mb=1")
    assert (code, "500 tokens" in printed) == (0, True)
    again = data_here("tokenizer", AUSTEN, "--vocab_size=500", f"--out={tmp_path}/u.model", "--sample_mb=1")[1]
    assert printed.partition(":")[2] == again.partition(":")[2]  # with its SHA-256
    assert_refused(data_here("tokenizer", AUSTEN, f"--out={out}"), f"--out={out}")
    path = write_jsonl(tmp_path / "a.jsonl", ["the cat sat on the mat äöü " * 20])

    def train(vocab_size, *words):
        words = ("tokenizer", *(words or (path,)), f"--vocab_size={vocab_size}", f"--out={tmp_path}/{vocab_size}.model")
        code, out, err = data_here(*words)
        return code, out + err

    most = int(re.search(r"to a value <= (\d+)", train(9999)[1])[1])
    least = int(re.search(r"required_chars. 261 vs (\d+)", train(261)[1])[1])
    assert [train(size)[0] for size in (most + 1, most, least - 1, least)] == [2, 0, 2, 0]
    assert_names(train(290, write_jsonl(tmp_path / "b.jsonl", [" ", " \n"]))[1], "2 documents", "--text_field")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "some words here"}\n{"text": null}\n')
    assert "row 2" in train(272, tmp_path / "c.jsonl")[1]
    assert "1 bad record" in train(272, tmp_path / "c.jsonl", "--on_bad_record=skip")[1]


def test_sample_is_bounded_and_uniform_over_whole_pieces():
    texts = [f"{number:05d} " * 600 for number in range(400)]  # 3,600 bytes each: a piece
    sample = tokenizer_training.Sample(360_000)
    for text in texts:
        sample.add(text)
        assert sample.num_bytes <= 360_000
    pieces = sample.pieces()
    assert len(pieces) == 100
    assert sample.seen_bytes == 400 * 3600
    numbers = [int(piece[:5]) for piece in pieces]
    assert numbers == sorted(numbers)
    assert set(pieces) <= set(texts)
    counts = np.bincount(np.asarray(numbers) // 100, minlength=4)  # 25 expected of each 100, deviation 4
    assert counts.min() > 8


def tiny(**changes):
    mutable = config_files.load("tiny")
    mutable.data.update(changes)
    return resolve(mutable)


def cells(report, name):
    [row] = [line for line in report.splitlines() if line.startswith(name + "  ")]
    return [float(cell.replace(",", "").lstrip("~")) for cell in row.removeprefix(name).split()]


def exact_counts(texts):
    tokenizer = Tokenizer("package:austen_2k.model")
    num_tokens = sum(len(i) for t in texts for i in packing.document_tokens(t, tokenizer=tokenizer, max_chars=500_000))
    return len(texts), sum(len(text.encode()) for text in texts), num_tokens


@pytest.mark.slow
def test_stats_are_exact_when_the_sample_covers_all_text(data_here, trained, tmp_path):
    documents, num_bytes, num_tokens = exact_counts(austen_texts())
    data_here("build", AUSTEN, f"--out={tmp_path}/ids", "--tokenizer=package:austen_2k.model")
    for words in ((), (f"--config.data.train={tmp_path}/ids",)):
        code, out, _ = data_here("stats", "--config=tiny", "--sample_mb=0", "--config.train.num_steps=1000", *words)
        assert code == 0
        assert cells(out, "all")[:3] == [documents, num_bytes, num_tokens]
        assert cells(out, "all")[3] == pytest.approx(num_tokens / num_bytes, abs=5e-5)
        assert cells(out, "all")[4] == pytest.approx(1000 * 2 * 256 / num_tokens, rel=5e-3)
        assert "~" not in out
        assert words or cells(out, "validation: all")[0] == 13
    with refused(f"{tmp_path}/ids", Tokenizer(str(trained)).sha256[:12]):
        stats.report(tiny(train=f"{tmp_path}/ids", tokenizer=str(trained)), sample_bytes=1)


@pytest.mark.slow
def test_stats_of_a_sample_are_marked_and_close():
    report = stats.report(tiny(), sample_bytes=1_000_000)
    documents, num_bytes, num_tokens = exact_counts(austen_texts())
    found = cells(report, "all")
    assert found[0] == documents
    assert found[1:3] == [pytest.approx(num_bytes, rel=0.15), pytest.approx(num_tokens, rel=0.15)]
    assert "~" in report


def test_stats_have_a_row_per_source_with_epochs_by_weight(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", ["some words " * 100])
    b = write_jsonl(tmp_path / "b.jsonl", ["more " * 500] * 2)
    train, weights = f"short={a};long={b}", "short=3,long=1 until_step=100;short=0,long=1"
    report = stats.report(tiny(train=train, mixture=weights, validation=""), sample_bytes=0)
    short, long = cells(report, "short"), cells(report, "long")
    assert (short[0], long[0]) == (1, 2)
    assert short[4] == pytest.approx(75 * 512 / short[2], rel=5e-3)  # 144 steps of 512 tokens
    assert long[4] == pytest.approx(69 * 512 / long[2], rel=5e-3)


def test_stats_skip_bad_records_only_if_the_config_does(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": null}\n{"text": "three"}\n')
    changes = {"train": str(tmp_path / "a.jsonl"), "validation": ""}
    with refused("a.jsonl, row 2"):
        stats.report(tiny(**changes), sample_bytes=0)
    report = stats.report(tiny(**changes, on_bad_record="skip"), sample_bytes=0)
    assert cells(report, "all")[:2] == [2, 8]


def shown_on(stream, **options):
    asked = []

    def ask():
        asked.append(0)
        return min(len(asked) / 4, 1.0), f"{len(asked)} documents"

    with progress.ProgressBar(ask, stream=stream, **options) as bar:
        while len(asked) < 3:
            bar._ended.wait(0.01)
    return stream.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "dumb")  # of Emacs and of consoles of CI
    assert not set("\r\x1b") & set(shown_on(terminal, line_s=0.02))
    monkeypatch.setenv("TERM", "xterm")
    terminal.truncate(0)
    bar = shown_on(terminal)
    assert "\n" not in bar
    assert "[######.................." in bar
    assert bar.endswith("\r\x1b[K")
    lines = shown_on(io.StringIO(), line_s=0.02).splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["25%", "1"], ["50%", "2"], ["75%", "3"]]
