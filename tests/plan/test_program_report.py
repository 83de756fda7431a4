"""The report of a training program: products before and after a pass, where collectives sit, bytes as XLA has them."""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from foreign_models import batch, user_model
from programs import training_program
from refusals import assert_names

from hlat_jax.batch import SumAndCount
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.passes.compile import Stage, TrainingProgram
from hlat_jax.plan.program_report import place, report
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve


def report_of(**options):
    loss, params = user_model("plain")
    program = training_program(loss, optax.adam(1e-2), options=options, params=params)
    state = program.init(params)
    compiled = program.step.lower(state, batch(0), 0.0).compile()
    return report(program, state, batch(0)), compiled.memory_analysis()


def test_report_counts_matmuls_by_dtype_before_and_after_autocast():
    found, _ = report_of(num_microbatches=2, autocast="bf16")
    # of two microbatches 3 products forward, and backward one less than twice that: the input needs no gradient
    rows = [line.split()[:3] for line in str(found).splitlines()[1:3]]
    assert rows == [["loss", "16", "float32"], ["autocast", "16", "bfloat16"]]


def test_report_matches_xla_bytes_and_has_no_collectives_on_one_device():
    found, memory = report_of()
    assert_names(str(found), f"{memory.argument_size_in_bytes:,} ", f"{memory.alias_size_in_bytes:,} ")
    assert found.predicted_bytes > 0
    assert found.collectives == ()


def test_report_locates_zero_3_gathers_and_scatters():
    found, _ = report_of(zero=3)
    places = collections.Counter((c.kind, place(c)) for c in found.collectives)
    assert places["all-gather", "forward"] == 5
    assert places["reduce-scatter", "backward"] == 5
    assert_names(str(found), "reduce-scatter over fsdp, backward: 5 ")


@pytest.mark.quick_cases("step-outside")
@pytest.mark.parametrize(("when", "where"), [("step", "outside"), ("microbatch", "outside loop")])
def test_gradients_are_reduced_where_configured(small, when, where):
    small.parallel.update(data=8, reduce_gradients=when)
    small.data.batch_size = 16
    small.train.num_microbatches = 2
    config = resolve(small)
    program = make_program(config, make_layout(config.parallel, jax.devices()))
    found = report(TrainingProgram([Stage("loss", program.training, str)]), *program.step_arguments[:2])
    carried = collections.Counter()
    for collective in found.collectives:
        assert collective.axes == ("data",)
        carried[place(collective)] += collective.trips * collective.payload_bytes
    of_layers = sum(x.size for x in jax.tree.leaves(program.abstract_state["params"]["layers"]) if x.ndim > 2)
    assert carried[where] >= 4 * of_layers


def deep(params, batch):
    """A loss over a loop of layers, whose products a budget may keep or make again."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    x = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])[0]
    return SumAndCount(jnp.sum(jnp.square(x[:, 0] - batch["y"])), batch["y"].size)


def test_step_report_and_budget_use_the_xla_options_of_the_layout(monkeypatch):
    monkeypatch.setattr(xla_options, "compiler_options", lambda layout: {"no_such_option": layout.mesh.size})
    key, rows = jax.random.key(0), {"x": jnp.ones((2048, 8)), "y": jnp.zeros(2048)}
    params = {"in": jax.random.normal(key, (8, 128)) / 8, "layers": jax.random.normal(key, (6, 128, 128)) / 12}

    def made(**options):
        options = dict(zero=1, **options)
        return training_program(deep, optax.sgd(1e-3), options=options, params=params, batch=rows)

    program = made()
    state = jax.jit(program.init)(params)
    for run in (
        lambda: program.step(state, rows, 0.0),
        lambda: report(program, state, rows),
        lambda: made(memory_budget="1GiB"),
    ):
        with pytest.raises(Exception, match="'no_such_option'"):
            run()
