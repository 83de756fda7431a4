"""The step as it is lowered for Neuron, and what must not stand in it."""

from hlat_jax.neuron import lint
from hlat_jax.program import make_program


def lowered_for_neuron(config, layout):
    return make_program(config, layout).trace_step().lower(lowering_platforms=("neuron",)).as_text()


def assert_no_forbidden_operations(text):
    """By the lint, whose every rule finds its bad program in tests/neuron/test_lint.py.

    Cumulative sums are only a warning there. Groups of devices, which are not placed as on a node, are left out.
    """
    found = [one for one in lint.check_module(text) if one.severity == "error" or one.rule.startswith("RED")]
    assert not [one for one in found if not one.rule.startswith("CC")], found
    assert "rng" not in text
