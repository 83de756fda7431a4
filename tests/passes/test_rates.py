"""Rates of work are those of the device at hand, in FLOPs of its products."""

import jax
import jax.numpy as jnp
import pytest

from hlat_jax.passes import rates, remat
from hlat_jax.passes.recompute import Rates


def test_rates_are_seconds_of_an_operation_over_seconds_of_a_flop(monkeypatch):
    def seconds(fn, *args, **_):
        if fn is jnp.matmul:
            return 2 * 32**3 * 1e-12
        one, count = fn.args
        work = str(jax.make_jaxpr(lambda x: one(x, 1))(args[0]))
        per_element = 24e-12 if "exp" in work else 2 * 5e-12  # the others are two operations
        return 7.0 + count * args[0].size * per_element  # and reading and writing once

    monkeypatch.setattr(rates, "_seconds", seconds)
    found = rates.measured_rates.__wrapped__(width=32, num_elements=256)
    assert found == Rates(element=pytest.approx(5, rel=1e-3), transcendental=pytest.approx(24, rel=1e-3))


@pytest.mark.slow
def test_rates_measured_here_serve_a_budget():
    def loss(layers, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, layers)[0] ** 2)

    options = remat.RematOptions(rates=rates.measured_rates(width=256, num_elements=1 << 20))
    assert options.rates.transcendental > options.rates.element >= 0
    args = jnp.ones((8, 128, 256)) / 128, jnp.ones((256, 128))
    plan = remat.fit(loss, *args, budget_bytes="2.5MiB", step=jax.value_and_grad, options=options)
    assert plan.choice is not None
    assert plan.measured_bytes <= 2.5 * 2**20
