"""Exports in the background of a training: as `hf export` writes them; no step waits for them."""

import errno
import os
import shutil
import threading
import warnings

import jax
import micro
import pytest
import transformers
from micro import train
from refusals import assert_names, refused

from hlat_jax import loop
from hlat_jax.hf import background
from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.run.resume import EXPORTS
from hlat_jax.store.checkpoint import find_saved
from hlat_jax.weights.safetensors_file import Writer
from hlat_jax.weights.trained import open_weights

EVERY, NUM_STEPS = 4, 8


@pytest.fixture
def mutable(tmp_path):
    """The micro config of a run of eight steps that saves and exports at 4 and 8, with fp32 masters, without a mesh."""
    c = micro.config(tmp_path, precision__policy="mixed", data__validation="", train__num_steps=NUM_STEPS)
    c.checkpoint.update(every_steps=EVERY, export_every_steps=EVERY)
    c.metrics.tensorboard = False
    return c


def exports(workdir):
    """Returns the names in the folder of exports: those that are whole have the number of a step."""
    return sorted(path.name for path in (workdir / EXPORTS).iterdir())


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_is_export_of(folder, checkpoint, *, scratch):
    """Asserts that a folder is, byte for byte, what `hf export` writes of a checkpoint."""
    shutil.rmtree(scratch, ignore_errors=True)
    export_checkpoint(open_weights(checkpoint, masters=True), scratch)
    found, expected = content(folder), content(scratch)
    assert found.keys() == expected.keys() >= {"config.json", "model.safetensors", "tokenizer.model"}
    for name, wanted in expected.items():
        assert found[name] == wanted, name


@pytest.mark.slow
def test_exports_from_a_mesh_match_their_checkpoints(mutable, tmp_path, capsys):
    mutable.parallel.update(data=2, tensor=2, zero1=True)
    assert train(mutable, tmp_path / "run", num_devices=4) == 0
    printed = capsys.readouterr().out
    assert exports(tmp_path / "run") == ["4", "8"]
    for step in (4, 8):
        folder = tmp_path / f"run/huggingface/{step}"
        assert_is_export_of(folder, tmp_path / f"run/checkpoints/{step}", scratch=tmp_path / "scratch")
        assert_names(printed, f"step {step} ", folder, "(float32)")
    assert content(tmp_path / "run/huggingface/4") != content(tmp_path / "run/huggingface/8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/huggingface/8")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/huggingface/8")
    assert found.num_parameters() == sum(leaf.size for leaf in jax.tree.leaves(open_weights(tmp_path / "run").arrays))
    assert tokenizer.decode(tokenizer("It is a truth")["input_ids"], skip_special_tokens=True) == "It is a truth"


@pytest.mark.slow
def test_no_step_waits_or_changes_and_weights_match_their_step(mutable, tmp_path, monkeypatch, capsys):
    """The writer of step 2 continues once step 7 is dispatched: a loop that waited for it would never get there.

    Meanwhile newer checkpoints are saved, and the one that it reads is kept beside the newest.
    """
    mutable.checkpoint.update(every_steps=0, export_every_steps=2, keep_last=1)
    dispatched, in_time, there, dispatch = threading.Event(), [], [], loop._step

    def noted(run, progress, batch):
        dispatch(run, progress, batch)
        if progress.step == 7:
            dispatched.set()

    def slow(weights, out):
        in_time.append(dispatched.wait(600))
        there.append(micro.saved_steps(tmp_path / "run"))
        return export_checkpoint(weights, out)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", noted)
        patch.setattr(background, "export_checkpoint", slow)
        assert train(mutable, tmp_path / "run") == 0
    assert all(in_time)
    assert there[0][:1] == [2] < there[0]
    assert_names(capsys.readouterr().out, "step 4 ", "step 2 ")
    assert exports(tmp_path / "run") in (["2", "8"], ["2", "6", "8"])  # that of 6 may be due in time
    assert micro.saved_steps(tmp_path / "run") == [8]  # what was read is not kept
    mutable.checkpoint.update(every_steps=2, export_every_steps=0, keep_last=9)
    assert train(mutable, tmp_path / "plain") == 0
    assert not (tmp_path / "plain" / EXPORTS).exists()
    one, other = ([micro.exact(row) for row in micro.rows(tmp_path / name)] for name in ("run", "plain"))
    assert one == other
    for step in (2, 8):
        folder = tmp_path / f"run/huggingface/{step}"
        assert_is_export_of(folder, tmp_path / f"plain/checkpoints/{step}", scratch=tmp_path / "scratch")


@pytest.mark.slow
def test_a_failing_writer_ends_the_run(mutable, tmp_path, monkeypatch):
    workdir, write = tmp_path / "run", Writer.write

    def full(self, name, values, **options):
        if "norm" in name:  # when the file is there in part
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, name, values, **options)

    mutable.train.num_steps = EVERY + 1  # it may fail as late as at the end
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", full)
        with refused("step 4 ", workdir / EXPORTS / "4", os.strerror(errno.ENOSPC), kind=background.ExportError):
            train(mutable, workdir)
    assert exports(workdir) == []
    saved = find_saved(workdir)
    assert saved.name in ("4", "5")
    shutil.rmtree(workdir / "checkpoints/5", ignore_errors=True)
    mutable.train.num_steps = NUM_STEPS
    (workdir / "huggingface/4.partial").mkdir()  # as a kill leaves it

    assert train(mutable, workdir) == 0  # resumes from step 4, which is exported now
    assert exports(workdir) == ["4", "8"]
    assert_is_export_of(workdir / "huggingface/4", workdir / "checkpoints/4", scratch=tmp_path / "scratch")


@pytest.mark.slow
def test_an_export_beyond_the_resumed_step_is_redone(mutable, tmp_path, capsys):
    workdir = tmp_path / "run"
    mutable.data.train = "a=package:austen_train.jsonl;b=package:austen_validation.jsonl"
    mutable.data.mixture = "a=1,b=0"
    assert train(mutable, workdir) == 0
    (workdir / "huggingface/4/mark").touch()
    shutil.rmtree(workdir / "checkpoints/8")
    mutable.data.mixture = "a=1,b=0 until_step=4;a=0.1,b=0.9"  # of steps that are not trained yet
    assert train(mutable, workdir) == 0
    assert_names(capsys.readouterr().out, "step 8 ", workdir / "huggingface/8.discarded")
    assert exports(workdir) == ["4", "8", "8.discarded"]
    assert_is_export_of(workdir / "huggingface/8", workdir / "checkpoints/8", scratch=tmp_path / "scratch")
    discarded, made = (content(workdir / "huggingface" / name) for name in ("8.discarded", "8"))
    assert discarded["model.safetensors"] != made["model.safetensors"]
    shutil.rmtree(workdir / "huggingface/8")  # as if killed between the last checkpoint and its export
    assert train(mutable, workdir) == 0
    assert_is_export_of(workdir / "huggingface/8", workdir / "checkpoints/8", scratch=tmp_path / "scratch")
    assert (workdir / "huggingface/4/mark").exists()
