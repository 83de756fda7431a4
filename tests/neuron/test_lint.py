"""The lint for Neuron: a bad and a clean program per rule, the shipped configs, and the reported lines.

    PYTHONPATH=. python tests/neuron/test_lint.py

rewrites the table of docs/neuron-lint.md after an intended change of the rules.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_collectives import collectives
from flax import linen
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planned import small_config

from hlat_jax.cli import config_files
from hlat_jax.neuron import lint, partitioned, programs
from hlat_jax.neuron.module import Program
from hlat_jax.neuron.rules import LINTED, RULES
from hlat_jax.parallel.pipeline import PHASES
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.plan.collectives import count_collectives
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.stack import rematerialized

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "neuron-lint.md"
X = jnp.ones((4, 4))
I = jnp.zeros((4,), jnp.int32)  # noqa: E741


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def module(body, arguments="%x: tensor<4xf32>", result="tensor<4xf32>"):
    """Returns the StableHLO text of one function, for operations that JAX does not emit."""
    return f"module @m {{ func.func public @main({arguments}) -> {result} {{ {body} }} }}"


def constant(kind, value):
    return module(f"%0 = stablehlo.constant dense<{value}> : tensor<{kind}> return %x : tensor<4xf32>")


def typed(kind):
    return module(f"return %x : tensor<{kind}>", f"%x: tensor<{kind}>", f"tensor<{kind}>")


def over_mesh(fn, *, sizes=(8,), dtype=jnp.float32):
    """Returns the text of a shard_map of `fn` over a mesh of virtual devices."""
    names = tuple("abcdefgh"[: len(sizes)])
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
    argument = shape(480, dtype=dtype)
    lowered = jax.jit(mapped).trace(argument).lower(lowering_platforms=("neuron",))
    return lowered.as_text(debug_info=True)


def ring(num_devices, stride):
    pairs = [(core, (core + stride) % num_devices) for core in range(num_devices)]
    return over_mesh(lambda x: jax.lax.ppermute(x, "a", pairs), sizes=(num_devices,))


def windows(**options):
    window = {"window_dimensions": (2, 2), "window_strides": (1, 1), "padding": "VALID"}
    return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window, **options)


def convolution(**options):
    image, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3))
    return lambda x: jax.lax.conv_general_dilated(image * x[0, 0], kernel, padding=[(0, 0)] * 2, **options)


def doc_scatter(operand, count):
    """The example on the page of EVRF031."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    indices = jax.lax.iota(jnp.int32, count).reshape(count, 1)
    return jax.lax.scatter(operand, indices, jnp.ones((count, 4)), numbers)


def ffi(target):
    return lambda x: jax.ffi.ffi_call(target, shape(4, 4))(x)


def native_kernel(path):
    config = json.dumps({"kernel": {"artifact": path}}).replace('"', '\\"')
    call = 'stablehlo.custom_call @AwsNeuronCustomNativeKernel(%x) {backend_config = "' + config + '"}'
    return module(f"%0 = {call} : (tensor<4xf32>) -> tensor<4xf32> return %0 : tensor<4xf32>")


def rounded(bits):
    call = f"stablehlo.reduce_precision %x, format = {bits} : tensor<4xf32>"
    return module(f"%0 = {call} return %0 : tensor<4xf32>")


def legacy_rng():
    constants = (
        "%a = stablehlo.constant dense<0.0> : tensor<f32> %b = stablehlo.constant dense<1.0> : tensor<f32> "
        "%s = stablehlo.constant dense<4> : tensor<1xi64>"
    )
    call = "stablehlo.rng %a, %b, %s, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>)"
    return module(f"{constants} %0 = {call} -> tensor<4xf32> return %0 : tensor<4xf32>")


def power(kind):
    return module(
        f"%0 = stablehlo.power %x, %x : tensor<4x{kind}> return %0 : tensor<4x{kind}>",
        f"%x: tensor<4x{kind}>",
        f"tensor<4x{kind}>",
    )


def keyed(impl, draw):
    return lambda x: x + draw(jax.random.key(0, impl=impl))


def argless(count):
    return (lambda *xs: sum(xs),) + (shape(2),) * count


def summed_over(num_subsets):
    """Sums over that many different subsets of the five axes of a mesh of 32 devices."""
    subsets = [[axis for bit, axis in enumerate("abcde") if number >> bit & 1] for number in range(1, num_subsets + 1)]
    return over_mesh(lambda x: sum(jax.lax.psum(x, axes) for axes in subsets), sizes=(2,) * 5)


def lookup_gradient(rows):
    return jax.grad(lambda table: table[jnp.clip(I, 0, rows - 1)].sum()), shape(rows, 8)


def sort_of(dtype):
    return jnp.sort, shape(8, dtype=dtype)


def algorithm(name):
    return lambda x: jax.lax.dot(x, x, precision=name)


def split_over_eight(fn):
    """A function of an array whose first dimension is split over 8 devices."""
    mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))
    return fn, jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("a")))


def carried_sum(dtype):
    def total(flat):
        return jax.lax.fori_loop(1, 8, lambda i, h: h + flat[i], flat[0])

    return total, shape(8, dtype=dtype)


def gather_at(kind):
    return module(
        '%0 = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], '
        "start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>}> : "
        f"(tensor<4xf32>, tensor<2x1x{kind}>) -> tensor<2xf32> return %0 : tensor<2xf32>",
        f"%x: tensor<4xf32>, %i: tensor<2x1x{kind}>",
        "tensor<2xf32>",
    )


@dataclasses.dataclass(frozen=True)
class Flagged:
    """A program that is compiled with NEURON_CC_FLAGS."""

    program: str
    flags: str


OVERLAP = "--target=trn1 --enable-ccop-compute-overlap"


def contracted(dims, rows):
    """A product of some rows with a matrix [n, k] or [k, n]."""
    return (lambda x, w: jnp.einsum(f"tk,{dims}->tn", x, w)), shape(rows, 1024), shape(1024, 1024)


