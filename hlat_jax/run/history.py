"""What a run folder tells of the run so far, beside its checkpoints, by rows and events: which of them were lost.

The events "saved" and "rewound" have a `step`; after "rewound" the checkpoints of later steps no longer count.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any, NotRequired, TypedDict

from hlat_jax.config import Config
from hlat_jax.run.goodput import EVENTS_FILE, Ledger, SilentLedger, read_events
from hlat_jax.store.metrics import DISCARDED_FILE, ROWS_FILE, damage, missing_steps, read_rows
from hlat_jax.store.typed_json import Count, read_json


class _Saves(TypedDict):
    every_steps: NotRequired[Count]
    keep_every_steps: NotRequired[Count]


class _Settings(TypedDict):
    checkpoint: NotRequired[_Saves]
    train: NotRequired[dict]


def begin(workdir: pathlib.Path, *, ledger: Ledger | SilentLedger, begin_again: bool) -> None:
    """Checks that a run without a checkpoint has never had one; process 0 calls it.

    Raises:
      ValueError: it had one, and `begin_again` is false.
    """
    rows = _training_rows(workdir)
    last = max((row["step"] for row in rows), default=0)
    events = read_events(workdir)
    step, told_by = newest_saved(events), EVENTS_FILE
    if not step and not any(event["event"] == "start" for event in events):  # what trained it wrote no events
        step, told_by = _surely_saved(rows, workdir), f"{ROWS_FILE} and checkpoint.every_steps"
    if step and not begin_again:
        raise ValueError(
            f"{workdir / 'checkpoints'} holds no checkpoint, but one of step {step} was saved ({told_by}), and the "
            f"rows reach step {last}. Put the checkpoints back; or give --begin_again to train from step 0, with the "
            f"rows moved to {DISCARDED_FILE}; or give another --workdir."
        )
    if step:
        ledger.event("rewound", step=0)
    if last:
        why = "--begin_again" if step else "no checkpoint was saved"
        print(f"beginning again  at step 0 ({why}): rows up to step {last} move to {DISCARDED_FILE}")


def resume(workdir: pathlib.Path, step: int, *, ledger: Ledger | SilentLedger, config: Config, is_branch: bool) -> None:
    """Prints what the folder lacks of a run that resumes at the checkpoint of `step`; process 0 calls it."""
    events = read_events(workdir)
    newest = newest_saved(events)
    if newest > step:
        last = max((row["step"] for row in _training_rows(workdir)), default=0)
        print(
            f"the checkpoint of step {newest} is gone or damaged, and the rows reach step {last}: the newest one is of "
            f"step {step}, and what follows is trained again"
        )
        ledger.event("rewound", step=step)
    if newest != step:
        ledger.event("saved", step=step)
    print_missing_rows(workdir, step, config=config, is_branch=is_branch)
    if damaged := damage(workdir / ROWS_FILE):
        print(
            f"{ROWS_FILE} has {len(damaged):,} damaged lines, which move to {DISCARDED_FILE}: their rows are missing "
            f"({damaged[0]})"
        )


def print_missing_rows(workdir: pathlib.Path, step: int, *, config: Config, is_branch: bool) -> None:
    """Prints which rows of the steps up to the checkpoint of `step` are missing, and which of validations before it.

    A signal may have come between that checkpoint and its validation. A branch may have changed when they are due.
    """
    every = config.train.eval_every_steps if config.data.validation and not is_branch else 0
    evals = range(every, step, every) if every else range(0)
    validations = f"validations of every {every} steps"
    for what, key, due in (("steps", "loss", range(1, step + 1)), (validations, "eval_loss", evals)):
        missing = missing_steps(workdir / ROWS_FILE, due, key=key)
        if missing:
            named = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in missing[:4])
            more = f" and {len(missing) - 4} more gaps" if len(missing) > 4 else ""
            print(
                f"{ROWS_FILE} lacks the rows of {sum(map(len, missing)):,} of the {len(due):,} {what} up to the "
                f"checkpoint ({named}{more}); they stay missing"
            )


def newest_saved(events: list[dict[str, Any]]) -> int:
    """Returns the step of the newest checkpoint that the events tell of; 0 if there was none."""
    saved: set[int] = set()
    for event in events:
        if event["event"] == "saved":
            saved.add(event["step"])
        elif event["event"] == "rewound":
            saved = {step for step in saved if step <= event["step"]}
    return max(saved, default=0)


def _training_rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(workdir / ROWS_FILE) if "loss" in row]


def _surely_saved(rows: list[dict[str, Any]], workdir: pathlib.Path) -> int:
    """Returns the step of a checkpoint that these rows could not go beyond without; 0: there may have been none.

    It is complete when the save after it starts, and that one has started when there is a later row. A branch begins
    with the rows of its parent.
    """
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        settings = read_json(workdir / "config.json", kind=_Settings)
    checkpoint, train = settings.get("checkpoint", {}), settings.get("train", {})
    every = [checkpoint[key] for key in ("every_steps", "keep_every_steps") if checkpoint.get(key)]
    started, is_due = [], False
    for row in rows if not train.get("branch_from") else ():
        is_due = is_due or any(row["step"] % each == 0 for each in every)
        if is_due and not row.get("nonfinite"):
            started.append(row["step"])
            is_due = False
    if len(started) > 1 and rows[-1]["step"] == started[-1]:
        started.pop()
    return started[-2] if len(started) > 1 else 0
