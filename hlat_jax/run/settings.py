"""The settings of a run that its folder and its checkpoints record; a run resumes only with the same settings."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from hlat_jax.config import SECTIONS, Config
from hlat_jax.data import kept_tokenizer, path_checks
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.streams import data_drift
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host.neuron_env import recorded
from hlat_jax.ops.registry import OPS
from hlat_jax.program import RunProgram
from hlat_jax.resolve import batch_of_step, resolve, skipped_batches
from hlat_jax.run import budget
from hlat_jax.store import atomic_files
from hlat_jax.store.config_diff import config_drift, differences

# Settings that a branch may change: they affect neither the meaning of the state nor that of the data position.
BRANCH_MAY_CHANGE = (
    "optimizer.*",
    "train.*",
    "implementations.*",
    "jax.*",
    *(f"model.{key}" for key in (*OPS, "remat", "layer_loop")),
)

# JAX settings that change the numbers of a step: as settings of the run, they are compared.
_JAX_NUMERICS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_allow_f16_reductions",
    "jax_softmax_custom_jvp",
)
# Those that change random numbers, of which a step has none, or what the compiler fuses, as `parallel.*` does.
_JAX_OTHERS = (
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    "jax_numpy_dtype_promotion",
    "jax_use_direct_linearize",
    "jax_use_shardy_partitioner",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
)
_XLA_NUMERICS = ("fast_math", "fast_min_max", "excess_precision", "denormal")  # in the names of XLA's flags


def settings_of(program: RunProgram, *, tokenizer: Tokenizer, batches: TrainBatches) -> dict[str, Any]:
    """Returns what a checkpoint records: config, resolved implementations, hashes of its inputs, and JAX's settings."""
    words = os.environ.get("XLA_FLAGS", "").split()
    flags = sorted(word for word in words if any(part in word.partition("=")[0] for part in _XLA_NUMERICS))
    return {
        "config": program.config.to_dict(),
        "implementations": {key: getattr(program.model, key) for key in (*OPS, "remat", "layer_loop")},
        "tokenizer_sha256": tokenizer.sha256,
        "manifest": batches.manifest,
        "jax": _jax_settings(_JAX_NUMERICS) | {"XLA_FLAGS": " ".join(flags)},
        "jax_others": _jax_settings(_JAX_OTHERS),
    }


def _jax_settings(names: Sequence[str]) -> dict[str, Any]:
    """Returns environment variable -> value, which a program may have set too, of those that this JAX has."""
    return {name.upper(): getattr(jax.config, name) for name in names if hasattr(jax.config, name)}


def jax_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Returns a line for each JAX setting that differs from a checkpoint's, and may."""
    now = current["jax_others"]
    return differences({name: saved.get("jax_others", {}).get(name, value) for name, value in now.items()}, now)


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
            "optimizer, train, parallel, held-out text, implementations and JAX settings."
        )


def _drift(saved: dict[str, Any], current: dict[str, Any], *, step: int, branch: bool = False) -> list[str]:
    """Returns a line for each setting that differs and must not.

    A config key that is newer than the checkpoint counts as its default, an op as its current implementation, and a
    setting of JAX as its current value.
    """
    saved = saved | {"config": _completed(saved["config"])}
    loop = saved["config"]["model"]["layer_loop"]  # where it is named, or from before it was a choice
    implementations = current["implementations"] | ({} if loop == "auto" else {"layer_loop": loop})
    saved["implementations"] = implementations | saved["implementations"]
    saved["jax"] = {name: saved.get("jax", {}).get(name, value) for name, value in current["jax"].items()}
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
    """Writes config, environment and, if `model.remat` is a budget, the choice made for it into the run folder.

    A run that resumes with the tokenizer that its folder keeps still records the path of the file it was a copy of.
    """
    values = config.to_dict()
    if pathlib.Path(config.data.tokenizer).parent == (workdir / kept_tokenizer.FOLDER).absolute():
        values["data"]["tokenizer"] = path_checks.recorded_value(workdir, "data.tokenizer") or config.data.tokenizer
    atomic_files.write_json(workdir / "config.json", values)
    atomic_files.write_json(workdir / "environment.json", recorded(os.environ))
    if remat is not None:
        atomic_files.write_json(workdir / budget.RECORD_FILE, remat)
