"""The lint for Neuron: a bad and a clean program per rule, the shipped configs, and the reported lines.

    PYTHONPATH=.:tests/support python tests/neuron/test_lint.py

rewrites the table of docs/neuron-lint.md after an intended change of the rules.
"""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_collectives import collectives
from flax import linen
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planned import small_config
from refusals import assert_names

from hlat_jax.cli import config_files
from hlat_jax.facts.core_groups import groups_along
from hlat_jax.neuron import lint, partitioned, programs
from hlat_jax.neuron.module import Program
from hlat_jax.neuron.rules import LINTED, RULES, SEVERITIES
from hlat_jax.parallel.pipeline import PHASES
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.plan.collectives import count_collectives
from hlat_jax.program import make_program

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


def over_mesh(fn, *, sizes=(8,), dtype=jnp.float32, length=480):
    """Returns the text of a shard_map of `fn` over a mesh of virtual devices."""
    names = tuple("abcdefgh"[: len(sizes)])
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=False)
    argument = shape(length, dtype=dtype)
    lowered = jax.jit(mapped).trace(argument).lower(lowering_platforms=("neuron",))
    return lowered.as_text(debug_info=True)


def exchange(x, axis="a"):
    return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)


def exchanged(axis=("a", "b"), **options):
    return over_mesh(partial(exchange, axis=axis), sizes=(4, 8), length=2048, **options)


def wide_sum(length):
    return over_mesh(lambda x: jax.lax.psum(jnp.ones((2, length)) * x[0], "a")[0, :60])


def ring(num_devices, stride):
    pairs = [(core, (core + stride) % num_devices) for core in range(num_devices)]
    return over_mesh(lambda x: jax.lax.ppermute(x, "a", pairs), sizes=(num_devices,))


def windows(**options):
    window = {"window_dimensions": (2, 2), "window_strides": (1, 1), "padding": "VALID"}
    return lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, **window, **options)


def doc_scatter(operand, count):
    """The example on the page of EVRF031."""
    numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    indices = jax.lax.iota(jnp.int32, count).reshape(count, 1)
    return jax.lax.scatter(operand, indices, jnp.ones((count, 4)), numbers)


def convolution(**options):
    image, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3))
    return lambda x: jax.lax.conv_general_dilated(image * x[0, 0], kernel, padding=[(0, 0)] * 2, **options)


def ffi(target):
    return lambda x: jax.ffi.ffi_call(target, shape(4, 4))(x)


def rounded(bits):
    call = f"stablehlo.reduce_precision %x, format = {bits} : tensor<4xf32>"
    return module(f"%0 = {call} return %0 : tensor<4xf32>")


def power(kind):
    result = f"tensor<4x{kind}>"
    return module(f"%0 = stablehlo.power %x, %x : {result} return %0 : {result}", f"%x: {result}", result)


def random_bits(x, **options):
    return jax.lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,), **options)[1]


def keyed(impl, draw):
    return lambda x: x + draw(jax.random.key(0, impl=impl))


def argless(count):
    return (lambda *xs: sum(xs),) + (shape(2),) * count


def summed_over(num_subsets):
    """Sums over that many different subsets of the five axes of a mesh of 32 devices."""
    subsets = [[axis for bit, axis in enumerate("abcde") if number >> bit & 1] for number in range(1, num_subsets + 1)]
    return over_mesh(lambda x: sum(jax.lax.psum(x, axes) for axes in subsets), sizes=(2,) * 5)


def sort_of(dtype):
    return jnp.sort, shape(8, dtype=dtype)


def split_over_devices(fn, *, count=8, dims=(64, 16)):
    """A function of an array whose first dimension is split over 8 devices, or as many as are given."""
    mesh = AbstractMesh((count,), ("a",), axis_types=(AxisType.Auto,))
    return fn, jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P("a")))


