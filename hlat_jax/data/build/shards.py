"""Writes the shards of a built dataset, ArrayRecord files, and the metadata that identify a finished one.

kind "text": a record is one document in UTF-8; a document of more than 4 Mi characters is cut into several, because
writing or reading a record holds several copies of it. kind "tokens": a record is a block of whole consecutive
documents of about 32,768 ids: little-endian uint32 (number of documents n, bytes per id 2 or 4, n lengths), then the
ids. Which documents share a record depends on their lengths alone, so the bytes of a shard do not depend on the number
of workers.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from array_record.python import array_record_module

from hlat_jax.data import packing
from hlat_jax.data.formats.built import index_path
from hlat_jax.data.formats.files import DataFile, content_hash
from hlat_jax.store import atomic_files

RECORD_IDS = 32_768
RECORD_CHARS = 1 << 22
TEXT_OPTIONS = "group_size:1,zstd"
TOKENS_OPTIONS = "group_size:1,uncompressed"

_HASH_CHARS = 1 << 20
_PRIME, _BASE = (1 << 127) - 1, 0x2545F4914F6CDD1D9E3779B97F4A7C15


class EncodedDocument(NamedTuple):
    """One document as it is stored: `digest` of its text, and `data`, records of UTF-8 or ids as uint16 or uint32."""

    num_bytes: int
    digest: int
    data: Any


def encode_text(text: str) -> EncodedDocument:
    """Returns a document of a dataset of kind "text"."""
    starts = range(0, max(len(text), 1), RECORD_CHARS)
    raw = [text[start : start + RECORD_CHARS].encode("utf-8") for start in starts]
    digest = hashlib.blake2b(digest_size=16)
    for part in raw:
        digest.update(part)
    return EncodedDocument(sum(map(len, raw)), _digest_int(digest), raw)


def encode_tokens(text: str, *, tokenizer: Any, max_chars: int, bos: bool = False) -> EncodedDocument:
    """Returns a document of a dataset of kind "tokens": the ids that packing.document_tokens yields, with EOS.

    Raises:
      ValueError: an id outside the tokenizer's vocabulary.
    """
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    for start in range(0, len(text), _HASH_CHARS):  # in blocks, to avoid a copy of a long document
        raw = text[start : start + _HASH_CHARS].encode("utf-8")
        digest.update(raw)
        num_bytes += len(raw)
    dtype, stored = id_dtype(tokenizer.vocab_size), bytearray()  # grows in place
    for ids in packing.document_tokens(text, tokenizer=tokenizer, max_chars=max_chars, bos=bos):
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise ValueError(
                f"token ids run from {ids.min()} to {ids.max()}, outside the vocabulary of {tokenizer.vocab_size}."
            )
        stored += ids.astype(dtype).data
    return EncodedDocument(num_bytes, _digest_int(digest), np.frombuffer(stored, dtype))


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the little-endian dtype in which ids of a vocabulary are stored: two bytes if they suffice."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _digest_int(digest: Any) -> int:
    return int.from_bytes(digest.digest(), "little")


def appended_hash(value: int, digest: int) -> int:
    """Returns the content hash of documents with the hash `value` (0: none) followed by a document with `digest`."""
    return (value * _BASE + digest) % _PRIME


def joined_hash(parts: Iterable[tuple[int, int]]) -> str:
    """Returns the content hash, 32 hex digits, of consecutive parts (hash, number of documents), however divided."""
    total = 0
    for value, num_documents in parts:
        total = (total * pow(_BASE, num_documents, _PRIME) + value) % _PRIME
    return f"{total:032x}"


def disk_error(path: pathlib.Path, error: BaseException) -> OSError:
    """Returns the error for a file of a build that cannot be written."""
    reason = "No space left on device" if "No space left" in str(error) else str(error)
    return OSError(
        f"cannot write {path}: {reason}. Finished shards are kept: free space or fix the disk, then run the same "
        "command again to resume."
    )


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a small file atomically.

    Raises:
      OSError: see disk_error.
    """
    try:
        atomic_files.write_whole(path, content)
    except OSError as error:
        raise disk_error(path, error) from None


