"""The index of lines: where they lie, kept between runs, and never used for another file."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlat_jax.data import sources
from hlat_jax.data.formats import jsonl, records
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.records import BadRecord


def read_all(path, folder=None):
    documents = sources.open_corpus(str(path), text_field="text", key="data.train", index_folder=folder)
    return [documents[index] for index in range(len(documents))]


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
    st.sampled_from([1, 7, 64, 100, 1 << 24]),
)
def test_index_does_not_depend_on_chunk_size(tmp_path_factory, lines, ended, chunk_bytes):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    raw = b"\n".join(lines) + (b"\n" if ended else b"")
    path.write_bytes(raw)
    before, jsonl._PIECE_BYTES = jsonl._PIECE_BYTES, chunk_bytes
    try:
        index = jsonl.line_index(Snapshot(DataFile(path)))
        kept = jsonl.line_index(Snapshot(DataFile(path)), folder=path.parent / "index")
    finally:
        jsonl._PIECE_BYTES = before
    for found in (index, kept):
        assert list(map(tuple, found.lines.tolist())) == lines_by_python(raw)
        assert found.num_rows == raw.count(b"\n") + (not raw.endswith(b"\n") and raw != b"")


def test_cached_index_is_reused_through_mmap(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(100)))
    expected = read_all(path)
    assert read_all(path, tmp_path / "run" / "index") == expected
    (kept,) = (tmp_path / "run" / "index").iterdir()
    monkeypatch.setattr(jsonl, "_scan", lambda *_: pytest.fail("built again"))
    assert read_all(path, tmp_path / "run" / "index") == expected
    index = jsonl.line_index(Snapshot(DataFile(path)), folder=kept.parent)
    assert not index.lines.flags.owndata


def test_cached_index_is_rebuilt_when_the_file_changed(tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    middle = 1 << 19  # of 8 MiB, where the fingerprint does not look
    texts = [b'{"text": "%s"}' % (b"a" * middle) for _ in range(16)]
    path.write_bytes(b"\n".join(texts))
    read_all(path, folder)
    raw = bytearray(path.read_bytes())
    place = (middle + 12) * 3 + 200_000
    before = Snapshot(DataFile(path))
    raw[place : place + 13] = b'"}\n{"text": "'
    path.write_bytes(raw)
    assert Snapshot(DataFile(path)).fingerprint == before.fingerprint  # only the modification time differs
    assert len(read_all(path, folder)) == 17
    assert len(list(folder.iterdir())) == 1  # in the place of the old one


def test_damaged_cached_index_is_noticed_and_made_again(tmp_path, capsys):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    read_all(path, folder)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    capsys.readouterr()
    flipped = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 3)]
    for damaged in (whole[:-8], whole[:20], b"", b"x" * 99, *flipped):
        kept.write_bytes(damaged)
        assert read_all(path, folder) == ["a", "b"]
        assert kept.read_bytes() == whole
        assert (
            capsys.readouterr().out == f"index            {kept} is damaged, or of another version: it is made again\n"
        )


def test_failed_index_write_leaves_no_files(tmp_path, monkeypatch):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n')

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        read_all(path, folder)
    assert list(folder.iterdir()) == []


def test_read_only_index_folder_is_read_but_not_written(tmp_path, monkeypatch):
    path, folder = tmp_path / "a.jsonl", tmp_path / "index"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    write = jsonl.atomic_files.atomic_writer

    def read_only(path):  # root may write everywhere
        if path.parent == folder:
            raise OSError(30, "Read-only file system", str(path))
        return write(path)

    with monkeypatch.context() as patch:
        patch.setattr(jsonl.atomic_files, "atomic_writer", read_only)
        assert read_all(path, folder) == ["a", "b"]
    assert list(folder.glob("*")) == []
    read_all(path, folder)
    monkeypatch.setattr(jsonl, "_scan", lambda *_: pytest.fail("built again"))
    assert read_all(path, folder) == ["a", "b"]


def test_files_with_the_same_name_have_separate_indices(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": name}) + "\n")
    spec = f"{tmp_path}/x,{tmp_path}/y"
    for _ in range(2):
        assert read_all(spec, tmp_path / "index") == ["x", "y"]
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_line_over_the_limit_is_an_unread_bad_record(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 5000}) + '\n{"text": "b"}\n')
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    documents = sources.open_corpus(str(path), text_field="text", key="data.train")
    with pytest.raises(BadRecord, match=r"row 1: 5012 bytes in one line, more than 1000"):
        documents[0]
    assert documents[1] == "b"
