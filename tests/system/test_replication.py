"""The replication of HLAT's findings: verdicts follow from intervals, and results belong to their settings."""

import json
import math

import pytest
from refusals import refused

from benchmarks.replication import findings, norm_drift, report, run


@pytest.mark.parametrize(
    ("differences", "verdicts"),
    [
        ([0.10, 0.11, 0.12], {"higher": "confirmed", "lower": "refuted", "equal": "refuted"}),
        ([-0.10, -0.11, -0.12], {"higher": "refuted", "lower": "confirmed", "equal": "refuted"}),
        ([0.001, 0.002, 0.003], {"equal": "confirmed", "higher": "not visible at this size"}),
        ([0.10, -0.10, 0.05], dict.fromkeys(("higher", "lower", "equal"), "not visible at this size")),
        ([0.012, 0.018, 0.015], {"equal": "not visible at this size", "higher": "confirmed"}),
        ([math.inf] * 3, {"higher": "confirmed", "lower": "refuted", "equal": "refuted"}),
        ([math.inf, 0.1, 0.1], {"higher": "no verdict", "equal": "no verdict"}),
        ([math.nan, 0.1, 0.1], {"higher": "no verdict", "lower": "no verdict"}),
    ],
)
def test_a_verdict_follows_from_the_interval_alone(differences, verdicts):
    effect = report.Effect(differences)
    assert {claim: effect.verdict(claim) for claim in verdicts} == verdicts


def test_the_interval_is_that_of_students_t():
    effect = report.Effect([1.0, 2.0, 3.0])
    assert effect.mean == 2.0
    assert effect.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # t of 0.975 with 2 degrees of freedom


def test_results_of_other_settings_are_refused(tmp_path, monkeypatch):
    name, overrides = next(iter(findings.runs().items()))
    row, path = {"run": name, "settings": run.digest_of(overrides)}, tmp_path / "results.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert run.read_results(path) == {name: row}
    path.write_text(json.dumps(row | {"settings": run.digest_of(overrides | {"train.seed": 7})}) + "\n")
    with refused(path, name, "base.py"):
        run.read_results(path)
    path.write_text(json.dumps({"arm": "own", "seed": 0, "steps": 100, "settings": norm_drift.SETTINGS}) + "\n")
    assert norm_drift.read_results(path, 100)
    with refused("own, seed 0", "--results=FILE"):
        norm_drift.read_results(path)


def test_a_spike_is_a_norm_far_above_the_twenty_before():
    assert run.spikes_in([1.0] * 30) == 0
    assert run.spikes_in([1.0] * 25 + [2.5] + [1.0] * 5) == 1
    assert run.spikes_in([1.0] * 25 + [1.9] + [1.0] * 5) == 0


@pytest.mark.slow
def test_the_pages_are_what_the_recorded_results_give(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    made, record = tmp_path / "replication.md", tmp_path / "README.md"
    monkeypatch.setattr("sys.argv", ["report", f"--out={made}", f"--record={record}"])
    assert report.main() == 0
    page = report.ROOT / "docs" / "replication.md"
    assert made.read_text() == page.read_text()
    assert record.read_text() == (report.FOLDER / "README.md").read_text()
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert drawn == {path.name for path in (page.parent / "images").glob("replication*.png")}
