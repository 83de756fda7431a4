"""Files behind URLs: the same documents and the same manifest as of local ones, and what is missing by name."""

import fsspec
import pytest
from data_files import TEXTS, error_of, open_all, read_all, write_arrow, write_jsonl, write_parquet

from hlat_jax.data import sources
from hlat_jax.data.formats import arrow
from hlat_jax.data.formats.files import DataFile, NotFound, Unreadable


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def copied(memory, folder):
    for path in folder.iterdir():
        memory.pipe(f"/bucket/in/{path.name}", path.read_bytes())


def test_urls_give_the_same_documents_and_hash_as_local_files(tmp_path, memory):
    local = tmp_path / "in"
    local.mkdir()
    write_jsonl(local / "a.jsonl", TEXTS)
    write_parquet(local / "b.parquet", TEXTS)
    write_arrow(local / "c.arrow", TEXTS)
    write_arrow(local / "d.arrow", TEXTS, is_file=True, compression="zstd")
    (local / "e.txt").write_text("plain")
    (local / ".hidden.txt").write_text("no")
    (local / "figure.png").write_bytes(b"x")
    copied(memory, local)
    expected = sources.open_corpus(str(local), text_field="text", key="data.train")
    manifest = expected.manifest
    expected = [expected[index] for index in range(len(expected))]
    assert expected == [*TEXTS * 4, "plain"]
    for spec in ("memory://bucket/in", "memory://bucket/in/", f"file://{local}", f"local://{local}"):
        documents = sources.open_corpus(spec, text_field="text", key="data.train")
        remote = documents.manifest
        assert [documents[index] for index in range(len(documents))] == expected
        assert remote == manifest
    assert read_all("memory://bucket/in/*.jsonl,memory://bucket/in/e.txt") == [*TEXTS, "plain"]
    for _ in range(2):
        assert read_all("memory://bucket/in/a.jsonl", index_folder=tmp_path / "index") == TEXTS
    corpus = sources.open_corpus("memory://bucket/in", text_field="text", key="k")
    assert corpus.locate(8) == "memory:///bucket/in/b.parquet, row 2"


def test_url_that_cannot_be_read_says_what_is_missing(memory):
    assert "s3fs" in error_of("s3://bucket/a.jsonl")
    assert "Protocol not known: nowhere" in error_of("nowhere://bucket/a.jsonl")
    assert "memory://bucket/none.jsonl holds or matches no files" in error_of("memory://bucket/none.jsonl")
    assert "holds or matches no files" in error_of("memory://bucket/*.jsonl")
    memory.pipe("/bucket/a.array_record", b"x")
    assert "ArrayRecord is read from local disks only" in error_of("memory://bucket/a.array_record")
    memory.pipe("/bucket/b.jsonl.gz", b"x")
    assert "build memory:///bucket/b.jsonl.gz --out b" in error_of("memory://bucket/b.jsonl.gz")


def test_shrunk_remote_file_is_detected_by_a_short_read(memory):
    memory.pipe("/bucket/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    documents = open_all("memory://bucket/a.jsonl")
    memory.pipe("/bucket/a.jsonl", b'{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"memory:///bucket/a.jsonl ends 15 bytes before byte 31"):
        documents[1]


def test_glob_of_urls_searches_the_folders_it_matches(memory):
    for name in ("0", "en/a", "en/deep/b", "z/.no"):
        memory.pipe(f"/bucket/c/{name}.jsonl", b'{"text": "%s"}\n' % name.encode())
    for pattern in ("c/*", "c/**"):
        assert read_all(f"memory://bucket/{pattern}") == ["0", "en/a", "en/deep/b"]


def test_question_mark_in_a_url_is_not_a_glob(memory):
    memory.pipe("/bucket/a?b.jsonl", b'{"text": "one"}\n')
    memory.pipe("/bucket/axb.jsonl", b'{"text": "two"}\n')
    assert read_all("memory://bucket/a?b.jsonl") == ["one"]
    signed = DataFile("https://host/d/a.jsonl?signature=b/c.x", filesystem=memory)
    assert (signed.name, signed.suffix) == ("a.jsonl", ".jsonl")


class ClientError(Exception):
    """What a client library raises: no OSError."""


def test_client_library_error_names_the_file(tmp_path, memory, monkeypatch):
    def fail(*_, **__):
        raise ClientError("expired token")

    for name, write in (("a.jsonl", write_jsonl), ("a.parquet", write_parquet), ("a.arrow", write_arrow)):
        memory.pipe(f"/bucket/{name}", write(tmp_path / name, TEXTS).read_bytes())
        documents = open_all(f"memory://bucket/{name}")
        for method, error, read in (
            ("open" if name == "a.parquet" else "cat_file", Unreadable, lambda: documents[5]),  # noqa: B023
            ("open", Unreadable, lambda: read_all(f"memory://bucket/{name}")),  # noqa: B023
            ("info", NotFound, lambda: read_all(f"memory://bucket/{name}")),  # noqa: B023
        ):
            with monkeypatch.context() as patch:
                patch.setattr(type(memory), method, fail)
                with pytest.raises(error, match=rf"{name} .*ClientError: expired token"):
                    read()
    opened = type(memory).open

    def breaking(*args, **options):
        file = opened(*args, **options)
        file.read = file.readinto = fail
        return file

    monkeypatch.setattr(type(memory), "open", breaking)  # of the object, it would stay there: pytest sets it again
    for name in ("a.jsonl", "a.arrow"):  # pyarrow may read Parquet in other ways
        with pytest.raises(Unreadable, match=rf"{name} .*ClientError: expired token"):
            read_all(f"memory://bucket/{name}")


def test_a_batch_too_large_for_the_memory_is_refused_before_it_is_downloaded(tmp_path, memory, monkeypatch):
    memory.pipe("/bucket/a.arrow", write_arrow(tmp_path / "a.arrow", TEXTS, rows_in_batch=100).read_bytes())
    monkeypatch.setattr(arrow, "MAX_PART_BYTES", 3000)
    assert "are decoded to read any one document" in error_of("memory://bucket/a.arrow")
