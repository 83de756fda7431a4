"""What a step refuses before it is compiled: loss functions that take or return anything else, and other batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import classified, labelled, training_program

from hlat_jax.batch import SumAndCount
from hlat_jax.parallel.pipeline import run_pipeline


def rows(seed=0, num=32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 8)).astype(np.float32)
    return {"x": x, "y": x[:, :1] ** 2}


def scalar(params, batch):
    return classified(params, batch)[0]


# (loss, has_aux, what is said)
MISTAKEN = [
    (classified, False, r"returned \(float32\[\], float32\[\]\). Return the mean loss .*give has_aux=True"),
    (lambda p, b: {"loss": scalar(p, b)}, False, r"\{loss: float32\[\]\}"),
    (lambda p, b: scalar(p, b).astype(int), False, r"returned int32\[\]"),
    (lambda p, b: SumAndCount((b["x"] @ p["w"])[:, 0], 1), False, r"SumAndCount\(total=float32\[\d+\], count=1"),
    (lambda p, b: SumAndCount(scalar(p, b), jnp.ones(2)), False, r"count=float32\[2\]\)"),
    (scalar, True, r"returned float32\[\]. With has_aux=True, return \(loss, auxiliary values\)"),
    (
        lambda p, b: (scalar(p, b), {"right": jnp.sum(b["label"] == 0)}),
        True,
        r"aux\['right'\] = int32\[\], which has no mean .*SumAndCount\(total, count\)",
    ),
    (
        lambda p, b: (scalar(p, b), {"right": SumAndCount(jnp.ones(3), jnp.ones(2))}),
        True,
        r"aux\['right'\] = SumAndCount\(total=float32\[3\], count=float32\[2\]\), .* or has the total's shape",
    ),
]


def test_a_loss_that_returns_anything_else_is_refused():
    params, batch = labelled()
    everywhere = [{"zero": 3, "num_microbatches": 4}, {"zero": 1, "autocast": "fp16"}, {"memory_budget": "1GiB"}]
    for number, (loss, has_aux, said) in enumerate(MISTAKEN):
        for options in ({}, everywhere[number % len(everywhere)]):
            given = {"options": options, "params": params, "has_aux": has_aux}
            with pytest.raises(ValueError, match=said):
                training_program(loss, optax.sgd(1.0), batch=batch, **given)
    program = training_program(MISTAKEN[0][0], optax.sgd(1.0), params=params)
    with pytest.raises(ValueError, match=MISTAKEN[0][2]):
        program.step.trace(jax.eval_shape(program.init, params), batch, 0.0)


STATS = {"mean": jnp.zeros(8)}


def with_state(params, batch, model_state):
    return jnp.sum(params["w"]), model_state


def quadratic(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.sum(jnp.cosh(params["w"]))


# (loss, what is given, what is said)
ASKS_OTHERWISE = [
    (lambda params, batch, key: 0.0, {}, "takes 'key', .*gives model_state, keys, train by name. Did you mean 'keys'"),
    (with_state, {}, r"loss_fn takes a model_state. Give its shapes as model_state="),
    (quadratic, {"model_state": STATS}, r"takes no model_state. Define it as loss\(params, batch, \*, model_state"),
    (
        with_state,
        {"model_state": {"seed": jax.random.key(0)}},
        r"model_state\['seed'\] is key<fry>. .*take random keys as `keys`",
    ),
    (with_state, {"model_state": STATS, "options": {"accumulate": run_pipeline}}, "model_state needs a single loss"),
    (
        lambda params, batch, model_state: (jnp.sum(params["w"]), {"mean": jnp.zeros(4)}),
        {"model_state": STATS},
        r"was given the model state \{mean: float32\[8\]\} and returned \{mean: float32\[4\]\}. Return arrays of",
    ),
    (
        lambda params, batch, keys: jnp.sum(params["w"]),
        {"batch": {"x": jnp.ones((4, 8)), "y": jnp.ones(3)}},
        r"takes a key for each row, and the batch's fields differ in rows: \['x'\] has 4, \['y'\] has 3",
    ),
]


def test_a_loss_that_takes_anything_else_is_refused():
    for loss, arguments, said in ASKS_OTHERWISE:
        given = {"params": {"w": jnp.ones((8, 1))}, "batch": rows(), **arguments}
        with pytest.raises(ValueError, match=said):
            training_program(loss, optax.sgd(1.0), **given)
    program = training_program(with_state, optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"Call init\(params, model_state=...\) with its first value"):
        program.init({"w": jnp.ones((8, 1))})


def test_a_batch_that_does_not_divide_is_refused():
    params, batch = {"w": jnp.ones((8, 1))}, rows(num=30)
    for options, said in (
        ({"zero": 3, "num_microbatches": 4}, "over 8 devices and into num_microbatches=4. .* of 32, such as 32"),
        ({"num_microbatches": 4}, "does not divide into num_microbatches=4. .* multiple of 4, such as 28 or 32"),
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
