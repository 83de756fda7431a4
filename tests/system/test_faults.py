"""A run comes back from faults to the bits of an undisturbed one; the campaign would notice if it did not."""

import fault_kinds
import faults
import micro
import pytest
from refusals import assert_names

pytestmark = pytest.mark.xdist_group("faults")  # its undisturbed runs are costly: one process


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A campaign of the kinds that are over in a few seconds."""
    slow = ("stuck in compile", "stuck in restore", "long compile", "SIGSTOP for long")
    kinds = [kind for kind in faults.KINDS if kind not in slow]
    return faults.Campaign(tmp_path_factory.mktemp("faults"), seed=17, kinds=kinds, processes=(1, 1, 2))


@pytest.mark.slow
def test_six_random_faults_leave_no_trace(campaign):
    assert faults.run(campaign, faults=6) == []
    assert sum("kind" in record for record in campaign.records) >= 6


# (kind, the moment of a signal, process): each after a start of its own, and what is said
KILLED = [
    ("SIGINT", "compile", 0, "compiling"),
    ("SIGKILL", "save", 0, ""),
    ("SIGINT", "evaluation", 0, "SIGINT"),
    ("SIGTERM", "step", 0, "SIGTERM"),
    ("stuck in loader", "step", 0, "waiting for data"),
]
OF_TWO = [
    ("SIGTERM", "step", 1, "SIGTERM"),
    ("data error that stays", "step", None, "train.jsonl"),
    ("stuck in step", "step", 1, "process 1 of 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "script"), [(1, KILLED), (2, OF_TWO)], ids=["one", "two"])
def test_a_run_resumes_to_the_same_bits_after_each_fault(campaign, processes, script):
    number, told = 100 + processes, [what for *_, what in script]
    trial = faults.Trial(campaign, number, processes=processes, script=[tuple(fault) for *fault, _ in script])
    assert trial.run(len(script)) == []
    assert [row["kind"] for row in trial.done] == [kind for kind, *_ in script]
    for row, what in zip(trial.done, told, strict=True):
        assert row["verdict"] == "allowed", row
        assert_names(row["line"], what)


def _rows(num_steps=6):
    rows = []
    for step in range(1, num_steps + 1):
        rows.append({"step": step, "loss": 7.0 - 0.1 * step, "batch_hash": f"{step:032x}", "tokens": 372 * step})
        if step % 3 == 0:
            rows.append({"step": step, "eval_loss": 6.9})
    return rows


def test_a_history_is_compared_in_every_row():
    rows = _rows()
    assert micro.row_differences(rows, rows) == []
    gap = [row for row in rows if row["step"] != 5]
    assert micro.row_differences(gap, rows, lost={5}) == []
    for other in (gap, [*rows, rows[-2]], [row for row in rows if "loss" in row], [rows[1], rows[0], *rows[2:]]):
        [line] = micro.row_differences(other, rows)
        assert line.startswith("rows ")
    for name, value in (("loss", 6.5), ("batch_hash", "0" * 32)):
        other = [row | {name: value} if row["step"] == 4 else row for row in rows]
        [line] = micro.row_differences(other, rows)
        assert_names(line, "step 4 ", f"['{name}']")


def test_outcomes_that_the_table_does_not_name_are_not_allowed():
    is_allowed = fault_kinds.is_allowed
    assert is_allowed("stuck in save", fault_kinds.STUCK, "error: stuck: process 0 of 1 on host made no ...")
    assert not is_allowed("stuck in save", fault_kinds.STUCK, "error: something else")
    for kind in fault_kinds.KINDS:
        for outcome in (fault_kinds.CRASHES, fault_kinds.SILENT, fault_kinds.HANGS, fault_kinds.UNSAID):
            assert not is_allowed(kind, outcome, "stuck, damaged, written", at_start=True), kind
    assert is_allowed("SIGTERM", fault_kinds.DIES, "", at_start=True)
    assert not is_allowed("SIGTERM", fault_kinds.DIES, "")


class EndedLife:
    """A job whose only process has ended, after the faults of these ids had begun."""

    disturbed = False

    def __init__(self, *began):
        self.began = began

    def of(self, fault, name="fault"):
        return {"at": 1.0} if fault.id in self.began and name == "fault" else None

    def over(self):
        return True

    def wait(self, condition=lambda: False):
        return bool(condition())


def test_the_last_fault_that_began_is_judged(campaign):
    for began, judged in (((1, 2), ["stuck in step"]), ((1,), ["slow data"]), ((), [])):
        trial, ended = faults.Trial(campaign, 0), []
        slow = faults.Fault(1, "slow data", 8, process=None, more={"lasts_s": 2.0})
        trial._ended = lambda life, fault, ended=ended: ended.append(fault.kind)
        trial._live(EndedLife(*began), [slow, faults.Fault(2, "stuck in step", 14)], None)
        assert ended == judged
