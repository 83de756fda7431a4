"""Files, formats, manifests, and the message for each thing that can be wrong with them."""

import json
import os
import shlex
import shutil
from codecs import BOM_UTF8

import pyarrow
import pyarrow.parquet
import pytest
from data_files import (
    TEXTS,
    error_of,
    open_all,
    read_all,
    read_in_order,
    write_arrow,
    write_built,
    write_compressed,
    write_jsonl,
    write_parquet,
)

from hlat_jax.cli.config_files import exists
from hlat_jax.data.formats.files import Unreadable, fingerprint
from hlat_jax.data.formats.records import BadRecord


def test_text_field_selects_the_json_key_or_column(tmp_path):
    for suffix, write in ((".jsonl", write_jsonl), (".parquet", write_parquet), (".arrow", write_arrow)):
        assert read_all(write(tmp_path / f"a{suffix}", ["x"], field="body"), text_field="body") == ["x"]


def test_spec_keeps_the_order_of_files_folders_and_globs(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / ".hidden").mkdir()
    for name in ("z.jsonl", "d/b.jsonl", "d/a.jsonl", "d/sub/0.jsonl", "d/.hidden/no.jsonl", "g1.jsonl", "g2.jsonl"):
        write_jsonl(tmp_path / name, [name])
    (tmp_path / "d" / "figure.png").write_bytes(b"x")
    read = read_all(f"{tmp_path}/z.jsonl, {tmp_path}/d,{tmp_path}/g*.jsonl")
    assert read == ["z.jsonl", "d/a.jsonl", "d/b.jsonl", "d/sub/0.jsonl", "g1.jsonl", "g2.jsonl"]


def test_glob_searches_the_folders_it_matches(tmp_path):
    for name in ("c/0.jsonl", "c/en/a.jsonl", "c/en/deep/b.jsonl", "c/z/.no.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    write_built(tmp_path / "c" / "built", ["one", "two"])
    expected = ["c/0.jsonl", "one", "two", "c/en/a.jsonl", "c/en/deep/b.jsonl"]
    for pattern in ("c/*", "c/**/*"):
        assert read_all(f"{tmp_path}/{pattern}") == expected
    assert "matches no file" in error_of(f"{tmp_path}/c/z*")


def test_links_that_lead_back_are_not_followed_again(tmp_path):
    """With two links to the folder that they are in there are 2**40 paths."""
    root, outside = tmp_path / "texts", tmp_path / "outside"
    for name in ("texts/a.jsonl", "texts/sub/b.jsonl", "outside/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    for name, target in (("back", root), ("sub/again", root), ("alias", root / "sub"), ("linked", outside)):
        (root / name).symlink_to(target)
    found = ["texts/a.jsonl", "outside/c.jsonl", "texts/sub/b.jsonl"]
    assert read_all(root) == found
    assert sorted(read_all(f"{root}/**/*.jsonl")) == sorted(found)
    assert sorted(read_all(f"{tmp_path}/t*/**")) == sorted(found)
    assert exists(f"{root}/**/none.jsonl")  # looks no further than the folder
    assert exists(f"{root}/part**.jsonl")
    assert "matches no file" in error_of(f"{root}/**/none.jsonl")
    for spec in (root, f"{root}/**/*.jsonl"):
        ignored = open_all(spec).ignored
        assert ignored == f"each folder is searched once: {root}/sub/again and 2 more lead to one that was searched"


def test_a_byte_order_mark_is_no_text(tmp_path):
    line = json.dumps({"text": "é one"}).encode()
    for name, raw in (("a.jsonl", line + b"\n" + line), ("b.txt", "é one".encode()), ("c.md", "é one".encode())):
        path = tmp_path / name
        path.write_bytes(BOM_UTF8 + raw)
        expected = ["é one"] * (1 + (name == "a.jsonl"))
        assert read_all(path) == expected
        packed = write_compressed(tmp_path / f"{name}.gz", BOM_UTF8 + raw)
        for file in (path, packed):
            assert [text for text, _ in read_in_order(file)] == expected
    (tmp_path / "b.txt").write_bytes(BOM_UTF8)
    assert "it is empty" in error_of(tmp_path / "b.txt")


def test_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "d" / "closed").mkdir(parents=True)
    write_jsonl(tmp_path / "d" / "a.jsonl", ["a"])
    scan = os.scandir

    def closed(path):  # root may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert f"the folder {tmp_path}/d/closed cannot be listed: Permission denied" in error_of(tmp_path / "d")


def test_package_text_is_found_and_its_split_is_disjoint():
    train, validation = read_all("package:austen_train.jsonl"), read_all("package:austen_validation.jsonl")
    assert (len(train), len(validation)) == (257, 13)
    assert not set(train) & set(validation)


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


def test_missing_files_are_named(tmp_path):
    assert "does not exist" in error_of(tmp_path / "no.jsonl")
    assert "matches no file" in error_of(tmp_path / "*.jsonl")
    assert "names no files" in error_of(" , ")
    assert ".parquet" in error_of(tmp_path)
    assert "austen_train.jsonl" in error_of("package:nothing.jsonl")


def test_compressed_and_unknown_files_are_refused_with_a_fix(tmp_path):
    for name in ("a.jsonl.gz", "a.txt.zst", "two words.jsonl.gz"):
        (tmp_path / name).write_bytes(b"x")
        command = error_of(tmp_path / name, text_field="my body").split("train on that: ")[1]
        out = name.partition(".")[0]
        words = ["build", f"{tmp_path}/{name}", "--out", out, "--text_field=my body"]
        assert shlex.split(command)[3:] == words
    for name in ("a.jsonl.xz", "a.parquet.gz", "a.csv", "noend", "one book.json"):
        (tmp_path / name).write_bytes(b"x")
        assert f"{name} has the suffix" in error_of(tmp_path / name)
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    assert "a.jsonl.gz is compressed" in error_of(tmp_path)  # a folder does not skip text silently


def test_file_named_twice_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    assert "twice" in error_of(f"{path},{tmp_path}/*.jsonl")


def test_bad_jsonl_record_is_named_by_file_row_and_reason(tmp_path):
    many = json.dumps({f"{number:02d}{'k' * 60}": "x" for number in range(13)}).encode()
    digits = b'{"text": "a", "n": ' + b"9" * 5000 + b"}"
    lines = (
        (b'{"text": "cut of', "it is not JSON in UTF-8: Unterminated string"),
        (b"{'text': 'quotes'}", "it is not JSON in UTF-8: Expecting property name"),
        (b'{"text": "\xff"}', "it is not JSON in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "it is not JSON in UTF-8: maximum recursion depth"),
        (digits, "it is not JSON in UTF-8: Exceeds the limit"),
        (b'{"body": "x", "id": 1}', "no key 'text'; its keys are 'body', 'id'."),
        (b'{"\\ud800": "x"}', r"no key 'text'; its keys are '\ud800'."),
        (many, " and 3 more."),
        (b'{"text": null}', "'text' is null"),
        (b'{"text": 7}', "'text' is int, not text"),
        (b'["text"]', "not a JSON object"),
        (b'{"text": "\\ud83d"}', "'text' is invalid UTF-8"),
    )
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + b"\n".join(line for line, _ in lines))
    documents = open_all(path)
    in_order = list(read_in_order(path))
    for number, (_, reason) in enumerate(lines, start=1):
        with pytest.raises(BadRecord) as caught:
            documents[number]
        message = str(caught.value)
        assert f"{path}, row {number + 2}: " in message
        assert reason in message
        assert 'data.on_bad_record="skip"' in message
        assert message.encode()
        assert (str(in_order[number][0]), in_order[number][1]) == (message, number + 2)


def test_file_resized_or_removed_during_a_run_is_detected(tmp_path):
    """A removed one may come back: launch/restart.sh tries that again, and not what has changed."""
    for name, write in (
        ("a.jsonl", write_jsonl),
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow),
        ("a.txt", lambda path, texts: path.write_text(texts[0])),
    ):
        path = tmp_path / name
        for change in (["fi", "xy"], [TEXTS[0] + "more", "more"], None):
            write(path, TEXTS)
            documents = open_all(path)
            path.unlink() if change is None else write(path, change)
            error = Unreadable if change is None else ValueError
            for _ in range(2):
                with pytest.raises(error, match=r"cannot be read any more|changed its size") as caught:
                    documents[0]
                assert not isinstance(caught.value, BadRecord)  # never skipped


