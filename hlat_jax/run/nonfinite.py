"""Counts steps that are not finite, have no target or are spikes, and ends a run after too many in a row."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import jax

from hlat_jax.config import count_text
from hlat_jax.host import distributed
from hlat_jax.run import corruption
from hlat_jax.run.state import Progress, Run
from hlat_jax.step import StepMetrics
from hlat_jax.store.checkpoint_checks import not_finite


class NonFiniteError(RuntimeError):
    """Too many steps in a row were not finite or had no target, or the state to save or export is not finite."""


def finite_norms(run: Run, progress: Progress) -> dict[str, float]:
    """Returns the norms of the parts of the state. Raises NonFiniteError if one of them is not finite."""
    norms = {part: float(norm) for part, norm in jax.device_get(run.state_norms(progress.state)).items()}
    if problem := not_finite(norms):
        raise NonFiniteError(
            f"after step {progress.step} {problem}, so nothing was saved or exported. Run the same command to resume "
            f"from {_newest_saved(progress)}, or start again with a lower optimizer.peak_lr in another --workdir."
        )
    return norms


def judge(run: Run, progress: Progress, *, metrics: StepMetrics, row: dict[str, Any]) -> None:
    """Counts and prints a step that was not finite, had no target or is a spike.

    Raises:
      NonFiniteError: `train.max_nonfinite_steps` steps in a row were not finite, or had no target.
    """
    step = row["step"]
    progress.num_without_target = 0 if metrics.num_tokens else progress.num_without_target + 1
    if metrics.finite:
        progress.num_nonfinite = 0
    elif not metrics.num_tokens:  # a mean over nothing says nothing about the state
        print(f"step {step}: only prompts or padding in its batch and no target, update skipped")
    else:
        progress.num_nonfinite += 1
        print(f"step {step}: {_describe(row)}, update skipped")
    if metrics.spike:
        skipped = run.config.train.spikes == "skip"
        run.ledger.event("spike", step=step, loss=row["loss"], grad_norm=row["grad_norm"], skipped=skipped)
        values = f"loss {row['loss']:.4f}, gradient norm {row['grad_norm']:.3g}"
        print(f"step {step}: a spike, {values}, {'update skipped' if skipped else 'trained on'}")
    if max(progress.num_nonfinite, progress.num_without_target) >= run.config.train.max_nonfinite_steps:
        _stop(run, progress, row)


def _stop(run: Run, progress: Progress, row: dict[str, Any]) -> NoReturn:
    """Raises NonFiniteError with what the last of too many such steps shows; all processes call it together."""
    corruption.check_state(run, progress)  # names the device, if only one of the replicas is not finite
    run.log.sync()
    distributed.barrier()  # the rows are on the disk before any process ends the others
    batch = row.get("batch", row["step"])
    peek = f"python -m hlat_jax.data peek --config=... --workdir=... --step={batch}"
    advice, look = "Raise train.max_nonfinite_steps", f". To see that batch, add the flags of the run to\n  {peek}"
    if progress.num_without_target:
        steps = count_text(progress.num_without_target, "step")
        raise NonFiniteError(
            f"the batches of {steps} in a row had only prompts or padding and no target, the last one at step "
            f"{row['step']}. {advice} if later batches have answers, raise data.seq_len or data.batch_size, or give "
            f"data.train shorter prompts{look}"
        )
    if not math.isfinite(row["param_norm"]):
        advice, look = f"As the weights are damaged, run the same command to resume from {_newest_saved(progress)}", "."
    raise NonFiniteError(
        f"{count_text(progress.num_nonfinite, 'step')} in a row not finite and skipped, the last one step "
        f"{row['step']} (batch {row['batch_hash']}, {_describe(row)}). {advice}, or start again with a lower "
        f"optimizer.peak_lr in another --workdir{look}"
    )


def _describe(row: dict[str, Any]) -> str:
    """Describes a step that was not finite by its loss and norms."""
    return f"loss {row['loss']:.4g}, gradient norm {row['grad_norm']:.4g}, norm of the weights {row['param_norm']:.4g}"


def _newest_saved(progress: Progress) -> str:
    return f"the checkpoint of step {progress.saved_step}" if progress.saved_step else "the beginning"
