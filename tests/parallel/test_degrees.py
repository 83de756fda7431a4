"""Degrees over so many devices: refused before any compile, with the nearest that pass every check."""

import dataclasses
import itertools
import re

import jax
import pytest

from hlat_jax.cli import config_files
from hlat_jax.neuron.programs import layout_for_neuron
from hlat_jax.parallel.degrees import are_degrees_valid, check_degrees, layout_over, nearest_degrees
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.machine import fitting_program

# changes of `small` -> the key that the error begins with
REFUSED = {
    "parallel.tensor=4": {"parallel.tensor": 4},
    "data.batch_size=8": {"train.num_microbatches": 4},
    "parallel.tensor=8": {
        "parallel.tensor": -1,
        "parallel.data": 1,
        "model.num_heads": 12,
        "model.num_kv_heads": 3,
    },
    "precision.policy=autocast": {
        "parallel.pipe": -1,
        "parallel.data": 4,
        "model.num_layers": 4,
        "precision.policy": "autocast",
    },
    "model.embed_dim=36": {"parallel.fsdp": 8, "model.embed_dim": 36},
}


def test_7b_resumes_on_any_number_of_nodes_as_its_page_says():
    mutable, nodes = config_files.load("7b"), (1, 2, 4, 8, 16, 32, 48, 62, 63, 64)
    powers = [count for count in nodes if are_degrees_valid(resolve(mutable), 32 * count)]
    assert powers == [1, 2, 4, 8, 16, 32, 64]
    mutable.train.num_microbatches = -1
    assert all(are_degrees_valid(resolve(mutable), 32 * count) for count in nodes)


@pytest.mark.parametrize("key", REFUSED)
def test_layout_is_refused_by_train_and_plan_and_the_suggested_degrees_train(small, key):
    small.update_from_flattened_dict(REFUSED[key])
    config = resolve(small)
    with pytest.raises(ValueError, match=f"^{key}"):
        make_plan(config, Site("trn1.2xlarge", 4))
    with pytest.raises(ValueError, match=f"^{key}") as refused:
        fitting_program(config, jax.devices())
    advice = str(refused.value).partition("The nearest degrees")[2]
    tree = config.to_dict()
    for axis, degree in re.findall(r"parallel\.(\w+)=(\d+)", advice):
        tree["parallel"][axis] = int(degree)
    advised = resolve(tree)
    assert are_degrees_valid(advised, 8) == bool(advice)
    if advice:
        make_program(advised, layout_over(advised, jax.devices())).trace_step()


@pytest.mark.slow
def test_check_accepts_exactly_what_can_be_traced(small):
    """Over every layout of 8 devices of a model whose sizes divide badly; JAX refuses what the check refuses."""
    small.model.num_layers, small.model.vocab_size, small.model.embed_dim = 4, 72, 36
    small.data.batch_size, small.model.fuse_qkv, small.parallel.zero1 = 4, False, True
    config = resolve(small)
    found = {True: 0, False: 0}
    for pipe, fsdp, tensor in itertools.product((1, 2, 4, 8), repeat=3):
        if 8 % (pipe * fsdp * tensor) == 0:
            degrees = {"pipe": pipe, "data": 8 // (pipe * fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
            asked = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **degrees))
            found[are_degrees_valid(asked, 8)] += 1
            has_rows = degrees["data"] * fsdp <= config.data.batch_size  # JAX would trace padded rows only
            assert are_degrees_valid(asked, 8) == (_traces(asked) and has_rows), degrees
    assert min(found.values()) >= 5


def _traces(config):
    try:
        layout = make_layout(config.parallel, jax.devices(), num_kv_heads=config.model.num_kv_heads)
        program = make_program(config, layout)
        for leaf in jax.tree.leaves(program.step_arguments[:2]):
            leaf.sharding.shard_shape(leaf.shape)
        program.trace_step()
    except Exception:  # whatever JAX says
        return False
    return True


def test_nearest_degrees_keep_valid_requested_degrees_and_plan_names_nodes(small):
    small.parallel.tensor, small.parallel.data = 2, 8
    config = resolve(small)
    assert nearest_degrees(config, 8) == {"pipe": 1, "data": 4, "fsdp": 1, "context": 1, "tensor": 2}
    check_degrees(config, 16)


def test_step_with_more_tokens_than_float32_can_count_is_refused():
    c = config_files.load("7b")
    c.train.num_microbatches = 1
    c.data.batch_size = 4096
    most = resolve(c)
    assert most.data.batch_size * most.data.seq_len == 2**24
    assert layout_for_neuron(most, 8).degrees["data"] == 1
    c.data.batch_size = 4097
    with pytest.raises(ValueError, match=r"^data.batch_size=4097 .*data.batch_size=4096"):
        layout_for_neuron(resolve(c), 8)