# rule: (bad program, its clean twin); a program is StableHLO text, a function of X, or a function and its arguments
CASES = {
    "LW01": (lambda x: jnp.linalg.svd(x)[1], lambda x: x * 2),
    "CF01": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), lambda x: jnp.where(x.sum() > 0, x, -x)),
    "CF03": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + 1, x),
    ),
    "CF04": (lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=3)[0], lambda x: x + 3),
    "RED01": (lambda x: jnp.argmax(x), lambda x: jnp.max(x)),
    "RED02": (lambda x: jnp.cumsum(x, axis=0), lambda x: jax.lax.associative_scan(jnp.add, x)),
    "RED03": (windows(window_dilation=(2, 2)), windows()),
    "RNG01": (keyed("threefry2x32", jax.random.normal), keyed("rbg", jax.random.normal)),
    "RNG02": (
        lambda x: jax.lax.rng_bit_generator(
            jnp.zeros(4, jnp.uint32), (4,), algorithm=jax.lax.RandomAlgorithm.RNG_THREE_FRY
        )[1],
        lambda x: jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,))[1],
    ),
    "RNG03": (legacy_rng(), keyed("rbg", jax.random.normal)),
    "RNG04": (keyed("rbg", lambda key: jax.random.randint(key, (4,), 0, 9)), keyed("rbg", jax.random.uniform)),
    "RP01": (rounded("e8m7"), lambda x: x.astype(jnp.bfloat16)),
    "RP02": (rounded("e8m23"), rounded("e8m7")),
    "CB01": (ffi("mine"), ffi("AwsNeuronSilu")),
    "OP01": (lambda x: jax.lax.linalg.triangular_solve(x, x), lambda x: x @ x),
    "OP02": (lambda x: jax.lax.top_k(x, 2)[0], lambda x: jnp.max(x)),
    "OP03": ((lambda i: jax.lax.top_k(i, 2)[0], I), lambda x: jax.lax.top_k(x, 2)[0]),
    "OP04": (sort_of(jnp.float32), sort_of(jnp.int32)),
    "OP05": (
        (lambda i: jax.lax.shift_right_arithmetic(i, i), shape(4, dtype=jnp.int8)),
        (lambda i: jax.lax.shift_right_arithmetic(i, i), I),
    ),
    "OP08": (
        convolution(window_strides=(2, 2), lhs_dilation=(2, 2)),
        convolution(window_strides=(2, 2)),
    ),
    "DT01": (lambda x: jax.lax.complex(x, x), lambda x: x),
    "DT02": (lambda x: x.astype(jnp.float8_e4m3fn), lambda x: x.astype(jnp.float8_e4m3)),
    "DT03": (lambda x: x.astype(jnp.float8_e4m3fnuz), lambda x: x.astype(jnp.float8_e5m2)),
    "DT04": (lambda x: x.astype(jnp.float4_e2m1fn), lambda x: x.astype(jnp.float8_e4m3)),
    "DT08": (lambda x: x.astype(jnp.float8_e3m4), lambda x: x.astype(jnp.float8_e4m3)),
    "DT09": (lambda x: x.astype(jnp.float8_e8m0fnu), lambda x: x.astype(jnp.float8_e5m2)),
    "DT05": (typed("4xf64"), typed("4xf32")),
    "DT06": (typed("4xi64"), typed("2xui64")),
    "DT07": (constant("ui64", 2**32), constant("ui64", 2**32 - 1)),
    "INT01": ((lambda i: i @ i, I), lambda x: x @ x),
    "INT02": ((lambda i: jnp.zeros(9, jnp.int32).at[i].add(1), I), (lambda i: jnp.zeros(9).at[i].add(1.0), I)),
    "INT03": (
        over_mesh(lambda x: jax.lax.psum(x, "a"), dtype=jnp.int32),
        over_mesh(lambda x: jax.lax.psum(x, "a")),
    ),
    "INT04": (power("i64"), power("i32")),
    "GS01": ((lambda x: doc_scatter(x, 10), shape(3, 4)), (lambda x: doc_scatter(x, 3), shape(3, 4))),
    "GS02": (
        (lambda x, i: x.at[i].get(mode="clip"), X, I),
        (lambda x, i: x.at[jnp.clip(i, 0, 3)].get(mode="clip"), X, I),
    ),
    "GS03": (lookup_gradient(8192), lookup_gradient(64)),
    "SH01": (typed("?xf32"), typed("4xf32")),
    "SH02": ((lambda x: x * 2, shape(10**9)), (lambda x: x * 2, shape(10**8))),
    "SH03": (argless(129), argless(128)),
    "DN01": (
        (lambda x: x * 2, shape(2**18)),
        (jax.jit(lambda x: x * 2, donate_argnums=0), shape(2**18)),
    ),
    "DA01": (algorithm("BF16_BF16_F32"), lambda x: x @ x),
    "DG01": (contracted("nk", rows=127), contracted("nk", rows=128)),
    "CC06": (split_over_eight(lambda x: jnp.roll(x, 1, 0)), split_over_eight(lambda x: jnp.roll(x, 1, 1))),
    "KB01": (
        split_over_eight(lambda x: jnp.take(x, jnp.arange(3), axis=0, mode="clip")),
        over_mesh(lambda x: jnp.take(x, jnp.arange(3), mode="clip")),
    ),
    "KB02": (
        split_over_eight(lambda x: x.at[jnp.arange(3)].add(1.0)),
        over_mesh(lambda x: x.at[jnp.arange(3)].add(1.0)),
    ),
    "KB03": (carried_sum(jnp.uint32), carried_sum(jnp.int32)),
    "KB04": (
        (lambda x, i: x.at[i].set(jnp.flip(x[i], -1)), X, I),
        (lambda x, mask: jnp.where(mask[:, None], jnp.flip(x, -1), x), X, shape(4, dtype=jnp.bool)),
    ),
    "KB05": (gather_at("i64"), gather_at("i32")),
    "KB06": (Flagged(native_kernel(__file__), OVERLAP), Flagged(native_kernel(__file__), "--target=trn1")),
    "CC01": (summed_over(17), summed_over(16)),
    "CC02": (ring(32, 10), ring(8, 1)),
    "CC04": (
        over_mesh(lambda x: jax.lax.psum(x, "b"), sizes=(8, 4)),  # cores 0 to 3: groups of 4 are 0, 8, 16, 24
        over_mesh(lambda x: jax.lax.psum(x, "a"), sizes=(4, 8)),
    ),
    "CC05": (
        over_mesh(lambda x: jax.lax.psum(x, "a"), sizes=(4, 2)),  # cores 0, 2, 4, 6
        over_mesh(lambda x: jax.lax.psum(x, "a"), sizes=(2, 16)),
    ),
    "MEM1": ((lambda x: x.sum(), shape(5 * 10**9)), (lambda x: x.sum(), shape(10**8))),
    "CG01": (
        (lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=128)[0], shape(2**13, 2**13)),
        (lambda x: x @ x, shape(2**13, 2**13)),
    ),
    "CG02": (
        (lambda x, y: x @ y, shape(2**13, 2**12), shape(2**12, 2**16)),
        (lambda x, y: x @ y, shape(2**13, 2**12), shape(2**12, 2**14)),
    ),
    "NK01": (native_kernel("/no/such/kernel.klir"), native_kernel(__file__)),
}


def rules_of(program, **options):
    return {finding.rule for finding in findings_of(program, **options)}


def findings_of(program, **options):
    if isinstance(program, Flagged):
        return lint.check_module(program.program, compiler_flags=program.flags, **options)
    if isinstance(program, str):
        return lint.check_module(program, **options)
    return lint.check(*program, **options) if isinstance(program, tuple) else lint.check(program, X, **options)


def test_every_rule_has_a_bad_and_a_clean_program():
    assert set(CASES) | {"OP09"} == set(RULES)


