"""Arrow, Parquet's cache and built datasets: the documents they were given, and what is wrong by name."""

import itertools
import pathlib
import shutil

import numpy as np
import pyarrow
import pyarrow.ipc
from data_files import (
    TEXTS,
    assert_unreadable,
    open_all,
    read_all,
    read_in_order,
    write_array_record,
    write_arrow,
    write_built,
    write_jsonl,
    write_parquet,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from hlat_jax.data import sources
from hlat_jax.data.formats import built, columns
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.records import BadRecord

IDS = [[5, 6, 7, 2], [2], [9] * 30 + [2], [1, 2], [3, 2], [4, 4, 4, 4, 2], [2]]


def test_arrow_files_and_streams_round_trip_documents(tmp_path):
    order = [(index * 3) % len(TEXTS) for index in range(2 * len(TEXTS))]
    kinds = ("string", "large_string", "string_view")
    for is_file, compression, rows_in_batch, kind in itertools.product((False, True), (None, "zstd"), (3, 100), kinds):
        column = pyarrow.array(TEXTS, kind)
        options = {"is_file": is_file, "compression": compression, "rows_in_batch": rows_in_batch}
        documents = open_all(write_arrow(tmp_path / "a.arrow", column, **options))
        assert [documents[index] for index in order] == [TEXTS[index] for index in order], options


def test_arrow_takes_no_memory_or_is_refused_if_compressed(tmp_path, monkeypatch):
    path = write_arrow(tmp_path / "a.arrow", TEXTS, rows_in_batch=100)
    packed = write_arrow(tmp_path / "b.arrow", TEXTS, rows_in_batch=2, compression="zstd")
    monkeypatch.setattr(columns, "MAX_PART_BYTES", 1000)
    before = pyarrow.total_allocated_bytes()
    documents = columns.arrow_documents(Snapshot(DataFile(path)), field="text")
    assert documents[4] == TEXTS[4]
    assert pyarrow.total_allocated_bytes() - before < 1000
    assert_unreadable(packed, f"python -m hlat_jax.data build {packed} --out b")


def test_truncated_arrow_is_refused_at_every_cut(tmp_path):
    for is_file in (False, True):
        raw = write_arrow(tmp_path / "whole.arrow", TEXTS, is_file=is_file).read_bytes()
        for cut in (8, *range(1, len(raw), 97)):  # without 8 bytes a stream has no mark at its end
            path = tmp_path / "cut.arrow"
            path.write_bytes(raw[:-cut])
            assert_unreadable(path, path)
    path.write_bytes(raw[:8])
    assert_unreadable(path, path)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_damaged_arrow_metadata_never_crashes_the_process(tmp_path_factory, place, value):
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray(write_arrow(folder / "a.arrow", TEXTS, rows_in_batch=100).read_bytes())
    body = raw.index(b"first") - 400
    raw[place % body] = value
    (folder / "a.arrow").write_bytes(raw)
    message = ""
    try:
        read_all(folder / "a.arrow")
    except ValueError as error:
        message = str(error)
    assert not message or "a.arrow" in message


def test_arrow_offsets_outside_the_batch_are_damage(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", TEXTS, rows_in_batch=100)
    ends = np.cumsum([len(text.encode()) for text in TEXTS]).astype("<i4").tobytes()
    for damaged in (ends[:4] + b"\xff\xff\xff\x7f" + ends[8:], ends[:4] + b"\xff\xff\xff\xff" + ends[8:]):
        path.write_bytes(path.read_bytes().replace(ends, damaged))
        for read in (lambda: open_all(path)[1], lambda: read_in_order(path)):
            with refused("a.arrow", "offset") as caught:
                read()
            assert not isinstance(caught.value, BadRecord)
        ends = damaged


def test_bad_column_is_named_by_file_row_and_reason(tmp_path):
    invalid = pyarrow.array([b"good", b"x", b"\xff"]).view(pyarrow.string())
    for suffix, write in ((".arrow", write_arrow), (".parquet", write_parquet)):
        path = tmp_path / f"a{suffix}"
        for column, *facts in (
            (["a", "b", None], f"{path}, row 3", "'text'", "null"),
            (invalid, f"{path}, row 3", "'text'", "UTF-8"),
            ([1, 2], path, "'text'", "int64"),
        ):
            assert_unreadable(write(path, column), *facts)
        items = [item for item, _ in read_in_order(write(path, invalid))]
        assert [items[0], items[1], isinstance(items[2], BadRecord)] == ["good", "x", True]
        path = write(path, ["a"], field="body")
        assert_unreadable(path, path, "'text'", "body")
        with refused(path, "'text'"):
            read_in_order(path)
        path.write_bytes(b"neither of them")
        assert_unreadable(path, path)
    coded = write_arrow(tmp_path / "f.arrow", pyarrow.array(["a", "b", "a"]).dictionary_encode())
    assert read_all(coded) == ["a", "b", "a"]


def test_column_cache_respects_its_byte_limit(tmp_path):
    texts = [f"document {index:04d}" for index in range(60)]
    cache = columns.ColumnCache(max_bytes=500)
    paths = [write_parquet(tmp_path / f"{part}.parquet", texts, rows_in_group=5) for part in range(2)]
    parts = [columns.parquet_documents(Snapshot(DataFile(path)), field="text", cache=cache) for path in paths]
    for index in [(i * 17) % 60 for i in range(120)]:
        assert parts[index % 2][index] == texts[index]
        assert 0 < cache.num_bytes <= 500


def test_oversized_parquet_row_group_is_refused_and_built_in_order(tmp_path, monkeypatch):
    texts = ["x" * 600 + str(i) for i in range(9)]
    path = write_parquet(tmp_path / "a.parquet", texts, rows_in_group=3)
    monkeypatch.setattr(columns, "MAX_PART_BYTES", 100)
    assert [text for text, _ in read_in_order(path)] == texts
    assert_unreadable(path, "row group 1", "3.00 KiB", "100 B", f"python -m hlat_jax.data build {path} --out a")


def test_text_dataset_is_one_source_with_random_access(tmp_path):
    folder = write_built(tmp_path / "in" / "built", TEXTS, num_shards=3)
    write_jsonl(tmp_path / "in" / "a.jsonl", ["before"])
    write_jsonl(tmp_path / "in" / "c.jsonl", ["after"])
    documents = open_all(folder)
    order = [(index * 3) % len(TEXTS) for index in range(len(TEXTS))]
    assert [documents[index] for index in order] == [TEXTS[index] for index in order]
    assert read_all(tmp_path / "in") == ["before", *TEXTS, "after"]
    assert read_all(f"{tmp_path}/in/buil*") == TEXTS
    (folder / "notes").mkdir()
    write_jsonl(folder / "notes" / "b.jsonl", ["no document of this dataset"])
    assert read_all(tmp_path / "in") == ["before", *TEXTS, "after"]
    corpus = sources.open_corpus(str(folder), text_field="other", key="data.train")
    assert corpus.locate(0) == f"{folder}, document 1 (document 1 of one.txt)"
    assert corpus.locate(6) == f"{folder}, document 7 (document 6 of rest.jsonl)"


def test_dataset_of_ids_gives_each_document_its_length_and_its_bytes(tmp_path):
    facts = {"tokenizer_sha256": "ab" * 32, "vocab_size": 10, "eos_id": 2, "max_document_chars": 100}
    for width, num_shards in itertools.product((2, 4), (1, 3)):
        folder = tmp_path / f"ids-{width}-{num_shards}"
        write_built(folder, IDS, kind="tokens", width=width, num_shards=num_shards, **facts)
        documents = open_all(folder, tokenizer_sha256="ab" * 32)
        for index in (3, 0, 6, 2, 1, 5, 4):
            assert documents[index].dtype == np.int32
            assert documents[index].tolist() == IDS[index]
            assert documents.text_bytes(index) == 3 * len(IDS[index])
        assert documents.manifest["files"][0].items() >= (facts | {"kind": "tokens", "tokens": 46}).items()


def test_ids_of_another_tokenizer_or_vocabulary_are_refused(tmp_path):
    folder = write_built(tmp_path / "ids", IDS, kind="tokens", tokenizer_sha256="ab" * 32, vocab_size=9)
    assert_unreadable(folder, folder, "id 9 ", "9 tokens")
    marked = write_built(tmp_path / "marked", [[3, ~4 % 2**32]], kind="tokens", width=4, vocab_size=9)
    assert_unreadable(marked, marked, "id 4294967291 ", "9 tokens")
    facts = ("abababababab…", "data.tokenizer", "cdcdcdcdcdcd…", "--tokenizer MODEL")
    assert_unreadable(folder, *facts, tokenizer_sha256="cd" * 32)


def test_incomplete_or_damaged_dataset_is_refused_by_name(tmp_path):
    shard, index = "shard-00001-of-00002.array_record", "shard-00000-of-00002.index.npz"

    def save_index(*first):
        arrays = {"first_document": np.asarray(first), "lengths": np.asarray([1, 2, 3])}
        return lambda path: np.savez(path, **arrays)

    for number, (kind, name, change, *facts) in enumerate([
        ("text", shard, pathlib.Path.unlink),
        ("text", shard, lambda path: path.write_bytes(path.read_bytes()[:-50]), "0 records", "of 3"),
        ("tokens", index, pathlib.Path.unlink),
        ("tokens", index, lambda path: path.write_bytes(b"x")),
        ("tokens", index, save_index(0, 1, 2, 3), "3 records", "of 4"),
        ("tokens", index, save_index(0, 2, 1)),
    ]):  # fmt: skip
        folder = write_built(tmp_path / str(number), IDS if kind == "tokens" else TEXTS, kind=kind)
        change(folder / name)
        assert_unreadable(folder, folder, name.partition(".")[0], *facts)
    unfinished = write_built(tmp_path / "unfinished", TEXTS)
    (unfinished / "manifest.json").unlink()
    assert_unreadable(unfinished / shard, unfinished / shard)


def test_damaged_manifest_is_refused_by_name(tmp_path):
    for kind in ("text", "tokens"):
        path = write_built(tmp_path / kind / "x", IDS if kind == "tokens" else TEXTS, kind=kind) / "manifest.json"
        whole = path.read_text()
        for shard in path.parent.glob("shard*"):
            shutil.copy(shard, tmp_path / kind)  # a name must not lead out to it
        for before, after, *facts in (
            ("documents", "d", "documents "),
            ('"documents": 7', '"documents": -7', "documents=-7"),
            ('"documents": 4', '"documents": 5', "documents"),
            ('"name": "one.txt"', '"name": 1', "name=1"),
            ('"name": "shard', '"name": "../shard', "../shard"),
            ('"format": 2', '"format": 3', "format 2"),
            ('"eos_id": null, ', "", "eos_id"),
            *([('"vocab_size": 65536', '"vocab_size": null', "tokens")] if kind == "tokens" else []),
        ):
            assert before in whole
            path.write_text(whole.replace(before, after))
            assert_unreadable(path.parent, path, *facts)
        for content in (b"[" * 100_000, b"[]", b'{"shards": {}}', b"\xff"):
            path.write_bytes(content)
            with refused(path):
                built.read_manifest(path.parent)


def test_damaged_shard_is_named_and_never_skipped(tmp_path):
    ids = [[7] * 50_000 + [2], [8] * 50_000 + [2]]
    folder = write_built(tmp_path / "ids", ids, kind="tokens", num_shards=1)
    shard = folder / "shard-00000-of-00001.array_record"
    raw = bytearray(shard.read_bytes())
    raw[150_000] ^= 255
    shard.write_bytes(raw)
    documents = open_all(folder)
    with refused(shard.name, "record 2") as caught:
        documents[1]
    assert not isinstance(caught.value, BadRecord)
    raw[150_000] ^= 255
    shard.write_bytes(raw + b"x")
    with refused(shard):
        documents[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), min_size=1, max_size=6), st.data())
