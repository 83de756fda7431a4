"""Documents by number: which files a config names, and random access to the text of each document in them.

Owns files, formats, the manifest, and what is wrong with a record. Refuses to know the order in which documents are
visited, tokens, or rows: a document here is a number and its text. Nothing is converted or copied: JSONL is read in
place through an index of byte offsets, Parquet through a small cache of row groups, a plain-text file is one document.
"""

from __future__ import annotations

import collections
import glob
import hashlib
import json
import mmap
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import pyarrow
import pyarrow.parquet

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
TEXT_SUFFIXES = (".txt", ".md")
KNOWN_SUFFIXES = JSONL_SUFFIXES + PARQUET_SUFFIXES + TEXT_SUFFIXES
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")

_FINGERPRINT_BLOCK_BYTES = 64 * 1024
_FINGERPRINT_BLOCKS = 16
_CACHED_ROW_GROUPS = 8


def asset_path(name: str) -> pathlib.Path:
    """Returns the path of a file that ships with the package.

    Raises:
      ValueError: no such file; the message lists those there are.
    """
    folder = pathlib.Path(__file__).resolve().parent.parent / "assets"
    path = folder / name
    if path.parent != folder or not path.is_file():
        shipped = sorted(p.name for p in folder.iterdir() if p.suffix in (".jsonl", ".model"))
        raise ValueError(f"package:{name} does not ship with hlat_jax; there are {', '.join(shipped)}.")
    return path


def resolve_files(spec: str, *, key: str) -> list[pathlib.Path]:
    """Returns the files that `spec` names, in order: as written, and by name within a folder or glob.

    `key` is the config path, for messages. A folder is searched recursively for known suffixes; hidden names are
    passed over. The order depends on names below the folder, not on where it lies.

    Raises:
      ValueError: an empty spec, nothing found, a compressed file, an unknown suffix, or a file named twice.
    """
    files: list[pathlib.Path] = []
    for part in (part.strip() for part in spec.split(",")):
        if part:
            files.extend(_resolve_part(part, key=key))
    if not files:
        raise ValueError(f"{key}={spec!r} names no files; give files, folders or globs, separated by commas.")
    seen: set[pathlib.Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise ValueError(f"{key}={spec!r} names {path} twice; its documents would be repeated within an epoch.")
        seen.add(path.resolve())
    return files


def _resolve_part(part: str, *, key: str) -> list[pathlib.Path]:
    if part.startswith("package:"):
        return [asset_path(part.removeprefix("package:"))]
    path = pathlib.Path(part).expanduser()
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path))]
        found = [p for p in found if p.suffix.lower() in KNOWN_SUFFIXES or _compressed_data(p)]
        if not found:
            raise ValueError(f"{key}: no files under {path} end in {', '.join(KNOWN_SUFFIXES)}.")
        found.sort(key=lambda p: p.relative_to(path).as_posix())
    elif path.is_file():
        found = [path]
    else:
        found = [pathlib.Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(p)]
        if not found:
            what = "matches no file" if glob.has_magic(part) else "does not exist"
            raise ValueError(f"{key}: {part} {what} (looked from {pathlib.Path.cwd()}).")
    for file in found:
        _check_suffix(file, key=key)
    return found


def _hidden(relative: pathlib.Path) -> bool:
    return any(name.startswith(".") for name in relative.parts)