def test_lint_flags_the_bad_program_of_each_rule_but_not_the_clean_one():
    for rule, (bad, clean) in CASES.items():
        target = next(filter(RULES[rule].applies_to, LINTED))
        found = [finding for finding in findings_of(bad, target=target) if finding.rule == rule]
        severities = {finding.severity for finding in found}
        assert severities == {RULES[rule].severity_in(recurring=True, target=target)}, rule
        assert all((finding.why, finding.source) == (RULES[rule].why, RULES[rule].source) for finding in found)
        assert rule not in rules_of(clean, target=target), rule


def test_rules_of_some_chips_do_not_apply_to_others():
    for rule, targets in (
        ("DT02", ("trn1", "trn2", "trn2-lnc1")),
        ("DT08", ("trn2", "trn2-lnc1")),
        ("DT09", ("trn1", "trn2", "trn2-lnc1")),
    ):
        assert tuple(target for target in LINTED if rule in rules_of(CASES[rule][0], target=target)) == targets


def test_integer_products_are_disputed_on_trn1_only():
    found = {t: f.severity for t in LINTED for f in findings_of(CASES["INT01"][0], target=t) if f.rule == "INT01"}
    assert found == {"trn1": "warning", "trn2": "error", "trn2-lnc1": "error", "trn3": "error"}
    assert "pages contradict each other" in RULES["INT01"].why


COUNT = {"init_val": (0, jnp.zeros(4)), "body_fun": lambda c: (c[0] + 1, c[1] * 2)}


# a program, and the rule of its control flow, None where it folds away
CONTROL_FLOW = {
    "limit_of_a_constant": (lambda x: jax.lax.fori_loop(0, jnp.int32(10), lambda _, c: c + 1, x), "CF04"),
    "and_true": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) & True, **COUNT)[1], "CF04"),
    "true_and": (lambda x: x + jax.lax.while_loop(lambda c: True & (c[0] < jnp.int32(10)), **COUNT)[1], "CF04"),
    "or_true": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) | True, **COUNT)[1], "CF03"),
    "not": (lambda x: x + jax.lax.while_loop(lambda c: ~(c[0] < 10), **COUNT)[1], "CF03"),
    "and_data": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) & (c[1][0] < 9), **COUNT)[1], "CF03"),
    "limit_from_data": (lambda x: jax.lax.fori_loop(0, x.sum().astype(jnp.int32), lambda _, c: c + 1, x), "CF03"),
    "start_from_data": (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, c[1] * 2), (x.sum(), x))[1],
        "CF03",
    ),
    "step_from_data": (
        lambda x: jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + x.sum(), c[1] * 2), (0.0, x))[1],
        "CF03",
    ),
    "convergence": (lambda x: jax.lax.while_loop(lambda e: e > 1e-3, lambda e: e * x.mean(), 1.0), "CF03"),
    "constant_index": (lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x), None),
    "folded_index": (lambda x: jax.lax.switch(jnp.int32(7) % 2, [jnp.sin, jnp.cos], x), None),
    "platform": (lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), None),
    "index_from_data": (lambda x: jax.lax.switch(x.sum().astype(jnp.int32), [jnp.sin, jnp.cos], x), "CF01"),
    "nested_index_from_data": (
        lambda x: jax.lax.switch(
            jax.lax.switch(x.sum().astype(jnp.int32), [lambda: 0, lambda: 1]), [jnp.sin, jnp.cos], x
        ),
        "CF01",
    ),
}


def test_control_flow_is_refused_where_it_depends_on_data():
    for name, (program, rule) in CONTROL_FLOW.items():
        assert rules_of(program) & {"CF01", "CF03", "CF04"} == {rule} - {None}, name


def test_a_convolution_moves_what_it_reads_over_the_borders_of_devices():
    mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def of(size, spec):
        image = jax.ShapeDtypeStruct((8, 16, 16, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
        numbers = ("NHWC", "HWIO", "NHWC")
        return (
            lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers),
            image,
            shape(size, 3, 4, 4),
        )

    assert "CC06" in rules_of(of(3, P(None, "a")))
    assert "CC06" not in rules_of(of(1, P(None, "a")))  # a window of one along what is split
    assert "CC06" not in rules_of(of(3, P("a")))


def test_operator_list_disallows_all_others():
    names = ["hlo::Add", "multiply", "Constant", "broadcast", "HLO.Dot"]
    assert rules_of(lambda x: (x @ x) * 2 + 1, operators=names) == set()
    [finding] = findings_of(lambda x: jnp.sin(x) * 2, operators=names)
    assert (finding.rule, finding.severity, finding.what) == ("OP09", "error", "sine")


def test_severity_depends_on_whether_a_program_recurs():
    assert [f.severity for f in findings_of(lambda x: jnp.argmax(x))] == ["error"]
    assert [f.severity for f in findings_of(lambda x: jnp.argmax(x), recurring=False)] == ["warning"]
    with pytest.raises(ValueError, match="target='trn9' is not one of trn1, trn2"):
        findings_of(lambda x: x, target="trn9")


def test_a_flag_is_reported_only_beside_what_it_fails_with():
    assert "KB06" not in rules_of(Flagged(typed("4xf32"), OVERLAP))


def test_memory_limit_depends_on_the_target():
    eighteen_gib = (lambda x: x.sum(), shape(18 * 2**28))
    assert "MEM1" in rules_of(eighteen_gib, target="trn1")
    assert "MEM1" not in rules_of(eighteen_gib, target="trn2")


def loss_with_argmax(params, x):
    hidden = jnp.tanh(x @ params["in"])
    best = jnp.argmax(hidden @ params["out"], axis=-1)
    return best.sum()


def test_check_of_a_user_function_names_its_line():
    params = {"in": jnp.ones((4, 8)), "out": jnp.ones((8, 3))}
    [finding] = [f for f in lint.check(jax.jit(loss_with_argmax), params, X) if f.severity == "error"]
    line = loss_with_argmax.__code__.co_firstlineno + 2
    assert finding.rule == "RED01"
    assert finding.line == f"{__file__}:{line} (loss_with_argmax)"
    assert "max, compare, and min of an iota" in str(finding)
    assert "jax-neuronx-known-issues" in str(finding)


def test_check_names_the_line_of_what_cannot_be_lowered():
    def decomposed(x):
        return jnp.linalg.svd(x)[1]

    def printed(x):
        jax.debug.print("{}", x)
        return x

    for broken, primitive in ((decomposed, "eigh"), (printed, "debug_print")):
        [finding] = lint.check(broken, X)
        assert (finding.rule, finding.op) == ("LW01", primitive)
        assert finding.line == f"{__file__}:{broken.__code__.co_firstlineno + 1} ({broken.__qualname__})"


def test_check_names_host_callbacks_for_which_jax_raises_another_error():
    def called_back(x):
        return jax.pure_callback(np.sin, shape(4, 4), x)

    [finding] = lint.check(called_back, X)
    assert (finding.rule, finding.op) == ("LW01", "EmitPythonCallback")
    assert finding.line == f"{__file__}:{called_back.__code__.co_firstlineno + 1} ({called_back.__qualname__})"
    with pytest.raises(ValueError, match="of the user's own"):
        lint.check(jax.jit(refusing), X)


def refusing(x):
    raise ValueError("of the user's own")


def test_check_of_a_function_of_jax_names_the_calling_line():
    [finding] = lint.check(jnp.sort, X)
    assert finding.line.startswith(f"{__file__}:")


def test_lint_counts_repeated_operations_of_a_line():
    [finding] = lint.check(lambda x: [jnp.argmax(x, axis=axis) for axis in (0, 1)], X)
    assert finding.count == 2


# A valid program of any types and values is checked.


def complex_rope(x):
    turned = jax.lax.complex(x[:, :2], x[:, 2:]) * jnp.exp(1j * jnp.outer(jnp.arange(4.0), 0.1 ** jnp.arange(2)))
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def over_two_devices(fn):
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    return fn, jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, P("a")))


