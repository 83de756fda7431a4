"""Loss scaling of fp16 against fp32, and its state against a plain loop in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.jaxpr import equations
from hlat_jax.step import loss_scale as scaling


def tiny_gradient(params, x):
    """A loss whose gradient, about 1e-8, is 0 in fp16."""
    return 1e-8 * jnp.mean((x @ params["w"]) * x)


PARAMS, X = {"w": jnp.eye(4)}, jnp.arange(8.0).reshape(2, 4) / 8


def test_scale_preserves_gradients_that_underflow_in_fp16():
    wanted = jax.grad(tiny_gradient)(PARAMS, X)["w"]
    value_and_grad = scaling.value_and_grad(autocast(tiny_gradient, "fp16"))
    lost = value_and_grad(scaling.initial(scale=1.0), PARAMS, X)[1]
    loss, kept, finite = value_and_grad(scaling.initial(scale=2.0**20), PARAMS, X)
    assert not np.asarray(lost["w"]).any()
    assert finite
    assert kept["w"].dtype == jnp.float32
    # roundings of fp16, half a step of 2**-10 each
    np.testing.assert_allclose(kept["w"], wanted, rtol=3e-3)
    np.testing.assert_allclose(loss, tiny_gradient(PARAMS, X), rtol=3e-3)


def test_scale_adjustment_matches_a_python_loop():
    limits = {"growth_steps": 3, "smallest": 0.25, "largest": 16.0}
    finite = [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    state, scale, good = scaling.initial(scale=4.0), 4.0, 0
    for ok in finite:
        state = scaling.adjust(state, jnp.bool_(ok), **limits)
        good = good + 1 if ok else 0
        scale = scale if ok else max(scale / 2, 0.25)
        if good == 3:
            scale, good = min(scale * 2, 16.0), 0
        assert (float(state.scale), int(state.good_steps)) == (scale, good)


def test_overflowing_step_changes_only_the_scale_without_cond():
    loss = autocast(lambda params, x: jnp.square(x @ params["w"]).sum(), "fp16")

    def step(params, scale, x):
        _, grads, finite = scaling.value_and_grad(loss)(scale, params, x)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return scaling.choose(finite, moved, params), scaling.adjust(scale, finite)

    names = {eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(step)(PARAMS, scaling.initial(), X).jaxpr)}
    assert not names & {"cond", "while"}
    params, scale = jax.jit(step)(PARAMS, scaling.initial(scale=2.0**17), X)  # above 65504
    np.testing.assert_array_equal(params["w"], PARAMS["w"])
    assert (float(scale.scale), int(scale.good_steps)) == (2.0**16, 0)
    params, scale = jax.jit(step)(PARAMS, scaling.initial(scale=2.0**4), X)
    assert np.abs(params["w"] - PARAMS["w"]).max() > 0
    assert (float(scale.scale), int(scale.good_steps)) == (2.0**4, 1)


def test_any_leaf_that_is_not_finite_is_found():
    assert scaling.all_finite(PARAMS)
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        assert not scaling.all_finite({**PARAMS, "b": jnp.array([0.0, bad])})


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0])
def test_scale_that_is_not_a_power_of_two_is_refused(scale):
    with pytest.raises(ValueError, match="must be a power of two"):
        scaling.initial(scale=scale)
