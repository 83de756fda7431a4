"""Checks of paths that a command is given; no JAX, so that they come before the seconds that importing it takes."""

from __future__ import annotations

import pathlib

from hlat_jax.facts.local_paths import local_path


def check_file(path: str, *, key: str) -> None:
    """Raises ValueError unless there is a file at `path`, which the flag or config key `key` has."""
    if not local_path(path, key=key).is_file():
        raise ValueError(f"{key}={path}: no such file (looked from {pathlib.Path.cwd()}).")


def check_folder(path: str, *, key: str) -> None:
    """Raises ValueError unless there is a folder at `path`, which the flag or config key `key` has."""
    if not local_path(path, key=key).is_dir():
        raise ValueError(f"{key}={path}: no such folder (looked from {pathlib.Path.cwd()}).")
