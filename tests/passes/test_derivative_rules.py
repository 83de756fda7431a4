"""Derivative rules of a user under the passes: those with `symbolic_zeros` are told what is differentiated."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_derivatives import SymbolicZero

from hlat_jax.passes import compile as passes_compile
from hlat_jax.passes import naming, remat_pass
from hlat_jax.passes.autocast_pass import CastPolicy, autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.residuals import select_residuals

NEVER = CastPolicy(rules={"dot_general": "never"})
W = jax.random.normal(jax.random.key(0), (3, 16, 32)) / 4
X, S = jnp.ones((8, 16)), jnp.full((8, 1), 0.5)
TOLD: list[tuple] = []  # what the rules below are told


def nonzero(items):
    return tuple(not isinstance(item, SymbolicZero) for item in items)


@jax.custom_vjp
def scaled(x, steps):
    return x * steps, 2 * steps


def _forward(x, steps):
    TOLD.append((x.perturbed, steps.perturbed))
    assert not steps.perturbed
    return scaled(x.value, steps.value), (steps.value, True)


def _backward(residuals, cotangents):
    steps, is_set = residuals
    TOLD.append(nonzero(cotangents))
    assert is_set is True  # a constant of the rule, read in Python
    return cotangents[0] * steps, None


scaled.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_jvp
def gated(x, gate):
    return x * gate, gate


@functools.partial(gated.defjvp, symbolic_zeros=True)
def _rule(primals, tangents):
    TOLD.append(nonzero(tangents))
    (x, gate), (dx, dgate) = primals, tangents
    assert isinstance(dgate, SymbolicZero)
    return gated(x, gate), (dx * gate, dgate)


def layer(x, w, s):
    x, s = gated(jnp.tanh(x @ w), s)
    return scaled(x @ w.T, s)[0], s


def in_blocks(w, x, s):
    for one in w:
        x, s = layer(x, one, s)
    return jnp.sum(x**2)


def in_scan(w, x, s):
    (x, _), _ = jax.lax.scan(lambda carry, one: (layer(carry[0], one, carry[1]), None), (x, s), w)
    return jnp.sum(x**2)


PASSES = {
    "autocast": lambda fn: autocast(fn, NEVER),
    "select_residuals": select_residuals,
    "chunk": functools.partial(chunk, max_bytes=4096),
    "segments": lambda fn: naming.checkpointed(fn, RematChoice(), region="segments"),
    "loops": lambda fn: naming.checkpointed(fn, RematChoice(), region="loops"),
    "all": lambda fn: naming.checkpointed(
        select_residuals(chunk(autocast(jax.jit(fn), NEVER))), RematChoice(), region="whole"
    ),
}


@pytest.mark.quick_cases("scan")
@pytest.mark.parametrize(("loss", "others"), [(in_blocks, {"loops"}), (in_scan, {"segments"})], ids=["blocks", "scan"])
def test_rules_are_told_what_is_differentiated_as_without_the_pass(loss, others):
    def told_by(fn):
        TOLD.clear()
        return jax.grad(fn)(W, X, S), set(TOLD)  # with respect to the weights alone

    wanted, told_without = told_by(loss)
    for name in PASSES.keys() - others:
        got, told = told_by(PASSES[name](loss))
        assert told == told_without, name
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6, err_msg=name)


def test_products_around_and_inside_such_rules_are_narrow():
    got, want = jax.grad(autocast(in_scan, "bf16"))(W, X, S), jax.grad(in_scan)(W, X, S)
    text = str(jax.make_jaxpr(jax.grad(autocast(in_scan, "bf16")))(W, X, S))
    assert "preferred_element_type=float32" not in text
    assert 1e-4 < jnp.linalg.norm(got - want) / jnp.linalg.norm(want) < 3e-2


def test_chunks_do_not_open_such_a_rule():
    def loss(w, x, s):
        logits = jax.nn.log_softmax(scaled(x @ w, s)[0])
        return -jnp.take_along_axis(logits, jnp.ones((8, 1), int), -1).mean()

    found = chunk(loss, max_bytes="256B")
    wide = jnp.tile(W[0], (1, 8))
    np.testing.assert_allclose(jax.grad(found)(wide, X, 0.5), jax.grad(loss)(wide, X, 0.5))
    assert "derivative rule of its own" in str(found.report())


def test_a_rule_that_runs_a_solver_again_takes_the_steps_of_fp32():
    def solve(w, y):
        def halved(state):
            y, step, t = state
            slope = jnp.tanh(y @ w)
            step = jnp.minimum(0.1 / jnp.max(jnp.abs(slope)), 1 - t)
            return y + step * slope, step, t + step

        return jax.lax.while_loop(lambda state: state[2] < 1.0, halved, (y, 0.0, 0.0))[0]

    @jax.custom_vjp
    def solved(w, y):
        return solve(w, y)

    def backward(residuals, cotangent):
        w, y = residuals
        return w * jnp.sum(cotangent * jnp.sin(40 * solve(w, y))), cotangent  # any use of the solution

    solved.defvjp(lambda w, y: (solve(w, y), (w, y)), backward)

    def loss(w):
        return jnp.sum(solved(w, X) ** 2)

    w = W[0] @ W[1].T
    np.testing.assert_allclose(jax.grad(autocast(loss, "bf16"))(w), jax.grad(loss)(w), rtol=1e-5)


def _vjp_of_local(w, x):
    scale = jnp.cos(x).sum()

    @jax.custom_vjp
    def own(y):
        return 2 * y

    own.defvjp(lambda y: (2 * y, None), lambda _, cotangent: (3 * cotangent * scale,))
    return jnp.sum(own(x @ w) ** 2)


def _jvp_of_local(w, x):
    scale = jnp.cos(x).sum()

    @jax.custom_jvp
    def own(y):
        return 2 * y

    own.defjvp(lambda primals, tangents: (2 * primals[0], 3 * tangents[0] * scale))
    return jnp.sum(own(x @ w) ** 2)


@pytest.mark.parametrize("fn", [_vjp_of_local, _jvp_of_local])
@pytest.mark.parametrize(
    "pass_",
    [
        functools.partial(autocast, policy="bf16"),
        functools.partial(chunk, max_bytes=4096),
        select_residuals,
        lambda fn: select_residuals(chunk(autocast(fn, "bf16"))),
    ],
    ids=["autocast", "chunk", "residuals", "all"],
)
def test_passes_leave_a_rule_that_closes_over_an_intermediate_as_it_is(pass_, fn):
    w, x = W[0], jnp.sin(jnp.arange(128.0)).reshape(8, 16)
    with pytest.warns(UserWarning, match=r"own at .*test_derivative_rules.py:\d+.*closes over a traced array"):
        got = jax.grad(pass_(fn))(w, x)
    np.testing.assert_array_equal(got, jax.grad(fn)(w, x))


def test_chunk_reports_the_rule_that_closes_over_an_intermediate():
    left = chunk(_vjp_of_local)
    with pytest.warns(UserWarning, match="as it is"):
        jax.eval_shape(left, W[0], X)
    assert "not replaced: own at" in str(left.report())


def test_fit_refuses_a_rule_that_closes_over_an_intermediate_only_where_it_must_save_less():
    assert remat_pass.fit(_vjp_of_local, W[0], X, budget_bytes="1GiB").choice is None
    shapes = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    with pytest.raises(remat_pass.BudgetNotMet, match=r"own at .*test_derivative_rules.py:\d+"):
        remat_pass.fit(_vjp_of_local, *shapes, budget_bytes=4096)


def test_a_training_program_with_a_rule_that_closes_over_an_intermediate_trains_as_without_passes():
    def loss(params, batch):
        return _vjp_of_local(params["w"], batch["x"]) / 1e3

    params, batch, results = {"w": W[0]}, {"x": jnp.sin(jnp.arange(128.0)).reshape(8, 16)}, []
    for passes in ({}, {"autocast": "bf16", "chunk": 4096, "residuals": True, "memory_budget": "1GiB"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = passes_compile.training_program(loss, optax.sgd(0.1), params=params, batch=batch, **passes)
            results.append(program.step(program.init(jax.tree.map(jnp.copy, params)), batch)[0]["params"]["w"])
    np.testing.assert_allclose(*results, rtol=1e-6)