def test_block_round_trips_and_damaged_headers_are_refused(documents, data):
    header = np.asarray([len(documents), 2, *map(len, documents)], "<u4")
    block = header.tobytes() + np.concatenate(documents).astype("<u2").tobytes()
    options = {"num_documents": len(documents), "where": "here"}
    for number, ids in enumerate(documents):
        assert built.block_tokens(block, number, **options).tolist() == ids
    cut = data.draw(st.integers(1, len(block)))
    with refused("here"):
        built.block_tokens(block[:-cut], 0, **options)
    with refused("here"):
        built.block_tokens(block, 0, num_documents=len(documents) + 1, where="here")


def test_foreign_manifest_json_does_not_hide_sibling_files(tmp_path):
    for text in ('{"name": "web app"}', "[1]", "{broken", '{"shards": [], "kind": "photos"}'):
        (tmp_path / "manifest.json").write_text(text)
        write_jsonl(tmp_path / "a.jsonl", ["x"])
        assert read_all(tmp_path) == ["x"]


def test_foreign_array_record_has_one_text_per_record(tmp_path):
    path = write_array_record(tmp_path / "texts.array_record", [text.encode() for text in TEXTS])
    corpus = sources.open_corpus(str(tmp_path), text_field="any", key="data.train")
    assert [corpus[index] for index in (*range(len(TEXTS)), 2)] == [*TEXTS, TEXTS[2]]
    assert corpus.locate(3) == f"{path}, row 4"
    assert read_in_order(path, text_field="any") == [(text, i + 1) for i, text in enumerate(TEXTS)]
    assert corpus.manifest["files"][0]["kind"] == "array_record"


def test_damaged_or_non_text_array_record_is_named(tmp_path):
    path = write_array_record(tmp_path / "texts.array_record", [b"good", b"\xff", b""])
    corpus = sources.open_corpus(str(path), text_field="any", key="data.train")
    for index, row in ((1, "row 2"), (2, "row 3")):
        with refused(f"{path}, {row}", kind=BadRecord):
            corpus[index]
    path.write_bytes(path.read_bytes()[:-100])
    assert_unreadable(path, path)
    shard = path.rename(tmp_path / "shard-00000-of-00001.array_record")
    assert_unreadable(shard, shard)
