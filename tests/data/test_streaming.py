"""Documents in order: those of the readers by number, compressed files too, continuing after bad records."""

import gzip

import pytest
from data_files import read_in_order, write_arrow, write_built, write_compressed, write_jsonl, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names, refused

from hlat_jax.data import sources
from hlat_jax.data.formats import records, streaming
from hlat_jax.data.formats.records import BadRecord


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b" \r", b'{"text": "a"}', b'{"text": "%s"}' % (b"z" * 300), b"{}"]), max_size=30),
    st.booleans(),
    st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_jsonl_streaming_matches_random_access_for_any_chunk_size(tmp_path_factory, lines, ended, chunk_bytes):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b'{"text": "head"}\n' + b"\n".join(lines) + (b"\n" if ended else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_CHUNK_BYTES", chunk_bytes)
        found = read_in_order(path)
    corpus = sources.open_corpus(str(path), text_field="text", key="k")
    assert len(found) == len(corpus)
    for index, (text, row) in enumerate(found):
        if isinstance(text, BadRecord):
            with pytest.raises(BadRecord) as caught:
                corpus[index]
            assert str(caught.value) == str(text)
        else:
            assert text == corpus[index]
            assert corpus.locate(index).endswith(f"a.jsonl, row {row}")


def test_truncated_files_yield_complete_records_and_then_raise(tmp_path):
    texts = [f"document {i}" for i in range(500)]
    raw = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    for path, cut in (
        (write_compressed(tmp_path / "a.jsonl.gz", raw), 9),
        (write_compressed(tmp_path / "a.jsonl.zst", raw), 9),
        (write_arrow(tmp_path / "a.arrow", texts), 300),
        (write_parquet(tmp_path / "a.parquet", texts), 300),
    ):
        for content in (path.read_bytes()[:-cut], b"neither of these"):
            path.write_bytes(content)
            with refused(path) as caught:
                read_in_order(path)
            assert not isinstance(caught.value, BadRecord)
    ids = write_built(tmp_path / "ids", [[1, 2], [2]], kind="tokens")
    with refused(ids, "token ids"):
        read_in_order(ids)


def test_line_and_text_over_the_limit_are_bad_records(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1000)
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "x" * 5000, "b"])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 5000))
    for chunk_bytes in (64, 1 << 20):
        monkeypatch.setattr(streaming, "_CHUNK_BYTES", chunk_bytes)
        [first, (bad, row), last] = read_in_order(path)
        assert (first[0], row, last[0]) == ("a", 2, "b")
        assert_names(str(bad), path, "row 2", "1000 bytes")
        assert_names(str(read_in_order(tmp_path / "a.txt.gz")[0][0]), "a.txt.gz", "1000 bytes")
