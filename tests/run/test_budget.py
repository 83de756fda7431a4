"""A budget of bytes in a config: resolved before the step, on meshes, kept by the run, and planned."""

import dataclasses
import functools
import json
import shutil

import jax
import micro
import numpy as np
import planned
import pytest
from refusals import assert_names, refused
from steps import trained

from hlat_jax.batch import concat_batch
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.passes import remat_pass
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program, state_bytes
from hlat_jax.run import budget

GATE = RematChoice(("gate",))
MESH = {"data": 2, "fsdp": 2, "tensor": 2, "zero1": True, "sequence_parallel": True}


def config_with(choice):
    config = planned.small_config(**MESH)
    data = dataclasses.replace(config.data, seq_len=64)
    return dataclasses.replace(config, data=data, model=dataclasses.replace(config.model, remat=choice))


@functools.cache
def layout():
    return layout_over(config_with("none"), jax.devices())


@functools.cache
def step_bytes(choice):
    return remat_pass.temporaries(make_program(config_with(choice), layout()).trace_step())


def budget_resolved(config, *, recorded, where=None):
    """The config and the record that `budget.choose_remat` returns for a config."""
    program, record = budget.choose_remat(make_program(config, where or layout()), recorded=recorded)
    return program.config, record


@functools.cache
def resolved():
    """The budget, and what it is resolved to."""
    asked = step_bytes("saved:") + (step_bytes("none") - step_bytes("saved:")) // 2
    return asked, *budget_resolved(config_with(f"budget:{asked}B"), recorded=None)


@pytest.mark.slow
def test_budget_gives_a_fitting_choice_that_recomputes_less_than_full():
    asked, config, record = resolved()
    assert step_bytes(config.model.remat) == record["measured_bytes"] <= asked < record["plain"][0]
    assert record["choice"] == config.model.remat
    full = make_program(config_with("saved:"), layout()).trace_step()
    assert record["plain"][1] < record["flops"] < total_flops(live_jaxpr(full))


@pytest.mark.slow
def test_step_under_a_budget_equals_the_step_without_one():
    tokens = np.random.default_rng(0).integers(0, 64, (8, 64))
    ours, plain = (trained(config, [concat_batch(tokens)])[1:] for config in (resolved()[1], config_with("none")))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5, atol=1e-6)


def plan_of(choice):
    """What a search returns that found a choice."""
    return remat_pass.RematPlan(choice, 1, 1, 1, 1.0, 1.0, (1, 1.0), None, 1, 0.0)


@pytest.fixture
def searched(monkeypatch):
    """The budgets of the searches made; a search finds `gate`."""
    budgets = []

    def search(*_, budget_bytes, **options):
        budgets.append(budget_bytes)
        return plan_of(GATE)

    monkeypatch.setattr(remat_pass, "search", search)
    return budgets


def test_the_largest_measurement_of_all_processes_counts(monkeypatch):
    seen = []

    def search(traced, *, options, **_):
        seen.append([total_flops(live_jaxpr(traced(choice))) for choice in (None, GATE)])
        seen.append((options.measure(traced(GATE)), options.min_bytes))
        return plan_of(GATE)

    monkeypatch.setattr(remat_pass, "search", search)
    monkeypatch.setattr(remat_pass, "temporaries", lambda traced: 9)
    monkeypatch.setattr(budget, "exchange", lambda own: [own, "10"])
    budget_resolved(config_with("budget:7MiB"), recorded=None)
    (without, with_gate), (measured, min_bytes) = seen
    assert without < with_gate
    assert (measured, min_bytes) == (10, 1024)


