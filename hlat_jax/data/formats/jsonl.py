"""Reads the texts of a JSONL file in any order through an index of its lines.

The index is built in one pass over the file, which also hashes every byte. It can be kept in the run folder. There
one process builds it for all.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import io
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from hlat_jax.data.formats import records
from hlat_jax.data.formats.decoding import NPZ_DAMAGE, decode_errors
from hlat_jax.data.formats.files import Snapshot, new_content_hash
from hlat_jax.host.console import say
from hlat_jax.store.atomic_files import write_whole

_PIECE_BYTES = 1 << 24  # of a long line
_BEAT_BYTES = 1 << 26  # read between two signs of life
_WAIT_S, _POLL_S = 180.0, 0.2  # for a sign; clients of NFS may see one up to a minute late
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # such as Lustre without the mount option flock
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class LineIndex(NamedTuple):
    """The lines of a file, without blank ones.

    Attributes:
      lines: int64[num_documents, 3], the first byte of a line, the byte after its last, and its number from 1.
      content_hash: 32 hex digits of all bytes of the file.
    """

    lines: np.ndarray
    content_hash: str


def line_index(snapshot: Snapshot, *, folder: pathlib.Path | None = None) -> LineIndex:
    """Returns the index of a file, from `folder` if the file has not changed since, else a new one.

    If another process is building it there, waits for that as long as it gives signs of life.

    Raises:
      ValueError: the file changed while it was indexed.
      OSError: the disk of `folder` is full or broken. A read-only folder raises no error.
    """
    if folder is None:
        return _new_index(snapshot)
    location = hashlib.blake2b(os.fsencode(snapshot.file.where), digest_size=8).hexdigest()
    path = folder / f"{snapshot.file.name}-{location}.npz"
    if (index := _read_index(path, snapshot=snapshot)) is not None:
        return index
    with _one_builder(path) as beat:
        index = _read_index(path, snapshot=snapshot, say_damaged=True)  # of a process that was waited for
        if index is None:
            index, content = _new_index(snapshot, beat), io.BytesIO()
            np.savez(content, identity=snapshot.identity, **index._asdict())
            try:
                write_whole(path, content.getvalue())
            except OSError as error:
                if error.errno not in (*_READ_ONLY, errno.ENOENT):
                    raise
        return index


@contextlib.contextmanager
def _one_builder(path: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Yields a function to call while the index `path` is built, at most in one process at a time.

    A lock ends with its process. The wait for a frozen process ends once its lock file is unchanged for _WAIT_S. If the
    file system has no locks, each process builds.
    """
    lock_path = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(lock_path, "a"))
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            yield lambda: None
            return
        stack.callback(lock_path.unlink, missing_ok=True)  # who waits for it finds the index then
        seen, deadline = None, 0.0
        while not _lock(lock.fileno()):
            now, beaten = time.monotonic(), os.fstat(lock.fileno()).st_mtime_ns
            if beaten != seen:
                seen, deadline = beaten, now + _WAIT_S
            if now > deadline:
                say("index", f"{lock_path} has not changed for {_WAIT_S:.0f} s: this process builds its own")
                break
            time.sleep(_POLL_S)
        yield lambda: os.utime(lock.fileno())


def _lock(descriptor: int) -> bool:
    """Returns whether this process holds the lock of a file, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _new_index(snapshot: Snapshot, beat: Callable[[], None] = lambda: None) -> LineIndex:
    numbers, digest, row = array.array("q"), new_content_hash(), 0
    start, end, is_blank, beaten = 0, 0, True, 0
    with decode_errors(snapshot.file), snapshot.file.open() as file:
        while True:
            piece = file.readline(_PIECE_BYTES)
            digest.update(piece)
            end += len(piece)
            if end >= beaten + _BEAT_BYTES:
                beat()
                beaten = end
            is_blank = is_blank and (piece.isspace() or not piece)
            if piece.endswith(b"\n") or (not piece and end > start):  # the last line may have no newline
                row += 1
                if not is_blank:
                    numbers.extend((start, end - piece.endswith(b"\n"), row))
                start, is_blank = end, True
            if not piece:
                break
    snapshot.check()
    lines = np.frombuffer(numbers, np.int64).reshape(-1, 3)
    return LineIndex(lines, content_hash=digest.hexdigest())


def _read_index(path: pathlib.Path, *, snapshot: Snapshot, say_damaged: bool = False) -> LineIndex | None:
    """Returns the index at `path`; None if it is missing, damaged or of a different version of the file."""
    try:
        with np.load(path) as arrays:  # which has checksums
            if str(arrays["identity"]) != snapshot.identity:
                return None
            return LineIndex(arrays["lines"], content_hash=str(arrays["content_hash"]))
    except FileNotFoundError:
        return None
    except NPZ_DAMAGE:
        if say_damaged:
            say("index", f"{path} is damaged, and made again")
        return None


def jsonl_documents(snapshot: Snapshot, *, field: str, index_folder: pathlib.Path | None = None) -> records.Documents:
    """Returns the texts of a JSONL file by number. Rows count all lines, but blank lines are not documents."""
    lines, snapshot.content_hash = line_index(snapshot, folder=index_folder)
    where = snapshot.file.where

    def read(index: int) -> str:
        start, end, row = lines[index].tolist()
        if end - start > records.MAX_RECORD_BYTES:
            snapshot.check()
            reason = f"{end - start} bytes in one line, more than {records.MAX_RECORD_BYTES}, as in a JSON array."
            raise records.BadRecord(where, row, reason)
        return records.json_text(snapshot.read(start, end - start), field=field, where=where, row=row)

    return records.texts_of_rows(
        snapshot, num_documents=len(lines), read=read, row_of=lambda index: int(lines[index, 2])
    )
