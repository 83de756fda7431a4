"""The loop where runs go wrong: a signal at a bad moment, a bad record, a second process, a damaged state."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import config, exact, final_checkpoint, flip_exponent_bit, saved_steps
from micro import train as train_in_process
from refusals import refused

from hlat_jax import loop
from hlat_jax.data.loader import TrainBatches
from hlat_jax.host.process import LOCK_FILE, only_process
from hlat_jax.run import open as run_open
from hlat_jax.run import step_sync
from hlat_jax.run.nonfinite import NonFiniteError
from hlat_jax.run.validation import Validation
from hlat_jax.store import atomic_files
from hlat_jax.store.checkpoint_checks import saved_run
from hlat_jax.store.metrics import ROWS_FILE, read_rows


@pytest.fixture
def micro(tmp_path):
    return config(tmp_path, train__num_eval_batches=1)


@pytest.fixture
def train(tmp_path):
    """A function that trains a mutable config in `tmp_path/run` on one device."""
    return lambda c, **options: train_in_process(c, tmp_path / "run", **options)


@pytest.mark.slow
def test_lost_checkpoints_are_refused_and_a_rewind_is_said(micro, train, tmp_path, capsys):
    workdir = tmp_path / "run"
    micro.train.num_steps = 12  # saved at 5, 10 and 12; two are kept
    micro.checkpoint.keep_last = 2
    assert train(micro) == 0
    whole = [exact(row) for row in read_rows(workdir / ROWS_FILE)]
    shutil.rmtree(workdir / "checkpoints" / "12")
    assert train(micro) == 0
    assert "step 12 " in capsys.readouterr().out
    shutil.rmtree(workdir / "checkpoints")
    with refused(workdir, "step 12"):
        train(micro)
    assert [exact(row) for row in read_rows(workdir / ROWS_FILE)] == whole
    assert train(micro, begin_again=True) == 0
    assert "step 0 (--begin_again)" in capsys.readouterr().out
    assert [exact(row) for row in read_rows(workdir / ROWS_FILE)] == whole
    assert saved_steps(workdir) == [10, 12]


def test_state_is_saved_before_a_due_evaluation_after_a_signal(micro, train, tmp_path, monkeypatch):
    micro.checkpoint.every_steps = 0
    step, evaluate, saved_before = loop._step, Validation.__call__, []

    def step_and_signal(run, progress, batch):
        step(run, progress, batch)
        if progress.step == 6:  # where a validation is due
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluate_and_look(self, params):
        saved_before.append(saved_steps(tmp_path / "run"))
        return evaluate(self, params)

    monkeypatch.setattr(loop, "_step", step_and_signal)
    monkeypatch.setattr(Validation, "__call__", evaluate_and_look)
    assert train(micro) == 0
    assert saved_before[-1] == saved_steps(tmp_path / "run")
    assert len(saved_before[-1]) == 1


def test_a_signal_gives_the_stopped_code_only_while_steps_are_left(micro, train, monkeypatch):
    micro.train.eval_every_steps = micro.checkpoint.every_steps = 0
    step, last, when = loop._step, micro.train.num_steps, 6

    def step_and_signal(run, progress, batch):
        step(run, progress, batch)
        if progress.step == when:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "_step", step_and_signal)
    assert train(micro, stopped_code=75) == 75
    when = last
    assert train(micro, stopped_code=75) == 0
    assert train(micro, stopped_code=75) == 0  # the run is complete


@pytest.mark.slow
def test_a_bad_record_is_named_and_the_steps_before_it_are_saved(micro, train, tmp_path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{index} " + "word and word " * 40}) for index in range(40)]
    lines[29] = json.dumps({"text": None})
    text.write_text("\n".join(lines) + "\n")
    micro.data.train = str(text)
    micro.data.shuffle = False
    micro.checkpoint.every_steps = 0
    micro.train.num_steps = 1000
    with refused("text.jsonl, row 30", "--workdir"):
        train(micro)
    done = [row["step"] for row in read_rows(tmp_path / "run" / ROWS_FILE) if "loss" in row]
    assert saved_steps(tmp_path / "run") == [done[-1]]
    assert done[-1] > 1


@pytest.mark.slow
def test_validation_text_without_targets_is_refused(micro, train, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    micro.data.validation = str(held_out)
    for text in ("", "\n"):
        held_out.write_text(json.dumps({"text": text}) + "\n")
        with refused("held_out.jsonl"):
            train(micro)
    held_out.write_text(json.dumps({"text": "one text " * 200}) + "\n")
    micro.train.num_steps = 2
    assert train(micro) == 0
    held_out.write_text(json.dumps({"text": "another text " * 200}) + "\n")
    micro.train.num_steps = 4
    with refused("data.validation: held_out.jsonl"):
        train(micro)


@pytest.mark.slow
def test_permanent_checkpoints_are_saved_at_their_own_multiples(micro, train, tmp_path):
    micro.checkpoint.every_steps = 5
    micro.checkpoint.keep_every_steps = 7
    micro.checkpoint.keep_last = 1
    assert train(micro) == 0
    assert saved_steps(tmp_path / "run") == [7, 14, 21, 24]


def test_a_second_process_in_the_run_folder_is_refused(tmp_path):
    with only_process(tmp_path / "run"), refused(tmp_path / "run"):
        only_process(tmp_path / "run").__enter__()
    with only_process(tmp_path / "run"):
        pass  # free again


def test_opening_a_run_folder_removes_what_killed_writers_left(tmp_path):
    folder, names = tmp_path / "run", ("config.json", "index/a.npz", "tokenizer/tokenizer.model")
    writers = [atomic_files.atomic_writer(folder / name) for name in names]
    for name, writer in zip(names, writers, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        writer.__enter__().write(b"half")
    (folder / "notes.partial").write_text("written by the user")
    for path in folder.rglob("*.partial"):
        os.utime(path, (0, 0))  # long ago
    assert len(list(folder.rglob("*.partial"))) == 4
    with step_sync.only_job(folder):
        assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == [LOCK_FILE, "notes.partial"]


def test_ctrl_c_after_the_last_step_of_several_processes_ends_with_130(micro, train, monkeypatch, capfd):
    """No step follows before which the processes could exchange it."""
    finish, before = loop.results.show, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted_finish(*args):
        os.kill(os.getpid(), signal.SIGINT)
        finish(*args)

    monkeypatch.setattr(loop.results, "show", interrupted_finish)
    monkeypatch.setattr(loop.jax.distributed, "is_initialized", lambda: True)
    short(micro, 0).train.num_steps = 2
    try:
        assert train(micro) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Ctrl-C" in capfd.readouterr().err


@pytest.fixture
def after_step(monkeypatch):
    """A function that has `change(state, metrics)`, which returns both, called once: after a step of the next run."""
    compiled, pending = run_open.compiled_step, []

    def compiled_step(*args):
        program = compiled(*args)

        def train_step(state, *rest):
            state, metrics = program(state, *rest)
            if pending and int(state["step"]) >= pending[0][0]:
                state, metrics = pending.pop()[1](state, metrics)
            return state, metrics

        return train_step

    monkeypatch.setattr(run_open, "compiled_step", compiled_step)
    return lambda step, change: pending.append((step, change))


def flipped(name):
    return lambda state, metrics: (flip_exponent_bit(state, name), metrics)


def not_finite(num_steps):
    """Returns what has the train step report a loss that is not a number, `num_steps` times, and leaves the state."""
    return lambda state, metrics: (state, dataclasses.replace(metrics, loss=np.float32("nan"), finite=np.bool_(False)))


def short(c, every):
    c.data.validation = ""
    c.train.num_steps = 12
    c.checkpoint.every_steps = every
    return c


def end_of(workdir):
    """Returns the rows of a run, as far as a repetition has the same, and its last checkpoint."""
    rows = [exact(row) for row in read_rows(workdir / ROWS_FILE)]
    return rows, *final_checkpoint(workdir.parent / "micro.py", workdir)


@pytest.mark.slow
def test_run_with_a_flipped_weight_recovers_bitwise(micro, train, after_step, tmp_path, capsys):
    """The flip makes steps 8 to 10 non-finite, among which a checkpoint is due at 8."""
    short(micro, 4)
    assert train(micro) == 0
    expected = end_of(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "left alone")
    after_step(7, flipped("params.embed"))
    with refused("3 steps", "step 10 ", "inf", "step 4", kind=NonFiniteError):
        train(micro)
    assert saved_steps(tmp_path / "run") == [4]
    assert "step 8," in capsys.readouterr().out

    assert train(micro) == 0
    assert "step 4 of 12" in capsys.readouterr().out
    assert end_of(tmp_path / "run") == expected


@pytest.mark.slow
def test_batches_without_targets_update_nothing(micro, train, tmp_path, capsys):
    """Their mean loss is 0 / 0, which says nothing about the state."""

    def write_pairs(prompt):
        line = json.dumps({"prompt": prompt, "answer": "Yes."}) + "\n"
        (tmp_path / "pairs.jsonl").write_text(line * 8)

    write_pairs("It is a truth. " * 150)
    micro.data.update(train=str(tmp_path / "pairs.jsonl"), text_field="prompt,answer", validation="")
    short(micro, 4)
    micro.train.update(eval_every_steps=0, max_nonfinite_steps=2)
    with refused("2 steps", "step 2", "seq_len", kind=NonFiniteError):
        train(micro)
    assert saved_steps(tmp_path / "run") == []
    capsys.readouterr()
    micro.train.max_nonfinite_steps = 13
    assert train(micro) == 0
    made = read_rows(tmp_path / "run" / ROWS_FILE)
    assert [row["tokens"] for row in made] == [0] * 12
    assert len({row["param_norm"] for row in made}) == 1
    assert capsys.readouterr().out.count("no target") == 12
    assert saved_steps(tmp_path / "run")[-1] == 12
    (tmp_path / "run").rename(tmp_path / "done")
    write_pairs("It is a truth. " * 11)  # an answer in every other row: batches without a target between others
    micro.data.batch_size, micro.train.max_nonfinite_steps = 1, 2
    assert train(micro) == 0
    assert capsys.readouterr().out.count("no target") > 2


def test_non_finite_state_is_not_saved_even_if_all_steps_were_finite(micro, train, after_step, tmp_path):
    short(micro, 4)
    micro.checkpoint.keep_last = 1

    def damage(state, metrics):
        leaf = state["opt_state"]["inner"]["nu"]["embed"]
        state["opt_state"]["inner"]["nu"]["embed"] = jax.device_put(leaf.at[0, 0].set(jnp.inf), leaf.sharding)
        return state, metrics

    after_step(8, damage)
    with refused("step 8 ", "opt_state.inner.nu", "inf", "step 4", kind=NonFiniteError):
        train(micro)
    assert saved_steps(tmp_path / "run") == [4]
    assert train(micro) == 0
    assert saved_steps(tmp_path / "run") == [12]


@pytest.mark.slow
def test_checkpoint_and_export_due_in_a_non_finite_window_are_delayed(micro, train, after_step, tmp_path, capsys):
    short(micro, 5)
    micro.checkpoint.update(export_every_steps=5, keep_last=3)
    after_step(5, not_finite(1))
    assert train(micro) == 0
    assert saved_steps(tmp_path / "run") == [6, 10, 12]  # those of step 5 are made after the window
    exported = {int(path.name) for path in (tmp_path / "run/huggingface").iterdir()}
    assert {6, 12} <= exported <= {6, 10, 12}  # that of step 10 is skipped if that of step 6 is still being written
    assert "step 5," in capsys.readouterr().out


@pytest.fixture
def bad_seventh_batch():
    """A context in which the seventh batch of a run cannot be read."""
    next_batch, number = TrainBatches.__next__, itertools.count(1)

    def next_but_the_seventh(self):
        if next(number) == 7:
            raise ValueError("row 30 cannot be read")
        return next_batch(self)

    return mock.patch.object(TrainBatches, "__next__", next_but_the_seventh)


@pytest.mark.slow
def test_run_stopped_at_a_non_finite_step_saves_its_count_and_resumes(
    micro, train, after_step, bad_seventh_batch, tmp_path, capsys
):
    short(micro, 0)
    assert train(micro) == 0
    expected = end_of(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "left alone")
    after_step(6, not_finite(1))
    with bad_seventh_batch, refused("row 30"):
        train(micro)
    assert saved_steps(tmp_path / "run")[-1] == 6
    assert saved_run(tmp_path / "run/checkpoints/6")["metadata"]["num_nonfinite"] == 1
    assert train(micro) == 0
    assert "step 6 of 12" in capsys.readouterr().out
    rows, *end = end_of(tmp_path / "run")
    assert end == list(expected[1:])
    assert [row["step"] for row in rows if row not in expected[0]] == [6]


@pytest.mark.slow
def test_run_stopped_with_a_non_finite_state_resumes_from_an_earlier_step(
    micro, train, after_step, bad_seventh_batch, tmp_path
):
    short(micro, 4)
    after_step(6, flipped("params.embed"))
    with bad_seventh_batch, refused("step 6 ", "params", "inf", "step 4", kind=NonFiniteError):
        train(micro)
    assert saved_steps(tmp_path / "run") == [4]


@pytest.mark.slow
def test_non_finite_steps_are_counted_across_a_resume(micro, train, after_step, tmp_path):
    """The last step is saved with its count: only finite states are, and its update was left out."""
    short(micro, 0)
    micro.train.num_steps = 2
    micro.train.max_nonfinite_steps = 2
    after_step(2, not_finite(1))
    assert train(micro) == 0
    assert saved_steps(tmp_path / "run") == [2]
    micro.train.num_steps = 12
    after_step(3, not_finite(1))
    with refused("2 steps", "step 3 ", "nan", "--step=3", kind=NonFiniteError):
        train(micro)
    assert saved_run(tmp_path / "run/checkpoints/2")["metadata"]["num_nonfinite"] == 1
    assert train(micro) == 0
