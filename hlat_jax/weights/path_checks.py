"""Checks that a path can hold trained parameters, before JAX is imported. `trained.open_weights` checks the rest."""

from __future__ import annotations

import pathlib

from hlat_jax.cli.path_checks import fetch_first
from hlat_jax.facts.local_paths import local_path
from hlat_jax.store.bucket import local_copy
from hlat_jax.store.checkpoint_checks import saved_steps

# Each is in one of: a run folder, a checkpoint, a Hugging Face folder.
_MARKS = ("checkpoints", "state", "config.json", "model.safetensors", "model.safetensors.index.json")


def check_checkpoint(path: str, *, key: str = "") -> None:
    """Raises ValueError if a path holds no trained parameters. `key` is the config key that has it, if any."""
    folder = local_copy(path, key=key)
    if not any((folder / mark).exists() for mark in _MARKS):
        raise no_weights(folder, key=key)


def check_step(path: str, step: int, *, key: str) -> None:
    """Raises ValueError if a run folder has no checkpoint of this step. `key` begins the message."""
    steps = saved_steps(local_path(path) / "checkpoints")
    if step not in steps:
        there = f"It has {', '.join(map(str, steps))}" if steps else "It has none"
        raise ValueError(f"{key}: {path} has no checkpoint of step {step}. {there}.")


def check_hugging_face(folder: pathlib.Path) -> None:
    """Raises ValueError if a folder has no config.json."""
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} has no config.json (working directory {pathlib.Path.cwd()}). Give the folder of a model."
            f"{fetch_first(str(folder))}"
        )


def no_weights(path: pathlib.Path, *, key: str = "") -> ValueError:
    """Returns the error for a path that holds no trained parameters. `key` is as for `check_checkpoint`."""
    missing = "" if path.is_dir() else "no such folder, "
    return ValueError(
        f"{key and f'{key}: '}{path} holds no weights ({missing}working directory {pathlib.Path.cwd()}). Give a run "
        "folder, such as runs/tiny, one of its checkpoints, runs/tiny/checkpoints/STEP, or a Hugging Face folder with "
        f"config.json and safetensors.{fetch_first(str(path))}"
    )