def carried_sum(dtype):
    def total(x):
        counter = jnp.uint32(0), jnp.uint32(4)
        return jax.lax.fori_loop(*counter, lambda i, total: total + x[i].astype(dtype), x[0].astype(dtype))

    return total


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
    "RED02": (lambda x: jnp.cumsum(x, axis=0), lambda x: jnp.tril(jnp.ones((4, 4))) @ x),
    "RED03": (windows(window_dilation=(2, 2)), windows()),
    "RNG01": (keyed("threefry2x32", jax.random.normal), keyed("rbg", jax.random.normal)),
    "RNG02": (partial(random_bits, algorithm=jax.lax.RandomAlgorithm.RNG_THREE_FRY), random_bits),
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
    "OP08": (convolution(window_strides=(2, 2), lhs_dilation=(2, 2)), convolution(window_strides=(2, 2))),
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
    "INT03": (over_mesh(lambda x: jax.lax.psum(x, "a"), dtype=jnp.int32), over_mesh(lambda x: jax.lax.psum(x, "a"))),
    "INT04": (power("i64"), power("i32")),
    "GS01": ((lambda x: doc_scatter(x, 10), shape(3, 4)), (lambda x: doc_scatter(x, 3), shape(3, 4))),
    "GS02": (
        (lambda x, i: x.at[i].get(mode="clip"), X, I),
        (lambda x, i: x.at[jnp.clip(i, 0, 3)].get(mode="clip"), X, I),
    ),
    "SH01": (typed("?xf32"), typed("4xf32")),
    "SH03": (argless(129), argless(128)),
    "DN01": ((lambda x: x * 2, shape(2**18)), (jax.jit(lambda x: (x * 2, x + 1), donate_argnums=0), shape(2**18))),
    "DA01": (lambda x: jax.lax.dot(x, x, precision="BF16_BF16_F32"), lambda x: x @ x),
    "DG01": (
        (lambda x, w: jnp.einsum("tk,nk->tn", x, w), shape(127, 1024), shape(1024, 1024)),
        (
            lambda x, w: (jnp.einsum("tk,kn->tn", x[:127], w), jnp.einsum("tk,nk->tn", x, w)),
            shape(128, 1024),
            shape(1024, 1024),
        ),
    ),
    "CC06": (split_over_devices(lambda x: jnp.roll(x, 1, 0)), split_over_devices(lambda x: jnp.roll(x, 1, 1))),
    "KB01": (
        split_over_devices(lambda x: jnp.take(x, jnp.arange(3), axis=0, mode="clip")),
        over_mesh(lambda x: jnp.take(x, jnp.arange(3), mode="clip")),
    ),
    "KB02": (
        split_over_devices(lambda x: x.at[jnp.arange(3)].add(1.0)),
        over_mesh(lambda x: x.at[jnp.arange(3)].add(1.0)),
    ),
    "KB03": (carried_sum(jnp.uint32), carried_sum(jnp.int32)),
    "KB04": (
        (lambda x, i: x.at[i].set(jnp.flip(x[i], -1)), X, I),
        (lambda x, y, i: x.at[np.array([0, 1])].set(x[np.array([1, 0])]).at[i].set(y[i] * 2), X, X, I),
    ),
    "KB09": ((lambda i: i // 6284, I), (lambda i: i // 4096 + i % 8 + jax.lax.shift_right_logical(i, 3), I)),
    "KB10": (
        lambda x: jnp.sin(jnp.maximum(x.astype(jnp.bfloat16).T, 0).astype(jnp.float32)),
        lambda x: x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T + x.astype(jnp.bfloat16).astype(jnp.float16),
    ),
    "KB11": (
        (partial(jnp.take, axis=0, mode="clip"), shape(128 * 1024, 8192), I),  # fp32, on one device
        (partial(jnp.take, axis=0, mode="clip"), shape(128 * 1024, 8192, dtype=jnp.int8), I),
    ),
    "KB12": ((lambda x: x * 2, shape(2**15, 2**15)), (lambda x: x * 2, shape(2**15, 2**15 - 1))),
    "KB14": (exchanged(dtype=jnp.int32), exchanged()),
    "CC07": (wide_sum(4096 + 24), wide_sum(4096)),
    "CC08": (over_mesh(lambda x: exchange(jnp.broadcast_to(x, (8, *x.shape)))), exchanged()),
    "KB13": (lambda x: jnp.roll(x, 1, 0), lambda x: jnp.roll(x, 1, 1)),
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
}


def rules_of(program, **options):
    return {finding.rule for finding in findings_of(program, **options)}


def findings_of(program, **options):
    if isinstance(program, str):
        return lint.check_module(program, **options)
    return lint.check(*program, **options) if isinstance(program, tuple) else lint.check(program, X, **options)


def test_lint_flags_the_bad_program_of_each_rule_but_not_the_clean_one():
    assert set(CASES) == set(RULES)
    for rule, (bad, clean) in CASES.items():
        target = "trn2" if rule == "KB13" else "trn1"
        found = [finding for finding in findings_of(bad, target=target) if finding.rule == rule]
        severities = {finding.severity for finding in found}
        assert severities == {RULES[rule].severity_in(recurring=True, target=target)}, rule
        assert all((finding.why, finding.source) == (RULES[rule].why, RULES[rule].source) for finding in found)
        assert rule not in rules_of(clean, target=target), rule


def test_severities_depend_on_target_mesh_and_recurrence():
    for rule in ("INT01", "DT08"):  # pages contradict each other for trn1
        found = {t: f.severity for t in LINTED for f in findings_of(CASES[rule][0], target=t) if f.rule == rule}
        assert found == {"trn1": "warning", "trn2": "error", "trn2-lnc1": "error"}
    eighteen_gib = (lambda x: x.sum(), shape(18 * 2**28))
    assert [target for target in LINTED if "MEM1" in rules_of(eighteen_gib, target=target)] == ["trn1", "trn2-lnc1"]
    assert [f.severity for f in findings_of(lambda x: jnp.argmax(x), recurring=False)] == ["warning"]
    looked_up, split = over_two_devices(lambda w, i: w.at[i].get(mode="clip"))
    for table, severity in ((X, "info"), (split, "warning")):
        assert {f.rule: f.severity for f in lint.check(looked_up, table, I)}["GS02"] == severity
    with pytest.raises(ValueError, match=r"^target='trn9'"):
        findings_of(lambda x: x, target="trn9")


COUNT = {"init_val": (0, jnp.zeros(4)), "body_fun": lambda c: (c[0] + 1, c[1] * 2)}


# a program, and the rule of its control flow, None where it folds away
CONTROL_FLOW = {
    "limit_of_a_constant": (lambda x: jax.lax.fori_loop(0, jnp.int32(10), lambda _, c: c + 1, x), "CF04"),
    "not": (lambda x: x + jax.lax.while_loop(lambda c: ~(c[0] < 10), **COUNT)[1], "CF03"),
    "and_data": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) & (c[1][0] < 9), **COUNT)[1], "CF03"),
    "limit_from_data": (lambda x: jax.lax.fori_loop(0, x.sum().astype(jnp.int32), lambda _, c: c + 1, x), "CF03"),
    "and_true": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) & True, **COUNT)[1], "CF04"),
    "and_false": (lambda x: x + jax.lax.while_loop(lambda c: (c[0] < 10) & False, **COUNT)[1], "CF03"),
    "convergence": (lambda x: jax.lax.while_loop(lambda e: e > 1e-3, lambda e: e * x.mean(), 1.0), "CF03"),
    "constant_index": (lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x), None),
    "platform": (lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), None),
    "index_from_data": (lambda x: jax.lax.switch(x.sum().astype(jnp.int32), [jnp.sin, jnp.cos], x), "CF01"),
}


