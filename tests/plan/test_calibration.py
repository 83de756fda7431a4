"""The efficiency of the projection: its fit, the errors that the package prints, and the memory of published rows."""

import statistics

import pytest

from benchmarks import calibration
from hlat_jax.plan.roofline import ERRORS, STACKS, Seconds


def row(model, products, *, doubt=""):
    c = calibration.Configuration(model, 1, 2048, 1, 8, 1, "mixed", "full", 1.0, "2.20.0", doubt)
    return calibration.Row(c, Seconds(products=products, update=0.0, link=0.0, network=0.0, flops=0.0))


def test_held_out_model_is_not_in_the_fit_that_judges_it():
    others = [row("a", 0.5), row("b", 0.5), row("b", 0.5, doubt="says so itself")]
    for products in (0.1, 0.8):
        one = row("c", products)
        assert calibration.held_out_ratio(one, [*others, one, one, one]) == pytest.approx(0.5 / products)


@pytest.mark.slow
def test_package_has_the_fit_and_no_published_row_is_refused():
    rows = [calibration.planned(c) for c in calibration.CONFIGURATIONS]
    assert [r.configuration for r in rows if not r.fits] == []
    assert calibration.efficiencies(rows) == {stack: one.efficiency for stack, one in STACKS.items()}
    for stack, one in STACKS.items():
        found = [calibration.held_out_ratio(r, rows) for r in calibration.consistent(rows, stack)]
        assert (min(found), max(found)) == pytest.approx(one.step_range, abs=1e-3)
        for r in calibration.consistent(rows, stack):  # the range that a plan prints holds every row
            low, high = (factor * r.projected_s(one.efficiency) for factor in one.step_range)
            assert 0.999 * low <= r.published_s <= 1.001 * high
    for chip, expected in ERRORS.items():
        off = calibration.errors(rows, chip)
        assert (statistics.median(off), max(off)) == pytest.approx(expected, abs=1e-3)
    assert ERRORS["trn1"][0] <= 0.1
