"""Cleans the folder of a run's exports, `<run folder>/huggingface/<step>/`, when a run starts or resumes."""

from __future__ import annotations

import pathlib
import shutil

FOLDER = "huggingface"
SHARDS = ".shards"  # suffix of the folder in which each process writes its shards
_LEFTOVERS = (f"*{SHARDS}", "*.partial")


def remove_leftovers(workdir: pathlib.Path) -> None:
    """Removes incomplete exports, which a kill leaves behind."""
    for pattern in _LEFTOVERS:
        for path in (workdir / FOLDER).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def rewind(workdir: pathlib.Path, step: int) -> None:
    """Moves exports of steps after `step` aside, as `metrics.rewind` moves rows: the run repeats these steps."""
    for path in (workdir / FOLDER).glob("*"):
        if path.name.isdecimal() and int(path.name) > step:
            aside = path.with_name(f"{path.name}.discarded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"export of step {path.name} moved to {aside}: this run resumes from step {step}")
