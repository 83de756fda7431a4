"""The floor of a plan is at or below the plan, and near enough to choose by; what it says of the state is exact."""

import dataclasses

import pytest
from planned import name, num_devices, planned_config, small_config

from hlat_jax.facts import hardware
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.plan.floor import floor, held
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program, state_bytes

LAYOUTS = [
    {"policy": "fp32", "remat": "none", "m": 2},
    {"policy": "mixed", "data": 8, "zero1": True, "remat": "full"},
    {"policy": "autocast", "fsdp": 2, "tensor": 2, "data": 2, "remat": "products"},
    {"policy": "bf16_sr", "data": 2, "fsdp": 4, "remat": "selective"},
    {"policy": "bf16", "data": 2, "fsdp": 4, "remat": "none"},
    {"policy": "mixed", "fsdp": 2, "data": 2, "tensor": 2, "zero1": True, "remat": "full", "m": 2},
    {"policy": "fp32", "tensor": 8, "sequence_parallel": True, "remat": "none", "m": 4},
    {"policy": "mixed", "tensor": 8, "zero1": True, "remat": "selective", "m": 8},
    {"policy": "mixed", "tensor": 4, "data": 2, "zero1": True, "sequence_parallel": True, "remat": "full"},
    {"policy": "mixed", "data": 4, "zero1": True, "remat": "full", "m": 2, "reduce_gradients": "microbatch"},
    {"policy": "mixed", "tensor": 4, "data": 2, "remat": "full", "m": 4},
    {"policy": "mixed", "pipe": 4, "data": 2, "zero1": True, "m": 2, "remat": "none"},
    {"policy": "mixed", "pipe": 2, "tensor": 4, "m": 4, "remat": "selective", "sequence_parallel": True},
    {"policy": "mixed", "pipe": 2, "fsdp": 2, "tensor": 2, "m": 4, "remat": "full"},
    {"policy": "mixed", "pipe": 2, "fsdp": 2, "data": 2, "m": 1, "remat": "selective", "zero1": True},
    {"policy": "mixed", "tensor": 2, "data": 4, "fuse": True, "remat": "products", "attention": "blocked"},
]


def _config(changes, make):
    changes = {"data": 1} | changes
    attention = changes.pop("attention", "einsum")
    config = make(**changes)
    return config if attention == "einsum" else _with_attention(config, attention)


def _with_attention(config, attention):
    from hlat_jax.resolve import resolve

    tree = config.to_dict()
    tree["model"]["attention"] = attention
    return resolve(tree)


def _floor(config, target):
    layout = planned_layout(config, num_devices(config), platform="neuron")
    return floor(config, layout, target=hardware.target(target), holds=held(config, layout))


@pytest.mark.quick_cases(
    "policybf16-data2-fsdp4-rematnone-large",
    "policybf16-data2-fsdp4-rematnone-small",
    "policymixed-tensor4-data2-zero1-sequence_parallel-rematfull-small",
    "policymixed-tensor8-zero1-rematselective-m8-large",
)
@pytest.mark.parametrize("make", [small_config, planned_config], ids=["small", "large"])
@pytest.mark.parametrize("changes", LAYOUTS, ids=name)
def test_floor_is_at_or_below_the_plan(changes, make):
    """Links and networks between nodes of two devices; one device alone."""
    config = _config(changes, make)
    # layers and microbatches in loops of one program: in programs of their own they take more than the floor is near
    model = dataclasses.replace(config.model, layer_loop="scan")
    config = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, accumulate="scan"))
    nodes = max(1, num_devices(config) // 2)
    if num_devices(config) == 1:
        target, site = "h200", Site("h200", 1)
    else:
        target, site = "trn1.2xlarge", Site("trn1.2xlarge", nodes)
    plan, least = make_plan(config, site), _floor(config, target)
    assert least.total <= plan["device_bytes"]["total"]
    assert least.step_s <= plan["projection"]["step_s"]
    if make is planned_config:  # large enough that what the floor leaves out is small
        assert least.total >= 0.25 * plan["device_bytes"]["total"]
        assert least.step_s >= 0.3 * plan["projection"]["step_s"]


@pytest.mark.parametrize("changes", LAYOUTS, ids=name)
def test_held_state_matches_the_arrays_except_counters(changes):
    config = _config(changes, small_config)
    layout = planned_layout(config, num_devices(config), platform="neuron")
    counters = 12 if config.precision.policy == "bf16_sr" else 8
    assert held(config, layout).state_bytes + counters == state_bytes(make_program(config, layout).abstract_state)


def test_floor_without_a_known_speed_covers_only_bytes():
    config = _config({}, small_config)
    assert _floor(config, "cpu").step_s == 0
    assert _floor(config, "cpu").total > 0
