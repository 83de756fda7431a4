"""Built datasets: the same bytes from the same text, whatever the workers, the kills and the disks on the way."""

import contextlib
import gzip
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from array_record.python import array_record_module
from hypothesis import given
from hypothesis import strategies as st

from hlat_jax.data import packing, sources
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.build import build_task, shards
from hlat_jax.data.build.build_task import BuildOptions
from hlat_jax.data.tokenizer import Tokenizer

AUSTEN = "package:austen_2k.model"
TEXTS = [
    "It is a truth",
    " ",
    "zweiter Text: äöü 漢字 😀",
    "line one\nline two\r\n",
    "x" * 3000,
    *(f"Nr. {i}" for i in range(40)),
]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def build(out, *words, num_workers=1, **options):
    return build_lib.build(
        [str(word) for word in words],
        out=out,
        options=BuildOptions(**options),
        num_workers=num_workers,
        watch=lambda *_: contextlib.nullcontext(),
    )


def error_of(kind, out, *words, **options):
    with pytest.raises(kind, match=r".") as caught:
        build(out, *words, **options)
    return str(caught.value)


def records_of(out):
    """The records of a dataset in order, and its manifest, read without any reader of the package."""
    manifest = json.loads((out / "manifest.json").read_text())
    found = []
    for shard in manifest["shards"]:
        reader = array_record_module.ArrayRecordReader(str(out / shard["name"]))
        found.append(reader.read(list(range(reader.num_records()))))
    return found, manifest


def ids_of(record):
    """The documents of a record of token ids, from the definition of the format."""
    num_documents, width = int.from_bytes(record[:4], "little"), int.from_bytes(record[4:8], "little")
    lengths = [int.from_bytes(record[8 + 4 * i : 12 + 4 * i], "little") for i in range(num_documents)]
    ids = [int.from_bytes(record[i : i + width], "little") for i in range(8 + 4 * num_documents, len(record), width)]
    assert len(ids) == sum(lengths)
    return [ids[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(num_documents)]


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_text_dataset_holds_the_documents_in_order(tmp_path):
    build(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", TEXTS), shard_bytes=1000)
    found, manifest = records_of(tmp_path / "out")
    assert [record.decode() for shard in found for record in shard] == TEXTS
    assert (manifest["format"], manifest["kind"], manifest["documents"]) == (2, "text", len(TEXTS))
    assert manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert [shard["documents"] for shard in manifest["shards"]] == [len(shard) for shard in found]
    assert len(found) > 1
    assert manifest["shards"][0]["name"] == f"shard-00000-of-{len(found):05d}.array_record"
    assert [manifest[key] for key in ("tokens", "tokenizer_sha256", "vocab_size", "eos_id")] == [None] * 4
    assert not (tmp_path / "out" / ".building").exists()


def test_token_dataset_stores_the_ids_that_packing_produces(tmp_path):
    texts = [*TEXTS, "word " * 70_000, "end"]  # one document over a record, and over the character limit
    options = {"tokenizer": AUSTEN, "max_document_chars": 1000, "shard_bytes": 5000}
    build(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), **options)
    tokenizer = Tokenizer(AUSTEN)
    expected = [np.concatenate(list(packing.document_tokens(t, tokenizer=tokenizer, max_chars=1000))) for t in texts]
    found, manifest = records_of(tmp_path / "out")
    documents = []
    for records, shard in zip(found, manifest["shards"], strict=True):
        index = np.load(tmp_path / "out" / shard["name"].replace(".array_record", ".index.npz"))
        in_shard = [ids_of(record) for record in records]
        starts = np.cumsum([0] + [len(record) for record in in_shard])
        np.testing.assert_array_equal(index["first_document"], starts[:-1])
        assert index["first_document"].dtype == np.int64
        assert list(index["lengths"]) == [len(ids) for record in in_shard for ids in record]
        here = texts[len(documents) : len(documents) + len(index["lengths"])]
        assert list(index["bytes"]) == [len(text.encode()) for text in here]
        assert all(len(record) == 1 or sum(map(len, record)) <= 32_768 for record in in_shard)
        assert shard["tokens"] == sum(len(ids) for record in in_shard for ids in record)
        documents += [ids for record in in_shard for ids in record]
    assert len(documents) == len(texts)
    for ids, want in zip(documents, expected, strict=True):
        np.testing.assert_array_equal(ids, want)
    assert manifest["tokens"] == sum(len(ids) for ids in expected)
    assert (manifest["vocab_size"], manifest["eos_id"], manifest["max_document_chars"]) == (2048, 2, 1000)
    assert manifest["tokenizer_sha256"] == tokenizer.sha256


def test_long_documents_span_several_records_and_are_reassembled(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "RECORD_CHARS", 7)
    texts = ["a", "äöü漢字😀" * 5, " ", "x" * 7, "y" * 8, "b", "z" * 70]
    build(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts), shard_bytes=60)
    found, manifest = records_of(tmp_path / "out")
    cut = [[text[i : i + 7] for i in range(0, max(len(text), 1), 7)] for text in texts]
    assert [record.decode() for shard in found for record in shard] == [part for parts in cut for part in parts]
    assert [shard["long"] for shard in manifest["shards"]] == [[[1, 5]], [[2, 2], [4, 10]]]
    documents = sources.open_corpus(str(tmp_path / "out"), text_field="text", key="k")
    assert [documents[index] for index in (3, 1, 6, 0, 4, 2, 5)] == [texts[index] for index in (3, 1, 6, 0, 4, 2, 5)]
    whole = (tmp_path / "out/manifest.json").read_text()
    facts = json.loads(whole)
    for damaged in ([[1, 1]], [[9, 5]], [[-1, 5]], [[1, 5], [1, 5]], [1], [["a", 2]], None):
        facts["shards"][0]["long"] = damaged
        (tmp_path / "out/manifest.json").write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=r"manifest.json: shards.0..long|is damaged: "):
            sources.open_corpus(str(tmp_path / "out"), text_field="text", key="k")


