"""Writes the shards of a built dataset, ArrayRecord files, and counts their documents, bytes and tokens.

`formats.built` has the format. A text of more than 4 Mi characters is cut into several records, because writing or
reading a record holds several copies of it. Documents of ids share records of about 32,768 ids by their lengths. So the
bytes of a shard do not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from array_record.python import array_record_module

from hlat_jax.data import packing
from hlat_jax.data.formats.built import index_path
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.store import atomic_files

RECORD_IDS = 32_768
RECORD_CHARS = 1 << 22
TEXT_OPTIONS = "group_size:1,zstd"
TOKENS_OPTIONS = "group_size:1,uncompressed"
COUNTS = ("documents", "bytes", "tokens", "bad_records")

_BAD_KEPT = 5  # problems of skipped records of a shard
_PRIME, _BASE = (1 << 127) - 1, 0x2545F4914F6CDD1D9E3779B97F4A7C15


class EncodedDocument(NamedTuple):
    """A stored document, with the `digest` of its text and `data`, its records of UTF-8 or ids as uint16 or uint32."""

    num_bytes: int
    digest: int
    data: Any


def encode_text(text: str) -> EncodedDocument:
    """Returns a document of a dataset of kind "text"."""
    records = list(_utf8_parts(text))
    return EncodedDocument(*_digest(records), records)


def encode_tokens(text: str, *, tokenizer: Tokenizer, max_chars: int, bos: bool = False) -> EncodedDocument:
    """Returns a document of a dataset of kind "tokens", the ids that packing.document_tokens yields, with EOS."""
    dtype, stored = id_dtype(tokenizer.vocab_size), bytearray()  # grows in place
    for ids in packing.document_tokens(text, tokenizer=tokenizer, max_chars=max_chars, bos=bos):
        stored += ids.astype(dtype).data
    return EncodedDocument(*_digest(_utf8_parts(text)), np.frombuffer(stored, dtype))


def _utf8_parts(text: str) -> Iterator[bytes]:
    """Yields the UTF-8 of a text in parts, of which a long document needs only one in memory; at least one."""
    for start in range(0, max(len(text), 1), RECORD_CHARS):
        yield text[start : start + RECORD_CHARS].encode("utf-8")


def _digest(parts: Iterable[bytes]) -> tuple[int, int]:
    """Returns the number of bytes of a text and their digest."""
    digest, num_bytes = hashlib.blake2b(digest_size=16), 0
    for part in parts:
        digest.update(part)
        num_bytes += len(part)
    return num_bytes, int.from_bytes(digest.digest(), "little")


def id_dtype(vocab_size: int) -> np.dtype:
    """Returns the little-endian dtype in which ids of a vocabulary are stored, two bytes if they suffice."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def disk_error(path: pathlib.Path, error: BaseException) -> OSError:
    """Returns the error for a file of a build that cannot be written."""
    reason = "No space left on device" if "No space left" in str(error) else str(error)
    return OSError(
        f"cannot write {path}: {reason}. Finished shards are kept: free space or fix the disk, then run the same "
        "command again to resume."
    )


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Writes a small file atomically, and raises `disk_error` if it cannot."""
    try:
        atomic_files.write_whole(path, content)
    except OSError as error:
        raise disk_error(path, error) from None


class ShardWriter:
    """One ArrayRecord file under a temporary name, which `close` renames into place, and its counts.

    Attributes:
      path: the path of the file, which exists only if the shard has documents.
      counts: the numbers of documents, bytes, tokens and bad records so far.

    Raises:
      OSError: the disk is full or broken. Any method raises it.
    """

    def __init__(self, path: pathlib.Path, *, dtype: np.dtype | None, content: int = 0):
        """Opens nothing yet. `dtype` is that of ids, None for text; `content` hashes the documents before the shard."""
        self.path, self._dtype, self._content = path, dtype, content
        self.counts = dict.fromkeys(COUNTS, 0)
        self._sources: dict[int, dict[str, int]] = {}
        self._bad: list[str] = []
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        self._writer: Any = None
        self._block: list[np.ndarray] = []
        self._block_ids = 0
        self._lengths: list[int] = []
        self._bytes: list[int] = []  # of text, of each document
        self._first_document: list[int] = []
        self._long: list[tuple[int, int]] = []  # (document, its records) of those that have several
        self._num_records = 0

    def add(self, source: int, document: EncodedDocument | BadRecord) -> None:
        """Appends one document of an input, text or ids of this writer's dtype, or counts its bad record."""
        if isinstance(document, BadRecord):
            self._count(source, bad_records=1)
            self._bad += [document.problem] if len(self._bad) < _BAD_KEPT else []
            return
        data = document.data
        if self._dtype is None:
            if len(data) > 1:
                self._long.append((self.counts["documents"], len(data)))
            for record in data:
                self._write(record)
        else:
            if self._block and self._block_ids + len(data) > RECORD_IDS:
                self._flush()
            self._block.append(data)
            self._block_ids += len(data)
            self._bytes.append(document.num_bytes)
        num_tokens = 0 if self._dtype is None else len(data)
        self._count(source, documents=1, bytes=document.num_bytes, tokens=num_tokens)
        self._content = (self._content * _BASE + document.digest) % _PRIME

    def close(self) -> dict[str, Any]:
        """Renames the shard into place. Returns its counts, in all and by input, its bytes and its long documents.

        `content` is the hash of all documents of the dataset up to its end. A reader never sees a partial shard, as
        both files are fsynced before the data file is renamed.
        """
        if self._block:
            self._flush()
        metadata = {**self.counts, "sources": self._sources, "bad": self._bad, "long": self._long}
        metadata |= {"content": f"{self._content:032x}", "file_bytes": 0}
        if self._writer is None:
            return metadata
        try:
            self._writer.close()
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())
            num_records = array_record_module.ArrayRecordReader(str(self._partial)).num_records()
            if num_records != self._num_records:  # the writer's threads do not report every failure
                raise OSError(f"{num_records} of {self._num_records} records can be read back")
            metadata["file_bytes"] = self._partial.stat().st_size
            if self._dtype is not None:
                self._write_index()
            os.replace(self._partial, self.path)
            atomic_files.sync_folder(self.path.parent)
        except (OSError, RuntimeError) as error:
            self.discard()
            raise disk_error(self.path, error) from None
        return metadata

    def discard(self) -> None:
        """Removes the file, unless `close` has renamed it."""
        self._partial.unlink(missing_ok=True)

    def _count(self, source: int, **numbers: int) -> None:
        of_source = self._sources.setdefault(source, dict.fromkeys(COUNTS, 0))
        for name, count in numbers.items():
            of_source[name] += count
            self.counts[name] += count

    def _write(self, record: bytes) -> None:
        try:
            if self._writer is None:
                options = TEXT_OPTIONS if self._dtype is None else TOKENS_OPTIONS
                self._writer = array_record_module.ArrayRecordWriter(str(self._partial), options)
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

    def _write_index(self) -> None:
        longest, content = max(self._lengths, default=0), io.BytesIO()
        np.savez(
            content,
            first_document=np.asarray(self._first_document, np.int64),
            lengths=np.asarray(self._lengths, np.int32 if longest < 1 << 31 else np.int64),
            bytes=np.asarray(self._bytes, np.int64),
        )
        atomic_files.write_whole(index_path(self.path), content.getvalue())
