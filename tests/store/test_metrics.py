"""metrics.jsonl holds each step once, whatever happens; progress lines, TensorBoard and the picture show it."""

import contextlib
import errno
import json
import math
import os
import struct
import sys
import types

import numpy as np
import pytest
from metric_rows import eval_row, row
from refusals import refused

from hlat_jax import config as config_lib
from hlat_jax.store import metrics
from hlat_jax.store.metrics import MetricsLog, json_line, rewind


def quiet(**changes):
    return config_lib.MetricsConfig(**({"console": "off", "tensorboard": False} | changes))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder, steps, *, start_step=0, num_steps=1000, config=None, **options):
    log = MetricsLog(folder, config=config or quiet(), num_steps=num_steps, start_step=start_step, **options)
    for step in steps:
        log.train_row(row(step))
    return log


def test_rows_round_trip_exactly_and_in_order(tmp_path):
    losses = [0.1 + 0.2, float(np.float32(1 / 3)), math.nan, math.inf, 5e-324]
    log = MetricsLog(tmp_path, config=quiet(), num_steps=5)
    losses = [*map(np.float64, losses[:2]), *losses[2:]]  # NumPy's scalars are written as numbers
    for step, loss in enumerate(losses, 1):
        log.train_row(row(step, loss=loss))
    log.eval_row(eval_row(5))
    log.close()
    *train, validation = read(tmp_path / "metrics.jsonl")
    assert [struct.pack("d", r["loss"]) for r in train] == [struct.pack("d", loss) for loss in losses]
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5]
    assert validation == eval_row(5)


def test_steps_and_tasks_are_printed_unless_the_console_is_off(tmp_path, capsys):
    for console in ("on", "off"):
        log = MetricsLog(tmp_path, config=quiet(console=console, log_every_steps=1), num_steps=9)
        log.train_row(row(3))
        log.tasks_row({"step": 3, "tasks/boolq/acc": 0.5}, shown=["tasks/boolq/acc"])
        log.close()
        printed = capsys.readouterr().out
        assert ("boolq/acc 0.5000" in printed) == (console == "on")
        assert len(printed.splitlines()) == (3 if console == "on" else 0)  # with the header of the steps


