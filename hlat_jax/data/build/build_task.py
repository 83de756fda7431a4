"""One task of a build: converts consecutive inputs to consecutive shards, and resumes where a killed run stopped.

A task reads its inputs in order in the thread that also writes, and encodes in threads (SentencePiece releases the GIL)
a bounded number of documents ahead. Beside each finished shard is NAME.json, written last: its counts, size and hash,
the position in the inputs after it, and the hash of the build plan. A shard is finished only if its NAME.json matches
both the shard and the plan.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np

from hlat_jax.data.build import inputs, shards
from hlat_jax.data.build.workers import COUNTS, BuildStopped, SharedState, worker_state
from hlat_jax.data.formats.files import SHARD_SUFFIX
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.store.typed_json import Count, checked, read_json

_BLOCK_CHARS = 1 << 18  # of documents encoded by one thread at a time
_AHEAD_CHARS = 1 << 26
_BAD_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """How a dataset is built.

    Attributes:
      tokenizer: a path; "": text is stored.
      on_bad_record: "raise" or "skip".
      prepend_bos: documents of token ids begin with BOS.
      batch_size: of the runs: fewer plain-text files are cut at paragraphs, see inputs.open_inputs.
    """

    text_field: str = "text"
    tokenizer: str = ""
    max_document_chars: int = 500_000
    shard_bytes: int = 256 << 20
    on_bad_record: str = "raise"
    prepend_bos: bool = False
    batch_size: int = 1


class _Counts(TypedDict):
    documents: Count
    bytes: Count
    tokens: Count
    bad_records: Count


class _Metadata(_Counts):
    """What lies beside a finished shard."""

    name: str
    plan: str
    last: bool
    position: Annotated[list[Count], "two integers of at least 0", lambda place: len(place) == 2]
    bad: list
    content: Annotated[str, "32 hex digits", lambda text: re.fullmatch("[0-9a-f]{32}", text)]
    sources: dict[str, _Counts]


class _Written(TypedDict):
    """What lies there too if the shard has documents."""

    file_bytes: Count
    blake2b: str
    index_blake2b: str | None
    long: list


@dataclasses.dataclass(frozen=True)
class Task:
    """Consecutive inputs that one process converts to the shards task-NNNNN.0000, task-NNNNN.0001, ..."""

    number: int
    inputs: tuple[inputs.Input, ...]
    plan_hash: str  # so that shards of another build are never mistaken for those of this task

    @property
    def size(self) -> int:
        """Bytes of the inputs."""
        return sum(input_.size for input_ in self.inputs)

    def shard_path(self, folder: pathlib.Path, shard: int) -> pathlib.Path:
        """Returns where one shard is while the build is incomplete."""
        return folder / f"task-{self.number:05d}.{shard:04d}{SHARD_SUFFIX}"


def run(task: Task, *, folder: pathlib.Path, options: BuildOptions, shared: SharedState) -> list[dict[str, Any]]:
    """Runs one task; returns the metadata of its shards, including those that an earlier run finished.

    Raises:
      ValueError: a bad record (on_bad_record="raise"), or an input that cannot be read.
      OSError: the disk is full or broken.
      BuildStopped: another task failed.
    """
    finished = finished_shards(task, folder=folder, options=options)
    for metadata in finished:
        shared.add(metadata)
    if finished and finished[-1]["last"]:
        shared.add_input_bytes(task.size)
    else:
        finished += _write_shards(task, finished, folder=folder, options=options, shared=shared)
    shared.finish_task()
    return finished


def run_in_worker(task: Task, folder: pathlib.Path, options: BuildOptions) -> list[dict[str, Any]]:
    """Runs a task in a process that `workers.start_worker` initialized."""
    return run(task, folder=folder, options=options, shared=worker_state())


def finished_shards(task: Task, *, folder: pathlib.Path, options: BuildOptions) -> list[dict[str, Any]]:
    """Returns the metadata of the shards that an earlier run finished, up to the first that is missing or damaged.

    With on_bad_record="raise", a shard for which a bad record was skipped is not finished.
    """
    found: list[dict[str, Any]] = []
    while not (found and found[-1]["last"]):
        path = task.shard_path(folder, len(found))
        if not _metadata_path(path).exists():
            break
        try:
            metadata = read_json(_metadata_path(path), kind=_Metadata)
            if metadata["plan"] != task.plan_hash:
                break
            if metadata["bad_records"] and options.on_bad_record == "raise":
                break
            if metadata["documents"] and not shards.is_intact(path, checked(metadata, _Written, where=str(path))):
                break
        except ValueError:
            break
        found.append(metadata)
    return found


def _metadata_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.json")


class _Item(NamedTuple):
    """One record of the inputs: `place` is (number of its input in the task, records of that input read so far)."""

    place: tuple[int, int]
    document: str | BadRecord


class _EncodedItem(NamedTuple):
    """A record after encoding: a document as it is stored, or why it is bad."""

    place: tuple[int, int]
    encoded: shards.EncodedDocument | None
    bad: str


class _OpenShard:
    """A shard that is being written, and its metadata so far."""

    def __init__(self, task: Task, number: int, *, folder: pathlib.Path, dtype: np.dtype | None):
        self._task, self._path, self._dtype = task, task.shard_path(folder, number), dtype
        self._writer: shards.ShardWriter | None = (
            None  # opened at the first document: a shard without documents has no file
        )
        self._content, self._place = 0, (0, 0)
        self.num_bytes = 0
        self._sources: dict[int, dict[str, int]] = {}
        self._bad: list[str] = []

    def add(self, item: _EncodedItem) -> None:
        """Appends one document, or counts a bad record; raises OSError when the disk is full."""
        source = self._task.inputs[item.place[0]].number
        counts = self._sources.setdefault(source, dict.fromkeys(COUNTS, 0))
        self._place, encoded = item.place, item.encoded
        if encoded is None:
            counts["bad_records"] += 1
            self._bad += [item.bad] if len(self._bad) < _BAD_SHOWN else []
            return
        if self._writer is None:
            self._writer = shards.ShardWriter(self._path, dtype=self._dtype)
        self._writer.add(encoded)
        counts["documents"] += 1
        counts["bytes"] += encoded.num_bytes
        self.num_bytes += encoded.num_bytes
        counts["tokens"] += 0 if self._dtype is None else len(encoded.data)
        self._content = shards.appended_hash(self._content, encoded.digest)

    def close(self, *, last: bool) -> dict[str, Any]:
        """Renames the shard into place, writes its metadata beside it, and returns them."""
        written = {} if self._writer is None else self._writer.close()
        totals = {name: sum(counts[name] for counts in self._sources.values()) for name in COUNTS}
        metadata = {**totals, **written, "last": last, "position": list(self._place), "bad": self._bad}
        metadata["content"] = f"{self._content:032x}"
        metadata["sources"] = {str(source): counts for source, counts in self._sources.items()}
        metadata["name"], metadata["plan"] = self._path.name, self._task.plan_hash
        shards.write_whole(_metadata_path(self._path), json.dumps(metadata).encode())
        return metadata

    def discard(self) -> None:
        """Removes a shard that was not closed."""
        if self._writer is not None:
            self._writer.discard()


def _write_shards(
    task: Task, finished: list[dict[str, Any]], *, folder: pathlib.Path, options: BuildOptions, shared: SharedState
) -> list[dict[str, Any]]:
    """Writes the unfinished shards; returns their metadata."""
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    dtype = None if tokenizer is None else shards.id_dtype(tokenizer.vocab_size)
    start = tuple(finished[-1]["position"]) if finished else (0, 0)
    items = _items(task, start=start, options=options, shared=shared)
    new: list[dict[str, Any]] = []

    def open_shard() -> _OpenShard:
        return _OpenShard(task, len(finished) + len(new), folder=folder, dtype=dtype)

    shard = open_shard()
    try:
        with concurrent.futures.ThreadPoolExecutor(shared.num_cores, thread_name_prefix="hlat-build") as pool:
            for block in _encoded_ahead(items, _encoder(options, tokenizer=tokenizer), pool=pool, shared=shared):
                for item in block:
                    # before the next record, so that the last shard of a task is known when it is closed
                    if shard.num_bytes >= options.shard_bytes:
                        new.append(shard.close(last=False))
                        shard = open_shard()
                    shard.add(item)
                shared.add(_block_counts(block, dtype=dtype))
        new.append(shard.close(last=True))
    except BaseException:
        shard.discard()
        raise
    return new


def _items(task: Task, *, start: tuple[int, int], options: BuildOptions, shared: SharedState) -> Iterator[_Item]:
    """Yields the records of a task after `start`; raises at a bad one with on_bad_record="raise"."""
    shared.add_input_bytes(sum(input_.size for input_ in task.inputs[: start[0]]))
    for number, input_ in enumerate(task.inputs[start[0] :], start[0]):
        uncounted = input_.size
        count = 0
        for document in inputs.read(input_, text_field=options.text_field):
            count += 1  # noqa: SIM113 - enumerate would keep a document while the next one is read
            if isinstance(document, BadRecord):
                if options.on_bad_record == "raise":
                    raise document.for_command()
            else:
                counted = min(len(document), uncounted)  # a file holds about as many bytes, or fewer if compressed
                uncounted -= counted
                shared.add_input_bytes(counted)
            if number > start[0] or count > start[1]:
                yield _Item((number, count), document)
            del document
        shared.add_input_bytes(uncounted)


def _encoder(options: BuildOptions, *, tokenizer: Tokenizer | None) -> Callable[[str], shards.EncodedDocument]:
    if tokenizer is None:
        return shards.encode_text
    tokens = {"tokenizer": tokenizer, "max_chars": options.max_document_chars, "bos": options.prepend_bos}
    return functools.partial(shards.encode_tokens, **tokens)


_Block = list[_EncodedItem]


def _encoded_ahead(
    items: Iterator[_Item],
    encode: Callable[[str], shards.EncodedDocument],
    *,
    pool: concurrent.futures.Executor,
    shared: SharedState,
) -> Iterator[_Block]:
    """Yields blocks of items in order, each encoded by a thread; memory holds about one block per thread.

    Nothing is read after a long document until that document is written.
    """
    pending: collections.deque[tuple[concurrent.futures.Future, int]] = collections.deque()
    ahead_chars = 0
    for block, num_chars in _blocks(items):
        if shared.stop.is_set():
            raise BuildStopped
        pending.append((pool.submit(_encoded_block, block, encode), num_chars))
        ahead_chars += num_chars
        while pending and (len(pending) > max(shared.num_threads(), 1) or ahead_chars > _AHEAD_CHARS):
            future, num_chars = pending.popleft()
            ahead_chars -= num_chars
            yield future.result()
            del future
    for future, _ in pending:
        yield future.result()


def _blocks(items: Iterator[_Item]) -> Iterator[tuple[list[_Item], int]]:
    block, num_chars = [], 0
    for item in items:
        block.append(item)
        num_chars += len(item.document) if isinstance(item.document, str) else 0
        if num_chars >= _BLOCK_CHARS:
            yield block, num_chars
            block, num_chars = [], 0
        del item
    if block:
        yield block, num_chars


def _encoded_block(block: list[_Item], encode: Callable[[str], shards.EncodedDocument]) -> _Block:
    """Returns the items encoded, taking each out of `block` so that a long text is freed once it is encoded."""
    encoded = []
    block.reverse()
    while block:
        place, document = block.pop()
        is_bad = isinstance(document, BadRecord)
        encoded.append(_EncodedItem(place, None if is_bad else encode(document), document.problem if is_bad else ""))
        del document
    return encoded


def _block_counts(block: _Block, *, dtype: np.dtype | None) -> dict[str, int]:
    documents = [item.encoded for item in block if item.encoded is not None]
    return {
        "documents": len(documents),
        "bytes": sum(encoded.num_bytes for encoded in documents),
        "tokens": 0 if dtype is None else sum(len(encoded.data) for encoded in documents),
        "bad_records": len(block) - len(documents),
    }
