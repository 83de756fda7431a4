"""Two runs compared: where they differ first, in which quantity, and the settings that may be the reason."""

import json
import math
import shutil

import micro
import pytest
from refusals import assert_names, assert_refused

from hlat_jax.run.compare import compare
from hlat_jax.run.goodput import EVENTS_FILE
from hlat_jax.store.metrics import ROWS_FILE


@pytest.fixture
def copied(trained_run, tmp_path):
    """A function of changes to settings and rows: a copy of the trained run with them."""

    def make(settings=None, rows=None, versions=None):
        folder = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(trained_run, folder)
        config = json.loads((folder / "config.json").read_text())
        for key, value in (settings or {}).items():
            section, name = key.split(".")
            config[section][name] = value
        (folder / "config.json").write_text(json.dumps(config))
        changed = [row | (rows or (lambda _: {}))(row) for row in micro.rows(folder)]
        (folder / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in changed))
        text = (folder / EVENTS_FILE).read_text()
        (folder / EVENTS_FILE).write_text(text.replace(*(versions or ("", ""))))
        return folder

    return make


def change(key, value, *, since):
    return lambda row: {key: value if key != "loss" else row["loss"] + value} if row["step"] >= since else {}


def test_a_run_is_equal_to_its_copy(trained_run, copied):
    said = compare(trained_run, copied({"train.sample_prompt": "x"}))
    assert_names(said, f"equal in the {micro.NUM_STEPS} steps", "train.sample_prompt")


def test_the_first_difference_is_named_with_its_reason(trained_run, copied):
    for key, value, settings, reason, other in (
        ("batch_hash", "ff", {"data.seed": 7, "optimizer.peak_lr": 1.0}, "data.seed: 1234 and 7", "peak_lr"),
        ("learning_rate", 1.0, {"data.seed": 7, "optimizer.peak_lr": 1.0}, "optimizer.peak_lr: 0.01 and 1.0", "seed"),
        ("loss", 1e-3, {"data.num_threads": 7, "parallel.fsdp": 2}, "parallel.fsdp: 1 and 2", "num_threads"),
        ("batch", 99, {"train.skip_steps": "9:10"}, "train.skip_steps: '' and '9:10'", "no recorded"),
        ("loss", math.nan, {}, "no recorded setting explains it", "may be the reason"),
    ):
        folder = copied(settings, lambda row, key=key, value=value: change(key, value, since=9)(row))
        said = compare(trained_run, folder)
        assert_names(said, f"differ first at step 9, in {key}", reason)
        assert other not in said


def test_the_cause_of_a_step_comes_before_its_effects(trained_run, copied):
    folder = copied({}, lambda row: {"loss": 1.0, "batch_hash": "f"} if row["step"] > 4 else {})
    first, _, *lines = compare(trained_run, folder).splitlines()
    assert first.endswith("differ first at step 5, in batch_hash:")
    assert [line.split()[:2] for line in lines[:2]] == [["batch_hash", "5"], ["loss", "5"]]
    later = copied({}, lambda row: {"loss": 1.0} | ({"batch_hash": "f"} if row["step"] > 7 else {}))
    assert "differ first at step 1, in loss:" in compare(trained_run, later)


def test_versions_and_programs_are_compared(trained_run, copied):
    folder = copied({}, change("loss", 1e-3, since=3), versions=('"jaxlib": "', '"jaxlib": "9'))
    programs = json.loads((folder / "programs.json").read_text())
    programs["train"]["sha256"] = "other"
    (folder / "programs.json").write_text(json.dumps(programs))
    assert_names(compare(trained_run, folder), "versions.jaxlib: ['0.", "and ['9", "program.train: ", "'other')")


def test_nan_in_both_runs_is_equal(copied):
    first, second = (copied({}, change("loss", math.nan, since=20)) for _ in range(2))
    assert "are equal" in compare(first, second)


def test_runs_that_cannot_be_compared_are_refused(trained_run, copied, run_here, tmp_path):
    other = copied({"model.num_layers": 3, "model.attention": "einsum"})
    assert_refused(run_here("compare", trained_run, other), "different models", "model.num_layers: 2 and 3")
    assert "attention" not in run_here("compare", trained_run, other)[2]
    later = copied({}, lambda row: {"step": row["step"] + 100})
    assert_refused(run_here("compare", trained_run, later), "no step in common", str(later))
    assert_refused(run_here("compare", trained_run), "2 run folders, not 1")
    assert_refused(run_here("compare", trained_run, tmp_path / "no"), "RUN")
    for words in ((trained_run, trained_run.parent), (trained_run.parent, trained_run)):
        assert_refused(run_here("compare", *words), f"RUN={trained_run.parent} ", "config.json")
    assert_refused(run_here("compare", trained_run, trained_run, "--plot=no/a.png"), "--plot=no/a.png")


def test_the_plot_shows_both_losses(trained_run, copied, run_here, tmp_path):
    code, out, _ = run_here(
        "compare", trained_run, copied({}, change("loss", 0.1, since=9)), f"--plot={tmp_path}/a.png"
    )
    assert (code, "step 9" in out) == (0, True)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    code, out, _ = run_here("compare", trained_run, trained_run, f"--plot={tmp_path}/same.png")
    assert (code, "are equal" in out, (tmp_path / "same.png").exists()) == (0, True, True)


@pytest.mark.slow
def test_a_run_on_another_mesh_differs_in_its_program(trained_run, tmp_path):
    config = micro.config(tmp_path, data__validation="")
    assert micro.train(config, tmp_path / "run", num_devices=4) == 0
    said = compare(trained_run, tmp_path / "run")
    assert_names(said, "differ first at step", "program.train")
    assert "batch_hash" not in said
