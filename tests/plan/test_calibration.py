"""The efficiency of the projection: the split and the rules of its fit, and the errors that the package prints."""

import dataclasses
import statistics

import pytest

from benchmarks import calibration
from hlat_jax.plan.roofline import CALIBRATION, Seconds


def _row(model, *, published_s, products, link=1.0):
    c = next(c for c in calibration.CONFIGURATIONS if c.model == model and not c.doubt)
    c = dataclasses.replace(c, sequences_per_s=c.batch_size / published_s)
    return calibration.Row(c, Seconds(products=products, update=0.0, link=link, network=0.0, flops=0.0))


def test_models_alternate_by_size_between_the_fit_and_the_held_out_side():
    sizes = [size for size, *_ in calibration.MODELS.values()]
    assert sizes == sorted(sizes)
    assert set(calibration.FITTED).isdisjoint(calibration.HELD_OUT)
    assert len(calibration.FITTED) + len(calibration.HELD_OUT) == len(calibration.MODELS)
    assert {c.model for c in calibration.CONFIGURATIONS} == set(calibration.MODELS)


def test_fit_finds_the_efficiencies_of_made_up_steps():
    names = ("GPT-3 6.7B", "GPT-3 23B", "GPT-3 175B")
    rows = [
        _row(m, published_s=k / 0.4 + 2 * k**2 / 0.8, products=k, link=2 * k**2)
        for k, m in zip((1, 2, 5), names, strict=True)
    ]
    assert calibration.fitted(rows, collectives=(0.6, 0.8, 1.0)) == (0.4, 0.8)
    outlier = _row("Llama-3.1 8B", published_s=100.0, products=1.0)
    one = [_row(m, published_s=1 / 0.5 + 1, products=1.0) for m in names]
    assert calibration.fitted([*one, outlier])[0] == 0.5  # the sum of absolute logarithms is robust against one row


def test_left_out_error_does_not_see_the_model_that_it_predicts():
    rows = [_row("GPT-3 6.7B", published_s=3.0, products=1.0), _row("GPT-3 23B", published_s=5.0, products=1.0)]
    # each is predicted by the other: 3 by 5, 5 by 3
    assert calibration.left_out_error(rows) == pytest.approx(statistics.median([1 - 3 / 5, 5 / 3 - 1]), abs=0.01)


@pytest.mark.slow
def test_package_has_the_efficiency_and_the_errors_that_the_fit_gives():
    rows = [calibration.planned(c) for c in calibration.CONFIGURATIONS]
    fit, held_out = ([row for row in rows if row.side == side] for side in ("fit", "held out"))
    efficiency, _ = calibration.fitted(fit)
    errors = calibration.errors(held_out, efficiency)
    ratios = [row.ratio(efficiency) for row in held_out]
    assert efficiency == CALIBRATION.efficiency
    assert statistics.median(errors) == pytest.approx(CALIBRATION.median_error, abs=5e-4)
    assert max(errors) == pytest.approx(CALIBRATION.worst_error, abs=5e-4)
    assert (min(ratios), max(ratios)) == pytest.approx(CALIBRATION.step_range, abs=5e-4)