def added(dtype, value):
    """Adds a constant of a type, once as one number and once as many."""
    return lambda x: x.astype(dtype) + np.full((4, 4), value, dtype) + np.arange(4).astype(dtype)


def infinite_limit(x):
    return jax.lax.while_loop(lambda c: c[0] < jnp.inf, lambda c: (c[0] + 1.0, c[1] * 2), (0.0, x))


def infinite_start(x):
    return jax.lax.while_loop(lambda c: c[0] < 9.0, lambda c: (c[0] + 1.0, c[1] * 2), (-jnp.inf, x))


DYNAMIC_DOT = module(
    "%0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1] : "
    "(tensor<?x4xf32>, tensor<?x4xf32>) -> tensor<?x?xf32> return %0 : tensor<?x?xf32>",
    "%x: tensor<?x4xf32>",
    "tensor<?x?xf32>",
)
DYNAMIC_GATHER = module(
    "%i = stablehlo.iota dim = 0 : tensor<3x1xi32> "
    '%0 = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], '
    "start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>}> : "
    "(tensor<?xf32>, tensor<3x1xi32>) -> tensor<3xf32> return %0 : tensor<3xf32>",
    "%x: tensor<?xf32>",
    "tensor<3xf32>",
)
TUPLE = module(
    "%0 = stablehlo.custom_call @AwsNeuronCustomOp(%x) : (tensor<4xf32>) -> tuple<tensor<4xf32>, tensor<2xi4>> "
    "%1 = stablehlo.get_tuple_element %0[0] : (tuple<tensor<4xf32>, tensor<2xi4>>) -> tensor<4xf32> "
    "%2 = stablehlo.create_token : !stablehlo.token %3 = stablehlo.after_all %2 : !stablehlo.token "
    "return %1 : tensor<4xf32>"
)
DECLARATION = (
    "module @m { func.func private @elsewhere(%x: tensor<4xf32>) -> tensor<4xi32> "
    "func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { "
    "%0 = call @elsewhere(%x) : (tensor<4xf32>) -> tensor<4xi32> %1 = stablehlo.reshape %0 : (tensor<4xi32>) -> "
    'tensor<4x1xi32> %2 = "stablehlo.gather"(%x, %1) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = '
    "[0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>}> : "
    "(tensor<4xf32>, tensor<4x1xi32>) -> tensor<4xf32> return %2 : tensor<4xf32> } }"
)
# a program, and its errors and warnings
ODD = {
    "complex_constant": (lambda x: (x + 1j * x).real, {"DT01"}),
    "complex_table": (lambda x: (x * np.arange(4).astype(np.complex64)).real, {"DT01"}),
    "complex_empty": (lambda x: (x, jnp.asarray(np.zeros(0, np.complex64))), {"DT01"}),
    "complex_of_parts": (lambda x: abs(jax.lax.complex(x, x)), {"DT01"}),
    "complex_rope": (complex_rope, {"DT01"}),
    "complex_rope_gradient": (jax.grad(lambda x: complex_rope(x).sum()), {"DT01"}),
    "complex_rope_partitioned": (over_two_devices(complex_rope), {"DT01"}),
    "complex_scan": (lambda x: jax.lax.scan(lambda c, row: (c * 1j, c.real), x[0] + 0j, x)[1], {"DT01"}),
    "complex_loop": (lambda x: x * jax.lax.while_loop(lambda c: c != 8j, lambda c: c + 1j, 0j).imag, {"DT01", "CF03"}),
    "complex_donated": ((jax.jit(lambda z: z * 1j, donate_argnums=0), shape(4, dtype=jnp.complex64)), {"DT01"}),
    "fft": (lambda x: jnp.fft.ifft(jnp.fft.fft(x)).real, {"DT01", "OP01"}),
    "key": ((lambda key: jax.random.uniform(key, (2,)), jax.eval_shape(lambda: jax.random.key(0))), {"RNG01"}),
    "key_of_rbg": (keyed("rbg", jax.random.uniform), set()),
    "bytes_as_complex": (lambda x: x.view(jnp.complex64).real, {"DT01"}),
    "infinite_limit": (infinite_limit, {"CF03"}),
    "infinite_start": (infinite_start, {"CF03"}),
    "infinite_bound_of_an_index": (lambda x: x[jnp.clip(x[0], -jnp.inf, jnp.inf).astype(jnp.int32)], set()),
    "nan_index": (lambda x: x[jnp.full(4, jnp.nan).astype(jnp.int32)], set()),
    "empty_index": (lambda x: x[jnp.arange(0)], set()),
    "dynamic_product": (DYNAMIC_DOT, {"SH01"}),
    "dynamic_gather": (DYNAMIC_GATHER, {"SH01"}),
    "tuple_and_token": (TUPLE, set()),
    "function_without_a_body": (DECLARATION, set()),
    **{kind: (added(kind, 1), {"DT04"}) for kind in ("int4", "uint4", "int2", "uint2")},
    **{kind: (added(kind, 1), set()) for kind in ("int8", "bool", "float16")},
    **{kind: (added(kind, 1), set()) for kind in ("bfloat16", "float8_e4m3", "float8_e5m2", "float8_e3m4")},
    **{kind: (added(kind, 1), {"DT03"}) for kind in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")},
    "float8_e4m3fn": (added("float8_e4m3fn", 1), {"DT02"}),
    "float8_e8m0fnu": (added("float8_e8m0fnu", 1), {"DT09"}),
    "float4_e2m1fn": (added("float4_e2m1fn", 1), {"DT04"}),
}


def test_lint_checks_a_program_of_any_type_and_value():
    for case, (program, expected) in ODD.items():
        assert {finding.rule for finding in findings_of(program) if finding.severity != "info"} == expected, case


# Indices that the program determines.

TABLE = shape(32, 8)


def embedded(positions):
    embed = linen.Embed(32, 8)
    return lambda table: embed.apply({"params": {"embedding": table}}, positions())


SHARED = jax.jit(lambda w, i: jnp.take(w, i, axis=0))


CLIP = {"axis": 0, "mode": "clip"}
CLIPPED = jax.jit(lambda w, i: jnp.take(w, i, **CLIP))
AROUND = jax.jit(lambda w, i: CLIPPED(w, i).sum())


def call_tree(branches, depth):
    """Returns a function of a table and indices that calls itself at `depth` levels, twice at each."""
    fn = AROUND
    for _ in range(depth):
        fn = jax.jit(lambda w, i, inner=fn: sum(inner(w, given) for given in branches(i)))
    return fn


def pattern(i):
    return jnp.where(i % 5 == 0, i // 2, 31 - i)


INSIDE = {
    "take": lambda w: jnp.take(w, jnp.arange(32), axis=0),
    "take_gradient": jax.grad(lambda w: jnp.take(w, jnp.arange(32), axis=0).sum()),
    "embed": embedded(lambda: jnp.arange(32)),
    "embed_gradient": jax.grad(lambda w: embedded(lambda: jnp.arange(32))(w).sum()),
    "embed_of_a_batch": embedded(lambda: jnp.broadcast_to(jnp.arange(32), (4, 32))),
    "take_clip": lambda w: jnp.take(w, jnp.arange(32), axis=0, mode="clip"),
    "take_wrap": lambda w: jnp.take(w, jnp.arange(40), axis=0, mode="wrap"),
    "take_along_axis": lambda w: jnp.take_along_axis(w, jnp.arange(32)[:, None], axis=0),
    "of_two_axes": lambda w: w[jnp.arange(32)[:, None], jnp.arange(8)],
    "of_two_axes_clipped": lambda w: w[jnp.arange(32)[:, None], jnp.clip(jnp.arange(32), 0, 7)],
    "from_the_end": lambda w: w[jnp.arange(32) - 16],
    "from_the_end_of_take": lambda w: jnp.take(w, jnp.arange(32) - 32, axis=0),
    "reversed": lambda w: jnp.take(w, 31 - jnp.arange(32), axis=0),
    "part_of_a_longer_iota": lambda w: w[jnp.arange(40)[8:] - 8],
    "arithmetic": lambda w: jnp.take(w, pattern(jnp.arange(32)), axis=0),
    "set": lambda w: w.at[jnp.arange(32)].set(1.0),
    "one_hot": lambda w: jax.nn.one_hot(jnp.arange(32), 32) @ w,
    "nested": lambda w: jax.jit(lambda v, i: jnp.take(v, i, axis=0))(w, jnp.arange(32)),
    "through_bfloat16": lambda w: w[jnp.arange(32, dtype=jnp.bfloat16).astype(jnp.int32)],
    "through_float16": lambda w: w[(jnp.arange(32, dtype=jnp.float16) / 2).astype(jnp.int32)],
    "floor_of_negatives": lambda w: jnp.take(w[:25], (jnp.arange(100) - 100) // 4 + 25, axis=0, mode="clip"),
    "quotient_of_negatives": lambda w: jnp.take(w[:26], jax.lax.div(jnp.arange(103) - 103, 4) + 25, **CLIP),
    "remainder_of_negatives": lambda w: jnp.take(w[:4], 3 + jax.lax.rem(jnp.arange(32) - 31, 4), **CLIP),
    "tree_of_calls": lambda w: call_tree(lambda i: (i, i + 1), depth=11)(w, jnp.arange(21)),
    "offset_from_data": lambda w: w.at[w[0, 0].astype(jnp.int32) + jnp.arange(40) - 5].get(mode="clip"),
}
OUTSIDE = {
    "take": lambda w: jnp.take(w, jnp.arange(40), axis=0),
    "take_gradient": jax.grad(lambda w: jnp.take(w, jnp.arange(40), axis=0).sum()),
    "take_clip": lambda w: jnp.take(w, jnp.arange(40), axis=0, mode="clip"),  # the gather itself receives all indices
    "embed": embedded(lambda: jnp.arange(40)),
    "embed_of_a_batch": embedded(lambda: jnp.broadcast_to(jnp.arange(40), (4, 40))),
    "plain": lambda w: w[jnp.arange(33)],
    "second_of_two_axes": lambda w: w[jnp.arange(9)[:, None], jnp.arange(9)],
    "from_the_end": lambda w: w[jnp.arange(40) - 5],
    "reversed": lambda w: jnp.take(w, 32 - jnp.arange(32), axis=0),
    "part_of_a_longer_iota": lambda w: w[jnp.arange(40)[8:]],
    "arithmetic": lambda w: jnp.take(w, pattern(jnp.arange(32)) + 2, axis=0),
    "set": lambda w: w.at[jnp.arange(40)].set(1.0),
    "nested": lambda w: jax.jit(lambda v, i: jnp.take(v, i, axis=0))(w, jnp.arange(40)),
    "nested_second_call": lambda w: SHARED(w, jnp.arange(32)) + SHARED(w, jnp.arange(32) + 1),
    "negative": lambda w: jnp.take(w, -jnp.arange(1, 40), axis=0),
    "through_bfloat16": lambda w: w[jnp.arange(33, dtype=jnp.bfloat16).astype(jnp.int32)],
    "quotient_of_negatives": lambda w: jnp.take(w[:25], jax.lax.div(jnp.arange(100) - 100, 4) + 25, **CLIP),
    "remainder_of_negatives": lambda w: jnp.take(w[:4], jax.lax.rem(jnp.arange(32) - 31, 4), **CLIP),
    "large": lambda w: jnp.take(w, jnp.broadcast_to(jnp.arange(40), (10**6, 40)), axis=0).sum(),
}


def test_lint_accepts_indices_that_are_known_to_be_in_bounds():
    for case, program in INSIDE.items():
        reported = {"GS01"} if case == "offset_from_data" else {"GS01", "GS02"}
        assert not reported & rules_of((program, TABLE)), case


def test_lint_finds_an_iota_out_of_bounds_through_private_functions():
    for case, program in OUTSIDE.items():
        assert "GS01" in rules_of((program, TABLE)), case


def test_too_many_call_chains_have_the_union_of_their_indices():
    """2^11 leaves with other indices each, of which the last reaches row 2^11 - 1."""
    tree = call_tree(lambda i: (2 * i, 2 * i + 1), depth=11)
    for num_rows, rules in ((2**12, set()), (2**11 - 1, {"GS02"})):
        found = lint.check(lambda w: tree(w, jnp.arange(1)), shape(num_rows, 8))
        assert {"GS01", "GS02"} & {finding.rule for finding in found} == rules


def test_lint_names_the_dimension_that_a_constant_exceeds():
    [finding] = lint.check(lambda w: w[jnp.asarray(np.array([0, 5, 32]))], TABLE)
    assert (finding.rule, finding.severity) == ("GS01", "error")
    assert finding.what == "constant indices up to 32 into dimension 0 of f32[32,8]"
    assert lint.check(lambda w: w[jnp.asarray(np.array([0, 5, 31]))], TABLE) == []


def test_lint_names_a_slice_whose_constant_start_is_out_of_bounds():
    """JAX counts a negative start from the end."""
    row = jnp.ones((1, 8))
    for start, what in ((31, None), (30, None), (32, "start 32 of 1"), (-1, None), (-33, "start -1 of 1")):
        first = jnp.int32(start)
        sliced = lint.check(lambda w, first=first: jax.lax.dynamic_slice_in_dim(w, first, 1), TABLE)
        updated = lint.check(lambda w, first=first: jax.lax.dynamic_update_slice_in_dim(w * 2, row, first, 0), TABLE)
        for found in (sliced, updated):
            found = [(f.rule, f.what) for f in found if f.rule != "DN01"]
            assert found == ([("GS01", f"{what} elements in dimension 0 of f32[32,8]")] if what else [])


def test_a_start_that_depends_on_data_is_not_reported():
    assert lint.check(lambda w, i: jax.lax.dynamic_slice_in_dim(w, i, 1), TABLE, jnp.int32(0)) == []


def test_data_indices_are_a_warning_in_a_program_for_several_devices():
    def looked_up(w, i):
        return w.at[i].get(mode="clip")

    alone = {f.rule: f.severity for f in lint.check(looked_up, X, I)}
    assert alone["GS02"] == "info"
    _, split = over_two_devices(looked_up)
    found = {f.rule: f.severity for f in lint.check(looked_up, split, I)}
    assert found["GS02"] == "warning"


def test_lint_checks_a_shared_function_at_each_call():
    def both(w, v):
        inside = jnp.take(w, jnp.arange(32), axis=0)
        outside = jnp.take(v, jnp.arange(32) + 9, axis=0)
        return inside + outside

    [finding] = [f for f in lint.check(both, TABLE, TABLE) if f.severity != "info"]
    assert (finding.rule, finding.op, finding.count) == ("GS01", "stablehlo.gather", 1)
    assert finding.what == "indices up to 40 into dimension 0 of f32[32,8]"
    assert finding.line == f"{__file__}:{both.__code__.co_firstlineno + 2} ({both.__qualname__})"


# What the partitioner does.


def cpu_layout(config):
    return make_layout(config.parallel, jax.devices()[:8], num_kv_heads=config.model.num_kv_heads)


def lowered_for_neuron(traced):
    return traced.lower(lowering_platforms=("neuron",)).compiler_ir("stablehlo").operation


def groups_of(root):
    program = Program(root)
    found = partitioned.replica_groups(program, partitioned.run_shardy(root))
    return {tuple(map(tuple, np.sort(groups, axis=1).tolist())) for _, groups in found if groups.shape[1] > 1}


@pytest.mark.quick_cases("{'data': 2, 'fsdp': 2, 'tensor': 2}")
@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "tensor": 2, "zero1": True}, {"pipe": 2, "data": 2, "tensor": 2}],
    ids=str,
)
def test_replica_groups_match_the_compiled_step(degrees):
    config = small_config(m=2, remat="none", **degrees)
    layout = cpu_layout(config)
    traced = make_program(config, layout).trace_step()
    mesh = dict(layout.mesh.shape)
    compiled = count_collectives(collectives(traced.lower().compile().as_text(), layout.mesh))
    kinds = {axes for kind, axes in compiled if kind != "collective-permute"}
    expected = {tuple(map(tuple, partitioned.groups_along(mesh, list(axes)).tolist())) for axes in kinds}
    # XLA may merge two sums into one, but uses no group that was not predicted
    assert expected <= groups_of(lowered_for_neuron(traced))
    assert expected


