"""Long scans as two nested ones: the same results and derivatives in every mode, and the bytes that are left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses_over_budget import STEPS, B, D, gru, recurrent_arguments, retention, ssm

from hlat_jax.neuron import lint
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.jaxpr import equations
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.remat_pass import temporaries
from hlat_jax.passes.residuals import select_residuals
from hlat_jax.passes.scan_segments import nest_scans

PRIME = 251  # steps that no segments divide
PARAMS, X = recurrent_arguments()
MODELS = {"retention": retention, "gru": gru, "ssm": ssm}
# Temporaries that are left of plain: the operands of a scan, which stay, are most of them for retention.
MOST = {"retention": 0.55, "gru": 0.25, "ssm": 0.25}


def step_of(fn, *args):
    return jax.jit(jax.value_and_grad(fn)).trace(*args)


def assert_equal(found, expected):
    """Asserts equal trees; gradients of weights are summed in another order, over the steps of a segment first."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * float(np.max(np.abs(b))))


@pytest.mark.parametrize("name", MODELS)
def test_a_split_scan_takes_fewer_bytes_and_gives_equal_gradients(name):
    fn = MODELS[name]
    nested = nest_scans(fn)
    step, plain = step_of(nested, PARAMS, X), step_of(fn, PARAMS, X)
    assert temporaries(step) <= MOST[name] * temporaries(plain)
    assert total_flops(live_jaxpr(step)) <= 1.5 * total_flops(live_jaxpr(plain))
    found, expected = (each.lower().compile()(PARAMS, X) for each in (step, plain))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert_equal(found, expected)
    assert str(nested.report()).startswith("scan at losses_over_budget.py:")


@pytest.mark.parametrize("share", [1.0, 0.0], ids=["segments", "segments and steps"])
@pytest.mark.parametrize("num_steps", [STEPS, PRIME])
@pytest.mark.parametrize("reverse", [False, True])
def test_states_and_results_of_each_step_are_bitwise_equal(share, num_steps, reverse):
    def run(carry, xs):
        def step(carry, xs):
            state, count = carry
            state = jnp.tanh(state * 0.9 + xs["x"] * count)
            return (state, count + 1), {"state": state, "twice": [2 * xs["number"]]}

        return jax.lax.scan(step, carry, xs, reverse=reverse)

    xs = {"x": X[:num_steps], "number": np.arange(num_steps, dtype=np.int32)}
    nested = nest_scans(run, share=share)
    found, expected = (jax.jit(fn)((jnp.ones((B, D)), 1), xs) for fn in (nested, run))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    (scan,) = nested.report().replacements
    assert scan.has_checkpointed_steps == (share == 0)
    assert (num_steps % scan.segment == 0) == (num_steps == STEPS)


@pytest.mark.parametrize("num_steps", [STEPS, PRIME])
def test_gradients_from_the_end_of_a_sequence_are_equal(num_steps):
    fn = functools.partial(gru, reverse=True)
    for share in (1.0, 0.0):
        nested = nest_scans(fn, share=share)
        assert_equal(*(jax.jit(jax.grad(each))(PARAMS, X[:num_steps]) for each in (nested, fn)))


def test_forward_mode_vmap_and_second_derivatives_are_those_of_the_scan():
    x = X[:64]

    def of_state(fn, state):
        return fn(PARAMS | {"of_state": state}, x)

    state = PARAMS["of_state"]
    for transform in (
        lambda fn: jax.jvp(functools.partial(of_state, fn), (state,), (jnp.ones_like(state),)),
        lambda fn: jax.vmap(jax.grad(functools.partial(of_state, fn)))(jnp.stack([state, 2 * state])),
        lambda fn: jax.jvp(jax.grad(functools.partial(of_state, fn)), (state,), (jnp.ones_like(state),)),
    ):
        assert_equal(*(jax.jit(transform, static_argnums=0)(fn) for fn in (nest_scans(gru), gru)))


