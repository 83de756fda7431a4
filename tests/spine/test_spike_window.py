"""The window of spikes against float64 NumPy, and what a spike and a new level do to it."""

import functools

import jax
import numpy as np
import pytest

from hlat_jax.optimizer import SpikePolicy, detect_spike, empty_spike_window

POLICY = SpikePolicy(sigmas=6.0, window=16)


@functools.cache
def compiled(policy):
    return jax.jit(functools.partial(detect_spike, policy=policy))


def decisions(series, policy=POLICY):
    """Returns for each step of [steps, 2] values whether it is a spike, and the last window."""
    state, spikes = empty_spike_window(policy), []
    for loss, norm in np.float32(series):
        finite = np.isfinite([loss, norm]).all()
        spike, state = compiled(policy)(state, loss=loss, grad_norm=norm, finite=finite)
        spikes.append(bool(spike))
    return spikes, state


def by_numpy(series, policy=POLICY):
    """The same with lists and float64."""
    window, spikes = [], []
    for value in series:
        if not np.isfinite(value).all():
            spikes.append(False)
            continue
        limit = np.full(2, np.inf)
        if len(window) >= policy.window // 2:
            limit = np.mean(window, axis=0) + policy.sigmas * np.std(window, axis=0, ddof=1)
        spikes.append(bool((value > limit).any()))
        window = [*window, np.minimum(value, limit)][-policy.window :]
    return spikes, np.array(window).T


def quiet(steps):
    """Returns [steps, 2] losses and gradient norms without spikes."""
    return np.random.default_rng(0).normal([4.0, 0.5], [0.05, 0.02], (steps, 2))


def test_decisions_and_window_match_float64_numpy():
    series = quiet(60)
    series[5, 0] = 40.0  # too early to be one
    series[30] = np.nan, 0.5
    series[31] = 4.0, np.inf
    series[40, 0] = 400.0
    series[45, 1] = 3.0
    spikes, state = decisions(series)
    wanted, window = by_numpy(series)
    assert spikes == wanted
    assert np.flatnonzero(spikes).tolist() == [40, 45]
    assert int(state["count"]) == 16
    np.testing.assert_allclose(state["values"], window, rtol=1e-5)  # fp32 sums of 16 values


def test_a_spike_is_caught_right_after_another_one():
    for first in (400.0, 3e38):
        series = quiet(24)
        series[20, 0], series[22, 0] = first, 8.0
        assert np.flatnonzero(decisions(series)[0]).tolist() == [20, 22]


def test_a_new_level_becomes_normal_within_two_windows():
    old, new, window = np.float32([4.0, 0.5]), np.float32([8.0, 5.0]), POLICY.window
    for spread in (1.0, 0.0):  # noisy, and equal values
        series = np.concatenate([old + spread * (quiet(window) - old), np.tile(new, (3 * window, 1))])
        spikes, _ = decisions(series)
        assert not any(spikes[:window])
        assert spikes[window]
        assert not any(spikes[3 * window :])


def test_a_policy_that_cannot_decide_is_refused():
    for given in ({"sigmas": 0.0}, {"sigmas": float("nan")}, {"window": 1}):
        with pytest.raises(ValueError, match=r"give sigmas above 0.*window of 2 steps or more"):
            SpikePolicy(**given)
