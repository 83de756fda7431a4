"""The efficiency of the projection: the split and the rules of its fit, and the errors that the package prints."""

import statistics

import pytest

from benchmarks import calibration
from hlat_jax.plan.roofline import MEDIAN_ERROR, STACKS, WORST_ERROR


def test_models_alternate_by_size_between_the_fit_and_the_held_out_side():
    sizes = [size for size, *_ in calibration.MODELS.values()]
    assert sizes == sorted(sizes)
    assert set(calibration.FITTED).isdisjoint(calibration.HELD_OUT)
    assert len(calibration.FITTED) + len(calibration.HELD_OUT) == len(calibration.MODELS)
    assert {c.model for c in calibration.CONFIGURATIONS} == set(calibration.MODELS)


@pytest.mark.slow
def test_package_has_the_efficiencies_and_the_errors_that_the_fit_gives():
    rows = [calibration.planned(c) for c in calibration.CONFIGURATIONS]
    found = calibration.efficiencies(rows)
    assert found == {stack: one.efficiency for stack, one in STACKS.items()}
    held_out = [row for row in rows if row.side == "held out"]
    for stack, some in calibration.by_stack(held_out).items():
        ratios = calibration.ratios(some, found)
        assert (min(ratios), max(ratios)) == pytest.approx(STACKS[stack].step_range, abs=5e-4)
    errors = [abs(ratio - 1) for ratio in calibration.ratios(held_out, found)]
    assert statistics.median(errors) == pytest.approx(MEDIAN_ERROR, abs=5e-4)
    assert max(errors) == pytest.approx(WORST_ERROR, abs=5e-4)
    assert MEDIAN_ERROR <= 0.1
