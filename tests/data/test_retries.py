"""Faults of the file system that pass: the batches are those without them, and what lasts is an OSError."""

import collections
import contextlib
import dataclasses
import errno
import os
import threading
import time
from unittest import mock

import numpy as np
import pytest
from data_files import TEXTS, open_all, write_arrow, write_built, write_jsonl, write_parquet
from refusals import refused

from hlat_jax.config import DataConfig
from hlat_jax.data import held_out, retries
from hlat_jax.data.formats import files
from hlat_jax.data.formats.files import DataFile, Unreadable
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.loader import TrainBatches, batch_hash
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("package:austen_2k.model")


@pytest.fixture
def data(tmp_path):
    """A DataConfig of 30 documents of very different lengths."""
    texts = [f"document {i} " * (1 + i * i % 29) for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    return DataConfig(train=str(path), validation=str(path), batch_size=2, seq_len=32, num_threads=0)


def hashes(batches, count=40):
    """Returns the hashes of the first batches, and the position after them."""
    with contextlib.closing(batches):
        taken = [next(batches) for _ in range(count)]
        return [batch_hash(batch, rows=batches.rows) for batch, _ in taken], taken[-1][1].tolist()


@pytest.fixture
def faulty(monkeypatch):
    """A function that makes the reading of files fail: a share of the reads, drawn by a seed."""
    monkeypatch.setattr(retries, "WAITS_S", (0.0,) * 30)

    def begin(share):
        read, random = DataFile.read_range, np.random.default_rng(0)

        def sometimes(self, start, length):
            if random.random() < share:
                raise OSError(random.choice([errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT]), "a fault")
            return read(self, start, length)

        monkeypatch.setattr(DataFile, "read_range", sometimes)

    return begin


def test_batches_after_faults_are_those_of_an_undisturbed_run(data, faulty, capsys):
    kinds = (("concat", 0), ("documents", 3))
    configs = [dataclasses.replace(data, packing=packing, num_threads=threads) for packing, threads in kinds]

    def open_held_out():
        return held_out.open_held_out(data, tokenizer=TOKENIZER, num_batches=2)[0]["all"].num_bytes

    expected = [hashes(TrainBatches(data, tokenizer=TOKENIZER)) for data in configs]
    num_bytes = open_held_out()
    faulty(0.05)
    assert retries.Retries()(open_held_out) == num_bytes  # read again as a whole
    faulty(0.3)
    for data, undisturbed in zip(configs, expected, strict=True):
        again = retries.Retries()
        assert hashes(again(lambda: TrainBatches(data, tokenizer=TOKENIZER, retries=again))) == undisturbed  # noqa: B023
        assert again.take_count() > 5
        assert again.take_count() == 0
    warnings = capsys.readouterr().err.splitlines()  # one of each, though all threads failed
    assert len(warnings) == 1 + len(configs)
    assert all("a.jsonl" in warning for warning in warnings)


def test_what_was_given_up_is_tried_once_for_a_minute(monkeypatch, capsys):
    """Otherwise each stream, and each row of a window that is read ahead, would wait for a minute in its turn."""
    monkeypatch.setattr(retries, "WAITS_S", (0.0,) * 3)
    again, tries = retries.Retries(), []

    def read():
        tries.append(True)
        raise Unreadable("x cannot be read.")

    for expected in (4, 5, 6):
        with pytest.raises(Unreadable):
            again(read)
        assert len(tries) == expected
    assert again.take_count() == 3
    later_s = time.monotonic() + 61
    monkeypatch.setattr(retries.time, "monotonic", lambda: later_s)
    with pytest.raises(Unreadable):
        again(read)
    assert len(tries) == 6 + 4
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_fault_lasts_until_the_file_is_back(data, monkeypatch, tmp_path):
    monkeypatch.setattr(retries, "WAITS_S", (0.01,) * 3)
    path, away = tmp_path / "a.jsonl", tmp_path / "away"
    expected = hashes(TrainBatches(data, tokenizer=TOKENIZER), 1)
    for changes in ({"num_threads": 2}, {"num_threads": 1, "batch_size": 8, "packing": "documents"}):
        with contextlib.closing(TrainBatches(dataclasses.replace(data, **changes), tokenizer=TOKENIZER)) as batches:
            path.rename(away)
            with pytest.raises(Unreadable):
                collections.deque(batches, maxlen=0)
            with refused("a.jsonl", os.strerror(errno.ENOENT), kind=OSError):
                next(batches)
        away.rename(path)
    assert hashes(TrainBatches(data, tokenizer=TOKENIZER), 1) == expected


def test_waiting_ends_at_once_by_a_signal_and_by_close(data, monkeypatch, tmp_path):
    monkeypatch.setattr(retries, "WAITS_S", (1200.0,))
    began_s, stopped, away = time.monotonic(), threading.Event(), tmp_path / "away"
    interrupted = retries.Retries(stopped.is_set)
    for num_threads in (0, 2):
        data = dataclasses.replace(data, num_threads=num_threads, prefetch_batches=1)
        batches = TrainBatches(data, tokenizer=TOKENIZER, retries=interrupted)
        path = tmp_path / "a.jsonl"
        path.rename(away)
        timer = threading.Timer(0.3, stopped.set)
        timer.start()
        with pytest.raises(Unreadable):
            hashes(batches, 1000)
        timer.join()
        stopped.clear()
        away.rename(path)
    batches = TrainBatches(data, tokenizer=TOKENIZER, retries=interrupted)
    path.rename(away)
    batches.set_state(batches.get_state())
    while not interrupted.take_count():
        time.sleep(0.01)
    first, still = interrupted.progress, retries.Retries().progress
    time.sleep(0.01)
    assert interrupted.progress > first  # not stuck
    assert retries.Retries().progress == still == 0.0
    batches.close()
    assert time.monotonic() - began_s < 1200


WRITERS = {
    "a.jsonl": write_jsonl,
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.txt": lambda path, texts: path.write_text(texts[0]),
    "texts": write_built,
    "ids": lambda path, texts: write_built(path, [[i, 7] for i in range(len(texts))], kind="tokens", num_shards=1),
}


def test_a_file_may_come_back_but_not_with_another_size(tmp_path):
    for name, write in WRITERS.items():
        path = tmp_path / name
        write(path, TEXTS)
        documents = open_all(path)
        expected = [np.asarray(documents[index]).tolist() for index in range(len(documents))]
        path.rename(tmp_path / "away")
        for _ in range(2):
            with refused(name, kind=Unreadable):
                documents[0]
        (tmp_path / "away").rename(path)
        assert [np.asarray(documents[index]).tolist() for index in range(len(documents))] == expected
        for change in (["fi", "xy"], [TEXTS[0] + "more", "more"]) if path.is_file() else ():
            write(path, TEXTS)
            documents = open_all(path)
            write(path, change)
            for _ in range(2):
                with refused(name) as caught:
                    documents[0]
                assert not isinstance(caught.value, BadRecord)  # never skipped


def break_open_files(folder):
    """Makes the descriptors of this process that are of files in `folder` such that reading from them fails."""
    unreadable = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)):
                os.dup2(unreadable, int(name))
    os.close(unreadable)


def test_a_failed_read_of_an_array_record_is_no_damage(tmp_path):
    folder = write_built(tmp_path / "in", [f"{i} " * 50_000 for i in range(20)], num_shards=1)
    [shard] = folder.glob("*.array_record")
    for path in (folder, shard.with_name("a.array_record")):
        if path != folder:
            shard.rename(path)
        documents = open_all(path)
        break_open_files(tmp_path / "in")
        with refused("array_record", os.strerror(errno.EBADF), kind=Unreadable):
            documents[15]
        assert documents[15] == "15 " * 50_000


def test_a_missing_file_is_a_mistake_and_a_fault_is_none(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "read_range", mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with refused(path, os.strerror(errno.EIO), kind=Unreadable):
            open_all(path)
    path.unlink()
    with refused(path, kind=files.NotFound):
        open_all(path)
