"""The efficiency of the projection: the split and the rules of its fit, and the errors that the package prints."""

import dataclasses
import statistics

import pytest

from benchmarks import calibration
from hlat_jax.plan.roofline import MEDIAN_ERROR, STACKS, WORST_ERROR, Seconds


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


def test_fit_finds_the_efficiency_of_made_up_steps_of_each_library():
    names = ("GPT-3 6.7B", "GPT-3 23B", "GPT-3 175B", "Llama-2 70B", "Llama-3.1 8B")
    efficiencies = (0.4, 0.4, 0.4, 0.7, 0.7)
    rows = [
        _row(m, published_s=k / e + 1, products=k) for k, (m, e) in enumerate(zip(names, efficiencies, strict=True), 1)
    ]
    assert calibration.efficiencies(rows) == {"NeMo Megatron": 0.4, "NxD": 0.7}
    outlier = _row("GPT-3 6.7B", published_s=100.0, products=1.0)
    assert calibration.fitted([*rows[:3], outlier]) == 0.4  # the sum of absolute logarithms is robust against one row


def test_held_out_rows_do_not_enter_the_fit():
    rows = [_row(m, published_s=3.0, products=1.0) for m in ("GPT-3 6.7B", "Llama-2 70B")]
    held_out = [_row(m, published_s=9.0, products=1.0) for m in ("GPT-3 46B", "Llama-3.1 70B")]
    found = calibration.efficiencies(rows + held_out)
    assert found == {"NxD": 0.5, "NeMo Megatron": 0.5}
    assert calibration.ratios(held_out, found) == [3.0, 3.0]


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
