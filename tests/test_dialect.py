"""Which implementation of an op serves, and why the others do not."""

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


def test_auto_takes_the_highest_level_and_of_equal_ones_the_first(op):
    assert op.choose("auto", "cpu").name == "shift"
    assert op.choose("auto", "cuda").name == "sum"


def test_a_name_serves_wherever_it_runs_whatever_its_level(op):
    assert op.choose("chip", "neuron").name == "chip"
    assert op.choose("sum", "cpu").name == "sum"


def test_every_other_implementation_has_its_reason(op):
    assert op.choose("auto", "cpu").passed_over == {
        "sum": "level 10 on cpu, where shift has 20",
        "chip": "does not run on cpu",
    }
    assert op.choose("auto", "neuron").passed_over["chip"] == "level 1 on neuron, where sum has 10"


def test_a_name_that_is_unknown_or_runs_elsewhere_is_refused(op):
    with pytest.raises(ValueError, match=r"^model.doubling='fast' is not one of auto, sum, shift\.$"):
        op.choose("fast", "cpu")
    with pytest.raises(ValueError, match=r"^model.doubling='chip' serves neuron and not cpu; use one of auto, sum, "):
        op.choose("chip", "cpu")


def test_a_call_that_cannot_be_served_raises_with_the_reasons_and_never_falls_back(op):
    assert op.run("shift", 21, length=2) == 42
    with pytest.raises(ValueError, match=r"^model.doubling='shift' cannot serve: 5 is above 4. Others are sum, chip."):
        op.run("shift", 21, length=5)


def test_a_name_is_registered_once(op):
    with pytest.raises(ValueError, match="there is an implementation 'sum' already"):
        op.register(Implementation("sum", abs, {"*": 0}))
    with pytest.raises(ValueError, match="'auto' already"):
        op.register(Implementation("auto", abs, {"*": 0}))
