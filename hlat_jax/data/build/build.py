"""`python -m hlat_jax.data build`: converts text of any format to a folder of ArrayRecord shards with a manifest.

The same inputs and options give the same shards, whatever the number of workers and however often the build was killed
and resumed: consecutive inputs form tasks of similar size (see build_task), a shard ends once it holds enough bytes of
text, and manifest.json is written last. Until then everything is in the hidden folder DIR/.building.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TextIO

from hlat_jax.config import counted
from hlat_jax.data.build import build_task, inputs, shards
from hlat_jax.data.build.build_task import BuildOptions, Task
from hlat_jax.data.build.workers import COUNTS, SharedState, start_worker
from hlat_jax.data.formats.built import FORMAT, index_path
from hlat_jax.data.formats.files import MANIFEST_NAME, SHARD_SUFFIX
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.store.atomic_files import sync_folder
from hlat_jax.store.metrics import duration
from hlat_jax.store.progress import ProgressBar
from hlat_jax.store.typed_json import check_name, read_json

_BUILDING = ".building"
_FEW_DOCUMENTS = 32  # batches of that many rows are common
_PLAN, _RENAMES = "plan.json", "renames.json"
_Rename = Annotated[list[str], "two names", lambda pair: len(pair) == 2]


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """The manifest of a finished build.

    Attributes:
      manifest: as it is in manifest.json.
      bad: errors of some of the skipped records.
      was_complete: whether an earlier run of the command had finished it.
      ignored: a description of the files in input folders that are not read.
      num_cut: plain-text files that were cut at paragraphs.
    """

    manifest: dict[str, Any]
    bad: tuple[str, ...] = ()
    was_complete: bool = False
    ignored: str = ""
    num_cut: int = 0


def num_cores() -> int:
    """Returns the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build(
    words: Sequence[str],
    *,
    out: pathlib.Path,
    options: BuildOptions,
    num_workers: int,
    watch: Callable[[SharedState, int], contextlib.AbstractContextManager],
) -> BuildResult:
    """Writes the documents that `words` name to the dataset `out`, and returns its manifest.

    Args:
      words: files, folders and globs, as in data.train, also of .gz and .zst.
      out: a folder that is new, empty, or holds an unfinished build of the same inputs and options,
        which is resumed.
      options: of the build.
      num_workers: cores to use; does not change what is written.
      watch: from the shared state and the bytes of the inputs, returns a context manager that shows the progress.

    Raises:
      ValueError: bad input (see sources), no documents, none with text, or something else in `out`.
      OSError: the disk is full or broken, or a worker was killed. Finished shards are kept.
    """
    searched = inputs.find(words)
    _check_outside(out, searched.folders)
    found = inputs.open_inputs(searched, batch_size=options.batch_size)
    said = {"ignored": searched.describe_ignored(), "num_cut": sum(input_.is_cut for input_ in found)}
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    if options.prepend_bos and tokenizer is None:
        raise ValueError("--prepend_bos needs --tokenizer; of a dataset of texts, set data.prepend_bos=True to train.")
    if tokenizer is not None:
        tokenizer.require_bos(options.prepend_bos, key="--prepend_bos")
    plan = _plan(found, options=options, tokenizer=tokenizer)
    complete = _complete(out, plan)
    if complete is not None:
        return BuildResult(complete, was_complete=True, **said)
    with _unfinished(out, plan) as folder:
        bad: tuple[str, ...] = ()
        if not (folder / MANIFEST_NAME).exists():
            tasks = _tasks(found, shard_bytes=options.shard_bytes, plan_hash=_plan_hash(plan))
            metadata = _run(tasks, folder=folder, options=options, num_workers=num_workers, watch=watch)
            try:
                manifest = _manifest(metadata, found=found, plan=plan, tokenizer=tokenizer, options=options)
            except ValueError:
                shutil.rmtree(folder)
                raise
            _write_manifest(folder, manifest, metadata=metadata)
            bad = tuple(message for shard in metadata for message in shard["bad"])
        return BuildResult(_put_in_place(out, folder), bad=bad, **said)


def _check_outside(out: pathlib.Path, folders: Sequence[pathlib.Path]) -> None:
    for folder in folders:
        if out.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"--out={out} is inside the input {folder}: its documents would be read twice later. "
                "Choose a folder outside it."
            )


def _plan(found: Sequence[inputs.Input], *, options: BuildOptions, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns all settings that determine the bytes of a build; `on_bad_record` may change when it is resumed."""
    return {
        "format": FORMAT,
        "inputs": [[each.file.name, each.size, each.fingerprint, *["cut"] * each.is_cut] for each in found],
        "text_field": options.text_field,
        "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
        "max_document_chars": None if tokenizer is None else options.max_document_chars,
        "shard_bytes": options.shard_bytes,
    } | ({"prepend_bos": True} if options.prepend_bos else {})


def _plan_hash(plan: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(plan).encode(), digest_size=16).hexdigest()


def _complete(out: pathlib.Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the manifest if an earlier run finished this build, or None if `out` has no manifest."""
    path = out / MANIFEST_NAME
    if not path.exists():
        return None
    try:
        manifest = read_json(path)
        is_same = manifest.get("plan") == _plan_hash(plan)
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"--out={out} holds a dataset that was built from other inputs or options, or whose inputs changed since; "
            "choose another folder, or remove this one."
        )
    shutil.rmtree(out / _BUILDING, ignore_errors=True)
    return manifest