def is_intact(path: pathlib.Path, metadata: dict[str, Any]) -> bool:
    """Returns whether a shard and its index still have the hashes that `ShardWriter.close` returned."""
    hashes = {path: metadata["blake2b"]}
    if metadata["index_blake2b"] is not None:
        hashes[index_path(path)] = metadata["index_blake2b"]
    try:
        if path.stat().st_size != metadata["file_bytes"]:
            return False
        return all(content_hash(DataFile(file)) == expected for file, expected in hashes.items())
    except FileNotFoundError:
        return False


class ShardWriter:
    """One ArrayRecord file being written under a temporary name; `close` renames it and its index into place.

    `dtype` is that of the ids, or None for text. Call `discard` on a writer that is not closed.

    Raises:
      OSError: the disk is full or broken, from any method.
    """

    def __init__(self, path: pathlib.Path, *, dtype: np.dtype | None):
        self.path, self._dtype = path, dtype
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._block: list[np.ndarray] = []
        self._block_ids = 0
        self._lengths: list[int] = []
        self._bytes: list[int] = []  # of text, of each document
        self._first_document: list[int] = []
        self._long: list[tuple[int, int]] = []  # (document, its records) of those that have several
        self._num_documents = self._num_records = 0
        try:
            self._writer = array_record_module.ArrayRecordWriter(
                str(self._partial), TEXT_OPTIONS if dtype is None else TOKENS_OPTIONS
            )
        except RuntimeError as error:
            raise disk_error(path, error) from None

    def add(self, document: EncodedDocument) -> None:
        """Appends one document, of text or with ids of this writer's dtype."""
        data = document.data
        self._num_documents += 1
        self._bytes.append(document.num_bytes)
        if self._dtype is None:
            if len(data) > 1:
                self._long.append((self._num_documents - 1, len(data)))
            for record in data:
                self._write(record)
            return
        if self._block and self._block_ids + len(data) > RECORD_IDS:
            self._flush()
        self._block.append(data)
        self._block_ids += len(data)

    def close(self) -> dict[str, Any]:
        """Renames the shard into place; returns its file_bytes, blake2b, index_blake2b (text: None) and long documents.

        A reader never sees a partial shard: both files are fsynced before the data file is renamed.
        """
        if self._block:
            self._flush()
        try:
            self._writer.close()
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())
            self._check_complete()
            metadata = {"file_bytes": self._partial.stat().st_size, "blake2b": content_hash(DataFile(self._partial))}
            metadata["index_blake2b"] = None if self._dtype is None else self._write_index()
            metadata["long"] = self._long
            os.replace(self._partial, self.path)
            atomic_files.sync_folder(self.path.parent)
        except (OSError, RuntimeError) as error:
            self.discard()
            raise disk_error(self.path, error) from None
        return metadata

    def discard(self) -> None:
        """Removes what was written."""
        self._partial.unlink(missing_ok=True)

    def _write(self, record: bytes) -> None:
        try:
            self._writer.write(record)
        except RuntimeError as error:
            raise disk_error(self.path, error) from None
        self._num_records += 1

    def _flush(self) -> None:
        lengths = [len(ids) for ids in self._block]
        header = np.asarray([len(lengths), self._dtype.itemsize, *lengths], "<u4")
        self._first_document.append(len(self._lengths))
        self._lengths.extend(lengths)
        block, self._block, self._block_ids = self._block, [], 0
        self._write(b"".join([header.data, *(ids.data for ids in block)]))

    def _check_complete(self) -> None:
        """Reads the footer back, because the writer's threads do not report every failure."""
        num_records = array_record_module.ArrayRecordReader(str(self._partial)).num_records()
        if num_records != self._num_records:
            raise OSError(f"{num_records} of {self._num_records} records can be read back")

    def _write_index(self) -> str:
        """Writes the index and returns its hash."""
        longest, content = max(self._lengths, default=0), io.BytesIO()
        np.savez(
            content,
            first_document=np.asarray(self._first_document, np.int64),
            lengths=np.asarray(self._lengths, np.int32 if longest < 1 << 31 else np.int64),
            bytes=np.asarray(self._bytes, np.int64),
        )
        atomic_files.write_whole(index_path(self.path), content.getvalue())
        return content_hash(DataFile(index_path(self.path)))
