"""Saves checkpoints with Orbax in `<run folder>/checkpoints/<step>/`, and restores them.

Orbax writes checkpoints in the background. A folder becomes a checkpoint by one rename. `integrity.json`, with the size
and CRC-32 of every file, is already in the folder then. So a kill never leaves a folder that only looks like a
checkpoint. Orbax has no such sums, and would read flipped bytes of an array as data. Arrays are read without Orbax,
which takes three times their memory.

Only this module imports Orbax and depends on its internals, except for a file name in `checkpoint_checks`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from hlat_jax.config import CheckpointConfig
from hlat_jax.host import distributed
from hlat_jax.host.limits import out_of_memory, too_many_files
from hlat_jax.store.array_reading import INDEX_CACHE, read_chunked, read_parts
from hlat_jax.store.checkpoint_checks import (
    RUN_ITEM,
    newest_usable,
    not_finite,
    problem_on_disk,
    saved_run,
    without_padding,
    without_table_rows,
)
from hlat_jax.store.config_diff import differences
from hlat_jax.store.integrity import seal

TESTED_VERSIONS = ("0.12.8",)
STATE_ITEM = "state"
BEST_LINK = "best"
_CHUNK_BYTES = 1 << 22  # at most, if the shape allows; a reader holds a few chunks besides the array
_MIN_CHUNK_BYTES = 1 << 18  # of an array that is larger: each chunk costs time, whatever its size
_TMP_MARK = ".orbax-checkpoint-tmp"
_WINDOW = "['spikes']"  # `train.spikes` may be turned on or off, and the length of its window changed, at a resume
# Orbax writes these two after our sums are taken; a restore needs neither of them.
_UNSUMMED = ("_CHECKPOINT_METADATA", "commit_success.txt")


class SaveError(OSError):
    """A checkpoint could not be written, and earlier checkpoints are untouched."""


class DigestError(ValueError):
    """A checkpoint whose arrays are not those that were saved."""


# (restored state, digests by array as they were saved) -> which array has another one; "" if all have theirs
DigestProblem = Callable[[Any, Mapping[str, int]], str]


class Restored(NamedTuple):
    """The content of a checkpoint: `position` is the int64 data position, `metadata` is as it was given to `save`."""

    step: int
    state: Any
    position: np.ndarray
    metadata: dict[str, Any]


@dataclasses.dataclass
class Pinned:
    """Preserves the checkpoint of `step`, however old it is. Step 0 preserves none."""

    step: int = 0

    def should_preserve(self, checkpoints: Iterable[Any], *, context: Any) -> list[bool]:
        """Implements Orbax's PreservationPolicy."""
        return [each.step == self.step for each in checkpoints]


