"""Reported programs: right on eight CPU devices; wrong values and crashes are caught, with the thread."""

import functools

import jax
import numpy as np
import pytest

from hlat_jax.neuron import doctor, doctor_command, public_reports
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED

NAMES = [report.name for report in public_reports.reports(8)]


@functools.cache
def reports():
    return {report.name: report for report in public_reports.reports(8)}


@pytest.mark.parametrize("name", NAMES)
def test_reported_programs_are_right_on_cpu(name):
    outcome = public_reports.check(reports()[name], jax.devices())
    assert outcome.verdict == PASSED, outcome


@pytest.mark.parametrize("name", NAMES)
def test_wrong_values_and_crashes_fail_with_the_thread(name):
    report = reports()[name]

    def one_wrong(report, devices):
        got = report.want(*report.operands).astype(np.float64)
        got.flat[-1] += 1 + np.abs(got).max()
        return got

    def crash(report, devices):
        raise RuntimeError("NCC_EXCL\nmore")

    for run, words in (
        (one_wrong, "1 of "),
        (lambda *_: report.want(*report.operands)[None], "numbers are wrong"),
        (lambda *_: report.want(*report.operands) * np.nan, "numbers are wrong"),
        (crash, "RuntimeError: NCC_EXCL; reported"),
    ):
        outcome = public_reports.check(report, jax.devices(), run=run)
        assert outcome.verdict == FAILED
        assert words in outcome.found
        assert report.thread in outcome.advice
    assert report.thread.startswith("https://github.com/")


def test_known_values_depend_on_what_was_reported():
    table = reports()["gradient of a sharded table"]
    ids = table.operands[1]
    assert len(np.unique(ids)) < len(ids)  # rows that several devices add to
    assert 0 < reports()["masked assignment"].operands[1].sum() < 16
    gated = reports()["gated MLP, weights sharded along dim 0"]
    gate = np.split(gated.operands[0].astype(float) @ gated.operands[1].astype(float), 2, axis=-1)[0]
    assert ((np.abs(gate) > 0.1) & (np.abs(gate) < 2)).mean() > 0.3


def test_programs_over_several_devices_need_them():
    outcomes = {name: public_reports.check(report, jax.devices()[:1]) for name, report in reports().items()}
    skipped = [name for name, outcome in outcomes.items() if outcome.verdict == NOT_HERE]
    assert skipped == [name for name, report in reports().items() if report.specs is not None]
    assert len(skipped) == 4


def test_flag_runs_the_reports_instead_of_the_checks(monkeypatch, capsys):
    monkeypatch.setattr(
        doctor,
        "report_checks",
        lambda: iter([doctor.Check(name, lambda: doctor.Outcome(PASSED, "x")) for name in ("a", NAMES[-1])]),
    )
    monkeypatch.setattr(doctor, "checks", lambda *_, **__: iter([doctor.Check("b", lambda: 1 / 0)]))
    assert doctor_command.main(["--public_reports"]) == 0
    printed = capsys.readouterr().out
    assert f"passed               2  a, {NAMES[-1]}" in printed
    assert len({line.index(" x (") for line in printed.splitlines() if " x (" in line}) == 1, "one column"
