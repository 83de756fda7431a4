"""Begins a run again from an older checkpoint of its own, `train.rewind_to`, and sets the newer ones aside."""

from __future__ import annotations

import pathlib
from typing import Any

from hlat_jax.config import Config
from hlat_jax.run.goodput import Ledger, SilentLedger
from hlat_jax.run.settings import refuse_drift, saved_config, skip_drift
from hlat_jax.store.checkpoint import Checkpointer
from hlat_jax.store.checkpoint_checks import problem_on_disk, saved_run, saved_steps


def rewound(
    config: Config,
    workdir: pathlib.Path,
    checkpointer: Checkpointer,
    *,
    settings: dict[str, Any],
    ledger: Ledger | SilentLedger,
) -> tuple[int, dict[str, Any]] | None:
    """Returns as `Checkpointer.latest_metadata`, once no checkpoint is newer than `train.rewind_to`.

    A newer one that was saved with the same `train.rewind_to`, and has left out the same batches, says that this was
    done before: the same command can be started again. A start after a kill completes it. Rows, exports and data
    positions after the step are set aside as those of every resumed run.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, or its run had other settings; nothing was changed.
    """
    saved, target = checkpointer.latest_metadata(), config.train.rewind_to
    if not target or (saved is not None and saved[0] == target):
        return saved
    asked, folder = f"train.rewind_to={target}", checkpointer.folder
    if saved is not None and saved[0] > target and saved_config(saved[1]).train.rewind_to == target:
        step, metadata = saved
        if not skip_drift(metadata, settings, step=step):
            print(f"{asked}  ignored: it was done before the checkpoint of step {step} was saved")
            return saved
    steps = saved_steps(folder)
    there = f"it has those of {', '.join(map(str, steps))}" if steps else "it has none"
    if saved is None or target not in steps:
        raise ValueError(f"{asked}: {workdir} has no checkpoint of step {target}; {there}. Set one of them, or 0.")
    if why := problem_on_disk(folder / str(target), deep=True):
        raise ValueError(f"{asked}: that checkpoint is damaged ({why}); {there}. Set another one, or 0.")
    metadata = saved_run(folder / str(target))["metadata"]
    refuse_drift(metadata, settings, step=target, workdir=workdir)
    newer = [step for step in steps if step > target]
    ledger.event("rewound", step=target, newest=saved[0], set_aside=newer)  # first: a kill must not leave it out
    checkpointer.set_aside_after(target)
    named = ", ".join(map(str, newer))
    print(f"{asked}  the checkpoints of steps {named} are kept as *.rewound-*; later metrics rows move aside")
    return target, metadata