@pytest.mark.parametrize(("pipe", "name"), [(1, "microbatch"), (2, "steady")])
def test_the_budget_is_for_a_dispatched_microbatch(monkeypatch, pipe, name):
    """The step in one program may be what the compiler of Neuron refuses."""
    config = planned.small_config(pipe=pipe, remat="budget:7MiB", m=2)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate="programs"))
    program = make_program(config, layout_over(config, jax.devices()[:pipe]))
    seen = []

    def search(traced, *, options, **_):
        for choice in (None, GATE):
            seen.append((options.measure(found := traced(choice)), found.fun_name))
        return plan_of(GATE)

    monkeypatch.setattr(remat_pass, "search", search)
    monkeypatch.setattr(remat_pass, "temporaries", lambda traced: 9)
    again, record = budget.choose_remat(program, recorded=None)
    kept = [state_bytes(p.microbatch_arguments[name][0]) for p in (budget._with_remat(program, "none"), again)]
    traced = program.training.microbatch_step.ticks[name].__name__
    assert seen == [(9 + num_bytes, traced) for num_bytes in kept]
    assert (kept[0] > kept[1]) == (pipe > 1)
    budget.choose_remat(program, recorded=record)
    assert len(seen) == 2


def test_a_resumed_run_hands_over_its_recorded_choice(trained_run, tmp_path, monkeypatch):
    def resolved(program, *, recorded):
        raise ValueError(f"recorded: {recorded}")

    workdir = shutil.copytree(trained_run, tmp_path / "run")
    micro.reseal(workdir / "checkpoints/24", lambda run: run["metadata"].update(remat={"choice": "full"}))
    monkeypatch.setattr(budget, "choose_remat", resolved)
    with refused("{'choice': 'full'}"):
        micro.train(micro.config(tmp_path, data__validation="", train__num_steps=25), workdir)


def test_recorded_choice_is_reused_only_for_the_same_setup(searched):
    config, record = budget_resolved(config_with("budget:7MiB"), recorded=None)
    assert config.model.remat == record["choice"] == "saved:gate"
    again = config_with("budget:7MiB")
    assert budget_resolved(again, recorded=record | {"choice": "saved:up"})[0].model.remat == "saved:up"
    assert searched == [7 * 2**20]
    for changed in ({"mesh": {}}, {"device": "other"}, {"asked": "budget:1GiB"}, {"jax": "0.1"}):
        budget_resolved(again, recorded=record | changed)
    assert searched == [7 * 2**20] * 5
    for changed in ({"accumulate": "programs"}, {"layer_loop": "unroll"}):
        budget_resolved(again, recorded=record | changed)
    exchanged = record["parallel"] | {"pipe_exchange": "all_gather"}
    budget_resolved(again, recorded=record | {"parallel": exchanged})
    assert searched == [7 * 2**20] * 8


def test_a_recorded_choice_that_cannot_be_traced_is_searched_again(searched, capsys):
    _, record = budget_resolved(config_with("budget:7MiB"), recorded=None)
    old = record | {"choice": "saved:dot_general.99,gate"}
    config, found = budget_resolved(config_with("budget:7MiB"), recorded=old)
    assert config.model.remat == found["choice"] == "saved:gate"
    assert "chosen again" in capsys.readouterr().out
    assert len(searched) == 2


@pytest.mark.slow
def test_a_plan_estimates_the_choice_and_names_it():
    config = planned.planned_config(remat="budget:300MiB", m=2)
    plan = make_plan(config, Site("trn1.2xlarge", 1))
    assert_names(plan["schedule"]["remat"], "budget:300MiB", "saved:")
    assert plan["device_bytes"]["temporaries"] <= 300 * 2**20
    model = dataclasses.replace(config.model, remat="budget:4096B")
    least = make_plan(dataclasses.replace(config, model=model), Site("trn1.2xlarge", 1))
    assert_names(least["schedule"]["remat"], "budget:4096B", "full")


@pytest.mark.slow
def test_run_prints_records_and_reuses_its_choice(tmp_path, train_here):
    path = micro.write_config(tmp_path)
    words = [f"--config={path}", f"--workdir={tmp_path / 'run'}", "--config.model.remat=budget:2.7MiB"]
    words += ["--config.model.attention=einsum", "--config.data.validation="]
    code, out, err = train_here(*words, "--config.train.num_steps=2")
    assert code == 0, err
    record = json.loads((tmp_path / "run" / budget.RECORD_FILE).read_text())
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["remat"] == "budget:2.7MiB"
    assert f"remat            {record['choice']}\n" in out
    assert record["measured_bytes"] <= 2.7 * 2**20
    code, out, err = train_here(*words, "--config.train.num_steps=3")
    assert code == 0, err
    assert_names(out, record["choice"], "budget:2.7MiB")
