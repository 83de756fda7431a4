"""Files of every format that the data path reads, for tests, and how they read back; datasets from their definition."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from array_record.python import array_record_module
from refusals import refused

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


def write_array_record(path, records, *, options="group_size:3,zstd"):
    writer = array_record_module.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def write_built(folder, documents, *, kind="text", num_shards=2, width=2, **facts):
    """Writes a dataset of str, or of lists of ids, about 10 in a record; `facts` go into the manifest."""
    folder.mkdir(parents=True)
    has_ids, shards = kind == "tokens", []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), num_shards)):
        shard, stem = [documents[index] for index in part], f"shard-{number:05d}-of-{num_shards:05d}"
        path, blocks = folder / f"{stem}.array_record", _grouped(shard) if has_ids else []
        records = [_block(block, width) for block in blocks] if has_ids else [text.encode() for text in shard]
        write_array_record(path, records, options=f"group_size:1,{'uncompressed' if has_ids else 'zstd'}")
        if has_ids:
            first = np.cumsum([0, *map(len, blocks)])[:-1].astype(np.int64)
            lengths = np.asarray([len(ids) for ids in shard], np.int32)
            np.savez(folder / f"{stem}.index.npz", first_document=first, lengths=lengths, bytes=3 * lengths)
        num_tokens = sum(map(len, shard)) if has_ids else None
        shards.append({"name": path.name, "documents": len(shard), "bytes": 0, "tokens": num_tokens, "long": []})
    manifest = {"format": 2, "kind": kind, "documents": len(documents), "bytes": 0, "content_hash": "00"}
    manifest |= dict.fromkeys(("tokens", "tokenizer_sha256", "eos_id", "max_document_chars", "vocab_size"))
    manifest |= {"tokens": sum(map(len, documents)), "vocab_size": 1 << 16} if has_ids else {}
    sources = [{"name": "one.txt", "documents": 1}, {"name": "rest.jsonl", "documents": len(documents) - 1}]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sources": sources, "shards": shards} | facts))
    return folder


def _grouped(documents):
    blocks = []
    for ids in documents:
        if blocks and sum(map(len, blocks[-1])) + len(ids) <= 10:
            blocks[-1].append(ids)
        else:
            blocks.append([ids])
    return blocks


def _block(documents, width):
    header = np.asarray([len(documents), width, *map(len, documents)], "<u4")
    return header.tobytes() + np.asarray([i for ids in documents for i in ids], f"<u{width}").tobytes()


def open_all(spec, *, text_field="text", **options):
    documents = sources.open_corpus(str(spec), text_field=text_field, key="data.train", **options)
    assert documents.manifest["documents"] == len(documents)
    return documents


def read_all(spec, **options):
    documents = open_all(spec, **options)
    return [documents[index] for index in range(len(documents))]


def read_in_order(path, *, text_field="text"):
    """Returns [(text or BadRecord, row)] of the documents that a path names."""
    files = find_files([str(path)], key="IN", in_order=True).files
    return [found for file in files for found in iter_documents(file, text_field=text_field)]


def assert_unreadable(spec, *facts, **options):
    """Asserts that what `spec` names is refused when it is opened or read, with an error that names each fact."""
    with refused(*facts) as caught:
        read_all(spec, **options)
    return str(caught.value)