def test_control_flow_is_refused_where_it_depends_on_data():
    for name, (program, rule) in CONTROL_FLOW.items():
        assert rules_of(program) & {"CF01", "CF03", "CF04"} == {rule} - {None}, name


def line_in(function, offset=1):
    return f"{__file__}:{function.__code__.co_firstlineno + offset} ({function.__qualname__})"


def test_a_finding_names_the_line_of_the_users_function():
    def chosen(params, x):
        hidden = jnp.tanh(x @ params["in"])
        return jnp.argmax(hidden, axis=-1).sum() + jnp.argmax(hidden, axis=0).sum()

    [finding] = [f for f in lint.check(jax.jit(chosen), {"in": jnp.ones((4, 8))}, X) if f.severity == "error"]
    assert (finding.rule, finding.count, finding.line) == ("RED01", 2, line_in(chosen, 2))
    assert_names(str(finding), RULES["RED01"].instead, "jax-neuronx-known-issues")
    [finding] = lint.check(jnp.sort, X)  # a function of JAX: the line that calls it
    assert finding.line.startswith(f"{__file__}:")


def test_a_finding_names_the_line_of_what_cannot_be_lowered():
    def decomposed(x):
        return jnp.linalg.svd(x)[1]

    def printed(x):
        jax.debug.print("{}", x)
        return x

    def called_back(x):
        return jax.pure_callback(np.sin, shape(4, 4), x)

    def refusing(x):
        raise ValueError("own")

    for broken, op in ((decomposed, "eigh"), (printed, "debug_print"), (called_back, "EmitPythonCallback")):
        [finding] = lint.check(broken, X)
        assert (finding.rule, finding.op, finding.line) == ("LW01", op, line_in(broken))
    with pytest.raises(ValueError, match="own"):
        lint.check(jax.jit(refusing), X)


