"""Files of every format that the data path reads, for tests, and how they read back; datasets from their definition."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from hlat_jax.data import sources
from hlat_jax.data.formats.paths import find_files
from hlat_jax.data.formats.streaming import iter_documents

TEXTS = ["first", "zweiter Text: äöü 漢字 😀", "line one\nline two\r\n", " ", "x" * 3000, "last", "seventh"]


def write_jsonl(path, texts, *, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


def write_parquet(path, texts, *, field="text", rows_in_group=2):
    pyarrow.parquet.write_table(pyarrow.table({field: pyarrow.array(texts)}), path, row_group_size=rows_in_group)
    return path


def write_arrow(path, column, *, rows_in_batch=2, is_file=False, compression=None, field="text"):
    """Writes an Arrow stream, or file, with other columns around the text."""
    column = column if isinstance(column, pyarrow.Array) else pyarrow.array(column)
    others = pyarrow.array([[i] * (i % 3) for i in range(len(column))])
    table = pyarrow.table({"before": others, field: column, "after": pyarrow.array([None] * len(column), "int32")})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    new = pyarrow.ipc.new_file if is_file else pyarrow.ipc.new_stream
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_in_batch)
    return path


def write_compressed(path, raw):
    """Writes bytes as .gz, or as .zst, in two members as tools that work in parallel write them."""
    half = len(raw) // 2
    pack = gzip.compress if path.suffix == ".gz" else lambda part: pyarrow.Codec("zstd").compress(part).to_pybytes()
    path.write_bytes(pack(raw[:half]) + pack(raw[half:]))
    return path


def write_built(folder, documents, *, kind="text", num_shards=2, ids_in_record=10, width=2, **facts):
    """Writes a dataset of str, or of lists of ids; `facts` go into the manifest."""
    folder.mkdir(parents=True)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), num_shards)):
        shard = [documents[index] for index in part]
        path = folder / f"shard-{number:05d}-of-{num_shards:05d}.array_record"
        options = "group_size:1,zstd" if kind == "text" else "group_size:1,uncompressed"
        writer = array_record_module.ArrayRecordWriter(str(path), options)
        for record in [text.encode() for text in shard] if kind == "text" else _blocks(shard, ids_in_record, width):
            writer.write(record)
        writer.close()
        if kind == "tokens":
            first = np.cumsum([0] + [len(block) for block in _grouped(shard, ids_in_record)])[:-1].astype(np.int64)
            lengths = np.asarray([len(ids) for ids in shard], np.int32)
            arrays = {"first_document": first, "lengths": lengths, "bytes": 3 * lengths}
            np.savez(path.with_name(path.name.replace(".array_record", ".index.npz")), **arrays)
        num_tokens = sum(len(ids) for ids in shard) if kind == "tokens" else None
        shards.append({"name": path.name, "documents": len(shard), "bytes": 0, "tokens": num_tokens, "long": []})
    manifest = {"format": 2, "kind": kind, "documents": len(documents), "bytes": 0, "content_hash": "00"}
    manifest |= {"tokens": sum(s["tokens"] for s in shards) if kind == "tokens" else None}
    manifest |= dict.fromkeys(("tokenizer_sha256", "eos_id", "max_document_chars"))
    manifest |= {"vocab_size": 1 << 16 if kind == "tokens" else None}
    sources = [{"name": "one.txt", "documents": 1}, {"name": "rest.jsonl", "documents": len(documents) - 1}]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sources": sources, "shards": shards} | facts))
    return folder


def _grouped(documents, ids_in_record):
    blocks = []
    for ids in documents:
        if blocks and sum(map(len, blocks[-1])) + len(ids) <= ids_in_record:
            blocks[-1].append(ids)
        else:
            blocks.append([ids])
    return blocks


def _blocks(documents, ids_in_record, width):
    for block in _grouped(documents, ids_in_record):
        header = np.asarray([len(block), width, *map(len, block)], "<u4")
        yield header.tobytes() + np.asarray([i for ids in block for i in ids], f"<u{width}").tobytes()


def open_all(spec, *, text_field="text", **options):
    documents = sources.open_corpus(str(spec), text_field=text_field, key="data.train", **options)
    manifest = documents.manifest
    assert manifest["documents"] == len(documents)
    return documents


def read_all(spec, **options):
    documents = open_all(spec, **options)
    return [documents[index] for index in range(len(documents))]


def read_in_order(path, *, text_field="text"):
    """Yields (text or BadRecord, row) of the documents that a path names."""
    for file in find_files([str(path)], key="IN", in_order=True).files:
        yield from iter_documents(file, text_field=text_field)


def error_of(spec, **options):
    with pytest.raises(ValueError, match=r".") as caught:
        read_all(spec, **options)
    return str(caught.value)
