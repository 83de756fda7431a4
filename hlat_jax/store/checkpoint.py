"""Checkpoints of a run: training state, data position and what they belong to, in `<run folder>/checkpoints/<step>/`.

Orbax writes them in the background. A folder becomes a checkpoint by one rename, and `integrity.json`, with the size
and CRC-32 of every file, is already inside it then: no moment exists in which a kill leaves a folder that looks like a
checkpoint and is none. Orbax itself returns flipped bytes of an array as if they were data, hence the sums of our own.

A checkpoint whose files are whole may still be unusable. `_problem` says why, for every command that opens one: its
record has a field that no run writes, its folder has the name of another step, or its state is not finite. Only this
file imports Orbax.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from hlat_jax.config import CheckpointConfig, with_renamed_keys
from hlat_jax.host import distributed
from hlat_jax.store.atomic_files import read_json
from hlat_jax.store.config_diff import differences
from hlat_jax.store.integrity import damage, seal

STATE_ITEM, RUN_ITEM = "state", "run"
_RUN_FILE = "metadata"  # where Orbax's JsonSave puts an item
PARAMS, MASTERS = ("params",), ("opt_state", "master")  # where a state has them
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

    def save(
        self,
        step: int,
        state: Any,
        *,
        position: np.ndarray,
        metadata: dict[str, Any],
        norms: Mapping[str, float] | None = None,
    ) -> bool:
        """Starts to save in the background, after the save before it ended; the caller may donate `state` at once.

        Args:
          step: updates done; the name of the checkpoint.
          state: pytree of jax arrays.
          position: int64 array, where the data goes on; the same in every process.
          metadata: fit for JSON.
          norms: of the parts of the state, recorded with it; None: not known, and a restore computes them.

        Returns:
          False when that step is saved already.

        Raises:
          ValueError: a norm is not finite; nothing was written, and no earlier checkpoint was removed.
          SaveError: this save could not start, or the one before it failed.
        """
        if why := not_finite(norms or {}):
            raise ValueError(f"the state of step {step} was not saved: {why}.")
        self.wait()
        if step in self._manager.all_steps():
            return False
        run = {"step": step, "position": np.asarray(position, np.int64).tolist(), "arrays": _arrays(state)}
        run |= {"metadata": metadata} | ({} if norms is None else {"norms": dict(norms)})
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
        found = _newest_usable(self.folder, _steps(self.folder), deep=False, known={})
        if found is None:
            return None
        step, _ = found
        return step, saved_run(self.folder / str(step))["metadata"]

    def restore(
        self, abstract_state: Any, *, norms: Callable[[Any], Mapping[str, Any]] | None = None
    ) -> tuple[int, Any, np.ndarray, dict[str, Any]] | None:
        """Returns (step, state, position, metadata) of the newest usable checkpoint; None when there is none.

        One that is damaged, has the name of another step or holds a state that is not finite is named on stderr and,
        unless read_only, kept aside as `<step>.damaged`.

        Args:
          abstract_state: the state as jax.ShapeDtypeStruct with shardings; arrays are read straight into them.
          norms: computes those of a state, for checkpoints that have none recorded; None: these are taken as finite.

        Raises:
          ValueError: no checkpoint is usable, or the newest usable one holds arrays of other shapes or dtypes.
        """
        self.wait()
        unusable: dict[int, str] = {}
        while found := _newest_usable(self.folder, _steps(self.folder), deep=True, known=unusable):
            step, unusable = found
            run = saved_run(self.folder / str(step))
            state = self._state(step, run, abstract_state)
            problem = _problem_of_state(str(step), step, state, norms=None if "norms" in run else norms)
            if not problem:
                break
            unusable[step], state = problem, None  # its memory is needed for the one before
        else:
            return None
        for bad, why in unusable.items():
            _warn(f"WARNING: checkpoint {self.folder / str(bad)} is damaged ({why}); going back to step {step}.")
        self._put_aside(unusable)
        return step, state, np.asarray(run["position"], np.int64), run["metadata"]

    def close(self) -> None:
        """Waits for the save under way and lets go of all threads. Raises SaveError when that save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _state(self, step: int, run: dict[str, Any], abstract_state: Any) -> Any:
        others = differences(run["arrays"], _arrays(abstract_state))  # Orbax would cast another dtype in silence
        if others:
            raise ValueError(f"{self.folder / str(step)} is of another model or precision:\n  " + "\n  ".join(others))
        args = ocp.args.Composite(**{STATE_ITEM: ocp.args.StandardRestore(abstract_state)})
        return self._manager.restore(step, args=args)[STATE_ITEM]

    def _seal(self) -> None:
        """Flushes and sums every file of the save under way; Orbax calls it just before the rename that commits."""
        [folder] = self.folder.glob(f"{self._saving}{_TMP_MARK}*")
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [name for name in names if pathlib.Path(name).name not in _UNSUMMED]
        seal(folder, names)

    def _put_aside(self, damaged: dict[int, str]) -> None:
        if self._read_only or not damaged:
            return
        if jax.process_index() == 0:
            for step in damaged:
                aside = self.folder / f"{step}.damaged"
                if aside.is_dir() and not aside.is_symlink():
                    shutil.rmtree(aside, ignore_errors=True)
                else:
                    aside.unlink(missing_ok=True)
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
    """Returns the newest usable checkpoint of a run folder, or `path` where it is a checkpoint; None: neither.

    Changes nothing, so the run may still be training. A newer one that cannot be used is named on stderr.

    Raises:
      ValueError: none of them can be used, or the one asked for cannot.
    """
    path = pathlib.Path(path).absolute()
    if (path / STATE_ITEM).is_dir():
        path = path.resolve()  # a link has the step of the folder it leads to
        why = _problem(path, deep=True) or _problem_of_arrays(path)
        if why:
            raise ValueError(f"checkpoint {path} is damaged ({why}); take another one of {path.parent}.")
        return path
    folder = path / "checkpoints"
    unusable: dict[int, str] = {}
    while found := _newest_usable(folder, _steps(folder), deep=True, known=unusable):
        step, unusable = found
        why = _problem_of_arrays(folder / str(step))
        if not why:
            break
        unusable[step] = why
    else:
        return None
    for bad, why in unusable.items():
        _warn(f"WARNING: checkpoint {folder / str(bad)} is damaged ({why}); taking step {step}.")
    return folder / str(step)


