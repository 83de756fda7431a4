"""Converts text of any format to a folder of ArrayRecord shards with a manifest, `python -m hlat_jax.data build`.

One thread reads the inputs and writes the shards, both in order. Other threads encode blocks of documents in between
(SentencePiece releases the GIL). So the same inputs and options give the same bytes, whatever the number of workers and
however often the build was killed and resumed. Until the build is complete everything is in the hidden folder
DIR/.building. A JSON file there for each finished shard has the place in the inputs where the shard ends.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

from hlat_jax.config import count_text
from hlat_jax.data.build import inputs, shards
from hlat_jax.data.build.shards import COUNTS
from hlat_jax.data.formats.built import FORMAT, index_path
from hlat_jax.data.formats.files import BUILDING_NAME, MANIFEST_NAME, SHARD_SUFFIX
from hlat_jax.data.formats.parts import Part, PartFacts, differences, part_of_folder, read_part
from hlat_jax.data.formats.paths import find_files
from hlat_jax.data.formats.records import Answered, BadRecord
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.store.atomic_files import sync_folder
from hlat_jax.store.bucket import Bucket, receive_all
from hlat_jax.store.metrics import duration
from hlat_jax.store.progress import Status
from hlat_jax.store.typed_json import Count, read_json

_BLOCK_CHARS = 1 << 18  # encoded by one thread at a time
_LONG_CHARS = 1 << 22  # a block of a longer document is written before more is read
_BAD_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """The options with which a dataset is built.

    Attributes:
      tokenizer: the path of the tokenizer, or "" to store text.
      shard_bytes: the bytes of text after which a shard ends.
      prepend_bos: whether documents of token ids begin with BOS.
      batch_size: the batch size of the runs. Fewer plain-text files are cut at paragraphs, see inputs.open_inputs.
      part: the part of the inputs to build, see `formats.parts`. None builds all.
      url: the folder of a bucket that the dataset is sent to afterwards, or "".
    """

    text_field: str = "text"
    tokenizer: str = ""
    max_document_chars: int = 500_000
    shard_bytes: int = 256 << 20
    on_bad_record: str = "raise"
    prepend_bos: bool = False
    batch_size: int = 1
    part: Part | None = None
    url: str = ""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """All that determines the bytes of a build. If `part` has facts, `input_files` are the inputs of this part."""

    input_files: Sequence[inputs.Input]
    options: BuildOptions
    tokenizer: Tokenizer | None
    part: PartFacts | None = None

    @functools.cached_property
    def hash(self) -> str:
        """Identifies the plan, without `on_bad_record`, which may change if a build is resumed."""
        options, tokenizer = self.options, self.tokenizer
        fields = [
            FORMAT,
            [[input_.file.name, input_.size, input_.fingerprint, input_.is_cut] for input_ in self.input_files],
            [options.text_field, options.shard_bytes, options.prepend_bos],
            [tokenizer.sha256, options.max_document_chars] if tokenizer else None,
        ]
        fields += [self.part] if self.part else []
        return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


class BuildResult(NamedTuple):
    """The manifest of a finished build, whether an earlier run of the command finished it, and notes about inputs."""

    manifest: dict[str, Any]
    was_complete: bool
    notes: list[str]


class _Record(NamedTuple):
    """One record of the inputs: `position` is (number of its input, records of that input read so far)."""

    position: tuple[int, int]
    document: str | shards.EncodedDocument | BadRecord  # text, then encoded


class _FinishedShard(TypedDict):
    """What the JSON file beside a finished shard holds."""

    plan: str
    position: list[Count]
    file_bytes: Count
    content: str
    documents: Count
    bytes: Count
    tokens: Count
    bad_records: Count
    long: list
    bad: list
    sources: dict[str, dict[str, Count]]


def build(
    words: Sequence[str],
    *,
    out: pathlib.Path,
    options: BuildOptions,
    num_workers: int = 1,
    status: Status | None = None,
) -> BuildResult:
    """Writes the documents that `words` name to the dataset `out`, and returns its manifest.

    Args:
      words: files, folders and globs, as in data.train, also of .gz and .zst.
      out: a folder that is new, empty, or holds an unfinished build of the same inputs and options, which is resumed.
        It holds the folders of all parts if `options` name one.
      options: the options of the build.
      num_workers: the number of threads that encode, which does not change the result.
      status: the progress, which is updated meanwhile.

    Raises:
      ValueError: bad input (see sources), no documents, no text, or other files in `out`.
      OSError: the disk is full or broken. Finished shards are kept.
    """
    searched = find_files(words, key=inputs.KEY, in_order=True)
    for folder in searched.folders:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--out={out} is inside the input {folder}. Give a folder outside it.")
    input_files = inputs.open_inputs(searched, batch_size=options.batch_size)
    notes = [searched.describe_ignored()] if searched.ignored else []
    if num_cut := sum(input_.is_cut for input_ in input_files):
        cut = f"{count_text(num_cut, 'text')}, fewer than --batch_size, cut at paragraphs as training would"
        notes.append(f"{cut} (--batch_size=1 keeps texts whole)")
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    if options.prepend_bos and tokenizer is None:
        raise ValueError("--prepend_bos needs --tokenizer. For a dataset of texts, set data.prepend_bos=True to train.")
    if tokenizer is not None:
        tokenizer.require_bos(options.prepend_bos, key="--prepend_bos")
    plan = _Plan(input_files, options, tokenizer)
    if options.part is not None:
        plan, out = _plan_part(plan, options.part, out=out), out / options.part.folder
    if (out / MANIFEST_NAME).exists():
        manifest = _require_plan(read_json(out / MANIFEST_NAME), plan, out=out)
        shutil.rmtree(out / BUILDING_NAME, ignore_errors=True)
        return BuildResult(manifest, True, notes)
    with _lock_folder(out) as folder:
        if not (folder / MANIFEST_NAME).exists():
            parts = _finished_shards(folder, plan=plan, out=out)
            parts += _write_shards(plan, parts, folder=folder, num_threads=num_workers, status=status or Status())
            manifest = _manifest(plan, parts)
            shards.write_whole(folder / MANIFEST_NAME, json.dumps(manifest, indent=1).encode() + b"\n")
            if manifest["bad_records"]:
                notes.append(f"skipped {count_text(manifest['bad_records'], 'bad record')}, such as")
                notes += [f"  {problem}" for part in parts for problem in part["bad"]][:_BAD_SHOWN]
        manifest = _require_plan(read_json(folder / MANIFEST_NAME), plan, out=out)
        _put_in_place(out, folder, manifest)
    return BuildResult(manifest, False, notes)


def _plan_part(whole: _Plan, part: Part, *, out: pathlib.Path) -> _Plan:
    """Returns the plan of one part of a build. Raises ValueError if `out` holds something else, or other parts."""
    input_files, options = whole.input_files, whole.options
    listed = [[input_.file.name, input_.size, input_.content, input_.is_cut] for input_ in input_files]
    digest = hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()
    facts = PartFacts(number=part.number, of=part.of, inputs=digest, text_field=options.text_field)
    mine = [input_files[index] for index in part.choose([input_.size for input_ in input_files])]
    plan = dataclasses.replace(whole, input_files=mine, part=facts)
    expected = {Part(number, part.of).folder for number in range(1, part.of + 1)}
    shown = options.url or out
    for name, other in _beside(out, options.url):
        if not name.startswith(".") and name not in expected:
            raise ValueError(f"--out={shown} holds {name}, no part of {part.of}; give another folder, or remove it.")
        if other and (differ := " and ".join(differences(_describe(plan), other))):
            raise ValueError(f"--out={shown} holds {name}, built with other {differ}. Give another folder.")
    return plan


def _beside(out: pathlib.Path, url: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields the names in the folder of all parts, each with its manifest if it is a part that is built."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    with tempfile.TemporaryDirectory() as copies:
        if url:
            bucket, out = Bucket(url, key="--out"), pathlib.Path(copies)
            sizes = bucket.sizes()
            names = {name.partition("/")[0] for name in sizes}
            manifests = {f"{name}/{MANIFEST_NAME}" for name in names if part_of_folder(name)} & sizes.keys()
            receive_all(bucket, {name: sizes[name] for name in manifests}, out)
        for name in sorted(names):
            yield name, read_part(out / name)


def _require_plan(made: dict[str, Any], plan: _Plan, *, out: pathlib.Path) -> dict[str, Any]:
    """Returns `made`, a manifest or finished shard in `out`; raises ValueError if it is of another build."""
    if made.get("plan") != plan.hash:
        raise ValueError(
            f"--out={plan.options.url or out} was built from other inputs or options, or its inputs changed since. "
            f"Give another folder, or remove {out}."
        )
    return made


@contextlib.contextmanager
def _lock_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields DIR/.building, locked, without the partial files of a killed process."""
    folder = out / BUILDING_NAME
    if out.exists() and (not out.is_dir() or (not folder.exists() and any(out.iterdir()))):
        raise ValueError(f"--out={out} is a file or is not empty. Give a new or empty folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 - held until the build ends
    except OSError as error:
        raise ValueError(f"cannot write to --out={out}: {error.strerror}. Give another folder.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is building in {out}. Wait for it, or give another --out.") from None
        for partial in folder.glob("*.partial"):
            partial.unlink()
        yield folder


def _shard_path(folder: pathlib.Path, shard_index: int) -> pathlib.Path:
    """Returns where a shard is while the build is incomplete."""
    return folder / f"shard-{shard_index:05d}{SHARD_SUFFIX}"


def _finished_shards(folder: pathlib.Path, *, plan: _Plan, out: pathlib.Path) -> list[_FinishedShard]:
    """Returns the metadata of the shards that an earlier run finished, up to the first that is not whole."""
    finished: list[_FinishedShard] = []
    while (path := _shard_path(folder, len(finished))).with_suffix(".json").exists():
        metadata = _require_plan(read_json(path.with_suffix(".json"), kind=_FinishedShard), plan, out=out)
        if not path.exists() or path.stat().st_size != metadata["file_bytes"]:
            break
        finished.append(metadata)
    return finished


def _write_shards(
    plan: _Plan, finished: Sequence[_FinishedShard], *, folder: pathlib.Path, num_threads: int, status: Status
) -> list[_FinishedShard]:
    """Writes the shards after the finished ones; returns their metadata, the last maybe of bad records alone."""
    options, tokenizer = plan.options, plan.tokenizer
    written: list[_FinishedShard] = []
    position = tuple(finished[-1]["position"]) if finished else (0, 0)
    totals = collections.Counter({name: sum(shard[name] for shard in finished) for name in ("documents", "bytes")})
    encode: Callable[[str], shards.EncodedDocument] = shards.encode_text
    if tokenizer is not None:
        rest = {"max_chars": options.max_document_chars, "bos": options.prepend_bos}
        encode = functools.partial(shards.encode_tokens, tokenizer=tokenizer, **rest)

    def open_shard() -> shards.ShardWriter:
        before = [*finished, *written]
        return shards.ShardWriter(
            _shard_path(folder, len(before)),
            dtype=None if tokenizer is None else shards.id_dtype(tokenizer.vocab_size),
            content=int(before[-1]["content"], 16) if before else 0,
        )

    def close(shard: shards.ShardWriter) -> None:
        metadata = shard.close() | {"plan": plan.hash, "position": list(position)}
        if metadata["documents"]:
            shards.write_whole(shard.path.with_suffix(".json"), json.dumps(metadata).encode())
        written.append(metadata)

    shard = open_shard()
    try:
        records = _read(plan.input_files, start=position, options=options, status=status)
        for block in _encode_in_order(records, encode, num_threads=num_threads):
            for record in block:
                # before the next record: after the last one a shard may have no documents, and is then no file
                if shard.counts["bytes"] >= options.shard_bytes:
                    close(shard)
                    shard = open_shard()
                position = record.position
                shard.add(position[0], record.document)
            totals.update(documents=len(block), bytes=sum(getattr(record.document, "num_bytes", 0) for record in block))
            status.text = f"{count_text(totals['documents'], 'document')}  {format_bytes(totals['bytes'])}"
        close(shard)
    finally:
        shard.discard()
    return written


def _read(
    input_files: Sequence[inputs.Input], *, start: tuple[int, ...], options: BuildOptions, status: Status
) -> Iterator[_Record]:
    """Yields the records after `start`; raises ValueError at a bad one with on_bad_record="raise"."""
    total_bytes, before_bytes = max(sum(input_.size for input_ in input_files), 1), 0
    for input_index, input_ in enumerate(input_files):
        if input_index < start[0]:
            before_bytes += input_.size
            continue
        count = num_chars = 0
        for document in inputs.read(input_, text_field=options.text_field):
            count += 1  # noqa: SIM113 - enumerate would keep a document while the next one is read
            if isinstance(document, BadRecord) and options.on_bad_record == "raise":
                raise document.for_command()
            if isinstance(document, Answered):
                raise ValueError(f"{document.where}: a dataset cannot mark the answers. Train on the JSONL itself.")
            num_chars += len(document) if isinstance(document, str) else 0
            status.share = (before_bytes + min(num_chars, input_.size)) / total_bytes
            if (input_index, count) > start:
                yield _Record((input_index, count), document)
            del document
        before_bytes += input_.size


def _encode_in_order(
    records: Iterator[_Record], encode: Callable[[str], shards.EncodedDocument], *, num_threads: int
) -> Iterator[list[_Record]]:
    """Yields blocks of records with encoded documents, in order; memory holds about one block per thread."""
    with concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="hlat-build") as pool:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for block, num_chars in _blocks(records):
            pending.append(pool.submit(_encode_block, block, encode))
            while len(pending) > (num_threads if num_chars <= _LONG_CHARS else 0):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _blocks(records: Iterator[_Record]) -> Iterator[tuple[list[_Record], int]]:
    """Yields consecutive records of about _BLOCK_CHARS, and their characters."""
    block, num_chars = [], 0
    for record in records:
        block.append(record)
        num_chars += len(record.document) if isinstance(record.document, str) else 0
        del record
        if num_chars >= _BLOCK_CHARS:
            yield block, num_chars
            block, num_chars = [], 0
    yield block, num_chars