def test_replica_groups_added_by_the_partitioner_are_found():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("a", "b")))
    traced = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P("a"))).trace(split)
    expected = tuple((2 * row, 2 * row + 1) for row in range(4))
    assert groups_of(lowered_for_neuron(traced)) == {expected}
    [(kind, axes)] = count_collectives(collectives(traced.lower().compile().as_text(), mesh))
    assert (kind, axes) == ("all-gather", ("b",))


def sharded(*dims, dtype=jnp.float32, spec):
    """An array over a mesh of 2 x 4 x 2 virtual devices."""
    mesh = AbstractMesh((2, 4, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def test_integer_sums_added_by_the_partitioner_are_found():
    def total(x):
        return x.sum()

    found = lint.check(total, sharded(64, dtype=jnp.int32, spec=P("b")))
    [finding] = [finding for finding in found if finding.rule == "INT03"]
    assert (finding.rule, finding.severity, finding.op) == ("INT03", "error", "sdy.all_reduce")
    assert finding.line == f"{__file__}:{total.__code__.co_firstlineno + 1} ({total.__qualname__})"
    assert rules_of((total, sharded(64, spec=P("b")))) <= {"CC05"}
    assert rules_of((total, sharded(64, dtype=jnp.int32, spec=P()))) == set()


def test_permutes_added_by_the_partitioner_are_found():
    placed = sharded(64, spec=P("a"))

    def moved(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(placed.sharding.mesh, P("c")))

    [finding] = lint.check(moved, placed)
    assert (finding.rule, finding.severity) == ("CC02", "warning")
    assert finding.line == f"{__file__}:{moved.__code__.co_firstlineno + 1} ({moved.__qualname__})"


def fused_mlp(x, gate_up, down):
    """The program of the issue: a gate and an up projection in one matrix, and a second one stored [D, H]."""
    gate, up = jnp.split(x @ gate_up, 2, axis=1)
    return jax.lax.dot_general(jax.nn.gelu(gate) * up, down, (([1], [1]), ([], [])))


# functions of f32[64,16] whose first dimension is split, and whether XLA's partitioner adds permutes to them
SHIFTS = {
    "roll": (lambda x: jnp.roll(x, 1, 0), True),
    "difference": (lambda x: x[1:] - x[:-1], True),
    "reversal": (lambda x: x[::-1], True),
    "halves": (lambda x: x[:32] * x[32:], True),
    "padding": (lambda x: jnp.pad(x, ((8, 0), (0, 0)))[:64], True),
    "windows": (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"), True),
    "other_dimension": (lambda x: jnp.roll(x, 1, 1) + x[:, ::-1], False),
    "elementwise": (lambda x: x * 2 + jnp.arange(64.0)[:, None], False),
}


def test_shifts_along_a_split_dimension_are_found_where_xla_adds_permutes():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    for case, (fn, is_shift) in SHIFTS.items():
        compiled = jax.jit(fn).trace(placed).lower().compile().as_text()
        assert ("collective-permute" in compiled) == is_shift, case
        found = [f for f in lint.check(*split_over_eight(fn)) if f.rule == "CC06"]
        assert bool(found) == is_shift, case
        for finding in found:
            assert finding.line.startswith(f"{__file__}:{fn.__code__.co_firstlineno} ")
            assert ", of which a device has " in finding.what


def test_a_fused_matrix_that_is_split_along_its_sharded_columns_is_found():
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def rules(spec):
        placed = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))]
        placed += [
            jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))
            for dims in ((64, 256), (64, 128))
        ]
        return {finding.rule for finding in lint.check(fused_mlp, *placed)}

    assert "CC06" in rules(P(None, "x"))
    assert "CC06" not in rules(P("x", None))