class Checkpointer:
    """Saves and restores the checkpoints of one run folder, one save at a time.

    Every process of a job has one and calls it at the same steps.

    Attributes:
      exported: the policy that keeps the checkpoint that an export reads. Only process 0 sets it.
      copied: the policy that keeps the checkpoint that is being copied to a bucket. Only process 0 sets it.
      best: the policy that keeps the checkpoint with the lowest validation loss, if `config.keep_best`.
    """

    def __init__(self, workdir: str | os.PathLike, *, config: CheckpointConfig):
        """Opens `workdir/checkpoints`, created if missing, and removes what interrupted saves left there.

        Raises ValueError if the folder cannot be written.
        """
        self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._config = config
        self._best_link = self.folder.parent / BEST_LINK
        self._saving: int | None = None
        self._saving_bytes = 0
        logging.getLogger("absl").addFilter(_not_orbax)  # drops its INFO logs; failures raise
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            where = f"cannot write to {self.folder}: {error}"
            raise ValueError(f"{where}. Give another run folder with --workdir.") from None
        for path in self.folder.glob(f"*{_TMP_MARK}*") if jax.process_index() == 0 else ():
            shutil.rmtree(path, ignore_errors=True)
        distributed.barrier()
        handlers = ocp.DefaultCheckpointHandlerRegistry()
        arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)  # as _array_spec reads them
        handlers.add(STATE_ITEM, ocp.args.PyTreeSave, arrays)
        policies = ocp.checkpoint_managers
        self.exported, self.copied, self.best = Pinned(), Pinned(), Pinned()
        if self._best_link.is_dir():  # also of a run that no longer asks for it
            self.best.step = int(self._best_link.resolve().name)
        kept: list[Any] = [policies.LatestN(config.keep_last), self.exported, self.copied, self.best]
        if config.keep_every_steps:
            kept.append(policies.EveryNSteps(config.keep_every_steps))
        self._manager = _Manager(
            self.folder,
            handler_registry=handlers,
            options=ocp.CheckpointManagerOptions(
                create=False,
                save_root_metadata=False,
                preservation_policy=policies.AnyPreservationPolicy(kept),
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._seal,
                    barrier_sync_fn=_barrier_of_saves if jax.process_count() > 1 else None,
                ),
                # with names, barriers use the coordination service; without, the devices, which are busy with steps
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
                ),
            ),
        )

    def require_space(self, abstract_state: Any) -> None:
        """Raises ValueError if the disk cannot hold a checkpoint of such a state."""
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state))
        disk = shutil.disk_usage(self.folder)
        if disk.total and disk.free < num_bytes:  # some network file systems do not tell
            raise ValueError(
                f"a checkpoint of this run needs {num_bytes:,} bytes, and {disk.free:,} are free in {self.folder}. "
                "Free some space, or give another run folder with --workdir."
            )

    def save(
        self,
        step: int,
        state: Any,
        *,
        position: np.ndarray,
        metadata: dict[str, Any],
        norms: Mapping[str, float],
        digest: Mapping[str, int] | None = None,
    ) -> bool:
        """Starts to save in the background, after the previous save ended. Returns False if `step` is saved already.

        Args:
          step: the number of updates done, which is the name of the checkpoint.
          state: the state of training. The caller may donate it at once.
          position: int64 array, the data position after this step, equal in all processes.
          metadata: values that JSON can hold.
          norms: part of the state -> its norm, see program.RunProgram.
          digest: the digest of every array of the state, which a restore compares, see `parallel.digests`.

        Raises:
          ValueError: a norm is not finite. Nothing was written, and no earlier checkpoint was removed.
          SaveError: this save could not start, or the one before it failed.
        """
        if problem := not_finite(norms):
            raise ValueError(f"the state of step {step} was not saved, because {problem}.")
        self.wait()
        if step in self._manager.all_steps():
            return False
        run = {"step": step, "position": np.asarray(position, np.int64).tolist(), "arrays": _arrays(state)}
        run |= {"metadata": metadata, "norms": dict(norms)} | ({"digest": dict(digest)} if digest else {})
        run = json.loads(json.dumps(run))  # a copy: the caller's dict may change while it is written
        self._saving, self._saving_bytes = step, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        chunked = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=_chunk_bytes(leaf)), state)
        saved_state = ocp.args.PyTreeSave(state, save_args=chunked)
        args = ocp.args.Composite(**{STATE_ITEM: saved_state, RUN_ITEM: ocp.args.JsonSave(run)})
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._save_error(error) from error
        return True

    def release(self) -> None:
        """Removes the checkpoint that an export has read, unless a rule keeps it. Only process 0 calls this.

        During a save it does nothing, as the next save removes the checkpoint.
        """
        step, self.exported.step = self.exported.step, 0
        steps, every = sorted(self._manager.all_steps()), self._config.keep_every_steps
        pinned = (self.copied.step, self.best.step)
        is_kept = step in (*steps[-self._config.keep_last :], *pinned) or (every and step % every == 0)
        if step in steps and not is_kept and self._saving is None:
            self._manager.drop(step)

    def keep_best(self, step: int) -> None:
        """Keeps a complete checkpoint in place of the best so far, and points BEST_LINK in the run folder to it."""
        self.best.step = step
        if jax.process_index() == 0:
            new = self._best_link.with_name(f"{BEST_LINK}.partial")
            new.unlink(missing_ok=True)
            new.symlink_to(pathlib.Path(self.folder.name, str(step)))
            os.replace(new, self._best_link)

    def check(self) -> int | None:
        """Returns the result of `wait` if the save in the background has ended or failed, else None at once."""
        return None if self._manager.is_saving_in_progress() else self.wait()

    def wait(self) -> int | None:
        """Blocks until no save is under way, and returns the step of the save that ended since the last call, if any.

        Raises:
          SaveError: the save failed.
        """
        if self._saving is None:
            return None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(error) from error
        step, self._saving = self._saving, None
        return step

    def latest_metadata(self) -> tuple[int, dict[str, Any]] | None:
        """Returns step and metadata of the newest checkpoint with files of the right sizes, or None without one.

        Reads no arrays, so `restore` may still find that checkpoint damaged and return the previous one.

        Raises:
          ValueError: there are checkpoints, and all of them are damaged.
        """
        self.wait()
        newest = newest_usable(self.folder, deep=False)
        if newest is None:
            return None
        step, _ = newest
        return step, saved_run(self.folder / str(step))["metadata"]

    def restore(self, abstract_state: Any, *, digest_problem: DigestProblem | None = None) -> Restored | None:
        """Returns the newest usable checkpoint, or None without one.

        A checkpoint is unusable if it is damaged, has the name of another step, has another digest, or holds a
        state that is not finite. It is named on stderr and kept aside as `<step>.damaged-<n>`.

        Args:
          abstract_state: the state as jax.ShapeDtypeStruct with the shardings into which arrays are read.
          digest_problem: compares the digests.

        Raises:
          ValueError: no checkpoint is usable, or the newest usable one holds arrays of other shapes or dtypes.
        """
        self.wait()
        others: dict[int, str] = {}  # checkpoints with other digests
        while True:
            newest = newest_usable(self.folder, deep=True, others=others)
            if newest is None:
                return None
            step, unusable = newest
            try:
                restored = read_checkpoint(self.folder / str(step), abstract_state, digest_problem=digest_problem)
                break
            except DigestError as error:
                others[step] = str(error)
        _warn_of(unusable, self.folder, f"going back to step {step}")
        if unusable:
            self._set_aside(unusable)
        return restored

    def close(self) -> None:
        """Waits for the save under way and ends all threads. Raises SaveError if that save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _seal(self) -> None:
        """Flushes and sums every file of the save under way; Orbax calls it just before the rename that commits."""
        [folder] = self.folder.glob(f"{self._saving}{_TMP_MARK}*")
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [name for name in names if pathlib.Path(name).name not in _UNSUMMED]
        seal(folder, names)

    def _set_aside(self, steps: Iterable[int]) -> None:
        for step in steps if jax.process_index() == 0 else ():
            asides = (self.folder / f"{step}.damaged-{index}" for index in itertools.count(1))
            os.replace(self.folder / str(step), next(path for path in asides if not os.path.lexists(path)))
        distributed.barrier()
        self._manager.reload()

    def _save_error(self, error: Exception) -> SaveError:
        """Returns the error to raise, after freeing its disk space; raises ValueError if the folder is gone."""
        step, self._saving = self._saving, None
        if not self.folder.is_dir():  # a restart by itself would begin a new run where the folder was
            raise ValueError(
                f"the checkpoint of step {step} could not be written, because {self.folder} was removed or replaced. "
                "Put it back, and run the same command to resume."
            )
        free_bytes = shutil.disk_usage(self.folder).free
        # else the next start does it: other processes may still be writing, or threads cannot be started
        if jax.process_count() == 1 and out_of_memory(error) is None:
            for path in self.folder.glob(f"{step}{_TMP_MARK}*"):
                shutil.rmtree(path, ignore_errors=True)
            self._manager.reload()
        before = max(self._manager.all_steps(), default=None)
        rest = "There is no earlier one" if before is None else f"The checkpoint of step {before} is untouched"
        return SaveError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(error)} "
            f"({self._saving_bytes:,} bytes of state, {free_bytes:,} bytes free). {rest}. Fix the cause, then run the "
            "same command."
        )


def find_saved(path: str | os.PathLike) -> pathlib.Path | None:
    """Returns the newest usable checkpoint of a run folder, or `path` if it is a checkpoint, or None if it is neither.

    Changes nothing, so the run may still be training. Newer checkpoints that cannot be used are named on stderr.

    Raises:
      ValueError: no checkpoint can be used, or the given checkpoint cannot.
    """
    path = pathlib.Path(path).absolute()
    if (path / STATE_ITEM).is_dir():
        path = path.resolve()  # the step is in the name of the folder that a link points to
        if problem := problem_on_disk(path, deep=True):
            raise ValueError(f"checkpoint {path} is damaged ({problem}). Use another one in {path.parent}.")
        return path
    folder = path / "checkpoints"
    newest = newest_usable(folder, deep=True)
    if newest is None:
        return None
    step, unusable = newest
    _warn_of(unusable, folder, f"taking step {step}")
    return folder / str(step)


def read_checkpoint(
    folder: pathlib.Path, abstract_state: Any, *, digest_problem: DigestProblem | None = None
) -> Restored:
    """Reads one checkpoint, from `find_saved`. Its window of spikes begins again if it was saved with other shapes.

    The embedding table, the head and the optimizer's state may have other padding, as layouts pad differently.

    Args:
      folder: the folder of the checkpoint.
      abstract_state: the state as jax.ShapeDtypeStruct with shardings.

    Raises:
      DigestError: `digest_problem` finds one.
      ValueError: the checkpoint holds arrays of other shapes or dtypes, which would be cast silently.
    """
    run = saved_run(folder)
    both = map(without_padding, (run["arrays"], _arrays(abstract_state)))
    others = differences(*map(without_table_rows, both))
    begins_again = any(line.startswith(_WINDOW) for line in others)
    others = [line for line in others if not line.startswith(_WINDOW)]
    if others:
        lines = "\n  ".join(others)
        raise ValueError(f"{folder} belongs to another model or precision:\n  {lines}")

    def zeros(parts: dict[Any, np.ndarray]) -> None:
        for part in parts.values():
            part.fill(0)

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        if begins_again and jax.tree_util.keystr(path).startswith(_WINDOW):
            return read_parts(leaf, zeros, donatable=True)
        return _read_array(folder, path, leaf, donatable=True)

    state = jax.tree_util.tree_map_with_path(read, abstract_state)
    digest = run.get("digest", {})  # older versions saved none
    digest = {name: value for name, value in digest.items() if not begins_again or not name.startswith("spikes.")}
    if digest_problem is not None and digest and (problem := digest_problem(state, digest)):
        raise DigestError(problem)
    return Restored(run["step"], state, np.asarray(run["position"], np.int64), run["metadata"])


def read_arrays(folder: pathlib.Path, abstract: Any) -> Any:
    """Reads only the part of one checkpoint's state that `abstract` names.

    Args:
      folder: the folder of the checkpoint.
      abstract: a part of the state as jax.ShapeDtypeStruct. With a sharding only the shards of this process are read,
        without one the array is NumPy. Another dtype than the checkpoint's rounds to nearest.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _read_array(folder, path, leaf, donatable=False), abstract
    )


