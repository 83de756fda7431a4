"""The step in programs of one microbatch: the arithmetic of the step in one program, whatever their number.

Equal bit for bit with XLA's optimizations off, as in these tests, see `conftest`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import training_program
from steps import trained

from hlat_jax.config import select
from hlat_jax.ops.cross_entropy import SumAndCount
from hlat_jax.parallel.pipeline import PHASES
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import fingerprint, programs_of_run, traced_programs

SHARDED = {"data": 2, "fsdp": 2, "tensor": 2, "sequence_parallel": True}
# name -> (parallel section, precision.policy)
CASES = {
    "sharded": (SHARDED | {"zero1": True}, "fp32"),
    "zero2-stochastic": ({"data": 4, "tensor": 2, "zero1": True, "reduce_gradients": "microbatch"}, "bf16_sr"),
    "pipe-stochastic": ({"pipe": 3, "data": 2, "zero1": True, "pipe_exchange": "all_gather"}, "bf16_sr"),
}


def config_of(small, accumulate, *, parallel=None, policy="fp32", num_microbatches=2, **train):
    small.data.batch_size = 16
    small.model.update(fuse_qkv=False, vocab_size=96)
    small.parallel.update(parallel or {"data": 1})
    small.precision.policy = policy
    small.train.update(accumulate=accumulate, num_microbatches=num_microbatches, **train)
    return resolve(small)


def ragged(make_batch, config, *, number=0):
    """Returns a batch of which every row counts another share: microbatches and devices then weigh differently."""
    batch = make_batch(number, config)
    shares = np.linspace(0.1, 1.0, len(batch.weights))[:, None]
    counted = np.random.default_rng(number).random(batch.weights.shape) < shares
    return dataclasses.replace(batch, weights=batch.weights * counted.astype(np.float32))


def assert_same_bits(a, b):
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    assert [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(same) if not leaf] == []


@pytest.mark.quick_cases("sharded")
@pytest.mark.parametrize("name", CASES)
def test_dispatched_step_equals_the_scanned_step_bit_for_bit(small, make_batch, name):
    """Also where a microbatch is not finite, or a spike, which masks the whole update."""
    parallel, policy = CASES[name]
    found = {}
    for accumulate in ("scan", "programs"):
        config = config_of(small, accumulate, parallel=parallel, policy=policy, spikes="skip", spike_window=4)
        batches = [ragged(make_batch, config, number=number) for number in range(5)]
        for batch, value in ((batches[3], np.nan), (batches[4], 1e4)):
            batch.weights[-1, 0] = value
        _, *found[accumulate] = trained(config, batches, rate=1e-2)
    state, rows = found["programs"]
    assert int(state["step"]) == 5
    assert [bool(row.finite) for row in rows] == [True, True, True, False, True]
    assert rows[4].spike
    assert_same_bits(found["scan"], found["programs"])


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [1, 3])
def test_programs_do_not_depend_on_the_number_of_microbatches(small, pipe):
    """Were one of them to, a run with more of them would compile it again."""

    def fingerprints(num_microbatches):
        small.data.batch_size = 4 * num_microbatches
        small.train.update(num_microbatches=num_microbatches)
        small.parallel.update(data=2, tensor=2, pipe=pipe)
        small.model.update(vocab_size=96)
        config = resolve(small)
        program = make_program(config, planned_layout(config, 4 * pipe, platform="neuron"))
        traced, names = traced_programs(program), programs_of_run(program)[: 3 if pipe == 1 else 5]
        assert names == ["start", *(["microbatch"] if pipe == 1 else PHASES), "update"]
        return [fingerprint(traced[name]().lower(lowering_platforms=("neuron",))) for name in names]

    assert fingerprints(1) == fingerprints(64)


def test_the_buffer_of_sums_is_updated_in_place(small, one_device):
    config = config_of(small, "programs")
    program = make_program(config, one_device)
    compiled = program.trace_microbatch_step("microbatch").lower().compile()
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.microbatch_arguments["update"][1]))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state))
    compiled = program.trace_microbatch_step("update").lower().compile()
    assert compiled.memory_analysis().alias_size_in_bytes == held + state


def test_auto_dispatches_microbatches_on_neuron():
    asked = (("auto", "neuron"), ("auto", "cpu"), ("scan", "neuron"), ("programs", "cpu"))
    assert [select("accumulate", *each) for each in asked] == ["programs", "scan", "scan", "programs"]


def test_a_plain_mean_and_no_microbatches_are_refused():
    def mean(params, batch):
        return (params["w"] * batch["x"]).mean()

    params, batch = {"w": np.ones(3, np.float32)}, {"x": np.ones((4, 3), np.float32)}
    for loss, parts, said in (
        (mean, [batch], "a loss function that returns SumAndCount"),
        (mean_of_products, [], "microbatches is empty. Give a step one or more"),
    ):
        program = training_program(loss, optax.sgd(0.1), params=params)
        with pytest.raises(ValueError, match=said):
            program.train_step.microbatch_step(program.init(params), parts)


def mean_of_products(params, batch):
    return SumAndCount((params["w"] * batch["x"]).sum(), batch["x"].size)


def test_each_microbatch_is_read_when_it_is_dispatched():
    program, seen = training_program(mean_of_products, optax.sgd(0.1)), []
    step, params = program.train_step.microbatch_step, {"w": np.ones(3, np.float32)}

    def logged(name, run):
        return lambda *args: (seen.append(name), run(*args))[1]

    step = step.with_programs({name: logged(name, run) for name, run in step.programs.items()})

    def parts():
        for _ in range(2):
            seen.append("asked")
            yield {"x": np.ones((4, 3), np.float32)}

    state, _ = step(program.init(params), parts())
    assert seen == ["asked", "start", "microbatch", "asked", "microbatch", "update"]
    step(state, parts())
    assert seen.count("start") == 1
    _, metrics = step(program.init({"w": np.ones(1, np.float32)}), [{"x": np.ones((2, 1), np.float32)}])
    assert (metrics.loss, metrics.num_tokens, seen.count("start")) == (1.0, 2, 2)


def test_ones_own_accumulate_has_no_step_of_microbatches():
    def summed(loss_fn, params, rows, *, sums):
        assert sums.num_microbatches == 2
        loss, pullback = jax.vjp(lambda params: loss_fn(params, rows).total, params)
        return (loss, loss_fn(params, rows).count), pullback(jnp.ones_like(loss))[0]

    options = {"accumulate": summed, "num_microbatches": 2, "zero": 0, "devices": jax.devices()[:2]}
    params = {"w": np.ones(3, np.float32)}
    program = training_program(mean_of_products, optax.sgd(0.1), options=options, params=params)
    assert program.train_step.microbatch_step is None
    state, metrics = program.step(program.init(params), {"x": np.ones((4, 3), np.float32)})
    assert (metrics.loss, metrics.num_tokens) == (1.0, 12)
    np.testing.assert_allclose(state["params"]["w"], 1 - 0.1 / 3)
