"""Checkpoints of a run: training state, data position and what they belong to, in `<run folder>/checkpoints/<step>/`.

Orbax writes them in the background. A folder becomes a checkpoint by one rename, and `integrity.json`, with the size
and CRC-32 of every file, is already inside it then: no moment exists in which a kill leaves a folder that looks like a
checkpoint and is none. Orbax itself returns flipped bytes of an array as if they were data, hence the sums of our own.

Owns when a checkpoint counts as complete, which ones stay, and what a failed save says. Refuses to know what the state
means or when to save. Only this file imports Orbax.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from hlat_jax import distributed
from hlat_jax.config import CheckpointConfig
from hlat_jax.drift import differences
from hlat_jax.integrity import damage, seal

STATE_ITEM, RUN_ITEM = "state", "run"
_TMP_MARK = ".orbax-checkpoint-tmp"
# Orbax writes these two after our sums are taken; a restore needs neither of them.
_UNSUMMED = ("_CHECKPOINT_METADATA", "commit_success.txt")


class SaveError(OSError):
    """A checkpoint could not be written; those before it are untouched."""


class Checkpointer:
    """Saves and restores the checkpoints of one run folder; one save at a time is under way.

    Every process of a job makes one and calls it at the same steps.
    """

    def __init__(self, workdir: str | os.PathLike, *, config: CheckpointConfig, read_only: bool = False):
        """Opens `workdir/checkpoints` and removes what dead saves left there.

        Args:
          workdir: the run folder; made when missing.
          config: retention; see CheckpointConfig.
          read_only: change nothing, for commands that look at a run that may still be training.

        Raises:
          ValueError: the folder cannot be written.
        """
        self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._read_only = read_only
        self._saving: int | None = None
        self._saving_bytes = 0
        logging.getLogger("absl").addFilter(_not_orbax)  # it narrates; what goes wrong reaches us as exceptions
        if not read_only:
            _require_writable(self.folder)
            self._remove_leftovers()
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                create=False,
                read_only=read_only,
                save_root_metadata=False,
                preservation_policy=_Retention(config.keep_last, config.keep_every_steps),
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._seal,
                    barrier_sync_fn=_barrier_of_saves if jax.process_count() > 1 else None,
                ),
                # named, they meet in the coordination service; unnamed, on the devices, which are busy with steps
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
                ),
            ),
        )

    def save(self, step: int, state: Any, *, position: np.ndarray, metadata: dict[str, Any]) -> bool:
        """Starts to save in the background, after the save before it ended; the caller may donate `state` at once.

        Args:
          step: updates done; the name of the checkpoint.
          state: pytree of jax arrays.
          position: int64 array, where the data goes on; the same in every process.
          metadata: fit for JSON.

        Returns:
          False when that step is saved already.

        Raises:
          SaveError: this save could not start, or the one before it failed.
        """
        self.wait()
        if step in self._manager.all_steps():
            return False
        run = {"position": np.asarray(position, np.int64).tolist(), "arrays": _arrays(state), "metadata": metadata}
        run = json.loads(json.dumps(run))  # a copy: the caller's dict may change while it is written
        self._saving, self._saving_bytes = step, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        args = ocp.args.Composite(**{STATE_ITEM: ocp.args.StandardSave(state), RUN_ITEM: ocp.args.JsonSave(run)})
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failed(error) from error
        return True

    def check(self) -> None:
        """Raises SaveError when a save in the background has failed; waits for nothing."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Blocks until no save is under way. Raises SaveError when it failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._saving = None

    def latest_metadata(self) -> tuple[int, dict[str, Any]] | None:
        """Returns step and metadata of the newest checkpoint whose files have their sizes; None when there is none.

        Reads no arrays, so `restore` may still find that checkpoint damaged and return the one before.

        Raises:
          ValueError: there are checkpoints, and all of them are damaged.
        """
        self.wait()
        found = self._newest(deep=False)
        if found is None:
            return None
        step, _ = found
        return step, self._run_item(step)["metadata"]

    def restore(self, abstract_state: Any) -> tuple[int, Any, np.ndarray, dict[str, Any]] | None:
        """Returns (step, state, position, metadata) of the newest undamaged checkpoint; None when there is none.

        A damaged one is named on stderr and, unless read_only, kept aside as `<step>.damaged`.

        Args:
          abstract_state: the state as jax.ShapeDtypeStruct with shardings; arrays are read straight into them.

        Raises:
          ValueError: all checkpoints are damaged, or the newest whole one holds arrays of other shapes or dtypes.
        """
        self.wait()
        found = self._newest(deep=True)
        if found is None:
            return None
        step, damaged = found
        for bad, why in damaged.items():
            _warn(f"WARNING: checkpoint {self.folder / str(bad)} is damaged ({why}); going back to step {step}.")
        self._put_aside(damaged)
        run = self._run_item(step)
        others = differences(run["arrays"], _arrays(abstract_state))  # Orbax would cast another dtype in silence
        if others:
            raise ValueError(f"{self.folder / str(step)} is of another model or precision:\n  " + "\n  ".join(others))
        args = ocp.args.Composite(**{STATE_ITEM: ocp.args.StandardRestore(abstract_state)})
        state = self._manager.restore(step, args=args)[STATE_ITEM]
        return step, state, np.asarray(run["position"], np.int64), run["metadata"]

    def close(self) -> None:
        """Waits for the save under way and lets go of all threads. Raises SaveError when that save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _run_item(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(**{RUN_ITEM: ocp.args.JsonRestore()}))[RUN_ITEM]

    def _seal(self) -> None:
        """Flushes and sums every file of the save under way; Orbax calls it just before the rename that commits."""
        [folder] = self.folder.glob(f"{self._saving}{_TMP_MARK}*")
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [name for name in names if pathlib.Path(name).name not in _UNSUMMED]
        seal(folder, names)

    def _newest(self, *, deep: bool) -> tuple[int, dict[int, str]] | None:
        return _newest_whole(self.folder, self._manager.all_steps(), deep=deep)

    def _put_aside(self, damaged: dict[int, str]) -> None:
        if self._read_only or not damaged:
            return
        if jax.process_index() == 0:
            for step in damaged:
                aside = self.folder / f"{step}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(self.folder / str(step), aside)
        distributed.barrier()
        self._manager.reload()

    def _remove_leftovers(self) -> None:
        if jax.process_index() == 0:
            for path in self.folder.glob(f"*{_TMP_MARK}*"):
                shutil.rmtree(path, ignore_errors=True)
        distributed.barrier()

    def _failed(self, error: Exception) -> SaveError:
        """Returns what to raise, after giving back the disk space of the failed save."""
        step, self._saving = self._saving, None
        free_bytes = shutil.disk_usage(self.folder).free
        if jax.process_count() == 1:  # several leave it to their next start: the others may still be writing there
            for path in self.folder.glob(f"{step}{_TMP_MARK}*"):
                shutil.rmtree(path, ignore_errors=True)
            self._manager.reload()
        before = max(self._manager.all_steps(), default=None)
        rest = (
            f"The checkpoint of step {before} is untouched: mend the cause, and the same command goes on from there."
            if before is not None
            else "There is no earlier one: mend the cause, and the same command begins again."
        )
        return SaveError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(error)} "
            f"({self._saving_bytes:,} bytes of state, {free_bytes:,} bytes free). {rest}"
        )


def find_saved(path: str | os.PathLike) -> pathlib.Path | None:
    """Returns the newest undamaged checkpoint of a run folder, or `path` where it is a checkpoint; None: neither.

    Changes nothing, so the run may still be training. A damaged newer one is named on stderr.

    Raises:
      ValueError: all of them are damaged, or the one asked for is.
    """
    path = pathlib.Path(path).absolute()
    if (path / STATE_ITEM).is_dir():
        why = damage(path, deep=True)
        if why:
            raise ValueError(f"checkpoint {path} is damaged ({why}); take another one of {path.parent}.")
        return path
    folder = path / "checkpoints"
    found = _newest_whole(folder, [int(each.name) for each in folder.glob("*") if each.name.isdecimal()], deep=True)
    if found is None:
        return None
    step, damaged = found
    for bad, why in damaged.items():
        _warn(f"WARNING: checkpoint {folder / str(bad)} is damaged ({why}); taking step {step}.")
    return folder / str(step)


def saved_run(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a checkpoint holds beside its state: "position", "metadata", and "arrays", path -> dtype[shape]."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
        return reader.restore(folder / RUN_ITEM)


def read_arrays(folder: pathlib.Path, abstract: Any) -> Any:
    """Returns the part of one checkpoint's state that `abstract` names, and reads no other.

    Args:
      folder: of the checkpoint, from `find_saved`.
      abstract: nested dicts like the state, of jax.ShapeDtypeStruct: with a sharding, the array is read straight into
        it; without, into NumPy on this host. Another dtype than that of the checkpoint casts it, to nearest.
    """

    def how(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    how_each = jax.tree.map(how, abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        args = ocp.args.PyTreeRestore(item=abstract, restore_args=how_each, partial_restore=True)
        return reader.restore(folder / STATE_ITEM, args=args)


@dataclasses.dataclass(frozen=True)
class _Retention:
    """Orbax's PreservationPolicy: multiples of `every` stay for ever, and of the others the last few."""

    last: int
    every: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        permanent = [self.every > 0 and c.step % self.every == 0 for c in checkpoints]
        rolling = [c.step for c, stays in zip(checkpoints, permanent, strict=True) if not stays]
        kept = set(rolling[-self.last :])
        return [stays or c.step in kept for c, stays in zip(checkpoints, permanent, strict=True)]


