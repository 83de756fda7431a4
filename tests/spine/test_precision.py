"""Stochastic rounding: unbiased, the same on every mesh, computed on each shard; and which policies use it."""

import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cast_pairs import cast_pairs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planned import small_config
from refusals import refused
from steps import trained

from hlat_jax import precision
from hlat_jax.config import default
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.precision import NEAREST, Rounding, policy_on, random_bits, stochastic_round
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

STEP = 2.0**-7  # between neighbours of bf16 from 1 to 2
NUM_DRAWS = 1_000_000
WORDS = (jnp.uint32(7), jnp.uint32(3))


def rounded(value, *, name="w", words=WORDS, shape=(NUM_DRAWS,)):
    return np.asarray(Rounding(words).write(jnp.full(shape, value, jnp.float32), jnp.bfloat16, name=name), np.float64)


def test_stochastic_rounding_is_unbiased_with_bernoulli_variance():
    for value in (1 + 0.5 * STEP, -1 - 0.25 * STEP, 1 + 0.01 * STEP, -1 - 0.999 * STEP):
        value = float(np.float32(value))
        sign, share = math.copysign(1, value), (abs(value) - 1) / STEP
        draws = rounded(value)
        assert set(np.unique(draws)) == {sign * 1.0, sign * (1.0 + STEP)}
        deviation = STEP * math.sqrt(share * (1 - share))
        assert abs(draws.mean() - value) < 5 * deviation / math.sqrt(NUM_DRAWS)
        assert draws.var() == pytest.approx(deviation**2, rel=0.02)


def test_stochastic_rounding_keeps_bf16_and_non_finite_values():
    every = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)
    bits = random_bits(WORDS, "w", every.shape)
    got = np.asarray(stochastic_round(jnp.asarray(every, jnp.float32), jnp.bfloat16, bits=bits))
    numbers = ~np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint16)[numbers], every.view(np.uint16)[numbers])
    assert np.isnan(got[~numbers].astype(np.float32)).all()


def test_random_bits_are_independent_across_step_seed_name_and_position():
    shape = (1024, 1024)
    ours = random_bits(WORDS, "w", shape)
    for theirs in (
        random_bits((jnp.uint32(7), jnp.uint32(4)), "w", shape),  # step
        random_bits((jnp.uint32(8), jnp.uint32(3)), "w", shape),  # seed
        random_bits(WORDS, "v", shape),
        random_bits((*WORDS, jnp.uint32(0)), "w", shape),
        jnp.roll(ours, 1),
        jnp.roll(ours, 1024),  # a row
    ):
        a, b = np.asarray(ours).ravel(), np.asarray(theirs).ravel()
        for bit in (16, 20, 31):  # the upper half decides
            assert abs((((a >> bit) & 1) == ((b >> bit) & 1)).mean() - 0.5) < 5 * 0.5 / 1024
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 1024


def test_random_bits_of_large_arrays_do_not_repeat(monkeypatch):
    monkeypatch.setattr(precision, "_WORD", 1 << 8)
    bits = np.asarray(random_bits(WORDS, "w", (40, 10, 20)))
    assert len(np.unique(bits)) == bits.size


def test_rounding_is_the_same_on_every_mesh():
    values = np.random.default_rng(0).normal(size=(16, 24, 40)).astype(np.float32)
    write = jax.jit(lambda value: Rounding(WORDS).write(value, jnp.bfloat16, name="w"))
    wanted = np.asarray(write(values))
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    for place in (P("x"), P("x", "y"), P(None, ("y", "x")), P()):
        got = write(jax.device_put(values, NamedSharding(mesh, place)))
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, place), 3)
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_rounding_cost_scales_with_the_local_shard():
    def flops(num_devices):
        mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])
        value = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=NamedSharding(mesh, P("x")))
        write = jax.jit(lambda value: Rounding(WORDS).write(value, jnp.bfloat16, name="w"))
        program = write.lower(value).compile()
        assert "all-gather" not in program.as_text()
        return program.cost_analysis()["flops"]

    assert flops(8) == pytest.approx(flops(1) / 8, rel=0.05)


def test_gradient_accumulation_over_microbatches_is_unbiased():
    def total(rounding):
        def add(sums, number):
            return rounding.at(number).add(sums, {"w": jnp.full(4096, 1e-3)}), None

        start = {"w": jnp.ones(4096, jnp.bfloat16)}
        return jax.lax.scan(add, start, jnp.arange(100))[0]["w"].astype(jnp.float32)

    assert float(total(Rounding(WORDS)).mean()) == pytest.approx(1.1, rel=2e-3)
    assert (total(NEAREST) == 1).all()


def config_of(small, **parallel):
    small.model.fuse_qkv = False
    small.precision.policy = "bf16_sr"
    small.parallel.update(parallel)
    small.train.num_microbatches = 2
    return resolve(small)