def _encode_block(block: list[_Record], encode: Callable[[str], shards.EncodedDocument]) -> list[_Record]:
    """Returns the records encoded, taking each out of `block` so that a long text is freed once it is encoded."""
    encoded = []
    block.reverse()
    while block:
        position, document = block.pop()
        encoded.append(_Record(position, encode(document) if isinstance(document, str) else document))
        del document
    return encoded


def _manifest(plan: _Plan, parts: Sequence[_FinishedShard]) -> dict[str, Any]:
    """Returns the manifest of a dataset; raises ValueError if it has no documents."""
    input_files, tokenizer = plan.input_files, plan.tokenizer
    totals = {name: sum(part[name] for part in parts) for name in COUNTS}
    if totals["documents"] == 0 and plan.part is None:  # another part may have documents
        bad = count_text(totals["bad_records"], "bad record")
        raise ValueError(f"no documents in {count_text(len(input_files), 'input file')} ({bad}).")
    sources = [{"name": name} | dict.fromkeys(COUNTS, 0) for name in inputs.names(input_files)]
    for part in parts:
        for index, counts in part["sources"].items():
            for key in COUNTS:
                sources[int(index)][key] += counts[key]
    filled = [part for part in parts if part["documents"]]
    listed = [
        {"name": f"shard-{index:05d}-of-{len(filled):05d}{SHARD_SUFFIX}"}
        | {key: part[key] for key in ("documents", "bytes", "tokens", "long")}
        for index, part in enumerate(filled)
    ]
    if tokenizer is None:
        for counts in (totals, *sources, *listed):
            counts["tokens"] = None
    return {
        "format": FORMAT,
        **totals,
        "content_hash": parts[-1]["content"],
        **_describe(plan),
        "plan": plan.hash,
        "sources": sources,
        "shards": listed,
    }


