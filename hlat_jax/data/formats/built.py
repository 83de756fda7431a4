"""Reads texts or token ids by document number from datasets that `python -m hlat_jax.data build` wrote.

A dataset is a folder with manifest.json and the ArrayRecord shards it names, in order. In a dataset of texts a record
is one document in UTF-8. A document of more than 4 Mi characters is several records, and the manifest has [number in
the shard, records] for each such document. In a dataset of token ids a record is a little-endian block of whole
documents. It has uint32 [2 + n] with n, bytes per id (2 or 4) and the n lengths, then the ids as uint16 or uint32. An
.index.npz of each shard holds `first_document`, `lengths` and `bytes`. The first is int64, the number within the shard
of each record's first document. The others are the ids (EOS counted) and UTF-8 bytes of text of each document.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, TypedDict

import numpy as np

from hlat_jax.config import count_text
from hlat_jax.data.formats import records
from hlat_jax.data.formats.array_record import open_reader
from hlat_jax.data.formats.decoding import NPZ_DAMAGE, decode_errors
from hlat_jax.data.formats.files import MANIFEST_NAME, SHARD_SUFFIX, DataFile, NotFound, Snapshot
from hlat_jax.data.formats.parts import PartFacts
from hlat_jax.store.typed_json import Count, check_kind, check_name, read_json

FORMAT = 2
_MAX_OPEN_SHARDS = 128
_LARGE_RECORD_BYTES = 16 << 20
_REMEDY = "Build the dataset again"


class _BuiltSource(TypedDict):
    name: str
    documents: Count


class _Shard(_BuiltSource):
    bytes: Count
    tokens: Count | None
    long: list[Annotated[list[Count], "[document, records]", lambda pair: len(pair) == 2]]


@dataclasses.dataclass(frozen=True)
class BuiltManifest:
    """The manifest.json of a dataset. Byte counts are UTF-8 bytes of text. Counts that do not apply are None."""

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
    part: PartFacts | None = None


def read_manifest(folder: str | os.PathLike) -> BuiltManifest:
    """Returns the manifest of a dataset."""
    path = _require_file(pathlib.Path(folder) / MANIFEST_NAME)
    try:
        with decode_errors(path):
            fields = read_json(path)
        if fields.get("format", FORMAT) != FORMAT:
            raise ValueError(f"{path} has format {fields['format']}, but this hlat_jax reads format {FORMAT}")
        check_kind(fields, BuiltManifest, where=str(path))
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}. {_REMEDY}.") from None
    names = [field.name for field in dataclasses.fields(BuiltManifest)]
    manifest = BuiltManifest(**{name: fields[name] for name in names if name in fields})
    counts = [manifest.tokens, manifest.vocab_size, *(shard["tokens"] for shard in manifest.shards)]
    if manifest.kind == "tokens" and None in counts:
        raise _damage(path, "it has no counts of tokens")
    return manifest


def _damage(path: object, problem: str) -> ValueError:
    return ValueError(f"{path} is damaged, as {problem}. {_REMEDY}.")


def _require_file(path: pathlib.Path) -> pathlib.Path:
    """Returns `path`. Raises NotFound if there is no such file."""
    if not path.is_file():
        raise NotFound(f"{path} is missing. Restore it or build the dataset again.")
    return path


class _Shards:
    """The shards of a dataset, of which a bounded number is open; thread-safe."""

    def __init__(self, where: str | os.PathLike, manifest: BuiltManifest):
        self.manifest, self._where, folder = manifest, where, pathlib.Path(where)
        names = [check_name(shard["name"], f"{folder / MANIFEST_NAME}: a shard's name") for shard in manifest.shards]
        self.snapshots = tuple(Snapshot(DataFile(_require_file(folder / name))) for name in names)
        self._starts = records.starts(shard["documents"] for shard in manifest.shards)
        self._source_starts = records.starts(source["documents"] for source in manifest.sources)
        if {int(self._starts[-1]), int(self._source_starts[-1])} != {manifest.documents}:
            raise _damage(folder / MANIFEST_NAME, "its counts of documents disagree")
        files = [snapshot.file for snapshot in self.snapshots]
        self._reader = functools.lru_cache(_MAX_OPEN_SHARDS)(lambda shard: open_reader(files[shard]))

    def find(self, index: int) -> tuple[int, int]:
        """Returns (the shard of a document, its number there)."""
        return records.find_part(self._starts, index)

    def documents(
        self, read: Callable[[int], str | np.ndarray], *, text_bytes: Callable[[int], int] | None = None
    ) -> records.Documents:
        """Returns the documents that `read` returns by their number in the dataset."""
        manifest = self.manifest
        facts = {"kind": manifest.kind, "fingerprint": self._fingerprint()}
        if manifest.kind == "tokens":
            fields = ("tokens", "tokenizer_sha256", "vocab_size", "eos_id", "max_document_chars")
            facts |= {name: getattr(manifest, name) for name in fields}
        facts |= {"prepend_bos": True} if manifest.prepend_bos else {}
        return records.Documents(
            snapshots=self.snapshots,
            num_documents=manifest.documents,
            read=read,
            locate=self._locate,
            text_bytes=text_bytes,
            facts=facts,
        )

    def read(self, shard: int, record: int) -> bytes:
        """Returns one record.

        Raises:
          ValueError: the shard changed or is damaged.
          Unreadable: the shard cannot be read now.
        """
        snapshot = self.snapshots[shard]
        snapshot.check()
        raw = b""
        try:
            with decode_errors(snapshot.file, part=f"record {record + 1}", remedy=_REMEDY):
                raw = self._reader(shard).read([record])[0]
        finally:
            if not raw or len(raw) > _LARGE_RECORD_BYTES:
                self._reader.cache_clear()  # a reader that has failed stays so, and one keeps its last record
        return raw

    def check_records(self, counts: Iterable[int]) -> None:
        """Raises ValueError unless the shards hold these numbers of records. A truncated shard reads as empty."""
        for shard, expected in enumerate(counts):
            file = self.snapshots[shard].file
            with decode_errors(file, remedy=_REMEDY):
                num_records = self._reader(shard).num_records()
            if num_records != expected:
                raise _damage(file, f"it holds {count_text(num_records, 'record')} instead of {expected}")

    def _locate(self, index: int) -> str:
        """Returns the dataset and number of a document, and the file it was built from."""
        source, document = records.find_part(self._source_starts, index)
        name = self.manifest.sources[source]["name"]
        return f"{self._where}, document {index + 1} (document {document + 1} of {name})"

    def _fingerprint(self) -> str:
        """Returns 32 hex digits that identify the content of the dataset, independent of its location."""
        manifest = self.manifest
        fields = [manifest.kind, manifest.content_hash, manifest.tokenizer_sha256]
        fields += [snapshot.fingerprint for snapshot in self.snapshots]
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


def _texts(shards: _Shards) -> records.Documents:
    """Returns the documents of a dataset of kind text."""

    def first_record(shard: int, document: int) -> int:
        """Returns the first record of a document, or the number of records for the number of documents of the shard."""
        long = shards.manifest.shards[shard]["long"]
        return document + sum(num_records - 1 for earlier, num_records in long if earlier < document)

    def read(index: int) -> str:
        shard, document = shards.find(index)
        numbers = range(first_record(shard, document), first_record(shard, document + 1))
        raw = b"".join(shards.read(shard, record) for record in numbers)
        return records.utf8_text(raw, where=shards.snapshots[shard].file.where, row=document + 1)

    shards.check_records(first_record(index, shard["documents"]) for index, shard in enumerate(shards.manifest.shards))
    return shards.documents(read)


def _token_ids(shards: _Shards) -> records.Documents:
    """Returns the documents of a dataset of kind tokens, EOS of each piece counted."""
    manifest, snapshots = shards.manifest, shards.snapshots
    first_documents = [_index(snapshot, "first_document") for snapshot in snapshots]
    for first, shard, snapshot in zip(first_documents, manifest.shards, snapshots, strict=True):
        steps = np.diff(np.append(first, shard["documents"]))
        if (len(first) and first[0] != 0) or (steps <= 0).any() or len(first) == 0 < shard["documents"]:
            raise _damage(snapshot.file, "its index disagrees with the manifest")
    shards.check_records(len(first) for first in first_documents)
    bytes_of_shard = functools.cache(lambda shard: _index(snapshots[shard], "bytes"))

    def read(index: int) -> np.ndarray:
        shard, document = shards.find(index)
        first = first_documents[shard]
        record, number_in_record = records.find_part(first, document)
        end = first[record + 1] if record + 1 < len(first) else manifest.shards[shard]["documents"]
        where, block = f"{snapshots[shard].file}, record {record + 1}", shards.read(shard, record)
        tokens = block_tokens(block, number_in_record, num_documents=int(end - first[record]), where=where)
        most = int(tokens.view(np.uint32).max(initial=0))  # as stored: a negative id is one of the largest
        if most >= manifest.vocab_size:
            raise _damage(where, f"it holds id {most} of a vocabulary of {manifest.vocab_size} tokens")
        return tokens

    def text_bytes(index: int) -> int:
        shard, document = shards.find(index)
        return int(bytes_of_shard(shard)[document])

    return shards.documents(read, text_bytes=text_bytes)


def _index(snapshot: Snapshot, name: str) -> np.ndarray:
    """Returns an array of the index beside a shard of token ids."""
    path = _require_file(index_path(snapshot.file))
    with decode_errors(path, remedy=_REMEDY, errors=NPZ_DAMAGE), np.load(path, allow_pickle=False) as arrays:
        return arrays[name]


def index_path(shard: str | os.PathLike) -> pathlib.Path:
    """Returns the path of the index of a shard of token ids, such as shard-00000-of-00008.index.npz."""
    path = pathlib.Path(shard)
    return path.with_name(path.name.removesuffix(SHARD_SUFFIX) + ".index.npz")


def block_tokens(block: bytes, document: int, *, num_documents: int, where: str) -> np.ndarray:
    """Returns the ids int32[n] of a document of a block, by its number. The block must hold `num_documents`."""
    header = np.frombuffer(block, "<u4", count=min(len(block) // 4, 2 + num_documents))
    if len(header) < 2 + num_documents or header[0] != num_documents or header[1] not in (2, 4):
        raise _damage(where, f"it is not a block of {num_documents} documents")
    ends = np.cumsum(header[2:], dtype=np.int64)
    width, begin = int(header[1]), 4 * len(header)
    if len(block) != begin + width * int(ends[-1]):
        raise _damage(where, f"its {len(block)} bytes do not match its header")
    start, length = int(ends[document]) - int(header[2 + document]), int(header[2 + document])
    ids = np.frombuffer(block, f"<u{width}", count=length, offset=begin + width * start)
    return ids.astype(np.int32)


def open_built(folder: str | os.PathLike, *, key: str, tokenizer_sha256: str | None) -> records.Documents:
    """Returns the documents of a dataset. Token ids must come from the tokenizer with `tokenizer_sha256`, if given."""
    manifest = read_manifest(folder)
    if manifest.kind == "text":
        return _texts(_Shards(folder, manifest))
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise ValueError(
            f"{key}: {folder} holds token ids from the tokenizer with SHA-256 {str(manifest.tokenizer_sha256)[:12]}…, "
            f"but data.tokenizer has {tokenizer_sha256[:12]}…. Set data.tokenizer to the one it was built with, or "
            "build the texts again:\n  python -m hlat_jax.data build IN --out DIR --tokenizer MODEL"
        )
    return _token_ids(_Shards(folder, manifest))
