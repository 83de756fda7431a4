"""What a run folder records: settings with which alone a run resumes, and checkpoints and rows that are missed if lost.

A run never begins at step 0 again unless it was asked to.
"""

import json
import pathlib
import types

import jax
import pytest
from refusals import assert_names

from hlat_jax import config as config_lib
from hlat_jax.host.watchdog import Watchdog
from hlat_jax.resolve import resolve
from hlat_jax.run import drift, resume
from hlat_jax.run.goodput import Ledger, newest_saved, read_events
from hlat_jax.store import integrity
from hlat_jax.store.config_diff import MAY_CHANGE, config_drift
from hlat_jax.store.metrics import ROWS_FILE


@pytest.fixture
def folder(tmp_path):
    """A function of the steps of its rows, and of those that were saved: (run folder, its ledger)."""
    with Ledger(tmp_path, Watchdog()) as ledger:

        def make(steps, saved=()):
            rows = [{"step": step, "loss": 1.0, "tokens": 7, "nonfinite": 0} for step in steps]
            (tmp_path / ROWS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
            for step in saved:
                ledger.event("saved", step=step)
            return tmp_path, ledger

        yield make


def test_a_rewind_to_an_older_checkpoint_is_said_once(folder, capsys):
    workdir, ledger = folder(range(1, 26), saved=(10, 20))
    resume.report_losses(workdir, 10, ledger=ledger)
    assert_names(capsys.readouterr().out, "step 20", "step 25", "step 10")
    resume.report_losses(workdir, 10, ledger=ledger)
    assert capsys.readouterr().out == ""
    assert newest_saved(read_events(workdir)) == 10


def test_missing_and_damaged_rows_are_said_when_a_run_resumes(folder, capsys):
    workdir, ledger = folder([1, 2, 5, *range(7, 15)])
    with open(workdir / ROWS_FILE, "ab") as rows:
        rows.write(b'{"step": 10, "eval_loss\xa2: 5.0}\n{"step": 15, "lo')  # the last one was cut short by a kill
    resume.report_losses(workdir, 12, ledger=ledger)
    missing, damaged = capsys.readouterr().out.splitlines()
    assert_names(missing, "metrics.jsonl", "3 rows", "12 steps", "step 3")
    assert_names(damaged, "1 damaged line", "metrics.discarded.jsonl", f"{workdir / ROWS_FILE}, line 12")


def config_dict():
    return resolve(config_lib.default()).to_dict()


def test_every_key_of_a_config_is_compared_unless_it_may_change():
    saved = json.loads(json.dumps(config_dict()))  # as it was through a file
    assert config_drift(saved, config_dict()) == []
    assert config_drift(saved, config_dict() | {"name": "other"}) == []
    for section, keys in saved.items():
        for key in keys if isinstance(keys, dict) else ():
            current = config_dict()
            current[section][key] = -7
            path = f"{section}.{key}"
            may_change = any(pathlib.PurePath(path).match(pattern) for pattern in MAY_CHANGE)
            lines = [line.partition(" in ")[0] for line in config_drift(saved, current)]
            assert lines == ([] if may_change else [f"{path}: {keys[key]!r}"])
    for path in ("model.num_layers", "precision.policy", "optimizer.peak_lr", "data.seq_len", "train.seed"):
        assert path not in MAY_CHANGE
    [line] = config_drift({"a": {}}, {"a": {"new": 1}})
    assert_names(line, "a.new: 'absent'", "1")


@pytest.fixture
def refused(monkeypatch):
    """A function of saved and current settings that returns why a run at step 1 cannot resume with them."""
    monkeypatch.setattr(drift, "data_drift", lambda *_, **__: [])

    def why(saved, current):
        try:
            drift.refuse_drift(saved, current, step=1, workdir=pathlib.Path("runs/x"))
        except ValueError as error:
            return str(error)
        return ""

    return why


def test_key_missing_from_an_old_checkpoint_counts_as_its_default(refused):
    current = {"config": config_dict(), "implementations": {"attention": "blocked", "cross_entropy": "dense"}}
    current |= {"tokenizer_sha256": "a", "manifest": {}, "jax": {"JAX_ENABLE_X64": True}, "tokenizer": {"eos_id": 2}}
    saved = json.loads(json.dumps(current)) | {"jax": {}}
    del saved["config"]["model"]["cross_entropy"], saved["implementations"]["cross_entropy"], saved["tokenizer"]
    saved["config"]["data"]["shuffle_by"], saved["config"]["train"]["rewind_to"] = "document", 1000  # gone since
    saved["config"]["model"]["rope"] = saved["implementations"]["rope"] = "paired"  # gone too
    saved["config"]["parallel"].update(context_exchange="ring", reduce_gradients="layer")  # gone: a key, and a value
    assert resume.saved_config(saved) == resume.saved_config(current)
    assert refused(saved, current) == ""
    saved["config"]["data"]["shuffle_by"] = "block"
    assert_names(refused(saved, current), "data.shuffle_by: 'block'")
    del saved["config"]["data"]["shuffle_by"]
    current["config"]["model"]["cross_entropy"] = "dense"
    assert_names(refused(saved, current), "model.cross_entropy: 'auto'", "'dense'")


def manifest(*, fingerprint="a", digest="1"):
    entry = {"name": "a.jsonl", "bytes": 9, "documents": 3, "fingerprint": fingerprint}
    return {"files": [entry], "documents": 3, "text_field": "text", "hash": digest}


def test_changed_data_is_named_by_key_and_file_and_not_by_hash():
    saved = {"config": config_dict(), "manifest": manifest(), "validation_manifest": manifest()}
    other = manifest(fingerprint="b", digest="2")
    [line] = drift.drift_of(saved, saved | {"manifest": other, "validation_manifest": other}, step=1)
    assert_names(line, "data.train: a.jsonl", "1 of 1 file")
    # a hash without another line is never passed over
    [line] = drift.drift_of(saved, saved | {"manifest": manifest(digest="2")}, step=1)
    assert line.startswith("manifest.hash: '1'")


def test_jax_settings_that_change_a_step_are_refused(monkeypatch, refused):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_cpu_enable_fast_math=false")
    inputs = {
        "program": types.SimpleNamespace(config=resolve(config_lib.default()), model=config_lib.default().model),
        "tokenizer": types.SimpleNamespace(sha256="a", eos_id=2),
        "batches": types.SimpleNamespace(manifest={}),
    }
    saved = json.loads(json.dumps(resume.settings_of(**inputs)))
    with jax.enable_x64(True):
        why = refused(saved, resume.settings_of(**inputs))
    assert_names(why, "JAX_ENABLE_X64: False", "--config.train.branch_from=runs/x@1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_b=1")
    why = refused(saved, resume.settings_of(**inputs))
    assert_names(why, "jax.XLA_FLAGS: '--xla_cpu_enable_fast_math=false'")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    with jax.threefry_partitionable(False):
        assert refused(saved, resume.settings_of(**inputs)) == ""


def test_settings_are_compared_with_the_newest_whole_checkpoint(tmp_path, monkeypatch):
    record, compared = {"position": [], "metadata": {}, "arrays": {}, "norms": {}}, []
    for step in (5, 6):
        file = tmp_path / "checkpoints" / str(step) / "run" / "metadata"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(record | {"step": step}))
        (file.parent / "state").write_bytes(b"state")
        integrity.seal(file.parent.parent, ["run/metadata", "run/state"])
    (file.parent / "state").write_bytes(b"torn")
    monkeypatch.setattr(drift, "refuse_drift", lambda *_, step, **__: compared.append(step))
    drift.check_settings(resolve(config_lib.default()), tmp_path)
    assert compared == [5]
