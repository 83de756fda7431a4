"""The step as it is lowered for Neuron, and what must not stand in it."""

from hlat_jax.program import make_program


def lowered_for_neuron(config, layout):
    return make_program(config, layout).trace_step().lower(lowering_platforms=("neuron",)).as_text()


def assert_no_forbidden_operations(text):
    for word in (
        "stablehlo.case",
        "stablehlo.if",
        "custom_call",
        "complex<",
        "threefry",
        "f64>",
        "top_k",
        "reduce_window",
    ):
        assert word not in text, word
    assert "rng" not in text
    for line in text.splitlines():
        if "stablehlo.reduce(" in line:
            assert line.count("init:") == 1, line  # more is variadic: argmax and its like
    for condition in text.split("stablehlo.while")[1:]:
        compare = condition.split("cond {")[1].split("stablehlo.return")[0]
        operations = [line for line in compare.splitlines() if "stablehlo." in line]
        # a loop of known length: one comparison of the counter with a constant
        assert all("stablehlo.constant" in line or "stablehlo.compare" in line for line in operations), compare
        assert "stablehlo.constant" in compare
