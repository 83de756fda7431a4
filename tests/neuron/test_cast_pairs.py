"""Casts to bf16 and back in the StableHLO that neuronx-cc is given, which it was seen to drop.

`tests/spine/test_precision.py` follows them through loops and calls in the traced program.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir
from planned import small_config

from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.precision import NEAREST, Rounding
from hlat_jax.program import make_program

MOVES = {"reshape", "transpose", "broadcast_in_dim", "slice", "dynamic_slice", "reverse", "optimization_barrier"}
# Dropped ones keep fp32 for longer: results of bf16 products, and the gradient of a microbatch before it is added.
HARMLESS = {"attention.py", "cross_entropy.py", "rope.py", "precision.py"}


def cast_pairs(lowered):
    """Returns the files of all casts from bf16 to fp32 of a value that was cast from fp32, and perhaps moved."""
    files = []

    def visit(op):
        if casts(op) == ("bf16", "f32"):
            source = op.operands[0].owner
            while getattr(source, "name", "").removeprefix("stablehlo.") in MOVES:
                source = source.operands[0].owner
            if casts(source) == ("f32", "bf16"):
                files.extend(re.findall(r'"([^"]+\.py)"', str(op.location))[:1])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return [pathlib.PurePath(file).name for file in files]


def casts(op):
    """Returns the dtypes of the operand and the result of a cast; None for anything else."""
    if getattr(op, "name", "") != "stablehlo.convert":
        return None
    return tuple(str(value.type.element_type) for value in (op.operands[0], op.results[0]))


@pytest.mark.parametrize(
    ("stochastic", "simulate"),
    [("software", "none"), *(pytest.param("auto", core, marks=pytest.mark.slow) for core in ("neuron", "neuron_all"))],
)
def test_lowered_step_rounds_by_no_cast_that_may_be_dropped(stochastic, simulate):
    config = small_config(policy="bf16_sr", m=2)
    changed = {"simulate": simulate, "stochastic_rounding": stochastic}
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, **changed))
    platform = "neuron" if simulate == "none" else "cpu"
    program = make_program(config, planned_layout(config, 1, platform=platform))
    found = cast_pairs(program.step.trace(*program.step_arguments).lower(lowering_platforms=(platform,)))
    assert set(found) == (HARMLESS if simulate == "none" else set())


def test_lowered_sums_hold_such_a_cast_only_if_rounded_by_casts():
    def in_software(total, term):
        rounding = Rounding((jnp.uint32(7), jnp.uint32(3)))
        return rounding.at(1).add(rounding.at(0).add(total, term), term)

    def by_casts(total, term):
        return NEAREST.write(total + term, jnp.bfloat16, name="").reshape(4, 2).astype(jnp.float32)

    bf16, fp32 = (jax.ShapeDtypeStruct((8,), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    assert cast_pairs(jax.jit(in_software).trace(bf16, bf16).lower(lowering_platforms=("neuron",))) == []
    assert cast_pairs(jax.jit(by_casts).trace(fp32, fp32).lower(lowering_platforms=("neuron",)))
