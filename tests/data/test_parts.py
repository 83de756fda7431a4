"""Parts of a dataset, built by commands of their own: joined they are one build, and anything less is named."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys

import jobs
import numpy as np
import pytest
from data_files import write_arrow, write_compressed, write_jsonl, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names, assert_refused, refused

from hlat_jax.config import DataConfig
from hlat_jax.data import path_checks, sources
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.formats.parts import Part, parse_part
from hlat_jax.store import bucket as bucket_lib
from hlat_jax.store.bucket import Bucket

AUSTEN = "package:austen_2k.model"


def build(out, *words, part="", **options):
    options = build_lib.BuildOptions(**options, part=parse_part(part))
    return build_lib.build([str(word) for word in words], out=out, options=options)


def documents_of(spec):
    corpus = sources.open_corpus(str(spec), text_field="text", key="data.train")
    return [corpus[index] for index in range(len(corpus))]


def inputs_in(folder, *, num_files=4):
    folder.mkdir()
    for number in range(num_files):
        write_jsonl(folder / f"{number}.jsonl", [f"{number} {each} " * (20 * number + 1) for each in range(5)])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_parts_share_the_inputs_by_bytes_in_order(sizes, data):
    of = data.draw(st.integers(1, len(sizes)))
    parts = [Part(number, of).choose(sizes) for number in range(1, of + 1)]
    assert list(itertools.chain(*parts)) == list(range(len(sizes)))
    assert all(parts)
    assert max(sum(sizes[index] for index in part) for part in parts) <= sum(sizes) / of + max(sizes)


WRITERS = {
    "jsonl": write_jsonl,
    "jsonl.gz": lambda path, texts: write_compressed(path, write_jsonl(path.with_suffix(".raw"), texts).read_bytes()),
    "jsonl.zst": lambda path, texts: write_compressed(path, write_jsonl(path.with_suffix(".raw"), texts).read_bytes()),
    "parquet": write_parquet,
    "arrow": write_arrow,
    "txt": lambda path, texts: path.write_text("\n\n".join(texts)),
}
# a file with a NUL is refused: it is no text in UTF-8
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.lists(st.text(CHARACTERS, min_size=1, max_size=40), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(files=st.lists(st.tuples(st.sampled_from(sorted(WRITERS)), texts), min_size=1, max_size=6), data=st.data())
def test_parts_hold_the_documents_of_one_build_in_order(tmp_path_factory, files, data):
    folder = tmp_path_factory.mktemp("parts")
    (folder / "in").mkdir()
    for number, (suffix, written) in enumerate(files):
        WRITERS[suffix](folder / "in" / f"{number}.{suffix}", written)
    of = data.draw(st.integers(1, len(files)))
    options = {"tokenizer": data.draw(st.sampled_from(["", AUSTEN])), "on_bad_record": "skip", "batch_size": 8}
    build(folder / "whole", folder / "in", **options)
    for number in data.draw(st.permutations(range(1, of + 1))):  # shards of any size
        build(folder / "out", folder / "in", part=f"{number}/{of}", shard_bytes=number * 30, **options)
    folders = sorted((folder / "out").iterdir())
    assert [path.name for path in folders] == [f"part-{n:05d}-of-{of:05d}" for n in range(1, of + 1)]
    expected = documents_of(folder / "whole")
    for spec in (folder / "out", ",".join(map(str, folders))):
        found = documents_of(spec)
        assert len(found) == len(expected)
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_part_whose_records_are_all_bad_is_empty(tmp_path, data_here):
    (tmp_path / "in").mkdir()
    for name, written in (("a", ["", ""]), ("b", ["one", "two"]), ("c", [""])):
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", written)
    for number in (1, 2, 3):
        words = ("build", tmp_path / "in", f"--out={tmp_path}/out", f"--part={number}/3", "--on_bad_record=skip")
        code, printed, _ = data_here(*words, f"--tokenizer={AUSTEN}")
        assert code == 0
    assert_names(printed, "part-00003-of-00003", "0 documents", "all 3 parts", f"--config.data.train={tmp_path}/out")
    assert len(documents_of(tmp_path / "out")) == 2


def test_parts_that_cannot_be_built_are_refused(tmp_path, data_here):
    inputs_in(tmp_path / "in")
    words = ("build", tmp_path / "in", f"--out={tmp_path}/out")
    for part in ("0/4", "5/4", "1/0", "1", "a/b", "1/4/4", "-1/4", "1/100000", "1 / 4"):
        assert_refused(data_here(*words, f"--part={part}"), f"--part={part}", "I/N")
    assert_refused(data_here(*words, "--part=5/5"), "--part=5/5", "IN is 4 files", "at most 4")
    assert not (tmp_path / "out").exists()
    build(tmp_path / "out", tmp_path / "in", part="1/4")
    for other, fact in (
        (("--part=2/3",), "part-00001-of-00004"),
        (("--part=2/4", f"--tokenizer={AUSTEN}"), "--tokenizer"),
        (("--part=2/4", "--text_field=body"), "--text_field"),
        ((), "--out"),
    ):
        assert_refused(data_here(*words, *other), f"--out={tmp_path}/out", fact)
    write_jsonl(tmp_path / "in" / "9.jsonl", ["new"])
    assert_refused(data_here(*words, "--part=2/4"), "part-00001-of-00004", "other inputs")


def test_a_copy_of_the_inputs_gives_parts_of_the_same_build(tmp_path):
    inputs_in(tmp_path / "in")
    shutil.copytree(tmp_path / "in", tmp_path / "copy", copy_function=shutil.copyfile)  # as on the disk of a machine
    for path in (tmp_path / "copy").iterdir():
        os.utime(path, (1, 1))
    build(tmp_path / "out", tmp_path / "in", part="1/2")
    build(tmp_path / "out", tmp_path / "copy", part="2/2")
    build(tmp_path / "whole", tmp_path / "in")
    assert documents_of(tmp_path / "out") == documents_of(tmp_path / "whole")


def assert_all_refuse(spec, *facts):
    """The check before JAX, with bad records skipped too, and the reader, which a job of many processes asks alone."""
    for on_bad_record in ("raise", "skip"):
        with refused("data.train", *facts) as caught:
            path_checks.check_records(DataConfig(train=str(spec), on_bad_record=on_bad_record), keys=["train"])
        assert "\n" not in str(caught.value)
    with refused("data.train", *facts):
        documents_of(spec)


@pytest.fixture
def url(faults, tmp_path, monkeypatch):
    pytest.importorskip("moto", reason="pip install 'hlat_jax[test]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket_lib, "_in_use", {})
    return f"s3://bucket/{tmp_path.name}"


def test_parts_in_a_bucket_are_joined_as_on_a_disk(url, tmp_path, data_here):
    inputs_in(tmp_path / "in")
    for number in (2, 1, 3):
        for out in (url, tmp_path / "out"):
            code, printed, err = data_here("build", tmp_path / "in", f"--out={out}", f"--part={number}/3")
            assert (code, f"data.train={out}" in printed) == (0, True), err
    expected = documents_of(tmp_path / "out")
    parts = [f"part-0000{number}-of-00003" for number in (1, 2, 3)]
    assert len(expected) == 20
    assert documents_of(url) == documents_of(f"{url}/") == expected
    assert documents_of(",".join(f"{url}/{part}" for part in parts)) == expected
    local = {f"{path.parent.name}/{path.name}": path.stat().st_size for path in (tmp_path / "out").glob("part-*/*")}
    assert Bucket(url).sizes() == local


def test_parts_that_do_not_belong_in_a_bucket_are_refused(url, tmp_path, data_here):
    inputs_in(tmp_path / "in")
    build(tmp_path / "whole", tmp_path / "in")
    build(tmp_path / "out", tmp_path / "in", part="1/4")
    for folder in ("whole", "out"):
        for path in (tmp_path / folder).rglob("*.*"):
            Bucket(f"{url}/{folder}").send(path, path.relative_to(tmp_path / folder).as_posix())
    for folder, fact, *flags in (
        ("whole", "manifest.json, no part of 2", "--part=1/2"),
        ("out", "part-00001-of-00004, no part of 3", "--part=1/3"),
        ("out", "part-00001-of-00004, built with other --text_field", "--part=2/4", "--text_field=body"),
    ):
        before = Bucket(f"{url}/{folder}").sizes()
        words = ("build", tmp_path / "in", f"--out={url}/{folder}", *flags)
        assert_refused(data_here(*words), f"--out={url}/{folder} holds {fact}")
        assert Bucket(f"{url}/{folder}").sizes() == before


def test_data_of_a_bucket_is_named_by_its_url(url, tmp_path, data_here, monkeypatch):
    inputs_in(tmp_path / "in")
    for number in (1, 2):
        build(tmp_path / "out", tmp_path / "in", part=f"{number}/2")
        for path in (tmp_path / "out").rglob(f"*{number}-of-00002/*"):
            Bucket(url).send(path, f"{path.parent.name}/{path.name}")
    corpus = sources.open_corpus(url, text_field="text", key="data.train")
    assert corpus.locate(0).startswith(f"{url}/part-00001-of-00002, document 1 ")
    with refused(f"part 2 of 2 is missing, beside {url}/part-00001-of-00002."):
        documents_of(f"{url}/part-00001-of-00002")
    words = ("build", tmp_path / "in", f"--out={url}/new", "--part=1/2")
    monkeypatch.setattr(Bucket, "send", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data_here(*words)
    facts = (f"--out={url}/new was built from other", f"remove {tmp_path}/cache")
    assert_refused(data_here(*words, "--shard_mb=1"), *facts)


def test_parts_that_a_bucket_lacks_are_named_and_none_fetched(url, faults, tmp_path):
    inputs_in(tmp_path / "in")
    for number in (1, 2, 3):
        build(tmp_path / "out", tmp_path / "in", part=f"{number}/3")
    for path in (tmp_path / "out").glob("*/*"):
        Bucket(url).send(path, f"{path.parent.name}/{path.name}")
    Bucket(url).write("other/manifest.json", b"{}")
    with refused(f"data.train: {url}/other", "no part of 3"):
        documents_of(url)
    Bucket(url).remove(["other/manifest.json"])
    Bucket(url).write("part-00001-of-00003/more/manifest.json", b"{}")
    with refused(f"data.train: {url}/part-00001-of-00003/more", "no part of 3"):
        documents_of(url)
    Bucket(url).remove(["part-00001-of-00003/more/manifest.json"])
    Bucket(url).remove(["part-00002-of-00003/manifest.json"])  # as of a build that still sends
    faults.requests.clear()
    with refused(f"data.train: {url}/part-00002-of-00003 is missing"):
        documents_of(url)
    assert not [request for request in faults.requests if "shard" in request]


def test_incomplete_or_repeated_parts_are_refused(tmp_path):
    inputs_in(tmp_path / "in", num_files=8)
    parts = [tmp_path / "out" / Part(number, 8).folder for number in range(1, 9)]
    for number in (1, 3, 4, 5):
        build(tmp_path / "out", tmp_path / "in", part=f"{number}/8")
    assert_all_refuse(tmp_path / "out", "part 2, 6, 7, 8 of 8 are missing", parts[0], "--part=2/8")
    assert_all_refuse(parts[0], "part 2, 3, 4, 5, 6 of 8, and 2 more, are missing")
    for number in (2, 6, 7):
        build(tmp_path / "out", tmp_path / "in", part=f"{number}/8")
    assert_all_refuse(tmp_path / "out", "part 8 of 8 is missing")
    build(tmp_path / "out", tmp_path / "in", part="8/8")
    assert len(documents_of(tmp_path / "out")) == 40
    shutil.copytree(parts[2], tmp_path / "copy")
    assert_all_refuse(f"{tmp_path}/out,{tmp_path}/copy", parts[2], tmp_path / "copy", "part 3 of 8")
    shuffled = [parts[1], parts[0], *parts[2:]]
    assert_all_refuse(",".join(map(str, shuffled)), "2, 1, 3", parts[1])


def test_parts_of_two_builds_are_told_apart(tmp_path):
    inputs_in(tmp_path / "in")
    inputs_in(tmp_path / "more", num_files=5)
    variants = {
        "number of parts": {"part": "2/4"},
        "--tokenizer": {"tokenizer": AUSTEN},
        "--max_document_chars": {"tokenizer": AUSTEN, "max_document_chars": 7},
        "--prepend_bos": {"tokenizer": AUSTEN, "prepend_bos": True},
        "--text_field": {"text_field": "id", "on_bad_record": "skip"},
        "inputs": {},
    }
    build(tmp_path / "text", tmp_path / "in", part="1/3")
    build(tmp_path / "ids", tmp_path / "in", part="1/3", tokenizer=AUSTEN)
    for number, (words, options) in enumerate(variants.items()):
        other = tmp_path / str(number)
        build(other, tmp_path / ("more" if words == "inputs" else "in"), **{"part": "2/3"} | options)
        first = tmp_path / ("text" if words in ("number of parts", "--tokenizer", "--text_field", "inputs") else "ids")
        assert_all_refuse(f"{first},{other}", first / "part-00001-of-00003", other, f"differ in their {words}.")
    for number in (2, 3):  # both complete, of the same text
        build(tmp_path / "text", tmp_path / "in", part=f"{number}/3")
    for number in (1, 2):
        build(tmp_path / "two", tmp_path / "in", part=f"{number}/2")
    assert_all_refuse(f"{tmp_path}/text,{tmp_path}/two", "number of parts")
    for number in (1, 3):
        build(tmp_path / "5", tmp_path / "more", part=f"{number}/3")
    assert len(documents_of(f"{tmp_path}/5,{tmp_path}/two")) == 45  # two builds of two texts


def test_a_dataset_that_is_being_built_is_named(tmp_path):
    inputs_in(tmp_path / "in")
    build(tmp_path / "out", tmp_path / "in", part="1/2")
    later, whole = tmp_path / "out" / Part(2, 2).folder, tmp_path / "whole" / "web"
    for folder in (later, whole):
        (folder / ".building").mkdir(parents=True)
        (folder / ".building" / "shard-00000.array_record").write_bytes(b"")
    assert_all_refuse(tmp_path / "out", later, "not complete")
    assert_all_refuse(f"{tmp_path}/out/{Part(1, 2).folder},{later}", later, "not complete")
    build(tmp_path / "whole" / "done", tmp_path / "in" / "0.jsonl")
    assert_all_refuse(tmp_path / "whole", whole, "not complete")  # it was left out in silence


def test_facts_of_a_part_are_checked(tmp_path):
    inputs_in(tmp_path / "in")
    build(tmp_path / "out", tmp_path / "in", part="1/1")
    path = tmp_path / "out" / Part(1, 1).folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for damaged in ({"number": 0}, {"of": "1"}, {"inputs": None}, {"text_field": 1}):
        path.write_text(json.dumps(manifest | {"part": manifest["part"] | damaged}))
        with refused(path, f"part.{next(iter(damaged))}"):
            documents_of(tmp_path / "out")


@pytest.mark.slow
def test_parts_built_at_once_survive_a_kill_of_one(tmp_path):
    text = " ".join(f"word{i}" for i in range(30_000)) + "\n"
    for name in "abcd":
        (tmp_path / "in").mkdir(exist_ok=True)
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [name + text] * 8)

    def start(part, *python):
        words = ["build", tmp_path / "in", f"--out={tmp_path}/out", f"--tokenizer={AUSTEN}", "--shard_mb=1"]
        return subprocess.Popen([sys.executable, *python, *map(str, words), f"--part={part}/2", "--workers=1"])

    first, second = start(1, "-m", "hlat_jax.data"), start(2, "-c", jobs.KILLED_BUILD, "2")
    assert (first.wait(600), second.wait(600)) == (0, -signal.SIGKILL)
    unfinished = tmp_path / "out" / Part(2, 2).folder
    assert len(list(unfinished.glob(".building/*.array_record"))) == 2
    assert_all_refuse(tmp_path / "out", unfinished, "not complete")
    assert start(2, "-m", "hlat_jax.data").wait(600) == 0
    build(tmp_path / "whole", tmp_path / "in", tokenizer=AUSTEN)
    found, expected = documents_of(tmp_path / "out"), documents_of(tmp_path / "whole")
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