def test_truncated_last_line_is_moved_aside_even_if_it_parses(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.discarded.jsonl"
    for torn in ('{"step": 2, "loss": 4.', '{"step": 2}', "", "\0\0\0"):
        aside.unlink(missing_ok=True)
        path.write_text(json_line(row(1)) + torn)
        assert rewind(path, 5)["step"] == 1
        assert path.read_text() == json_line(row(1))
        assert (aside.read_text() if aside.exists() else "") == (torn + "\n" if torn else "")


def test_an_interrupted_rewind_loses_and_repeats_nothing(tmp_path, monkeypatch):
    path, aside, replace = tmp_path / "metrics.jsonl", tmp_path / "metrics.discarded.jsonl", os.replace
    for interrupted_at in (0, 1, None):
        aside.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        log = run(tmp_path, range(1, 6))
        log.eval_row(eval_row(0))
        log.close()
        calls = []

        def interrupted_replace(old, new, calls=calls, interrupted_at=interrupted_at):
            if len(calls) == interrupted_at:
                raise KeyboardInterrupt
            calls.append(new)
            replace(old, new)

        if interrupted_at is not None:
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", interrupted_replace)
                with pytest.raises(KeyboardInterrupt):
                    rewind(path, 2)
            assert [r["step"] for r in read(path)] == [1, 2, 3, 4, 5, 0]
        for _ in range(2):
            assert rewind(path, 2)["step"] == 2
            assert [r["step"] for r in read(path)] == [1, 2, 0]
            assert [r["step"] for r in read(aside)] == [3, 4, 5]
    assert rewind(path, -1) is None  # a run that begins again
    assert [r["step"] for r in read(aside)] == [3, 4, 5, 1, 2, 0]


def test_throughput_is_tokens_over_time_also_right_after_a_resume(tmp_path):
    known = {"num_steps": 9, "flops_per_token": (10.0, 15.0), "peak_flops": 1e4}
    run(tmp_path, [1, 2], **known).close()
    run(tmp_path, [2], start_step=1, **known).close()
    for r in read(tmp_path / "metrics.jsonl"):
        # 100 tokens in 0.5 s
        assert (r["tokens_per_s"], r["mfu_6n"], r["mfu"]) == (200.0, 0.2, 0.3)


def test_a_batch_job_prints_a_line_a_minute(tmp_path, monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    log = MetricsLog(tmp_path, config=quiet(console="auto", log_every_steps=5000), num_steps=100_000)
    for step in range(1, 41):
        now += 15.0
        log.train_row(row(step, step_s=15.0))
    steps = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps == [1, *range(5, 41, 4)]


def events(folder):
    """Returns the (step, tag, value) that TensorBoard shows: a restart hides what lies at its step or after."""
    from tensorboardX.proto import event_pb2

    shown = []
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        content, place = path.read_bytes(), 0
        while place < len(content):  # TFRecord: length, its sum, data, its sum
            [size] = struct.unpack_from("<Q", content, place)
            event = event_pb2.Event.FromString(content[place + 12 : place + 12 + size])
            place += 16 + size
            if event.session_log.status == event_pb2.SessionLog.START:
                shown = [e for e in shown if e[0] < event.step]
            for value in event.summary.value:
                texts = value.tensor.string_val
                shown.append((event.step, value.tag, texts[0].decode() if texts else value.simple_value))
    return shown


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    config = quiet(tensorboard=True)
    log = run(tmp_path, range(1, 6), config=config)
    log.eval_row(eval_row(3))
    log.close()
    log = run(tmp_path, range(4, 7), start_step=3, config=config)
    log.sync()
    shown = events(tmp_path / "tensorboard")
    log.close()
    assert [step for step, tag, _ in shown if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert [(step, value) for step, tag, value in shown if tag == "validation/eval_loss"] == [(3, 4.5)]
    assert next(value for _, tag, value in shown if tag == "train/loss") == pytest.approx(4.25)
    assert {"train/grad_norm", "train/learning_rate", "train/tokens_per_s"} <= {tag for _, tag, _ in shown}
    assert not any(tag.endswith(("step", "batch_hash")) for _, tag, _ in shown)


def test_tensorboard_has_each_sample_once_after_a_resume(tmp_path):
    for start_step, sampled in ((0, (0, 5)), (3, (5, 9))):
        options = {"config": quiet(tensorboard=True), "hyperparameters": {"data": {"k": start_step}}}
        log = run(tmp_path, (), start_step=start_step, **options)
        for step in sampled:
            log.sample(step, f"It is {start_step} # truth\nat {step}")
        log.close()
    shown = events(tmp_path / "tensorboard")
    samples = [(step, text) for step, tag, text in shown if tag.startswith("sample")]
    assert samples == [(step, f"    It is {start} # truth\n    at {step}") for step, start in ((0, 0), (5, 3), (9, 3))]
    assert [tag for _, tag, _ in shown].count("_hparams_/session_start_info") == 2
    assert [json.loads(text)["data"]["k"] for _, tag, text in shown if tag.startswith("config")] == [0, 3]


def test_a_full_disk_raises_and_does_not_hang(small_disk):
    folder = small_disk("256k")
    log = MetricsLog(folder, config=quiet(tensorboard=True), num_steps=1)
    with refused(os.strerror(errno.ENOSPC), "metrics", kind=OSError):
        for step in range(1, 10_000):
            log.train_row(row(step))
    with contextlib.suppress(OSError):
        log.close()
    steps = [row["step"] for row in metrics.read_rows(folder / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100


def test_wandb_continues_the_same_run_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused("metrics.wandb_project='p'", "pip install wandb"):
        MetricsLog(tmp_path, config=quiet(wandb_project="p"), num_steps=1)
    calls = []
    fake = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: None)
    wandb = types.SimpleNamespace(init=lambda **options: calls.append(options) or fake)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for start_step in (0, 1):
        options = {"config": quiet(wandb_project="p"), "hyperparameters": {"model": {"num_layers": 2}}}
        run(tmp_path, [start_step + 1], start_step=start_step, **options).close()
    first, logged, second, _ = calls
    assert first["id"] == second["id"]
    assert second["config"] == {"model": {"num_layers": 2}}
    assert (first["project"], second["resume"]) == ("p", "allow")
    assert (logged["step"], logged["train/tokens"]) == (1, 100)
