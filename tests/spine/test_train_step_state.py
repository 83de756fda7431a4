"""Training programs of models with batch norm and dropout, evaluation, and optimizers that need the value."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from programs import training_program

from hlat_jax.config import OptimizerConfig
from hlat_jax.optimizer import adamw
from hlat_jax.parallel.pipeline import run_pipeline
from hlat_jax.precision import POLICIES

EVERY_PATH = [
    {"zero": 2, "num_microbatches": 2, "autocast": "bf16"},
    {"zero": 3, "num_microbatches": 4},
]


def rows(seed=0, num=32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :1] ** 2}


class Normalized(nn.Module):
    """A Flax model with batch norm, whose statistics are in the collection `batch_stats`."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))


NORMALIZED = Normalized()


def normalized_loss(params, batch, model_state, train):
    variables = {"params": params, "batch_stats": model_state}
    out, updated = NORMALIZED.apply(variables, batch["x"], train=train, mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), updated["batch_stats"]


def variables():
    found = NORMALIZED.init(jax.random.key(0), jnp.ones((1, 8)), train=True)
    return found["params"], found["batch_stats"]


def parts_of(batch, *, num_devices, num_microbatches):
    """Returns the microbatches of every device, in the order in which it runs them."""
    size = len(batch["x"]) // num_devices
    ranges = [np.arange(device * size, (device + 1) * size) for device in range(num_devices)]
    return [
        [jax.tree.map(lambda f, r=r, m=m: f[r[m::num_microbatches]], batch) for m in range(num_microbatches)]
        for r in ranges
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", EVERY_PATH, ids=str)
def test_batch_norm_statistics_are_carried_over_microbatches_and_averaged_over_devices(options):
    (params, stats), batch = variables(), rows()
    given = {"options": options, "params": params, "batch": batch, "model_state": stats}
    program = training_program(normalized_loss, optax.adam(1e-2), **given)
    state, metrics = program.step(program.init(params, model_state=stats), batch)
    wanted, losses = [], []
    for device in parts_of(batch, num_devices=8, num_microbatches=options["num_microbatches"]):
        carried = stats
        for part in device:
            loss, carried = normalized_loss(params, part, carried, True)
            losses.append(loss)
        wanted.append(carried)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *wanted)
    close = 2e-2 if "autocast" in options else 1e-5  # a product in bf16 has 8 bits
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=close, atol=close), state["model_state"], mean)
    assert metrics.loss == pytest.approx(float(np.mean(losses)), rel=close)
    assert np.abs(ravel_pytree(state["model_state"])[0] - ravel_pytree(stats)[0]).max() > 0.1


def test_a_model_with_batch_norm_learns_and_is_evaluated_with_its_running_statistics():
    (params, stats), batch = variables(), rows()
    program = training_program(normalized_loss, optax.adam(3e-2))
    state = program.init(params, model_state=stats)
    first = program.eval_step(state, batch)
    for _ in range(60):
        state, metrics = program.step(state, batch)
    found = program.eval_step(state, batch)
    wanted, _ = normalized_loss(state["params"], batch, state["model_state"], False)
    np.testing.assert_allclose(found.loss, wanted, rtol=1e-5)
    assert found.loss < 0.1 * first.loss
    assert found.loss != metrics.loss
    assert jax.tree.leaves(state)[0].is_deleted() is False  # an evaluation does not donate
    before = jax.device_get(state)
    state, metrics = program.step(state, batch | {"y": batch["y"] * np.inf})
    assert not metrics.finite
    assert state.pop("step") == before.pop("step") + 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))


def dropped_loss(params, batch, *, keys):
    hidden = jax.vmap(lambda x, key: jnp.tanh(x @ params["w"]) * jax.random.bernoulli(key, 0.5, (16,)))
    kept = jax.nn.tanh(batch["x"] @ params["w"]) if keys is None else hidden(batch["x"], keys)
    error = kept @ params["v"] - batch["y"]
    return jnp.mean(error**2)


def dropped(num_steps=3, *, seed=0, **options):
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(8, 16)).astype(np.float32), "v": rng.normal(size=(16, 1)).astype(np.float32)}
    params = jax.tree.map(jnp.asarray, params)
    program = training_program(dropped_loss, optax.sgd(1e-2), options=options, params=params)
    state, losses = program.init(params, seed=seed), []
    for step in range(num_steps):
        state, metrics = program.step(state, rows(step % 2))
        losses.append(float(metrics.loss))
    return losses, jax.device_get(state["params"])


@pytest.mark.quick_cases("{'zero': 3, 'num_microbatches': 4}")
@pytest.mark.parametrize("options", EVERY_PATH, ids=str)
def test_dropout_is_the_same_on_any_number_of_devices_and_microbatches(options):
    (wanted, params), (found, others) = dropped(autocast=options.get("autocast")), dropped(**options)
    np.testing.assert_allclose(found, wanted, rtol=1e-3 if "autocast" in options else 1e-5)
    if "autocast" not in options:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, others)


