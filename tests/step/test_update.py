"""The update of a step: masking, precision, loss scale, optimizers that ask for more, no copies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import training_program
from steps import trained

from hlat_jax.batch import SumAndCount
from hlat_jax.config import OptimizerConfig
from hlat_jax.optimizer import adamw, global_norm
from hlat_jax.passes.jaxpr import equations
from hlat_jax.precision import POLICIES
from hlat_jax.program import make_program, state_bytes
from hlat_jax.resolve import resolve
from hlat_jax.run import costs


@pytest.mark.slow
def test_policies_store_their_declared_dtypes(small, one_device):
    for name, dtypes in {
        "fp32": (jnp.float32, jnp.float32, None),
        "autocast": (jnp.float32, jnp.float32, None),
        "mixed": (jnp.bfloat16, jnp.float32, jnp.float32),
        "bf16_sr": (jnp.bfloat16, jnp.bfloat16, None),
        "bf16": (jnp.bfloat16, jnp.bfloat16, None),
    }.items():
        small.precision.policy = name
        config = resolve(small)
        program = make_program(config, one_device)
        state = program.abstract_state
        assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.dtype(dtypes[0])}
        assert {leaf.dtype for leaf in jax.tree.leaves(state["opt_state"]["inner"]["nu"])} == {jnp.dtype(dtypes[1])}
        masters = {leaf.dtype for leaf in jax.tree.leaves(state["opt_state"].get("master", {}))}
        assert masters == ({jnp.dtype(dtypes[2])} if dtypes[2] else set())
        jaxpr = program.trace_step().jaxpr.jaxpr
        read = {
            var.aval.dtype for eqn, _ in equations(jaxpr) if eqn.primitive.name == "dot_general" for var in eqn.invars
        }
        if name in ("fp32", "autocast"):
            assert read == {jnp.dtype(jnp.float32 if name == "fp32" else jnp.bfloat16)}
        assert state_bytes(state) == costs.policy_state_bytes(config.model, name, optimizer="adamw")
        assert state_bytes(program.init_state()) == state_bytes(state)
        small.optimizer.name = "muon"
        of_muon = make_program(resolve(small), one_device).abstract_state
        assert state_bytes(of_muon) == costs.policy_state_bytes(config.model, name, optimizer="muon")
        small.optimizer.name = "adamw"


@pytest.mark.slow
def test_mixed_follows_fp32_and_keeps_updates_that_bf16_loses(small, make_batch):
    losses = {}
    for policy in ("fp32", "mixed", "bf16"):
        small.precision.policy = policy
        config = resolve(small)
        _, state, rows = trained(config, [make_batch(0, config)] * 30, rate=1e-4)
        losses[policy] = float(rows[-1].loss)
        losses[policy, "norms"] = np.asarray(state["params"]["final_norm"]["scale"], np.float32)
    # bf16 activations: the field's rule of thumb, 5e-3 of the loss
    assert abs(losses["mixed"] - losses["fp32"]) < 5e-3 * losses["fp32"]
    # 1 - 1e-4 rounds back to 1 in bf16, whose steps below 1 are 2^-8; with fp32 master weights it accumulates
    assert (losses["bf16", "norms"] == 1).all()
    assert not (losses["fp32", "norms"] == 1).any()


@pytest.mark.quick_cases("fp32-2")
@pytest.mark.parametrize(("policy", "microbatches"), [("fp32", 2), ("mixed", 1)])
def test_a_non_finite_step_changes_nothing_but_the_count(small, make_batch, policy, microbatches):
    small.precision.policy = policy
    small.train.num_microbatches = microbatches
    config = resolve(small)
    good = make_batch(0, config)
    weights = good.weights.copy()
    weights[1, 1] = np.inf
    program, state, _ = trained(config, [good, good])
    before = jax.device_get(state)
    state, metrics = program.step(state, dataclasses.replace(good, weights=weights), 1e-2)
    assert not metrics.finite
    after = jax.device_get(state)
    assert after.pop("step") == before.pop("step") + 1
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = program.step(state, good, 1e-2)
    assert metrics.finite
    assert not np.array_equal(state["params"]["embed"], before["params"]["embed"])


def test_blockwise_norm_is_accurate_to_fp32_rounding():
    for shape in ((3,), (1 << 20,), (1031, 2053), (7, 300, 4, 257)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32) + 1
        tree = {"a": jnp.asarray(x), "b": jnp.full((1 << 17,), 2.0, jnp.bfloat16)}
        exact = np.sqrt(np.sum(np.square(x, dtype=np.float64)) + (1 << 19))
        # 2**15 partial sums, summed as a tree: a few roundings of 6e-8
        assert float(jax.jit(functools.partial(global_norm, in_blocks=True))(tree)) == pytest.approx(exact, rel=3e-7)
        assert float(jax.jit(global_norm)(tree)) == pytest.approx(exact, rel=1e-4)


def linear(params, batch):
    error = (batch["x"] @ params["w"])[:, 0] - batch["y"]
    return SumAndCount(jnp.sum(batch["weight"] * jnp.square(error)), jnp.sum(batch["weight"]))


def test_fp16_trains_a_sum_whose_gradients_overflow_unscaled():
    rng = np.random.default_rng(0)
    x = 10 * rng.normal(size=(8192, 16)).astype(np.float32)
    weight = np.resize(np.float32([0, 1, 0.001, 0.5]), 8192)  # part m has the rows m, m + 4, ...
    batch = {"x": x, "y": x @ rng.normal(size=16).astype(np.float32), "weight": weight}

    def made(**options):
        program = training_program(linear, optax.adam(0.1), options=dict(num_microbatches=4, **options))
        return program, program.init({"w": jnp.zeros((16, 1))})

    exact, state = made()
    wanted = exact.step(state, batch, 0.0)[1]
    program, state = made(autocast="fp16")
    rows = []
    for _ in range(60):
        state, metrics = program.step(state, batch, 0.0)
        rows.append(jax.device_get(metrics))
    finite = [row for row in rows if row.finite]
    assert 5 < len(rows) - len(finite) < 30  # each halves the scale, from 2**15
    # fp16 has 11 bits
    np.testing.assert_allclose([finite[0].loss, finite[0].grad_norm], [wanted.loss, wanted.grad_norm], rtol=3e-3)
    assert finite[-1].loss < 0.1 * finite[0].loss
    assert state["opt_state"]["loss_scale"].scale < 1
    before = jax.device_get(state)  # a batch that counts nothing leaves the scale unchanged too
    state, metrics = program.step(state, batch | {"weight": 0 * weight}, 0.0)
    assert not metrics.finite
    assert state.pop("step") == before.pop("step") + 1
    jax.tree.map(np.testing.assert_array_equal, before, state)


def rows(seed=0, num=32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :1] ** 2}


def quadratic(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.sum(jnp.cosh(params["w"]))


@pytest.mark.slow
def test_lbfgs_takes_the_steps_that_it_takes_outside_a_program():
    options = {"zero": 3}
    params, batch = {"w": 2 * jnp.ones((8, 1))}, rows()
    optimizer = optax.lbfgs()
    program = training_program(quadratic, optimizer, options=options, params=params)
    state, wanted, opt_state = program.init(params), params, optimizer.init(params)

    @jax.jit
    def step(params, opt_state):
        def of_params(params):
            return quadratic(params, batch)

        value, grad = jax.value_and_grad(of_params)(params)
        updates, opt_state = optimizer.update(grad, opt_state, params, value=value, grad=grad, value_fn=of_params)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(3):
        state, metrics = program.step(state, batch)
        wanted, opt_state = step(wanted, opt_state)
    np.testing.assert_allclose(state["params"]["w"], wanted["w"], atol=1e-4)
    assert metrics.finite


def test_an_optimizer_without_a_rate_of_its_own_asks_for_one():
    config = OptimizerConfig()
    optimizer = adamw(config, policy=POLICIES["fp32"], decays={"w": True})
    program = training_program(quadratic, optimizer)
    state = program.init({"w": jnp.ones((8, 1))})
    with pytest.raises(ValueError, match=r"needs a learning rate. Call step\(state, batch, learning_rate\)"):
        program.step(state, rows())
    assert program.step(state, rows(), 1e-2)[1].finite


def test_a_step_donates_no_array_of_the_caller():
    table, key = jnp.ones((8, 1)), jax.random.key(0)

    def init(weights):
        return {"table": table, "again": table, "weights": weights, "numpy": np.ones(3)}, key

    def update(grads, state, params=None):
        return jax.tree.map(lambda grad: -0.1 * grad, grads), state

    def loss(params, batch, *, model_state, keys):
        return jnp.mean((batch["x"] @ params["w"]) ** 2), model_state

    given = {"w": jnp.ones((8, 1), jnp.float32)}, {"seen": jnp.ones(())}, jnp.uint32(7)
    params, model_state, seed = given
    program = training_program(loss, optax.GradientTransformation(init, update), options={"policy": POLICIES["mixed"]})
    losses = []
    for _ in range(2):
        _, metrics = program.step(program.init(params, model_state=model_state, seed=seed), rows())
        losses.append(float(metrics.loss))
    assert losses[0] == losses[1]
    assert not any(array.is_deleted() for array in jax.tree.leaves((given, table, key)))


def test_one_cpu_device_updates_weights_without_copies(small, one_device):
    small.train.spikes = "skip"
    config = resolve(small)
    text = make_program(config, one_device).trace_step().lower().compile().as_text()
    assert "%state__params____embed__" in text  # how XLA names the arguments that are looked for below
    assert not [line for line in text.splitlines() if " copy(%state__params" in line]
