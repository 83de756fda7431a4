"""Folders of an object store, or of another disk: checkpoints are sent there, manifest last, and fetched whole.

A bucket has the names of a run folder: checkpoints/STEP/... with its `integrity.json`, and the files of the run. An
object store has no rename, so `integrity.json` is the mark of a whole checkpoint: it is written last and removed first.
Imports no JAX.

The wire is fsspec: it is a dependency for text behind URLs already, with time limits and tries that are ours. The
drivers of TensorStore would need the same code, and have no folder of Google's store and a local disk in one interface.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO, Any, TypeVar

from hlat_jax.facts.local_paths import is_bucket, local_path
from hlat_jax.store import atomic_files, remote
from hlat_jax.store.integrity import INTEGRITY_FILE, damage_of_share

CHECKPOINTS = "checkpoints"
PROBE = ".probe"  # in the name of an object that only shows that the store can be written
_UNFINISHED = ".unfinished"  # an object beside those of a `send_staged` that has not ended
FETCHED = ".fetched"  # suffix of the folder of a checkpoint that is being fetched
OBJECT_S = 60  # how long a request for one object is tried
_BLOCK_BYTES = 32 << 20
_NUM_THREADS = 8
# Of a file that is sent. aiohttp waits without a limit for the "100 Continue" before a body, so each call has its own.
_LEAST_BYTES_PER_S = 1 << 20
_PART_TRIES = 5
_MANIFEST = re.compile(rf"{CHECKPOINTS}/(0|[1-9]\d*)/{re.escape(INTEGRITY_FILE)}")

_USED = ".used"  # in a copy on this machine: locked by the processes that use it
_in_use: dict[pathlib.Path, IO[str]] = {}

T = TypeVar("T")


class Bucket:
    """A folder of an object store or of a disk, thread-safe. Its methods raise as `remote.retry` does."""

    def __init__(self, url: str | os.PathLike, *, key: str = "", ended: threading.Event | None = None):
        """Sends no request.

        Args:
          url: such as s3://bucket/run, or a local folder.
          key: the config key or flag that has it, for errors.
          ended: no request is tried again once it is set.

        Raises:
          ValueError: a URL of another kind, or its client is not installed.
        """
        self.url = os.fspath(url).rstrip("/")
        self._is_local = not is_bucket(self.url)
        if self._is_local:
            self.url = str(local_path(self.url, key=key, use="bucket").absolute())
        self._ended = threading.Event() if ended is None else ended
        # an instance of its own: others of the process share theirs, with its tries and its listings
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        self._filesystem, self._path = remote.filesystem_of(self.url, num_tries=_PART_TRIES, **options)
        self._limit = {} if self._is_local else {"timeout": OBJECT_S}  # of one call, with the tries of the client

    def sizes(self, *, under: str = "") -> dict[str, int]:
        """Returns the bytes of each object by its name, of all or of those in the folder `under`."""

        def find() -> dict[str, Any]:
            try:
                return self._filesystem.find(self._where(under), detail=True, **self._limit)
            except FileNotFoundError:
                if not self._is_local:  # no such bucket
                    raise
                return {}

        start = f"{self._path}/"
        found = {name: int(info["size"] or 0) for name, info in self._retry(find).items()}
        return {name.removeprefix(start): size for name, size in found.items() if name.startswith(start)}

    def versions(self) -> dict[str, list[Any]]:
        """Returns the bytes, and what tells versions apart, of each object by its name."""
        found = self._retry(lambda: self._filesystem.find(self._path, detail=True, **self._limit))
        return {
            name.removeprefix(f"{self._path}/"): [info["size"], str(info.get("ETag") or info.get("mtime", ""))]
            for name, info in found.items()
        }

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object, or None without one."""
        try:
            return self._retry(lambda: self._filesystem.cat_file(self._where(name), **self._limit))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object."""
        if self._is_local:
            path = self._local(name)
            self._retry(lambda: atomic_files.write_whole(path, content))
        else:
            self._retry(lambda: self._filesystem.pipe_file(self._where(name), content, timeout=OBJECT_S))

    def send(self, path: pathlib.Path, name: str) -> None:
        """Writes an object with the content of a file. Raises FileNotFoundError if the file is gone."""
        if self._is_local:
            to = self._local(name)

            def copy() -> None:
                with atomic_files.atomic_writer(to) as file, open(path, "rb") as source:
                    shutil.copyfileobj(source, file, _BLOCK_BYTES)

            self._retry(copy)
        else:
            limit_s = OBJECT_S + path.stat().st_size / _LEAST_BYTES_PER_S
            self._retry(lambda: self._filesystem.put_file(str(path), self._where(name), timeout=limit_s))

    def receive(self, name: str, path: pathlib.Path, num_bytes: int) -> None:
        """Writes a file with the content of an object of `num_bytes`. It replaces `path` when it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)

        def read_block(start: int) -> bytes:
            stop = min(start + _BLOCK_BYTES, num_bytes)
            block = self._filesystem.cat_file(self._where(name), start=start, end=stop, **self._limit)
            if len(block) != stop - start:
                raise OSError(f"{name}: {len(block):,} bytes came instead of {stop - start:,}")
            return block

        with atomic_files.atomic_writer(path) as file:
            for start in range(0, num_bytes, _BLOCK_BYTES):
                file.write(self._retry(lambda start=start: read_block(start)))

    def remove(self, names: Collection[str]) -> None:
        """Removes objects. An object that is gone already is no error."""
        if self._is_local:
            for name in names:
                (pathlib.Path(self._path) / name).unlink(missing_ok=True)
        elif names:
            with contextlib.suppress(FileNotFoundError):
                self._retry(lambda: self._filesystem.rm([self._where(name) for name in names], **self._limit))

    def remove_checkpoint(self, step: int) -> None:
        """Removes a checkpoint, its manifest first."""
        folder = f"{CHECKPOINTS}/{step}"
        self.remove([f"{folder}/{INTEGRITY_FILE}"])
        self.remove([*self.sizes(under=folder)])
        if self._is_local:
            shutil.rmtree(pathlib.Path(self._path) / folder, ignore_errors=True)

    def _where(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _local(self, name: str) -> pathlib.Path:
        path = pathlib.Path(self._path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _retry(self, ask: Callable[[], T]) -> T:
        return remote.retry(ask, self.url, for_s=OBJECT_S, ended=self._ended)


def whole_steps(names: Iterable[str]) -> list[int]:
    """Returns the steps of the whole checkpoints among the objects of a bucket, the newest first."""
    return sorted((int(match[1]) for match in map(_MANIFEST.fullmatch, names) if match), reverse=True)


def manifest_sizes(manifest: bytes) -> dict[str, int]:
    """Returns the bytes of each file that an `integrity.json` lists. Raises ValueError if it is damaged."""
    try:
        return {str(name): int(size) for name, (size, _) in sorted(json.loads(manifest)["files"].items())}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{INTEGRITY_FILE} is damaged") from None


def _check_names(names: Iterable[str], *, url: str) -> None:
    for name in names:
        if name.startswith("/") or ".." in pathlib.PurePosixPath(name).parts:
            raise ValueError(f"{url} has the name {name!r}, which points outside the folder.")


def receive_all(
    bucket: Bucket, sizes: Mapping[str, int], folder: pathlib.Path, *, under: str = "", replace: bool = False
) -> None:
    """Fetches objects of the folder `under` of a bucket. Files of the right size stay, unless `replace`."""

    def receive(item: tuple[str, int]) -> None:
        name, num_bytes = item
        path = folder / name
        if replace or not path.is_file() or path.stat().st_size != num_bytes:
            bucket.receive(f"{under}/{name}" if under else name, path, num_bytes)

    _check_names(sizes, url=bucket.url)
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
        try:
            for work in concurrent.futures.as_completed([pool.submit(receive, item) for item in sizes.items()]):
                work.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # else all other files are tried too
            raise


def begin_checkpoint(bucket: Bucket, step: int, folder: pathlib.Path) -> None:
    """Prepares `folder`/STEP.fetched for the files of a checkpoint. Files of the same checkpoint in it stay."""
    name, to = f"{CHECKPOINTS}/{step}/{INTEGRITY_FILE}", folder / f"{step}{FETCHED}"
    manifest = bucket.read(name)
    if manifest is None:
        raise FileNotFoundError(f"{bucket.url}/{name} is gone")
    manifest_sizes(manifest)
    if to.exists() and (not (to / INTEGRITY_FILE).exists() or (to / INTEGRITY_FILE).read_bytes() != manifest):
        shutil.rmtree(to)  # of another save of this step
    to.mkdir(parents=True, exist_ok=True)
    for path in to.rglob("*.partial"):  # which a kill leaves behind
        path.unlink(missing_ok=True)
    atomic_files.write_whole(to / INTEGRITY_FILE, manifest)


def receive_share(bucket: Bucket, step: int, folder: pathlib.Path, *, share: slice = slice(None)) -> None:
    """Fetches a share of the files of a checkpoint into `folder`/STEP.fetched, which `begin_checkpoint` prepared."""
    to = folder / f"{step}{FETCHED}"
    sizes = manifest_sizes((to / INTEGRITY_FILE).read_bytes())
    receive_all(bucket, dict([*sizes.items()][share]), to, under=f"{CHECKPOINTS}/{step}")


def finish_checkpoint(bucket: Bucket, step: int, folder: pathlib.Path) -> str:
    """Renames a fetched checkpoint to its step. Returns the problem of a damaged one, else "".

    A file that differs is fetched once more, as the first answer may have been wrong.
    """
    path = folder / f"{step}{FETCHED}"
    if problem := damage_of_share(path, slice(None), deep=True):
        shutil.rmtree(path)
        begin_checkpoint(bucket, step, folder)
        receive_share(bucket, step, folder)
        problem = damage_of_share(path, slice(None), deep=True)
    if problem:
        shutil.rmtree(path)
        return problem
    to = folder / str(step)
    if to.exists():
        os.replace(to, folder / f"{step}.damaged-{secrets.token_hex(4)}")
    os.replace(path, to)
    atomic_files.sync_folder(folder)
    return ""


def local_copy(path: str | os.PathLike, *, key: str = "") -> pathlib.Path:
    """Returns a local path, or a local copy of a folder in a bucket. Only changed files are fetched again.

    For a run in a bucket it is the newest whole checkpoint, with the files of the run beside `checkpoints`.

    Args:
      path: a local path, or the URL of a run, of one of its checkpoints, or of another folder, in a bucket.
      key: the config key or flag that has it, for errors.

    Raises:
      ValueError: a URL of another kind, nothing is there, it is damaged, or the store refuses to show it.
      OSError: the store does not answer.
    """
    if not is_bucket(path):
        return local_path(path, key=key, use="bucket")
    match = re.fullmatch(rf"(.+)/{CHECKPOINTS}/(\d+)/*", os.fspath(path))
    bucket = Bucket(match[1] if match else path, key=key)
    asked = f"{key}={os.fspath(path)}" if key else os.fspath(path)
    to = _caches() / hashlib.sha256(bucket.url.encode()).hexdigest()[:16]
    to.mkdir(parents=True, exist_ok=True)
    _use(to, to / _USED, bucket.url)
    with open(to / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of this machine may fetch the same
        try:
            found = bucket.versions()
            steps = [step for step in whole_steps(found) if match is None or step == int(match[2])]
            if not found or (match and not steps):
                raise ValueError(f"{asked}: nothing whole is there.")
            if not steps:
                _receive_changed(bucket, found, to)
                return to
            of_run = {name: version for name, version in found.items() if re.fullmatch(r".+\.json|\w+/.+", name)}
            of_run = {name: version for name, version in of_run.items() if not name.startswith(f"{CHECKPOINTS}/")}
            _receive_changed(bucket, of_run, to)
            problems = [_receive_once(bucket, step, to / CHECKPOINTS) for step in steps[:1]]
            while problems[-1] and len(problems) < len(steps):
                problems.append(_receive_once(bucket, steps[len(problems)], to / CHECKPOINTS))
        except remote.RemoteError:
            raise
        except OSError as error:
            raise ValueError(f"{asked} cannot be read: {error}. Check the name and the credentials.") from None
    for step, problem in zip(steps, filter(None, problems), strict=False):
        print(f"WARNING: step {step} of {bucket.url} is damaged ({problem}).", file=sys.stderr)
    if problems[-1]:
        raise ValueError(f"{asked}: every checkpoint is damaged.")
    return to / CHECKPOINTS / str(steps[len(problems) - 1])


def _use(folder: pathlib.Path, lock: pathlib.Path, url: str) -> None:
    """Keeps a copy from being removed until this process ends."""
    if folder not in _in_use:
        _in_use[folder] = open(lock, "w")  # noqa: SIM115
        _in_use[folder].write(url)
        fcntl.flock(_in_use[folder], fcntl.LOCK_SH)


def staging_folder(url: str, *, key: str) -> pathlib.Path:
    """Returns the local folder in which the content of a new folder of a bucket is made. A local path is returned.

    It has the files of an earlier try that was cut short, if there are any.

    Raises:
      ValueError: there is something at the URL already, it cannot be written, or another process of this machine is
        writing it. `key` is the flag that has it.
    """
    if not is_bucket(url):
        return pathlib.Path(url)
    bucket = Bucket(url, key=key)
    folder = _staging(bucket.url)
    if folder not in _in_use:
        folder.parent.mkdir(exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115 - held until the folder is sent, or to the end
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{key}={url}: another process writes it. Wait for it, or give another folder.") from None
        _in_use[folder] = lock
    try:
        if _is_finished(bucket):
            raise ValueError(f"{key}={url} exists already. Give another folder, or remove it.")
        bucket.write(PROBE, b"")
        bucket.remove([PROBE])
    except (FileNotFoundError, PermissionError) as error:
        raise ValueError(f"{key}={url} cannot be written: {error}. Check the name and the credentials.") from None
    return folder


def send_staged(folder: pathlib.Path, url: str, *, last: str) -> None:
    """Sends a `staging_folder` to its bucket, with the file `last` at the end, and removes it. A local folder stays.

    Raises:
      ValueError: another machine began to write there since, or has written it. Its folder is left to it.
    """
    if not is_bucket(url):
        return
    bucket, mine = Bucket(url), secrets.token_bytes(8)

    def check() -> None:
        if bucket.read(_UNFINISHED) != mine:
            raise ValueError(f"{url}: another command writes there now. Wait for it, or give another folder.")

    if _is_finished(bucket):
        raise ValueError(f"{url}: another command has written it since. Give another folder, or remove it.")
    bucket.write(_UNFINISHED, mine)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    bucket.remove(bucket.sizes().keys() - (names - {last}) - {_UNFINISHED})  # of an earlier try
    for name in sorted(names - {last}):
        check()
        bucket.send(folder / name, name)
    check()
    bucket.send(folder / last, last)
    try:
        check()  # another may have begun between the last check and the end of this file
    except ValueError:
        bucket.remove([last])  # else a folder of files of both would look whole
        raise
    bucket.remove([_UNFINISHED])
    shutil.rmtree(folder)
    staging = _staging(bucket.url)
    shutil.rmtree(staging, ignore_errors=True)  # `folder` may be in it
    staging.with_suffix(".lock").unlink()
    _in_use.pop(staging).close()


def _is_finished(bucket: Bucket) -> bool:
    """Returns whether a folder of a bucket has content, and no command began to write it that has not ended."""
    names = {name for name in bucket.sizes() if not name.startswith(PROBE)}
    return bool(names) and _UNFINISHED not in names


def _staging(url: str) -> pathlib.Path:
    return _caches() / "new" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _caches() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "hlat_jax" / "buckets"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _receive_once(bucket: Bucket, step: int, folder: pathlib.Path) -> str:
    """Fetches a checkpoint that is not in `folder`. Returns why it cannot be used, or ""."""
    there, name = folder / str(step) / INTEGRITY_FILE, f"{CHECKPOINTS}/{step}/{INTEGRITY_FILE}"
    folder.mkdir(exist_ok=True)
    _use(folder / str(step), folder / f"{_USED}-{step}", bucket.url)
    if there.exists() and there.read_bytes() == bucket.read(name):
        return ""
    print(f"fetching {bucket.url}/{CHECKPOINTS}/{step}", file=sys.stderr, flush=True)
    begin_checkpoint(bucket, step, folder)
    sizes = manifest_sizes((folder / f"{step}{FETCHED}" / INTEGRITY_FILE).read_bytes())
    _make_room(sum(sizes.values()), folder.parent, url=bucket.url, step=step)
    receive_share(bucket, step, folder)
    return finish_checkpoint(bucket, step, folder)


def _make_room(num_bytes: int, to: pathlib.Path, *, url: str, step: int | None = None) -> None:
    """Removes copies that no process uses until the disk has room: other steps of the run, then the oldest folders.

    Raises:
      ValueError: it never has.
    """
    steps = [path for path in (to / CHECKPOINTS).glob("*") if path.is_dir()] if step is not None else []
    copies = [
        (path.with_name(f"{_USED}-{name}"), path) for path in steps if (name := path.name.split(".")[0]) != str(step)
    ]
    others = sorted(to.parent.glob(f"*/{_USED}"), key=lambda used: used.stat().st_mtime)
    copies += [(used, used.parent) for used in others if used.parent != to]
    while shutil.disk_usage(to).free < num_bytes:
        if not copies:
            raise ValueError(
                f"{url} needs {num_bytes:,} bytes, and {shutil.disk_usage(to).free:,} are free in {to.parent}. Free "
                "some space, or name another disk with XDG_CACHE_HOME."
            )
        used, copy = copies.pop(0)
        with open(used, "a") as file, contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(copy)


def _receive_changed(bucket: Bucket, versions: Mapping[str, list[Any]], to: pathlib.Path) -> None:
    """Fetches the objects whose version is not the one that was fetched before, and removes files that are gone."""
    _check_names(versions, url=bucket.url)
    record = to / ".fetched.json"  # of the versions that the files have, if they are there
    before = json.loads(record.read_bytes()) if record.exists() else {}
    for name in {*before, *versions}:
        if before.get(name) != versions.get(name):
            (to / name).unlink(missing_ok=True)
    missing = {name: version[0] for name, version in versions.items() if not (to / name).exists()}
    _make_room(sum(missing.values()), to, url=bucket.url)
    atomic_files.write_json(record, dict(versions))
    receive_all(bucket, missing, to)
