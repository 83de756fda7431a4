"""Copies of a run in a bucket: each checkpoint is sent by a thread, and a start on an empty disk fetches the newest.

RUN_RECORD in the bucket names the run, and the start of it that writes there; in the run folder it names the run.
A store that fails stops no training: each failure is a line, and only the end of the run is an error, COPY_CODE.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypedDict

import jax

from hlat_jax.config import Config
from hlat_jax.data.kept_tokenizer import FOLDER as TOKENIZER_FOLDER
from hlat_jax.facts.local_paths import is_bucket, local_path
from hlat_jax.host import distributed
from hlat_jax.host.console import say
from hlat_jax.host.process import StopSignals
from hlat_jax.run.drift import refuse_drift
from hlat_jax.run.goodput import COPYING, EVENTS_FILE
from hlat_jax.store import atomic_files, remote
from hlat_jax.store.bucket import (
    CHECKPOINTS,
    PROBE,
    Bucket,
    begin_checkpoint,
    finish_checkpoint,
    manifest_sizes,
    receive_all,
    receive_share,
    whole_steps,
)
from hlat_jax.store.checkpoint import BEST_LINK
from hlat_jax.store.checkpoint_checks import RUN_FILE, RUN_ITEM, saved_run, saved_steps
from hlat_jax.store.integrity import INTEGRITY_FILE, damage_of_share
from hlat_jax.store.metrics import DISCARDED_FILE, ROWS_FILE
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights.hf_files import KEPT

COPY_CODE = 74  # of a run that is saved in its folder, while its last checkpoint is not in the bucket
KEY = "checkpoint.copy_to"
RUN_RECORD, _BEST_RECORD = "copied_run.json", "copied_best.json"
_PEERS_S, _POLL_S = 600.0, 2.0  # for the files that other processes send: without a new one, and between two looks
# What a resumed run and other commands read beside a checkpoint: files that grow, and files that stay as they are.
_GROWING, _FIXED = (ROWS_FILE, DISCARDED_FILE, EVENTS_FILE, "*.json"), (f"{TOKENIZER_FOLDER}/*", f"{KEPT}/**/*")
_RUN_FILE = re.compile(rf"[^/]+\.jsonl?|({TOKENIZER_FOLDER}|{KEPT})/.+")  # all of them, by their names in the bucket
_SHARD = re.compile(r"state/ocdbt\.process_(\d+)/d/\w+")  # named at random: same name and size, same content


class _Record(TypedDict):
    run: str


class Copier:
    """Copies the checkpoints of one run to `checkpoint.copy_to`, if this key is set. Every process has a copier."""

    def __init__(self, config: Config, workdir: pathlib.Path):
        """Sends no request. Raises ValueError for a URL that is not of a bucket, and for the run folder itself."""
        self._config, self._workdir = config, workdir
        self._ended = threading.Event()
        self._step = self._reading = 0  # the newest checkpoint that was offered, and the one that is being sent
        self._sent: set[int] = set()
        self.problem, self._run, self._start = "", "", b""
        self.on_failure: Callable[[str], None] = lambda problem: None  # set once the run has a ledger
        self._work: list[concurrent.futures.Future[None]] = []
        self._bucket: Bucket | None = None
        if (url := config.checkpoint.copy_to) == "":
            return
        if not is_bucket(url) and local_path(url, key=KEY, use="bucket").resolve() == workdir.resolve():
            raise ValueError(f"{KEY}={url} is the run folder itself. Give a bucket, or a folder of another disk.")
        self._bucket = Bucket(url, key=KEY, ended=self._ended)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hlat-copy")

    @property
    def reading_step(self) -> int:
        """The step of the checkpoint that is being sent, or 0."""
        return self._reading or (0 if self._step in self._sent else self._step)

    def open(self, signals: StopSignals) -> None:
        """Fetches the newest whole checkpoint if the run folder has only older ones. All processes call it.

        Raises:
          ValueError: the bucket cannot be written, holds another run, or that run has other settings.
          OSError: the store does not answer, and the folder has no checkpoint to go on with.
        """
        if self._bucket is None:
            return
        with signals.phase("fetching the checkpoint"):
            own = self._run = _own_run(self._workdir)
            try:
                _probe(self._bucket, f"{PROBE}-{jax.process_index()}")
                steps = self._compare(own) if distributed.is_first() else []
            except (remote.RemoteError, PermissionError) as error:
                if not own or not _newest_local(self._workdir):
                    if isinstance(error, PermissionError):
                        raise _cannot_be_written(self._bucket, error) from None
                    raise OSError(f"{KEY}={self._bucket.url} cannot be reached: {error}.") from None
                self._fail(f"{self._bucket.url} cannot be reached: {error}")
                steps = []
            for step in json.loads(distributed.exchange(json.dumps(steps))[0]):
                if self._fetch(step):
                    self._fetch_best()
                    break

    def begin(self) -> None:
        """Offers the newest checkpoint of the run folder, as a kill may have cut its copy short."""
        if self._bucket is not None and distributed.is_first():
            atomic_files.write_json(self._workdir / RUN_RECORD, {"run": self._run})
            self._work.append(self._thread.submit(self._claim))  # if it fails, the first copy tries again
        self.offer(max(saved_steps(self._workdir / CHECKPOINTS), default=0))

    def offer(self, step: int) -> None:
        """Starts to copy a new checkpoint, after the checkpoint that is being sent."""
        if self._bucket is not None and step > self._step:
            self._step = step
            self._work = [work for work in self._work if not work.done()]
            self._work.append(self._thread.submit(self._copy_new, step))

    def finish(self, signals: StopSignals) -> str:
        """Waits for the copy of the newest checkpoint. Returns why it failed, or "". All processes call it."""
        if self._bucket is None:
            return ""
        unfinished = f"the copy of step {self._step} to {self._bucket.url}"
        with signals.phase(COPYING, unfinished=unfinished):
            concurrent.futures.wait(self._work)
            [problem, *_] = distributed.exchange(self.problem)
        return problem

    def close(self) -> None:
        """Ends the thread after the object that it is sending."""
        self._ended.set()
        if self._bucket is not None:
            self._thread.shutdown(cancel_futures=True)

    # At the start

    def _compare(self, own: str) -> list[int]:
        """Returns the steps to fetch, in the order of choice. Raises ValueError if the bucket holds another run."""
        bucket, local = self._bucket, _newest_local(self._workdir)
        content, steps = bucket.read(RUN_RECORD), whole_steps(bucket.sizes(under=CHECKPOINTS))
        theirs = _run_of(content)
        is_copy = b'"start"' in (content or b"")  # else the record is that of a run folder, or there is none
        if not is_copy and (steps or bucket.read("config.json") is not None):
            raise ValueError(f"{KEY}={bucket.url} is a run folder, no copy of one. Give a new folder for the copies.")
        if (local or own) and (theirs or steps) and theirs != own:
            raise ValueError(
                f"{KEY}={bucket.url} holds the checkpoints of another run than {self._workdir}. Give a folder of the "
                "bucket for each run. To go on with the run in the bucket, give an empty --workdir."
            )
        if steps and not local:
            self._check_settings(steps[0])
        self._run = theirs or own or secrets.token_hex(8)
        return [step for step in steps if step > local]

    def _check_settings(self, step: int) -> None:
        """Raises ValueError if the config is not that of a checkpoint in the bucket, before anything is fetched."""
        name = f"{CHECKPOINTS}/{step}/{RUN_ITEM}/{RUN_FILE}"
        try:
            saved = json.loads(self._bucket.read(name) or b"")["metadata"]
            current = saved | {"config": self._config.to_dict()}
        except (ValueError, LookupError, TypeError):
            return  # damaged: it is named where it is fetched
        try:
            refuse_drift(saved, current, step=step, workdir=self._workdir)
        except ValueError as error:
            raise ValueError(f"{KEY}={self._bucket.url} holds another run: {error}") from None

    def _fetch(self, step: int) -> bool:
        """Fetches a checkpoint and the files of the run. Prints why and returns False if it is damaged."""
        bucket, folder, began_s = self._bucket, self._workdir / CHECKPOINTS, time.monotonic()
        say("fetching", f"the checkpoint of step {step:,} from {bucket.url}")
        problem = ""
        try:
            if distributed.is_first():
                begin_checkpoint(bucket, step, folder)
            distributed.barrier()
            receive_share(bucket, step, folder, share=slice(jax.process_index(), None, jax.process_count()))
            distributed.barrier()
            if distributed.is_first():
                problem = finish_checkpoint(bucket, step, folder)
                if not problem:
                    self._fetch_run_files()
        except (OSError, ValueError) as error:
            raise OSError(f"the checkpoint of step {step} cannot be fetched from {bucket.url}: {error}.") from None
        [problem, *_] = distributed.exchange(problem)
        if problem:
            say("fetching", f"step {step:,} of {bucket.url} is damaged ({problem}). The one before it follows")
        else:
            say("fetched", f"step {step:,} in {time.monotonic() - began_s:.0f} s")
        return not problem

    def _fetch_best(self) -> None:
        """Fetches the best checkpoint too, if the run keeps it, and links to it."""
        step = 0
        if distributed.is_first() and self._config.checkpoint.keep_best:
            best = _recorded_step(self._workdir / _BEST_RECORD)
            step = best if best in whole_steps(self._bucket.sizes(under=CHECKPOINTS)) else 0
        [step, *_] = map(int, distributed.exchange(str(step)))
        is_there = (self._workdir / CHECKPOINTS / str(step)).exists()
        if step and (is_there or self._fetch(step)) and distributed.is_first():
            (self._workdir / BEST_LINK).unlink(missing_ok=True)
            (self._workdir / BEST_LINK).symlink_to(pathlib.Path(CHECKPOINTS, str(step)))

    def _fetch_run_files(self) -> None:
        """Fetches what `_send_run_files` has sent, in place of files of an older time."""
        sizes = {name: size for name, size in self._bucket.sizes().items() if _RUN_FILE.fullmatch(name)}
        sizes.pop(RUN_RECORD, None)
        receive_all(self._bucket, sizes, self._workdir, replace=True)

    # In the thread

    def _copy_new(self, step: int) -> None:
        """Sends a checkpoint, then others that the bucket should have and has not, until a newer one is offered."""
        kept = [each for each in self._kept(saved_steps(self._workdir / CHECKPOINTS)) if each < step]
        for each in [step, *kept[::-1]]:
            if self._ended.is_set() or self._step > step:
                return
            try:
                if each not in self._sent:
                    self._reading = each
                    self._copy(each)
                    self._sent.add(each)
                self.problem = self.problem if each < step else ""
            except Exception as error:  # whatever a client raises: training goes on
                if self._ended.is_set():
                    return
                if each == step or (self._workdir / CHECKPOINTS / str(each)).exists():  # else it was not kept
                    self._fail(f"step {each:,} could not be copied to {self._bucket.url}: {error}")
                    return
            finally:
                self._reading = 0

    def _copy(self, step: int) -> None:
        bucket, folder, under = self._bucket, self._workdir / CHECKPOINTS / str(step), f"{CHECKPOINTS}/{step}"
        manifest, began_s = (folder / INTEGRITY_FILE).read_bytes(), time.monotonic()
        sizes, there = manifest_sizes(manifest), bucket.sizes(under=under)
        is_first, mark = distributed.is_first(), f"{under}/{INTEGRITY_FILE}"
        if is_first:
            self._claim()  # before anything of a later start is removed or replaced
        if mark in there:
            if bucket.read(mark) == manifest:
                return
            if is_first:
                bucket.remove([mark])
        owners = {name: _owner(name) for name in sizes}
        for name, num_bytes in sizes.items():
            is_sent = owners[name] is not None and there.get(f"{under}/{name}") == num_bytes
            if (owners[name] or 0) % jax.process_count() == jax.process_index() and not is_sent:
                if self._ended.is_set():
                    raise InterruptedError("the run ends")
                bucket.send(folder / name, f"{under}/{name}")
        if not is_first:
            return
        self._await_shards(under, {name: size for name, size in sizes.items() if owners[name] is not None})
        self._claim()  # once more, as the shards may have taken long
        self._send_run_files()
        bucket.write(mark, manifest)
        names = {f"{under}/{name}" for name in (*sizes, INTEGRITY_FILE)}
        bucket.remove(bucket.sizes(under=under).keys() - names)  # of another save of this step
        say("copied", f"step {step:,} to {bucket.url} in {time.monotonic() - began_s:.0f} s")
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Removes checkpoints that the run does not keep, and parts of those before `step` that were never whole."""
        names = self._bucket.sizes(under=CHECKPOINTS)
        whole = [each for each in whole_steps(names) if each <= self._step][::-1]
        parts = {int(word) for word in (name.split("/")[1] for name in names) if word.isdecimal() and int(word) < step}
        to_come = self._kept(saved_steps(self._workdir / CHECKPOINTS))
        for old in ({*whole} - {*self._kept(whole)}) | (parts - {*whole} - {*to_come}):
            self._bucket.remove_checkpoint(old)

    def _claim(self) -> None:
        """Makes this start the one that writes to the bucket. Raises ValueError once a later start has done so."""
        record = self._bucket.read(RUN_RECORD)
        if (self._start and record != self._start) or _run_of(record) not in ("", self._run):
            raise ValueError("another start of the run, or another run, writes there now")
        if not self._start:
            self._start = json.dumps({"run": self._run, "start": secrets.token_hex(8)}).encode()
            self._bucket.write(RUN_RECORD, self._start)

    def _await_shards(self, under: str, sizes: dict[str, int]) -> None:
        """Returns once all shards are in the bucket, which other processes send too. Raises OSError if none comes."""
        num_there, until = -1, 0.0
        while True:
            there = self._bucket.sizes(under=under)
            missing = [name for name, size in sizes.items() if there.get(f"{under}/{name}") != size]
            if not missing:
                return
            now = time.monotonic()
            if len(there) > num_there:
                num_there, until = len(there), now + _PEERS_S
            if now > until or self._ended.wait(_POLL_S):
                raise OSError(f"{len(missing)} files of other processes do not arrive, such as {missing[0]}")

    def _send_run_files(self) -> None:
        """Sends the rows, the ledger and the other files of a resumed run, which drops rows after the checkpoint."""
        best = self._workdir / BEST_LINK
        if best.is_dir():
            atomic_files.write_json(self._workdir / _BEST_RECORD, {"step": int(best.resolve().name)})
        for patterns in (_GROWING,) if self._sent else (_FIXED, _GROWING):
            for path in sorted({path for pattern in patterns for path in self._workdir.glob(pattern)}):
                if path.is_file() and path.name != RUN_RECORD:
                    self._bucket.send(path, path.relative_to(self._workdir).as_posix())

    def _kept(self, steps: list[int]) -> list[int]:
        """Returns which of the steps, in ascending order, the run keeps."""
        settings, best = self._config.checkpoint, self._workdir / BEST_LINK
        best_step = best.resolve().name if best.is_dir() else ""
        every = settings.keep_every_steps
        newest = steps[-settings.keep_last :]
        return [step for step in steps if step in newest or str(step) == best_step or (every and step % every == 0)]

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.on_failure(problem)
        line = f"{problem}. Training goes on, and the next checkpoint is tried again."
        if distributed.is_first():
            say("copy FAILED", line)
        else:  # whose standard output nobody sees
            print(f"warning: copy FAILED in process {jax.process_index()}: {line}", file=sys.stderr, flush=True)


