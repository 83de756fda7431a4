"""The floor of a plan is at or below the plan, and near enough to choose by; what it says of the state is exact."""

import dataclasses

import pytest
from planned import num_devices, planned_config, small_config

from hlat_jax.facts import hardware
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.plan.floor import floor, held
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program, state_bytes

LAYOUTS = [
    {"policy": "bf16", "data": 2, "fsdp": 4, "remat": "none"},
    {"policy": "mixed", "tensor": 4, "data": 2, "zero1": True, "sequence_parallel": True, "remat": "full"},
    {"policy": "mixed", "tensor": 8, "zero1": True, "remat": "selective", "m": 8},
]
MORE_LAYOUTS = [
    {"policy": "fp32", "remat": "none", "m": 2},
    {"policy": "autocast", "fsdp": 2, "tensor": 2, "data": 2, "remat": "products"},
    {"policy": "bf16_sr", "data": 2, "fsdp": 4, "remat": "selective"},
    {"policy": "mixed", "fsdp": 2, "data": 2, "tensor": 2, "zero1": True, "remat": "full", "m": 2},
    {"policy": "mixed", "data": 4, "zero1": True, "remat": "full", "m": 2, "reduce_gradients": "microbatch"},
    {"policy": "mixed", "pipe": 4, "data": 2, "zero1": True, "m": 2, "remat": "none"},
    {"policy": "mixed", "pipe": 2, "tensor": 4, "m": 4, "remat": "selective", "sequence_parallel": True},
    {"policy": "mixed", "tensor": 2, "data": 4, "fuse": True, "remat": "products"},
]


def _floor(config, target):
    layout = planned_layout(config, num_devices(config), platform="neuron")
    return floor(config, layout, target=hardware.target(target), holds=held(config, layout))


@pytest.mark.parametrize(
    "rows", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["layouts", "more layouts"]
)
def test_floor_is_at_or_below_the_plan_and_its_state_is_exact(rows):
    """Links and networks between nodes of two devices; one device alone."""
    for changes in rows:
        config = planned_config(**{"data": 1} | changes)
        # layers and microbatches in loops of one program: programs of their own take more than the floor is near
        model = dataclasses.replace(config.model, layer_loop="scan")
        config = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, accumulate="scan"))
        count = num_devices(config)
        target, nodes = ("h200", 1) if count == 1 else ("trn1.2xlarge", count // 2)
        plan, least = make_plan(config, Site(target, nodes)), _floor(config, target)
        assert 0.25 * plan["device_bytes"]["total"] <= least.total <= plan["device_bytes"]["total"], changes
        assert 0.3 * plan["projection"]["step_s"] <= least.step_s <= plan["projection"]["step_s"], changes
        layout = planned_layout(config, count, platform="neuron")
        counters = 12 if config.precision.policy == "bf16_sr" else 8
        assert held(config, layout).state_bytes + counters == state_bytes(make_program(config, layout).abstract_state)


def test_floor_without_a_known_speed_covers_only_bytes():
    config = small_config(data=1)
    assert _floor(config, "cpu").step_s == 0
    assert _floor(config, "cpu").total > 0
