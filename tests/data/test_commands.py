"""The commands of `python -m hlat_jax.data`: their words, the tokenizer they train, the table they print."""

import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.cli import config_files
from hlat_jax.data import mixture, packing, sources
from hlat_jax.data.build import stats, tokenizer_training
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve
from hlat_jax.store import progress

AUSTEN = "package:austen_train.jsonl"


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def austen_texts():
    documents = sources.open_corpus(AUSTEN, text_field="text", key="data.train")
    return [documents[index] for index in range(len(documents))]


def test_invalid_command_lines_suggest_the_nearest_match(data_here, tmp_path):
    code, _, err = data_here("biuld")
    assert (code, "Did you mean 'build'?" in err) == (2, True)
    code, _, err = data_here("build", AUSTEN, f"--out={tmp_path}/o", "--tokeniser=x")
    assert (code, "unknown flag --tokeniser. Did you mean '--tokenizer'?" in err) == (2, True)
    assert "no inputs" in data_here("build", f"--out={tmp_path}/o")[2]
    assert "--out is missing" in data_here("build", AUSTEN)[2]
    assert data_here("build", AUSTEN, f"--out={tmp_path}/o", "--workers=many")[0] == 2
    assert data_here("build", AUSTEN, f"--out={tmp_path}/o", "--on_bad_record=perhaps")[0] == 2
    assert data_here("build", AUSTEN, f"--out={tmp_path}/o", "--shard_mb=0")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_help_lists_all_flags(data_here):
    overview = data_here("--help")[1]
    for verb, flag in (("build", "--shard_mb"), ("tokenizer", "--sample_mb"), ("stats", "--sample_mb")):
        code, out, _ = data_here(verb, "--help")
        assert (code, flag in out, verb in overview) == (0, True, True)
    assert data_here()[0] == 2


def test_build_command_writes_a_dataset_and_says_how_to_train_on_it(data_here, tmp_path):
    words = ("build", AUSTEN, "--out", tmp_path / "o", "--tokenizer=package:austen_2k.model", "--shard_mb=1")
    code, out, err = data_here(*words)
    assert (code, err) == (0, "")
    manifest = json.loads((tmp_path / "o" / "manifest.json").read_text())
    assert re.search(rf"built: 257 documents, .* {manifest['tokens']:,} tokens .*, 4 shards", out)
    assert f"--config.data.train={tmp_path / 'o'}" in out
    assert "is complete" in data_here(*words)[1]


