"""What validations decide while a run trains: the checkpoint that is kept, and an early end; and samples on the way."""

import os
import signal

import micro
import pytest
from refusals import assert_names, refused

from hlat_jax import loop
from hlat_jax.config import ParallelConfig
from hlat_jax.generate.inference import open_model


def evals(workdir):
    return {row["step"]: row["eval_loss"] for row in micro.rows(workdir) if "eval_loss" in row}


@pytest.fixture
def train(tmp_path):
    """A function of a run folder and keys that trains at a rate at which the validation loss soon rises."""
    rising = {"optimizer__peak_lr": 0.3, "optimizer__warmup_steps": 8, "train__num_steps": 40}
    rising |= {"train__eval_every_steps": 2, "train__num_eval_batches": 1}
    rising |= {"checkpoint__keep_last": 1, "checkpoint__keep_best": True}

    def run(workdir, **keys):
        assert micro.train(micro.config(tmp_path, **rising | keys), workdir) == 0
        return workdir

    return run


@pytest.mark.slow
def test_training_ends_early_and_keeps_its_best_checkpoint(train, tmp_path, capsys):
    whole = train(tmp_path / "whole", train__early_stop_evals=3)
    losses = evals(whole)
    best = min(losses, key=losses.get)
    assert 0 < best == max(losses) - 6 < 34  # three validations after it
    assert_names(capsys.readouterr().out, f"{losses[best]:.4f}", f"step {best}")
    assert micro.saved_steps(whole) == [best, max(losses)]
    assert (whole / "best").resolve() == whole / "checkpoints" / str(best)
    assert open_model(str(whole / "best"), ParallelConfig()).folder.name == str(best)
    parts = train(tmp_path / "parts", train__num_steps=best + 2, train__early_stop_evals=3)
    (parts / "best").unlink()  # as if the kill came before it
    train(parts, train__early_stop_evals=3)
    assert evals(parts) == losses
    assert (micro.saved_steps(parts), (parts / "best").resolve().name) == (micro.saved_steps(whole), str(best))
    train(parts, train__early_stop_evals=3)  # at its end, it ends again
    assert evals(parts) == losses
    train(parts, checkpoint__keep_best=False, train__num_steps=max(losses) + 2, checkpoint__every_steps=1)
    assert (parts / "best").resolve() == parts / "checkpoints" / str(best)
    assert (parts / "best").is_dir()  # though newer ones have been kept in its place
    last, lower = max(losses), {"optimizer__peak_lr": 1e-4, "train__num_steps": max(losses) + 4}
    branch = train(tmp_path / "branch", train__branch_from=f"{whole}@{last}", train__early_stop_evals=3, **lower)
    new = {step: loss for step, loss in evals(branch).items() if step > last}
    assert (branch / "best").resolve().name == str(min(new, key=new.get))  # of its own validations alone


@pytest.mark.slow
def test_a_run_that_ends_early_samples_once(train, tmp_path, capsys):
    keys = {"train__early_stop_evals": 1, "train__sample_every_steps": 2, "train__sample_tokens": 4}
    last = max(evals(train(tmp_path / "run", train__sample_prompt="It is", **keys)))
    samples = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("sample ")]
    assert samples[-2:] == [f"sample after step {last - 2}", "sample after training"]
    assert len(set(samples)) == len(samples)


@pytest.mark.slow
def test_a_run_that_only_got_worse_has_no_best_checkpoint(train, tmp_path, capsys):
    run = train(tmp_path / "run", optimizer__peak_lr=30.0, train__num_steps=4)
    assert min(evals(run).items(), key=lambda row: row[1])[0] == 0
    assert not os.path.lexists(run / "best")
    assert "best checkpoint: none" in capsys.readouterr().out


def test_a_checkpoint_that_a_signal_saved_can_be_the_best(train, tmp_path, monkeypatch):
    step = loop._step

    def step_and_stop(run, progress, batch):
        step(run, progress, batch)
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "_step", step_and_stop)
    stopped = train(tmp_path / "stopped")
    assert evals(stopped)[2] < evals(stopped)[0]
    assert (stopped / "best").resolve() == stopped / "checkpoints" / "2"


@pytest.mark.slow
def test_samples_on_the_way_change_no_step(train, tmp_path, capsys):
    keys = {"train__num_steps": 5, "train__sample_prompt": "It is", "train__sample_tokens": 4}
    plain = train(tmp_path / "plain", **keys)
    counts = [capsys.readouterr().out.count("\nsample ")]
    sampled = train(tmp_path / "sampled", train__sample_every_steps=2, **keys)
    counts.append(capsys.readouterr().out.count("\nsample "))
    assert counts[1] == counts[0] + 2  # after steps 2 and 4
    assert [micro.exact(row) for row in micro.rows(sampled)] == [micro.exact(row) for row in micro.rows(plain)]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (
            {"checkpoint__keep_best": True, "train__eval_every_steps": 0},
            ("checkpoint.keep_best", "train.eval_every_steps"),
        ),
        (
            {"train__early_stop_evals": 2, "checkpoint__keep_best": False, "data__validation": ""},
            ("train.early_stop_evals", "data.validation"),
        ),
        ({"train__sample_every_steps": 2}, ("train.sample_every_steps=2", "train.sample_prompt")),
    ],
)
def test_what_needs_validations_or_a_text_is_refused_without(train, tmp_path, keys, names):
    with refused(*names):
        train(tmp_path / "run", **keys)
