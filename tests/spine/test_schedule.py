"""The learning rate against HLAT's formula, points of its paper, and closed forms. All exact up to fp64."""

import dataclasses
import math
from decimal import Decimal

import numpy as np
import pytest
from refusals import refused

import configs
from hlat_jax.config import OptimizerConfig
from hlat_jax.optimizer import learning_rate

HLAT_7B = OptimizerConfig(peak_lr=3e-4, min_lr_ratio=0.1, warmup_steps=2000, horizon_steps=500_000)
HLAT_70B = dataclasses.replace(HLAT_7B, peak_lr=1.5e-4)
TOKENS_PER_STEP = 1024 * 4096


def test_learning_rate_of_7b_at_known_steps():
    assert OptimizerConfig() == HLAT_7B
    assert learning_rate(0, HLAT_7B) == 0.0
    assert type(learning_rate(5, HLAT_7B)) is float
    known = {1: 1.5e-7, 1000: 1.5e-4, 1999: 2.9985e-4, 2000: 3e-4, 251_000: 1.5e-4, 450_000: 3e-5, 500_000: 3e-5}
    assert {step: learning_rate(step, HLAT_7B) for step in known} == pytest.approx(known, rel=1e-12)
    assert learning_rate(900_000, HLAT_7B) == pytest.approx(3e-5, rel=1e-12)
    assert learning_rate(900_000, dataclasses.replace(HLAT_7B, min_lr_ratio=0.0)) == 0.0
    assert learning_rate(0, dataclasses.replace(HLAT_7B, warmup_steps=0)) == 3e-4


def test_floor_is_reached_at_1_669_trillion_tokens_and_70b_matches_figure_1d():
    first = next(step for step in range(397_000, 399_000) if learning_rate(step, HLAT_7B) == 3e-4 * 0.1)
    assert first == math.ceil(2000 + 498_000 * math.acos(-0.8) / math.pi)
    assert first * TOKENS_PER_STEP / 1e12 == pytest.approx(1.669, abs=5e-4)
    # Half of the last digit that can be read off the figure.
    assert learning_rate(round(1.4e12 / TOKENS_PER_STEP), HLAT_70B) == pytest.approx(3.76e-5, abs=5e-8)


# Schedule -> its keys, and its factor of the peak after a warm-up of 20 steps, at steps s up to the horizon of 300.
CLOSED_FORMS = {
    "constant": ({"schedule": "constant"}, lambda s: np.ones_like(s)),
    "linear": ({"schedule": "linear"}, lambda s: 1 - (s - 20) / 280),
    "cosine": ({}, lambda s: 0.5 * (1 + np.cos(np.pi * (s - 20) / 280))),
    "wsd": ({"schedule": "wsd", "cooldown_steps": 60}, lambda s: np.minimum(1, (300 - s) / 60)),
    "wsd, 1 - sqrt": (
        {"schedule": "wsd", "cooldown_steps": 60, "cooldown": "sqrt"},
        lambda s: 1 - np.sqrt(np.maximum(0, s - 240) / 60),
    ),
    "wsd without a stable phase": ({"schedule": "wsd", "cooldown_steps": 280}, lambda s: (300 - s) / 280),
}


@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_schedule_equals_its_closed_form_at_every_step(name, min_lr_ratio):
    keys, factor = CLOSED_FORMS[name]
    config = OptimizerConfig(peak_lr=7e-4, min_lr_ratio=min_lr_ratio, warmup_steps=20, horizon_steps=300, **keys)
    steps = np.arange(300, dtype=np.float64)
    wanted = 7e-4 * np.where(steps < 20, steps / 20, np.maximum(min_lr_ratio, factor(steps)))
    got = np.array([learning_rate(step, config) for step in range(300)])
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-18)  # atol: of zeros of a cosine
    at_horizon = 7e-4 * max(min_lr_ratio, float(factor(np.array([300.0]))[0]))
    assert [learning_rate(step, config) for step in (300, 301, 10**6)] == pytest.approx([at_horizon] * 3, abs=1e-18)


def test_last_steps_of_a_long_decay_keep_all_digits():
    share = 1 - (1 - Decimal(1) / 100_000).sqrt()
    for keys, wanted in (
        ({"schedule": "linear", "warmup_steps": 0}, 1 / 500_000),
        ({"schedule": "wsd", "cooldown_steps": 100_000, "cooldown": "sqrt"}, float(share)),
    ):
        config = dataclasses.replace(HLAT_7B, min_lr_ratio=0.0, **keys)
        assert learning_rate(499_999, config) == pytest.approx(3e-4 * wanted, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"schedule": "wsb"}, ("schedule='wsb'", "'wsd'")),
        ({"schedule": "wsd"}, ("'wsd'", "optimizer.cooldown_steps")),
        (
            {"schedule": "wsd", "warmup_steps": 50, "cooldown_steps": 51, "horizon_steps": 100},
            ("horizon_steps=100", "optimizer.warmup_steps=50", "cooldown_steps=51"),
        ),
        ({"horizon_steps": 2000}, ("horizon_steps=2000", "optimizer.warmup_steps=2000")),
        ({"min_lr_ratio": 1.0}, ("optimizer.min_lr_ratio=1.0",)),
        ({"schedule": "constant", "cooldown_steps": 5}, ("cooldown_steps=5", "optimizer.schedule='constant'")),
    ],
)
def test_schedule_that_cannot_be_is_refused(keys, names):
    with refused(*names):
        configs.resolved(**keys)


def test_constant_rate_needs_no_horizon():
    c = configs.resolved(schedule="constant", warmup_steps=10, horizon_steps=1).optimizer
    assert learning_rate(10**9, c) == c.peak_lr
