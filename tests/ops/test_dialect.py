"""Which implementation of an op serves, and why the others do not."""

import dataclasses

import pytest
from planned import small_config
from refusals import assert_names, refused

from hlat_jax.config import OP_KEYS
from hlat_jax.ops.choices import choices
from hlat_jax.ops.dialect import Implementation, Op
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.virtual_devices import planned_layout


def short_only(*, length):
    return [f"{length} is above 4"] if length > 4 else []


@pytest.fixture
def op():
    op = Op("model.doubling")
    op.register(Implementation("sum", lambda x: x + x, {"*": 10}))
    op.register(Implementation("shift", lambda x: 2 * x, {"cpu": 20, "*": 10}, short_only))
    op.register(Implementation("chip", lambda x: x * 2, {"neuron": 1}))
    op.register(Implementation("warp", lambda x: x * 2, {"cuda": 20}))
    return op


# what is asked for -> the choice, its reason and one against another
CHOICES = [
    (("auto", "cpu", 2), "shift", "level 20 on cpu", ("sum", "level 10 on cpu, where shift has 20")),
    (("auto", "rocm", 2), "sum", "level 10 on rocm", ("shift", "level 10 on rocm, where sum has 10")),
    (("auto", "gpu", 2), "warp", "level 20 on gpu", ("chip", "does not run on gpu")),  # JAX lowers for cuda
    (("auto", "cpu", 5), "sum", "level 10 on cpu", ("shift", "5 is above 4")),
    (("auto", "cpu", None), "sum", "level 10 on cpu", ("shift", "may not serve the call")),
    (("chip", "neuron", 2), "chip", "requested", ("sum", "model.doubling='chip' was requested")),
]  # fmt: skip


def test_a_choice_has_a_reason_against_every_other(op):
    for (wanted, platform, length), name, because, (other, why) in CHOICES:
        choice = op.choose(wanted, platform, call=None if length is None else {"length": length})
        assert choice.name == name
        assert choice.because.startswith(because)
        assert choice.passed_over[other].startswith(why)
        assert {name, *choice.passed_over} == set(op.names)
    assert_names(str(op.choose("sum", "cpu", call={"length": 1})), "sum (", "shift: ", "chip: ", "warp: ")


def test_what_cannot_serve_is_refused_before_tracing(op):
    unsupported = ("='shift'", "5 is above 4", "auto, sum, chip, warp")
    alone = Op("model.doubling")
    alone.register(Implementation("shift", abs, {"cpu": 1}, short_only))
    for call, *facts in (
        (lambda: op.choose("shift", "cpu", call={"length": 5}), *unsupported),
        (lambda: op.run("shift", 21, length=5), *unsupported),
        (lambda: op.run("auto", 21, length=2), "='auto'", "sum, shift, chip, warp"),
        (lambda: op.choose("fast", "cpu"), "='fast'", "auto, sum, shift"),
        (lambda: op.choose("chip", "cpu"), "='chip'", "neuron", "cpu", "auto, sum"),
        (lambda: alone.choose("auto", "cpu", call={"length": 5}),),
        (lambda: op.register(Implementation("sum", abs, {"*": 0})), "'sum'"),
    ):
        with refused("model.doubling", *facts):
            call()
    assert op.run("shift", 21, length=2) == 42


def test_a_window_that_a_kernel_lacks_is_refused_early():
    config = small_config()
    data = dataclasses.replace(config.data, seq_len=512)
    for layers, said in (("", "window=100"), ("1:2", "window=by layer")):
        for window, is_refused in ((100, True), (512, False)):  # rows of 512 tokens: the second hides nothing
            options = {"sliding_window": window, "sliding_window_layers": layers, "max_positions": 512}
            for name, platform in (("nki", "neuron"), ("triton", "cuda")):
                model = dataclasses.replace(config.model, attention=name, allow_nki_on_trn1=True, **options)
                of_run = dataclasses.replace(config, model=model, data=data)
                layout = planned_layout(of_run, 1, platform="neuron", chip="trn2")
                if is_refused:
                    with refused(f"model.attention='{name}'", said):
                        choices(of_run, layout, platform=platform)
                else:
                    assert choices(of_run, layout, platform=platform)["attention"].name == name


def test_a_simulated_core_sees_no_kernel_of_attention():
    """On an H100 `auto` took cuDNN's, which the simulator refused."""
    config = small_config()
    model, data = dataclasses.replace(config.model, attention="auto"), dataclasses.replace(config.data, seq_len=512)
    config = dataclasses.replace(config, model=model, data=data)
    layout = planned_layout(config, 1, platform="neuron")
    for simulate, name in (("none", "triton"), ("neuron", "einsum")):  # cuDNN is not here
        of_run = dataclasses.replace(config, precision=dataclasses.replace(config.precision, simulate=simulate))
        assert choices(of_run, layout, platform="cuda")["attention"].name == name


def test_the_config_names_the_keys_of_all_ops():
    assert set(OP_KEYS) == set(OPS)
