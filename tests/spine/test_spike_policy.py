"""The window of spikes against float64 NumPy; a planted spike: skipped without a trace, and found after a resume."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro import config, exact
from micro import train as train_in_process
from programs import training_program

from hlat_jax.batch import SumAndCount
from hlat_jax.optimizer import SpikePolicy, detect_spike, empty_spike_window
from hlat_jax.run import open as run_open
from hlat_jax.run.goodput import read_events
from hlat_jax.store.metrics import ROWS_FILE, read_rows

POLICY, WINDOW_POLICY = SpikePolicy(window=4), SpikePolicy(sigmas=6.0, window=16)


def decisions(series):
    """Returns for each step of [steps, 2] values whether it is a spike, and the last window."""
    detect = jax.jit(functools.partial(detect_spike, policy=WINDOW_POLICY))
    state, spikes = empty_spike_window(WINDOW_POLICY), []
    for loss, norm in np.float32(series):
        finite = np.isfinite([loss, norm]).all()
        spike, state = detect(state, loss=loss, grad_norm=norm, finite=finite)
        spikes.append(bool(spike))
    return spikes, state


def by_numpy(series):
    """The same with lists and float64."""
    window, spikes, policy = [], [], WINDOW_POLICY
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
    series[12, 1] = 3.0  # half a window is enough
    series[30] = np.nan, 0.5
    series[31] = 4.0, np.inf
    series[40, 0], series[42, 0] = 3e38, 8.0  # one right after another
    series[45, 1] = 3.0
    spikes, state = decisions(series)
    wanted, window = by_numpy(series)
    assert spikes == wanted
    assert np.flatnonzero(spikes).tolist() == [12, 40, 42, 45]
    assert int(state["count"]) == 16
    np.testing.assert_allclose(state["values"], window, rtol=1e-5)  # fp32 sums of 16 values


def test_a_new_level_becomes_normal_within_two_windows():
    old, new, window = np.float32([4.0, 0.5]), np.float32([8.0, 5.0]), WINDOW_POLICY.window
    for spread in (1.0, 0.0):  # noisy, and equal values
        series = np.concatenate([old + spread * (quiet(window) - old), np.tile(new, (3 * window, 1))])
        spikes, _ = decisions(series)
        assert not any(spikes[:window])
        assert spikes[window]
        assert not any(spikes[3 * window :])


def linear(params, batch):
    error = (batch["x"] @ params["w"])[:, 0] - batch["y"]
    return SumAndCount(jnp.sum(jnp.square(error)), 1.0 * error.size)


@pytest.mark.quick_cases("one")
@pytest.mark.parametrize(
    "options", [{}, {"num_microbatches": 2, "zero": 1}, {"autocast": "fp16"}], ids=["one", "zero1", "fp16"]
)
def test_a_skipped_spike_changes_nothing_but_step_and_window(options):
    x, params = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32), {"w": jnp.zeros((16, 1))}
    program = training_program(linear, optax.adam(1e-3), options={"spikes": POLICY, **options}, params=params)
    state, batch = program.init(params), {"x": x, "y": 0.0002 * x.sum(1)}
    for _ in range(4):
        state, metrics = program.step(state, batch)
        assert not metrics.spike
    state, metrics = program.step(state, {"x": batch["x"], "y": batch["y"] * np.nan})
    assert (bool(metrics.finite), bool(metrics.spike)) == (False, False)  # no spike, and hides none
    before = jax.device_get(state)
    spike = {"x": batch["x"], "y": 20 * batch["y"]}
    for _ in range(2):
        state, metrics = program.step(state, spike)
        assert metrics.finite
        assert metrics.spike
    after = jax.device_get(state)
    assert after.pop("step") == before.pop("step") + 2
    assert not np.array_equal(before.pop("spikes")["values"], after.pop("spikes")["values"])
    if options == {"autocast": "fp16"}:  # two more steps with finite gradients say the same of the scale as any others
        scale = after["opt_state"].pop("loss_scale")
        assert scale.good_steps == before["opt_state"].pop("loss_scale").good_steps + 2
    jax.tree.map(np.testing.assert_array_equal, before, after)
    state, metrics = program.step(state, batch)
    assert not metrics.spike
    assert not np.array_equal(state["params"]["w"], before["params"]["w"])


@pytest.fixture
def micro(tmp_path):
    """A mutable config of 12 steps at one loss, whose window decides from its fourth step on."""
    c = config(tmp_path, data__validation="", optimizer__peak_lr=1e-5, optimizer__warmup_steps=0)
    c.train.update(num_steps=12, spikes="skip", spike_window=8, spike_sigmas=12.0)
    c.checkpoint.every_steps = 0
    return c


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that trains a config in `tmp_path/NAME` on one device; the targets of batch 7 are all one token."""
    next_batch = run_open.TrainBatches.__next__

    def with_spike(self):
        batch, position = next_batch(self)
        if position[0, 0] == 7:
            batch = dataclasses.replace(batch, targets=np.full_like(batch.targets, 7))
        return batch, position

    monkeypatch.setattr(run_open.TrainBatches, "__next__", with_spike)

    def run(c, name="run", **keys):
        c.train.update(keys)
        assert train_in_process(c, tmp_path / name) == 0
        return read_rows(tmp_path / name / ROWS_FILE)

    return run


def spikes_of(rows):
    return [row["step"] for row in rows if row["spike"]]


@pytest.mark.slow
def test_a_spike_right_after_a_resume_is_skipped_as_without_one(micro, train, tmp_path, capsys):
    rows = train(micro)
    assert spikes_of(rows) == [7]
    line = f"step 7: a spike, loss {rows[6]['loss']:.4f}, gradient norm {rows[6]['grad_norm']:.3g}, update skipped"
    assert line in capsys.readouterr().out
    [event] = [event for event in read_events(tmp_path / "run") if event["event"] == "spike"]
    assert event.items() >= {"step": 7, "loss": rows[6]["loss"], "skipped": True}.items()
    assert rows[6]["param_norm"].hex() == rows[7]["param_norm"].hex()
    assert rows[7]["param_norm"].hex() != rows[8]["param_norm"].hex()
    train(micro, "again", num_steps=6)
    again = train(micro, "again", num_steps=12)
    assert spikes_of(again) == [7]
    assert [exact(row) for row in again] == [exact(row) for row in rows]


@pytest.mark.slow
def test_the_policy_may_be_turned_on_and_off_and_its_window_changed_at_a_resume(micro, train):
    train(micro, num_steps=2, spikes="off")
    train(micro, num_steps=4, spikes="warn")
    rows = train(micro, num_steps=8, spikes="skip", spike_sigmas=11.0)
    assert [row.get("spike") for row in rows] == [None, None, 0, 0, 0, 0, 1, 0]  # a window of four, two from before
    train(micro, num_steps=9, spike_window=16)
    assert "spike" not in train(micro, num_steps=10, spikes="off")[-1]
