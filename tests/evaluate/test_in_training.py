"""When a training runs tasks, and how it records and prints their results; with the harness itself: test_harness."""

import importlib.util

import micro
from refusals import assert_refused

from hlat_jax.evaluate import in_training, tasks

FOUND = {
    "results": {
        "alone": {"alias": "alone", "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict-match": 0.25},
        "both": {"alias": "both", "acc,none": 0.75, "sample_len": 4},
        "one": {"alias": " - one", "acc,none": 1, "acc_stderr,none": 0.1},
        "loose": {"alias": "loose"},
        "member": {"alias": " - member", "f1,none": 0.125},
    },
    "group_subtasks": {"both": ["one"], "loose": ["member"]},
}


def test_metric_keys_name_task_metric_and_filter():
    assert in_training.figures(FOUND) == {
        "tasks/alone/acc": 0.5,
        "tasks/alone/exact_match/strict-match": 0.25,
        "tasks/both/acc": 0.75,
        "tasks/one/acc": 1.0,
        "tasks/member/f1": 0.125,
    }
    shown = ["alone/acc", "alone/exact_match/strict-match", "both/acc", "member/f1"]
    assert list(in_training.shown_keys(FOUND)) == [f"tasks/{name}" for name in shown]


def test_tasks_without_the_harness_are_refused(train_here, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    words = (f"--config={micro.write_config(tmp_path)}", "--config.train.eval_tasks=arc_easy")
    found = train_here(*words, f"--workdir={tmp_path / 'run'}")
    assert_refused(found, "train.eval_tasks=arc_easy", "pip install 'hlat_jax[eval]'")
    assert not (tmp_path / "run").exists()