def _describe(plan: _Plan) -> dict[str, Any]:
    """Returns the fields of a manifest that are known before its documents."""
    options, tokenizer = plan.options, plan.tokenizer
    return {
        "kind": "text" if tokenizer is None else "tokens",
        "tokenizer_sha256": tokenizer and tokenizer.sha256,
        "vocab_size": tokenizer and tokenizer.vocab_size,
        "eos_id": tokenizer and tokenizer.eos_id,
        "max_document_chars": tokenizer and options.max_document_chars,
        "prepend_bos": options.prepend_bos,
        **({"part": plan.part} if plan.part else {}),
    }


def _put_in_place(out: pathlib.Path, folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Renames the shards and then the manifest into DIR; may have done a part of it before it was killed."""
    for shard_index, shard in enumerate(manifest["shards"]):
        source, target = _shard_path(folder, shard_index), out / shard["name"]
        for old, new in ((index_path(source), index_path(target)), (source, target)):
            if old.exists():
                os.replace(old, new)
    sync_folder(out)
    os.replace(folder / MANIFEST_NAME, out / MANIFEST_NAME)
    sync_folder(out)
    shutil.rmtree(folder)


def summary(result: BuildResult, *, out: str, elapsed_s: float) -> str:
    """Returns the lines that the command prints at the end. `out` is its --out, a folder or a URL."""
    manifest, part = result.manifest, result.manifest.get("part")
    contents = f"{count_text(manifest['documents'], 'document')}, {format_bytes(manifest['bytes'])} of text"
    hint = f"train on it with --config.data.train={out}"
    if manifest["kind"] == "tokens":
        per_byte = manifest["tokens"] / max(manifest["bytes"], 1)
        contents += f", {count_text(manifest['tokens'], 'token')} ({per_byte:.3f} per byte)"
        hint += f" --config.model.vocab_size={manifest['vocab_size']} and the same tokenizer"
        hint += ", and --config.data.prepend_bos" * manifest["prepend_bos"]
    contents += f", {count_text(len(manifest['shards']), 'shard')}"
    how = "is complete" if result.was_complete else f"built in {duration(elapsed_s)}"
    if part:
        hint = f"with all {part['of']} parts built, {hint}"
        out = f"{out}/{Part(part['number'], part['of']).folder}"
    return "\n".join([f"{out} {how}: {contents}", *result.notes, hint])