def test_documents_share_a_record_up_to_its_size(tmp_path):
    build(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", ["a b c d e f g h"] * 5000), tokenizer=AUSTEN)
    [records], manifest = records_of(tmp_path / "out")
    sizes = [sum(map(len, ids_of(record))) for record in records]
    length = manifest["tokens"] // 5000
    assert len(records) == -(-5000 // (32_768 // length))
    assert set(sizes[:-1]) == {32_768 // length * length}


def test_training_reads_what_was_built(tmp_path):
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", TEXTS), Tokenizer(AUSTEN)
    build(tmp_path / "texts", path, shard_bytes=500)
    build(tmp_path / "ids", path, shard_bytes=500, tokenizer=AUSTEN)
    options = {"text_field": "text", "key": "data.train", "tokenizer_sha256": tokenizer.sha256}
    texts = sources.open_corpus(str(tmp_path / "texts"), **options)
    ids = sources.open_corpus(str(tmp_path / "ids"), **options)
    assert [texts[index] for index in range(len(texts))] == TEXTS
    for index, text in enumerate(TEXTS):
        want = np.concatenate(list(packing.document_tokens(text, tokenizer=tokenizer, max_chars=500_000)))
        np.testing.assert_array_equal(ids[index], want)


@pytest.mark.slow
def test_output_does_not_depend_on_num_workers(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i} " * 50 for i in range(100)]) for name in "abcde"]
    for tokenizer in ("", AUSTEN):
        built = []
        for num_workers in (1, 3):
            out = tmp_path / f"out-{num_workers}{bool(tokenizer)}"
            build(out, *paths, num_workers=num_workers, tokenizer=tokenizer, shard_bytes=20_000)
            built.append(contents(out))
        assert built[0] == built[1]
        assert len(built[0]) > 5


def test_content_hash_depends_only_on_documents_and_their_order(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", pyarrow.schema([("text", pyarrow.string())])) as writer:
        writer.write_table(pyarrow.table({"text": TEXTS}), max_chunksize=5)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pyarrow.CompressedOutputStream(str(tmp_path / "b.jsonl.zst"), "zstd") as stream:
        stream.write(path.read_bytes())
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{index:03d}.txt").write_bytes(text.encode())
    words = ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.gz", "b.jsonl.zst", "texts"]
    hashes = {
        build(tmp_path / f"{kind}-{word}-{size}", tmp_path / word, tokenizer=kind, shard_bytes=size).manifest[
            "content_hash"
        ]
        for word in words
        for kind in ("", AUSTEN)
        for size in (700, 10**6)
    }
    again = build(tmp_path / "again", tmp_path / "-a.jsonl-700", tokenizer=AUSTEN)  # a dataset of texts is an input too
    assert hashes == {again.manifest["content_hash"]}
    swapped = build(tmp_path / "swapped", write_jsonl(tmp_path / "s.jsonl", [TEXTS[1], TEXTS[0], *TEXTS[2:]]))
    assert swapped.manifest["content_hash"] not in hashes


@given(st.lists(st.lists(st.integers(0, 2**128 - 1), max_size=4), max_size=5))
def test_joined_hash_does_not_depend_on_how_digests_are_grouped(parts):
    def chain(digests):
        value = 0
        for digest in digests:
            value = shards.appended_hash(value, digest)
        return value, len(digests)

    assert shards.joined_hash(map(chain, parts)) == shards.joined_hash([chain([d for part in parts for d in part])])


def test_manifest_counts_each_input(tmp_path):
    (tmp_path / "t").mkdir()
    for name in "ab":
        (tmp_path / "t" / f"{name}.txt").write_text(name * 10)
    write_jsonl(tmp_path / "z.jsonl", ["é", "b"])
    manifest = build(tmp_path / "out", tmp_path / "t", tmp_path / "z.jsonl", tokenizer=AUSTEN).manifest
    assert [(s["name"], s["documents"], s["bytes"]) for s in manifest["sources"]] == [
        ("a.txt", 1, 10),
        ("b.txt", 1, 10),
        ("z.jsonl", 2, 3),
    ]
    assert sum(source["tokens"] for source in manifest["sources"]) == manifest["tokens"]
    (tmp_path / "u").mkdir()
    write_jsonl(tmp_path / "u" / "z.jsonl", ["c"])
    manifest = build(tmp_path / "two", tmp_path / "u", tmp_path / "z.jsonl").manifest
    assert [s["name"] for s in manifest["sources"]] == [str(tmp_path / "u" / "z.jsonl"), str(tmp_path / "z.jsonl")]


def command(*words):
    return [sys.executable, "-m", "hlat_jax.data", "build", *map(str, words)]


def children_of(pid):
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_build_resumes_after_sigkill_with_identical_output(tmp_path):
    text = " ".join(f"word{i}" for i in range(30_000)) + "\n"
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name + text] * 16) for name in "abc"]  # 3 tasks of 3 or 4 shards
    build(tmp_path / "whole", *paths, tokenizer=AUSTEN, shard_bytes=1_000_000)
    out, kept = tmp_path / "out", {}
    words = command(*paths, f"--out={out}", f"--tokenizer={AUSTEN}", "--shard_mb=1", "--workers=2")
    for num_finished in (1, 4):
        process = subprocess.Popen(words)
        while len(list(out.glob(".building/*.array_record.json"))) < num_finished:
            assert process.poll() is None
            time.sleep(0.01)
        workers = children_of(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 600
        while any(pathlib.Path(f"/proc/{pid}/cmdline").exists() for pid in workers):  # nobody writes on
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not (out / "manifest.json").exists()
        for path in out.glob(".building/*.array_record.json"):
            assert kept.setdefault(path.name, path.stat().st_ino) == path.stat().st_ino  # not written again
    subprocess.run(words, check=True)
    assert contents(out) == contents(tmp_path / "whole")


def interrupted(tmp_path, monkeypatch, *, num_shards):
    """A build of TEXTS into tmp_path/out that fails after some shards are finished; returns its words."""
    words = (tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", TEXTS))
    close, closed = build_task._OpenShard.close, []

    def close_some(shard, *, last):
        if len(closed) == num_shards:
            raise KeyboardInterrupt
        closed.append(shard)
        return close(shard, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(build_task._OpenShard, "close", close_some)
        with pytest.raises(KeyboardInterrupt):
            build(*words, shard_bytes=50)
    return words


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_resumed_build_keeps_finished_shards_and_rebuilds_damaged_ones(tmp_path, monkeypatch, num_shards):
    words = interrupted(tmp_path, monkeypatch, num_shards=num_shards)
    building = tmp_path / "out" / ".building"
    finished = sorted(building.glob("*.array_record"))
    assert len(finished) == num_shards
    assert not list(building.glob("*.partial"))
    times = {path: path.stat().st_ino for path in finished}
    damaged = bytearray(finished[-1].read_bytes())
    damaged[len(damaged) // 2] ^= 1
    finished[-1].write_bytes(damaged)
    written = []
    monkeypatch.setattr(shards, "ShardWriter", spy(shards.ShardWriter, written))
    build(*words, shard_bytes=50)
    assert [path.name for path in finished[:-1]] == sorted({p.name for p in times} - {p.name for p in written})
    build(tmp_path / "whole", words[1], shard_bytes=50)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def spy(writer, written):
    def make(path, *, dtype):
        written.append(path)
        return writer(path, dtype=dtype)

    return make


@pytest.mark.parametrize("num_renames", range(6))
def test_kill_while_shards_are_moved_into_place_loses_nothing(tmp_path, monkeypatch, num_renames):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    build(tmp_path / "whole", path, shard_bytes=2000, tokenizer=AUSTEN)
    replace, renamed = os.replace, []

    def killed(source, target):
        if ".building" not in str(target):
            if len(renamed) == num_renames:
                raise KeyboardInterrupt
            renamed.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with contextlib.suppress(KeyboardInterrupt):
            build(tmp_path / "out", path, shard_bytes=2000, tokenizer=AUSTEN)
    if num_renames < 5:  # two shards, two indices, the manifest
        assert not (tmp_path / "out" / "manifest.json").exists()
    build(tmp_path / "out", path, shard_bytes=2000, tokenizer=AUSTEN)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_same_command_again_says_that_it_is_complete(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = build(tmp_path / "out", path)
    before = contents(tmp_path / "out")
    again = build(tmp_path / "out", path)
    assert (first.was_complete, again.was_complete) == (False, True)
    assert again.manifest == first.manifest
    assert contents(tmp_path / "out") == before


def test_out_with_other_content_is_refused(tmp_path, monkeypatch):
    path, other = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", TEXTS)
    build(tmp_path / "done", path)
    assert "built from other inputs or options" in error_of(ValueError, tmp_path / "done", path, shard_bytes=7)
    assert "is not empty" in error_of(ValueError, tmp_path, path)
    assert "is a file" in error_of(ValueError, path, other)
    words = interrupted(tmp_path, monkeypatch, num_shards=1)
    message = error_of(ValueError, words[0], other, shard_bytes=50, text_field="body")
    assert "differs in inputs, text_field" in message
    assert ".building" in message


def test_build_killed_before_manifest_rename_is_recognized(tmp_path, monkeypatch):
    path, other = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", ["other"])
    out, replace = tmp_path / "out", os.replace

    def killed(source, target):
        if pathlib.Path(target) == out / "manifest.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            build(out, path)
    message = error_of(ValueError, out, other)
    assert "differs in inputs" in message
    assert f"remove {out} to start over" in message
    assert build(out, path).manifest["documents"] == len(TEXTS)


def test_state_of_a_build_of_other_inputs_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n' * 9)
    path, out = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "out"
    close = build_task._OpenShard.close

    def killed(shard, *, last):
        close(shard, last=last)
        raise KeyboardInterrupt

    monkeypatch.setattr(build_task._OpenShard, "close", killed)
    with pytest.raises(KeyboardInterrupt):
        build(out, tmp_path / "bad.jsonl", on_bad_record="skip")
    assert [path.name for path in (out / ".building").glob("*.array_record*")] == ["task-00000.0000.array_record.json"]
    monkeypatch.setattr(build_task._OpenShard, "close", close)
    task = build_task.Task(0, (), "of another build")
    assert build_task.finished_shards(task, folder=out / ".building", options=BuildOptions(on_bad_record="skip")) == []
    assert build(out, path, on_bad_record="skip").manifest["documents"] == len(TEXTS)


def test_two_processes_do_not_build_in_one_folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with build_lib._unfinished(tmp_path / "out", {}):
        assert "another process is building" in error_of(ValueError, tmp_path / "out", path)


def test_failed_build_without_finished_shards_leaves_nothing_to_remove(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert "no key 'body'" in error_of(ValueError, tmp_path / "out", path, text_field="body")
    assert build(tmp_path / "out", path).manifest["documents"] == len(TEXTS)  # no folder to be removed by hand


BAD = b'{"text": "one"}\n{"text": null}\n{"text": "three"}\n{"tex\n{"text": "\xff"}\n{"text": "six"}\n'


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_record_error_names_file_row_and_fix(tmp_path, num_workers):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    write_jsonl(tmp_path / "b.jsonl", TEXTS)
    words = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    message = error_of(ValueError, tmp_path / "out", *words, num_workers=num_workers, shard_bytes=50)
    assert f"{tmp_path / 'a.jsonl'}, row 2: 'text' is null" in message
    assert "--on_bad_record=skip" in message


def test_skipped_records_are_counted_per_input(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    write_jsonl(tmp_path / "b.jsonl", ["seven"])
    built = build(tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "b.jsonl", on_bad_record="skip")
    found, manifest = records_of(tmp_path / "out")
    assert [record for shard in found for record in shard] == [b"one", b"three", b"six", b"seven"]
    assert manifest["bad_records"] == 3
    assert [source["bad_records"] for source in manifest["sources"]] == [3, 0]
    assert [source["documents"] for source in manifest["sources"]] == [3, 1]
    assert ["row 2" in built.bad[0], "row 4" in built.bad[1], "row 5" in built.bad[2]] == [True] * 3


def test_build_stopped_by_a_bad_record_resumes_with_skip(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    assert "row 2" in error_of(ValueError, tmp_path / "out", tmp_path / "a.jsonl", shard_bytes=1)
    build(tmp_path / "out", tmp_path / "a.jsonl", shard_bytes=1, on_bad_record="skip")
    build(tmp_path / "whole", tmp_path / "a.jsonl", shard_bytes=1, on_bad_record="skip")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["bad_records"] == 3


def test_shards_with_skipped_records_are_rebuilt_when_bad_records_raise(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    with monkeypatch.context() as patch:
        patch.setattr(build_lib, "_write_manifest", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(tmp_path / "out", tmp_path / "a.jsonl", shard_bytes=1, on_bad_record="skip")
    assert "row 2" in error_of(ValueError, tmp_path / "out", tmp_path / "a.jsonl", shard_bytes=1)


def test_inputs_without_documents_or_text_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    assert "hold no documents" in error_of(ValueError, tmp_path / "out", tmp_path / "empty.jsonl")
    blank = write_jsonl(tmp_path / "blank.jsonl", [""] * 3)
    assert "blank.jsonl, row 1: 'text' is empty" in error_of(ValueError, tmp_path / "out", blank)
    none = error_of(ValueError, tmp_path / "out", blank, on_bad_record="skip")
    assert "hold no documents (3 bad records)" in none
    assert "does not exist" in error_of(ValueError, tmp_path / "out", tmp_path / "no.jsonl")


def test_truncated_inputs_are_refused_and_never_skipped(tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(20_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-1000])
    message = error_of(ValueError, tmp_path / "out", tmp_path / "a.jsonl.gz", on_bad_record="skip")
    assert "a.jsonl.gz" in message


def test_token_dataset_is_refused_as_input(tmp_path):
    build(tmp_path / "ids", write_jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=AUSTEN)
    assert "token ids" in error_of(ValueError, tmp_path / "out", tmp_path / "ids")


def test_a_damaged_dataset_is_refused_by_name(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text('{"shards": [], "kind": "text"}')
    assert f"{tmp_path}/d/manifest.json: format is missing" in error_of(ValueError, tmp_path / "out", tmp_path / "d")


class Numbers:
    """A tokenizer of numbers: '1 70000' gives [1, 70000]."""

    eos_id = 0

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        return np.asarray([int(word) for word in text.split()], np.int32)


def test_ids_outside_the_vocabulary_are_refused():
    assert list(shards.encode_tokens("5 9", tokenizer=Numbers(10), max_chars=100).data) == [5, 9, 0]
    for text in ("10", "-1"):
        with pytest.raises(ValueError, match="outside the vocabulary of 10"):
            shards.encode_tokens(text, tokenizer=Numbers(10), max_chars=100)


@pytest.mark.parametrize(("vocab_size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_ids_take_two_bytes_when_they_fit(tmp_path, vocab_size, width):
    encoded = shards.encode_tokens(f"1 {vocab_size - 1}", tokenizer=Numbers(vocab_size), max_chars=100)
    writer = shards.ShardWriter(tmp_path / "s.array_record", dtype=shards.id_dtype(vocab_size))
    writer.add(encoded)
    writer.close()
    [record] = array_record_module.ArrayRecordReader(str(tmp_path / "s.array_record")).read([0])
    assert int.from_bytes(record[4:8], "little") == width
    assert ids_of(record) == [[1, vocab_size - 1, 0]]


def test_shard_that_fails_verification_is_not_moved_into_place(tmp_path, monkeypatch):
    class Forgetful(array_record_module.ArrayRecordWriter):
        def write(self, record):
            if record != b"lost":
                super().write(record)

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Forgetful)
    writer = shards.ShardWriter(tmp_path / "s.array_record", dtype=None)
    writer.add(shards.encode_text("kept"))
    writer.add(shards.encode_text("lost"))
    with pytest.raises(OSError, match="1 of 2 records"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", ["", AUSTEN])
def test_full_disk_raises_a_clear_error_and_the_build_can_resume(small_disk, tmp_path, tokenizer):
    disk = small_disk("2m")
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 123, 20_000))) for _ in range(150)]  # 3 MB that does not compress
    path, options = write_jsonl(tmp_path / "a.jsonl", texts), {"tokenizer": tokenizer, "shard_bytes": 400_000}
    message = error_of(OSError, disk / "out", path, **options)
    assert "No space left on device" in message
    assert "run the same command again" in message
    finished = list((disk / "out" / ".building").glob("*.array_record"))
    assert finished
    assert not list((disk / "out" / ".building").glob("*.partial"))
    small_disk("20m")
    build(disk / "out", path, **options)
    build(tmp_path / "whole", path, **options)
    assert contents(disk / "out") == contents(tmp_path / "whole")


def killed_worker(task, folder, options):
    if task.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return build_task.run_in_worker(task, folder, options)


def test_a_worker_that_is_killed_is_reported_and_the_build_resumes(tmp_path, monkeypatch):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(build_lib.build_task, "run_in_worker", killed_worker)
        message = error_of(OSError, tmp_path / "out", *paths, num_workers=2, shard_bytes=1000)
    assert "--workers" in message
    manifest = build(tmp_path / "out", *paths, shard_bytes=1000).manifest
    assert manifest["documents"] == 2 * len(TEXTS)


def test_out_inside_an_input_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts/a.jsonl", TEXTS)
    for word in (tmp_path, tmp_path / "texts", tmp_path / "te*"):
        assert "is inside the input" in error_of(ValueError, tmp_path / "texts/built", word)
    build(tmp_path / "texts/built", tmp_path / "texts/a.jsonl")  # a file is not the folder it lies in


def test_input_paths_may_contain_commas(tmp_path):
    write_jsonl(tmp_path / "a, b.jsonl", ["one", "two"])
    assert build(tmp_path / "out", tmp_path / "a, b.jsonl").manifest["documents"] == 2


def test_same_size_edit_outside_the_fingerprint_is_detected(tmp_path, monkeypatch):
    path, out = write_jsonl(tmp_path / "a.jsonl", ["x" * 3_000_000]), tmp_path / "out"
    build(out, path)
    assert build(out, path).was_complete
    edit(path)
    assert "whose inputs changed since" in error_of(ValueError, out, path)
    (tmp_path / "half").mkdir()
    out, path = interrupted(tmp_path / "half", monkeypatch, num_shards=1)
    path.write_bytes(path.read_bytes())
    assert "differs in inputs" in error_of(ValueError, out, path, shard_bytes=50)


def edit(path):
    with open(path, "r+b") as file:
        file.seek(100_000)
        file.write(b"y")


def test_build_reports_ignored_files_and_too_few_documents(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/book.txt").write_text("one long book")
    (tmp_path / "texts/book.csv").write_text("x")
    for _ in range(2):
        built = build(tmp_path / "out", tmp_path / "texts")
        printed = build_lib.summary(built, out=tmp_path / "out", elapsed_s=1.0)
        assert "ignored 1 file: .csv 1" in printed
        assert "data.batch_size can be at most 1. A .txt or .md file is one document unless" in printed
    write_jsonl(tmp_path / "many.jsonl", ["x"] * 32)
    many = build(tmp_path / "many", tmp_path / "many.jsonl")
    assert "few documents" not in build_lib.summary(many, out=tmp_path / "many", elapsed_s=1.0)
