"""How long a phase may take without progress, and which process is named when it took longer."""

import threading
import time

import pytest
from refusals import assert_names

from hlat_jax.host import distributed, watchdog
from hlat_jax.host.limits import UnawaitedErrors
from hlat_jax.host.watchdog import WAITING, Watchdog, stuck_line

HOSTS = {0: "a", 1: "b"}


@pytest.fixture
def clock(monkeypatch):
    """A list with the time, in seconds."""
    now = [100.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    return now


def test_limits_are_generous_first_and_then_learned(clock):
    found = Watchdog(least_s=10)
    for seconds in (3.0, 1.0, 0.1):
        found.begin("training")
        assert found.snapshot()["limit_s"] == 120
        clock[0] += seconds
    found.begin("training")
    for _ in range(7):
        clock[0] += 1
        found.snapshot()
    assert found.snapshot() == {"doing": "training", "step": 0, "for_s": 7.0, "limit_s": 60.0}
    found.begin("compiling")
    assert found.snapshot()["limit_s"] == 720
    for _ in range(4):
        found.begin("waiting for data")
        clock[0] += 0.01
    assert found.snapshot()["limit_s"] == 10
    for _ in range(5):  # a disk may be slow for once
        found.begin("starting to save")
        clock[0] += 2
    assert found.snapshot()["limit_s"] == 120
    clock[0] += 100
    found.begin("starting to save")
    assert found.snapshot()["limit_s"] == 3 * 102


def test_the_first_step_lasts_until_its_metrics_arrive(clock):
    found = Watchdog()
    found.step = 1
    for seconds in (1, 30, 2):  # dispatched; waited for while the second one is dispatched; the second
        found.begin("training")
        clock[0] += seconds
        if seconds == 30:
            found.end_first_step()
            clock[0] += 3
    found.begin("saving")
    spent = found.seconds_by_account()
    assert (spent["first step"], spent["training"]) == (31, 5)


def test_a_step_that_does_not_answer_sigterm_is_late(clock):
    found = Watchdog(least_s=300)

    def unanswered_s(doing, seconds):
        found.begin(doing)
        for _ in range(seconds):
            found.snapshot()
            clock[0] += 1
        return found.unanswered_s(seconds)

    assert unanswered_s("saving", 100) == 0
    assert unanswered_s("training", 30) == 0
    assert unanswered_s("training", 100) == 100
    assert unanswered_s(WAITING, 100) == 0  # for a process that does not answer


def test_a_phase_whose_status_changes_makes_progress(clock):
    found, share = Watchdog(least_s=10), [0.0]
    found.begin("evaluating", status=lambda: share[0])
    found.snapshot()
    for _ in range(5):
        clock[0] += 4
        share[0] += 0.1
        assert found.snapshot()["for_s"] == 0
    clock[0] += 4
    assert found.snapshot()["for_s"] == 4
    found.begin("training")
    assert found.snapshot()["for_s"] == 0
    clock[0] += 10_000  # the process was stopped and continued
    assert found.snapshot()["for_s"] == 5


def status(doing, for_s, limit_s=60.0):
    return {"doing": doing, "step": 7, "for_s": for_s, "limit_s": limit_s}


STUCK = [
    (status("training", 59.0), status("training", 3.0), []),
    (status(WAITING, 61.0), status("training", 3.0), []),
    (status(WAITING, 61.0), status("waiting for data", 62.0), [1]),
    (status(WAITING, 61.0), status(WAITING, 61.0), [0, 1]),
    (status("training", 61.0), status("training", 61.0), [0, 1]),
    (status("training", 61.0, 0.0), status("training", 61.0, 0.0), []),
    (status("starting to save", 59.0), status("starting to save", 61.0), [0, 1]),  # one waits in there
    (status("starting to save", 20.0), status("starting to save", 61.0), [1]),
]


def test_the_processes_that_the_others_wait_for_are_named():
    for first, second, named in STUCK:
        line = stuck_line({0: first, 1: second}, hosts=HOSTS, where=None)
        found = [n for n, host in HOSTS.items() if f"process {n} of 2 on {host} " in line]
        assert (found, "step 7 (limit 60 s)" in line) == (named, bool(named))
    line = stuck_line({index: status("training", 60.0 + index) for index in range(9)}, hosts=HOSTS, where=None)
    assert_names(line, "process 8 of 9 on ? ", "68 s while training", "step 7", "5 more")
    assert line.count(" of 9 on ") == 4  # of many processes, those that stopped first


def test_a_stuck_run_does_not_wait_for_a_disk_that_hangs(tmp_path, monkeypatch):
    ended = []

    def end(line, code):
        ended.append((line, code))
        raise SystemExit

    def hang():
        time.sleep(30)
        return "late"

    monkeypatch.setattr(distributed, "exit_with", end)
    monkeypatch.setattr(watchdog, "DUMP_S", 0.5)
    (tmp_path / "file").touch()  # no folder for the stacks can be made there
    for problem, stacks, code, said in (
        (str, tmp_path / "stuck", 124, "stuck: process 0 of 1"),
        (str, tmp_path / "file", 124, "stuck: process 0 of 1"),
        (hang, tmp_path / "stuck", 124, "stuck: process 0 of 1"),
        (lambda: "the folder is gone", tmp_path / "other", 2, "the folder is gone"),
    ):
        stuck = Watchdog(least_s=0.01, began_s=time.monotonic() - 1000)
        stuck.problem = problem
        with pytest.raises(SystemExit):
            distributed._watch_alone(stuck, stacks, threading.Event(), UnawaitedErrors())
        line, found = ended.pop()
        assert (found, stacks.is_dir()) == (code, stacks.name == "stuck")
        assert line.startswith(f"error: {said}")
