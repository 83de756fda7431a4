"""Reads the files of a config as one sequence of documents by number, with the manifest that identifies it.

A document is a text, or token ids if a dataset stores them. Files are read in place, not copied.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hlat_jax.config import count_text
from hlat_jax.data.formats import records
from hlat_jax.data.formats.array_record import array_record_documents
from hlat_jax.data.formats.built import open_built
from hlat_jax.data.formats.columns import ColumnCache, arrow_documents, parquet_documents
from hlat_jax.data.formats.files import DataFile, Snapshot
from hlat_jax.data.formats.jsonl import jsonl_documents
from hlat_jax.data.formats.paths import file_format, find_files
from hlat_jax.data.formats.plain_text import text_documents
from hlat_jax.data.formats.token_files import megatron_documents, npy_documents
from hlat_jax.data.order import evenly_spaced, evenly_spread
from hlat_jax.data.tokenizer import Tokenizer

_SAMPLE_DOCUMENTS, _SAMPLE_CHARS = 16, 1 << 14
_MANY_UNKNOWN = 0.01
MAX_HELD_OUT = 256  # documents held out of each source: about a megabyte of text that was cut at paragraphs


class Corpus:
    """The documents of several files and datasets in one sequence, str, or int32[n] if token ids are stored.

    A str is `records.Answered` if only the answers are trained on.

    Attributes:
      ignored: a description of the files in its folders that are not read, see paths.FoundFiles.
      has_text: whether it has plain-text files, which can be cut at paragraphs.
      is_cut: whether the plain-text files are cut.
      num_held_out: the number of documents that `split` holds out.
    """

    def __init__(self, parts: Sequence[records.Documents], manifest: dict[str, Any], *, ignored: str, is_cut: bool):
        self._parts, self.manifest, self.ignored = list(parts), manifest, ignored
        self._starts = records.starts(len(part) for part in self._parts)
        self.has_text, self.is_cut = "text" in {entry["kind"] for entry in manifest["files"]}, is_cut
        self._held_out, self._is_held_out = np.zeros(0, np.int64), False

    def split(self, *, share: float, held_out: bool) -> Corpus:
        """Returns the evenly spaced documents that are held out, about `share` of all, or the others."""
        total, count = len(self), num_held_out(len(self), share=share)
        num_documents = count if held_out else total - count
        digest = _digest([self.manifest["hash"], total, count, held_out])
        part = copy.copy(self)
        part.manifest = self.manifest | {"documents": num_documents, "hash": digest}
        part._held_out, part._is_held_out = np.asarray(evenly_spaced(total, count)), held_out
        return part

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    def __len__(self) -> int:
        return self.manifest["documents"]

    def __getitem__(self, index: int) -> str | np.ndarray:
        part, document = self._place(index)
        return self._parts[part][document]

    def locate(self, index: int) -> str:
        """Returns the file and row of a document without reading it, as in 'books/a.jsonl, row 17'."""
        part, document = self._place(index)
        return self._parts[part].locate(document)

    def text_bytes(self, index: int) -> int:
        """Returns the UTF-8 bytes of the text of a document of token ids."""
        part, document = self._place(index)
        return self._parts[part].text_bytes(document)

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the part that holds a document, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        if self._is_held_out:
            return records.find_part(self._starts, self._held_out[index])
        # document n has n - i training documents before it if it is held-out document i
        before = self._held_out - np.arange(len(self._held_out))
        return records.find_part(self._starts, index + int(np.searchsorted(before, index, side="right")))


def num_held_out(total: int, *, share: float) -> int:
    """Returns the number of held-out documents, which is `share` of `total`, at least 1 and at most MAX_HELD_OUT."""
    return min(max(1, round(share * total)), MAX_HELD_OUT)


def _digest(fields: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


def open_corpus(
    spec: str,
    *,
    text_field: str,
    key: str,
    index_folder: pathlib.Path | None = None,
    tokenizer_sha256: str | None = None,
    cut_text: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Returns the documents that `spec` names, by number, with their manifest.

    A document is a str, or int32[n] if a dataset stores token ids, which packing.document_tokens made, with EOS.

    The manifest identifies the documents, independent of their location. It has an entry for each file, dataset and run
    of plain-text files. Two manifests with the same `hash` have the same documents under the same numbers. The
    fingerprint of JSONL covers every byte, and the fingerprint of a dataset its content. For other files over 1 MiB it
    covers the size and 16 blocks of 64 KiB.

    Args:
      spec: paths separated by commas.
      text_field: the key or column of the text.
      key: the config path of `spec`, for errors.
      index_folder: a folder that keeps the indices of JSONL files between runs.
      tokenizer_sha256: the tokenizer that must have made stored ids, by default any.
      cut_text: whether plain-text files are cut into documents at paragraphs.
      tokenizer: the tokenizer of files of token ids, which need one.
    """
    searched = find_files(spec, key=key, text_field=text_field)
    open_file = functools.partial(
        _open_file,
        key=key,
        text_field=text_field,
        index_folder=index_folder,
        tokenizer=tokenizer,
        tokenizer_sha256=tokenizer_sha256,
        cache=ColumnCache(),
    )
    opened: list[tuple[str, list[DataFile], records.Documents]] = []
    for kind, group in itertools.groupby(searched.files, key=file_format):
        if kind == "text":
            texts = list(group)
            opened.append((kind, texts, text_documents(texts, cut=cut_text)))
        else:
            opened += [(kind, [file], open_file(kind, file)) for file in group]
    entries = [_manifest_entry(*each) for each in opened]
    num_documents = sum(entry["documents"] for entry in entries)
    if num_documents == 0:
        raise ValueError(f"{key}={spec!r} has no documents in {count_text(len(entries), 'file')}.")
    digest = _digest([text_field] + [[entry[k] for k in ("bytes", "documents", "fingerprint")] for entry in entries])
    manifest = {"files": entries, "documents": num_documents, "text_field": text_field, "hash": digest}
    return Corpus([part for *_, part in opened], manifest, ignored=searched.describe_ignored(), is_cut=cut_text)