def test_build_command_counts_the_records_it_leaves_out(data_here, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n{"text": 1}\n')
    code, _, err = data_here("build", tmp_path / "a.jsonl", f"--out={tmp_path}/o")
    assert (code, "row 2" in err) == (2, True)
    code, out, _ = data_here("build", tmp_path / "a.jsonl", f"--out={tmp_path}/o", "--on_bad_record=skip")
    assert code == 0
    assert "skipped 1 bad record" in out
    assert "row 2" in out


def test_failure_prints_one_line_with_its_exit_code(data_here, tmp_path, monkeypatch):
    for error, expected in ((OSError("no disk"), 1), (KeyboardInterrupt(), 130)):

        def fail(*_, **__):
            raise error  # noqa: B023

        monkeypatch.setattr("hlat_jax.data.build.build.build", fail)
        code, _, err = data_here("build", AUSTEN, f"--out={tmp_path}/o")
        assert (code, err.count("\n")) == (expected, 1)


def test_peek_gets_the_config_the_run_folder_and_the_step(data_here, monkeypatch):
    received = []
    peek = types.ModuleType("hlat_jax.data.build.peek")
    peek.peek = lambda config, *words, **flags: received.append((config.name, *words, flags)) or 7
    monkeypatch.setitem(sys.modules, "hlat_jax.data.build.peek", peek)
    monkeypatch.setattr("hlat_jax.data.build.peek", peek, raising=False)
    assert data_here("peek", "--config=tiny", "--step=3")[0] == 7
    assert received == [("tiny", pathlib.Path("runs/tiny"), {"step": 3, "row": None})]


def test_peek_asks_for_a_step_a_row_and_files_that_exist(data_here):
    for words, message in (
        ([], "--step=None must be at least 1: step N trains on batch N."),
        (["--step=-1"], "error: --step=-1 must be at least 1: step N trains on batch N."),
        (["--step=1", "--row=4"], "--row=4 must be in 0 .. data.batch_size - 1 = 1"),
        (["--step=1", "--config.data.train=/nowhere"], "data.train: /nowhere does not exist"),
        (["--step=1", "--config.data.validation=/no/*.txt"], "data.validation: /no/*.txt matches no file"),
        (["--step=1", "--config.data.tokenizer=/no.model"], "data.tokenizer=/no.model: no such file"),
    ):
        code, _, err = data_here("peek", "--config=tiny", *words)
        assert (code, message in err) == (2, True), err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer of 500 tokens from the novels."""
    path = tmp_path_factory.mktemp("model") / "t.model"
    options = tokenizer_training.TrainingOptions(vocab_size=500, sample_bytes=500_000)
    return tokenizer_training.train([AUSTEN], out=path, options=options), path


# U+2581 is SentencePiece's own mark of a space
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.one_of(texts, st.text(" \n\tab<s>/")), min_size=1))
def test_trained_tokenizer_round_trips(trained, texts):
    tokenizer = Tokenizer(str(trained[1]))
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())  # so bits per byte are exact
        assert not set(ids) & {0, 1, 2}


def test_trained_tokenizer_has_llama_special_ids_and_byte_tokens(trained):
    tokenizer = Tokenizer(str(trained[1]), vocab_size=500)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained[1]))
    pieces = [processor.id_to_piece(i) for i in range(500)]
    assert pieces[:3] == ["<unk>", "<s>", "</s>"]
    assert sum(piece.startswith("<0x") for piece in pieces) == 256
    assert [pieces[token] for token in tokenizer.encode("\n\n")] == ["\n", "\n"]
    assert trained[0].tokens_per_byte < 0.6


def test_training_a_tokenizer_again_gives_the_same_model(trained, data_here, tmp_path):
    out = tmp_path / "new" / "t.model"
    code, said, _ = data_here("tokenizer", AUSTEN, "--vocab_size=500", f"--out={out}", "--sample_mb=1")
    assert code == 0
    code, again, _ = data_here(
        "tokenizer", AUSTEN, "--vocab_size=500", f"--out={tmp_path / 'u.model'}", "--sample_mb=1"
    )
    assert out.read_bytes() == (tmp_path / "u.model").read_bytes()
    assert "500 tokens" in said
    assert said.splitlines()[1:] == again.splitlines()[1:]


def test_vocab_size_too_large_for_the_text_is_refused_with_one_that_fits(data_here, tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", ["the cat sat on the mat äöü " * 20]), tmp_path / "t.model"
    err = data_here("tokenizer", path, "--vocab_size=9999", f"--out={out}")[2]
    most = int(re.search(r"use at most (\d+)", err)[1])
    assert data_here("tokenizer", path, f"--vocab_size={most + 1}", f"--out={out}")[0] == 2
    assert not out.exists()
    assert data_here("tokenizer", path, f"--vocab_size={most}", f"--out={out}")[0] == 0
    least = int(
        re.search(r"use at least (\d+)", data_here("tokenizer", path, "--vocab_size=261", f"--out={out}2.model")[2])[1]
    )
    assert data_here("tokenizer", path, f"--vocab_size={least}", f"--out={out}3.model")[0] == 0
    assert "at least 260" in data_here("tokenizer", path, "--vocab_size=259", f"--out={out}4.model")[2]


def test_tokenizer_command_refuses_existing_output_and_non_text_input(data_here, tmp_path):
    path, out = write_jsonl(tmp_path / "a.jsonl", [" ", " \n"]), tmp_path / "t.model"
    assert "hold no text (2 documents)" in data_here("tokenizer", path, "--vocab_size=300", f"--out={out}")[2]
    assert "must end in .model" in data_here("tokenizer", path, "--vocab_size=300", f"--out={tmp_path / 'x'}")[2]
    out.write_bytes(b"mine")
    assert "t.model exists" in data_here("tokenizer", AUSTEN, "--vocab_size=300", f"--out={out}")[2]
    assert out.read_bytes() == b"mine"
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "some words here"}\n{"text": null}\n')
    words = ("tokenizer", tmp_path / "b.jsonl", "--vocab_size=272", f"--out={tmp_path / 'b.model'}")
    assert "row 2" in data_here(*words)[2]
    nowhere = data_here("tokenizer", AUSTEN, "--vocab_size=600", "--out=/proc/t.model")
    assert nowhere[0] == 1
    assert "cannot write --out=/proc/t.model: " in nowhere[2]
    assert "shards" not in nowhere[2]
    assert "skipped 1 bad record" in data_here(*words, "--on_bad_record=skip")[1]


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
    for key, value in changes.items():
        mutable.data[key] = value
    return resolve(mutable)


def cells(report, name):
    [row] = [line for line in report.splitlines() if line.startswith(name + "  ")]
    return [float(cell.replace(",", "").lstrip("~")) for cell in row.removeprefix(name).split()]


def exact_counts(texts):
    tokenizer = Tokenizer("package:austen_2k.model")
    num_tokens = sum(len(i) for t in texts for i in packing.document_tokens(t, tokenizer=tokenizer, max_chars=500_000))
    return len(texts), sum(len(text.encode()) for text in texts), num_tokens


def test_stats_are_exact_when_the_sample_covers_all_text(data_here):
    code, out, _ = data_here("stats", "--config=tiny", "--sample_mb=0", "--config.train.num_steps=1000")
    documents, num_bytes, num_tokens = exact_counts(austen_texts())
    assert code == 0
    assert cells(out, "all")[:3] == [documents, num_bytes, num_tokens]
    assert cells(out, "all")[3] == pytest.approx(num_tokens / num_bytes, abs=5e-5)
    assert cells(out, "all")[4] == pytest.approx(1000 * 2 * 256 / num_tokens, rel=5e-3)
    assert cells(out, "all")[5] == pytest.approx(144 * 2 * 256 / num_tokens, rel=5e-3)
    assert cells(out, "validation: all")[0] == 13
    assert "~" not in out


def test_stats_of_a_sample_are_marked_and_within_their_error():
    report = stats.report(tiny(), sample_bytes=1_000_000)
    documents, num_bytes, num_tokens = exact_counts(austen_texts())
    found = cells(report, "all")
    assert found[0] == documents
    error = float(re.search(r"standard error of the tokens is ([\d.]+)%", report)[1]) / 100
    assert 0 < error < 0.1
    assert found[1] == pytest.approx(num_bytes, rel=4 * error)
    assert found[2] == pytest.approx(num_tokens, rel=4 * error)
    assert "~" in report


def test_stats_of_stored_ids_are_exact_without_reading_text(data_here, trained, tmp_path):
    data_here("build", AUSTEN, f"--out={tmp_path}/ids", "--tokenizer=package:austen_2k.model")
    report = stats.report(tiny(train=f"{tmp_path}/ids", validation=""), sample_bytes=1)
    assert cells(report, "all")[:3] == list(exact_counts(austen_texts()))
    assert "~" not in report
    with pytest.raises(ValueError, match="token ids from the tokenizer with"):
        stats.report(tiny(train=f"{tmp_path}/ids", tokenizer=str(trained[1])), sample_bytes=1)


def test_stats_have_a_row_per_source_with_epochs_by_weight(tmp_path):
    a, b = (
        write_jsonl(tmp_path / "a.jsonl", ["some words " * 100]),
        write_jsonl(tmp_path / "b.jsonl", ["more " * 500] * 2),
    )
    train, weights = f"short={a};long={b}", "short=3,long=1 until_step=100;short=0,long=1"
    report = stats.report(tiny(train=train, mixture=weights, validation=""), sample_bytes=0)
    short, long = cells(report, "short"), cells(report, "long")
    assert (short[0], long[0]) == (1, 2)
    assert short[4] == pytest.approx(75 * 512 / short[2], rel=5e-3)  # 144 steps of 512 tokens
    assert long[4] == pytest.approx(69 * 512 / long[2], rel=5e-3)
    assert cells(report, "total")[2] == short[2] + long[2]


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any)), max_size=4
    ),
    st.integers(0, 200),
)
def test_rows_of_steps_add_up_to_the_steps(stages, num_steps):
    until, parts = 0, []
    for steps, (one, two) in stages:
        until += steps
        parts.append(f"a={one},b={two} until_step={until}")
    parts.append("a=1,b=2")
    parsed = mixture.parse_stages(";".join(parts), names=("a", "b"), batch_tokens=1)
    rows = stats.rows_of_steps(parsed, num_steps=num_steps)
    ends = [0, *(min(stage.until_step, num_steps) for stage in parsed[:-1]), num_steps]
    assert sum(rows) == pytest.approx(num_steps)
    wanted = sum(float(s.shares[0]) * (e - b) for s, b, e in zip(parsed, ends[:-1], ends[1:], strict=True))
    assert rows[0] == pytest.approx(wanted)


def test_stats_skip_bad_records_only_if_the_config_does(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": null}\n{"text": "three"}\n')
    changes = {"train": str(tmp_path / "a.jsonl"), "validation": ""}
    with pytest.raises(ValueError, match="row 2"):
        stats.report(tiny(**changes), sample_bytes=0)
    report = stats.report(tiny(**changes, on_bad_record="skip"), sample_bytes=0)
    assert cells(report, "all")[:2] == [2, 8]
    assert "1 bad record" in report


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown_on(stream, **options):
    asked = []

    def ask():
        asked.append(0)
        return min(len(asked) / 4, 1.0), f"{len(asked)} documents"

    with progress.ProgressBar(ask, stream=stream, **options) as bar:
        while len(asked) < 3:
            bar._ended.wait(0.01)
    return stream.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    bar = shown_on(Terminal())
    assert "\n" not in bar
    assert "[######.................." in bar
    assert bar.endswith("\r\x1b[K")
    lines = shown_on(io.StringIO(), line_s=0.02).splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["25%", "1"], ["50%", "2"], ["75%", "3"]]


def test_progress_of_a_new_phase_is_estimated_from_its_own_beginning(monkeypatch):
    clock = itertools.chain([0, 1000, 1800, 2000, 2000, 2005], itertools.repeat(3000))
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    values = iter([(0.0, "opening"), (0.9, "reading"), (0.0, "writing"), (0.01, "writing")])
    stream, asked = io.StringIO(), []

    def ask():
        asked.append(0)
        return next(values, (1.0, ""))

    with progress.ProgressBar(ask, stream=stream, line_s=0.01) as bar:
        while len(asked) < 5:
            bar._ended.wait(0.01)
    assert stream.getvalue().splitlines()[:4] == [
        "      opening  0:16:40",
        " 90%  reading  0:03:20 left",
        "      writing  0:00:00",
        "  1%  writing  0:08:15 left",
    ]


def test_an_error_ends_the_thread_that_shows_progress():
    bar = progress.ProgressBar(progress.Status(), stream=io.StringIO())
    with pytest.raises(KeyError), bar:
        raise KeyError
    assert not bar._thread.is_alive()


def test_closed_stdout_is_not_an_error(tmp_path):
    command = [sys.executable, "-m", "hlat_jax.data", "build", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.slow
def test_summary_prints_file_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode("caf\u00e9.jsonl".encode("latin-1"))
    (tmp_path / name).write_text('{"text": "one"}\n{"\\ud800": "x"}\n')
    command = [sys.executable, "-m", "hlat_jax.data", "build", str(tmp_path / name), f"--out={tmp_path}/out"]
    done = subprocess.run([*command, "--on_bad_record=skip"], capture_output=True, check=True)
    assert rb"caf\udce9.jsonl, row 2: no key 'text'" in done.stdout


def test_stats_report_ignored_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["some words"] * 3)
    (tmp_path / "b.csv").write_text("x")
    report = stats.report(tiny(train=str(tmp_path), validation=""), sample_bytes=0)
    assert f"data.train={tmp_path}: ignored 1 file: .csv 1." in report


def test_wrong_text_field_error_names_the_flag_and_existing_keys(data_here, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    for verb in ("build", "tokenizer"):
        message = data_here(verb, path, "--text_field=body", f"--out={tmp_path}/{verb}.model")[2]
        assert "row 1: no key 'body'; its keys are 'text'. Fix or remove it, set --text_field if" in message
        assert "such records with --on_bad_record=skip." in message
        assert "data." not in message
        assert "workdir" not in message