def _compressed_data(path: pathlib.Path) -> bool:
    """Returns whether a file in a folder is text we would lose by passing over it, such as a.jsonl.gz."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES and pathlib.Path(path.stem).suffix.lower() in KNOWN_SUFFIXES


def _check_suffix(path: pathlib.Path, *, key: str) -> None:
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        command = {".gz": "gunzip -k", ".zst": "zstd -dk", ".xz": "xz -dk", ".bz2": "bunzip2 -k"}[suffix]
        raise ValueError(
            f"{key}: {path} is compressed as a whole, so no document in it can be read by number. Training reads "
            f"{', '.join(KNOWN_SUFFIXES)}; unpack it first: {command} {path}"
        )
    if suffix not in KNOWN_SUFFIXES:
        raise ValueError(f"{key}: {path} ends in {suffix or 'nothing'!r}; known are {', '.join(KNOWN_SUFFIXES)}.")


def fingerprint(path: pathlib.Path) -> str:
    """Returns 32 hex digits of the size and of 16 evenly spaced blocks of 64 KiB, first and last among them.

    Files up to 1 MiB are hashed whole. An edit between the blocks of a longer file that keeps its size goes unseen.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _FINGERPRINT_BLOCKS * _FINGERPRINT_BLOCK_BYTES:
            digest.update(file.read())
        else:
            last = size - _FINGERPRINT_BLOCK_BYTES
            for block in range(_FINGERPRINT_BLOCKS):
                file.seek(last * block // (_FINGERPRINT_BLOCKS - 1))
                digest.update(file.read(_FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()


class BadRecord(ValueError):
    """One record that cannot be used; `data.on_bad_record="skip"` passes over it. Trouble of a file is no BadRecord."""


def _record_error(path: pathlib.Path, row: int, reason: str) -> BadRecord:
    return BadRecord(
        f"{path}, row {row}: {reason} Mend or remove that row. "
        "A run that has begun keeps to its text: a changed file needs another --workdir."
    )


def _checked(text: Any, *, path: pathlib.Path, row: int, field: str) -> str:
    """Returns `text` if it is text that UTF-8 can express; raises with file, row and reason otherwise."""
    if text is None:
        raise _record_error(path, row, f"{field!r} is null.")
    if not isinstance(text, str):
        raise _record_error(path, row, f"{field!r} is {type(text).__name__}, not text.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise _record_error(path, row, f"{field!r} is invalid UTF-8: {error.reason} at {error.start}.") from None
    return text


class JsonlDocuments:
    """A JSONL file as a sequence of texts, read in place. Blank lines are no documents. Rows are counted from 1.

    Memory: 16 bytes a document for the index. A file opened for each read costs 1 % of tokenizing the document and
    leaves no descriptors behind, however many files there are.
    """

    def __init__(self, path: pathlib.Path, *, field: str):
        self._path, self._field = path, field
        self._size = path.stat().st_size
        self._starts, self._ends = _line_spans(path, self._size)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> str:
        start, length = int(self._starts[index]), int(self._ends[index] - self._starts[index])
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size != self._size:
                raise ValueError(f"{self._path} changed its size since this run began; restore it or start again.")
            raw = _pread(descriptor, length=length, start=start)
        finally:
            os.close(descriptor)
        try:
            record = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8: {error.reason} at byte {error.start} of the row."
            raise _record_error(self._path, self._row(index), reason) from None
        except json.JSONDecodeError as error:
            reason = f"invalid or truncated JSON: {error.msg} at character {error.pos} of {len(raw)} bytes."
            raise _record_error(self._path, self._row(index), reason) from None
        if not isinstance(record, dict):
            raise _record_error(self._path, self._row(index), "not a JSON object.")
        if self._field not in record:
            keys = ", ".join(sorted(record)) or "none"
            reason = f"no key {self._field!r} (data.text_field); its keys are {keys}."
            raise _record_error(self._path, self._row(index), reason)
        text = record[self._field]
        if isinstance(text, str) and text.isascii():
            return text
        return _checked(text, path=self._path, row=self._row(index), field=self._field)

    def _row(self, index: int) -> int:
        """Returns the line number in the file; counted when needed, for it is needed for messages only."""
        with self._path.open("rb") as file:
            remaining, row = int(self._starts[index]), 1
            while remaining:
                chunk = file.read(min(remaining, 1 << 20))
                if not chunk:
                    break
                row, remaining = row + chunk.count(b"\n"), remaining - len(chunk)
        return row


def _pread(descriptor: int, *, length: int, start: int) -> bytes:
    """Returns `length` bytes from `start`; one call may give fewer than asked (Linux stops at 2 GiB)."""
    raw = os.pread(descriptor, length, start)
    while len(raw) < length:
        more = os.pread(descriptor, length - len(raw), start + len(raw))
        if not more:
            break
        raw += more
    return raw


def _line_spans(path: pathlib.Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64 starts and ends of the lines that are not blank, without their line ends."""
    if size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    breaks, blank_bytes, chunk_bytes = [], b" \t\r\n", 1 << 24
    with path.open("rb") as file:
        for offset in range(0, size, chunk_bytes):
            chunk = np.frombuffer(file.read(chunk_bytes), np.uint8)
            breaks.append(np.flatnonzero(chunk == ord("\n")) + offset)
        line_breaks = np.concatenate(breaks).astype(np.int64)
        if len(line_breaks) == 0 or line_breaks[-1] != size - 1:
            line_breaks = np.append(line_breaks, size)
        starts = np.concatenate([[0], line_breaks[:-1] + 1]).astype(np.int64)
        # only short lines can be blank by oversight; a long one of spaces fails as JSON, with its row
        short = np.flatnonzero(line_breaks - starts <= 80)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            blank = [line for line in short if not view[starts[line] : line_breaks[line]].strip(blank_bytes)]
    keep = np.ones(len(starts), bool)
    keep[blank] = False
    return starts[keep], line_breaks[keep]


class RowGroupCache:
    """The few decoded row groups used last, shared by all Parquet files of one corpus; safe for threads."""

    def __init__(self, max_groups: int = _CACHED_ROW_GROUPS):
        self._groups: collections.OrderedDict[tuple, Any] = collections.OrderedDict()
        self._max_groups, self._lock = max_groups, threading.Lock()

    def get(self, path: pathlib.Path, *, group: int, field: str) -> Any:
        """Returns the column `field` of one row group as a pyarrow ChunkedArray."""
        key = (path, group, field)
        with self._lock:
            if key not in self._groups:
                with pyarrow.parquet.ParquetFile(path) as file:
                    column = file.read_row_group(group, columns=[field], use_threads=False).column(0)
                self._groups[key] = column
                if len(self._groups) > self._max_groups:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(key)
            return self._groups[key]


class ParquetDocuments:
    """A Parquet file as a sequence of texts. Rows are counted from 1 over the whole file."""

    def __init__(self, path: pathlib.Path, *, field: str, cache: RowGroupCache):
        self._path, self._field, self._cache = path, field, cache
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a complete Parquet file ({error}); write it again.") from None
        if field not in schema.names:
            raise ValueError(f"{path} has no column {field!r} (data.text_field); it has {', '.join(schema.names)}.")
        kind = schema.field(field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(test(kind) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string)):
            raise ValueError(f"{path}: column {field!r} (data.text_field) is {kind}, not string.")
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        try:
            column = self._cache.get(self._path, group=group, field=self._field)
            text = column[index - int(self._starts[group])].as_py()
        except UnicodeDecodeError as error:
            reason = f"{self._field!r} is invalid UTF-8: {error.reason} at byte {error.start}."
            raise _record_error(self._path, index + 1, reason) from None
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{self._path}, row group {group + 1}: cannot be read ({error}); write it again."
            ) from None
        return _checked(text, path=self._path, row=index + 1, field=self._field)


class TextDocuments:
    """Plain-text files as a sequence of texts, one document a file."""

    def __init__(self, paths: Sequence[pathlib.Path]):
        self._paths = list(paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        try:
            return path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8: {error.reason} at byte {error.start}"
            raise ValueError(f"{path}: {reason}; convert it (iconv -t UTF-8) or remove it.") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read any more ({error.strerror}); restore it.") from None


class Corpus:
    """The documents of several files in one sequence. Attribute `manifest`: see open_documents."""

    def __init__(self, parts: Sequence[Any], manifest: dict[str, Any]):
        self._parts, self.manifest = list(parts), manifest
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in self._parts])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> str:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._parts[part][index - int(self._starts[part])]

    def locate(self, index: int) -> str:
        """Returns the file of a document and its number there."""
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"{self.manifest['files'][part]['name']}, document {index - int(self._starts[part]) + 1}"

    def token_lengths(self) -> np.ndarray | None:
        """Returns None: no token ids are stored."""
        return None


def open_corpus(
    spec: str,
    *,
    text_field: str,
    key: str,
    index_folder: pathlib.Path | None = None,
    tokenizer_sha256: str | None = None,
) -> Corpus:
    """Returns the documents that `spec` names; otherwise as open_documents."""
    del index_folder, tokenizer_sha256
    sources, files, cache = [], [], RowGroupCache()
    for kind, paths in _runs(resolve_files(spec, key=key)):
        if kind == "text":
            sources.append(TextDocuments(paths))
        elif kind == "jsonl":
            sources.append(JsonlDocuments(paths[0], field=text_field))
        else:
            sources.append(ParquetDocuments(paths[0], field=text_field, cache=cache))
        files.append(_manifest_entry(paths, num_documents=len(sources[-1])))
    num_documents = sum(len(source) for source in sources)
    if num_documents == 0:
        raise ValueError(f"{key}={spec!r}: {len(files)} file(s) hold no documents.")
    facts = [text_field] + [[entry[k] for k in ("bytes", "documents", "fingerprint")] for entry in files]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    corpus = Corpus(sources, {"files": files, "documents": num_documents, "text_field": text_field, "hash": digest})
    for index in range(len(corpus)):
        try:
            if corpus[index]:
                return corpus
        except BadRecord:
            continue
    raise ValueError(f"{key}={spec!r}: all {num_documents} documents are empty; look at data.text_field.")


def open_documents(spec: str, *, text_field: str, key: str) -> tuple[grain.MapDataset, dict[str, Any]]:
    """Returns the documents that `spec` names as a Grain MapDataset of str, and their manifest.

    The manifest says what the documents are, wherever they lie: for each file (a run of plain-text files is one
    entry) `name, bytes, documents, fingerprint`, then `documents` in all, `text_field` and `hash` of everything but
    the names. Two manifests of one hash give the same documents under the same numbers, as far as `fingerprint` sees.

    Raises:
      ValueError: see resolve_files; a file that cannot be indexed; no documents, or none with text in it.
    """
    corpus = open_corpus(spec, text_field=text_field, key=key)
    documents = grain.MapDataset.source(corpus)
    documents[0]
    return documents, corpus.manifest


def _runs(paths: list[pathlib.Path]) -> list[tuple[str, list[pathlib.Path]]]:
    """Returns (kind, files) in order: neighbouring plain-text files together, every other file by itself."""
    runs: list[tuple[str, list[pathlib.Path]]] = []
    for path in paths:
        suffix = path.suffix.lower()
        kind = "text" if suffix in TEXT_SUFFIXES else "jsonl" if suffix in JSONL_SUFFIXES else "parquet"
        if kind == "text" and runs and runs[-1][0] == "text":
            runs[-1][1].append(path)
        else:
            runs.append((kind, [path]))
    return runs


def _manifest_entry(paths: list[pathlib.Path], *, num_documents: int) -> dict[str, Any]:
    prints = [fingerprint(path) for path in paths]
    joined = prints[0] if len(paths) == 1 else hashlib.blake2b("".join(prints).encode(), digest_size=16).hexdigest()
    return {
        "name": paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more",
        "bytes": sum(path.stat().st_size for path in paths),
        "documents": num_documents,
        "fingerprint": joined,
    }
