"""The simulator of a Neuron core against float64 NumPy and the documented rules, and under every transformation."""

import inspect
import pathlib

import jax
import jax.numpy as jnp
import micro
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.parallel.sharding import make_layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.autocast_kinds import saturated
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.compile import training_program
from hlat_jax.passes.neuron_simulator import SimulatedCore, simulate
from hlat_jax.precision import policy_on
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.step import StepOptions

NEAREST, STOCHASTIC = SimulatedCore("all"), SimulatedCore("all", stochastic_rounding=True)
NUM_DRAWS = 100_000


def to_bf16(values):
    """Returns float64 numbers rounded once to the 8 significant bits of bf16, ties to even."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.rint(mantissa * 256), exponent - 8)


def is_near_tie(values):
    """Returns where float64 numbers are so near to the middle of two neighbors that fp32 may fall on its other side."""
    mantissa, _ = np.frexp(values)
    return np.abs(mantissa * 256 % 1 - 0.5) < 2**-12


def draw(fn, core, *args, step=1):
    return np.asarray(jax.jit(simulate(fn, core))((7, step), *args), np.float64)


def on_mesh(shape):
    names = ("data", "tensor")[: len(shape)]
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )


# Functions of one operation, of two arrays [n]; each with its float64 result. Sums are of terms that fp32 adds exactly.
OPERATIONS = {
    "add": (lambda a, b: a + b, lambda a, b: a + b),
    "sub": (lambda a, b: a - b, lambda a, b: a - b),
    "mul": (lambda a, b: a * b, lambda a, b: a * b),
    "div": (lambda a, b: a / b, lambda a, b: a / b),
    "sqrt": (lambda a, b: jnp.sqrt(a), lambda a, b: np.sqrt(a)),
    "square": (lambda a, b: a**2, lambda a, b: a**2),
    "exp": (lambda a, b: jnp.exp(-a), lambda a, b: np.exp(-a)),
    "log": (lambda a, b: jnp.log(a + 0), lambda a, b: np.log(a)),
    "tanh": (lambda a, b: jnp.tanh(a), lambda a, b: np.tanh(a)),
    "logistic": (lambda a, b: jax.lax.logistic(a), lambda a, b: 1 / (1 + np.exp(-a))),
    "product": (
        lambda a, b: jnp.stack([a, b], 1) @ jnp.asarray([3.0, -0.3125], a.dtype),
        lambda a, b: 3 * a - 0.3125 * b,
    ),
    "sum": (lambda a, b: jnp.stack([a, b, a], 1).sum(1), lambda a, b: 2 * a + b),
    "cumsum": (lambda a, b: jax.lax.cumsum(jnp.stack([a, b, a], 1), axis=1)[:, 2], lambda a, b: 2 * a + b),
    "scatter_add": (lambda a, b: a.at[jnp.arange(len(a))].add(b), lambda a, b: a + b),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nearest_results_are_those_of_float64_rounded_once(name, dtype):
    fn, exact = OPERATIONS[name]
    rng = np.random.default_rng(0)
    a, b = (to_bf16(rng.uniform(0.5, 4, 4096)) for _ in range(2))
    core = SimulatedCore("none" if dtype == jnp.bfloat16 else "all")
    found = draw(fn, core, jnp.asarray(a, dtype), jnp.asarray(b, dtype))
    wanted = exact(a, b)
    is_one_of_fp32 = name in ("exp", "log", "tanh", "logistic")  # accurate to a few bits of fp32
    compared = ~is_near_tie(wanted) if is_one_of_fp32 else np.full(wanted.shape, True)
    assert compared.mean() > 0.99
    np.testing.assert_array_equal(found[compared], to_bf16(wanted)[compared])


@pytest.mark.parametrize("name", OPERATIONS)
def test_stochastic_results_are_unbiased_with_the_variance_of_two_neighbors(name):
    fn, exact = OPERATIONS[name]
    a, b = to_bf16(1.37), to_bf16(0.0283)
    found = draw(fn, SimulatedCore(stochastic_rounding=True), *(jnp.full(NUM_DRAWS, x, jnp.bfloat16) for x in (a, b)))
    value = exact(a, b)
    step = 2.0 ** (np.frexp(value)[1] - 8)
    low = np.floor(value / step) * step
    assert low < value, "choose operands whose result bf16 cannot represent"
    assert set(np.unique(found)) == {low, low + step}
    variance = (value - low) * (low + step - value)
    assert abs(found.mean() - value) < 5 * np.sqrt(variance / NUM_DRAWS)
    # the variance of the sample's variance, for two values, is below its square over n times 1 / (p (1 - p))
    assert found.var() == pytest.approx(variance, rel=5 / np.sqrt(NUM_DRAWS * variance) * step)


def test_casts_and_arguments_are_rounded_stochastically():
    x = jnp.full(NUM_DRAWS, 1.003, jnp.float32)
    for fn, core in (
        (lambda x: x.astype(jnp.bfloat16), SimulatedCore(stochastic_rounding=True)),
        (lambda x: x, STOCHASTIC),
    ):
        found = draw(fn, core, x)
        assert set(found) == {1.0, 1.0078125}
        assert found.mean() == pytest.approx(1.003, abs=5 * 0.004 / np.sqrt(NUM_DRAWS))


@pytest.mark.slow
def test_moves_selections_and_maxima_do_not_round():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.bfloat16)

    def moves(x):
        y = jnp.concatenate([x.T.reshape(8, 6), -x[::-1]], 0)
        y = jnp.where(y > 0.5, y, jnp.abs(y)).at[2].set(x[0])
        return jnp.maximum(y.max(0), jax.lax.dynamic_slice_in_dim(jnp.sort(y, 0), 1, 6, 0)), jnp.pad(y, 1)

    found = simulate(moves, SimulatedCore(stochastic_rounding=True))((1,), x)
    jax.tree.map(np.testing.assert_array_equal, found, moves(x))


def test_a_saturated_cast_ends_at_the_largest_number():
    cast = simulate(lambda x: saturated(x, jnp.bfloat16), SimulatedCore())
    found = cast((), jnp.asarray([3.4e38, -3.4e38, jnp.inf, 1.003], jnp.float32)).astype(jnp.float32)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    np.testing.assert_array_equal(found, [largest, -largest, np.inf, to_bf16(1.003)])


def test_without_auto_cast_fp32_is_unchanged():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)

    def fn(x):
        return jax.grad(lambda x: jnp.sum(jax.nn.softmax(x @ x) * jnp.arange(16.0)))(x)

    np.testing.assert_array_equal(jax.jit(fn)(x), draw(fn, SimulatedCore(stochastic_rounding=True), x))


def test_auto_cast_matmult_rounds_the_operands_of_products_alone():
    x, y = (jnp.asarray(np.random.default_rng(seed).normal(size=(8, 8)), jnp.float32) for seed in (0, 1))
    found = draw(lambda x, y: (x @ y) * 1.001, SimulatedCore("matmult"), x, y)
    wanted = (to_bf16(x) @ to_bf16(y)) * np.float32(1.001)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert (to_bf16(found) != found).any()


@pytest.mark.slow
def test_constants_are_rounded_to_nearest_and_what_comes_from_integers_not_before_it_meets_others():
    def fn(x, count):
        table = jnp.cos(count * 0.37)
        return x * 0.95, table, x * table, jnp.sum(x > 0).astype(jnp.float32)

    ones, count = jnp.ones(1001), jnp.arange(1001)
    scaled, table, met, num_positive = simulate(fn, STOCHASTIC)((1,), ones, count)
    assert num_positive == 1001  # which bf16 cannot represent
    np.testing.assert_array_equal(scaled, to_bf16(np.full(1001, np.float32(0.95))))
    np.testing.assert_array_equal(table, jnp.cos(count * 0.37))
    np.testing.assert_array_equal(met, to_bf16(np.asarray(table)))


def test_constants_in_branches_and_loops_are_rounded_where_they_join_other_values():
    def branch(x, number):
        return jax.lax.cond(number > 0, lambda: x, lambda: jnp.full_like(x, 0.1))

    def overwrite(x, number):
        return jax.lax.scan(lambda carry, _: (jnp.full_like(carry, 0.1), carry), x, length=2)[0]

    def accumulate(x, number):
        return jax.lax.scan(lambda carry, term: (carry + term, None), jnp.zeros_like(x[0]), x)[0]

    def hand_over(x, number):  # the first carry comes from the second, which comes from x
        return jax.lax.scan(lambda carry, term: ((carry[1], carry[1] + term), carry[0] * 1.7), (0.0, 0.0), x)[1]

    def never(x, number):  # no iteration: the start is the result
        return jax.lax.while_loop(
            lambda carry: carry[0] < number, lambda carry: (1, carry[1] + x), (0, 0.1 + 0 * number)
        )[1]

    x = jnp.full(8, 1.003, jnp.float32)
    for fn in (branch, overwrite, accumulate, hand_over, never):
        value = x[0] if fn is never else x
        found = draw(fn, STOCHASTIC, value, jnp.int32(0))
        np.testing.assert_array_equal(found, to_bf16(found))


def layer(x, w):
    return jnp.tanh(x @ w) + x, None


def through_scan(w, x):
    return jnp.mean(jax.nn.log_softmax(jax.lax.scan(layer, x, w)[0]) ** 2)


def through_remat(w, x):
    return jnp.mean(jax.nn.log_softmax(jax.lax.scan(jax.checkpoint(layer), x, w)[0]) ** 2)


def through_cond(w, x):
    x = jax.lax.cond(x[0, 0] > 0, lambda x: layer(x, w[0])[0], lambda x: jnp.zeros_like(x), x)
    return jnp.mean(jax.nn.relu(x) ** 2)  # relu has a custom_jvp


def through_fori(w, x):
    body = jax.checkpoint(lambda number, x: layer(x, w[number])[0])
    return jnp.mean(jax.lax.fori_loop(0, 3, body, x) ** 2)


@jax.custom_vjp
def halved_gradient(x):
    return x


halved_gradient.defvjp(lambda x: (x, None), lambda _, grad: (grad / 2,))


def through_custom_vjp(w, x):
    return jnp.mean(halved_gradient(jax.jit(layer)(x, w[1])[0]) ** 2)


def through_autocast(w, x):
    return autocast(through_remat, "bf16")(w, x)


def through_shard_map(w, x):
    def local(w, x):
        return jax.lax.pmean(through_scan(w, x), "data")

    return jax.shard_map(local, mesh=on_mesh((4,)), in_specs=(P(), P("data")), out_specs=P())(w, x)


FUNCTIONS = (through_scan, through_remat, through_cond, through_fori)
FUNCTIONS += (through_custom_vjp, through_autocast, through_shard_map)
ARGS = tuple(
    jnp.asarray(np.random.default_rng(seed).normal(size=shape) / scale, jnp.float32)
    for seed, shape, scale in ((0, (3, 16, 16), 4), (1, (8, 16), 1))
)


@pytest.mark.quick_cases("through_scan", "through_remat")
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_are_those_of_fp32_in_the_mean_over_steps(fn):
    exact = np.asarray(jax.grad(through_remat if fn is through_autocast else fn)(*ARGS))
    core = SimulatedCore("matmult", stochastic_rounding=True) if fn is through_autocast else STOCHASTIC
    at_step = jax.jit(lambda step: simulate(jax.grad(fn), core)((7, step), *ARGS))
    draws = np.stack([at_step(np.uint32(step)) for step in range(64)])
    error = np.mean([np.linalg.norm(one - exact) for one in draws]) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.05  # a few roundings to 8 bits, one after another
    # of independent draws, an eighth of it, and a bias of second order
    assert np.linalg.norm(draws.mean(0) - exact) / np.linalg.norm(exact) < error / 4
    np.testing.assert_array_equal(at_step(np.uint32(3)), draws[3])
    if core is STOCHASTIC:
        np.testing.assert_array_equal(draws, to_bf16(draws))
    assert (draws[3] != draws[4]).mean() > 0.2


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_functions_that_round_nothing_are_unchanged(fn):
    core = SimulatedCore("none")
    found, exact = (jax.jit(f)(*ARGS) for f in (lambda *x: simulate(jax.grad(fn), core)((1,), *x), jax.grad(fn)))
    if fn is through_autocast:  # XLA on CPU leaves out some of its roundings
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.02
    else:
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_each_iteration_of_a_loop_draws_other_bits(loop):
    def add(x):
        if loop == "scan":
            return jax.lax.scan(lambda x, _: (x + 2.0**-10, None), x, length=1024)[0]
        return jax.lax.fori_loop(0, jnp.int32(x.shape[0] * 16), lambda _, x: x + 2.0**-10, x)

    ones = jnp.ones(64, jnp.bfloat16)
    assert (draw(add, SimulatedCore(), ones) == 1).all()  # each addition is lost
    found = draw(add, SimulatedCore(stochastic_rounding=True), ones)
    # 2 in the mean: 1,024 additions, each of a step of 2^-7 with probability 1/8; deviation 0.083
    assert found.mean() == pytest.approx(2, abs=5 * 0.083 / 8)
    assert np.abs(found - 2).max() < 0.5


def test_equations_and_elements_draw_bits_of_their_own():
    x = jnp.full(NUM_DRAWS, 1.37, jnp.bfloat16)
    first, second = jax.jit(simulate(lambda x: (x * x, x * x), SimulatedCore(stochastic_rounding=True)))((1,), x)
    first, second = (np.asarray(part, np.float64) for part in (first, second))
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(NUM_DRAWS)


@pytest.mark.quick_cases("spec2")
@pytest.mark.parametrize("spec", [P("data"), P(None, "tensor"), P("tensor", "data"), P()])
def test_bits_do_not_depend_on_how_arrays_are_sharded(spec):
    def update(w, x):
        return w - 0.01 * jnp.tanh(w * x), jax.lax.scan(lambda x, _: (x * 1.01, x * x), x, length=3)

    args = tuple(jnp.asarray(np.random.default_rng(seed).normal(size=(16, 32)), jnp.bfloat16) for seed in (0, 1))
    run = jax.jit(simulate(update, SimulatedCore(stochastic_rounding=True)))
    wanted = run((7, 1), *args)
    for shape in ((8, 1), (2, 4)):
        sharding = NamedSharding(on_mesh(shape), spec)
        jax.tree.map(np.testing.assert_array_equal, run((7, 1), *jax.device_put(args, sharding)), wanted)


def test_inside_shard_map_replicas_share_their_bits_and_shards_do_not():
    core, ones = SimulatedCore(stochastic_rounding=True), jnp.full((4096,), 1.37, jnp.bfloat16)

    def local(replicated, row):
        # the barrier must not mix what varies with what does not
        replicated, row = jax.lax.optimization_barrier((replicated, row * row))
        replicated = replicated * replicated
        total = jax.lax.psum(row, "data")
        return replicated[None], row, (total * total)[None]

    results = {}
    for shape in ((8, 1), (2, 4), (2, 1)):
        mesh, rows = on_mesh(shape), jnp.tile(ones, (shape[0], 1))
        specs = P(("data", "tensor")), P("data", "tensor"), P(("data", "tensor"))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=specs, check_vma=False)
        replicated, row, total = (np.asarray(x, np.float64) for x in jax.jit(simulate(mapped, core))((1,), ones, rows))
        for on_devices in (replicated, total):
            assert (on_devices == on_devices[0]).all()
        copies = row.reshape(shape[0], shape[1], -1)  # a row of each device
        assert (copies == copies[:, :1]).all()  # over `tensor`, which does not split it
        assert 0.3 < (copies[0, 0] != copies[1, 0]).mean() < 0.7
        results[shape] = replicated[0]
    assert all((found == results[2, 1]).all() for found in results.values())  # on any mesh


def test_unknown_operation_raises_with_its_line():
    def unknown(x):
        return jnp.linalg.cholesky(x)

    line = inspect.getsourcelines(unknown)[1] + 1
    place = f"{pathlib.Path(__file__).name}:{line}"
    with pytest.raises(ValueError, match=rf"{place}.*unknown.*does not know the operation cholesky"):
        simulate(jax.checkpoint(unknown), NEAREST)((1,), jnp.eye(4))
    np.testing.assert_array_equal(simulate(unknown, SimulatedCore())((1,), jnp.eye(4)), jnp.eye(4))


def test_derivative_of_a_simulated_function_is_refused():
    with pytest.raises(ValueError, match=r"simulate\(jax.grad\(loss\), core\)"):
        jax.grad(lambda x: simulate(jnp.sum, NEAREST)((1,), x))(jnp.ones(3))


def test_unknown_auto_cast_is_refused():
    with pytest.raises(ValueError, match=r"SimulatedCore\.auto_cast='some' must be one of none, matmult, all"):
        SimulatedCore("some")


@pytest.mark.slow
def test_training_program_draws_the_bits_of_its_seed_and_step():
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)}
    rows = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), jnp.float32)
    options = StepOptions(policy=policy_on("bf16_sr", "neuron"), num_microbatches=2)
    program = training_program(
        lambda params, x: jnp.mean((x @ params["w"] - x) ** 2), optax.adam(1e-2), simulate="all", options=options
    )

    def run(seed, num_steps, state=None):
        state, losses = program.init(params, seed=seed) if state is None else state, []
        for _ in range(num_steps):
            state, metrics = program.step(state, rows)
            losses.append(float(metrics.loss))
        return jax.tree.map(np.asarray, state), losses

    whole, losses = run(0, 40)
    half, _ = run(0, 20)
    resumed, _ = run(0, 20, jax.tree.map(jnp.asarray, half))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    weights, start = {}, program.init(params)
    for seed, step in ((0, 0), (1, 0), (0, 1)):
        opt_state = start["opt_state"] | {"seed": jnp.uint32(seed)}
        state = jax.tree.map(jnp.copy, start | {"step": jnp.int32(step), "opt_state": opt_state})
        weights[seed, step] = run(0, 1, state)[0]["params"]["w"]
    for other in ((1, 0), (0, 1)):
        assert (weights[0, 0] != weights[other]).any()
    assert losses[-1] < losses[0] / 2
    np.testing.assert_array_equal(losses, to_bf16(losses))


@pytest.mark.quick_cases("bf16-2")
@pytest.mark.parametrize(("policy", "num_devices"), [("bf16", 2), ("bf16_sr", 1), ("bf16_sr", 4)])
def test_run_on_a_simulated_core_trains(policy, num_devices, small, make_batch):
    small.precision.update(policy=policy, simulate="neuron_all")
    small.parallel.tensor = 2 if num_devices == 4 else 1
    config = resolve(small)
    program = make_program(config, make_layout(config.parallel, jax.devices()[:num_devices]))
    state, batch, losses = program.init_state(), program.shard(make_batch(0, config)), []
    for _ in range(8):
        state, metrics = program.step(state, batch, np.float32(1e-2))
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] - 0.2
    np.testing.assert_array_equal(losses, to_bf16(losses))
    for leaf in jax.tree.leaves(state):
        parts = {}
        for shard in leaf.addressable_shards:
            part = parts.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), part)  # on every device that holds it


@pytest.mark.slow
def test_one_layer_compiles_with_the_code_generator_of_users(tmp_path):
    """LLVM looked at a chain of hashes 2^45 times: a loop of one layer is no loop, and the chain was in one kernel."""
    env = dict(micro.environment(), XLA_FLAGS="")
    settings = ("model.num_layers=1", "precision.policy=bf16_sr", "precision.simulate=neuron_all", "train.num_steps=1")
    done = micro.run(micro.command(micro.write_config(tmp_path), tmp_path / "run", *settings), env, timeout_s=300)
    assert done.returncode == 0, done.stderr


def test_run_that_cannot_be_simulated_is_refused(small, one_device):
    small.precision.simulate = "neuron"
    config = resolve(small)
    with pytest.raises(ValueError, match=r"precision\.simulate='neuron' is not for a Neuron device"):
        make_program(config, planned_layout(config, 1, platform="neuron", chip="trn1"))
    small.train.accumulate = "programs"
    with pytest.raises(ValueError, match=r"Set train\.accumulate='scan'"):
        make_program(resolve(small), one_device)
