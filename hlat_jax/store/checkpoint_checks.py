"""Whether a checkpoint on disk can be used, judged without Orbax: its files, its record, its step and its norms.

A checkpoint of which every file is whole may still be unusable: its record has a field that no run writes, its folder
has the name of another step, or its state is not finite.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jax
import numpy as np

from hlat_jax.config import SECTIONS
from hlat_jax.host import distributed
from hlat_jax.store.integrity import damage
from hlat_jax.store.typed_json import Count, checked, read_json

RUN_ITEM = "run"
RUN_FILE = "metadata"  # where Orbax's JsonSave puts an item
PARAMS, MASTERS = ("params",), ("opt_state", "master")  # where a state has them


def _is_array(text: str) -> bool:
    found = re.fullmatch(r"(\w+)\[(?:\d+(?:, \d+)*)?\]", text, re.ASCII)
    try:
        return found is not None and jax.numpy.dtype(found[1]).kind not in "OSU"
    except TypeError:
        return False


def _is_position(rows: list) -> bool:
    lengths = {len(row) if isinstance(row, list) else -1 for row in rows}
    return len(lengths) == 1 and 0 not in lengths


_WORDS_OF_POSITION = "a list of integers, or of such lists of one length"
_Position = Annotated[list[int] | list[list[int]], _WORDS_OF_POSITION, _is_position]


class _File(TypedDict):
    name: str
    bytes: Count
    documents: Count
    fingerprint: str


class _Manifest(TypedDict):
    files: list[_File]


class _Choice(TypedDict):
    choice: str


class _Metadata(TypedDict):
    config: NotRequired[dict]


class _Data(TypedDict):
    """What a run has always recorded of its data."""

    batch_size: Annotated[int, "an integer of at least 1", lambda value: value >= 1]
    seq_len: Annotated[int, "an integer of at least 2", lambda value: value >= 2]
    packing: Literal["concat", "documents"]


class _Config(TypedDict):
    data: _Data


class _RunMetadata(TypedDict):
    """What a run gives to `Checkpointer.save`."""

    config: _Config
    tokens: Count
    num_nonfinite: Count
    skipped_batches: NotRequired[Count]
    jax: NotRequired[dict]
    jax_others: NotRequired[dict]


class _Settings(TypedDict):
    """What is among it since a run has recorded its model too."""

    tokenizer_sha256: str
    manifest: _Manifest
    validation_manifest: NotRequired[_Manifest | None]
    implementations: dict[str, str]
    remat: NotRequired[_Choice | None]


class _Saved(TypedDict):
    position: _Position
    metadata: _Metadata
    arrays: dict[str, Annotated[str, "dtype[shape]", _is_array]]
    step: NotRequired[Count]
    norms: NotRequired[dict[str, Annotated[float, "a floating-point number", lambda norm: type(norm) is float]]]


def saved_run(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a checkpoint holds beside its state, its record.

    It has "position", "metadata", and "arrays", path -> dtype[shape]; and, unless an earlier version wrote it, "step"
    and "norms", part of the state -> norm, see program.RunProgram.

    Raises:
      ValueError: a field is missing or has a value that no run writes; the message has the file and the field.
    """
    path = folder / RUN_ITEM / RUN_FILE
    run = read_json(path, kind=_Saved, allow_nan=True)
    metadata, position = run["metadata"], run["position"]
    if "config" not in metadata:
        return run
    config = metadata["config"]
    if "data" in config:  # else it was written by something other than a run
        checked(metadata, _RunMetadata, where=str(path), field="metadata")
        checked(metadata, _Settings if "model" in config else dict, where=str(path), field="metadata")
        for name in SECTIONS.keys() & config.keys():
            checked(config[name], SECTIONS[name], where=str(path), field=f"metadata.config.{name}")
        if len(position) != config["data"]["batch_size"] or not isinstance(position[0], list):
            allowed = f"a list of {config['data']['batch_size']} lists, one a row of a batch"
            raise ValueError(f"{path}: position={repr(position)[:100]} must be {allowed}.")
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
        raise ValueError(f"{folder / RUN_ITEM / RUN_FILE} records no step")
    return int(position[0, 0])


def _is_step(name: str) -> bool:
    """Returns whether a folder's name is a step as a save writes it: no padding, no digits of other scripts."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, usable or not, in ascending order."""
    return sorted(int(path.name) for path in folder.glob("*") if _is_step(path.name))


def not_finite(norms: Mapping[str, Any]) -> str:
    """Returns which norms of a state are not finite; "" when all are."""
    parts = [f"the norm of {part} is {float(norm)}" for part, norm in norms.items() if not math.isfinite(norm)]
    return f"its state is not finite: {', '.join(parts)}" if parts else ""


def newest_usable(folder: pathlib.Path, *, deep: bool, known: Mapping[int, str]) -> tuple[int, dict[int, str]] | None:
    """Returns the newest usable step of process 0 and why all newer ones are not; None when there is no step.

    Every process calls it at the same point.

    Args:
      folder: of the checkpoints.
      deep: sum large files too, see integrity.damage.
      known: steps that cannot be used, and why.
    """
    unusable: dict[int, str] = {}
    [steps, *_] = distributed.exchange(json.dumps(saved_steps(folder)[::-1]))
    for step in json.loads(steps):
        why = known[step] if step in known else problem_on_disk(folder / str(step), deep=deep)
        if not why:
            return step, unusable
        unusable[step] = why
    if not unusable:
        return None
    lines = "".join(f"\n  {folder / str(step)}: {why}" for step, why in unusable.items())
    raise ValueError(
        f"every checkpoint is damaged:{lines}\nRestore one from a backup, or move {folder} elsewhere to start again."
    )


def problem_on_disk(folder: pathlib.Path, *, deep: bool) -> str:
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
    if position.ndim == 2:  # of a run: every row begins with the number of batches, trained or skipped
        found["data position"] = int(position[0, 0]) - metadata.get("skipped_batches", 0)
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


def problem_of_state(name: str, step: int, state: Any, *, norms: Callable[[Any], Mapping[str, Any]] | None) -> str:
    """Returns why a state that was read is not that of a step, or is not finite; "" when it is both."""
    if "step" in state and (found := int(jax.device_get(state["step"]))) != step:
        return _other_step(name, step, {"state": found})
    return not_finite(jax.device_get(norms(state))) if norms is not None else ""


def problem_of_arrays(folder: pathlib.Path, *, read: Callable[[pathlib.Path, Any], Any]) -> str:
    """Returns as `problem_of_state`, reading of the state its step and, where no norms were recorded, the weights.

    Both the parameters and, where there are such, the masters; one weight at a time is in host memory.

    Args:
      folder: of the checkpoint.
      read: `checkpoint.read_arrays`.
    """
    run = saved_run(folder)
    scalar = jax.ShapeDtypeStruct((), np.int32)
    state = read(folder, {"step": scalar}) if "['step']" in run["arrays"] else {}
    if why := problem_of_state(folder.name, saved_step(folder, run), state, norms=None):
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
        [values] = jax.tree.leaves(read(folder, abstract))
        values = values.reshape(-1).astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            # in fp32 as in a step, where a weight of 1e20 makes the norm infinite
            totals[part] = totals.get(part, np.float32(0)) + values @ values
    return not_finite({part: np.sqrt(total) for part, total in totals.items()})
