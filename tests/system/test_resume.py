"""A run that is resumed, after a full disk or with more steps, ends with the bits of an uninterrupted one.

Signals and damaged files are in test_faults.py.
"""

import json

import micro
import pytest
from refusals import assert_names, assert_refused

from hlat_jax.data.formats.paths import asset_path

HALF = micro.NUM_STEPS // 2


@pytest.fixture
def train(trained_run, train_here):
    """A function of a run folder and overrides that runs the command of `trained_run`: (exit code, stdout, stderr)."""

    def run(workdir, *overrides):
        overrides = ("data.validation=", *overrides)
        words = (f"--config.{override}" for override in overrides)
        return train_here(f"--config={trained_run.parent / 'micro.py'}", f"--workdir={workdir}", *words)

    return run


def differences(workdir, trained_run):
    return micro.differences(trained_run.parent / "micro.py", workdir, trained_run)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_after_a_full_disk(trained_run, train, small_disk):
    workdir = small_disk("3m") / "run"  # one or two checkpoints of 1.3 MB fit, keeping two needs room for three
    code, _, err = train(workdir)
    assert code == 1, err
    assert "Exception" not in err
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    before = max(micro.saved_steps(workdir))
    step = before + micro.SAVE_EVERY
    assert_names(line, f"step {step} ", f"step {before} ")
    # rows up to the checkpoint that failed were on the disk before it
    assert micro.rows(workdir)[-1]["step"] >= step

    small_disk("64m")
    code, out, err = train(workdir)
    assert code == 0, err
    assert f"step {before} of" in out
    assert not differences(workdir, trained_run)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_other_logging(trained_run, train, tmp_path):
    workdir = tmp_path / "run"
    assert train(workdir, f"train.num_steps={HALF}")[0] == 0
    changed = ("checkpoint.every_steps=7", "checkpoint.keep_last=1", "metrics.console=on", "data.num_threads=0")
    code, out, err = train(workdir, *changed)
    assert code == 0, err
    assert f"step {HALF} of {micro.NUM_STEPS}" in out
    assert not differences(workdir, trained_run)
    assert micro.saved_steps(workdir) == [micro.NUM_STEPS]


def test_a_command_on_a_finished_run_changes_none_of_its_files(trained_run, train, tmp_path):
    workdir, text, other = trained_run, tmp_path / "other.jsonl", tmp_path / "other.model"
    text.write_text("".join(json.dumps({"text": f"Text {number} of another corpus."}) + "\n" for number in range(9)))
    # with a further field that SentencePiece passes over: the same pieces in a file of another hash
    other.write_bytes(asset_path("austen_2k.model").read_bytes() + bytes([0xFA, 0x07, 0x01, 0x00]))
    changed = {
        "optimizer.peak_lr=0.02": "optimizer.peak_lr: 0.01 ",
        "model.norm_eps=1e-6": "model.norm_eps: 1e-05 ",
        "data.seed=5": "data.seed: 1234 ",
        f"data.train={text}": "data.train: other.jsonl ",
        f"data.tokenizer={other}": "tokenizer_sha256",
        "data.train=/nowhere.jsonl": "/nowhere.jsonl",
        "model.vocab_size=1024": "model.vocab_size=2048",
    }

    def kept():  # all but the index of lines, a cache that may be deleted
        files = [path for path in workdir.rglob("*") if path.is_file() and path.parent.name != "index"]
        return {path: path.read_bytes() for path in files}

    before = kept()
    for override, fact in changed.items():
        assert_refused(train(workdir, override), fact)
    code, out, err = train(workdir)
    assert code == 0, err
    assert_names(out, workdir, f"step {micro.NUM_STEPS} of train.num_steps={micro.NUM_STEPS}")
    assert kept() == before
