"""The status of several processes before a step, as each of them sees it."""

import json
import os

import numpy as np
from refusals import assert_names, refused

from hlat_jax.config import default
from hlat_jax.data.formats.files import Unreadable
from hlat_jax.host.process import StopSignals
from hlat_jax.run import step_sync

AWAY, CHANGED = Unreadable("a.jsonl cannot be read."), ValueError("b.jsonl changed.")


def test_all_processes_raise_the_same_error(monkeypatch):
    for errors, kind, *facts in (
        ([None, None, AWAY], OSError, "process 2 of 3", AWAY),
        ([CHANGED, None], ValueError, CHANGED),
        ([AWAY, CHANGED], ValueError, "process 1 of 2", CHANGED),  # before data that may come back
    ):
        sent = []
        monkeypatch.setattr(step_sync.distributed, "exchange", lambda message, to=sent: to.append(message) or [message])
        sync = step_sync.StepSync(default(), [0], StopSignals())
        monkeypatch.setattr(sync, "_facts", lambda *_: {"batch_hash": "0"})
        for error in errors:
            sync.sync_step(None, None, error=error, save=False)
        monkeypatch.setattr(step_sync.distributed, "exchange", lambda _, sent=sent: sent[1:])
        found = sync.sync_step(None, None, error=errors[0], save=False).error
        assert isinstance(found, kind)
        assert_names(str(found), *facts)


def test_retries_of_all_processes_are_summed_if_any(monkeypatch):
    sync = step_sync.StepSync(default(), [0], StopSignals())
    for counts, expected in (([0, 0], {}), ([2, 3], {"data_retries": 5})):
        found = [
            json.dumps({"facts": {"batch_hash": "0", "data_retries": count}, "failed": None, "save": False, "stop": ""})
            for count in counts
        ]
        monkeypatch.setattr(step_sync.distributed, "exchange", lambda _, found=found: found)
        monkeypatch.setattr(sync, "_facts", lambda *_: {"batch_hash": "0"})
        fields = sync.sync_step(None, None, error=None, save=False).row_fields
        assert fields == {"batch_hash": "0" * 32} | expected


def test_tokens_of_sources_are_summed_over_processes(monkeypatch, small, make_batch):
    small.data.train, sent = "a=x;b=y;c=z", []
    monkeypatch.setattr(step_sync.jax, "process_index", lambda: 1)
    monkeypatch.setattr(step_sync.distributed, "exchange", lambda mine: ["[0, 1]", mine])
    sync = step_sync.StepSync(small, [1, 2], StopSignals())  # row 1 is that of the process before
    batch = step_sync.take_rows(make_batch(0, small), [1, 2])
    batch.weights[1, :5] = 0.0
    monkeypatch.setattr(sync, "_facts", lambda *_: {"batch_hash": "0"})
    monkeypatch.setattr(step_sync.distributed, "exchange", lambda mine: sent.append(mine) or [mine, mine])
    synced = sync.sync_step(batch, None, error=None, save=False, row_sources=np.asarray([0, 2]))
    assert json.loads(sent[0])["facts"]["source_tokens"] == [0, 0, batch.weights[1].sum()]
    tokens = {key: value for key, value in synced.row_fields.items() if key.startswith("source_tokens/")}
    assert tokens == {"source_tokens/a": 0, "source_tokens/b": 0, "source_tokens/c": 2 * batch.weights[1].sum()}


def test_a_run_folder_is_gone_where_it_was_looked_for_twice(tmp_path, monkeypatch):
    folder, identity = tmp_path / "run", step_sync._identity
    folder.mkdir()
    monkeypatch.setattr(step_sync.FolderCheck, "_AGAIN_S", 0.0)
    check = step_sync.FolderCheck(folder)
    answers = [OSError(116, "Stale file handle"), None, os.stat(folder)]

    def answer(path):
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found and identity(path)

    with monkeypatch.context() as patch:
        patch.setattr(step_sync, "_identity", answer)
        check(now=True)  # not known
        check(now=True)  # gone, and there again
    folder.rename(tmp_path / "away")
    check()  # not yet: it looks once a minute
    with refused(folder):
        check(now=True)
