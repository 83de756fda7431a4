"""Batches that are left out: exact, and resumable at any point."""

import contextlib
import itertools
import json

import micro
import pytest
from refusals import assert_names, refused

from hlat_jax import loop
from hlat_jax.data import positions
from hlat_jax.data.loader import TrainBatches
from hlat_jax.resolve import batch_of_step, skipped_batches
from hlat_jax.store import checkpoint


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that trains the micro config with keys of `train` in `tmp_path/NAME`; returns its rows as they repeat.

    `killed_at` is a step that is never dispatched.
    """
    monkeypatch.setattr(positions, "EVERY_STEPS", 2)
    step = loop._step

    def run(name="run", killed_at=0, **keys):
        c = micro.config(tmp_path, data__validation="", checkpoint__every_steps=4, checkpoint__keep_last=9)
        c.train.update({"num_steps": 12, **keys})

        def step_or_end(run, progress, batch):
            if progress.step + 1 == killed_at:
                run.checkpointer.wait()
                raise Killed
            step(run, progress, batch)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "_step", step_or_end)
            with pytest.raises(Killed) if killed_at else contextlib.nullcontext():
                assert micro.train(c, tmp_path / name) == 0
        return [micro.exact(row) for row in micro.rows(tmp_path / name)]

    return run


def test_a_checkpoint_is_known_before_the_save_after_it_begins(tmp_path, monkeypatch, train):
    save = checkpoint.Checkpointer.save

    def save_once(self, step, *args, **kwargs):
        if step > 4:
            raise Killed
        return save(self, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "check", lambda self: None)  # that save takes as long as four steps
        patch.setattr(checkpoint.Checkpointer, "save", save_once)
        with pytest.raises(Killed):
            train()
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    with refused(tmp_path / "run", "step 4", "events.jsonl"):
        train()


def end_of(tmp_path, name):
    """Returns (step, bytes of the state, data position) of the last checkpoint of a run."""
    return micro.final_checkpoint(micro.write_config(tmp_path), tmp_path / name)[:3]


def batches_of(workdir):
    return [row.get("batch") for row in micro.rows(workdir)]


def test_each_step_trains_the_next_batch_that_is_not_left_out():
    for text in ("3", "3:2", "0:2", "3:4,4:5", "7:8,3:4", "3:4,", "a:b"):
        with refused(f"train.skip_steps={text!r}", "FIRST:LAST"):
            skipped_batches(text)
    skipped = skipped_batches("1:1,5:7,8:8,12:13")
    left = [batch for batch in range(1, 40) if batch not in (1, 5, 6, 7, 8, 12, 13)]
    assert [batch_of_step(step, skipped) for step in range(1, 20)] == left[:19]
    assert batch_of_step(0, skipped) == 0


@pytest.mark.slow
def test_leaving_out_batches_equals_feeding_the_others(train, tmp_path, monkeypatch, capsys):
    rows = train("skipped", skip_steps="1:2,6:8")
    assert_names(capsys.readouterr().out, "step 4: 3 batches", "6:8 (train.skip_steps)")
    assert batches_of(tmp_path / "skipped") == [3, 4, 5, *range(9, 18)]
    events = map(json.loads, (tmp_path / "skipped" / "events.jsonl").read_text().splitlines())
    left_out = [(row["step"], row["first"], row["last"]) for row in events if row["event"] == "skip_steps"]
    assert left_out == [(1, 1, 2), (4, 6, 8)]
    with monkeypatch.context() as patch:
        next_batch, numbers = TrainBatches.__next__, itertools.count(1)

        def next_but_some(self):
            made = next_batch(self)
            return next_but_some(self) if next(numbers) in (1, 2, 6, 7, 8) else made

        patch.setattr(TrainBatches, "__next__", next_but_some)
        patch.setattr(loop, "batch_of_step", lambda step, _: step + 5)  # what its last checkpoint must record
        assert train("fed") == rows
    assert end_of(tmp_path, "skipped") == end_of(tmp_path, "fed")

    for killed_at in (4, 9, 0):  # before batches are passed over again, and after
        again = train("killed", killed_at=killed_at, skip_steps="1:2,6:8")
    assert again == rows
    assert end_of(tmp_path, "killed") == end_of(tmp_path, "skipped")


@pytest.mark.slow
def test_later_batches_may_be_left_out_at_a_resume(train, tmp_path):
    train(num_steps=4)
    whole = train("whole", num_steps=8, skip_steps="6:6")
    with refused("train.skip_steps: ''", "'4:6'", "batch 5"):
        train(num_steps=8, skip_steps="4:6")
    assert train(num_steps=8, skip_steps="6:6") == whole
    with refused("train.skip_steps: '6:6'", "batch 10"):
        train()
    train(skip_steps="6:6,10:12")
    assert batches_of(tmp_path / "run") == [None] * 4 + [5, 7, 8, 9, *range(13, 17)]
    files = sorted(int(path.stem) for path in (tmp_path / "run/positions").iterdir())
    assert files == [2, 4, 7, 9, 14, 16]  # after the batch of every second step