# A valid program of any types and values is checked.


def complex_rope(x):
    turned = jax.lax.complex(x[:, :2], x[:, 2:]) * jnp.exp(1j * jnp.arange(4.0))[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def over_two_devices(fn):
    return split_over_devices(fn, count=2, dims=(4, 4))


def added(dtype):
    """Adds a constant of a type, once as one number and once as many."""
    return lambda x: x.astype(dtype) + np.full((4, 4), 1, dtype) + np.arange(4).astype(dtype)


# a program, and its errors and warnings
ODD = {
    "complex_constant": (lambda x: (x + 1j * x).real, {"DT01"}),
    "complex_rope": (complex_rope, {"DT01"}),
    "complex_rope_partitioned": (over_two_devices(complex_rope), {"DT01"}),
    "key": ((lambda key: jax.random.uniform(key, (2,)), jax.eval_shape(lambda: jax.random.key(0))), {"RNG01"}),
    "infinite_limit": (lambda x: x + jax.lax.while_loop(lambda c: c < jnp.inf, lambda c: c + 1.0, 0.0), {"CF03"}),
    "infinite_bound_of_an_index": (lambda x: x[jnp.clip(x[0], -jnp.inf, jnp.inf).astype(jnp.int32)], set()),
    "nan_index": (lambda x: x[jnp.full(4, jnp.nan).astype(jnp.int32)], set()),
    **{kind: (added(kind), {"DT04"}) for kind in ("int4", "uint2", "float4_e2m1fn")},
    **{kind: (added(kind), {"DT03"}) for kind in ("float8_e4m3fnuz", "float8_e4m3b11fnuz")},
    **{kind: (added(kind), set()) for kind in ("int8", "bool", "bfloat16", "float8_e4m3")},
}


def test_lint_checks_a_program_of_any_type_and_value():
    for case, (program, expected) in ODD.items():
        assert {finding.rule for finding in findings_of(program) if finding.severity != "info"} == expected, case


# Indices that the program determines.

TABLE = shape(32, 8)
CLIP = {"axis": 0, "mode": "clip"}


def embedded(count):
    embed = linen.Embed(32, 8)
    return lambda table: embed.apply({"params": {"embedding": table}}, jnp.broadcast_to(jnp.arange(count), (4, count)))


def nested(i):
    return lambda w: jax.jit(lambda v, i: jnp.take(v, i, axis=0))(w, i())


def by_data(w):
    return w[0, 0].astype(jnp.int32)


# a function of a table of 32 rows, and its rule: "" where all indices are in bounds
INDICES = {
    "take_gradient": (jax.grad(lambda w: jnp.take(w, jnp.arange(32), axis=0).sum()), ""),
    "embed": (embedded(32), ""),
    "of_two_axes": (lambda w: w[jnp.arange(32)[:, None], jnp.clip(jnp.arange(32), 0, 7)], ""),
    "reversed": (lambda w: jnp.take(w, 31 - jnp.arange(32), axis=0), ""),
    "set": (lambda w: w.at[jnp.arange(32)].set(1.0), ""),
    "nested": (nested(lambda: jnp.arange(32)), ""),
    "constant": (lambda w: w[np.array([0, 5, 31])], ""),
    "clipped_data": (lambda w: w[jnp.clip(by_data(w) + jnp.arange(9), 0, 31)], ""),
    "start_of_a_slice": (lambda w: jax.lax.dynamic_slice_in_dim(w, by_data(w), 1), ""),
    "take_clip_outside": (lambda w: jnp.take(w, jnp.arange(40), **CLIP), "GS01"),  # the gather itself receives all
    "plain_outside": (lambda w: w[jnp.arange(33)], "GS01"),
    "reversed_outside": (lambda w: jnp.take(w, 32 - jnp.arange(32), axis=0), "GS01"),
    "nested_outside": (nested(lambda: jnp.arange(40)), "GS01"),
    "constant_outside": (lambda w: w[np.array([0, 5, 32])], "GS01"),
    "data": (lambda w: w.at[by_data(w) + jnp.zeros(2, jnp.int32)].get(mode="clip"), "GS02"),
    "not_followed": (lambda w: jnp.take(w, jnp.arange(32) % 5, axis=0), "GS02"),
    "rounded": (lambda w: w[jnp.full(2, 31.7).astype(jnp.int32)], "GS02"),
    "clipped_too_far": (lambda w: w.at[jnp.clip(by_data(w) + jnp.zeros(2, jnp.int32), 0, 40)].get(mode="clip"), "GS02"),
    "overflow": (
        lambda w: w.at[jnp.minimum(jnp.clip(by_data(w) + jnp.zeros(2, jnp.int32), 0, 2**30) * 4, 31)].get(mode="clip"),
        "GS02",
    ),
}


def test_indices_are_compared_with_the_rows_of_their_table():
    for case, (program, rule) in INDICES.items():
        assert {"GS01", "GS02"} & rules_of((program, TABLE)) == {rule} - {""}, case


def test_a_shared_function_is_checked_at_each_call():
    def both(w, v):
        inside = jnp.take(w, jnp.arange(32), axis=0)
        outside = jnp.take(v, jnp.arange(32) + 9, axis=0)
        return inside + outside

    [finding] = [f for f in lint.check(both, TABLE, TABLE) if f.severity != "info"]
    assert (finding.rule, finding.op, finding.count) == ("GS01", "stablehlo.gather", 1)
    assert_names(finding.what, "40", "dimension 0", "f32[32,8]")
    assert finding.line == line_in(both, 2)


# What the partitioner does.


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "tensor": 2, "zero1": True}, {"pipe": 2, "data": 2, "tensor": 2}],
    ids=str,
)
def test_replica_groups_match_the_compiled_step(degrees):
    config = small_config(m=2, remat="none", **degrees)
    layout = make_layout(config.parallel, jax.devices()[:8], num_kv_heads=config.model.num_kv_heads)
    traced = make_program(config, layout).trace_step()
    mesh, devices = dict(layout.mesh.shape), np.arange(8)
    compiled = count_collectives(collectives(traced.lower().compile().as_text(), layout.mesh))
    kinds = {axes for kind, axes in compiled if kind != "collective-permute"}
    expected = {tuple(map(tuple, groups_along(mesh, axes, devices=devices).tolist())) for axes in kinds}
    root = traced.lower(lowering_platforms=("neuron",)).compiler_ir("stablehlo").operation
    predicted = partitioned.replica_groups(Program(root), partitioned.run_shardy(root))  # also those that it adds
    # XLA may merge two sums into one, but uses no group that was not predicted
    assert expected <= {tuple(map(tuple, np.sort(groups, axis=1).tolist())) for _, groups in predicted}
    assert expected


