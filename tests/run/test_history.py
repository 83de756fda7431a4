"""A run whose checkpoints or rows are lost says so, and never begins at step 0 again unless it was asked to."""

import json

import pytest

from hlat_jax import config as config_lib
from hlat_jax.run import history
from hlat_jax.run.goodput import EVENTS_FILE, read_events
from hlat_jax.store.metrics import ROWS_FILE

CONFIG = config_lib.default()
START = {"pid": 1, "host": "n", "began": 0.0, "boot": "", "began_up": 0.0}


class Events:
    """The part of a ledger that the history needs."""

    def __init__(self, folder):
        self._path = folder / EVENTS_FILE

    def event(self, name, **fields):
        with open(self._path, "a") as file:
            file.write(json.dumps({"event": name, "time": 0, **fields}) + "\n")


@pytest.fixture
def folder(tmp_path):
    """A function of the steps of its rows, its events and the settings of its last start: (run folder, its ledger)."""

    def make(steps=(), events=(), **checkpoint):
        rows = [{"step": abs(s), "loss": 1.0, "tokens": 7, "nonfinite": int(s < 0)} for s in steps]
        (tmp_path / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "config.json").write_text(json.dumps({"checkpoint": checkpoint}))
        ledger = Events(tmp_path)
        for name, step in events:
            ledger.event(name, **(START if name == "start" else {"step": step}))
        return tmp_path, ledger

    return make


SAVED = [("start", None), ("saved", 10), ("saved", 20)]


def test_lost_checkpoints_are_refused_until_asked_to_begin_again(folder, capsys):
    workdir, ledger = folder(range(1, 26), SAVED)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"one of step 20 was saved \(events.jsonl\), and the rows reach step 25"):
            history.begin(workdir, ledger=ledger, begin_again=False)
    history.begin(workdir, ledger=ledger, begin_again=True)
    history.begin(workdir, ledger=ledger, begin_again=False)  # it was killed before its first checkpoint
    first, second = capsys.readouterr().out.splitlines()
    assert first == "beginning again  at step 0 (--begin_again): rows up to step 25 move to metrics.discarded.jsonl"
    assert "(no checkpoint was saved)" in second


def test_lost_checkpoints_are_refused_without_any_rows(folder):
    workdir, ledger = folder((), SAVED)
    (workdir / ROWS_FILE).unlink()
    with pytest.raises(ValueError, match="one of step 20 was saved"):
        history.begin(workdir, ledger=ledger, begin_again=False)


def test_a_run_killed_before_its_first_checkpoint_begins_again_without_questions(folder):
    for lives in range(1, 3):
        workdir, ledger = folder(range(1, 26), [("start", None)] * lives, every_steps=10)
        history.begin(workdir, ledger=ledger, begin_again=False)


@pytest.mark.parametrize(
    ("steps", "checkpoint", "saved"),
    [
        (range(1, 22), {"every_steps": 10}, 10),
        (range(1, 21), {"every_steps": 10}, 0),  # the second save, which waits for the first, may not have begun
        (range(1, 22), {"every_steps": 0, "keep_every_steps": 10}, 10),
        (range(1, 99), {"every_steps": 0}, 0),
        ([*range(1, 10), -10, 11, *range(12, 20), -20, -21], {"every_steps": 10}, 0),
        ([*range(1, 10), -10, 11, *range(12, 20), 20, -21], {"every_steps": 10}, 11),
    ],
)
def test_rows_of_a_run_without_events_prove_a_checkpoint_only_beyond_the_next_save(folder, steps, checkpoint, saved):
    workdir, ledger = folder(steps, **checkpoint)
    if not saved:
        history.begin(workdir, ledger=ledger, begin_again=False)
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"one of step {saved} was saved"):
            history.begin(workdir, ledger=ledger, begin_again=False)


def test_a_rewind_to_an_older_checkpoint_is_said_once(folder, capsys):
    workdir, ledger = folder(range(1, 26), SAVED)
    history.resume(workdir, 10, ledger=ledger, config=CONFIG, is_branch=False)
    said = "the checkpoint of step 20 is gone or damaged, and the rows reach step 25: the newest one is of step 10"
    assert said in capsys.readouterr().out
    history.resume(workdir, 10, ledger=ledger, config=CONFIG, is_branch=False)
    assert capsys.readouterr().out == ""
    assert history.newest_saved(read_events(workdir)) == 10


def test_missing_rows_are_counted_when_a_run_resumes(folder, capsys):
    workdir, ledger = folder([1, 2, 5, *range(7, 15)])
    history.resume(workdir, 12, ledger=ledger, config=CONFIG, is_branch=False)
    assert capsys.readouterr().out == (
        "metrics.jsonl lacks the rows of 3 of the 12 steps up to the checkpoint (3-4, 6); they stay missing\n"
    )
    (workdir / ROWS_FILE).unlink()
    history.resume(workdir, 12, ledger=ledger, config=CONFIG, is_branch=False)
    assert "of 12 of the 12 steps up to the checkpoint (1-12)" in capsys.readouterr().out


def test_missing_rows_of_validations_are_counted_where_the_run_has_any(folder, capsys):
    workdir, ledger = folder(range(1, 17))
    with open(workdir / ROWS_FILE, "a") as rows:
        rows.writelines(f'{{"step": {step}, "eval_loss": 1.0}}\n' for step in (0, 8))
    validated = config_lib.default()
    validated.data.validation, validated.train.eval_every_steps = "x.jsonl", 4
    of_these = "2 of the 3 validations of every 4 steps up to the checkpoint (4, 12); they stay"
    for is_branch, said in ((False, of_these), (True, "")):  # a branch has rows of the run that it comes from
        # a signal may have come after the checkpoint of step 16
        history.resume(workdir, 16, ledger=ledger, config=validated, is_branch=is_branch)
        assert capsys.readouterr().out == f"metrics.jsonl lacks the rows of {said} missing\n" * bool(said)


def test_damaged_rows_are_said_also_those_of_a_validation(folder, capsys):
    workdir, ledger = folder([*range(1, 15)])
    with open(workdir / ROWS_FILE, "ab") as rows:
        rows.write(b'{"step": 10, "eval_loss\xa2: 5.0}\n{"step": 15, "lo')  # the last one was cut short by a kill
    history.resume(workdir, 12, ledger=ledger, config=CONFIG, is_branch=False)
    said = "metrics.jsonl has 1 damaged lines, which move to metrics.discarded.jsonl: their rows are missing ("
    assert capsys.readouterr().out.startswith(f"{said}{workdir / ROWS_FILE}, line 15 is not JSON: 'utf-8' codec can't")
