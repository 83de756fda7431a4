"""The settings of a run that its folder and its checkpoints record; a run resumes only with the same settings."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from hlat_jax.config import SECTIONS, Config
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.streams import data_drift
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host.neuron_env import recorded
from hlat_jax.ops.registry import OPS
from hlat_jax.resolve import batch_of_step, resolve, skipped_batches
from hlat_jax.run import budget
from hlat_jax.step import RunProgram
from hlat_jax.store import atomic_files
from hlat_jax.store.config_diff import config_drift

# Settings that a branch may change: they affect neither the meaning of the state nor that of the data position.
BRANCH_MAY_CHANGE = (
    "optimizer.*",
    "train.*",
    "implementations.*",
    *(f"model.{key}" for key in (*OPS, "remat", "layer_loop")),
)


def settings_of(program: RunProgram, *, tokenizer: Tokenizer, batches: TrainBatches) -> dict[str, Any]:
    """Returns the settings that a checkpoint records: config, resolved implementations, and hashes of its inputs."""
    return {
        "config": program.config.to_dict(),
        "implementations": {key: getattr(program.model, key) for key in (*OPS, "remat", "layer_loop")},
        "tokenizer_sha256": tokenizer.sha256,
        "manifest": batches.manifest,
    }


def refuse_drift(saved: dict[str, Any], current: dict[str, Any], *, step: int, workdir: pathlib.Path) -> None:
    """Raises ValueError if the settings of the checkpoint at `step` in `workdir` differ from those of the run."""
    drift = _drift(saved, current, step=step)
    if drift:
        lines = "\n  ".join(drift)
        remedy = "give the changed run another folder with --workdir."
        if not _drift(saved, current, step=step, branch=True):
            remedy = (
                "continue with the new ones in another folder: --workdir=NEW_FOLDER "
                f"--config.train.branch_from={workdir}@{step}"
            )
        raise ValueError(
            f"this run folder was trained with other settings:\n  {lines}\nRestore these settings, or {remedy}"
        )


def refuse_branch_drift(saved: dict[str, Any], current: dict[str, Any], *, step: int) -> None:
    """Raises ValueError if a branch differs from the checkpoint at `step` in more than BRANCH_MAY_CHANGE."""
    if drift := _drift(saved, current, step=step, branch=True):
        lines = "\n  ".join(drift)
        raise ValueError(
            f"that run had settings that a branch must keep:\n  {lines}\nRestore these settings; a branch may change "
            "optimizer, train, parallel, held-out text and implementations."
        )


def _drift(saved: dict[str, Any], current: dict[str, Any], *, step: int, branch: bool = False) -> list[str]:
    """Returns a line for each setting that differs and must not.

    A config key that is newer than the checkpoint counts as its default, an op as its current implementation.
    """
    saved = saved | {"config": _completed(saved["config"])}
    loop = saved["config"]["model"]["layer_loop"]  # where it is named, or from before it was a choice
    implementations = current["implementations"] | ({} if loop == "auto" else {"layer_loop": loop})
    saved["implementations"] = implementations | saved["implementations"]
    if branch:
        saved, current = (tree | {"validation_manifest": None} for tree in (saved, current))
    drift = config_drift(saved, current, also=BRANCH_MAY_CHANGE if branch else ())
    passed = batch_of_step(step, skipped_batches(saved["config"]["train"]["skip_steps"]))
    return drift + skip_drift(saved, current, step=step) + data_drift(saved, current, num_batches=passed)


def skip_drift(saved: dict[str, Any], current: dict[str, Any], *, step: int) -> list[str]:
    """Returns a line if two settings of a run leave out other batches among those that it has passed after `step`."""
    before, now = (tree["config"]["train"]["skip_steps"] for tree in (saved, current))
    end = batch_of_step(step, skipped_batches(before)) + 1

    def passed(skip_steps: str) -> list[range]:
        return [range(part.start, min(part.stop, end)) for part in skipped_batches(skip_steps) if part.start < end]

    if passed(before) == passed(now):
        return []
    return [
        f"train.skip_steps: {before!r} in the checkpoint, {now!r} now, which differ before batch {end:,}; only later "
        "batches may be added or removed, unless train.rewind_to is an earlier checkpoint"
    ]


def saved_config(saved: dict[str, Any]) -> Config:
    """Returns the config in the settings of a checkpoint; keys newer than the checkpoint have their defaults."""
    return resolve(_completed(saved["config"]))


def _completed(kept: dict[str, Any]) -> dict[str, Any]:
    defaults = {name: {f.name: f.default for f in dataclasses.fields(section)} for name, section in SECTIONS.items()}
    return kept | {name: keys | kept.get(name, {}) for name, keys in defaults.items()}


def write_settings(config: Config, workdir: pathlib.Path, *, remat: dict[str, Any] | None) -> None:
    """Writes config, environment and, if `model.remat` is a budget, the choice made for it into the run folder."""
    atomic_files.write_json(workdir / "config.json", config.to_dict())
    atomic_files.write_json(workdir / "environment.json", recorded(os.environ))
    if remat is not None:
        atomic_files.write_json(workdir / budget.RECORD_FILE, remat)
