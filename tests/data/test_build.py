"""Built datasets: the same bytes from the same text, whatever the workers, the kills and the disks on the way."""

import contextlib
import errno
import gzip
import json
import os
import signal
import subprocess
import sys

import jobs
import numpy as np
import pytest
from array_record.python import array_record_module
from data_files import write_arrow, write_compressed, write_jsonl, write_parquet
from refusals import assert_names, refused

from hlat_jax.data import packing, sources
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.build import shards
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


def build(out, *words, num_workers=1, **options):
    options = build_lib.BuildOptions(**options)
    return build_lib.build([str(word) for word in words], out=out, options=options, num_workers=num_workers)


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
    write_jsonl(tmp_path / "a, b.jsonl", TEXTS)  # a comma does not separate arguments
    build(tmp_path / "out", tmp_path / "a, b.jsonl", shard_bytes=1000)
    found, manifest = records_of(tmp_path / "out")
    assert [record.decode() for shard in found for record in shard] == TEXTS
    assert (manifest["format"], manifest["kind"], manifest["documents"]) == (2, "text", len(TEXTS))
    assert manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert [shard["documents"] for shard in manifest["shards"]] == [len(shard) for shard in found]
    assert len(found) > 1
    assert manifest["shards"][0]["name"] == f"shard-00000-of-{len(found):05d}.array_record"
    assert [manifest[key] for key in ("tokens", "tokenizer_sha256", "vocab_size", "eos_id")] == [None] * 4
    assert not (tmp_path / "out" / ".building").exists()
    texts = sources.open_corpus(str(tmp_path / "out"), text_field="text", key="data.train")
    assert [texts[index] for index in range(len(texts))] == TEXTS


def test_token_dataset_stores_the_ids_of_packing(tmp_path):
    # one document over a record, and over the character limit, after many that share records
    texts = [*TEXTS, *["a b c d e f g h"] * 5000, "word " * 70_000, "end"]
    options = {"tokenizer": AUSTEN, "max_document_chars": 1000, "shard_bytes": 50_000}
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
        sizes = [sum(map(len, record)) for record in in_shard]
        assert all(len(record) == 1 or size <= 32_768 for record, size in zip(in_shard, sizes, strict=True))
        for record, after in zip(sizes, in_shard[1:], strict=False):  # the next document did not fit
            assert record + len(after[0]) > 32_768
        assert shard["tokens"] == sum(sizes)
        documents += [ids for record in in_shard for ids in record]
    assert len(documents) == len(texts)
    for ids, want in zip(documents, expected, strict=True):
        np.testing.assert_array_equal(ids, want)
    assert manifest["tokens"] == sum(len(ids) for ids in expected)
    assert (manifest["vocab_size"], manifest["eos_id"], manifest["max_document_chars"]) == (2048, 2, 1000)
    assert manifest["tokenizer_sha256"] == tokenizer.sha256
    corpus = sources.open_corpus(str(tmp_path / "out"), text_field="text", key="k", tokenizer_sha256=tokenizer.sha256)
    for number in (len(texts) - 2, 0, len(texts) - 1, 2000):
        np.testing.assert_array_equal(corpus[number], expected[number])


def test_long_documents_span_records_and_are_reassembled(tmp_path, monkeypatch):
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
        with refused(tmp_path / "out"):
            sources.open_corpus(str(tmp_path / "out"), text_field="text", key="k")


def test_output_does_not_depend_on_num_workers(tmp_path):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i} " * 500 for i in range(100)]) for name in "abcde"]
    for tokenizer in ("", AUSTEN):
        built = []
        for num_workers in (1, 5):
            out = tmp_path / f"out-{num_workers}{bool(tokenizer)}"
            build(out, *paths, num_workers=num_workers, tokenizer=tokenizer, shard_bytes=200_000)
            built.append(contents(out))
        assert built[0] == built[1]
        assert len(built[0]) > 5