def test_same_size_rewrite_is_detected_but_touch_is_ignored(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    documents = open_all(path)
    os.utime(path, ns=(1, 1))
    assert documents[0] == TEXTS[0]
    path.write_bytes(path.read_bytes().replace(b"first", b"worst"))
    with pytest.raises(ValueError, match="changed its content"):
        documents[0]


def edit_outside_fingerprint(path):
    """Changes a letter of a long file where no block of its fingerprint is, and sets its time of writing back."""
    before, raw = os.stat(path), bytearray(path.read_bytes())
    print_ = fingerprint(path)
    place = raw.index(b"a" * 1000, (len(raw) - 65536) // 15 + 70_000)
    raw[place] = ord("b")
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (fingerprint(path), os.stat(path).st_mtime_ns) == (print_, before.st_mtime_ns)


def test_jsonl_edit_outside_the_fingerprint_with_mtime_restored_is_detected(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 500_000] * 8)
    documents = open_all(path, index_folder=tmp_path / "index")
    os.chmod(path, 0o600)
    assert documents[7] == "a" * 500_000
    edit_outside_fingerprint(path)
    with pytest.raises(ValueError, match="changed its content"):
        documents[7]
    again = open_all(path, index_folder=tmp_path / "index")
    assert again.manifest["hash"] != documents.manifest["hash"]  # which a run that has begun refuses


@pytest.mark.parametrize("name", ["a.parquet", "a.txt", "built"])
def test_same_size_edit_of_a_long_file_is_refused_unless_checksummed(tmp_path, name):
    path = changed = tmp_path / name
    if name == "built":
        changed = write_built(path, ["a" * 500_000, *(os.urandom(600_000).hex() for _ in range(3))], num_shards=1)
        changed = changed / "shard-00000-of-00001.array_record"
    elif name == "a.txt":
        path.write_bytes(b"a" * 4_000_000)
    else:
        table = pyarrow.table({"text": [os.urandom(500_000).hex() for _ in range(4)]})
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    assert os.stat(changed).st_size > 1 << 20
    documents = open_all(path)
    first = documents[0]
    os.chmod(changed, 0o600)
    assert documents[0] == first
    os.utime(changed, ns=(1, 1))
    if name == "built":
        assert documents[0] == first
        return
    with pytest.raises(
        ValueError,
        match=r"\(or was rewritten with the same size, so that its content cannot be compared\) since it was opened",
    ):
        documents[0]


def test_locate_names_file_and_row_without_reading_a_document(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "x"}\n\n \n{"text": "y"}\n\n')
    write_parquet(tmp_path / "b.parquet", ["p", "q", "r"])
    (tmp_path / "c.txt").write_bytes(b"t")
    (tmp_path / "d.txt").write_bytes(b"u")
    corpus = open_all(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    rows = ["a.jsonl, row 2", "a.jsonl, row 5", *(f"b.parquet, row {n}" for n in (1, 2, 3)), "c.txt", "d.txt"]
    assert [corpus.locate(index) for index in range(7)] == [f"{tmp_path}/{row}" for row in rows]
    assert corpus.token_lengths() is None
    with pytest.raises(IndexError):
        corpus.locate(7)


def test_no_documents_and_only_empty_documents_are_refused(tmp_path):
    for content in (b"", b"\n \n"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        assert "hold no documents" in error_of(tmp_path / "empty.jsonl")
    message = error_of(write_jsonl(tmp_path / "a.jsonl", [""] * 3))
    assert "of 3 documents, none can be read. The first error: " in message
    assert "a.jsonl, row 1: 'text' is empty" in message


def test_empty_document_is_a_bad_record_but_whitespace_is_text(tmp_path):
    texts = ["a", "", " "]
    (tmp_path / "t").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "t" / f"{number}.txt").write_text(text)
    for path, place in (
        (write_jsonl(tmp_path / "a.jsonl", texts), "a.jsonl, row 2: 'text' is empty."),
        (write_parquet(tmp_path / "a.parquet", texts), "a.parquet, row 2: 'text' is empty."),
        (write_arrow(tmp_path / "a.arrow", texts), "a.arrow, row 2: 'text' is empty."),
        (write_built(tmp_path / "built", texts, num_shards=1), "array_record, row 2: it is empty."),
        (tmp_path / "t", "t/1.txt: it is empty."),
    ):
        documents = open_all(path)
        assert [documents[0], documents[2]] == ["a", " "]
        with pytest.raises(BadRecord) as caught:
            documents[1]
        assert place in str(caught.value)
        assert 'data.on_bad_record="skip"' in str(caught.value)


def test_file_name_that_is_not_utf8_is_read_and_indexed(tmp_path):
    name = os.fsdecode("caf\u00e9.jsonl".encode("latin-1"))
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    for folder in (None, tmp_path / "index"):
        corpus = open_all(tmp_path, index_folder=folder)
        assert [corpus[index] for index in range(2)] == ["one", "two"]
    for suffix, write in ((".parquet", write_parquet), (".arrow", write_arrow)):
        (tmp_path / "other").mkdir()
        write(tmp_path / f"other/plain{suffix}", ["one", "two"]).rename(tmp_path / "other" / f"{name}{suffix}")
        assert read_all(tmp_path / "other") == ["one", "two"]
        shutil.rmtree(tmp_path / "other")
    (tmp_path / name).rename(tmp_path / "plain.jsonl")
    (tmp_path / "index").rename(tmp_path / ".index")
    again = open_all(tmp_path)
    assert again.manifest["hash"] == corpus.manifest["hash"]


def test_files_of_unknown_suffixes_in_a_folder_are_counted(tmp_path):
    for name in ("b.json", "c.csv", "c2.csv", "book", ".hidden.csv", "_SUCCESS", ".git/config", "sub/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert "(ignored 5 files: .csv 3, .json 1, no suffix 1)" in error_of(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    corpus = open_all(tmp_path)
    assert corpus.ignored == "ignored 5 files: .csv 3, .json 1, no suffix 1"
    assert open_all(tmp_path / "a.jsonl").ignored == ""


def test_dataset_next_to_its_own_source_text_is_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    write_built(tmp_path / "built", ["one"], num_shards=1)
    manifest = json.loads((tmp_path / "built/manifest.json").read_text())
    assert read_all(tmp_path) == ["one", "one"]  # built from another file
    manifest["sources"][0]["name"] = "a.jsonl"
    (tmp_path / "built/manifest.json").write_text(json.dumps(manifest))
    for spec in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/a.jsonl,{tmp_path}/built"):
        assert f"names the dataset {tmp_path}/built and {tmp_path}/a.jsonl, from which" in error_of(spec)
    assert read_all(tmp_path / "built") == ["one"]
