"""Files, formats, manifests, and the message for each thing that can be wrong with them."""

import json
import os
import shlex
from codecs import BOM_UTF8

import fsspec
from data_files import (
    TEXTS,
    assert_unreadable,
    open_all,
    read_all,
    read_in_order,
    write_arrow,
    write_built,
    write_compressed,
    write_jsonl,
    write_parquet,
)
from refusals import assert_names, refused

from hlat_jax.data.formats.files import DataFile, NotFound, Snapshot, fingerprint
from hlat_jax.data.formats.records import BadRecord


def test_spec_keeps_the_order_of_files_folders_and_globs(tmp_path):
    folder = ["d/a.jsonl", "d/a/0.jsonl", "d/b.jsonl"]
    for name in ("z.jsonl", *reversed(folder), "d/.hidden/no.jsonl", "g1.jsonl", "g2.jsonl", "d-.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write_jsonl(tmp_path / name, [name])
    write_built(tmp_path / "d" / "built", ["one", "two"])
    (tmp_path / "d" / "figure.png").write_bytes(b"x")
    for spec, expected in (
        ("{0}/z.jsonl, {0}/d,{0}/g*.jsonl", ["z.jsonl", *folder, "one", "two", "g1.jsonl", "g2.jsonl"]),
        ("{0}/d*", [*folder, "one", "two", "d-.jsonl"]),
        ("{0}/d/**/*.jsonl", folder),
        ("{0}/d/../*d*/**", [*folder, "one", "two"]),
    ):
        assert read_all(spec.format(tmp_path)) == expected, spec
    assert_unreadable(f"{tmp_path}/none/z*", f"{tmp_path}/none/z*")


def test_links_to_folders_are_followed_once(tmp_path):
    """With two links to the folder that they are in there are 2**40 paths."""
    root, outside = tmp_path / "texts", tmp_path / "outside"
    for name in ("texts/a.jsonl", "texts/sub/b.jsonl", "outside/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    for name, target in (("back", root), ("sub/again", root), ("zalias", root / "sub"), ("linked", outside)):
        (root / name).symlink_to(target)
    assert read_all(root) == ["texts/a.jsonl", "outside/c.jsonl", "texts/sub/b.jsonl"]
    assert read_all(f"{root}/**/*.jsonl") == ["texts/a.jsonl", "texts/sub/b.jsonl"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    line = json.dumps({"text": "é one"}).encode()
    for name, raw in (("a.jsonl", line + b"\n" + line), ("b.txt", "é one".encode())):
        path = tmp_path / name
        path.write_bytes(BOM_UTF8 + raw)
        expected = ["é one"] * (1 + (name == "a.jsonl"))
        assert read_all(path) == expected
        packed = write_compressed(tmp_path / f"{name}.gz", BOM_UTF8 + raw)
        for file in (path, packed):
            assert [text for text, _ in read_in_order(file)] == expected
    (tmp_path / "b.txt").write_bytes(BOM_UTF8)
    assert_unreadable(tmp_path / "b.txt", "b.txt")


def test_manifest_depends_on_content_not_on_location(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    one = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    two = write_jsonl(tmp_path / "elsewhere" / "a.jsonl", TEXTS)
    manifests = [open_all(path).manifest for path in (one, two)]
    assert manifests[0] == manifests[1]
    json.dumps(manifests[0])
    write_jsonl(two, [*TEXTS[:-1], "lasz"])
    assert open_all(two).manifest["hash"] != manifests[0]["hash"]
    assert open_all(f"{one},{two}").manifest["hash"] != open_all(f"{two},{one}").manifest["hash"]


def test_fingerprint_of_a_long_file_covers_both_ends_and_size(tmp_path):
    path, prints = tmp_path / "a.txt", set()
    content = bytearray(b"a" * 5_000_000)
    for change in (None, 0, len(content) - 1):
        edited = bytearray(content)
        if change is not None:
            edited[change] = ord("b")
        path.write_bytes(edited)
        prints.add(fingerprint(path))
    path.write_bytes(content + b"a")
    assert len(prints | {fingerprint(path)}) == 4


def test_what_cannot_be_read_is_named_with_a_fix(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    for name in ("a.jsonl.xz", "a.parquet.gz", "a.csv", "noend", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for spec, *facts in (
        (tmp_path / "no.jsonl", tmp_path / "no.jsonl"),
        (tmp_path / "*.text", tmp_path / "*.text"),
        (" , ", "data.train"),
        (tmp_path / "empty", tmp_path / "empty", ".jsonl"),
        ("package:nothing.jsonl", "austen_train.jsonl"),
        (f"{path},{tmp_path}/a.j*l", path, "twice"),
        *((tmp_path / name, name) for name in ("a.jsonl.xz", "a.parquet.gz", "a.csv", "noend")),
        (tmp_path, "'.xz'"),  # a folder does not skip compressed text silently
        ("http://host/texts", "data build http://host/texts --out texts"),  # without a request
        ("s3://bucket/*.jsonl", "data build 's3://bucket/*.jsonl' --out dataset"),
    ):
        assert_unreadable(spec, *facts)
    with refused("nowhere://bucket/a.jsonl"):
        read_in_order("nowhere://bucket/a.jsonl")


def test_compressed_files_and_urls_are_read_only_in_order(tmp_path):
    memory, raw = fsspec.filesystem("memory"), write_jsonl(tmp_path / "b.jsonl", TEXTS).read_bytes()
    (tmp_path / "two words.jsonl.gz").write_bytes(write_compressed(tmp_path / "a.gz", raw).read_bytes())
    memory.store.clear()
    for path in (tmp_path / "b.jsonl", tmp_path / "two words.jsonl.gz"):
        memory.pipe(f"/bucket/in/{path.name}", path.read_bytes())
    memory.pipe("/bucket/in/c.arrow", write_arrow(tmp_path / "c.arrow", TEXTS).read_bytes())
    memory.pipe("/bucket/in/d.parquet", write_parquet(tmp_path / "d.parquet", TEXTS).read_bytes())
    memory.pipe("/bucket/in/figure.png", b"")
    for spec in (tmp_path / "two words.jsonl.gz", "memory://bucket/in/b.jsonl"):
        said = assert_unreadable(spec, "data build", text_field="my body")
        out = "two words" if "words" in str(spec) else "b"
        command = shlex.split(said[said.index("python -m hlat_jax.data") :])
        assert command[3:] == ["build", str(spec), "--out", out, "--text_field=my body"]
        assert [text for text, _ in read_in_order(spec)] == TEXTS
    for spec in ("memory://bucket/in", "memory://bucket/in/*.[jap][sra]*"):
        assert [text for text, _ in read_in_order(spec)] == TEXTS * 4
    with refused("none.jsonl", kind=NotFound):
        Snapshot(DataFile("memory://bucket/none.jsonl"))
    memory.pipe("/bucket/a.array_record", b"x")
    assert_unreadable("memory://bucket/a.array_record", "memory://bucket/a.array_record", "ArrayRecord")
    signed = DataFile("https://host/d/a.jsonl?signature=b/c.x")
    assert (signed.name, signed.suffix) == ("a.jsonl", ".jsonl")
    memory.store.clear()


def test_bad_jsonl_record_is_named_by_file_row_and_reason(tmp_path):
    many = json.dumps({f"{number:02d}{'k' * 60}": "x" for number in range(13)}).encode()
    digits = b'{"text": "a", "n": ' + b"9" * 5000 + b"}"
    lines = (
        (b'{"text": "cut of', "JSON"),
        (b'{"text": "\xff"}', "JSON", "0xff"),
        (b"[" * 100_000, "JSON"),
        (digits, "JSON"),
        (b'{"\\ud800": "x"}', "'text'", r"'\ud800'"),
        (many, "'text'", " 3 more"),
        (b'{"text": null}', "'text'", "null"),
        (b'{"text": 7}', "'text'", "int"),
        (b'{"text": ""}', "'text'"),
        (b'["text"]', "JSON"),
        (b'{"text": "\\ud83d"}', "'text'", "UTF-8"),
    )
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + b"\n".join(line for line, *_ in lines))
    documents = open_all(path)
    in_order = read_in_order(path)
    for number, (_, *facts) in enumerate(lines, start=1):
        place = f"{path}, row {number + 2}: "
        with refused(place, *facts, 'data.on_bad_record="skip"', kind=BadRecord) as caught:
            documents[number]
        message = str(caught.value)
        assert message.encode()
        assert (str(in_order[number][0]), in_order[number][1]) == (message, number + 2)


def test_same_size_rewrite_is_detected_but_touch_is_ignored(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    documents = open_all(path)
    os.utime(path, ns=(1, 1))
    assert documents[0] == TEXTS[0]
    path.write_bytes(path.read_bytes().replace(b"first", b"worst"))
    with refused(path):
        documents[0]


def test_an_edit_outside_the_fingerprint_is_seen_at_the_next_start(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 500_000] * 8)
    documents = open_all(path, index_folder=tmp_path / "index")
    before, raw, print_ = os.stat(path), bytearray(path.read_bytes()), fingerprint(path)
    raw[raw.index(b"a" * 1000, (len(raw) - 65536) // 15 + 70_000)] = ord("b")
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (fingerprint(path), os.stat(path).st_mtime_ns) == (print_, before.st_mtime_ns)
    again = open_all(path, index_folder=tmp_path / "index")
    assert again.manifest["hash"] != documents.manifest["hash"]  # which a run that has begun refuses


def test_empty_document_is_a_bad_record_but_whitespace_is_text(tmp_path):
    texts = ["a", "", " "]
    (tmp_path / "t").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "t" / f"{number}.txt").write_text(text)
    for path, place in (
        (write_parquet(tmp_path / "a.parquet", texts), "a.parquet, row 2"),
        (write_arrow(tmp_path / "a.arrow", texts), "a.arrow, row 2"),
        (write_built(tmp_path / "built", texts, num_shards=1), "array_record, row 2"),
        (tmp_path / "t", "t/1.txt"),
    ):
        documents = open_all(path)
        assert [documents[0], documents[2]] == ["a", " "]
        with refused(place, kind=BadRecord):
            documents[1]


def test_file_name_that_is_not_utf8_is_read_and_indexed(tmp_path):
    stem = os.fsdecode("caf\u00e9".encode("latin-1"))
    for suffix, write in ((".parquet", write_parquet), (".arrow", write_arrow), (".jsonl", write_jsonl)):
        path = write(tmp_path / f"plain{suffix}", ["one", "two"]).rename(tmp_path / f"{stem}{suffix}")
        for folder in (None, tmp_path / "index"):
            assert read_all(path, index_folder=folder) == ["one", "two"]


def test_files_of_unknown_suffixes_in_a_folder_are_counted(tmp_path):
    for name in ("b.json", "c.csv", "c2.csv", "book", ".hidden.csv", "_SUCCESS", ".git/config", "sub/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    counts = ("5 files", ".csv 3", ".json 1", "suffix 1")
    assert_unreadable(tmp_path, *counts)
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    assert_names(open_all(tmp_path).ignored, *counts)
    assert open_all(tmp_path / "a.jsonl").ignored == ""
