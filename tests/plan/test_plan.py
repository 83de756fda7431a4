"""`python -m hlat_jax.plan`: plans of the HLAT configs, what they say, and what they refuse.

    PYTHONPATH=. python tests/plan/test_plan.py

writes `tests/support/golden/plans/*.json` again after an intended change.
"""

import dataclasses
import itertools
import json
import pathlib
import types

import pytest
from planned import planned_config, small_config
from refusals import assert_names

from benchmarks import layouts
from hlat_jax.cli import config_files
from hlat_jax.facts import hardware, measured_rates
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import __main__ as plan_command
from hlat_jax.plan import report, roofline, search
from hlat_jax.plan.collectives import Collective
from hlat_jax.plan.memory import STAGES_ERROR, DeviceBytes
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run import costs

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "support" / "golden" / "plans"
NODES = {"7b": 64, "70b": 256}


@pytest.fixture(scope="module")
def plans():
    return {config_name: plan_of(config_name) for config_name in NODES}


def plan_of(config_name):
    return make_plan(resolve(config_files.load(config_name)), Site("trn1.32xlarge", NODES[config_name]))


def rounded(tree):
    """Returns the tree with floats at six digits, which no library's order of sums changes."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.6g}") if isinstance(tree, float) else tree


def golden(plan):
    """Returns what the golden file of a plan holds, its collectives as rows of text."""
    tree = rounded(json.loads(json.dumps(plan)))
    rows = tree["collectives"]
    return tree | {"collectives": [" | ".join(map(str, row)) for row in (rows[0], *map(dict.values, rows))]}


def with_memory(monkeypatch, num_bytes):
    """Gives trn1.2xlarge devices of so many bytes."""
    device = dataclasses.replace(hardware.DEVICES["trn1"], memory_bytes=num_bytes, reserved_bytes=0)
    monkeypatch.setitem(hardware.DEVICES, "trn1", device)


def test_recipe_plans_match_golden_files_and_fit(plans):
    for config_name, plan in plans.items():
        again = "If that is meant: PYTHONPATH=. python tests/plan/test_plan.py"
        assert golden(plan) == json.loads((GOLDEN / f"{config_name}.json").read_text()), again
        assert plan["fits"]
        memory = plan["device_bytes"]
        assert memory["total"] == sum(memory[key] for key in ("state", "batch", "temporaries", "programs"))
    printed = report.as_text(plans["70b"])
    assert_names(printed, "8 stages", "7 / 39 = 17.9%", "ZeRO-1", "32 microbatches")
    assert "bubble" not in report.as_text(make_plan(small_config(m=1), Site("h200", 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instance", "nodes"),
    [
        ("llama3_1b", "trn1.32xlarge", 4),
        ("llama3_8b", "trn2.48xlarge", 16),
        ("mistral_7b", "trn1.32xlarge", 16),
        ("qwen3_0_6b", "trn1.32xlarge", 4),
        ("qwen3_8b", "trn1.32xlarge", 16),
    ],
)
def test_published_models_fit_the_nodes_of_their_configs_in_listed_groups(name, instance, nodes):
    plan = make_plan(resolve(config_files.load(name)), Site(instance, nodes))
    assert (plan["fits_surely"], plan["disputed_groups"]) == (True, [])
    assert f"--config={name} --instance={instance} --nodes={nodes}" in (ROOT / f"configs/{name}.py").read_text()
    assert {row["over"] for row in plan["collectives"] if row["axes"] == ["tensor_kv"]} <= {"inside a node"}


@pytest.mark.slow
def test_compiled_layouts_take_the_arguments_and_temporaries_of_the_plan():
    """llama3_8b at its own degrees, tensor 4 x fsdp, over 128 devices; 70b at TP 32 x PP 8 over 256."""
    c = config_files.load("llama3_8b")
    c.data.batch_size = 64
    config = small_config(policy="mixed", tensor=2, data=4, zero1=True, sequence_parallel=True)
    for part, degrees in (
        (layouts.partition(config, 8), {"devices": 8, "data": 4}),
        (layouts.partition(resolve(c), 128), {"devices": 128, "fsdp": 32, "tensor": 4}),
        (layouts.compiled("70b-256"), {"devices": 256, "pipe": 8, "data": 1, "tensor": 32}),
    ):
        assert part["layout"] | degrees == part["layout"]
        assert part["argument_bytes"] == part["planned_argument_bytes"]
    assert part["planned_temporary_bytes"] / part["temporary_bytes"] == pytest.approx(1.0, abs=0.15)


def test_matmul_flops_of_a_step_match_the_formula():
    config = small_config(remat="none", m=2)
    layout = planned_layout(config, 1, platform="neuron")
    jaxpr = live_jaxpr(make_program(config, layout).trace_step())
    executed = sum(flops * trips for flops, _, trips in roofline.products(jaxpr))
    m, tokens = config.model, config.data.batch_size * config.data.seq_len
    scales = (2 * m.num_layers + 1) * m.embed_dim
    per_token = costs.flops_per_token(m, config.data.seq_len) - 6 * (m.vocab_size * m.embed_dim + scales)
    assert executed == per_token * tokens  # the embedding is looked up, scales are multiplied elementwise


def test_collective_time_shares_node_bandwidth_among_groups():
    target = hardware.node("trn1.32xlarge")
    mesh = types.SimpleNamespace(shape={"data": 16, "tensor": 8})
    gradient = Collective("all-reduce", ("data",), 16, 10**9)
    place, seconds = roofline.collective_seconds(gradient, target=target, mesh=mesh)
    # 8 groups of a node send 2 x 15/16 GB each over 100 GB/s; a tree of 16 has 4 levels of 15 us
    assert (place, seconds) == ("network", pytest.approx(8 * 1.875e9 / 100e9 + 4 * 15e-6))
    inside = dataclasses.replace(gradient, kind="all-gather", axes=("tensor",), group_size=8)
    place, seconds = roofline.collective_seconds(inside, target=target, mesh=mesh)
    assert (place, seconds) == ("link", pytest.approx(0.875e9 / 192e9 + 3 * 2e-6))


def test_plan_command_writes_json_and_prints_every_part(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["--config=tiny", "--instance=trn1.2xlarge", f"--json={out}", "--price_per_hour=1"]
    assert plan_command.main([*words, "--config.train.num_steps=100", "--config.data.batch_size=4"]) == 0
    plan, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert plan["projection"]["price"] == pytest.approx(plan["projection"]["instance_hours"])
    for part in ("parameters", "opt_state", "all-reduce", "projection, not measured", "checkpoint", "fits"):
        assert part in printed


def test_search_ranks_the_layouts_that_fit_and_tries_every_dimension(monkeypatch):
    config, site = small_config(rows=8, policy="mixed"), Site("trn1.2xlarge", 2)
    scored = list(search.candidates(config, site))
    tried = [candidate for _, candidate in scored]
    assert {c.train.num_microbatches for c in tried} == {1, 2, 4, 8}
    assert {c.model.remat for c in tried} == set(search.REMATS)
    degrees = {tuple(getattr(c.parallel, axis) for axis in MESH_AXES) for c in tried}
    assert {(pipe > 1, fsdp > 1) for pipe, _, fsdp, *_ in degrees} == set(itertools.product((True, False), repeat=2))
    assert len(set(tried)) == len(tried)

    # plans that are made up: as estimated, or not at all above half of a budget that half of the combinations fit
    estimates = {candidate: estimate for estimate, candidate in scored}
    budget = 600_000
    with_memory(monkeypatch, budget)

    def plan_as_estimated(c, _):
        degrees = {axis: getattr(c.parallel, axis) for axis in MESH_AXES}
        return {
            "layout": degrees,
            "device_bytes": {"total": estimates[c].total, "budget": budget},
            "fits_surely": 2 * estimates[c].total <= budget,
            "projection": {"step_s": estimates[c].step_s, "tokens_per_s": 1.0},
            "disputed_groups": ["x"] * (c.parallel.pipe == 2),
        }

    monkeypatch.setattr(search, "make_plan", plan_as_estimated)
    best = {}
    for c, estimate in estimates.items():
        if 2 * estimate.total <= budget:
            best[c.parallel] = min(best.get(c.parallel, (True, 9.9)), (c.parallel.pipe == 2, estimate.step_s))
    found = search.rank_layouts(config, site, most=len(best), max_plans=10_000)
    assert [(bool(row["disputed_groups"]), row["step_s"]) for row in found["rows"]] == sorted(best.values())
    assert found["planned"] < len(tried) / 2
    printed = search.ranking_table(found, "here").splitlines()
    assert len(printed) == 2 + len(best)
    assert search.rank_layouts(config, site, max_plans=3)["planned"] == 3
    with_memory(monkeypatch, 2**16)
    printed = search.ranking_table(search.rank_layouts(config, site), "here")
    assert_names(printed, "64.00 KiB", "0 ")


ESTIMATED = [
    {"policy": "bf16", "data": 2, "fsdp": 4, "remat": "none"},
    {"policy": "mixed", "tensor": 4, "data": 2, "zero1": True, "sequence_parallel": True, "remat": "full"},
    {"policy": "mixed", "pipe": 2, "tensor": 4, "m": 4, "remat": "selective", "sequence_parallel": True},
]


def test_search_keeps_the_context_and_splits_the_state_over_it():
    config = small_config(rows=8, policy="mixed", context=2, kernel="chunked")
    scored = list(search.candidates(config, Site("trn1.2xlarge", 1)))
    assert {(c.parallel.context, c.parallel.data, c.parallel.zero1) for _, c in scored} == {(2, 1, True)}


def test_search_estimates_with_the_attention_of_the_plan(monkeypatch):
    names, site = [], Site("trn2.3xlarge", 1)
    config = long_rows("auto", target=site.target, seq_len=16384)
    monkeypatch.setattr(search, "estimate", lambda *_, attention, **__: names.append(attention))
    list(search.candidates(config, site))
    assert set(names) == {make_plan(config, site)["attention"]["implementation"]} == {"nki"}


@pytest.mark.slow
def test_estimates_of_the_search_are_near_the_plan():
    for changes in ESTIMATED:
        config = planned_config(**{"data": 1} | changes)
        model = dataclasses.replace(config.model, layer_loop="scan")
        config = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, accumulate="scan"))
        plan, target = make_plan(config, Site("trn1.2xlarge", 4)), hardware.node("trn1.2xlarge")
        layout = planned_layout(config, 8, platform="neuron")
        state = make_program(config, layout).abstract_state
        estimate = search.estimate(config, layout, target=target, state=state, attention=config.model.attention)
        memory = plan["device_bytes"]
        assert 0.25 < estimate.total / (memory["total"] - memory["programs"]) <= 1, changes
        assert 0.4 < estimate.step_s / plan["projection"]["step_s"] < 1.5, changes


@pytest.mark.slow
def test_memory_within_the_error_of_temporaries_is_not_called_a_fit(monkeypatch):
    parts = {"opt_state": 10, "batch": 0, "gradients": 10, "activations": 20, "workspace": 30, "logits": 1}
    memory = DeviceBytes(params=20, **parts)  # 60 of 90 may be 71: 101 in all
    lines = {budget: report.memory_line(memory, budget) for budget in (89, 90, 100, 101)}
    verdicts = [[verdict for verdict in ("DOES NOT FIT", "MAY NOT FIT") if verdict in line] for line in lines.values()]
    assert verdicts == [["DOES NOT FIT"], ["MAY NOT FIT"], ["MAY NOT FIT"], []]
    assert dataclasses.replace(memory, temporaries_error=STAGES_ERROR).upper == 30 + 86
    config, site = small_config(m=1, policy="mixed"), Site("trn1.2xlarge", 1)
    planned = make_plan(config, site)["device_bytes"]
    with_memory(monkeypatch, (planned["total"] + planned["upper"]) // 2)
    plan = make_plan(config, site)
    assert (plan["fits"], plan["fits_surely"]) == (True, False)
    assert "MAY NOT FIT" in report.as_text(plan)
    with_memory(monkeypatch, planned["total"] - 1)
    assert "DOES NOT FIT" in report.as_text(make_plan(config, site))


def test_projection_has_its_range_and_names_an_extrapolation():
    for target, is_extrapolated in (("trn1.2xlarge", False), ("trn2.48xlarge", False), ("trn2.48xlarge-lnc1", True)):
        config = small_config(data=hardware.node(target).num_devices(), rows=128, m=1)
        plan = make_plan(config, Site(target, 1))
        projection, calibration = plan["projection"], plan["projection"]["calibration"]
        chip = target[:4]
        own, other = roofline.STACKS_OF[chip]
        assert roofline.STACKS[own].chip == calibration["chip"] == chip
        steps = {}
        for name in (own, other):
            device = (projection["products"] + projection["update"]) / roofline.STACKS[name].efficiency
            steps[name] = device + projection["step_s"] - steps_of_device(projection)
        assert projection["step_s"] == pytest.approx(steps[own])
        assert calibration["other_stacks"] == {other: pytest.approx(steps[other])}
        low, high = roofline.STACKS[own].step_range
        assert calibration["step_low_s"] <= low * steps[own] < high * steps[own] <= calibration["step_high_s"]
        printed = report.as_text(plan)
        assert_names(printed, f"{projection['efficiency']:.0%}", own, f"{other} {steps[other]:.3f} s")
        assert ("extrapolated" in printed) == is_extrapolated
        assert ("175 of 725 GB/s" in printed) == (chip == "trn2")


def steps_of_device(projection):
    return (projection["products"] + projection["update"]) / projection["efficiency"]


def test_plan_of_long_rows_on_trn2_says_that_xla_attention_is_slow():
    for target, seq_len, attention, is_slow in (
        ("trn2.3xlarge", 16384, "einsum", True),
        ("trn2.3xlarge", 4096, "einsum", False),
        ("trn2.3xlarge", 16384, "auto", False),
        ("trn1.2xlarge", 16384, "einsum", False),
    ):
        plan = make_plan(long_rows(attention, target=target, seq_len=seq_len), Site(target, 1))
        printed = report.as_text(plan)
        assert ("10.5%" in printed) == is_slow
        assert plan["attention"]["implementation"] == ("nki" if attention == "auto" else "einsum")


def long_rows(attention, *, target, seq_len):
    """Returns a config with one replica on a node."""
    config = small_config(rows=4, m=4, data=1, kernel=attention)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, seq_len=seq_len),
        model=dataclasses.replace(config.model, max_positions=seq_len),
        parallel=dataclasses.replace(config.parallel, tensor=hardware.node(target).num_devices()),
    )


def test_loaded_programs_take_their_code_and_rings_of_a_neuron_device():
    plan = make_plan(small_config(m=1), Site("trn1.2xlarge", 1))
    judged = sum(program["judged"] for program in plan["instructions"]["programs"].values())
    memory = plan["device_bytes"]
    assert memory["programs"] == 64 * judged + measured_rates.RING_BYTES
    assert memory["total"] == sum(memory[key] for key in ("state", "batch", "temporaries", "programs"))
    assert "rings" in report.as_text(plan)
    on_gpu = make_plan(small_config(m=1), Site("h200", 1))
    assert on_gpu["device_bytes"]["programs"] == 0
    assert "rings" not in report.as_text(on_gpu)


def test_logical_core_of_trn2_has_the_measured_ceiling():
    device = hardware.node("trn2.3xlarge").device
    assert device.program_bytes == 24_260_000_000
    assert hardware.node("trn2.3xlarge").host_bytes == 124 * 2**30


if __name__ == "__main__":
    for config_name in NODES:
        (GOLDEN / f"{config_name}.json").write_text(json.dumps(golden(plan_of(config_name)), indent=2) + "\n")
