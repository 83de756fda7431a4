"""The program builder and our step: accumulation, masking, precision, donation, layouts, what Neuron cannot take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowered import assert_no_forbidden_operations, lowered_for_neuron
from programs import training_program
from steps import trained

from hlat_jax.batch import SumAndCount
from hlat_jax.optimizer import global_norm
from hlat_jax.parallel.pipeline import run_pipeline
from hlat_jax.passes import remat
from hlat_jax.passes.jaxpr import equations
from hlat_jax.precision import POLICIES
from hlat_jax.program import make_program, state_bytes
from hlat_jax.resolve import resolve
from hlat_jax.run import costs
from hlat_jax.train_step import StepOptions


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


@pytest.mark.slow
def test_eval_step_equals_the_training_loss_before_the_update_without_z_loss(small, one_device, make_batch):
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


def test_fp16_trains_a_sum_loss_whose_gradients_overflow_unscaled():
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


def test_options_name_the_platform_of_one_device():
    assert StepOptions(zero=0, devices=jax.devices()[:1]).platform == "cpu"


def test_invalid_options_and_arguments_are_refused_with_the_fix():
    stages, w = {"accumulate": run_pipeline}, {"w": jnp.ones((16, 1))}
    for options, said in (
        ({"policy": "fp32"}, r"StepOptions.policy='fp32' must be a Policy, such as precision.POLICIES"),
        ({"num_microbatches": 0}, r"num_microbatches=0 must be an int of 1 or more"),
        ({"replica_sync": 2}, r"replica_sync=2 must be a ReplicaSync"),
        ({"spikes": "skip"}, r"spikes='skip' must be a SpikePolicy"),
        ({"zero": True}, r"zero stage True is not one of 0, 1, 2, 3"),
        ({"zero": 1, "devices": []}, r"devices=\[\] must be a list of one or more devices.*give jax.devices\(\)"),
        ({"bucket_bytes": 1024}, r"devices and bucket_bytes have no effect without zero; give zero=0 to 3"),
        ({"zero": 1}, r"shard the parameters: give their shapes as params="),
        ({"autocast": "bf17"}, r"autocast policy 'bf17' is unknown; use"),
        ({"policy": POLICIES["mixed"], "autocast": "fp16"}, r"policy computes in bfloat16; give policy=.*'fp32'"),
        ({"memory_budget": "12"}, r"memory_budget='12' is not a size in bytes"),
        ({"memory_budget": "1GiB"}, r"give params=\.\.\. and batch=\.\.\."),
        ({"remat": remat.RematOptions()}, r"remat needs a memory budget; give memory_budget="),
        (stages | {"chunk": "1MiB"}, r"a single loss function, not stages"),
    ):
        with pytest.raises(ValueError, match=said):
            training_program(linear, optax.sgd(0.1), options=options)
    for given, said in (
        ({"loss_fn": None}, "loss_fn=None is not a function"),
        ({"optimizer": None}, "optimizer=None is not an Optax transformation: give one, such as optax.adam"),
        ({"params": {"w": 1.0}}, r"params\['w'\] is a float: give an array"),
        ({"params": w | {"n": jnp.int32(3)}}, r"params\['n'\] is int32: .*functools.partial"),
        ({"has_aux": True, "options": stages}, "has_aux=True needs a single loss function"),
    ):
        with pytest.raises(ValueError, match=said):
            training_program(**{"loss_fn": linear, "optimizer": optax.sgd(0.1)} | given)


def classified(params, batch):
    """Returns (mean cross-entropy, accuracy), of rows that all count."""
    logits = batch["x"] @ params["w"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == batch["label"])


def labelled():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)}
    return params, {"x": rng.normal(size=(32, 8)).astype(np.float32), "label": rng.integers(0, 4, 32)}


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


def scalar(params, batch):
    return classified(params, batch)[0]


# (loss, has_aux, what is said)
MISTAKEN = [
    (classified, False, r"returned \(float32\[\], float32\[\]\); return the mean loss .*give .*has_aux=True"),
    (lambda p, b: {"loss": scalar(p, b)}, False, r"\{loss: float32\[\]\}"),
    (lambda p, b: scalar(p, b).astype(int), False, r"returned int32\[\];"),
    (lambda p, b: SumAndCount((b["x"] @ p["w"])[:, 0], 1), False, r"SumAndCount\(total=float32\[\d+\], count=1"),
    (lambda p, b: SumAndCount(scalar(p, b), jnp.ones(2)), False, r"count=float32\[2\]\)"),
    (scalar, True, r"returned float32\[\]; with has_aux=True return \(loss, auxiliary values\)"),
    (
        lambda p, b: (scalar(p, b), {"right": jnp.sum(b["label"] == 0)}),
        True,
        r"aux\['right'\] = int32\[\]; auxiliary values are averaged .*SumAndCount\(total, count\)",
    ),
    (
        lambda p, b: (scalar(p, b), {"right": SumAndCount(jnp.ones(3), jnp.ones(2))}),
        True,
        r"aux\['right'\] = SumAndCount\(total=float32\[3\], count=float32\[2\]\);.* or of the total's shape",
    ),
]


def test_a_loss_that_returns_anything_else_is_refused_before_compiling():
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


def test_step_on_one_cpu_device_updates_weights_without_copies(small, one_device):
    small.train.spikes = "skip"
    config = resolve(small)
    text = make_program(config, one_device).trace_step().lower().compile().as_text()
    assert "%state__params____embed__" in text  # how XLA names the arguments that are looked for below
    assert not [line for line in text.splitlines() if " copy(%state__params" in line]
