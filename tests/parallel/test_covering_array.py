"""Every pair of values of the options of a step trains as one device does, or is refused before anything is compiled.

`pytest tests/parallel/test_covering_array.py -m slow --seed 7` tries other rows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import covering
import jax
import numpy as np
import pytest
from compiled_collectives import collectives

import configs
from hlat_jax.batch import concat_batch, segmented_batch
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.program import make_program, state_bytes

NUM_STEPS = 5
# Adam magnifies the rounding of gradients near zero in proportion to the rate: at 3e-3 microbatches on one device alone
# changed a gradient norm by 1.6e-5, with one KV head and yarn.
RATE = 5e-4
VOCAB = 61  # which only padding splits into parts
SPIKE = 3  # the step whose targets are all one token
NUM_PARTS = 16  # of the array, a test each
METRICS = ("loss", "grad_norm", "param_norm")
# Relative differences of loss, gradient norm and parameter norm from one device with the same policy: of fp32 sums in
# another order, and of bf16, which rounds at 4e-3. Where all targets are one token, roundings do not average out.
EXACT, NARROW, NARROW_SPIKE = (5e-6, 5e-6, 5e-6), (1e-3, 5e-3, 5e-4), (1e-3, 3e-2, 5e-4)
# The options that change what one device computes; all others may change the order of sums alone.
NUMERICS = (
    *("optimizer", "policy", "packing", "z_loss_weight", "tie_embeddings", "fuse_qkv", "num_kv_heads"),
    *("qkv_bias", "out_bias", "qk_norm", "sliding_window", "sliding_window_layers", "rope_scaling"),
)
PLAIN = {
    "layer_loop": "scan",
    "remat": "none",
    "attention": "einsum",
    "cross_entropy": "dense",
}


def configured(options):
    changes = {"vocab_size": VOCAB, "num_kv_heads": 4, "max_positions": 16, "batch_size": 32, "seq_len": 16, **options}
    changes |= {"spike_window": 2 * SPIKE}  # it decides from the step on that is one
    changes |= {"optimizer__name": changes.pop("optimizer", "adamw")}
    return configs.resolved("widths", **{"num_layers": 4 if options.get("pipe", 1) > 1 else 2} | changes)


@functools.cache
def make_batch(step, packing):
    """Returns rows of random tokens, or of three documents and padding, a different number of targets in each."""
    rng = np.random.default_rng(step)
    tokens, places = rng.integers(0, VOCAB, (32, 16)), np.arange(16)
    if packing == "concat":
        batch = concat_batch(tokens)
    else:
        ends = np.sort(rng.integers(1, 16, (32, 3)), axis=1)
        ids = 1 + (places >= ends[:, :1]) + (places >= ends[:, 1:2])
        batch = segmented_batch(tokens, np.where(places >= ends[:, 2:], 0, ids))
    return dataclasses.replace(batch, targets=np.full_like(batch.targets, 5)) if step == SPIKE else batch


def trained(config, devices):
    """Returns (initial parameters, metrics [NUM_STEPS, METRICS], which steps were spikes, state, program)."""
    program = make_program(config, layout_over(config, devices))
    state, step_fn = program.init_state(), program.run_step
    if program.accumulate == "scan":
        step_fn = program.trace_step().lower().compile()
        assert_compiled_as_traced(step_fn.as_text(), program)
    initial, rows, spikes = jax.tree.map(np.array, state["params"]), [], []  # copies: the state is donated
    for step in range(NUM_STEPS):
        batch = program.shard(make_batch(step, config.data.packing))
        state, metrics = step_fn(state, batch, np.float32(RATE))
        rows.append([float(getattr(metrics, name)) for name in METRICS])
        spikes.append(metrics.spike if metrics.spike is None else bool(metrics.spike))
        assert float(metrics.num_tokens) == make_batch(step, config.data.packing).weights.sum()
    return initial, np.asarray(rows), spikes, state, program


def assert_compiled_as_traced(text, program):
    """XLA adds no collective to those of a trace; it leaves out those whose result is not used."""
    arrays = [collections.Counter(), collections.Counter()]
    traced = traced_collectives(live_jaxpr(program.trace_step()), program.layout.mesh)
    for counter, found in zip(arrays, (collectives(text, program.layout.mesh), traced), strict=True):
        for one in found:
            if one.axes:
                counter[one.kind, one.axes] += one.num_arrays * one.trips
    assert arrays[0] <= arrays[1]
    assert arrays[0].keys() == arrays[1].keys()


def without_padding(params):
    """Returns the rows of tokens alone; those that pad the vocabulary hold zeros, or have none of their own."""
    tables = {name: np.asarray(params[name]) for name in ("embed", "head") if name in params}
    assert not any(table[VOCAB:].any() for table in tables.values())
    return params | {name: table[:VOCAB] for name, table in tables.items()}


@functools.cache
def trained_alone(**options):
    initial, rows, _, state, _ = trained(configured(options), jax.devices()[:1])
    return initial, rows, jax.device_get(state["opt_state"]["inner"]["mu"])


def assert_equals_one_device(row):
    config = configured(row)
    skips = {"spikes": "skip" if row["spikes"] == "skip" else "off"}
    alone = {key: row[key] for key in NUMERICS} | PLAIN | skips | {"num_layers": config.model.num_layers}
    wanted_initial, wanted, wanted_mu = trained_alone(**alone)
    initial, got, spikes, state, program = trained(config, jax.devices()[: covering.num_devices(row)])
    jax.tree.map(np.testing.assert_array_equal, wanted_initial, without_padding(initial))
    is_spike = [step == SPIKE for step in range(NUM_STEPS)]
    is_exact = row["policy"] == "fp32"
    bounds = [EXACT if is_exact else NARROW_SPIKE if spike else NARROW for spike in is_spike]
    without_padding(state["params"])
    errors = np.abs(got / wanted - 1)
    assert (errors <= bounds).all(), errors
    if is_exact:  # gradients element by element, relative to the largest
        mu = without_padding(state["opt_state"]["inner"]["mu"])
        for a, b in zip(jax.tree.leaves(mu), jax.tree.leaves(wanted_mu), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-4 * np.abs(b).max())
    assert spikes == ([None] * NUM_STEPS if row["spikes"] == "off" else is_spike)
    assert state_bytes(state) == state_bytes(program.abstract_state)
    for leaf in jax.tree.leaves(state):  # replicas hold the same bits
        shards = {}
        for shard in leaf.addressable_shards:
            first = shards.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(first, np.asarray(shard.data))


@pytest.mark.quick_cases("stages", "tensor")
@pytest.mark.parametrize("name", covering.QUICK)
def test_row_trains_like_one_device(name):
    assert_equals_one_device(covering.QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_rows_of_the_covering_array_train_like_one_device(part, request):
    rows = covering.covering_array(request.config.getoption("--seed"))
    for row in [row for row in rows if row not in covering.QUICK.values()][part::NUM_PARTS]:
        print(row)
        assert_equals_one_device(row)


@pytest.mark.slow
def test_covering_array_holds_every_allowed_pair(request):
    rows = covering.covering_array(request.config.getoption("--seed"))
    assert set().union(*map(covering.pairs, rows)) == covering.allowed_pairs()
    assert all(row in rows for row in covering.QUICK.values())


@pytest.mark.parametrize("name", covering.REFUSED)
def test_options_that_exclude_each_other_are_refused_before_compiling(name):
    _, is_refused, changes, said = covering.REFUSED[name]
    row = covering.FIRST | changes
    assert is_refused(row)
    assert [other for other, (_, refuses, _, _) in covering.REFUSED.items() if refuses(row)] == [name]
    with pytest.raises(ValueError, match=f"^{said}"):
        layout_over(configured(row), jax.devices()[: covering.num_devices(row)])