def _read_array(folder: pathlib.Path, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, *, donatable: bool) -> Any:
    spec = _array_spec(folder, jax.tree_util.keystr(path, simple=True, separator="."))
    try:
        return read_chunked(spec, leaf, donatable=donatable)
    except ValueError as error:  # TensorStore's, of several lines
        raise ValueError(f"{folder} is damaged ({_reason(error)}). Use another one in {folder.parent}.") from None


def _array_spec(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns TensorStore's spec of an array as Orbax saves it: in zarr, under its path in the state, in one OCDBT."""
    base = {"driver": "file", "path": f"{(folder / STATE_ITEM).resolve()}/"}  # TensorStore takes no ".."
    database = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": INDEX_CACHE}
    return {"driver": "zarr", "kvstore": database, "fill_missing_data_reads": False}


class _Manager(ocp.CheckpointManager):
    """Never reads `_CHECKPOINT_METADATA`, which has no sum: a damaged one would end the process, or the save under way.

    Retention needs nothing of it.
    """

    def _load_checkpoint_infos(self, skip_metadata_read: bool = False) -> Any:
        return super()._load_checkpoint_infos(skip_metadata_read=True)

    def drop(self, step: int) -> None:
        """Removes a checkpoint in process 0 only. The other processes count on it until the next save."""
        self._checkpoint_deleter.delete(step)
        self._checkpoints.delete_if(lambda info: info.step == step)


def _barrier_of_saves(*, key: str, timeout_ms: int) -> None:
    """Waits for the other processes, in the threads that finish a save.

    A thread whose own part has failed does not wait: the others only arrive once all parts are written, and this
    process is the one that can report that its part is not.
    """
    if sys.exc_info()[0] is None:
        distributed.barrier_of_threads(key, timeout_ms=timeout_ms)


def _chunk_bytes(array: jax.Array) -> int:
    """Returns the limit of a chunk to give Orbax: `_CHUNK_BYTES`, or the whole array where that would make tiny ones.

    Orbax divides the longest axis until a chunk is within the limit: if its size is prime, each row would be a chunk.
    """
    part = array.sharding.shard_shape(array.shape)
    num_bytes, longest = math.prod(part) * array.dtype.itemsize, max(part, default=1)
    sizes = (num_bytes // divisor for divisor in range(1, longest + 1) if longest % divisor == 0)
    divides = any(_MIN_CHUNK_BYTES <= size <= _CHUNK_BYTES for size in sizes)
    return _CHUNK_BYTES if divides else max(num_bytes, _CHUNK_BYTES)


def _arrays(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _reason(error: BaseException) -> str:
    """Returns the operating system's message, without the paths that TensorStore adds; else the first line."""
    match = re.search(r"os_error_code='(\d+)'", str(error))
    code = int(match[1]) if match else error.errno if isinstance(error, OSError) else None
    if code:
        return os.strerror(code) + too_many_files(code)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _warn_of(unusable: Mapping[int, str], folder: pathlib.Path, instead: str) -> None:
    for step, problem in unusable.items() if jax.process_index() == 0 else ():
        warning = f"WARNING: checkpoint {folder / str(step)} is damaged ({problem}), {instead}."
        print(warning, file=sys.stderr, flush=True)


def _not_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


@functools.cache  # once per process: the hook wraps the previous one
def silence_orbax_retry_logs() -> None:
    """Silences the tracebacks that Orbax and TensorStore print around the one error they raise for a failed save.

    The first write that fails ends Orbax's event loop. Its other tasks then fail with nothing awaiting them, and
    TensorStore's threads still report to the closed loop. On a full disk, a screen of tracebacks would hide the error.
    """
    hook = sys.unraisablehook

    def print_others(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    sys.unraisablehook = print_others
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