@pytest.mark.slow
def test_bf16_sr_is_reproducible_and_depends_on_the_seed_in_the_state(small, make_batch):
    config = config_of(small, data=1)
    batches = [make_batch(number, config) for number in range(3)]
    (program, first, _), (_, again, _) = (trained(config, batches) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    step, batch = program.step, make_batch(9, config)
    moved = jax.device_get(step(jax.tree.map(jnp.copy, first), batch, np.float32(1e-3))[0]["params"])
    first["opt_state"]["seed"] = first["opt_state"]["seed"] + 1
    other = jax.device_get(step(first, batch, np.float32(1e-3))[0]["params"])
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(other), strict=True))


def test_neuron_uses_hardware_rounding_unless_software_is_requested(small):
    for who, platform, in_program in (("auto", "neuron", False), ("software", "neuron", True), ("auto", "cpu", True)):
        small.precision.stochastic_rounding = who
        config = config_of(small, data=2, tensor=2)
        layout = planned_layout(config, 4, platform=platform)
        assert ("shift_right_logical" in str(make_program(config, layout).trace_step().jaxpr)) == in_program


def test_hardware_without_stochastic_rounding_is_refused():
    with refused("float16", "bfloat16"):
        Rounding(WORDS).write(jnp.ones(3), jnp.float16, name="w")
    with refused("'cpu'", "'auto'", "'software'"):
        policy_on("bf16_sr", "cpu", stochastic_rounding="hardware")
    c = default()
    c.precision.stochastic_rounding = "software"
    with refused("precision.stochastic_rounding", "'bf16_sr'"):
        resolve(c)


# Casts to bf16 and back, which neuronx-cc removes between elementwise operations.

OF_PRODUCTS = {"attention.py", "cross_entropy.py", "rope.py"}  # fp32 results of bf16 products, kept if they are removed
# (policy, simulate, stochastic_rounding on Neuron, optimizer) -> files with casts that may be removed.
# "precision.py": the gradient of a microbatch before it is added. "optimizer.py": moments, after they are stored.
# "muon.py": the momentum before it is orthogonalized.
REMOVABLE = {
    ("fp32", "none", "auto", "adamw"): set(),
    ("mixed", "neuron", "auto", "adamw"): set(),
    ("bf16_sr", "none", "software", "adamw"): OF_PRODUCTS | {"precision.py"},
    ("bf16_sr", "neuron", "auto", "adamw"): set(),
}
MORE_REMOVABLE = {
    ("autocast", "none", "auto", "adamw"): set(),
    ("mixed", "none", "auto", "adamw"): OF_PRODUCTS | {"precision.py"},
    ("bf16", "none", "auto", "adamw"): OF_PRODUCTS | {"optimizer.py"},
    ("bf16_sr", "none", "auto", "adamw"): OF_PRODUCTS | {"optimizer.py"},  # by the hardware
    ("bf16_sr", "none", "software", "muon"): OF_PRODUCTS | {"precision.py", "muon.py"},
    **{
        (policy, simulate, "auto", optimizer): set()
        for policy in ("fp32", "autocast", "mixed", "bf16", "bf16_sr")
        for simulate in ("neuron", "neuron_all")
        for optimizer in ("adamw", "muon")
    },
}


@pytest.mark.parametrize(
    "case",
    [*REMOVABLE, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_REMOVABLE if case not in REMOVABLE)],
)
def test_no_rounding_of_a_step_is_a_cast_that_may_be_removed(case):
    policy, simulate, stochastic, optimizer = case
    c = small_config(policy=policy, optimizer=optimizer, m=2)
    c = dataclasses.replace(
        c,
        precision=dataclasses.replace(c.precision, simulate=simulate, stochastic_rounding=stochastic),
        train=dataclasses.replace(c.train, accumulate="scan"),
    )
    platform = "neuron" if simulate == "none" else "cpu"
    found = cast_pairs(make_program(c, planned_layout(c, 1, platform=platform)).trace_step().jaxpr)
    assert {pathlib.PurePath(place.split(":")[0]).name for place in found} == (REMOVABLE | MORE_REMOVABLE)[case], found


def test_sums_rounded_in_software_hold_no_cast_that_may_be_removed():
    def twice(sums, term):
        rounding = Rounding(WORDS)
        return rounding.at(1).add(rounding.at(0).add(sums, term), term)

    def by_casts(sums, term):
        return NEAREST.write(NEAREST.write(sums + term, jnp.bfloat16, name="") + term, jnp.bfloat16, name="")

    bf16 = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    assert cast_pairs(jax.make_jaxpr(twice)({"w": bf16}, {"w": bf16})) == []
    assert cast_pairs(jax.make_jaxpr(by_casts)(jnp.ones(8), jnp.ones(8)))


def test_remainder_is_exact_even_where_a_quotient_is_off_by_one(monkeypatch):
    near, far = np.arange(-9000, 9000, dtype=np.int32), np.random.default_rng(0).integers(-(2**24), 2**24, 2**16)
    floor = jnp.floor
    for divisor in (1, 3, 7, 15, 63, 6284):
        for error, indices in ((0, far.astype(np.int32)), (-1, near), (1, near)):
            with monkeypatch.context() as patched:
                patched.setattr(precision.jnp, "floor", lambda x, error=error: floor(x) + error)
                found = precision.remainder(jnp.asarray(indices), divisor)
            np.testing.assert_array_equal(found, indices % divisor)
