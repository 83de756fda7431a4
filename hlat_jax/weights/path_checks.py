"""Checks that a path can hold trained parameters, before JAX is imported. `trained.open_weights` checks the rest."""

from __future__ import annotations

import pathlib

# Each is in one of: a run folder, a checkpoint, a weights folder, a Hugging Face folder.
_MARKS = ("checkpoints", "state", "weights.json", "config.json", "model.safetensors", "model.safetensors.index.json")


def check_checkpoint(path: str, *, key: str = "") -> None:
    """Raises ValueError if a path holds no trained parameters; `key` is the config key that has it, if any."""
    folder = pathlib.Path(path).expanduser()
    if any((folder / mark).exists() for mark in _MARKS):
        return
    missing = "" if folder.is_dir() else "no such folder; "
    raise ValueError(
        f"{key and f'{key}: '}{path} holds no weights ({missing}working directory {pathlib.Path.cwd()}); give a run "
        "folder, such as runs/tiny, one of its checkpoints, runs/tiny/checkpoints/STEP, a Hugging Face folder with "
        "config.json and safetensors, or what `python -m hlat_jax.hf import` wrote."
    )
