"""Which implementation of an op serves, and why the others do not."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.ops.dialect import Implementation, Op


def short_only(*, length):
    return [f"{length} is above 4"] if length > 4 else []


@pytest.fixture
def op():
    op = Op("model.doubling")
    op.register(Implementation("sum", lambda x: x + x, {"*": 10}))
    op.register(Implementation("shift", lambda x: 2 * x, {"cpu": 20, "*": 10}, short_only))
    op.register(Implementation("chip", lambda x: x * 2, {"neuron": 1}))
    return op


def test_auto_picks_the_highest_level_and_the_first_of_ties(op):
    assert op.choose("auto", "cpu", call={"length": 2}).name == "shift"
    assert op.choose("auto", "cuda", call={"length": 2}).name == "sum"


def test_auto_skips_unsupported_implementations_with_the_reason(op):
    choice = op.choose("auto", "cpu", call={"length": 5})
    assert choice.name == "sum"
    assert choice.passed_over == {"shift": "5 is above 4", "chip": "does not run on cpu"}


def test_auto_skips_conditional_implementations_when_the_call_is_unknown(op):
    choice = op.choose("auto", "cpu")
    assert choice.name == "sum"
    assert choice.passed_over["shift"] == "may not serve the call, whose shapes are not known here"


def test_explicit_name_ignores_levels(op):
    assert op.choose("chip", "neuron").name == "chip"
    assert op.choose("sum", "cpu").name == "sum"


def test_choice_has_a_reason_for_itself_and_every_other_implementation(op):
    choice = op.choose("auto", "cpu", call={"length": 1})
    assert choice.because == "level 20 on cpu"
    assert choice.passed_over == {
        "sum": "level 10 on cpu, where shift has 20",
        "chip": "does not run on cpu",
    }
    assert op.choose("auto", "neuron").passed_over["chip"] == "level 1 on neuron, where sum has 10"
    assert op.choose("sum", "cpu").passed_over["shift"].startswith("may not serve the call")
    asked = op.choose("sum", "cpu", call={"length": 1})
    assert str(asked) == (
        "sum (requested); not shift: model.doubling='sum' was requested; not chip: does not run on cpu"
    )


class Measured:
    source, extent = "times.json", " (at 1 of its 2 rows)"

    def __init__(self, **seconds):
        self.times = seconds

    def entry(self, op_key, call):
        return self if (op_key, call) == ("model.doubling", {"length": 2}) else None


def test_measured_times_override_levels_for_the_measured_call(op):
    times = Measured(sum=0.001, shift=0.0025)
    choice = op.choose("auto", "cpu", call={"length": 2}, times=times)
    assert (choice.name, choice.because) == ("sum", "1 ms, the fastest in times.json (at 1 of its 2 rows)")
    assert choice.passed_over["shift"] == "2.5 ms, 2.50 times as long as sum"
    other = op.choose("auto", "cpu", call={"length": 3}, times=times)
    assert (other.name, other.because) == ("shift", "level 20 on cpu; times.json has no times for this call")
    assert op.choose("shift", "cpu", call={"length": 2}, times=times).name == "shift"


def test_unmeasured_implementation_is_skipped_when_others_are_measured(op):
    choice = op.choose("auto", "cpu", call={"length": 2}, times=Measured(sum=0.001))
    assert choice.name == "sum"
    assert choice.passed_over["shift"] == "not measured"


def test_fastest_measured_is_not_picked_where_it_cannot_run(op):
    assert op.choose("auto", "cpu", call={"length": 2}, times=Measured(chip=1e-6, sum=0.2)).name == "sum"


def test_call_without_any_implementation_raises_with_every_reason():
    op = Op("model.doubling")
    op.register(Implementation("shift", abs, {"cpu": 1}, short_only))
    op.register(Implementation("chip", abs, {"neuron": 1}))
    message = r"^model.doubling has no implementation that serves this call on cpu: shift: 5 is above 4; chip: does not"
    with pytest.raises(ValueError, match=message):
        op.choose("auto", "cpu", call={"length": 5})


def test_unsupported_explicit_name_is_refused_before_tracing(op):
    with pytest.raises(
        ValueError, match=r"^model.doubling='shift' cannot serve this call: 5 is above 4. Use one of auto, sum, chip."
    ):
        op.choose("shift", "cpu", call={"length": 5})


def test_gpu_devices_use_the_cuda_lowering():
    op = Op("model.doubling")
    op.register(Implementation("sum", lambda x: x + x, {"*": 10}))
    op.register(Implementation("warp", lambda x: x * 2, {"cuda": 20}))
    assert op.choose("auto", "gpu").name == op.choose("auto", "cuda").name == "warp"
    assert op.choose("auto", "rocm").name == "sum"


@pytest.fixture
def waves():
    op = Op("model.wave")
    op.register(Implementation("sin", lambda x, y: jnp.sin(x), {"cpu": 2, "*": 1}))
    op.register(Implementation("cos", lambda x, y: jnp.cos(x), {"cuda": 2}))
    op.register(Implementation("tanh", lambda x, y: jnp.tanh(x) if y is None else y, {"neuron": 2}))
    return op


KERNELS = {"sine": "cpu", "cosine": "cuda", "tanh": "neuron"}


def wave_text(op, names, *platforms):
    traced = jax.jit(lambda x: op.run(names, x, None)).trace(jnp.ones(3))
    return [traced.lower(lowering_platforms=(one,)).as_text() for one in platforms]


def test_one_trace_lowers_to_the_implementation_of_each_platform(waves):
    names = {where: choice.name for where, choice in waves.choose_each("auto", ("cpu", "gpu", "neuron")).items()}
    assert names == {"cpu": "sin", "gpu": "cos", "neuron": "tanh"}
    for platform, text in zip(("cpu", "cuda", "neuron"), wave_text(waves, names, "cpu", "cuda", "neuron"), strict=True):
        assert [KERNELS[kernel] for kernel in KERNELS if f"stablehlo.{kernel}" in text] == [platform]


def test_one_implementation_for_several_platforms_adds_no_branch(waves):
    [plain] = wave_text(waves, "sin", "cpu")
    assert wave_text(waves, {"cpu": "sin", "rocm": "sin"}, "cpu") == wave_text(waves, {"cpu": "sin"}, "cpu") == [plain]
    assert "stablehlo.case" not in plain


def test_lowering_for_an_unlisted_platform_raises(waves):
    with pytest.raises(NotImplementedError):
        wave_text(waves, {"cpu": "sin", "neuron": "tanh"}, "cuda")


def test_empty_platform_mapping_is_refused(waves):
    with pytest.raises(ValueError, match=r"model.wave={} names no platform; give platform -> name"):
        waves.run({}, jnp.ones(3), None)


def test_python_scalars_stay_scalars_with_several_platforms():
    op, seen = Op("model.power"), []
    for name in ("square", "cube"):
        op.register(Implementation(name, lambda x, exponent: x ** (seen.append(exponent) or exponent), {"*": 1}))
    jax.make_jaxpr(lambda x: op.run({"cpu": "square", "cuda": "cube"}, x, 2))(jnp.ones(3))
    assert [type(exponent) for exponent in seen] == [int, int]


def test_export_for_several_platforms_holds_all_their_kernels(waves):
    exported = jax.export.export(
        jax.jit(lambda x: waves.run({"cpu": "sin", "cuda": "cos"}, x, None)), platforms=("cpu", "cuda")
    )(jnp.ones(3))
    text = exported.mlir_module()
    assert "stablehlo.sine" in text
    assert "stablehlo.cosine" in text
    np.testing.assert_allclose(jax.jit(exported.call)(jnp.ones(3)), np.sin(np.ones(3)), rtol=1e-6)


def test_name_that_is_unknown_or_for_another_platform_is_refused(op):
    with pytest.raises(ValueError, match=r"^model.doubling='fast' is not one of auto, sum, shift\.$"):
        op.choose("fast", "cpu")
    with pytest.raises(ValueError, match=r"^model.doubling='chip' runs on neuron, not on cpu; use one of auto, sum, "):
        op.choose("chip", "cpu")


def test_unsupported_call_raises_instead_of_falling_back(op):
    assert op.run("shift", 21, length=2) == 42
    with pytest.raises(
        ValueError, match=r"^model.doubling='shift' cannot serve this call: 5 is above 4. Use one of auto, sum, chip."
    ):
        op.run("shift", 21, length=5)
    for unresolved in ("auto", "fast"):
        with pytest.raises(
            ValueError, match=rf"^model.doubling='{unresolved}' is not one of sum, shift, chip; `choose`"
        ):
            op.run(unresolved, 21, length=2)


def test_a_name_is_registered_once(op):
    with pytest.raises(ValueError, match="implementation 'sum' is already registered"):
        op.register(Implementation("sum", abs, {"*": 0}))
    with pytest.raises(ValueError, match="'auto' is already registered"):
        op.register(Implementation("auto", abs, {"*": 0}))
