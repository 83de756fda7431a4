"""Whether there can be trained parameters at a path, checked before JAX is imported; `open_weights` checks the rest."""

from __future__ import annotations

import pathlib

# One of these is in a run folder, a checkpoint, a folder of weights and a folder of Hugging Face.
_MARKS = ("checkpoints", "state", "weights.json", "config.json")


def check_checkpoint(path: str, *, key: str = "") -> None:
    """Raises ValueError if there are no trained parameters at a path; `key` names what it was given for."""
    folder = pathlib.Path(path).expanduser()
    if any((folder / mark).exists() for mark in _MARKS):
        return
    fault = "holds no weights" if folder.is_dir() else "holds no weights: there is no such folder"
    raise ValueError(
        f"{key and f'{key}: '}{path} {fault} (working directory {pathlib.Path.cwd()}); give a run folder, such as "
        "runs/tiny, one of its checkpoints, runs/tiny/checkpoints/STEP, or what `python -m hlat_jax.hf import` wrote."
    )