def sharded(*dims, dtype=jnp.float32, spec):
    """An array over a mesh of 2 x 4 x 2 virtual devices."""
    mesh = AbstractMesh((2, 4, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def test_collectives_added_by_the_partitioner_are_found():
    def total(x):
        return x.sum()

    placed = sharded(64, spec=P("a"))

    def moved(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(placed.sharding.mesh, P("c")))

    found = lint.check(total, sharded(64, dtype=jnp.int32, spec=P("b")))
    [finding] = [finding for finding in found if finding.rule == "INT03"]
    assert (finding.severity, finding.op, finding.line) == ("error", "sdy.all_reduce", line_in(total))
    assert rules_of((total, sharded(64, spec=P("b")))) <= {"CC05"}
    assert rules_of((total, sharded(64, dtype=jnp.int32, spec=P()))) == set()
    [finding] = lint.check(moved, placed)
    assert (finding.rule, finding.severity, finding.line) == ("CC02", "warning", line_in(moved))


def convolved(window, stride=1, dim=16):
    kernel, numbers = jnp.ones((window, 1, dim)), ("NHC", "HIO", "NHC")
    options = {"feature_group_count": dim, "dimension_numbers": numbers}
    return lambda x: jax.lax.conv_general_dilated(x[None], kernel, (stride,), "SAME", **options)[0]


# functions of f32[64,16] whose first dimension is split, and whether XLA's partitioner adds permutes to them
SHIFTS = {
    "roll": (lambda x: jnp.roll(x, 1, 0), True),
    "difference": (lambda x: x[1:] - x[:-1], True),
    "reversal": (lambda x: x[::-1], True),
    "halves": (lambda x: x[:32] * x[32:], True),
    "padding": (lambda x: jnp.pad(x, ((8, 0), (0, 0)))[:64], True),
    "windows": (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME"), True),
    "convolution": (convolved(3), True),
    "convolution_of_patches": (convolved(2, stride=2), False),
    "strided_convolution": (convolved(3, stride=2), True),
    "convolution_of_points": (convolved(1), False),
    "convolution_of_columns": (lambda x: convolved(3, dim=64)(x.T).T, False),
    "other_dimension": (lambda x: jnp.roll(x, 1, 1) + x[:, ::-1], False),
    "elementwise": (lambda x: x * 2 + jnp.arange(64.0)[:, None], False),
}


def test_shifts_are_found_where_xla_adds_permutes():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    placed = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    for case, (fn, is_shift) in SHIFTS.items():
        compiled = jax.jit(fn).trace(placed).lower().compile().as_text()
        assert ("collective-permute" in compiled) == is_shift, case
        found = [f for f in lint.check(*split_over_devices(fn)) if f.rule == "CC06"]
        assert bool(found) == is_shift, case
        for finding in found:
            assert finding.line.startswith(f"{__file__}:{fn.__code__.co_firstlineno} ")
            assert finding.what


ROWS_MOVED = {
    "roll": (lambda x: jnp.roll(x, 1, 0), True),
    "padding": (lambda x: jnp.pad(x, ((3, 0), (0, 0)))[:64], True),
    "convolution": (convolved(4), True),
    "zeros_first": (lambda x: jnp.concatenate([jnp.zeros((1, 16)), x[:-1]]), True),
    "columns": (lambda x: jnp.roll(x, 1, 1), False),
    "halves": (lambda x: x[:32] * x[32:], False),
    "appended": (lambda x: jnp.concatenate([x, x[:1]]), False),
    "negative_padding": (lambda x: jax.lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 0))), True),
    "padding_of_a_slice": (lambda x: jnp.pad(x[1:], ((0, 1), (0, 0))), True),
    "padding_back": (lambda x: jnp.pad(x[1:], ((1, 0), (0, 0))), False),
    "negative_padding_alone": (lambda x: jax.lax.pad(x, 0.0, ((-1, 0, 0), (0, 0, 0))), False),
    "gradient_of_a_part": (jax.grad(lambda x: jnp.sin(x[3:5]).sum()), False),
}


