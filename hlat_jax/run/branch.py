"""Starts a run from a checkpoint of another one, `train.branch_from`: its state, data position, tokens and step."""

from __future__ import annotations

import pathlib
from typing import Any

from hlat_jax.config import Config
from hlat_jax.host import distributed
from hlat_jax.program import RunProgram
from hlat_jax.resolve import branch_source
from hlat_jax.run.settings import refuse_branch_drift
from hlat_jax.store.checkpoint import Restored, find_saved, read_checkpoint
from hlat_jax.store.checkpoint_checks import saved_run, saved_steps
from hlat_jax.store.metrics import copy_rows


def open_branch(program: RunProgram, workdir: pathlib.Path, *, settings: dict[str, Any]) -> Restored:
    """Returns the checkpoint that a new run in `workdir` starts from; copies the metrics up to it into `workdir`.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, or its run had another model, data or precision.
    """
    folder = _checkpoint(program.config, workdir)
    try:
        found = find_saved(folder)
        if found is None:
            raise ValueError(f"{folder} is not a checkpoint.")
        refuse_branch_drift(saved_run(found)["metadata"], settings, step=int(folder.name))
        restored = read_checkpoint(found, program.abstract_state, norms=program.norms)
    except ValueError as error:
        raise ValueError(f"train.branch_from={program.config.train.branch_from}: {error}") from None
    run_folder = folder.parents[1]
    if distributed.is_first():
        copy_rows(run_folder, workdir, last_step=restored.step)
    print(f"branch           from step {restored.step} of {run_folder}: its state, optimizer and data position")
    return restored


def _checkpoint(config: Config, workdir: pathlib.Path) -> pathlib.Path:
    source, step = branch_source(config.train)
    asked, folder = f"train.branch_from={config.train.branch_from}", pathlib.Path(source).expanduser()
    if folder.absolute().resolve() == workdir.absolute().resolve():
        raise ValueError(f"{asked} is the run folder itself; give the branch another one with --workdir.")
    steps = saved_steps(folder / "checkpoints")
    if step not in steps:
        there = f"it has those of {', '.join(map(str, steps))}" if steps else "it has none"
        raise ValueError(f"{asked}: {folder} has no checkpoint of step {step}; {there}.")
    return folder.absolute() / "checkpoints" / str(step)
