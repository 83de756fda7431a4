"""The index of lines: where they lie, kept between runs, and never used for another file."""

import contextlib
import errno
import json
import os
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