def _open_file(
    kind: str,
    file: DataFile,
    *,
    key: str,
    text_field: str,
    index_folder: pathlib.Path | None,
    tokenizer: Tokenizer | None,
    tokenizer_sha256: str | None,
    cache: ColumnCache,
) -> records.Documents:
    """Returns the documents of one file, or one dataset, by number; see `open_corpus`."""
    if kind == "built":
        return open_built(file, key=key, tokenizer_sha256=tokenizer_sha256)
    if kind in ("megatron", "npy") and tokenizer is None:
        raise ValueError(f"{key}: {file} holds token ids. Give text, as its bytes are counted.")
    snapshot = Snapshot(file)
    match kind:
        case "array_record":
            return array_record_documents(snapshot)
        case "jsonl":
            return jsonl_documents(snapshot, field=text_field, index_folder=index_folder)
        case "arrow":
            return arrow_documents(snapshot, field=text_field)
        case "parquet":
            return parquet_documents(snapshot, field=text_field, cache=cache)
        case "megatron":
            return megatron_documents(snapshot, tokenizer=tokenizer)
        case _:
            return npy_documents(snapshot, tokenizer=tokenizer)


def unknown_share(documents: Sequence[str | np.ndarray], tokenizer: Tokenizer) -> float:
    """Returns the share of unknown tokens in a sample of documents of text or token ids, 0 without documents."""
    if tokenizer.unk_id < 0:
        return 0.0
    num_unknown = num_tokens = 0
    for index in itertools.islice(evenly_spread(len(documents)), _SAMPLE_DOCUMENTS):
        try:
            document = documents[index][:_SAMPLE_CHARS]
        except (ValueError, OSError):  # raised in training, or skipped
            continue
        ids = tokenizer.encode(document) if isinstance(document, str) else document
        num_unknown += np.count_nonzero(ids == tokenizer.unk_id)
        num_tokens += len(ids)
    return num_unknown / max(num_tokens, 1)


def many_unknown(name: str, share: float) -> str:
    """Returns the warning about a share of unknown tokens in a source of text, or "" if there are few."""
    if share <= _MANY_UNKNOWN:
        return ""
    return (
        f"warning: <unk> is {share:.1%} of the tokens of {name}: the tokenizer has no token for these characters, and "
        "the model cannot learn them. Train a tokenizer on this text (`python -m hlat_jax.data tokenizer`), or use one "
        "with byte fallback."
    )


def _manifest_entry(kind: str, files: list[DataFile], part: records.Documents) -> dict[str, Any]:
    prints = [snapshot.content_hash or snapshot.fingerprint for snapshot in part.snapshots]
    joined = prints[0] if len(prints) == 1 else hashlib.blake2b("".join(prints).encode(), digest_size=16).hexdigest()
    return {
        "name": files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more",
        "kind": kind,
        "bytes": sum(snapshot.size for snapshot in part.snapshots),
        "documents": len(part),
        "fingerprint": joined,
        **part.facts,
    }
