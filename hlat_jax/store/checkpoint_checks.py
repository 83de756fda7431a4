"""Checks without Orbax whether a checkpoint on disk can be used, by its files, record, step and norms.

A checkpoint with all files intact may still be unusable. Its record may have a field that no run writes, its folder the
name of another step, or its state values that are not finite.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from hlat_jax.store.integrity import damage
from hlat_jax.store.typed_json import Count, check_kind, read_json

RUN_ITEM = "run"
RUN_FILE = "metadata"  # where Orbax's JsonSave puts an item
PARAMS, MASTERS = ("params",), ("opt_state", "master")  # where a state has them


class _RunMetadata(TypedDict):
    """What a run gives to `Checkpointer.save`."""

    config: dict
    tokens: Count
    num_nonfinite: Count
    skipped_batches: NotRequired[Count]
    tokenizer_sha256: str
    manifest: dict
    implementations: dict[str, str]
    jax: dict


class _Saved(TypedDict):
    step: Count
    position: list
    metadata: dict
    arrays: dict[str, str]
    norms: dict[str, float]
    digest: NotRequired[dict[str, Count]]


def saved_run(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the record of a checkpoint, which is all but its state.

    It has "step", "position", "metadata", "arrays" (path -> dtype[shape]), the "norms" of program.RunProgram and, in
    newer checkpoints, the "digest" (path -> digest).

    Raises:
      ValueError: a field is missing or of another kind, as an older version wrote it. The message has file and field.
    """
    path = folder / RUN_ITEM / RUN_FILE
    run = read_json(path, kind=_Saved, allow_nan=True)
    if "config" in run["metadata"]:  # else it was written by something other than a run
        check_kind(run["metadata"], _RunMetadata, where=str(path), field="metadata")
    return run


def without_table_rows(arrays: Mapping[str, str]) -> dict[str, str]:
    """Returns path -> `dtype[shape]` of arrays, without the number of rows of an embedding table or a head.

    A layout pads the vocabulary to whole parts with rows of zeros. The number of tokens is compared as a setting.
    """
    tables = ("['embed']", "['head']")
    return {name: re.sub(r"\[\d+", "[V", text) if name.endswith(tables) else text for name, text in arrays.items()}


def without_padding(arrays: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of arrays by path. Arrays of the optimizer's state have the shapes of their parameters.

    If replicas do not divide a dim of a parameter, its state has zeros after the last element.
    """
    prefix = "['params']"
    sizes = {name.removeprefix(prefix): _sizes(text) for name, text in arrays.items() if name.startswith(prefix)}
    found = dict(arrays)
    for name, text in arrays.items():
        ends = (name[start:] for start in range(len(name)) if name.startswith("['opt_state']"))
        of_param = next((sizes[end] for end in ends if end in sizes), None)
        stored = _sizes(text)
        if of_param and len(stored) == len(of_param) and all(map(int.__ge__, stored, of_param)):
            found[name] = text.partition("[")[0] + str(of_param)
    return found


def _sizes(text: str) -> list[int]:
    """Returns the shape in the text of an array, `dtype[shape]`."""
    return json.loads(f"[{text.partition('[')[2]}")


def _is_step(name: str) -> bool:
    """Returns whether a folder's name is a step as a save writes it: no padding, no digits of other scripts."""
    return name.isascii() and name.isdecimal() and name == str(int(name))


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, usable or not, in ascending order."""
    return sorted(int(path.name) for path in folder.glob("*") if _is_step(path.name))


def not_finite(norms: Mapping[str, Any]) -> str:
    """Returns which norms of a state are not finite, or "" if all are."""
    parts = [f"the norm of {part} is {float(norm)}" for part, norm in norms.items() if not math.isfinite(norm)]
    return f"its state is not finite: {', '.join(parts)}" if parts else ""


def newest_usable(
    folder: pathlib.Path, *, deep: bool, others: Mapping[int, str] | None = None
) -> tuple[int, dict[int, str]] | None:
    """Returns the newest usable step of process 0 and step -> problem of all newer ones, or None without any step.

    Every process calls it at the same point. With `deep` large files are summed too, see integrity.damage. The steps in
    `others` are known to be unusable.
    """
    from hlat_jax.host import distributed  # imports JAX, which other checks of this module do not need

    unusable: dict[int, str] = {}
    [steps, *_] = distributed.exchange(json.dumps(saved_steps(folder)[::-1]))
    for step in json.loads(steps):
        problem = (others or {}).get(step) or problem_on_disk(folder / str(step), deep=deep)
        if not problem:
            return step, unusable
        unusable[step] = problem
    if not unusable:
        return None
    lines = "".join(f"\n  {folder / str(step)}: {problem}" for step, problem in unusable.items())
    raise ValueError(
        f"every checkpoint is damaged:{lines}\nRestore one from a backup, or move {folder} elsewhere to begin again."
    )


def problem_on_disk(folder: pathlib.Path, *, deep: bool) -> str:
    """Returns why a checkpoint cannot be used, or "" if it can. Arrays are read only to sum them."""
    if problem := damage(folder, deep=deep):
        return problem
    try:
        run = saved_run(folder)
    except ValueError as error:
        return str(error).rstrip(".")
    step, first = run["step"], run["position"][0]
    if _is_step(folder.name) and int(folder.name) != step:  # the name is not part of the sums
        return f"its folder is named {folder.name}, and it holds step {step}"
    if isinstance(first, list):  # of a run: every row begins with the number of batches, trained or skipped
        step_of_data = first[0] - run["metadata"].get("skipped_batches", 0)
        if step_of_data != step:
            return f"it holds step {step}, and its data position belongs to step {step_of_data}"
    return not_finite(run["norms"])
