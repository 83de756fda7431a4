"""The index of lines: where they lie, kept between runs, and never used for another file."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import pytest
from data_files import open_all, read_all
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from hlat_jax.data.formats import jsonl, records
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.records import BadRecord


def lines_by_python(raw):
    """(first byte, byte after the last, row) of every line that is not blank, by splitting the whole."""
    found, start = [], 0
    for row, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip(b" \t\r\n"):
            found.append((start, start + len(line), row))
        start += len(line) + 1
    return found


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b" \r", b"x", b"y" * 70, b"z" * 300, b" " * 790]), max_size=40),
    st.booleans(),
    st.sampled_from([1, 7, 64, 1 << 24]),
)
def test_index_does_not_depend_on_the_size_of_pieces(tmp_path_factory, lines, ended, piece_bytes):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    raw = b"\n".join(lines) + (b"\n" if ended else b"")
    path.write_bytes(raw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_PIECE_BYTES", piece_bytes)
        folders = (None, path.parent / "index", path.parent / "index")
        new, kept, again = (jsonl.line_index(Snapshot(DataFile(path)), folder=folder) for folder in folders)
    for found in (new, kept, again):
        assert list(map(tuple, found.lines.tolist())) == lines_by_python(raw)
        assert found.content_hash == new.content_hash


def test_the_kept_index_is_used_until_the_file_changes(tmp_path, monkeypatch):
    path, folder = tmp_path / "a.jsonl", tmp_path / "run" / "index"
    middle = 1 << 19  # of 8 MiB, where the fingerprint does not look
    path.write_bytes(b"\n".join([b'{"text": "%s"}' % (b"a" * middle) for _ in range(16)]))
    expected = read_all(path, index_folder=folder)
    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "_new_index", lambda _: pytest.fail("built again"))
        assert read_all(path, index_folder=folder) == expected
    raw, before = bytearray(path.read_bytes()), Snapshot(DataFile(path))
    place = (middle + 12) * 3 + 200_000
    raw[place : place + 13] = b'"}\n{"text": "'
    path.write_bytes(raw)
    assert Snapshot(DataFile(path)).fingerprint == before.fingerprint  # only the modification time differs
    assert len(read_all(path, index_folder=folder)) == 17
    assert len(list(folder.iterdir())) == 1  # in the place of the old one


def test_damaged_cached_index_is_noticed_and_made_again(tmp_path, capsys):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    read_all(path, index_folder=folder)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:-8], whole[:20], b"", b"x" * 99):
        kept.write_bytes(damaged)
        capsys.readouterr()
        assert read_all(path, index_folder=folder) == ["a", "b"]
        assert kept.read_bytes() == whole
        assert str(kept) in capsys.readouterr().out
    for at in range(0, len(whole), 5):
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert read_all(path, index_folder=folder) == ["a", "b"], at


def test_an_index_is_kept_unless_its_folder_is_read_only(tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n')
    for number in (errno.ENOSPC, errno.EROFS):
        failing = mock.patch.object(os, "fsync", side_effect=OSError(number, os.strerror(number)))
        is_full = number == errno.ENOSPC
        with failing, refused(os.strerror(number), kind=OSError) if is_full else contextlib.nullcontext():
            assert read_all(path, index_folder=folder) == ["a"]
        assert list(folder.iterdir()) == []


def test_files_with_the_same_name_have_separate_indices(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": name}) + "\n")
    for _ in range(2):
        assert read_all(f"{tmp_path}/x,{tmp_path}/y", index_folder=tmp_path / "index") == ["x", "y"]


def test_line_over_the_limit_is_an_unread_bad_record(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 5000}) + '\n{"text": "b"}\n')
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    documents = open_all(path)
    with refused("a.jsonl, row 1", "5012 bytes", "1000", kind=BadRecord):
        documents[0]
    assert documents[1] == "b"


# Opens a file as a run does, and writes a line when it begins to build the index and one when it has it.
OPENING = """
import pathlib, sys, time
from hlat_jax.data.formats import jsonl
from hlat_jax.data.formats.files import DataFile, Snapshot
text, folder, log, pause_s = sys.argv[1:]
built = jsonl._new_index
def build(*arguments):
    print("builds", file=open(log, "a"))
    time.sleep(float(pause_s))
    return built(*arguments)
jsonl._new_index = build
index = jsonl.line_index(Snapshot(DataFile(text)), folder=pathlib.Path(folder))
print(len(index.lines), index.content_hash)
"""


class Openings:
    """Processes that open one file, and what they wrote to one log."""

    def __init__(self, folder):
        self.text, self.index, self.log = folder / "a.jsonl", folder / "run" / "index", folder / "log"
        self.text.write_text('{"text": "a"}\n' * 1000)
        self.log.touch()
        self.processes = []

    def start(self, *, pause_s=0.0):
        words = [sys.executable, "-c", OPENING, self.text, self.index, self.log, pause_s]
        process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def wait_for_builders(self, count):
        deadline = time.monotonic() + 300
        while self.log.read_text().count("builds") < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def openings(tmp_path):
    started = Openings(tmp_path)
    yield started
    started.end()


def test_one_process_builds_the_index_and_others_wait(openings):
    first = openings.start(pause_s=2)
    openings.wait_for_builders(1)
    others = [openings.start() for _ in range(2)]
    found = {process.communicate(timeout=300)[0] for process in (first, *others)}
    expected = jsonl.line_index(Snapshot(DataFile(openings.text)))
    assert found == {f"1000 {expected.content_hash}\n"}
    assert openings.log.read_text() == "builds\n"
    assert [path.suffix for path in openings.index.iterdir()] == [".npz"]


def test_a_killed_builder_of_the_index_is_replaced(openings):
    first = openings.start(pause_s=600)
    openings.wait_for_builders(1)
    other = openings.start()
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(1.5)
    first.kill()
    assert other.communicate(timeout=300)[0].startswith("1000 ")
    assert openings.log.read_text() == "builds\n" * 2


def test_the_wait_for_a_frozen_builder_ends(openings, monkeypatch, capsys):
    monkeypatch.setattr(jsonl, "_WAIT_S", 0.5)
    openings.start(pause_s=600)
    openings.wait_for_builders(1)
    assert read_all(openings.text, index_folder=openings.index) == ["a"] * 1000
    assert ".lock has not changed for" in capsys.readouterr().out
    assert [path.suffix for path in openings.index.iterdir()] == [".npz"]


def test_a_builder_of_the_index_gives_signs_of_life(tmp_path, monkeypatch):
    path, beaten = tmp_path / "a.jsonl", []
    path.write_text('{"text": "a"}\n' * 1000)
    monkeypatch.setattr(jsonl, "_BEAT_BYTES", 1400)
    monkeypatch.setattr(os, "utime", beaten.append)
    jsonl.line_index(Snapshot(DataFile(path)), folder=tmp_path / "index")
    assert len(beaten) == 10


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_each_process_builds_its_index(tmp_path, number):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, os.strerror(number))):
        assert read_all(path, index_folder=tmp_path / "index") == ["a"]
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_a_folder_that_cannot_be_made_keeps_no_index(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    failing = mock.patch.object(pathlib.Path, "mkdir", side_effect=PermissionError(errno.EACCES, "no"))
    with failing:
        assert read_all(path, index_folder=tmp_path / "index") == ["a"]
