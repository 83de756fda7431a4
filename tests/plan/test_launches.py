"""Launches and arrays of a plan: as a step dispatches them, below the limit, and at the measured cost."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from planned import planned_config, small_config
from refusals import assert_names

from hlat_jax.batch import concat_batch
from hlat_jax.cli import config_files
from hlat_jax.facts import hardware, launch_costs
from hlat_jax.neuron import programs
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.plan import report
from hlat_jax.plan.launches import count_launches, launch_lines
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

TRN1 = hardware.node("trn1.32xlarge")


def dispatching(config):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate="programs"))


@pytest.mark.parametrize("pipe", [pytest.param(1), pytest.param(2, marks=pytest.mark.slow)])
def test_launches_and_arrays_are_those_of_a_step_that_runs(pipe):
    config = dispatching(small_config(pipe=pipe, m=4))
    program, called = make_program(config, layout_over(config, jax.devices()[:pipe])), collections.Counter()
    counted = count_launches(program, TRN1)

    def recorded(name, run):
        def call(*args):
            result = run(*args)
            row = counted["programs"][name]
            assert (len(jax.tree.leaves(args)), len(jax.tree.leaves(result))) == (row["inputs"], row["outputs"]), name
            called[name] += 1
            return result

        return call

    step = program.training.microbatch_step
    step = step.with_programs({name: recorded(name, run) for name, run in step.programs.items()})
    data = config.data
    batch = concat_batch(np.ones((data.batch_size, data.seq_len), np.int32))
    step(program.init_state(), program.shard(batch), np.float32(1e-3))
    del called["start"]  # once in a run
    assert called == {name: row["per_step"] for name, row in counted["programs"].items() if row["per_step"]}
    assert called.total() == counted["per_step"]


def check_shipped(name):
    config = resolve(config_files.load(name))
    program = make_program(config, programs.layout_for_neuron(config, programs.num_devices(config)))
    found = count_launches(program, TRN1)["programs"]
    assert max(max(row["inputs"], row["outputs"]) for row in found.values()) <= launch_costs.MOST_ARRAYS


def test_a_launch_of_the_pipelined_recipe_has_few_arrays():
    check_shipped("70b")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(config_files.shipped_configs()) - {"continue", "70b"}))
def test_a_launch_of_a_shipped_config_has_few_arrays(name):
    check_shipped(name)


def test_costs_are_those_of_the_ranks_and_chip():
    cost = launch_costs.collective_launch_ms
    assert [cost("trn1", ranks) for ranks in (2, 8, 32, 2048)] == [0.15, 2.45, 5.10, 5.10]
    assert [cost("trn2", ranks) for ranks in (3, 64, 1024)] == [1.04, 2.97, 2.97]
    assert cost("trn2-lnc1", 8) is None


def launches_on(num_devices, target, **changes):
    config = planned_config(m=2, **changes)
    program = make_program(config, programs.layout_for_neuron(config, num_devices))
    return count_launches(program, hardware.node(target))


def test_only_programs_with_a_collective_cost_milliseconds():
    alone = launches_on(1, "trn1.32xlarge", data=1)
    assert (alone["per_step"], alone["seconds"]) == (3, pytest.approx(3 * 0.15e-3))
    together = launches_on(8, "trn1.32xlarge", data=2, tensor=4)
    assert together["seconds"] == pytest.approx(3 * 2.45e-3)
    assert launches_on(8, "trn2.48xlarge-lnc1", data=2, tensor=4)["seconds"] is None


def test_a_plan_adds_the_launches_to_the_step():
    config = planned_config(m=2, data=-1, rows=128)
    plan = report.make_plan(config, report.Site("trn1.32xlarge", 2))
    launches, projection = plan["launches"], plan["projection"]
    # gradients are summed in the update alone
    assert launches["seconds"] == projection["launch"] == pytest.approx(2 * 0.15e-3 + 5.10e-3)
    parts = (projection["products"] + projection["update"]) / projection["efficiency"]
    assert projection["step_s"] == pytest.approx(
        parts + projection["link"] + projection["network"] + projection["launch"]
    )
    text = report.as_text(plan)
    assert_names(text, "3 per step (2 x microbatch + 1 x update)", "5.4 ms", "launches 0.005 s")


def test_a_launch_of_more_arrays_than_were_fast_is_a_warning():
    row = {"inputs": 7, "outputs": 8, "per_step": 1}
    found = {"per_step": 2, "seconds": None}
    lines = launch_lines(found | {"programs": {"train": row | {"inputs": 129}, "norms": row}})
    assert "(1 x train + 1 x norms)" in lines[0]
    assert_names(lines[1], "129", "8", "(train)", "WARNING", "128")
    assert "WARNING" not in launch_lines(found | {"programs": {"norms": row}})[1]