def test_lookups_in_a_shard_map_are_not_those_of_the_partitioner():
    def looked_up(table):
        return table.at[jnp.arange(3)].add(jax.jit(jnp.take, static_argnames="axis")(table, jnp.arange(3), axis=0))

    _, split = split_over_eight(looked_up)
    inside = jax.shard_map(looked_up, mesh=split.sharding.mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    assert {"KB01", "KB02"} <= rules_of((looked_up, split))
    assert not {"KB01", "KB02"} & rules_of((inside, split))


def test_an_assignment_at_constant_indices_is_not_one_through_a_mask():
    def swapped(x):
        return x.at[np.array([0, 1])].set(x[np.array([1, 0])])

    assert "KB04" not in rules_of(swapped)
    assert "KB04" not in rules_of((lambda x, y, i: x.at[i].set(y[i] * 2), X, X, I))  # of another array


def test_instructions_are_those_of_one_device():
    mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def rules(spec):
        rows = jax.ShapeDtypeStruct((2**14, 2**13), jnp.float32, sharding=NamedSharding(mesh, spec))
        return rules_of((lambda x, y: x @ y.T, rows, rows))

    assert "CG02" in rules(P())
    assert "CG02" not in rules(P("a"))


def test_sizes_are_per_device():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def rules(spec):
        placed = jax.ShapeDtypeStruct((2**21, 2**11), jnp.float32, sharding=NamedSharding(mesh, spec))
        return {finding.rule: finding.what for finding in lint.check(lambda x: (x * 2).sum(), placed)}

    assert rules(P())["SH02"].endswith(", 16.00 GiB")  # whole
    assert "SH02" not in rules(P("a"))
    assert "MEM1" in rules(P())
    assert "MEM1" not in rules(P("a"))


def test_a_permute_between_nodes_is_an_error():
    over_nodes, inside = (lint.check_module(ring(count, hops)) for count, hops in ((96, 32), (32, 10)))
    assert [(f.rule, f.severity) for f in over_nodes if f.rule == "CC02"] == [("CC02", "error")]
    assert [(f.rule, f.severity) for f in inside if f.rule == "CC02"] == [("CC02", "warning")]


def test_groups_and_permutes_depend_on_the_wiring_of_the_target():
    eight = over_mesh(lambda x: jax.lax.psum(x, "b"), sizes=(2, 8))
    found = {target: rules_of(eight, target=target) & {"CC04", "CC05"} for target in LINTED}
    assert found == {"trn1": set(), "trn2": {"CC05"}, "trn2-lnc1": set(), "trn3": set()}
    far = ring(32, 10)
    assert {target for target in LINTED if "CC02" in rules_of(far, target=target)} == {"trn1", "trn2", "trn2-lnc1"}


def test_groups_are_those_of_the_devices_at_their_places():
    text = over_mesh(lambda x: jax.lax.psum(x, "b"), sizes=(8, 4))
    placed = [first + step for first in range(8) for step in (0, 8, 16, 24)]
    assert "CC04" in rules_of(text)
    assert not rules_of(text, placement=placed) & {"CC04", "CC05"}


def test_permutes_must_be_rings_of_linked_chips_in_a_node():
    def trouble(*pairs, target="trn1"):
        return partitioned.permute_problem(np.asarray(pairs), target=target)

    assert trouble((0, 1), (1, 2), (2, 0)) is None
    assert trouble((0, 6), (6, 30), (30, 24), (24, 0)) is None  # the corners of the torus are neighbours
    assert "2 of 2 pairs are on chips without a link" in trouble((0, 10), (10, 0))
    assert trouble((0, 10), (10, 0), target="trn2") == "2 of 2 pairs are on chips without a link"
    assert trouble((0, 7), (7, 0), target="trn2") is None
    assert "2 of 2 pairs leave their node" in trouble((0, 32), (32, 0))
    assert "not rings" in trouble((0, 1), (1, 2))
    assert "to itself" in trouble((0, 0), (1, 1))


# Our programs.


@pytest.fixture
def lint_here(monkeypatch, capsys):
    """A function that runs a lint command in this process and returns (exit code, stdout, stderr)."""
    from hlat_jax.cli import flags
    from hlat_jax.neuron import __main__ as commands

    def run(*words):
        monkeypatch.setattr("sys.argv", ["neuron", "lint", *map(str, words)])
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            flags.main(commands.main)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run


def check_shipped(name, target, lint_here, report_file):
    """Asserts that the lint of a shipped config has no error and no unexplained warning; returns what is explained."""
    validated = ("--config.data.validation=held_out.parquet",) if name == "70b" else ()  # it is not validated by itself
    words = (f"--config={name}", f"--instance={target}", f"--json={report_file}", *validated)
    code, printed, error = lint_here(*words)
    assert (code, error) == (0, "")
    report = json.loads(report_file.read_text())
    expected = ["start", *(PHASES if name == "70b" else ["microbatch"]), "update"]
    expected += ["init", "norms", "eval"] + (["prefill", "decode"] if name == "tiny" else [])
    assert list(report["programs"]) == expected
    explained = set()
    for program, found in report["programs"].items():
        rows = found["findings"]
        assert not [row for row in rows if row["severity"] == "error"]
        assert not [row for row in rows if row["severity"] == "warning" and not row["explained"]]
        assert {row["rule"] for row in rows if row["rule"] in ("RP02", "GS02", "RED01")} == set(), program
        assert all(row["line"] for row in rows)
        explained |= {(program, row["rule"]) for row in rows if row["explained"]}
    devices = {"tiny": 2, "node": 32, "160m": 8, "1b": 8, "7b": 2048, "70b": 8192, "llama3_8b": 1024}[name]
    # the largest number at most this whose groups of cores are not refused
    devices = {("node", "trn2"): 16}.get((name, target), devices)
    assert f"{name} for {target}, {devices:,} devices" in printed
    return explained


def test_lint_of_a_shipped_config_has_no_error_and_no_unexplained_warning(tmp_path, lint_here):
    check_shipped("160m", "trn2", lint_here, tmp_path / "found.json")
    code, _, error = lint_here("--config=llama3_8b", "--instance=trn1")  # a recipe of trn2
    assert (code, "AWS documents NKI for trn2 and trn3 only" in error) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_lint_of_every_shipped_config_has_no_error_and_every_explained_warning_occurs(target, tmp_path, lint_here):
    found = tmp_path / "found.json"
    names = set(config_files.shipped()) - ({"llama3_8b"} if target == "trn1" else set())
    explained = set().union(*(check_shipped(name, target, lint_here, found) for name in sorted(names)))
    if target == "trn2":
        lint_here("--config=7b", "--program=generate", "--instance=trn2", f"--json={found}")
        generation = json.loads(found.read_text())["programs"].items()
        explained |= {(program, row["rule"]) for program, one in generation for row in one["findings"]}
        assert explained >= set(programs.EXPLAINED)


def test_lint_of_generation_finds_infos_and_the_layout_of_the_head(tmp_path, lint_here):
    code, printed, error = lint_here("--config=7b", "--program=generate", f"--json={tmp_path / 'found.json'}")
    assert (code, error) == (0, "")
    assert printed.count("  info    CF04  stablehlo.while x2: up to 32\n") == 2, "the infos of a rule are one line"
    report = json.loads((tmp_path / "found.json").read_text())
    assert list(report["programs"]) == ["prefill", "decode"]
    rows = [row for found in report["programs"].values() for row in found["findings"]]
    assert {row["rule"] for row in rows if row["severity"] != "info"} == {"DG01"}
    assert all(row["explained"] for row in rows if row["severity"] != "info")


def transposed(lhs, rhs, equation):
    found = lint.check(lambda x, w: jnp.einsum(equation, x, w), shape(*lhs), shape(*rhs))
    return [(finding.rule, finding.what.partition(": ")[2]) for finding in found if finding.rule.startswith("DG")]


def test_a_transposed_right_hand_side_costs_128_rows_of_work():
    """The issue counts 34.60 MFLOP of a row by [k, n] and 4.33 GFLOP by [n, k], with k = n = 4,096."""
    one_row, transposing = 2 * 4096**2, 2 * 128 * 4096**2
    assert (one_row + transposing) / 1e9 == pytest.approx(4.33, abs=0.005)
    assert transposed((1, 4096), (4096, 4096), "tk,nk->tn") == [("DG01", "transposing it adds 12800% to the product")]
    assert transposed((1, 4096), (4096, 4096), "tk,kn->tn") == []
    assert transposed((1, 64), (64, 64), "tk,nk->tn") == []  # too small to matter
    assert transposed((4, 8, 512), (4, 1024, 512), "btk,bnk->btn") == []


def test_lint_exits_with_1_and_names_the_line_when_a_program_breaks_a_rule(monkeypatch, lint_here):
    from hlat_jax.ops import embedding

    original = embedding.lookup

    def with_argmax(table_VD, tokens_BT, *, ctx):
        return original(table_VD, tokens_BT + 0 * jnp.argmax(tokens_BT), ctx=ctx)

    monkeypatch.setattr("hlat_jax.model.lookup", with_argmax)
    code, printed, _ = lint_here("--config=tiny", "--program=eval")
    assert code == 1
    assert "eval: 1 errors" in printed
    line = f"{__file__}:{with_argmax.__code__.co_firstlineno + 1}"
    assert f"at {line}" in printed
    assert "instead: max, compare, and min of an iota" in printed


def test_lint_reports_a_layout_that_does_not_fit(lint_here):
    code, printed, _ = lint_here(
        "--config=7b", "--program=train", "--config.parallel.zero1=False", "--config.precision.policy=mixed"
    )
    assert code == 1
    assert "MEM1" in printed
    assert "GiB of a device's 15.85 GiB" in printed


def test_lint_accepts_the_list_of_the_compiler(lint_here, tmp_path):
    (tmp_path / "operators").write_text("Add\nMultiply\n")
    code, printed, _ = lint_here("--config=tiny", "--program=eval", f"--operators={tmp_path / 'operators'}")
    assert code == 1
    assert "OP09" in printed


def test_lint_rejects_invalid_flags(lint_here, tmp_path, monkeypatch):
    for words, message in [
        (["--config=tiny", "--instance=trn9"], "trn9"),
        (["--config=tiny", "--programme=train"], "Did you mean '--program'?"),
        (["--config=tiny", "--program=trian"], "error: --program=trian: no such value. Did you mean 'train'?"),
        (
            ["--config=tiny", "--program=x"],
            "--program=x: no such value. Known: all, cool_down, decode, eval, generate, ",
        ),
        (["--config=7b", "--devices=12"], "need a multiple of 8 devices and there are 12"),
        (["--config=tiny", "--operators=/no/such/file"], "/no/such/file"),
        (["--config=tiny", "--operators=EMPTY"], "EMPTY contains no operator"),
    ]:
        monkeypatch.chdir(tmp_path)
        pathlib.Path("EMPTY").touch()
        code, _, error = lint_here(*words)
        assert code == 2
        assert message in error


def test_saving_remat_policies_emit_reduce_precision_except_for_neuron():
    layer = rematerialized(
        lambda x: jax.ad_checkpoint.checkpoint_name(x * x, "q") @ x, remat="selective", prevent_cse=False
    )
    traced = jax.jit(jax.grad(lambda x: layer(x).sum())).trace(X.astype(jnp.bfloat16))
    count = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("reduce_precision")
        for platform in ("cpu", "cuda", "neuron")
    }
    assert count == {"cpu": 1, "cuda": 1, "neuron": 0}


