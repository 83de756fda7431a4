"""The window of spikes against float64 NumPy, and what a spike, a NaN and a new level do to it."""

import functools

import jax
import numpy as np
import pytest

from hlat_jax.passes import spikes

POLICY = spikes.SpikePolicy(sigmas=6.0, window=16)


@functools.cache
def compiled(policy):
    return jax.jit(functools.partial(spikes.observed, policy=policy))


def decisions(losses, grad_norms, policy=POLICY):
    """Returns for each step whether it is a spike, and the last window."""
    step = compiled(policy)
    state, found = spikes.initial(policy), []
    for loss, norm in zip(losses, grad_norms, strict=True):
        finite = np.bool_(np.isfinite(loss) and np.isfinite(norm))
        spike, state = step(state, loss=np.float32(loss), grad_norm=np.float32(norm), finite=finite)
        found.append(bool(spike))
    return found, state


def by_numpy(series, policy=POLICY):
    """The same of [steps, 2] values with lists and float64."""
    window, found = [], []
    for value in series:
        if not np.isfinite(value).all():
            found.append(False)
            continue
        limit = np.full(2, np.inf)
        if len(window) >= policy.window // 2:
            limit = np.mean(window, axis=0) + policy.sigmas * np.std(window, axis=0, ddof=1)
        found.append(bool((value > limit).any()))
        window = [*window, np.minimum(value, limit)][-policy.window :]
    return found, np.array(window).T


def quiet(steps, seed=0):
    """Returns [steps, 2] losses and gradient norms without spikes."""
    return np.random.default_rng(seed).normal([4.0, 0.5], [0.05, 0.02], (steps, 2))


def test_decisions_and_window_match_float64_numpy():
    series = quiet(60)
    series[5, 0] = 40.0  # too early to be one
    series[30] = np.nan, 0.5
    series[31] = 4.0, np.inf
    series[40, 0] = 400.0
    series[45, 1] = 3.0
    found, state = decisions(*series.T)
    wanted, window = by_numpy(series)
    assert found == wanted
    assert [step for step, spike in enumerate(found) if spike] == [40, 45]
    assert int(state["count"]) == 16
    np.testing.assert_allclose(state["values"], window, rtol=1e-5)  # fp32 sums of 16 values


def test_a_value_that_is_not_finite_leaves_the_window_as_it_is():
    series = quiet(20)
    _, before = decisions(*series.T)
    _, after = decisions(*np.concatenate([series, [[np.nan, np.nan], [np.inf, 1.0], [4.0, np.inf]]]).T)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))


@pytest.mark.parametrize("first", [400.0, 3e38])
def test_a_spike_is_caught_right_after_another_one(first):
    series = quiet(24)
    series[20, 0], series[22, 0] = first, 8.0
    assert np.flatnonzero(decisions(*series.T)[0]).tolist() == [20, 22]


@pytest.mark.parametrize("spread", [1.0, 0.0], ids=["noisy", "equal values"])
@pytest.mark.parametrize("window", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_a_new_level_becomes_normal_within_two_windows(window, spread):
    policy = spikes.SpikePolicy(window=window)
    old, new = np.float32([4.0, 0.5]), np.float32([8.0, 5.0])
    series = np.concatenate([old + spread * (quiet(window) - old), np.tile(new, (3 * window, 1))])
    found, _ = decisions(*series.T, policy)
    assert not any(found[:window])
    assert found[window]
    assert not any(found[3 * window :])


@pytest.mark.parametrize("given", [{"sigmas": 0.0}, {"sigmas": float("nan")}, {"window": 1}])
def test_a_policy_that_cannot_decide_is_refused(given):
    with pytest.raises(ValueError, match=r"give sigmas above 0.*window of 2 steps or more"):
        spikes.SpikePolicy(**given)