@contextlib.contextmanager
def _unfinished(out: pathlib.Path, plan: dict[str, Any]) -> Iterator[pathlib.Path]:
    """Yields DIR/.building, locked, of this plan, and without the partial files of a killed process."""
    folder = out / _BUILDING
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={out} is a file; give a folder.")
    if not folder.exists() and out.exists() and any(out.iterdir()):
        raise ValueError(f"--out={out} is not empty; give a new or empty folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")  # noqa: SIM115 - held until the build ends
    except OSError as error:
        raise ValueError(f"cannot write to --out={out}: {error.strerror}; choose another folder.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is building in {out}; wait for it, or choose another --out.") from None
        for partial in folder.glob("*.partial"):
            partial.unlink()
        before = read_json(folder / _PLAN) if (folder / _PLAN).exists() else {}
        differs = [key for key in {**before, **plan} if plan.get(key) != before.get(key)]
        is_staged = any(
            (folder / name).exists() for name in (MANIFEST_NAME, _RENAMES)
        )  # shards may be in `out` already
        if differs and (is_staged or any(folder.glob(f"*{SHARD_SUFFIX}"))):
            raise ValueError(
                f"--out={out} holds an unfinished build that differs in {', '.join(differs)}; run its command again "
                f"to finish it, or remove {out if is_staged else folder} to start over."
            )
        if differs:  # remove what an attempt without shards left, such as the metadata of a task of bad records
            for path in folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            shards.write_whole(folder / _PLAN, json.dumps(plan).encode())
        yield folder


def _tasks(found: Sequence[inputs.Input], *, shard_bytes: int, plan_hash: str) -> list[Task]:
    """Returns tasks of consecutive inputs of about `shard_bytes`; a larger input is a task of several shards."""
    groups: list[list[inputs.Input]] = [[]]
    group_bytes = 0
    for input_ in found:
        if group_bytes >= shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(input_)
        group_bytes += input_.size
    return [Task(number, tuple(group), plan_hash) for number, group in enumerate(groups)]


def _run(
    tasks: Sequence[Task],
    *,
    folder: pathlib.Path,
    options: BuildOptions,
    num_workers: int,
    watch: Callable[[SharedState, int], contextlib.AbstractContextManager],
) -> list[dict[str, Any]]:
    """Returns the metadata of all shards in the order of the inputs; runs `num_workers` tasks at a time."""
    context = multiprocessing.get_context("spawn")  # a process that has imported JAX must not fork
    shared = SharedState(context, num_tasks=len(tasks), num_cores=num_workers)
    with watch(shared, sum(task.size for task in tasks)):
        if min(num_workers, len(tasks)) == 1:
            return [
                metadata
                for task in tasks
                for metadata in build_task.run(task, folder=folder, options=options, shared=shared)
            ]
        pool = concurrent.futures.ProcessPoolExecutor(
            min(num_workers, len(tasks)),
            mp_context=context,
            initializer=start_worker,
            initargs=(shared,),
        )
        with pool:
            # workers inherit the mask, so that Ctrl-C does not reach one that is still importing
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                try:
                    # largest first, because the build waits for the last one
                    futures = {
                        task.number: pool.submit(build_task.run_in_worker, task, folder, options)
                        for task in sorted(tasks, key=lambda task: -task.size)
                    }
                finally:  # a Ctrl-C received in between is raised here
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                for future in concurrent.futures.as_completed(futures.values()):
                    future.result()
            except BaseException as error:
                shared.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                if isinstance(error, concurrent.futures.process.BrokenProcessPool):
                    raise OSError(
                        "a worker process died, perhaps killed because memory ran out. Finished shards are kept: run "
                        "the same command again to resume, with fewer --workers if memory is short."
                    ) from None
                raise
        return [metadata for task in tasks for metadata in futures[task.number].result()]


