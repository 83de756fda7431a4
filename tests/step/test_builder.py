"""A training step: the loss of a whole batch, on any devices and microbatches; dropout, batch norm, evaluation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from lowered import assert_no_forbidden_operations, lowered_for_neuron
from programs import classified, labelled, training_program
from steps import trained

from hlat_jax.batch import SumAndCount
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

EVERY_PATH = [
    {"num_microbatches": 4},
    {"zero": 2, "num_microbatches": 2},
    {"autocast": "fp16", "zero": 3},
]


@pytest.mark.quick_cases("{'zero': 2, 'num_microbatches': 2}")
@pytest.mark.parametrize("options", EVERY_PATH, ids=str)
def test_losses_and_aux_are_those_of_the_whole_batch(options):
    counted = np.arange(32) % 4 != 0  # with 4 microbatches on one device one of them counts nothing

    def sums(params, batch):
        logits, mask = batch["x"] @ params["w"], batch["mask"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        num_right = jnp.sum((jnp.argmax(logits, -1) == batch["label"]) & mask)
        aux = {"accuracy": SumAndCount(num_right, jnp.sum(mask)), "mean": [jnp.mean(batch["x"], 0), 0.5]}
        return SumAndCount(jnp.sum(losses * mask), jnp.sum(mask)), aux

    params, batch = labelled()
    batch["mask"] = counted
    close = 2e-3 if "autocast" in options else 2e-6  # fp16 has 11 bits

    def first_step(loss):
        program = training_program(loss, optax.sgd(1.0), options=options, params=params, has_aux=True)
        state, metrics = program.step(program.init(params), batch, 0.0)
        return jax.device_get(metrics), jax.device_get(state["params"])

    (mean, accuracy), grads = jax.value_and_grad(classified, has_aux=True)(params, batch)
    metrics, after = first_step(classified)
    assert metrics.loss == pytest.approx(float(mean), rel=close)
    assert metrics.aux == pytest.approx(float(accuracy), rel=1e-6)  # of 32 rows, a multiple of 2^-5
    assert metrics.num_tokens is None
    assert metrics.grad_norm == pytest.approx(float(jnp.linalg.norm(grads["w"])), rel=close)
    largest = float(np.abs(grads["w"]).max())
    np.testing.assert_allclose(params["w"] - after["w"], grads["w"], atol=2 * close * largest)

    metrics, _ = first_step(sums)
    total, aux = sums(params, batch)
    assert metrics.num_tokens == 24.0
    assert metrics.loss == pytest.approx(float(total.total / 24), rel=close)
    assert metrics.aux["accuracy"] == pytest.approx(float(aux["accuracy"].total / 24), rel=1e-6)
    np.testing.assert_allclose(metrics.aux["mean"][0], aux["mean"][0], atol=1e-6)
    assert metrics.aux["mean"][1] == 0.5
    assert {leaf.dtype for leaf in jax.tree.leaves(metrics.aux)} == {jnp.dtype(jnp.float32)}


SPLIT = [
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
@pytest.mark.parametrize("options", SPLIT, ids=str)
def test_batch_norm_is_carried_over_parts_and_averaged_over_devices(options):
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


def test_evaluation_uses_the_running_statistics_of_batch_norm():
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
@pytest.mark.parametrize("options", SPLIT, ids=str)
def test_dropout_does_not_depend_on_devices_and_microbatches(options):
    (wanted, params), (found, others) = dropped(autocast=options.get("autocast")), dropped(**options)
    np.testing.assert_allclose(found, wanted, rtol=1e-3 if "autocast" in options else 1e-5)
    if "autocast" not in options:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, others)


def test_dropout_differs_by_step_row_and_seed():
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


def test_evaluation_has_no_keys():
    params = {"w": jnp.eye(8, 16), "v": jnp.ones((16, 1))}
    wanted = float(dropped_loss(params, rows(), keys=None))
    for options in ({}, SPLIT[1]):
        program = training_program(dropped_loss, optax.sgd(1e-2), options=options, params=params)
        metrics = program.eval_step(program.init(params), rows())
        assert metrics.loss == pytest.approx(wanted, rel=1e-5)
        assert metrics.num_tokens is None


@pytest.mark.slow
def test_evaluation_is_the_loss_before_the_update_without_z_loss(small, one_device, make_batch):
    plain = resolve(small)
    batch = make_batch(0, plain)
    program = make_program(plain, one_device)
    params = program.init_state()["params"]
    loss_sum, num_tokens = program.eval_step(params, batch)
    _, _, rows = trained(plain, [batch])
    np.testing.assert_allclose(loss_sum / num_tokens, rows[0].loss, rtol=1e-6)
    small.train.z_loss_weight = 0.1
    config = resolve(small)
    assert trained(config, [batch])[2][0].loss > rows[0].loss
    assert make_program(config, one_device).eval_step(params, batch)[0] == loss_sum


NEURON_CASES = [
    {"attention": "einsum", "cross_entropy": "dense", "remat": "none"},  # what `auto` stands for there
    {"attention": "blocked", "cross_entropy": "chunked", "remat": "full"},
    {"attention": "einsum", "cross_entropy": "dense", "layer_loop": "unroll"},
    {"attention": "chunked"},
]


@pytest.mark.quick_cases("einsum-dense-none", "einsum-dense-unroll", "chunked")
@pytest.mark.parametrize("changes", NEURON_CASES, ids=lambda c: "-".join(c.values()))
def test_step_lowers_for_neuron_without_forbidden_operations(small, one_device, changes):
    small.model.update(changes)
    small.precision.policy = "mixed" if changes.get("layer_loop") else "fp32"
    small.train.num_microbatches = 2
    small.data.packing = "documents" if changes["attention"] == "chunked" else "concat"
    text = lowered_for_neuron(resolve(small), one_device)
    assert_no_forbidden_operations(text)
    if changes.get("layer_loop") != "unroll":
        assert "stablehlo.while" in text  # the check of loops below looks at something