def _newest_whole(folder: pathlib.Path, steps: Sequence[int], *, deep: bool) -> tuple[int, dict[int, str]] | None:
    """Returns the newest undamaged step with the damage of all newer ones; None when there is no step."""
    damaged: dict[int, str] = {}
    [steps, *_] = distributed.exchange(json.dumps(sorted(steps, reverse=True)))
    for step in json.loads(steps):
        why = damage(folder / str(step), deep=deep)
        if not why:
            return step, damaged
        damaged[step] = why
    if not damaged:
        return None
    lines = "".join(f"\n  {folder / str(step)}: {why}" for step, why in damaged.items())
    raise ValueError(
        f"every checkpoint is damaged:{lines}\nBring one back from a copy, or move {folder} away to start anew."
    )


def _require_writable(folder: pathlib.Path) -> None:
    probe = folder / f".write-probe-{jax.process_index()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder}: {error.strerror} ({error.filename}). Choose another run folder with --workdir."
        ) from None


def _barrier_of_saves(*, key: str, timeout_ms: int) -> None:
    """Waits for the other processes, in the threads that finish a save.

    A thread whose own part has failed waits for nobody: the others do not come before all parts are written, and that
    they are not is for this process to tell.
    """
    if sys.exc_info()[0] is None:
        distributed.barrier_of_threads(key, timeout_ms=timeout_ms)


def _arrays(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _reason(error: BaseException) -> str:
    """Returns what the operating system said, which TensorStore buries under paths; else the first line."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _warn(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)


def _not_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
