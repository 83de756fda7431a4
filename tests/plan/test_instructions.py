"""Instructions estimated from tiles: by hand, and what they warn of."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from planned import planned_config, small_config
from refusals import assert_names

from hlat_jax.facts import compiler_limits
from hlat_jax.neuron import programs
from hlat_jax.ops.nki import attention as nki
from hlat_jax.parallel.pipeline import PHASES
from hlat_jax.passes.products import live_jaxpr, products
from hlat_jax.plan import instructions, report
from hlat_jax.plan.instructions import Instructions
from hlat_jax.program import make_program


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def traced(fn, *arguments):
    return jax.jit(fn).trace(*arguments)


def product(x, y):
    return x @ y


@pytest.mark.parametrize(
    ("fn", "arguments", "expected"),
    [
        (product, (shape(256, 128), shape(128, 512)), Instructions(2, 2, 2)),
        (product, (shape(512, 128), shape(128, 256)), Instructions(2, 2, 2)),  # either operand may be the stationary
        (product, (shape(1, 4096), shape(4096, 4096)), Instructions(8 * 32, 8 * 32, 8 * 32)),
        (product, (shape(3, 129, 128), shape(3, 128, 513)), Instructions(12, 12, 12)),
        (lambda x: x.reshape(-1)[None] + 1.0, (shape(256, 512),), Instructions(2, 2, 2)),
        (lambda x: x.sum(), (shape(256, 512),), Instructions(2, 2, 2)),
        (
            lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=5)[0],
            (shape(512, 512),),
            Instructions(5 * (16 + 4), 16 + 4, 16),
        ),
    ],
    ids=["product", "swapped", "row", "batched", "elements", "sum", "loop"],
)
def test_instructions_are_those_counted_by_hand(fn, arguments, expected):
    assert instructions.estimate_instructions(live_jaxpr(traced(fn, *arguments)), num_shards=1) == expected


def program_of(**changes):
    config = planned_config(**changes)
    return make_program(config, programs.layout_for_neuron(config, 8))


def test_the_programs_of_a_step_with_stages_are_its_phases_and_the_update():
    assert list(report.step_instructions(program_of(pipe=2, data=2, tensor=2, m=2))) == [*PHASES, "update"]


def test_dispatched_microbatches_make_no_program_larger():
    two, eight = (report.step_instructions(program_of(m=m, data=1, tensor=4, fsdp=2)) for m in (2, 4))
    assert two["update"] == eight["update"]
    assert eight["microbatch"].unrolled < 0.6 * two["microbatch"].unrolled  # of half as many rows


def test_validation_counts_as_a_program_where_it_is_on():
    config = small_config(pipe=2, m=2)
    assert config.data.validation == ""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, validation="held_out.jsonl"))
    found = report.step_instructions(make_program(config, programs.layout_for_neuron(config, 2)))
    assert list(found) == [*PHASES, "update", "eval"]


def test_a_loop_over_microbatches_multiplies_the_unrolled_program_only():
    def of(m):
        config = planned_config(m=m, rows=m, data=1)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate="scan"))
        program = make_program(config, programs.layout_for_neuron(config, 1))
        return report.step_instructions(program)["train"]

    two, eight = of(2), of(8)
    assert eight.looped == pytest.approx(two.looped, rel=0.02)
    assert eight.unrolled > 2 * two.unrolled


def plan_found(unrolled_count, largest, *, name="train"):
    program = {"unrolled": unrolled_count, "looped": 9, "largest": largest, "judged": unrolled_count}
    small = {"unrolled": 1, "looped": 1, "largest": 1, "judged": 1}
    limits = {
        "limit": compiler_limits.PROGRAM_LIMIT,
        "operation_limit": compiler_limits.operation_limit("trn1n.32xlarge"),
    }
    return {"programs": {"update": small, name: program}} | limits


def test_plan_prints_the_estimate_the_limits_and_what_to_change():
    advice = {(5_000_001, 9): "train.accumulate=programs", (9, 150_001): "model.cross_entropy=chunked", (9, 9): "below"}
    advice |= {(3_600_000, 9): "MAY EXCEED", (3_500_000, 9): "below", (9, 108_000): "MAY EXCEED"}
    for (unrolled_count, largest), expected in advice.items():
        first, second = report.instruction_lines(plan_found(unrolled_count, largest))
        assert " train " in first
        assert_names(second, "5,000,000", "150,000", expected)
        assert ("WARNING" in second) == (unrolled_count > 5_000_000 or largest > 150_000)


def test_the_limit_of_a_program_is_that_of_the_compilers_flag():
    flags = "-O1 --internal-max-instruction-limit=20000000 --internal-hlo2tensorizer-options='--tiled-inst-limit=7'"
    assert compiler_limits.program_limit(flags) == 20_000_000
    assert compiler_limits.program_limit("-O1") == 5_000_000
    found = plan_found(14_000_000, 9, name="microbatch") | {"limit": compiler_limits.program_limit(flags)}
    assert_names(report.instruction_lines(found)[1], "below", "--internal-max-instruction-limit", "20,000,000")


def test_a_kernel_counts_as_what_it_computes():
    """Its primitive has the reference: FLOPs and instructions of that, and bytes of its operands alone."""
    q, kv = shape(1, 512, 4, 128, dtype=jnp.bfloat16), shape(1, 512, 2, 128, dtype=jnp.bfloat16)
    jaxpr = live_jaxpr(traced(lambda q, k, v: nki.attention(q, k, v), q, kv, kv))
    [(flops, num_bytes, trips)] = products(jaxpr)
    assert (flops, trips) == (2 * 2 * 4 * 512 * 512 * 128, 1)
    assert num_bytes == 2 * 512 * 128 * (2 * 4 + 2 * 2) + 2 * 4 * 4 * 512  # q, out, k, v; two statistics in fp32
    # two products of 4 heads, [512, 128] x [128, 512] and [512, 512] x [512, 128], and the softmax between
    assert instructions.estimate_instructions(jaxpr, num_shards=1).unrolled > 4 * (4 + 16)
