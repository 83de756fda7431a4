"""A run that starts from a checkpoint of another one continues it bit for bit, or with another schedule."""

import shutil

import micro
import pytest

from hlat_jax import config as config_lib
from hlat_jax.optimizer import learning_rate
from hlat_jax.resolve import resolve
from hlat_jax.weights.hf_files import KEPT


@pytest.fixture
def train(trained_run, tmp_path):
    """A function of keys that trains the config of `trained_run` with them, in a folder of its own."""

    def run(workdir=tmp_path / "branch", **keys):
        c = micro.config(tmp_path, **{"data__validation": "", "train__branch_from": f"{trained_run}@20"} | keys)
        assert micro.train(c, workdir) == 0
        return resolve(c), workdir

    return run


@pytest.mark.slow
def test_a_branch_with_the_same_settings_is_the_run_itself(trained_run, train, tmp_path, capsys):
    _, branch = train()
    assert f"branch           from step 20 of {trained_run}: its state" in capsys.readouterr().out
    assert [micro.exact(row) for row in micro.rows(branch)] == [micro.exact(row) for row in micro.rows(trained_run)]
    assert micro.saved_steps(branch) == [24]
    path = tmp_path / "micro.py"
    step, state, position, metadata = micro.final_checkpoint(path, branch)
    _, parent_state, parent_position, _ = micro.final_checkpoint(path, trained_run)
    assert (step, state, position) == (24, parent_state, parent_position)
    assert metadata["branch_from"] == f"{trained_run}@20"
    assert 0 < micro.rows(branch)[20]["tokens_per_s"] < 1e7  # of one step, not of all tokens so far
    train(train__num_steps=26)
    out = capsys.readouterr().out
    assert "train.branch_from ignored: resuming from this run's own checkpoint\nresuming from step 24 of 26" in out
    assert [row["step"] for row in micro.rows(branch)] == list(range(1, 27))


def test_a_finished_schedule_is_extended_in_a_branch_and_the_refusal_says_how(trained_run, train):
    longer = {"optimizer__horizon_steps": 80, "train__num_steps": 28}
    (trained_run / KEPT).mkdir()
    (trained_run / KEPT / "config.json").write_text("{}")  # as if it had begun with weights of Hugging Face
    before = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"optimizer\.horizon_steps: 40 in the checkpoint, 80 now") as refused:
        train(trained_run, train__branch_from="", **longer)
    remedy = f"--workdir=NEW_FOLDER --config.train.branch_from={trained_run}@24"
    assert str(refused.value).endswith(f"or continue with the new ones in another folder: {remedy}")
    config, branch = train(train__branch_from=remedy.partition("branch_from=")[2], **longer)
    rows = micro.rows(branch)
    assert [row["step"] for row in rows] == list(range(1, 29))
    assert [row["tokens"] for row in rows] == [step * 4 * 31 for step in range(1, 29)]
    assert [row["learning_rate"] for row in rows[24:]] == [learning_rate(s, config.optimizer) for s in range(24, 28)]
    assert rows[24]["learning_rate"] > rows[23]["learning_rate"]
    after = {path: path.read_bytes() for path in trained_run.rglob("*") if path.is_file()}
    shutil.rmtree(trained_run / KEPT)
    assert after == before
    assert (branch / KEPT / "config.json").read_text() == "{}"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_cooldown_in_a_branch_off_the_stable_phase_is_the_wsd_run_itself(optimizer, train, tmp_path):
    each = {"optimizer__name": optimizer, "optimizer__min_lr_ratio": 0.0}
    each |= {"train__eval_every_steps": 0, "checkpoint__every_steps": 0}
    wsd = {"optimizer__schedule": "wsd", "optimizer__cooldown_steps": 40, "optimizer__horizon_steps": 200}
    wsd |= {"train__num_steps": 200} | each
    config, whole = train(tmp_path / "whole", train__branch_from="", **wsd)
    constant = {"optimizer__schedule": "constant", "train__num_steps": 160} | each
    _, trunk = train(tmp_path / "trunk", train__branch_from="", **constant)
    _, branch = train(train__branch_from=f"{trunk}@160", **wsd)
    assert [micro.exact(row) for row in micro.rows(branch)] == [micro.exact(row) for row in micro.rows(whole)]
    rates = [row["learning_rate"] for row in micro.rows(branch)]
    assert rates == [learning_rate(step, config.optimizer) for step in range(200)]
    assert rates[4:161] == [1e-2] * 157
    assert rates[199] == 1e-2 / 40
    ends = [micro.final_checkpoint(tmp_path / "micro.py", run, optimizer=optimizer) for run in (whole, branch)]
    assert ends[0][:3] == ends[1][:3]


def test_a_branch_that_cannot_be_made_is_refused_and_leaves_no_folder(trained_run, train, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for keys, message in (
        ({"train__branch_from": f"{trained_run}@19"}, r"has no checkpoint of step 19; it has 20, 24\.$"),
        ({"train__branch_from": "/nowhere@19"}, r"/nowhere has no checkpoint of step 19; it has none\.$"),
        ({"optimizer__name": "muon"}, r"a branch must keep:\n  optimizer\.name: 'adamw' in the checkpoint, 'muon' now"),
        ({"data__seq_len": 16}, r"a branch must keep:\n  data\.seq_len: 32 in the checkpoint, 16 now\nRestore these"),
    ):
        with pytest.raises(ValueError, match=message):
            train(**keys)
        assert not (tmp_path / "branch").exists()
    with pytest.raises(ValueError, match="is the run folder itself; give the branch another one with --workdir"):
        train(copy, train__branch_from=f"{copy}@20")


def test_values_that_name_no_checkpoint_are_refused():
    for keys, message in (
        ({"branch_from": "runs/tiny"}, r"train\.branch_from='runs/tiny' must be RUN@STEP, .* such as runs/tiny@300\.$"),
        ({"branch_from": "runs/tiny@100"}, r"leaves no step to train: raise train\.num_steps=100 above 100\.$"),
        ({"branch_from": "runs/tiny@3", "init_from": "w"}, r"train\.init_from=w: both give the initial weights"),
    ):
        c = config_lib.default()
        c.train.update(keys)
        with pytest.raises(ValueError, match=message):
            resolve(c)