def test_scans_inside_calls_checkpoints_and_layers_are_split():
    @jax.jit
    def block(params, x):
        def step(h, x):
            h = jnp.tanh(jnp.sin(h) * jnp.exp(jnp.cos(x @ params)) + x)
            return h, h

        return x + jax.lax.scan(step, jnp.zeros((B, D)), x)[1]

    def loss(layers, x):
        return jnp.mean(jax.lax.scan(lambda x, one: (jax.checkpoint(block)(one, x), None), x, layers)[0] ** 2)

    layers, nested = jnp.stack([PARAMS["q"], PARAMS["k"]]), nest_scans(loss)
    assert_equal(*(jax.jit(jax.value_and_grad(fn))(layers, X) for fn in (nested, loss)))
    assert [scan.length for scan in nested.report().replacements] == [STEPS]
    assert temporaries(step_of(nested, layers, X)) < 0.6 * temporaries(step_of(loss, layers, X))


def test_scans_that_gain_nothing_or_have_effects_are_left():
    def few(params, x):
        return gru(params, x[:8])

    def no_carry(params, x):
        return jnp.sum(jax.lax.scan(lambda _, x: (None, jnp.tanh(x @ params["q"])), None, x)[1])

    def printed(params, x):
        return jax.lax.scan(lambda h, x: (jax.debug.print("{}", h[0, 0]), (jnp.tanh(h + x), None))[1], x[0], x)[0]

    for fn in (few, no_carry, printed):
        nested = nest_scans(fn)
        assert str(jax.make_jaxpr(nested)(PARAMS, X)) == str(jax.make_jaxpr(fn)(PARAMS, X))
        assert str(nested.report()) == "no scan is split"


def test_other_passes_take_a_split_scan():
    for later in (select_residuals, functools.partial(autocast, policy="bf16")):
        found, expected = (jax.jit(jax.value_and_grad(later(fn)))(PARAMS, X) for fn in (nest_scans(ssm), ssm))
        assert_equal(found, expected)


def test_a_split_scan_is_a_loop_with_a_fixed_number_of_trips_on_neuron():
    step = jax.jit(jax.value_and_grad(nest_scans(gru)))
    jaxpr = live_jaxpr(step.trace(PARAMS, X))
    loops = [eqn.primitive.name for eqn, _ in equations(jaxpr) if eqn.primitive.name in ("scan", "while", "cond")]
    assert loops == ["scan"] * 5  # both forward; both backward, and the steps of a segment again
    found = {finding.rule for finding in lint.check(step, PARAMS, X)}
    assert found == {finding.rule for finding in lint.check(jax.jit(jax.value_and_grad(gru)), PARAMS, X)}


@pytest.mark.slow
def test_scans_nested_by_hand_keep_their_saving_under_other_passes():
    """The inner scan is under a checkpoint, as people write recurrences over long sequences."""

    def of_segments(step, start, heads):
        segments = jax.tree.map(lambda x: x.reshape(16, -1, *x.shape[1:]), heads)
        return jax.lax.scan(jax.checkpoint(lambda state, own: jax.lax.scan(step, state, own)), start, segments)[1]

    def loss(params, x, over_time=of_segments):
        def step(state, heads):
            q, k, v = heads
            state = 0.9 * state + k[:, :, None] * v[:, None, :]
            return state, jnp.einsum("bd,bde->be", q, state)

        heads = [x @ params[name] for name in "qkv"]
        return jnp.mean(over_time(step, jnp.zeros((B, D, D)), heads) ** 2)

    plain = functools.partial(loss, over_time=lambda *args: jax.lax.scan(*args)[1])
    by_hand = temporaries(step_of(loss, PARAMS, X))
    assert by_hand < 0.6 * temporaries(step_of(plain, PARAMS, X))
    for pass_ in (select_residuals, functools.partial(chunk, max_bytes="4KiB")):
        assert temporaries(step_of(pass_(loss), PARAMS, X)) <= 1.05 * by_hand, pass_