def _probe(bucket: Bucket, name: str) -> None:
    """Writes, reads and removes a small object.

    Raises:
      ValueError: there is no such bucket, or it does not keep what is written.
      OSError: as `remote.retry`, such as a PermissionError.
    """
    content = secrets.token_bytes(16)
    try:
        bucket.write(name, content)
        found = bucket.read(name)
        bucket.remove([name])
    except (remote.RemoteError, PermissionError):
        raise
    except OSError as error:
        raise _cannot_be_written(bucket, error) from None
    if found != content:
        raise ValueError(f"{KEY}={bucket.url} does not return what was written to it. Give another store.")


def _cannot_be_written(bucket: Bucket, error: OSError) -> ValueError:
    advice = "Check the name and the credentials, or leave the key out."
    return ValueError(f"{KEY}={bucket.url} cannot be written: {error}. {advice}")


def _owner(name: str) -> int | None:
    """Returns the process that wrote a shard, None for a file that all share, which process 0 sends each time."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def _own_run(workdir: pathlib.Path) -> str:
    """Returns the name of the run in a folder that was copied before, or ""."""
    try:
        return read_json(workdir / RUN_RECORD, kind=_Record)["run"]
    except (OSError, ValueError):
        return ""


def _run_of(content: bytes | None) -> str:
    try:
        return str(json.loads(content or b"{}").get("run", ""))
    except (ValueError, AttributeError):
        return ""


def _recorded_step(path: pathlib.Path) -> int:
    """Returns the step that a file of the run folder names, or 0."""
    try:
        return int(read_json(path)["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _newest_local(workdir: pathlib.Path) -> int:
    """Returns the newest step of a run folder with files of the right sizes, or 0."""
    folder = workdir / CHECKPOINTS
    for step in reversed(saved_steps(folder)):
        if not damage_of_share(folder / str(step), slice(None), deep=False) and _step_of(folder / str(step)) == step:
            return step
    return 0


def _step_of(folder: pathlib.Path) -> Any:
    try:
        return saved_run(folder)["step"]
    except (OSError, ValueError):
        return None