def test_content_hash_depends_only_on_documents_and_their_order(tmp_path):
    raw = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    write_parquet(tmp_path / "a.parquet", TEXTS, rows_in_group=7)
    write_arrow(tmp_path / "a.arrow", TEXTS, rows_in_batch=5)
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        write_compressed(tmp_path / name, raw)
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{index:03d}.txt").write_bytes(text.encode())
    words = ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.gz", "b.jsonl.zst", "texts"]
    hashes = set()
    for word, kind, size in [*((word, "", 700) for word in words), (words[0], "", 10**6), (words[0], AUSTEN, 700)]:
        built = build(tmp_path / f"{kind}-{word}-{size}", tmp_path / word, tokenizer=kind, shard_bytes=size)
        hashes.add(built.manifest["content_hash"])
    again = build(tmp_path / "again", tmp_path / "-a.jsonl-700", tokenizer=AUSTEN)  # a dataset of texts is an input too
    assert hashes == {again.manifest["content_hash"]}
    swapped = build(tmp_path / "swapped", write_jsonl(tmp_path / "s.jsonl", [TEXTS[1], TEXTS[0], *TEXTS[2:]]))
    assert swapped.manifest["content_hash"] not in hashes


def test_manifest_counts_each_input(tmp_path):
    (tmp_path / "t").mkdir()
    for name in "ab":
        (tmp_path / "t" / f"{name}.txt").write_text(name * 10)
    write_jsonl(tmp_path / "z.jsonl", ["é", "b", ""])
    built = build(tmp_path / "out", tmp_path / "t", tmp_path / "z.jsonl", tokenizer=AUSTEN, on_bad_record="skip")
    keys = ("name", "documents", "bytes", "bad_records")
    counts = [tuple(source[key] for key in keys) for source in built.manifest["sources"]]
    assert counts == [("a.txt", 1, 10, 0), ("b.txt", 1, 10, 0), ("z.jsonl", 2, 3, 1)]
    assert sum(source["tokens"] for source in built.manifest["sources"]) == built.manifest["tokens"]
    [_, note] = built.notes
    assert_names(note, f"{tmp_path}/z.jsonl, row 3", "'text'")
    (tmp_path / "u").mkdir()
    write_jsonl(tmp_path / "u" / "z.jsonl", ["c"])
    manifest = build(tmp_path / "two", tmp_path / "u", tmp_path / "z.jsonl", on_bad_record="skip").manifest
    assert [s["name"] for s in manifest["sources"]] == [str(tmp_path / "u" / "z.jsonl"), str(tmp_path / "z.jsonl")]


@pytest.mark.slow
def test_build_resumes_after_sigkill_with_identical_output(tmp_path):
    text = " ".join(f"word{i}" for i in range(30_000)) + "\n"
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [name + text] * 16) for name in "abc"]  # 10 shards
    build(tmp_path / "whole", *paths, tokenizer=AUSTEN, shard_bytes=1_000_000)
    out, kept = tmp_path / "out", {}
    words = ["build", *map(str, paths), f"--out={out}", f"--tokenizer={AUSTEN}", "--shard_mb=1", "--workers=2"]
    for num_more, num_finished in ((1, 1), (3, 4)):
        done = subprocess.run([sys.executable, "-c", jobs.KILLED_BUILD, str(num_more), *words], check=False)
        assert done.returncode == -signal.SIGKILL
        assert not (out / "manifest.json").exists()
        finished = list(out.glob(".building/*.array_record"))
        assert len(finished) == num_finished
        for path in finished:
            assert kept.setdefault(path.name, path.stat().st_ino) == path.stat().st_ino  # not written again
    subprocess.run([sys.executable, "-m", "hlat_jax.data", *words], check=True)
    assert contents(out) == contents(tmp_path / "whole")


