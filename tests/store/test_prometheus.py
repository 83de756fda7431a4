"""The file for node exporter's textfile collector, read by Prometheus's own parser."""

import math
import time

import micro
from prometheus_client import parser

from hlat_jax.config import MetricsConfig
from hlat_jax.store import prometheus
from hlat_jax.store.metrics import MetricsLog


def series(folder):
    """(name, part) -> value, after a check of the kinds and of the label with the name of the run."""
    found = {}
    for family in parser.text_string_to_metric_families((folder / "metrics.prom").read_text()):
        for sample in family.samples:
            assert sample.labels["run"] == folder.resolve().name
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
            found[sample.name, sample.labels.get("part", "")] = sample.value
    return found


def test_a_run_leaves_its_last_figures_for_prometheus(trained_run):
    found, last = series(trained_run), [row for row in micro.rows(trained_run) if "loss" in row][-1]
    assert found["hlat_train_step", ""] == found["hlat_train_num_steps", ""] == micro.NUM_STEPS
    for key, value in last.items():
        if isinstance(value, (int, float)):
            assert found[f"hlat_train_{key}", ""] == value
    assert 0 < found["hlat_goodput_training", ""] < 1
    assert found["hlat_train_time_seconds", ""] <= time.time()


def log_of(folder, **options):
    return MetricsLog(folder, config=MetricsConfig(tensorboard=False, console="off"), num_steps=9, **options)


def row(step, **fields):
    return {"step": step, "loss": 2.5, "tokens": 10 * step, "step_s": 1.0, "grad_norm": 1.0, **fields}


def test_steps_between_two_reads_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "_PERIOD_S", 1e9)
    log = log_of(tmp_path / "run")
    for step, fields in enumerate(({}, {"nonfinite": 1, "loss": math.nan}, {"spike": 1}, {"spike": 1}, {}), 1):
        log.train_row(row(step, **fields))
    assert ("hlat_train_spike_total", "") in series(tmp_path / "run")  # of the first row
    assert series(tmp_path / "run")["hlat_train_step", ""] == 1
    log.close()
    found = series(tmp_path / "run")
    assert (found["hlat_train_nonfinite_total", ""], found["hlat_train_spike_total", ""]) == (1, 2)
    assert found["hlat_train_step", ""] == 5


def test_any_name_and_number_is_valid_for_prometheus(tmp_path):
    folder = tmp_path / 'a "run"\\ of\ntoday'
    log = log_of(folder)
    log.train_row(row(1, loss=math.inf, grad_norm=-math.inf, learning_rate=1e-30, batch_hash="ff"))
    log.eval_row({"step": 1, "eval_loss": math.nan, "perplexity": 1.0, "bits_per_byte": 1.0, "eval_tokens": 3}
                 | {'eval_loss/we"b\\': 2.0, "eval_loss/code": 3.0})  # fmt: skip
    log.tasks_row({"step": 1, "tasks/hella-swag/acc,none": 0.5}, shown=[])
    log.close()
    found = series(folder)
    assert (found["hlat_train_loss", ""], found["hlat_train_grad_norm", ""]) == (math.inf, -math.inf)
    assert found["hlat_train_learning_rate", ""] == 1e-30
    assert math.isnan(found["hlat_validation_eval_loss", ""])
    assert found["hlat_validation_eval_loss", 'we"b\\'] == 2.0
    assert found["hlat_validation_tasks", "hella-swag/acc,none"] == 0.5
    assert not any("hash" in name for name, _ in found)
    assert [path.name for path in folder.glob("metrics.p*")] == ["metrics.prom"]
