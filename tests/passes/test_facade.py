"""`from hlat_jax import passes`: what other projects import, under the transformations that they use."""

import gc
import re
import subprocess
import sys
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hlat_jax import passes
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes import facade

W, X, Y = (
    jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate([(32, 512), (8, 32, 32), (8, 32)])
)
Y = jnp.abs(Y * 100).astype(jnp.int32)
SMALL = {"max_bytes": "64KiB"}
MAKERS = {
    "autocast": passes.autocast,
    "kernels": passes.kernels,
    "chunk": passes.chunk(**SMALL),
    "select_residuals": passes.select_residuals,
    "remat": passes.remat(budget="16MiB"),
}


def loss(w, x, y):
    hidden = jnp.tanh(x @ w[:, :32])
    log_probs = jax.nn.log_softmax(hidden @ w)
    return -jnp.mean(jnp.take_along_axis(log_probs, y[..., None], -1))


def assert_close(ours, plain):
    """In the norm of all results together: bf16 rounds to 4e-3."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True))
    difference = np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs))
    assert difference < 2e-2 * np.sqrt(sum(np.sum(np.square(b)) for _, b in pairs))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_goes_through_the_transformations_of_jax(name):
    ours = MAKERS[name](loss)
    transformed = {
        "jit of grad": lambda fn: jax.jit(jax.value_and_grad(fn))(W, X, Y),
        "grad of jit": lambda fn: jax.grad(jax.jit(fn))(W, X, Y),
        "vmap": lambda fn: jax.vmap(jax.grad(fn), (None, 0, 0))(W, X, Y),
        "checkpoint": lambda fn: jax.grad(jax.checkpoint(fn))(W, X, Y),
        "scan": lambda fn: jax.lax.scan(lambda total, row: (total + fn(W, *row), None), 0.0, (X, Y))[0],
    }
    for transform in transformed.values():
        assert_close(transform(ours), transform(loss))
    assert name in ours.report()


@pytest.mark.quick_cases("remat")
@pytest.mark.parametrize("name", [*MAKERS, "a small budget"])
def test_a_pass_takes_a_loss_with_auxiliary_values(name):
    def with_aux(w, x, y):
        return loss(w, x, y), {"mean": jnp.mean(x @ w), "rows": len(x)}

    ours = MAKERS.get(name, passes.remat(budget="400KiB"))(with_aux)
    run = jax.value_and_grad(ours, has_aux=True)
    assert_close(run(W, X, Y), jax.value_and_grad(with_aux, has_aux=True)(W, X, Y))
    model = nnx.Linear(32, 512, rngs=nnx.Rngs(0))
    of_module = MAKERS.get(name, passes.remat(budget="400KiB"))(lambda model, x, y: with_aux(model.kernel[...], x, y))
    (value, aux), grads = nnx.value_and_grad(of_module, has_aux=True)(model, X, Y)
    assert aux["rows"] == len(X)
    assert_close((value, grads.kernel[...]), jax.value_and_grad(loss)(model.kernel[...], X, Y))


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_goes_under_shard_map(name):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def total(fn):
        local = jax.shard_map(
            lambda w, x, y: jax.lax.pmean(fn(w, x, y), "data"),
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=P(),
        )
        return jax.jit(jax.value_and_grad(local))(W, X, Y)

    assert_close(total(MAKERS[name](loss)), total(loss))


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_takes_a_flax_nnx_module(name):
    class Head(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(W)

    def of_module(head, x, y):
        return loss(head.w[...], x, y)

    ours = nnx.jit(nnx.value_and_grad(MAKERS[name](of_module)))(Head(), X, Y)
    assert_close(ours, nnx.jit(nnx.value_and_grad(of_module))(Head(), X, Y))


class Noisy(nnx.Module):
    """A module that updates statistics and two references to one stream of random numbers, and has tied weights."""

    def __init__(self):
        self.first = self.second = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(32, rngs=nnx.Rngs(0))
        self.rngs = self.same_rngs = nnx.Rngs(dropout=1)

    def __call__(self, x):
        x = self.norm(self.first(x)) * jax.random.bernoulli(self.rngs.dropout(), 0.5, x.shape)
        return jnp.tanh(self.second(x)) * jax.random.bernoulli(self.same_rngs.dropout(), 0.5, x.shape)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_keeps_the_updates_of_a_flax_nnx_module(name):
    def of_module(module, x):
        return jnp.mean(module(x) ** 2)

    ours, plain = Noisy(), Noisy()
    for _ in range(2):  # the second step reads the updates of the first
        fn = nnx.jit(nnx.value_and_grad(MAKERS[name](of_module)))
        assert_close(fn(ours, X), nnx.jit(nnx.value_and_grad(of_module))(plain, X))
    assert_close(nnx.state(ours, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))
    assert ours.rngs.dropout.count[...] == plain.rngs.dropout.count[...] == 4


@pytest.mark.slow
def test_passes_one_over_another_keep_the_updates_of_a_module():
    @passes.remat(budget="16MiB", step=nnx.value_and_grad)
    @passes.select_residuals
    @passes.chunk(**SMALL)
    def of_module(module, x):
        return jnp.mean(module(x) ** 2)

    ours, plain = Noisy(), Noisy()
    nnx.value_and_grad(of_module)(ours, X)
    plain(X)
    assert_close(nnx.state(ours, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))
    assert "remat" in of_module.report()


def test_a_module_that_gains_a_variable_under_a_pass_is_refused():
    class Growing(nnx.Module):
        def __call__(self, x):
            self.last = nnx.Variable(x)
            return jnp.sum(x)

    def of_module(module, x):
        return module(x)

    with pytest.raises(ValueError, match=r"of_module adds variables .* nnx.split"):
        passes.chunk(of_module)(Growing(), X)


def test_a_variable_whose_structure_changes_under_a_pass_is_refused():
    class Cache(nnx.Module):
        def __init__(self):
            self.kept = nnx.Variable({"first": jnp.ones(3), "second": jnp.zeros(3)})

    def renamed(cache, x):
        kept = cache.kept.get_value()
        cache.kept.set_value({"second": kept["second"] + 5, "third": kept["first"]})
        return jnp.sum(x)

    with pytest.raises(ValueError, match=r"renamed .* structure of a variable"):
        passes.chunk(renamed)(Cache(), X)


def test_a_module_under_a_budget_computes_values_again():
    def of_module(module, x):
        w = module.first.kernel[...]
        return jnp.mean(jax.lax.scan(lambda x, _: (jnp.sin(jnp.exp(-jnp.cos(x @ w))), None), module(x), length=16)[0])

    plain, ours = Noisy(), Noisy()
    fitted = passes.remat(of_module, budget="1MiB")  # without recomputation 2.3 MiB
    assert_close(nnx.value_and_grad(fitted)(ours, X), nnx.value_and_grad(of_module)(plain, X))
    assert_close(nnx.state(ours, nnx.BatchStat), nnx.state(plain, nnx.BatchStat))
    assert re.search(r"^remat .* kept +nothing", fitted.report(), re.MULTILINE)


def test_updates_of_a_module_have_no_gradients_in_a_report():
    class Cached(nnx.Module):
        def __init__(self):
            self.w, self.seen = nnx.Param(W), nnx.Variable(jnp.zeros((8, 32, 512)))

        def __call__(self, x):
            self.seen[...] = jnp.tanh(jax.lax.stop_gradient(x) @ self.w[...])
            return jnp.sum(x @ self.w[...])

    fn = passes.select_residuals(lambda module, x: module(x))
    fn(Cached(), X)
    plain = next(line for line in fn.report().splitlines() if line.startswith("function"))
    assert plain.split()[1] == "4"  # two of the values, and of the sum the gradients by both operands


def test_a_budget_for_another_program_than_a_loss_asks_for_it():
    with pytest.raises(ValueError, match=r"no float arrays\. Put the parameters first"):
        passes.remat(lambda y, w: jnp.sum(w), budget="1GiB")(Y, W)
    with pytest.raises(ValueError, match=r"neither a loss nor \(loss, auxiliary values\). Give step="):
        passes.remat(lambda w: (w, w, w), budget="1GiB")(W)
    assert passes.remat(lambda w: [jnp.sum(w), w], budget="1GiB")(W)[0] == jnp.sum(W)
    with pytest.raises(TypeError, match=r"'a name'.*not a valid JAX type"):
        passes.chunk(lambda w: (jnp.sum(w), "a name"))(W)


def test_a_budget_keeps_no_argument_alive():
    fitted = passes.remat(lambda w: jnp.sum(jnp.sin(w)), budget="1GiB")
    weights = jnp.ones(3)
    fitted(weights)
    weights = weakref.ref(weights)
    gc.collect()
    assert weights() is None


def test_the_step_of_a_budget_takes_the_arguments_of_the_function():
    def step(fn):
        return lambda w, x: jax.value_and_grad(fn)(w, x)

    assert passes.remat(lambda w, x: jnp.sum(w) * x, budget="1GiB", step=step)(W, 2.0) == 2 * W.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_takes_an_equinox_module(name):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(32, 512, 64, 2, key=jax.random.key(0))

    def of_module(model, x, y):
        log_probs = jax.nn.log_softmax(jax.vmap(jax.vmap(model))(x))
        return -jnp.mean(jnp.take_along_axis(log_probs, y[..., None], -1))

    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(MAKERS[name](of_module)))(model, X, Y)
    plain = eqx.filter_value_and_grad(of_module)(model, X, Y)
    assert_close((value, eqx.filter(grads, eqx.is_array)), (plain[0], eqx.filter(plain[1], eqx.is_array)))


def test_decorators_apply_to_methods_and_their_report_has_a_row_for_each():
    class Model:
        @passes.select_residuals()
        @passes.chunk(**SMALL)
        @passes.autocast(policy="bf16")
        def loss(self, w, x, y, *, scale=1.0):
            return scale * loss(w, x, y)

    jax.jit(jax.grad(lambda w: Model().loss(w, X, Y, scale=2.0)))(W)
    rows = Model.loss.report().splitlines()
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == [
        "pass",
        "function",
        "autocast",
        "chunk",
        "select_residuals",
    ]
    assert "float32" in rows[1]
    assert "bfloat16" in rows[2]
    assert "float32[8,32,512] in" in rows[3]


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_a_pass_goes_over_and_under_methods_of_a_class(kind):
    def total(*given):
        return jnp.sum(given[-1])

    class Model:
        over = passes.chunk(kind(total))
        under = kind(passes.chunk(max_bytes="1MiB")(total))

    for fn in (Model.over, Model.under, Model().over, Model().under):
        assert float(fn(W)) == float(total(W))
        assert "chunk" in fn.report()


@pytest.mark.parametrize("name", MAKERS)
def test_a_report_is_made_of_a_function_with_a_named_axis(name):
    ours = MAKERS[name](lambda w, x: jax.lax.pmean(jnp.sum(jnp.tanh(x @ w)), "rows"))
    mapped = jax.vmap(jax.grad(ours), (None, 0), axis_name="rows")
    if name == "remat":  # a program of its own has no axis
        with pytest.raises(ValueError, match=r"unbound axis name: rows. Apply remat to the function that has jax.vmap"):
            mapped(W, X)
    else:
        mapped(W, X)
        assert name in ours.report()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: jax.lax.with_sharding_constraint(x, P(None, "model")),
        lambda x: x + jax.lax.pcast(jnp.ones(()), "data", to="varying"),
    ],
    ids=["sharding constraint", "pcast"],
)
def test_a_report_is_made_of_a_function_that_reads_the_mesh(read):
    ours = passes.autocast(lambda w, x: jnp.sum(jnp.tanh(read(x) @ w)))
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=2 * (AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    jax.jit(jax.shard_map(lambda w, x: ours(w, x)[None], mesh=mesh, **specs))(W, X)
    products = [row.split()[1:3] for row in ours.report().splitlines()[1:3]]
    assert products == [["3", "float32"], ["3", "bfloat16"]]


def test_a_choice_is_searched_again_for_another_argument_without_a_shape():
    ours = passes.remat(lambda w, kind: jnp.sum(w) * (2 if kind == 1 else 3), budget="1GiB")
    assert [float(ours(W, kind)) for kind in (1, "1")] == pytest.approx([2 * W.sum(), 3 * W.sum()])


def test_a_report_takes_results_without_a_dtype():
    ours = passes.select_residuals(lambda w: (jnp.sum(jnp.sin(w)), {"rate": 0.1}))
    ours(W)
    assert "select_residuals" in ours.report()


def test_an_order_that_may_change_less_is_warned_of():
    for decorate in (passes.autocast, passes.autocast(policy="bf16")):
        with pytest.warns(UserWarning, match="autocast runs after chunk") as warned:
            decorate(passes.chunk(loss))
        assert warned[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        passes.remat(passes.select_residuals(passes.chunk(passes.kernels(passes.autocast(loss)))), budget="1GiB")


def test_a_program_applies_passes_in_the_order_without_a_warning():
    given = {"residuals": True, "chunk": "64KiB", "kernels": True, "autocast": "bf16"}
    program = passes.training_program(lambda w, batch: loss(w, *batch), optax.sgd(0.1), **given)
    names = ["select_residuals" if stage.name == "residuals" else stage.name for stage in program.stages]
    assert names == ["loss", *facade.ORDER[:-1]]


def test_a_budget_is_met_or_refused_when_the_function_is_traced():
    plain = jax.jit(jax.value_and_grad(loss)).lower(W, X, Y).compile().memory_analysis().temp_size_in_bytes
    fitted = jax.jit(jax.value_and_grad(passes.remat(loss, budget=plain // 2)))
    assert fitted.lower(W, X, Y).compile().memory_analysis().temp_size_in_bytes <= plain // 2
    with pytest.raises(passes.BudgetNotMet, match="budget"):
        jax.eval_shape(passes.remat(loss, budget="1KiB"), W, X, Y)
    with pytest.raises(ValueError, match="budget"):
        passes.remat(budget="much")
    with pytest.raises(ValueError, match="max_bytes"):
        passes.chunk(max_bytes="1 apple")


def test_memory_timeline_has_the_bytes_counted_by_hand():
    x, size = jnp.ones((64, 64)), 64 * 64 * 4
    # two products live while the second is written; the third is a result, which belongs to the caller
    points = passes.memory_timeline(lambda x: x @ x @ x @ x, x)
    assert [point.total_bytes for point in points] == [size, 2 * size, size]
    assert all(point.operation.startswith("dot_general at test_facade.py:") for point in points)

    def stacked(x):  # a carry and four rows in the loop, then the rows
        return jnp.sum(jax.lax.scan(lambda c, _: (c @ x, c), x, length=4)[1], 0)

    assert [point.total_bytes for point in passes.memory_timeline(stacked, x)] == [5 * size, 4 * size]


def test_memory_timeline_peaks_at_the_temporaries_of_a_report():
    program = passes.training_program(
        lambda params, batch: loss(params, *batch), optax.sgd(0.1), params=W, batch=(X, Y), chunk=SMALL["max_bytes"]
    )
    peaks = [
        max(point.total_bytes for point in passes.memory_timeline(stage.step.step, *program.arguments[:2], scale))
        for stage in program.stages
        for scale in [np.float32(0.0)]  # a number without a sharding
    ]
    rows = str(program).splitlines()[1:]
    assert [format_bytes(peak) in row for peak, row in zip(peaks, rows, strict=False)] == [True, True]


def test_memory_timeline_takes_the_programs_of_flax_and_jit():
    def scaled(w, x, times=1, kind="mean"):
        return times * getattr(jnp, kind)(jnp.tanh(x @ w))

    plain = passes.memory_timeline(scaled, W, X, 2)
    for by_name in ({"static_argnums": (2, 3)}, {"static_argnames": ["times", "kind"]}):
        assert passes.memory_timeline(jax.jit(scaled, **by_name), W, X, times=2, kind="mean") == plain
    assert passes.memory_timeline(jax.jit(scaled, static_argnums=2), W, X, 2) == plain
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    assert passes.memory_timeline(jax.jit(scaled, static_argnums=2, compiler_options=options), W, X, 2) == plain

    def of_module(module, x):
        return jnp.mean(module(x) ** 2)

    [compiled, ours] = (
        [point.total_bytes for point in passes.memory_timeline(program, Noisy(), X)]
        for program in (nnx.jit(nnx.value_and_grad(of_module)), nnx.value_and_grad(of_module))
    )
    assert max(compiled) == max(ours) >= X.nbytes


def test_memory_timeline_takes_the_programs_of_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(32, 512, 64, 2, key=jax.random.key(0))
    program = eqx.filter_grad(lambda model, x: jnp.mean(jax.vmap(jax.vmap(model))(x)))
    peak = max(passes.memory_timeline(program, model, X)).total_bytes
    assert max(passes.memory_timeline(eqx.filter_jit(program), model, X)).total_bytes == peak >= 8 * 32 * 512 * 4


def test_a_training_program_is_made_by_the_same_import():
    program = passes.training_program(
        lambda params, batch: loss(params, *batch), optax.sgd(0.1), autocast="bf16", options=passes.StepOptions()
    )
    _, metrics = program.step(program.init(W), (X, Y))
    assert float(metrics.loss) == pytest.approx(float(loss(W, X, Y)), rel=1e-2)


def test_the_passes_import_jax_and_numpy_only():
    code = "import sys, hlat_jax.passes as p; p.autocast; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert loaded.isdisjoint({"flax", "optax", "orbax", "grain", "absl", "ml_collections", "torch", "transformers"})
    code = "import sys, hlat_jax.passes; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_public_name_is_there_and_no_other():
    assert set(dir(passes)) == set(passes.__all__)
    assert all(getattr(passes, name) is not None for name in passes.__all__)
    with pytest.raises(AttributeError, match="unknown"):
        _ = passes.unknown