def interrupted(tmp_path, monkeypatch, *, num_shards):
    """A build of TEXTS into tmp_path/out that fails after some shards are finished; returns its words."""
    words = (tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", TEXTS))
    close, closed = shards.ShardWriter.close, []

    def close_some(shard):
        if len(closed) == num_shards:
            raise KeyboardInterrupt
        closed.append(shard)
        return close(shard)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "close", close_some)
        with pytest.raises(KeyboardInterrupt):
            build(*words, shard_bytes=50)
    return words


def test_resumed_build_keeps_finished_shards_and_no_others(tmp_path, monkeypatch):
    for num_shards in (1, 2, 3):
        folder = tmp_path / str(num_shards)
        folder.mkdir()
        out, path = interrupted(folder, monkeypatch, num_shards=num_shards)
        finished = sorted((out / ".building").glob("*.array_record"))
        assert len(finished) == num_shards
        assert not list((out / ".building").glob("*.partial"))
        finished[-1].write_bytes(finished[-1].read_bytes()[:-1])
        kept = [path.stat().st_ino for path in finished[:-1]]
        build(out, path, shard_bytes=50)
        shard_paths = sorted(out.glob("*.array_record"))
        assert [path.stat().st_ino for path in shard_paths[: num_shards - 1]] == kept
        build(folder / "whole", path, shard_bytes=50)
        assert contents(out) == contents(folder / "whole")


def test_kill_while_shards_are_moved_into_place_loses_nothing(tmp_path, monkeypatch):
    path, other = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", ["other"])
    build(tmp_path / "whole", path, shard_bytes=2000, tokenizer=AUSTEN)
    replace, renamed = os.replace, []
    for num_renames in range(6):  # two shards, two indices, the manifest
        out = tmp_path / str(num_renames)
        renamed.clear()

        def killed(source, target, *, most=num_renames):
            if ".building" not in str(target):
                if len(renamed) == most:
                    raise KeyboardInterrupt
                renamed.append(target)
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt) if num_renames < 5 else contextlib.nullcontext():
                build(out, path, shard_bytes=2000, tokenizer=AUSTEN)
        assert (out / "manifest.json").exists() == (num_renames == 5)
        with refused(out):
            build(out, other)
        build(out, path, shard_bytes=2000, tokenizer=AUSTEN)
        assert contents(out) == contents(tmp_path / "whole")


def test_out_with_other_content_is_refused(tmp_path, monkeypatch):
    path, other = write_jsonl(tmp_path / "a.jsonl", ["x" * 3_000_000]), write_jsonl(tmp_path / "b.jsonl", TEXTS)
    first, before = build(tmp_path / "done", path), contents(tmp_path / "done")
    again = build(tmp_path / "done", path)
    assert (first.was_complete, again.was_complete) == (False, True)
    assert again.manifest == first.manifest
    assert contents(tmp_path / "done") == before
    for out, words, options in ((tmp_path / "done", path, {"shard_bytes": 7}), (tmp_path, path, {}), (path, other, {})):
        with refused(f"--out={out}"):
            build(out, words, **options)
    with open(path, "r+b") as file:  # outside the fingerprint, of the same size
        file.seek(100_000)
        file.write(b"y")
    with refused("--out=", tmp_path / "done"):
        build(tmp_path / "done", path)
    (tmp_path / "half").mkdir()
    out, path = interrupted(tmp_path / "half", monkeypatch, num_shards=1)
    for words in ((other, {}), (path, {"text_field": "body"})):
        with refused(f"--out={out}"):
            build(out, words[0], **{"shard_bytes": 50} | words[1])
    with build_lib._lock_folder(out), refused(out):
        build(out, path, shard_bytes=50)  # of another process
    build(out, path, shard_bytes=50)


BAD = b'{"text": "one"}\n{"text": null}\n{"text": "three"}\n{"tex\n{"text": "\xff"}\n{"text": "six"}\n{"text": 7}\n'


