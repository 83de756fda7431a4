"""The folder of a run's exports, `<run folder>/huggingface/<step>/`, kept in order whether or not the run exports."""

from __future__ import annotations

import pathlib
import shutil

FOLDER = "huggingface"
SHARDS = ".shards"  # suffix of the folder in which processes leave the shards that they hold
_LEFTOVERS = (f"*{SHARDS}", "*.partial")


def remove_leftovers(workdir: pathlib.Path) -> None:
    """Removes what exports that were killed left behind."""
    for pattern in _LEFTOVERS:
        for path in (workdir / FOLDER).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def rewind(workdir: pathlib.Path, step: int) -> None:
    """Moves exports of steps after `step` aside, as `metrics.rewind` does rows: this run makes these steps anew."""
    for path in (workdir / FOLDER).glob("*"):
        if path.name.isdecimal() and int(path.name) > step:
            aside = path.with_name(f"{path.name}.discarded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"export of step {path.name} moved to {aside}: this run resumes from step {step}")
