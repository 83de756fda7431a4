"""The learning rate against HLAT's formula and the points that its paper and scripts give. All exact up to fp64."""

import dataclasses
import math

import pytest

from hlat_jax.config import OptimizerConfig
from hlat_jax.optimizer import learning_rate

HLAT_7B = OptimizerConfig(peak_lr=3e-4, min_lr_ratio=0.1, warmup_steps=2000, horizon_steps=500_000)
HLAT_70B = dataclasses.replace(HLAT_7B, peak_lr=1.5e-4)
TOKENS_PER_STEP = 1024 * 4096


def hlat_factor(step):
    """HLAT's lambda, as published in 7b/scheduler.py, with its constants."""
    if step < 2000:
        return step / 2000
    return max(0.1, 0.5 * (1.0 + math.cos(math.pi * (step - 2000) / (500_000 - 2000))))


def test_learning_rate_of_7b_at_known_steps():
    assert OptimizerConfig() == HLAT_7B
    assert learning_rate(0, HLAT_7B) == 0.0
    assert type(learning_rate(5, HLAT_7B)) is float
    known = {1: 1.5e-7, 1000: 1.5e-4, 1999: 2.9985e-4, 2000: 3e-4, 251_000: 1.5e-4, 450_000: 3e-5, 500_000: 3e-5}
    assert {step: learning_rate(step, HLAT_7B) for step in known} == pytest.approx(known, rel=1e-12)
    assert learning_rate(900_000, HLAT_7B) == pytest.approx(3e-5, rel=1e-12)
    assert learning_rate(900_000, dataclasses.replace(HLAT_7B, min_lr_ratio=0.0)) == 0.0
    assert learning_rate(0, dataclasses.replace(HLAT_7B, warmup_steps=0)) == 3e-4


def test_learning_rate_equals_the_published_formula_over_the_whole_horizon():
    for step in [*range(0, 4000, 7), *range(4000, 500_001, 997)]:
        assert learning_rate(step, HLAT_7B) == pytest.approx(3e-4 * hlat_factor(step), rel=1e-12), step


def test_floor_is_reached_at_1_669_trillion_tokens_and_70b_matches_figure_1d():
    first = next(step for step in range(397_000, 399_000) if learning_rate(step, HLAT_7B) == 3e-4 * 0.1)
    assert first == math.ceil(2000 + 498_000 * math.acos(-0.8) / math.pi)
    assert first * TOKENS_PER_STEP / 1e12 == pytest.approx(1.669, abs=5e-4)
    # Half of the last digit that can be read off the figure.
    assert learning_rate(round(1.4e12 / TOKENS_PER_STEP), HLAT_70B) == pytest.approx(3.76e-5, abs=5e-8)