def _manifest(
    metadata: Sequence[dict[str, Any]],
    *,
    found: Sequence[inputs.Input],
    plan: dict[str, Any],
    tokenizer: Tokenizer | None,
    options: BuildOptions,
) -> dict[str, Any]:
    totals = {name: sum(shard[name] for shard in metadata) for name in COUNTS}
    if totals["documents"] == 0:
        bad = counted(totals["bad_records"], "bad record")
        raise ValueError(f"the {len(found)} input file(s) hold no documents ({bad}).")
    sources = [{"name": name} | dict.fromkeys(COUNTS, 0) for name in inputs.names(found)]
    for shard in metadata:
        for number, counts in shard["sources"].items():
            for key in COUNTS:
                sources[int(number)][key] += counts[key]
    filled = [shard for shard in metadata if shard["documents"]]
    kept = ("documents", "bytes", "tokens", "long", "file_bytes", "blake2b")
    listed = [
        {"name": f"shard-{number:05d}-of-{len(filled):05d}{SHARD_SUFFIX}"} | {key: shard[key] for key in kept}
        for number, shard in enumerate(filled)
    ]
    if tokenizer is None:
        for counts in (totals, *sources, *listed):
            counts["tokens"] = None
    return {
        "format": FORMAT,
        "kind": "text" if tokenizer is None else "tokens",
        **totals,
        "content_hash": shards.joined_hash((int(shard["content"], 16), shard["documents"]) for shard in metadata),
        "tokenizer_sha256": plan["tokenizer_sha256"],
        "vocab_size": None if tokenizer is None else tokenizer.vocab_size,
        "eos_id": None if tokenizer is None else tokenizer.eos_id,
        "max_document_chars": plan["max_document_chars"],
        **({"prepend_bos": True} if options.prepend_bos else {}),
        "plan": _plan_hash(plan),
        "sources": sources,
        "shards": listed,
    }


def _write_manifest(folder: pathlib.Path, manifest: dict[str, Any], *, metadata: Sequence[dict[str, Any]]) -> None:
    """Writes the renames to be done and the manifest into DIR/.building, so that a kill in between loses nothing."""
    filled = [shard["name"] for shard in metadata if shard["documents"]]
    renames = [[old, shard["name"]] for old, shard in zip(filled, manifest["shards"], strict=True)]
    shards.write_whole(folder / _RENAMES, json.dumps(renames).encode())
    shards.write_whole(folder / MANIFEST_NAME, json.dumps(manifest, indent=1).encode() + b"\n")


def _put_in_place(out: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Renames the shards and then the manifest into DIR, resuming after a kill; returns the manifest."""
    path = folder / _RENAMES
    try:
        renames = read_json(path, kind=list[_Rename])
    except ValueError as error:
        raise ValueError(f"{str(error).rstrip('.')}; remove {out} and build the dataset again.") from None
    for old, new in renames:
        for name in (old, new):
            check_name(name, str(path))
        for source, target in (
            (index_path(folder / old), index_path(out / new)),
            (folder / old, out / new),
        ):
            if source.exists():
                os.replace(source, target)
    sync_folder(out)
    os.replace(folder / MANIFEST_NAME, out / MANIFEST_NAME)
    sync_folder(out)
    shutil.rmtree(folder)
    return read_json(out / MANIFEST_NAME)


def progress_on(stream: TextIO) -> Callable[[SharedState, int], ProgressBar]:
    """Returns the `watch` of `build` that shows its progress on `stream`."""

    def watch(shared: SharedState, input_bytes: int) -> ProgressBar:
        def read() -> tuple[float, str]:
            counts = dict(zip(COUNTS, shared.counts[:], strict=True))
            text = f"{counts['documents']:,} documents  {format_bytes(counts['bytes'])}"
            text += f"  {counts['tokens'] / 1e6:,.1f} M tokens" if counts["tokens"] else ""
            text += f"  {counts['bad_records']:,} bad records" if counts["bad_records"] else ""
            return min(shared.input_bytes.value / max(input_bytes, 1), 1.0), text

        return ProgressBar(read, stream=stream)

    return watch


def summary(result: BuildResult, *, out: pathlib.Path, elapsed_s: float) -> str:
    """Returns the lines that the command prints at the end."""
    manifest = result.manifest
    what = f"{counted(manifest['documents'], 'document')}, {format_bytes(manifest['bytes'])} of text"
    if manifest["tokens"] is not None:
        per_byte = manifest["tokens"] / manifest["bytes"]
        what += f", {counted(manifest['tokens'], 'token')} ({per_byte:.3f} per byte)"
    time = "" if result.was_complete else f" in {duration(elapsed_s)}"
    what += f", {counted(len(manifest['shards']), 'shard')}"
    lines = [f"{out} {'is complete' if result.was_complete else 'built'}: {what}{time}"]
    if manifest["bad_records"]:
        lines.append(f"skipped {counted(manifest['bad_records'], 'bad record')}{', such as' if result.bad else ''}")
        lines += [f"  {message}" for message in result.bad[:5]]
    lines += [result.ignored] if result.ignored else []
    if result.num_cut:
        lines.append(
            f"{counted(result.num_cut, 'text')}, fewer than --batch_size, cut at paragraphs as training would; "
            "--batch_size=1 keeps texts whole"
        )
    if manifest["documents"] < _FEW_DOCUMENTS:
        lines.append(
            f"few documents: each row of a batch reads documents of its own, so data.batch_size can be at most "
            f"{manifest['documents']}. A .txt or .md file is one document unless there are fewer than --batch_size: "
            "give that of the run."
        )
    hint = f"train on it with --config.data.train={out}"
    if manifest["kind"] == "tokens":
        hint += f" --config.model.vocab_size={manifest['vocab_size']} and the same tokenizer"
        hint += ", and --config.data.prepend_bos" * manifest.get("prepend_bos", False)
    lines.append(hint)
    return "\n".join(lines)
