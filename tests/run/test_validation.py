"""Validation in microbatches: the same loss as of whole batches, and a program that does not grow with their number."""

import jax
import numpy as np
import pytest

from hlat_jax.data.held_out import HeldOut
from hlat_jax.neuron import programs
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import traced_programs
from hlat_jax.run.validation import Validation


def config_of(small, accumulate, *, num_microbatches=4, **parallel):
    small.data.batch_size = 4 * num_microbatches
    small.model.update(fuse_qkv=False)
    small.parallel.update({"data": 2, "tensor": 2} | parallel)
    small.train.update(accumulate=accumulate, num_microbatches=num_microbatches)
    return resolve(small)


@pytest.mark.parametrize("accumulate", ["programs", "scan"])
def test_a_batch_is_evaluated_in_its_microbatches(accumulate, small, make_batch):
    config = config_of(small, accumulate)
    layout = layout_over(config, jax.devices()[:4])
    program = make_program(config, layout)
    params = program.init_state()["params"]
    held_out = HeldOut([make_batch(7, config), make_batch(8, config)], num_bytes=1000, num_skipped=0, coverage=None)
    eval_step = program.trace_eval_step().lower().compile()  # which takes a batch of this shape and no other
    assert program.num_eval_parts == 4
    row = Validation({"": held_out}, eval_step, layout, num_parts=program.num_eval_parts)(params)
    whole = Validation({"": held_out}, program.eval_step, layout)(params)
    assert row["eval_tokens"] == whole["eval_tokens"] > 0
    assert row["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)  # another order of fp32 sums


def shapes(program):
    return [value.aval.shape for value in jax.tree.leaves(traced_programs(program)["eval"]().jaxpr.jaxpr.invars)]


@pytest.mark.parametrize("accumulate", ["programs", "scan"])
def test_evaluation_does_not_grow_with_microbatches(accumulate, small):
    def of(m):
        config = config_of(small, accumulate, num_microbatches=m)
        return shapes(make_program(config, programs.layout_for_neuron(config, 4)))

    assert of(2) == of(8)


def test_stages_evaluate_a_batch_in_one_program(small):
    small.model.num_layers = 2
    config = config_of(small, "auto", pipe=2)
    program = make_program(config, programs.layout_for_neuron(config, 8))
    assert program.num_eval_parts == 1
    assert np.prod(shapes(program)[-1]) == config.data.batch_size * config.data.seq_len