def test_shifts_along_rows_are_found_where_a_core_is_two():
    for case, (fn, is_shift) in ROWS_MOVED.items():
        assert ("KB13" in rules_of((fn, shape(64, 16)), target="trn2")) == is_shift, case
        assert "KB13" not in rules_of((fn, shape(64, 16)), target="trn2-lnc1"), case


def widened(x):
    return x.astype(jnp.float32)


ROUNDED = {
    "select": (lambda x: widened(jnp.where(x > 0, x.astype(jnp.bfloat16), 0)), True),
    "clip": (lambda x: widened(jnp.clip(x.astype(jnp.bfloat16), 0, 1)), True),
    "other_side": (lambda x: widened(jnp.maximum(0, x.astype(jnp.bfloat16))), True),
    "function": (lambda x: jax.jit(widened)(x.astype(jnp.bfloat16)), True),
    "computed": (lambda x: widened(jnp.where(x > 0, x.astype(jnp.bfloat16) + 1, 0)), False),
    "condition": (lambda x: jnp.where(widened(x.astype(jnp.bfloat16) + 1) > 0, x, 0), False),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_casts_and_back_are_found_across_selects_and_functions(name):
    fn, is_pair = ROUNDED[name]
    assert ("KB10" in rules_of(fn)) == is_pair


def test_tables_are_measured_on_one_device():
    mesh = AbstractMesh((32,), ("a",), axis_types=(AxisType.Auto,))

    def local(table, ids):
        return jnp.take(table, ids, axis=0, mode="clip")

    table = jax.ShapeDtypeStruct((128 * 1024, 8192), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P()), out_specs=P(), check_vma=False)
    assert "KB11" in rules_of((local, shape(128 * 1024, 8192), I))
    assert not {"KB11", "KB12"} & rules_of((mapped, table, I))
    assert "KB12" in rules_of((lambda x: x[0], shape(128 * 1024, 8192)))  # an argument
    assert "KB12" not in rules_of((lambda x: x[0] + jnp.ones((2**16, 2**16))[0, 0], shape(2)))  # never stored


