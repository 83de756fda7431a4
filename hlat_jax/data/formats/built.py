"""Reads datasets that `python -m hlat_jax.data build` wrote: texts or token ids by document number.

A dataset is a folder: manifest.json and the ArrayRecord shards it names, in order. In a dataset of texts a record is
one document in UTF-8; a document of more than 4 Mi characters is several records, and the manifest has [number in the
shard, records] for each such document. In one of token ids a record is a block of whole documents, little-endian:
uint32 [2 + n] of n, bytes per id (2 or 4) and the n lengths, then the ids as uint16 or uint32; beside each shard an
.index.npz holds `first_document` (int64, the number within the shard of each record's first document), `lengths` (ids
of each document, EOS counted) and `bytes` (of the text of each document, in UTF-8).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import threading
import zipfile
import zlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypedDict

import numpy as np

from hlat_jax.data.formats import records
from hlat_jax.data.formats.array_record import open_reader
from hlat_jax.data.formats.decoding import decoding
from hlat_jax.data.formats.files import MANIFEST_NAME, SHARD_SUFFIX, DataFile, NotFound, Snapshot
from hlat_jax.store.typed_json import Count, check_name, checked, read_json

FORMAT = 2
_MAX_OPEN_SHARDS = 128
_LARGE_RECORD_BYTES = 16 << 20
_REMEDY = "build the dataset again"


class _BuiltSource(TypedDict):
    name: str
    documents: Count


class _Shard(_BuiltSource):
    bytes: Count
    tokens: Count | None
    long: list[Annotated[list[int], "[document, records]", lambda pair: len(pair) == 2]]


@dataclasses.dataclass(frozen=True)
class BuiltManifest:
    """The manifest.json of a dataset. Byte counts are UTF-8 bytes of text; counts that do not apply are None."""

    format: int
    kind: Literal["text", "tokens"]
    documents: Count
    bytes: Count
    tokens: Count | None
    content_hash: str
    tokenizer_sha256: str | None
    vocab_size: Count | None
    eos_id: int | None
    max_document_chars: int | None
    sources: list[_BuiltSource]
    shards: list[_Shard]
    prepend_bos: bool = False


def read_manifest(folder: str | os.PathLike) -> BuiltManifest:
    """Returns the manifest of a dataset.

    Raises:
      ValueError: missing, damaged, or of another format.
    """
    path = _require_file(pathlib.Path(folder) / MANIFEST_NAME)
    try:
        with decoding(path):
            fields = read_json(path)
        if fields.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{path} has format {fields['format']}; this hlat_jax reads format {FORMAT}")
        checked(fields, BuiltManifest, where=str(path))
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; {_REMEDY}.") from None
    names = [field.name for field in dataclasses.fields(BuiltManifest)]
    manifest = BuiltManifest(**{name: fields[name] for name in names if name in fields})
    counts = [manifest.tokens, manifest.vocab_size, *(shard["tokens"] for shard in manifest.shards)]
    if manifest.kind == "tokens" and None in counts:
        raise _damage(path, "it has no counts of tokens")
    return manifest


def _damage(path: object, what: str) -> ValueError:
    return ValueError(f"{path} is damaged: {what}; {_REMEDY}.")


def _require_file(path: pathlib.Path) -> pathlib.Path:
    """Returns `path`. Raises NotFound if there is no such file."""
    if not path.is_file():
        raise NotFound(f"{path} is missing; restore it or build the dataset again.")
    return path


class _Shards:
    """The shards of a dataset: location and records of each document, with a bounded number of open files; thread-safe.

    Raises:
      ValueError: a shard is missing, or its name points outside the folder.
    """

    def __init__(self, folder: pathlib.Path, manifest: BuiltManifest):
        self._folder, self._manifest = folder, manifest
        for shard in manifest.shards:
            path = folder / check_name(shard["name"], f"{folder / MANIFEST_NAME}: a shard's name")
            _require_file(path)
            if manifest.kind == "tokens":
                _require_file(index_path(path))
        self.snapshots = tuple(
            Snapshot(DataFile(folder / shard["name"]), has_checksums=True) for shard in manifest.shards
        )
        self._starts = records.starts(shard["documents"] for shard in manifest.shards)
        self._source_starts = records.starts(source["documents"] for source in manifest.sources)
        if {int(self._starts[-1]), int(self._source_starts[-1])} != {manifest.documents}:
            raise _damage(folder / MANIFEST_NAME, "its counts of documents disagree")
        files = [snapshot.file for snapshot in self.snapshots]
        self._reader = functools.lru_cache(_MAX_OPEN_SHARDS)(lambda shard: open_reader(files[shard]))

    def place(self, index: int) -> tuple[int, int]:
        """Returns (shard, number within it) of document `index`."""
        return records.find_part(self._starts, index)

    def locate(self, index: int) -> str:
        """Returns the dataset and number of a document, and the file it was built from."""
        source, number = records.find_part(self._source_starts, index)
        name = self._manifest.sources[source]["name"]
        return f"{self._folder}, document {index + 1} (document {number + 1} of {name})"

    def read(self, shard: int, record: int) -> bytes:
        """Returns one record.

        Raises:
          ValueError: the shard changed or is damaged.
          Unreadable: it cannot be read now.
        """
        snapshot = self.snapshots[shard]
        snapshot.check()
        raw = b""
        try:
            with decoding(snapshot.file, part=f"record {record + 1}", remedy=_REMEDY):
                raw = self._reader(shard).read([record])[0]
        finally:
            if not raw or len(raw) > _LARGE_RECORD_BYTES:
                self._reader.cache_clear()  # a reader that has failed stays so, and one keeps its last record
        return raw

    def check_records(self, counts: Iterable[int]) -> None:
        """Raises ValueError unless the shards hold these numbers of records; a truncated shard reads as empty."""
        for shard, expected in enumerate(counts):
            file = self.snapshots[shard].file
            with decoding(file, remedy=_REMEDY):
                num_records = self._reader(shard).num_records()
            if num_records != expected:
                raise _damage(file, f"it holds {num_records} records instead of {expected}")


class BuiltTexts:
    """The texts of a dataset of kind text, by number.

    Attributes:
      manifest: the manifest of the dataset.
      snapshots: its shards.
      num_rows: None, because documents are not rows.

    Raises:
      ValueError: a damaged or incomplete dataset.
    """

    num_rows = None

    def __init__(self, folder: pathlib.Path, manifest: BuiltManifest):
        self.manifest, self._shards = manifest, _Shards(folder, manifest)
        self._long = [_LongDocuments(shard, folder=folder) for shard in manifest.shards]
        pairs = zip(self._long, manifest.shards, strict=True)
        self._shards.check_records(long.first_record(shard["documents"]) for long, shard in pairs)
        self.snapshots, self.locate = self._shards.snapshots, self._shards.locate

    def __len__(self) -> int:
        return self.manifest.documents

    def __getitem__(self, index: int) -> str:
        shard, number = self._shards.place(index)
        first, end = (self._long[shard].first_record(place) for place in (number, number + 1))
        raw = self._shards.read(shard, first)
        if end > first + 1:
            raw = bytearray(raw)
            for record in range(first + 1, end):
                raw += self._shards.read(shard, record)
        return records.utf8_text(raw, where=os.fspath(self.snapshots[shard].file), row=number + 1)


class _LongDocuments:
    """Which documents of a shard have several records, from its entry in the manifest.

    Raises:
      ValueError: an invalid entry.
    """

    def __init__(self, shard: dict[str, Any], *, folder: pathlib.Path):
        pairs = np.asarray(shard["long"], np.int64).reshape(-1, 2)
        self._documents = pairs[:, 0]
        self._extra_records = records.starts(pairs[:, 1] - 1)  # before each of them, in addition to one per document
        inside = (pairs >= [0, 2]).all() and (pairs[:, 0] < shard["documents"]).all()
        if not inside or (np.diff(self._documents) <= 0).any():
            raise _damage(folder / MANIFEST_NAME, f"the long documents of {shard['name']} are invalid")

    def first_record(self, number: int) -> int:
        """Returns the first record of document `number`; for number = documents of the shard, its number of records."""
        return number + int(self._extra_records[np.searchsorted(self._documents, number, side="left")])


class BuiltTokens:
    """The token ids of a dataset of kind tokens: int32[n] of each document, EOS of each piece counted.

    Attributes:
      manifest: the manifest of the dataset.
      snapshots: its shards.
      num_rows: None, because documents are not rows.

    Raises:
      ValueError: a damaged or incomplete dataset.
    """

    num_rows = None

    def __init__(self, folder: pathlib.Path, manifest: BuiltManifest):
        self.manifest, self._shards = manifest, _Shards(folder, manifest)
        self.snapshots, self.locate = self._shards.snapshots, self._shards.locate
        self._first_documents = [self._index(shard, "first_document") for shard in range(len(self.snapshots))]
        for first, shard in zip(self._first_documents, manifest.shards, strict=True):
            steps = np.diff(np.append(first, shard["documents"]))
            if (len(first) and first[0] != 0) or (steps <= 0).any() or len(first) == 0 < shard["documents"]:
                raise _damage(folder / shard["name"], "its index disagrees with the manifest")
        self._shards.check_records(len(first) for first in self._first_documents)
        self._bytes: dict[int, np.ndarray] = {}  # of a shard: see text_bytes
        self._last = threading.local()  # (shard, record, block) that this thread read last: neighbors share a block

    def __len__(self) -> int:
        return self.manifest.documents

    def __getitem__(self, index: int) -> np.ndarray:
        shard, number = self._shards.place(index)
        first = self._first_documents[shard]
        record, number_in_record = records.find_part(first, number)
        end = first[record + 1] if record + 1 < len(first) else self.manifest.shards[shard]["documents"]
        where = f"{self.snapshots[shard].file}, record {record + 1}"
        last_place, block = getattr(self._last, "block", (None, b""))
        if last_place == (shard, record):
            self.snapshots[shard].check()  # as each read does
        else:
            block = self._shards.read(shard, record)
            self._last.block = ((shard, record), block) if len(block) <= _LARGE_RECORD_BYTES else (None, b"")
        tokens = block_tokens(block, number_in_record, num_documents=int(end - first[record]), where=where)
        if len(tokens) and tokens.max() >= self.manifest.vocab_size:
            raise _damage(where, f"it holds id {tokens.max()} of a vocabulary of {self.manifest.vocab_size} tokens")
        return tokens

    def text_bytes(self, index: int) -> int:
        """Returns the UTF-8 bytes of the text of a document."""
        shard, number = self._shards.place(index)
        if shard not in self._bytes:
            self._bytes[shard] = self._index(shard, "bytes")
        return int(self._bytes[shard][number])

    def token_lengths(self) -> np.ndarray:
        """Returns int64[documents]: ids of each document.

        Raises:
          ValueError: the index of a shard disagrees with the manifest.
        """
        parts = [self._index(shard, "lengths") for shard in range(len(self.snapshots))]
        for lengths, shard in zip(parts, self.manifest.shards, strict=True):
            if len(lengths) != shard["documents"] or int(lengths.sum(dtype=np.int64)) != shard["tokens"]:
                raise _damage(shard["name"], "its index disagrees with the manifest")
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

    def _index(self, shard: int, name: str) -> np.ndarray:
        path = index_path(os.fspath(self.snapshots[shard].file))
        damage = (ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)
        with decoding(path, remedy=_REMEDY, errors=damage), np.load(path, allow_pickle=False) as arrays:
            return arrays[name]


def index_path(shard: str | os.PathLike) -> pathlib.Path:
    """Returns the path of the index of a shard of token ids: shard-00000-of-00008.index.npz."""
    path = pathlib.Path(shard)
    return path.with_name(path.name.removesuffix(SHARD_SUFFIX) + ".index.npz")


def block_tokens(block: bytes, number: int, *, num_documents: int, where: str) -> np.ndarray:
    """Returns int32[n]: the ids of document `number` of a block that must hold `num_documents`.

    Raises:
      ValueError: a damaged block.
    """
    header = np.frombuffer(block, "<u4", count=min(len(block) // 4, 2 + num_documents))
    if len(header) < 2 + num_documents or header[0] != num_documents or header[1] not in (2, 4):
        raise _damage(where, f"it is not a block of {num_documents} documents")
    ends = np.cumsum(header[2:], dtype=np.int64)
    width, begin = int(header[1]), 4 * len(header)
    if len(block) != begin + width * int(ends[-1]):
        raise _damage(where, f"its {len(block)} bytes do not match its header")
    start, length = int(ends[number]) - int(header[2 + number]), int(header[2 + number])
    ids = np.frombuffer(block, f"<u{width}", count=length, offset=begin + width * start)
    return ids.astype(np.int32)


def open_built(folder: str | os.PathLike, *, key: str, tokenizer_sha256: str | None) -> BuiltTexts | BuiltTokens:
    """Returns the documents of a dataset; token ids must be of the tokenizer with `tokenizer_sha256` if it is given.

    Raises:
      ValueError: a damaged dataset, or ids from another tokenizer.
    """
    manifest = read_manifest(folder)
    if manifest.kind == "text":
        return BuiltTexts(pathlib.Path(folder), manifest)
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise ValueError(
            f"{key}: {folder} holds token ids from the tokenizer with SHA-256 {str(manifest.tokenizer_sha256)[:12]}…, "
            f"but data.tokenizer has {tokenizer_sha256[:12]}…; set data.tokenizer to the one it was built with, or "
            "build the texts again: python -m hlat_jax.data build IN --out DIR --tokenizer MODEL"
        )
    return BuiltTokens(pathlib.Path(folder), manifest)


def manifest_fingerprint(manifest: BuiltManifest, snapshots: Iterable[Snapshot]) -> str:
    """Returns 32 hex digits that identify the content of a dataset, independent of its location."""
    fields = [manifest.kind, manifest.content_hash, manifest.tokenizer_sha256, *(s.fingerprint for s in snapshots)]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()