def test_a_step_that_does_not_donate_is_reported():
    config = resolve(config_files.load("tiny"))
    layout = programs.layout_for_neuron(config, 1)
    program = make_program(config, layout)
    assert "DN01" not in {f.rule for f in lint.check_traced(program.trace_step())}
    kept = jax.jit(lambda *xs: program.trace_step().jaxpr and xs[0])
    assert "DN01" in {f.rule for f in lint.check(kept, *program.step_arguments)}


# The table of the documentation.


def table():
    """Returns the lines of the table of rules in docs/neuron-lint.md."""
    rows = ["| id | severity | looks for | why | write instead | source |", "|---|---|---|---|---|---|"]
    for name, rule in RULES.items():
        severity = rule.severity
        severity += f"; run once: {rule.once}" if rule.once else ""
        severity += f"; several devices: {rule.many}" if rule.many else ""
        source = rule.source + (f"; seen with {rule.seen}" if rule.seen else "")
        rows.append(f"| {name} | {severity} | {rule.matches} | {rule.why} | {rule.instead} | {source} |")
    return rows


def test_documentation_has_the_table_of_the_rules():
    text = DOCS.read_text()
    hint = "If this is intended: PYTHONPATH=. python tests/neuron/test_lint.py"
    assert [line for line in text.splitlines() if line.startswith("| ")] == [r for r in table() if r[1] == " "], hint


def test_rules_have_all_their_parts():
    for name, rule in RULES.items():
        assert rule.severity in ("error", "warning", "info"), name
        assert all(
            getattr(rule, field.name)
            for field in dataclasses.fields(rule)
            if field.name not in ("once", "many", "trn1", "except_on", "seen")
        )


if __name__ == "__main__":
    before, _, rest = DOCS.read_text().partition("| id |")
    after = "\n".join(line for line in ("| id |" + rest).splitlines() if not line.startswith("|"))
    DOCS.write_text(before + "\n".join(table()) + "\n" + after.rstrip("\n") + "\n")
