"""A run comes back from random faults to the bits of an undisturbed one; the campaign would notice if it did not."""

import subprocess
import sys

import fault_kinds
import faults
import micro
import pytest


@pytest.mark.slow
def test_fifteen_random_faults_leave_no_trace(tmp_path):
    slow = "stuck in compile;stuck in restore"  # half a minute each
    said = _campaign(tmp_path, "--faults=15", "--seed=17", "--processes=1,1,1,2", f"--without={slow}")
    assert "\n15 faults of " in said


def _campaign(folder, *words):
    words = [sys.executable, faults.__file__, f"--folder={folder}", *words]
    done = subprocess.run(words, env=micro.environment(), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


def _rows(num_steps=6):
    rows = []
    for step in range(1, num_steps + 1):
        rows.append({"step": step, "loss": 7.0 - 0.1 * step, "batch_hash": f"{step:032x}", "tokens": 372 * step})
        if step % 3 == 0:
            rows.append({"step": step, "eval_loss": 6.9})
    return rows


def test_a_history_is_compared_in_every_row():
    assert fault_kinds.history_problems(_rows(), _rows()) == []
    twice = [*_rows(), _rows()[-2]]
    assert "trained more than once: steps [6]" in fault_kinds.history_problems(twice, _rows())
    other = [row | {"loss": 6.5} if row["step"] == 4 else row for row in _rows()]
    assert fault_kinds.history_problems(other, _rows()) == ["step 4 differs in loss"]
    swapped = [row | {"batch_hash": "0" * 32} if row.get("loss") and row["step"] == 2 else row for row in _rows()]
    assert fault_kinds.history_problems(swapped, _rows()) == ["step 2 differs in batch_hash"]
    gap = [row for row in _rows() if row["step"] != 5]
    assert fault_kinds.history_problems(gap, _rows()) == ["rows are missing: steps [5]"]
    assert fault_kinds.history_problems(gap, _rows(), lost={5}) == []
    no_eval = [row for row in _rows() if "eval_loss" not in row]
    assert fault_kinds.history_problems(no_eval, _rows()) == ["rows are missing: steps [3, 6]"]


def test_outcomes_that_the_table_does_not_name_are_not_allowed():
    assert fault_kinds.is_allowed(
        "stuck in save", fault_kinds.STUCK, "error: stuck: process 0 of 1 on host made no ..."
    )
    assert not fault_kinds.is_allowed("stuck in save", fault_kinds.STUCK, "error: something else")
    for kind in fault_kinds.KINDS:
        for outcome in (fault_kinds.CRASHES, fault_kinds.SILENT, fault_kinds.HANGS, fault_kinds.UNSAID):
            assert not fault_kinds.is_allowed(kind, outcome, "stuck, damaged, port, written", at_start=True), kind
    assert fault_kinds.is_allowed("SIGTERM", fault_kinds.DIES, "", at_start=True)
    assert not fault_kinds.is_allowed("SIGTERM", fault_kinds.DIES, "")


class EndedLife:
    """A job of which the only process has ended; `began` are the ids of the faults that it had begun."""

    disturbed = False

    def __init__(self, *began):
        self.began = began

    def of(self, fault, name="fault"):
        return {"at": 1.0} if fault.id in self.began and name == "fault" else None

    def over(self):
        return True

    def wait(self, condition=lambda: False):
        return False


def test_a_void_fault_is_given_back_and_does_not_count(tmp_path):
    log = tmp_path / "faults.jsonl"
    campaign = faults.Campaign(tmp_path / "c", seed=0, kinds=["SIGKILL"], log=log, processes=(1,))
    trial = faults.Trial(campaign, 0)
    plan = trial._plan(1, at_start=False)
    assert [fault.kind for fault in plan] == ["SIGKILL"]
    trial._trains_again = lambda life: None
    assert trial._live(EndedLife(), plan, None) is None
    assert (trial.done, campaign.records, campaign.voids) == ([], [], 1)
    assert campaign.draw(1) == "SIGKILL"


def test_the_last_fault_that_began_is_judged_where_one_before_it_was_not_over(tmp_path):
    for number, (began, judged) in enumerate((((1, 2), ["stuck in step"]), ((1,), ["slow data"]), ((), []))):
        folder, ended = tmp_path / str(number), []
        campaign = faults.Campaign(folder, seed=0, kinds=["slow data"], log=tmp_path / "log", processes=(1,))
        trial = faults.Trial(campaign, 0)
        slow = faults.Fault(1, "slow data", 8, 0.0, None, {"lasts_s": 2.0})
        trial._trains_again = lambda life: None
        trial._ended = lambda life, fault, ended=ended: ended.append(fault.kind)
        trial._live(EndedLife(*began), [slow, faults.Fault(2, "stuck in step", 14, 0.0, 0)], None)
        assert ended == judged
