"""A step explained: what moved first, the documents of its batch, and the steps most like it."""

import json
import random

import micro
import numpy as np
import pytest
from refusals import assert_names, assert_refused

from hlat_jax.cli.config_files import load
from hlat_jax.store.metrics import ROWS_FILE

NUM_STEPS, SPIKE = 44, 41


@pytest.fixture(scope="module")
def spiked(tmp_path_factory):
    """A run on text, with one step on a source of random letters."""
    folder, rng = tmp_path_factory.mktemp("spiked"), random.Random(0)
    lines = ["".join(rng.choice("qxzjkvw#%&@~^") for _ in range(300)) for _ in range(40)]
    (folder / "noise.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    text = load("tiny").data.train
    stages = f"text=1,noise=0 until_step={SPIKE - 1};text=0,noise=1 until_step={SPIKE};text=1,noise=0"
    settings = {"data__train": f"text={text};noise={folder}/noise.jsonl", "data__mixture": stages}
    settings |= {"train__num_steps": NUM_STEPS, "data__validation": "", "metrics__layer_norms": True}
    assert micro.train(micro.config(folder, **settings), folder / "run") == 0
    return folder / "run"


def test_an_injected_spike_is_named_with_its_documents(spiked, run_here):
    noise = [json.loads(line)["text"] for line in (spiked.parent / "noise.jsonl").read_text().splitlines()]
    code, out, _ = run_here("explain", f"{spiked}@{SPIKE + 1}")
    assert (code, f"moved first, at step {SPIKE}, by" in out) == (0, True)
    code, out, _ = run_here("explain", f"{spiked}@{SPIKE}", "--documents=3")
    assert code == 0
    assert_names(
        out, f"moved first, at step {SPIKE}, by", "loss  ", "source text: 0 rows", "source noise: 4 rows", "and "
    )
    assert "WARNING" not in out
    lines = out.splitlines()
    shown = [index for index, line in enumerate(lines) if "noise.jsonl, row" in line]
    assert len(shown) == 3
    for index in shown:
        number = int(lines[index].split("document ")[1].split(" ")[0])
        assert noise[number].startswith(lines[index + 1].strip()[:20])


def test_a_quiet_step_has_moved_nothing(spiked, run_here):
    code, out, _ = run_here("explain", f"{spiked}@{SPIKE - 4}")
    assert code == 0
    assert_names(out, "nothing moved", "source noise: 0 rows", "the most alike steps before it:")


@pytest.fixture
def written(trained_run, tmp_path):
    """A function of changes, step -> fields: a folder with the config of the trained run and 100 rows of noise."""

    def make(changes):
        rng = np.random.default_rng(0)
        rows = []
        for step in range(1, 101):
            values = {"loss": 3.0, "grad_norm": 0.5, "update_norm": 0.02, "param_norm": 9.0}
            row = {"step": step, "tokens": step, "batch_hash": f"{step:032x}"}
            row |= {name: value * (1.0 + 0.01 * rng.standard_normal()) for name, value in values.items()}
            rows.append(row | changes.get(step, {}))
        (tmp_path / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "config.json").write_bytes((trained_run / "config.json").read_bytes())
        return tmp_path

    return make


def test_the_quantity_that_rose_before_the_loss_is_first(written, run_here):
    folder = written({**{step: {"update_norm": 0.06} for step in range(87, 91)}, 90: {"loss": 5.0, "update_norm": 1.0}})
    code, out, _ = run_here("explain", f"{folder}@90")
    assert code == 0
    assert_names(out, "update_norm moved first, at step 87", "WARNING: the text has changed")
    lines = out.splitlines()[2:]
    assert [line.split()[:2] for line in lines[:2]] == [["update_norm", "87"], ["loss", "90"]]
    code, out, _ = run_here("explain", f"{folder}@89")  # what came later is not known yet
    assert "loss" not in out.split("the most alike")[0]


def test_a_deviation_is_that_from_the_median_of_32_steps(written, run_here):
    folder = written({90: {"loss": 5.0}})
    before = np.asarray([row["loss"] for row in micro.rows(folder)[57:89]])
    spread = 1.4826 * np.median(np.abs(before - np.median(before)))
    line = run_here("explain", f"{folder}@90")[1].splitlines()[2].split()
    assert line[0] == "loss"
    assert [float(word) for word in line[1:5]] == pytest.approx(
        [90, 5.0, np.median(before), (5.0 - np.median(before)) / spread],
        rel=5e-3,  # of printed digits
    )


def test_the_most_alike_steps_are_those_that_moved_alike(written, run_here):
    spike = {"loss": 5.0, "grad_norm": 4.0, "batch_hash": "ff"}
    folder = written({30: {"loss": 5.1, "grad_norm": 4.1}, 50: {"loss": 5.0}, 60: spike, 70: {"loss": 1.0}, 95: spike})
    lines = run_here("explain", f"{folder}@95")[1].split("the most alike steps before it:\n")[1].splitlines()[:3]
    same_by_step = {line.split(":")[0].strip(): line.endswith(", the same batch") for line in lines}
    assert len(same_by_step) == 3
    assert (same_by_step["step 60"], same_by_step["step 30"]) == (True, False)


def test_a_loss_that_is_not_finite_has_moved_most(written, run_here):
    folder = written({90: {"loss": float("nan")}, 91: {"grad_norm": 5.0}})
    _, out, _ = run_here("explain", f"{folder}@91")
    assert_names(out, "loss moved first, at step 90, by 1e+06", "grad_norm")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_in_no_later_median(value, written, run_here):
    nonfinite = {step: {"loss": value} for step in range(60, 80)}  # most of the steps before 90
    folder = written(nonfinite | {90: {"loss": 5.0}})
    losses = [row["loss"] for row in micro.rows(folder)[:89] if np.isfinite(row["loss"])]
    line = run_here("explain", f"{folder}@90")[1].splitlines()[2].split()
    assert line[:3] == ["loss", "90", "5"]
    assert float(line[3]) == pytest.approx(np.median(losses[-32:]), rel=1e-4)  # of printed digits


@pytest.mark.parametrize("name", ["source_loss/b", "grad_norm/layer_01", "update_norm/embed"])
def test_a_source_or_a_layer_may_move_first(name, written, run_here):
    rng = np.random.default_rng(1)
    noise = {step: {name: 2.0 + 0.02 * rng.standard_normal()} for step in range(1, 101)}
    folder = written(noise | {88: {name: 3.0}, 90: noise[90] | {"loss": 5.0}})
    _, out, _ = run_here("explain", f"{folder}@90")
    assert_names(out, f"{name} moved first, at step 88, by")
    assert [line.split()[0] for line in out.splitlines()[2:4]] == [name, "loss"]


def test_a_step_without_the_quantity_names_what_moved_before(written, run_here):
    rng = np.random.default_rng(1)
    every_4 = {step: {"source_loss/b": 2.0 + 0.02 * rng.standard_normal()} for step in range(4, 101, 4)}
    folder = written(every_4 | {88: {"source_loss/b": 3.0}})
    for step in (88, 89, 91, 98):
        _, out, _ = run_here("explain", f"{folder}@{step}")
        assert_names(out, "source_loss/b moved first, at step 88, by", "the most alike steps before it:\n  step ")
        assert (out.splitlines()[2].split()[-1] == "-") == (step != 88)
    assert "nothing moved" in run_here("explain", f"{folder}@99")[1]


def test_trends_and_padding_are_no_moves(written, run_here):
    """The norm of the weights grows once the learning rate does, and most batches have no padding."""
    ordinary = {
        step: {"param_norm": 9.0 + 0.01 * max(0, step - 40), "padding_share": 0.0156 * (step % 17 == 0)}
        for step in range(1, 101)
    }
    for step in (50, 60, 68, 85):
        assert "nothing moved" in run_here("explain", f"{written(ordinary)}@{step}")[1]
    folder = written(ordinary | {60: ordinary[60] | {"loss": 6.0, "grad_norm": 5.0}})
    assert_names(run_here("explain", f"{folder}@60")[1], "grad_norm moved first, at step 60", "loss  ")


@pytest.mark.parametrize(("num_layers", "first"), [(1, "grad_norm/layer_00"), (24, "loss")])
def test_the_limit_rises_with_the_number_of_quantities(num_layers, first, written, run_here):
    rng = np.random.default_rng(2)
    names = [f"grad_norm/layer_{layer:02}" for layer in range(num_layers)]
    layers = {step: {name: 1.0 + 0.01 * rng.standard_normal() for name in names} for step in range(1, 101)}
    before = np.asarray([layers[step][names[0]] for step in range(53, 85)])
    spread = 1.4826 * np.median(np.abs(before - np.median(before)))
    layers[85][names[0]] = np.median(before) + 6.5 * spread  # one of many may be so far by chance
    folder = written(layers | {90: layers[90] | {"loss": 5.0}})
    assert_names(run_here("explain", f"{folder}@90")[1], f"{first} moved first, at step")


def test_steps_that_cannot_be_explained_are_refused(written, run_here, tmp_path):
    folder = written({})
    assert_refused(run_here("explain", f"{folder}@101"), "no row of step 101", "steps 1 to 100")
    assert "nothing moved" in run_here("explain", f"{folder}@0000000050")[1]
    assert_refused(run_here("explain", f"{folder}@8"), "has 7 rows before it", "later step")
    assert run_here("explain", f"{folder}@9")[0] == 0
    for words in ((folder,), (f"{folder}@x",), (f"{folder}@9", f"{folder}@10")):
        assert_refused(run_here("explain", *words), "RUN@STEP")
    assert_refused(run_here("explain", f"{folder}/none@9"), "RUN")
    (folder / ROWS_FILE).write_text("")
    assert_refused(run_here("explain", f"{folder}@9"), "no row of a step")
    (folder / ROWS_FILE).unlink()
    assert_refused(run_here("explain", f"{folder}@9"), ROWS_FILE, "not a run folder")


def test_text_that_is_gone_is_said_after_the_rest(written, run_here):
    folder = written({90: {"loss": 5.0}})
    config = json.loads((folder / "config.json").read_text())
    config["data"]["train"] = "/none/a.jsonl"
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = run_here("explain", f"{folder}@90")
    assert code == 0
    assert_names(out, "loss moved first, at step 90", "documents cannot be read: ", "/none/a.jsonl")


def test_the_config_of_a_newer_version_is_named(written, run_here):
    folder = written({90: {"loss": 5.0}})
    config = json.loads((folder / "config.json").read_text())
    config["data"]["later_key"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    code, out, _ = run_here("explain", f"{folder}@90")
    assert code == 0
    assert_names(
        out, "loss moved first, at step 90", "documents cannot be read: ", "data.later_key", "the version that wrote"
    )


def test_text_that_changed_is_said_beside_a_recorded_position(spiked, run_here):
    path = spiked.parent / "noise.jsonl"
    text = path.read_text()
    assert "has changed" not in run_here("explain", f"{spiked}@{SPIKE}")[1]
    path.write_text(text.replace(text[20:24], "abcd", 1))
    try:
        code, out, _ = run_here("explain", f"{spiked}@{SPIKE}")
    finally:
        path.write_text(text)
    assert code == 0
    assert_names(out, f"moved first, at step {SPIKE}", "documents cannot be read: ", "the text has changed since")