def test_exchanges_added_by_the_partitioner_are_found():
    mesh = AbstractMesh((8,), ("a",), axis_types=(AxisType.Auto,))
    for dtype, found in ((jnp.int32, {"KB14"}), (jnp.float32, set())):
        x = jax.ShapeDtypeStruct((64, 1024), dtype, sharding=NamedSharding(mesh, P("a")))
        constrained = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P(None, "a"))))
        assert rules_of((constrained, x)) & {"KB14"} == found


def test_unequal_splits_and_float_literals_lower_as_expected():
    def qkv(x):
        return jnp.split(x, [3, 5], axis=-1), x > 0.5

    text = jax.jit(qkv).trace(jnp.ones((4, 9), jnp.bfloat16)).lower(lowering_platforms=("neuron",)).as_text()
    assert text.count("stablehlo.slice") == 3
    assert "f64" not in text


def test_sizes_and_instructions_are_those_of_one_device():
    for fn, dims, rule in (
        (lambda x: (x * 2).sum(), (2**21, 2**11), "MEM1"),
        (lambda x: x @ x.T, (2**14, 2**13), "CG02"),
    ):
        split, whole = (sharded(*dims, spec=spec) for spec in (P(("a", "b", "c")), P()))
        assert rule in rules_of((fn, whole))
        assert rule not in rules_of((fn, split))
    ten_gib = shape(10 * 2**28)
    assert "MEM1" in rules_of((lambda x: x * 2, ten_gib))
    assert "MEM1" not in rules_of((jax.jit(lambda x: x * 2, donate_argnums=0), ten_gib))  # the result is in its place


def test_groups_are_compared_with_the_wiring_of_the_target():
    for sizes, axis, disputed in (((2, 8), "b", set()), ((8, 4), "a", {*LINTED})):
        eight = over_mesh(lambda x, axis=axis: jax.lax.psum(x, axis), sizes=sizes)
        found = {target: rules_of(eight, target=target) & {"CC04", "CC05"} for target in LINTED}
        assert found == {target: {"CC05"} if target in disputed else set() for target in LINTED}
    text = over_mesh(lambda x: jax.lax.psum(x, "b"), sizes=(8, 4))
    placed = [first + step for first in range(8) for step in (0, 8, 16, 24)]
    assert "CC04" in rules_of(text)
    assert not rules_of(text, placement=placed) & {"CC04", "CC05"}
    for count, hops, severity in ((96, 32, "error"), (32, 10, "warning")):  # between nodes, and inside of one
        assert {f.severity for f in lint.check_module(ring(count, hops)) if f.rule == "CC02"} == {severity}


def test_all_to_all_over_cores_apart_is_refused_beside_an_equal_sum():
    def exchange(x):
        return jax.lax.all_to_all(jnp.pad(jax.lax.psum(x, "a"), (0, 1)), "a", 0, 0, tiled=True)

    four = over_mesh(exchange, sizes=(4, 8))  # cores 0, 8, 16, 24
    assert rules_of(four) & {"CC04", "CC05"} == {"CC04"}
    sums = over_mesh(lambda x: jax.lax.psum(jax.lax.psum(x, "a") * 2, "a"), sizes=(4, 8))
    assert not rules_of(sums) & {"CC04", "CC05"}


def test_permutes_must_be_rings_of_linked_chips_in_a_node():
    for target, pairs, problem in (
        ("trn1", [(0, 1), (1, 2), (2, 0)], None),
        ("trn1", [(0, 6), (6, 30), (30, 24), (24, 0)], None),  # the corners of the torus are neighbors
        ("trn2", [(0, 7), (7, 0)], None),
        ("trn1", [(0, 10), (10, 0)], "2 of 2 pairs"),
        ("trn2", [(0, 10), (10, 0)], "2 of 2 pairs"),
        ("trn1", [(0, 32), (32, 0)], "node"),
        ("trn1", [(0, 1), (1, 2)], "rings"),
        ("trn1", [(0, 0), (1, 1)], "itself"),
    ):
        found = partitioned.permute_problem(np.asarray(pairs), target=target)
        assert found is problem or problem in found


# Our programs.