def test_dropout_differs_by_step_row_and_seed_and_is_repeated_by_the_same_seed():
    def bits(params, batch, keys):
        drawn = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
        return jnp.sum(params["w"]), (drawn[batch["row"]] >> 8).astype(jnp.float32)

    batch, params = {"row": np.arange(8)}, {"w": jnp.ones(2)}

    def drawn(seed, num_steps):
        program = training_program(bits, optax.sgd(1.0), has_aux=True)
        state, found = program.init(params, seed=seed), []
        for _ in range(num_steps):
            state, metrics = program.step(state, batch)
            found.append(np.asarray(metrics.aux))
        return np.stack(found)

    first = drawn(0, 3)
    np.testing.assert_array_equal(first, drawn(0, 3))
    assert len(np.unique(np.concatenate([first, drawn(1, 3)]))) == 48  # of 2**24


def test_evaluation_has_no_keys_and_does_not_depend_on_devices_or_microbatches():
    params = {"w": jnp.eye(8, 16), "v": jnp.ones((16, 1))}
    wanted = float(dropped_loss(params, rows(), keys=None))
    for options in ({}, EVERY_PATH[1]):
        program = training_program(dropped_loss, optax.sgd(1e-2), options=options, params=params)
        metrics = program.eval_step(program.init(params), rows())
        assert metrics.loss == pytest.approx(wanted, rel=1e-5)
        assert metrics.num_tokens is None


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
    with pytest.raises(ValueError, match=r"no learning rate of its own: call step\(state, batch, learning_rate\)"):
        program.step(state, rows())
    assert program.step(state, rows(), 1e-2)[1].finite


def test_a_batch_that_does_not_divide_is_refused_with_the_next_sizes():
    params, batch = {"w": jnp.ones((8, 1))}, rows(num=30)
    for options, said in (
        ({"zero": 3, "num_microbatches": 4}, "over 8 devices and into num_microbatches=4; .* of 32, such as 32"),
        ({"num_microbatches": 4}, "does not divide into num_microbatches=4; .* multiple of 4, such as 28 or 32"),
        ({"num_microbatches": 4, "autocast": "fp16"}, "does not divide into num_microbatches=4"),
    ):
        given = {"options": options, "params": params}
        with pytest.raises(ValueError, match=said):
            training_program(quadratic, optax.sgd(1.0), batch=batch, **given)
        program = training_program(quadratic, optax.sgd(1.0), **given)
        state = jax.eval_shape(program.init, params)
        for step in (program.step, program.eval_step):
            with pytest.raises(ValueError, match=said):
                step.trace(state, batch)


STATS = {"mean": jnp.zeros(8)}


def with_state(params, batch, model_state):
    return jnp.sum(params["w"]), model_state


# (loss, what is given, what is said)
ASKS_OTHERWISE = [
    (lambda params, batch, key: 0.0, {}, "takes 'key': .*gives model_state, keys, train by name. Did you mean 'keys'"),
    (with_state, {}, r"loss_fn takes a model_state: give its shapes as model_state="),
    (quadratic, {"model_state": STATS}, r"takes no model_state: define it as loss\(params, batch, \*, model_state"),
    (with_state, {"model_state": {"seed": jax.random.key(0)}}, r"model_state\['seed'\] is key<fry>: .*come as `keys`"),
    (with_state, {"model_state": STATS, "options": {"accumulate": run_pipeline}}, "model_state needs a single loss"),
    (
        lambda params, batch, model_state: (jnp.sum(params["w"]), {"mean": jnp.zeros(4)}),
        {"model_state": STATS},
        r"was given the model state \{mean: float32\[8\]\} and returned \{mean: float32\[4\]\}; return arrays of",
    ),
    (
        lambda params, batch, keys: jnp.sum(params["w"]),
        {"batch": {"x": jnp.ones((4, 8)), "y": jnp.ones(3)}},
        r"takes a key for each row, and the batch's fields differ in rows: \['x'\] has 4, \['y'\] has 3",
    ),
]


def test_a_loss_function_that_asks_for_or_returns_something_else_is_refused():
    for loss, arguments, said in ASKS_OTHERWISE:
        given = {"params": {"w": jnp.ones((8, 1))}, "batch": rows(), **arguments}
        with pytest.raises(ValueError, match=said):
            training_program(loss, optax.sgd(1.0), **given)
    program = training_program(with_state, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"give init\(params, model_state=...\) its first value"):
        program.init({"w": jnp.ones((8, 1))})


def test_a_step_donates_no_array_of_the_caller_or_the_optimizer():
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