def test_build_stopped_by_a_bad_record_resumes_with_skip(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(BAD)
    for num_workers in (1, 2):
        out = tmp_path / str(num_workers)
        options = {"shard_bytes": 1, "num_workers": num_workers}
        with refused(f"{tmp_path / 'a.jsonl'}, row 2", "'text'", "--on_bad_record=skip"):
            build(out, tmp_path / "a.jsonl", **options)
        built = build(out, tmp_path / "a.jsonl", **options, on_bad_record="skip")
        found, manifest = records_of(out)
        assert found == [[b"one"], [b"three"], [b"six"]]
        assert manifest["bad_records"] == 4
        assert [f"row {row}" in note for row, note in zip((2, 4, 5, 7), built.notes[1:], strict=True)] == [True] * 4


def test_unusable_inputs_are_refused(tmp_path):
    paths = {name: tmp_path / name for name in ("empty.jsonl", "blank.jsonl", "cut.jsonl.gz", "no.jsonl", "texts", "d")}
    paths["empty.jsonl"].write_bytes(b"\n")
    write_jsonl(paths["blank.jsonl"], [""] * 3)
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % (i * 7919) for i in range(20_000)))
    paths["cut.jsonl.gz"].write_bytes(whole[:-1000])
    paths["texts"].mkdir()
    write_jsonl(paths["texts"] / "a.jsonl", TEXTS)
    build(tmp_path / "ids", paths["texts"] / "a.jsonl", tokenizer=AUSTEN)
    paths["d"].mkdir()
    (paths["d"] / "manifest.json").write_text('{"shards": [], "kind": "text"}')
    for word, fact in (
        (paths["empty.jsonl"], "0 bad records"),
        (paths["blank.jsonl"], "3 bad records"),
        (paths["cut.jsonl.gz"], "cut.jsonl.gz"),  # never skipped
        (paths["no.jsonl"], "no.jsonl"),
        (tmp_path / "ids", tmp_path / "ids"),
        (paths["d"], "d/manifest.json: format "),
    ):
        with refused(fact):
            build(tmp_path / "out", word, on_bad_record="skip")
    for word in (paths["texts"], tmp_path / "te*"):
        with refused(f"--out={paths['texts'] / 'built'}"):
            build(paths["texts"] / "built", word)
    build(paths["texts"] / "built", paths["texts"] / "a.jsonl")  # a file is not the folder it lies in
    with refused("a.jsonl, row 1", "'body'"):
        build(tmp_path / "out", paths["texts"] / "a.jsonl", text_field="body")
    assert build(tmp_path / "out", paths["texts"] / "a.jsonl").manifest["documents"] == len(TEXTS)  # nothing to remove


def test_shard_that_fails_verification_is_not_moved_into_place(tmp_path, monkeypatch):
    class Forgetful(array_record_module.ArrayRecordWriter):
        def write(self, record):
            if record != b"lost":
                super().write(record)

    monkeypatch.setattr(array_record_module, "ArrayRecordWriter", Forgetful)
    writer = shards.ShardWriter(tmp_path / "s.array_record", dtype=None)
    writer.add(0, shards.encode_text("kept"))
    writer.add(0, shards.encode_text("lost"))
    with refused("1 of 2", kind=OSError):
        writer.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokenizer", ["", AUSTEN])
def test_a_build_resumes_after_a_full_disk(small_disk, tmp_path, tokenizer):
    disk = small_disk("2m")
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 123, 20_000))) for _ in range(150)]  # 3 MB that does not compress
    path, options = write_jsonl(tmp_path / "a.jsonl", texts), {"tokenizer": tokenizer, "shard_bytes": 400_000}
    with refused(disk / "out", kind=OSError) as caught:
        build(disk / "out", path, **options)
    assert caught.value.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(caught.value)
    finished = list((disk / "out" / ".building").glob("*.array_record"))
    assert finished
    assert not list((disk / "out" / ".building").glob("*.partial"))
    small_disk("20m")
    build(disk / "out", path, **options)
    build(tmp_path / "whole", path, **options)
    assert contents(disk / "out") == contents(tmp_path / "whole")
