"""Whether a checkpoint on disk can be used, judged without Orbax: its files, its record, its step and its norms.

A checkpoint of which every file is whole may still be unusable: its record has a field that no run writes, its folder
has the name of another step, or its state is not finite.
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
    """Returns what a checkpoint holds beside its state, its record.

    It has "step", "position", "metadata", "arrays", path -> dtype[shape], "norms", part of the state -> norm, see
    program.RunProgram, and, but for older versions, "digest", path -> digest.

    Raises:
      ValueError: a field is missing or of another kind, as an older version wrote it; the message has file and field.
    """
    path = folder / RUN_ITEM / RUN_FILE
    run = read_json(path, kind=_Saved, allow_nan=True)
    if "config" in run["metadata"]:  # else it was written by something other than a run
        check_kind(run["metadata"], _RunMetadata, where=str(path), field="metadata")
    return run


def without_table_rows(arrays: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of arrays by path, `dtype[shape]`, without how many rows an embedding table or a head has.

    A layout pads the vocabulary to whole parts with rows of zeros; the number of tokens is compared as a setting.
    """
    tables = ("['embed']", "['head']")
    return {name: re.sub(r"\[\d+", "[V", text) if name.endswith(tables) else text for name, text in arrays.items()}


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


def newest_usable(
    folder: pathlib.Path, *, deep: bool, others: Mapping[int, str] | None = None
) -> tuple[int, dict[int, str]] | None:
    """Returns the newest usable step of process 0 and why all newer ones are not; None when there is no step.

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
        f"every checkpoint is damaged:{lines}\nRestore one from a backup, or move {folder} elsewhere to start again."
    )


def problem_on_disk(folder: pathlib.Path, *, deep: bool) -> str:
    """Returns why a checkpoint cannot be used; "" when nothing speaks against it. Reads no arrays but to sum them."""
    if problem := damage(folder, deep=deep):
        return problem
    try:
        run = saved_run(folder)
    except ValueError as error:
        return str(error).rstrip(".")
    step, first = run["step"], run["position"][0]
    if _is_step(folder.name) and int(folder.name) != step:  # the name is not part of the sums
        return f"its folder is named {folder.name}, and it is of step {step}"
    if isinstance(first, list):  # of a run: every row begins with the number of batches, trained or skipped
        step_of_data = first[0] - run["metadata"].get("skipped_batches", 0)
        if step_of_data != step:
            return f"it is of step {step}, and its data position of step {step_of_data}"
    return not_finite(run["norms"])