def check_shipped(name, target, neuron_here, report_file, *, more=()):
    """Asserts that the lint of a shipped config has no error and no unexplained warning; returns what is explained."""
    validated = ("--config.data.validation=held_out.parquet",) if name == "70b" else ()  # it is not validated by itself
    words = (f"--config={name}", f"--instance={target}", f"--json={report_file}", *validated, *more)
    code, printed, error = neuron_here("lint", *words)
    assert (code, error) == (0, "")
    report = json.loads(report_file.read_text())
    expected = ["start", *(PHASES if name == "70b" else ["microbatch"]), "update"]
    expected += ["norms", "digest", "eval"] + (["decode"] if name == "tiny" else [])
    assert list(report["programs"]) == expected
    explained = set()
    for program, found in report["programs"].items():
        rows = found["findings"]
        assert not [row for row in rows if row["severity"] == "error"]
        assert not [row for row in rows if row["severity"] == "warning" and not row["explained"]]
        assert {row["rule"] for row in rows if row["rule"] in ("RP02", "GS02", "RED01")} == set(), program
        assert all(row["line"] for row in rows)
        explained |= {(program, row["rule"]) for row in rows if row["explained"]}
    devices = {"tiny": 2, "node": 32, "160m": 8, "1b": 8, "7b": 2048, "70b": 8192, "llama3_8b": 1024}
    devices |= {"llama3_1b": 128, "qwen3_0_6b": 128, "qwen3_8b": 512, "mistral_7b": 512}
    assert f"{name} for {target}, {devices[name]:,} devices" in printed
    return explained


def test_a_shipped_config_has_no_unexplained_finding(tmp_path, neuron_here):
    check_shipped("160m", "trn2", neuron_here, tmp_path / "found.json")
    code, _, error = neuron_here("lint", "--config=llama3_8b", "--instance=trn1")  # a recipe of trn2
    assert (code, "model.attention='nki'" in error) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "7b"])
def test_muon_has_no_unexplained_finding(name, tmp_path, neuron_here):
    check_shipped(name, "trn1", neuron_here, tmp_path / "found.json", more=["--config.optimizer.name=muon"])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_every_explained_finding_occurs_in_a_shipped_config(target, tmp_path, neuron_here):
    found = tmp_path / "found.json"
    without = {"continue"} | ({"llama3_8b"} if target == "trn1" else set())  # a recipe for the model of given weights
    names = set(config_files.shipped_configs()) - without
    explained = set().union(*(check_shipped(name, target, neuron_here, found) for name in sorted(names)))
    if target == "trn2":
        neuron_here("lint", "--config=7b", "--program=generate", "--instance=trn2", f"--json={found}")
        generation = json.loads(found.read_text())["programs"].items()
        explained |= {(program, row["rule"]) for program, one in generation for row in one["findings"]}
        assert explained >= set(programs.EXPLAINED)


def test_lint_exits_with_1_and_names_the_line(monkeypatch, neuron_here):
    from hlat_jax.ops import embedding

    original = embedding.lookup

    def with_argmax(table_VD, tokens_BT, *, ctx):
        return original(table_VD, tokens_BT + 0 * jnp.argmax(tokens_BT), ctx=ctx)

    monkeypatch.setattr("hlat_jax.model.lookup", with_argmax)
    code, printed, _ = neuron_here("lint", "--config=tiny", "--program=eval")
    assert code == 1
    assert_names(printed, "eval: 1 ", f"{__file__}:{with_argmax.__code__.co_firstlineno + 1}", RULES["RED01"].instead)
    too_large = ("--config.parallel.zero1=False", "--config.precision.policy=mixed")
    code, printed, _ = neuron_here("lint", "--config=7b", "--program=train", *too_large)
    assert (code, "15.85 GiB" in printed) == (1, True)


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


def test_documentation_has_the_table_of_the_rules_with_all_their_parts():
    text = DOCS.read_text()
    hint = "If this is intended: PYTHONPATH=.:tests/support python tests/neuron/test_lint.py"
    assert [line for line in text.splitlines() if line.startswith("| ")] == [r for r in table() if r[1] == " "], hint
    assert all(rule.severity in SEVERITIES for rule in RULES.values())
    assert all((rule.matches, rule.why, rule.instead, rule.source) for rule in RULES.values())


if __name__ == "__main__":
    before, _, rest = DOCS.read_text().partition("| id |")
    after = "\n".join(line for line in ("| id |" + rest).splitlines() if not line.startswith("|"))
    DOCS.write_text(before + "\n".join(table()) + "\n" + after.rstrip("\n") + "\n")
