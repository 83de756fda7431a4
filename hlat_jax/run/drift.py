"""Compares the settings of a run with the settings in its checkpoint, which it must keep. Imports no JAX."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

from hlat_jax.config import OP_KEYS, SECTIONS, Config, OptimizerConfig
from hlat_jax.data.drift import data_drift
from hlat_jax.resolve import batch_of_step, skipped_batches
from hlat_jax.store.checkpoint_checks import saved_run, saved_steps
from hlat_jax.store.config_diff import config_drift, without_gone
from hlat_jax.store.integrity import damage_of_share

# Settings that a branch may change: the state and the data position keep their meaning.
BRANCH_MAY_CHANGE = (
    *(f"optimizer.{field.name}" for field in dataclasses.fields(OptimizerConfig) if field.name != "name"),
    "train.*",
    "implementations.*",
    "jax.*",
    *(f"model.{key}" for key in (*OP_KEYS, "remat", "layer_loop")),
)

_OF_MANIFEST = re.compile(r"(validation_)?manifest\.(hash|text_field): ")


def check_settings(config: Config, workdir: pathlib.Path) -> None:
    """Raises ValueError if the config differs from the newest checkpoint's, before JAX is imported.

    The run compares implementations and files, which it has to open first.
    """
    folder = workdir / "checkpoints"
    for step in reversed(saved_steps(folder)):
        try:
            if damage_of_share(folder / str(step), slice(None), deep=False):
                continue  # the run says so, and resumes from an older one
            saved = saved_run(folder / str(step))["metadata"]
        except (OSError, ValueError):
            continue
        refuse_drift(saved, saved | {"config": config.to_dict()}, step=step, workdir=workdir)
        return


def refuse_drift(saved: dict[str, Any], current: dict[str, Any], *, step: int, workdir: pathlib.Path) -> None:
    """Raises ValueError if the settings of a run differ from its checkpoint's at `step` in `workdir`."""
    if drift := drift_of(saved, current, step=step):
        lines = "\n  ".join(drift)
        remedy = "give the changed run another folder with --workdir."
        if not drift_of(saved, current, step=step, branch=True):
            remedy = (
                "continue with the new ones in another folder:\n  --workdir=NEW_FOLDER "
                f"--config.train.branch_from={workdir}@{step}"
            )
        raise ValueError(
            f"this run folder was trained with other settings:\n  {lines}\nRestore these settings, or {remedy}"
        )


def drift_of(saved: dict[str, Any], current: dict[str, Any], *, step: int, branch: bool = False) -> list[str]:
    """Returns a line for each setting that differs and must not. A `branch` may change BRANCH_MAY_CHANGE.

    A config key that is newer than the checkpoint counts as its default. A newer op counts as its current
    implementation, and a newer setting of JAX or of the tokenizer as its current value.
    """
    saved = saved | {"config": complete(saved["config"])}
    for group in ("implementations", "jax", "tokenizer"):
        saved[group] = {name: saved.get(group, {}).get(name, value) for name, value in current.get(group, {}).items()}
    if branch:
        saved, current = (tree | {"validation_manifest": None} for tree in (saved, current))
    drift = config_drift(saved, current, also=BRANCH_MAY_CHANGE if branch else ())
    passed = batch_of_step(step, skipped_batches(saved["config"]["train"]["skip_steps"]))
    drift += _skip_drift(saved, current, step=step) + data_drift(saved, current, num_batches=passed)
    # the hash of the data tells a reader nothing if another line names what changed
    return [line for line in drift if not _OF_MANIFEST.match(line)] or drift


def _skip_drift(saved: dict[str, Any], current: dict[str, Any], *, step: int) -> list[str]:
    """Returns a line if two settings of a run leave out other batches among those that it has passed after `step`."""
    before, now = (tree["config"]["train"]["skip_steps"] for tree in (saved, current))
    end = batch_of_step(step, skipped_batches(before)) + 1

    def batches_passed(skip_steps: str) -> list[range]:
        return [range(part.start, min(part.stop, end)) for part in skipped_batches(skip_steps) if part.start < end]

    if batches_passed(before) == batches_passed(now):
        return []
    return [
        f"train.skip_steps: {before!r} in the checkpoint, {now!r} now, which differ before batch {end:,}. You may add "
        "or remove later batches only. For earlier ones branch from an earlier checkpoint, see train.branch_from"
    ]


def complete(kept: dict[str, Any]) -> dict[str, Any]:
    """Returns recorded sections with new keys at their defaults, without removed keys that changed nothing."""
    defaults = {name: {f.name: f.default for f in dataclasses.fields(section)} for name, section in SECTIONS.items()}
    return kept | {name: keys | without_gone(name, kept.get(name, {})) for name, keys in defaults.items()}