def saved_run(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a checkpoint holds beside its state.

    "position", "metadata", and "arrays", path -> dtype[shape]; from the versions on that record them "step", and
    "norms", part of the state -> norm, see step.make_norms.

    Raises:
      ValueError: a field is missing or has a value that no run writes; the message has the file and the field.
    """
    path = folder / RUN_ITEM / _RUN_FILE
    run = read_json(path, allow_nan=True)
    for field, value, is_valid, allowed in _fields(run):
        if not is_valid:
            raise ValueError(f"{path}: {field}={repr(value)[:100]} must be {allowed}.")
    if "config" in run["metadata"]:
        run["metadata"]["config"] = with_renamed_keys(run["metadata"]["config"])
    return run


def saved_step(folder: pathlib.Path, run: Mapping[str, Any]) -> int:
    """Returns the step that a checkpoint's folder is named after; under any other name, the step it records.

    Raises:
      ValueError: it has neither.
    """
    if _is_step(folder.name):
        return int(folder.name)
    if "step" in run:
        return run["step"]
    position = np.asarray(run["position"])
    if position.ndim != 2:
        raise ValueError(f"{folder / RUN_ITEM / _RUN_FILE} records no step")
    return int(position[0, 0])


def _fields(run: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool, str]]:
    """Yields (field, value, whether a run could have written it, what is allowed) of what lies beside a state."""

    def is_count(value: Any, *, least: int = 0) -> bool:
        return type(value) is int and least <= value < 1 << 63

    run = {"position": None, "metadata": None, "arrays": None} | run
    try:
        position = np.asarray(run["position"])
    except ValueError:  # rows of several lengths
        position = np.zeros(0)
    is_position = position.dtype == np.int64 and position.ndim > 0
    yield "position", run["position"], is_position, "a list of integers, or of such lists of one length"
    yield "metadata", run["metadata"], isinstance(run["metadata"], dict), "an object"
    yield "arrays", run["arrays"], isinstance(run["arrays"], dict), "an object"
    for name, text in run["arrays"].items():
        yield f"arrays[{name!r}]", text, _is_array(text), "dtype[shape]"
    if "step" in run:
        yield "step", run["step"], is_count(run["step"]), "an integer of at least 0"
    if "norms" in run:
        yield "norms", run["norms"], isinstance(run["norms"], dict), "an object"
        for name, norm in run["norms"].items():
            yield f"norms[{name!r}]", norm, type(norm) is float, "a floating-point number"
    metadata = run["metadata"]
    config = metadata.get("config", {})
    yield "metadata.config", config, isinstance(config, dict), "an object"
    if "data" not in config:  # not of a run
        return
    data = config["data"]
    yield "metadata.config.data", data, isinstance(data, dict), "an object"
    for key, least in (("batch_size", 1), ("seq_len", 2)):
        value = data.get(key)
        yield f"metadata.config.data.{key}", value, is_count(value, least=least), f"an integer of at least {least}"
    packing = data.get("packing")
    yield "metadata.config.data.packing", packing, packing in ("concat", "documents"), "'concat' or 'documents'"
    for key in ("tokens", "num_nonfinite"):
        value = metadata.get(key)
        yield f"metadata.{key}", value, is_count(value), "an integer of at least 0"
    has_rows = position.ndim == 2 and len(position) == data["batch_size"]
    yield "position", run["position"], has_rows, f"a list of {data['batch_size']} lists, one a row of a batch"


def _is_array(text: Any) -> bool:
    found = re.fullmatch(r"(\w+)\[(?:\d+(?:, \d+)*)?\]", text, re.ASCII) if isinstance(text, str) else None
    try:
        return found is not None and jax.numpy.dtype(found[1]) is not None
    except TypeError:
        return False


def _is_step(name: str) -> bool:
    """Returns whether a folder's name is a step as a save writes it: no padding, no digits of other scripts."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def _steps(folder: pathlib.Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if _is_step(path.name)]


def not_finite(norms: Mapping[str, Any]) -> str:
    """Returns which norms of a state are not finite; "" when all are."""
    parts = [f"the norm of {part} is {float(norm)}" for part, norm in norms.items() if not math.isfinite(norm)]
    return f"its state is not finite: {', '.join(parts)}" if parts else ""


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


def _newest_usable(
    folder: pathlib.Path, steps: Sequence[int], *, deep: bool, known: dict[int, str]
) -> tuple[int, dict[int, str]] | None:
    """Returns the newest usable step and why all newer ones are not; None when there is no step.

    Args:
      folder: of the checkpoints.
      steps: of them.
      deep: sum large files too, see integrity.damage.
      known: steps that cannot be used, and why.
    """
    unusable: dict[int, str] = {}
    [steps, *_] = distributed.exchange(json.dumps(sorted(steps, reverse=True)))
    for step in json.loads(steps):
        why = known[step] if step in known else _problem(folder / str(step), deep=deep)
        if not why:
            return step, unusable
        unusable[step] = why
    if not unusable:
        return None
    lines = "".join(f"\n  {folder / str(step)}: {why}" for step, why in unusable.items())
    raise ValueError(
        f"every checkpoint is damaged:{lines}\nBring one back from a copy, or move {folder} away to start anew."
    )


def _problem(folder: pathlib.Path, *, deep: bool) -> str:
    """Returns why a checkpoint cannot be used, as far as that shows without its arrays; "" when nothing does."""
    if why := damage(folder, deep=deep):
        return why
    try:
        run = saved_run(folder)
        step = saved_step(folder, run)
    except ValueError as error:
        return str(error).rstrip(".")
    # the folder's name is not part of the sums; all of these are
    found = {"record": run["step"]} if "step" in run else {}
    position, metadata = np.asarray(run["position"]), run["metadata"]
    if position.ndim == 2:  # of a run: every row begins with the number of batches
        found["data position"] = int(position[0, 0])
    if "data" in metadata.get("config", {}):
        found["token count"] = _step_of_tokens(metadata["tokens"], metadata["config"]["data"], step)
    others = {what: other for what, other in found.items() if str(other) != str(step)}
    if others:
        return _other_step(folder.name, step, others)
    return not_finite(run.get("norms", {}))


def _other_step(name: str, step: int, found: Mapping[str, Any]) -> str:
    others = ", ".join(f"{what} ({other})" for what, other in found.items())
    known = f"its folder is named {name}" if name == str(step) else f"it records step {step}"
    return f"{known}, which is not the step of its {others}"


def _step_of_tokens(tokens: int, data: Mapping[str, Any], step: int) -> str:
    """Returns the step at which a run has trained on so many tokens; with padding that may be `step` if it can be."""
    rows, seq_len = data["batch_size"], data["seq_len"]
    if data["packing"] == "concat":  # the last token of a row has no target
        return f"{tokens / (rows * (seq_len - 1)):.10g}"
    least = -(-tokens // (rows * seq_len))
    return str(step) if step >= least else f"{least} or later"


def _problem_of_state(name: str, step: int, state: Any, *, norms: Callable[[Any], Mapping[str, Any]] | None) -> str:
    """Returns why a state that was read is not that of a step, or is not finite; "" when it is both."""
    if "step" in state and (found := int(jax.device_get(state["step"]))) != step:
        return _other_step(name, step, {"state": found})
    return not_finite(jax.device_get(norms(state))) if norms is not None else ""


def _problem_of_arrays(folder: pathlib.Path) -> str:
    """Returns as `_problem_of_state`, reading of the state its step and, where no norms were recorded, the weights.

    Both the parameters and, where there are such, the masters; one weight at a time is in host memory.
    """
    run = saved_run(folder)
    scalar = jax.ShapeDtypeStruct((), np.int32)
    state = read_arrays(folder, {"step": scalar}) if "['step']" in run["arrays"] else {}
    if why := _problem_of_state(folder.name, saved_step(folder, run), state, norms=None):
        return why
    if "norms" in run:
        return ""
    totals: dict[str, np.float32] = {}
    for name, text in run["arrays"].items():
        keys = re.findall(r"\['(\w+)'\]", name)
        part = next((".".join(part) for part in (PARAMS, MASTERS) if keys[: len(part)] == list(part)), "")
        if not part:
            continue
        dtype, _, shape = text.partition("[")
        abstract = jax.ShapeDtypeStruct(json.loads(f"[{shape}"), jax.numpy.dtype(dtype))
        for key in reversed(keys):
            abstract = {key: abstract}
        [values] = jax.tree.leaves(read_arrays(folder, abstract))
        values = values.reshape(-1).astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            # in fp32 as in a step, where a weight of 1e20 makes the norm infinite
            totals[part] = totals.get(part, np.float32(0)) + values @ values
    return not_finite({part: np.sqrt(total) for part, total in totals.items()})


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
