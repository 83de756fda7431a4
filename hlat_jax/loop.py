"""The training loop. The order of its operations is its contract.

After c updates, one iteration

1. evaluates the state on held-out text and on tasks, if due. The rows describe exactly these parameters. After a signal
   it saves first, as in 2, since an evaluation may take longer than the sender of the signal waits.
2. saves, if due. First the metrics of every step up to c are fetched, written and synced. Then the norms of the state
   are computed. One checkpoint gets the state, the data position after batch c and the token count. So a checkpoint at
   c implies that the rows up to c are on disk. A resumed run drops the rows above c and writes them again, and each
   step has exactly one row. After a non-finite step, a save that is due is postponed until a step is finite, so the
   newest checkpoint is from before these steps. If the run ends (its last step, a signal, a batch that cannot be read)
   the state is saved nevertheless, as non-finite updates are skipped. A state with a norm that is not finite is never
   saved, and ends the run, which resumes from the newest checkpoint.
3. stops, if c is the last step, validations do not improve (`train.early_stop_evals`) or a signal has come. It stops
   after the save, so that no step is lost.
4. takes batch c + 1 after all processes have their rows of it.
5. dispatches step c + 1, which donates the old state.
6. logs the metrics of step c. The device already has its next work and does not wait for the host. Nor does it wait for
   the synchronization on batch c + 1, which happens while it runs step c. A thread exports a finished save, if due.

Before 5, and only with `metrics.source_losses_every_steps`, the old state is evaluated on the sources of batch c + 1.
The host waits for the sums. So in these steps the device waits for the host.
After 6, and only with `train.check_devices_every_steps`, the devices are checked for silent corruption.

The trace of `train.profile_steps` starts before 4 and stops after 6. Both wait for the steps dispatched so far.

All processes run this loop and take the same branches. Only process 0 prints and writes rows.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hlat_jax.config import Config, count_text
from hlat_jax.data import positions
from hlat_jax.generate.generator import sample_text
from hlat_jax.host import distributed
from hlat_jax.host.console import say
from hlat_jax.host.watchdog import WAITING
from hlat_jax.optimizer import learning_rate
from hlat_jax.resolve import batch_of_step
from hlat_jax.run import corruption, nonfinite, optional, results
from hlat_jax.run.profiling import peak_memory
from hlat_jax.run.state import NextBatch, Pending, Progress, Run
from hlat_jax.run.validation import Validation
from hlat_jax.step import StepMetrics
from hlat_jax.store.progress import ProgressBar, Status

_BETWEEN_STEPS = "preparing the next step"


def train(run: Run, progress: Progress) -> str:
    """Trains an opened run to its last step or to a signal. Returns the signal if steps are left, else "".

    Raises what `hlat_jax.train.train` does.
    """
    config, signals = run.config, run.sync.signals
    with run.check_folder.as_cause():
        with signals.phase(WAITING):  # not in a collective of the evaluation: others may compile for much longer
            distributed.barrier()
        with signals.phase(_BETWEEN_STEPS):
            if progress.step == 0:
                _sample(run, progress, "before training")
            _loop(run, progress)
        saving = signals.phase("saving", unfinished=f"the checkpoint of step {progress.step}")
        with saving, progress_bar(config, Status("saving")):
            _note_saved(run, progress, run.checkpointer.wait())
            if run.exporter is not None:
                run.exporter.wait()
                run.checkpointer.release()
        signals.unfinished = ""
        if not _is_last(run, progress):
            _show_goodput(run, progress)
            saved = f"saved in {run.workdir}. Run the same command to resume"
            nothing = "before anything was saved. Run the same command to start again"
            print(f"stopped by {run.sync.stop} after step {progress.step}, {saved if progress.saved_step else nothing}")
            return run.sync.stop
        signals.saved_step = progress.step
        unfinished = "the summary" if jax.distributed.is_initialized() else ""  # nobody waits for one alone
        with signals.phase("drawing the results", unfinished=unfinished):
            if progress.step < config.train.num_steps:
                best = f"{progress.best.eval_loss:.4f} of step {progress.best.step:,}"
                say("ended early", f"{count_text(progress.best.num_since, 'validation')} in a row not below {best}")
            _sample(run, progress, "after training")
            _show_goodput(run, progress)
            run.log.close()
            if distributed.is_first():
                results.show(config, run.workdir, progress.step)
            distributed.barrier()  # the others wait here while process 0 draws the results
    return ""


def _loop(run: Run, progress: Progress) -> None:
    """Runs to the last step or a signal, and saves the state it ends with."""
    run.sync.signals.watchdog.step = progress.step
    if run.exporter is not None:
        run.exporter.begin(progress.step, is_saved=progress.saved_step > 0)
    progress.saved_at_s = progress.timed_from_s = time.monotonic()
    while True:
        _evaluate(run, progress)
        stopping = _is_last(run, progress) or bool(run.sync.stop)  # read once: a signal after the save must not be lost
        _save(run, progress, stopping=stopping)
        if stopping:
            return
        if progress.step + 1 == run.step_trace.first:
            _trace(run, progress, "starting the trace", run.step_trace.start)
        batch = _next_batch(run, progress)
        if batch is None:
            return
        _measure_sources(run, progress, batch)
        with run.sync.signals.phase("training"):
            _step(run, progress, batch)
            _log(run, progress)
        if _due(progress.step, run.config.train.check_devices_every_steps):
            _finish_steps(run, progress)
            with run.sync.signals.phase("checking the devices"):
                corruption.check_devices(run, progress, batch.batch)
            progress.timed_from_s = time.monotonic()
        if progress.step == run.step_trace.last:
            _trace(run, progress, "writing the trace", run.step_trace.close)


def _evaluate(run: Run, progress: Progress) -> None:
    """Evaluates the state on what is due, which counts into no step's time; a run that is to stop is saved first.

    Where the run resumed, this was done before the checkpoint was written.
    """
    train, step = run.config.train, progress.step
    if run.sync.stop:  # tasks may take longer than the sender of the signal waits
        _save_and_wait(run, progress)
    if step == run.start_step > 0:
        return
    if run.validation is not None and (_is_last(run, progress) or _due(step, train.eval_every_steps)):
        figures = _measure(run, progress, "evaluating", run.validation)
        run.log.eval_row({"step": step, **figures})
        progress.best = progress.best.after({"step": step, **figures})
        if run.config.checkpoint.keep_best and 0 < progress.saved_step == progress.best.step == step:
            run.checkpointer.keep_best(step)  # saved before the evaluation, as a signal has come
    last = _is_last(run, progress)  # perhaps by this validation
    # before the first step too: all programs are compiled then, and what fails has cost nothing
    if run.tasks is not None and (last or step == 0 or _due(step, train.eval_tasks_every_steps)):
        figures, shown = _measure(run, progress, "evaluating on tasks", run.tasks)
        if figures:
            run.log.tasks_row({"step": step, **figures}, shown=shown)
    if step > 0 and not last and _due(step, train.sample_every_steps):
        _finish_steps(run, progress)
        _sample(run, progress, f"after step {step:,}")
        progress.timed_from_s = time.monotonic()


def _measure(run: Run, progress: Progress, doing: str, evaluation: Validation | optional.TasksInTraining) -> Any:
    """Returns the evaluation of the state, with its progress shown; what it takes counts into no step's time."""
    _finish_steps(run, progress)
    unfinished = "this evaluation, then saving a checkpoint" if progress.step > run.start_step else ""
    evaluating = run.sync.signals.phase(doing, unfinished=unfinished, status=evaluation.status)
    with evaluating, progress_bar(run.config, evaluation.status):
        result = evaluation(progress.state["params"])
    progress.timed_from_s = time.monotonic()
    return result


def _save(run: Run, progress: Progress, *, stopping: bool) -> None:
    """Saves the state when due by steps or by the clock, when postponed, and when the run is stopping."""
    c, step = run.config.checkpoint, progress.step
    due = any(_due(step, every) for every in (c.every_steps, c.keep_every_steps, c.export_every_steps))
    due = due or (c.keep_best and step == progress.best.step)
    if step > run.start_step and (stopping or due or progress.save_postponed or progress.save_overdue):
        _finish_steps(run, progress)
        with run.sync.signals.phase("starting to save"):
            _start_saving(run, progress, stopping=stopping)
        progress.saved_at_s = progress.timed_from_s = time.monotonic()


def _start_saving(run: Run, progress: Progress, *, stopping: bool) -> None:
    """Writes every row up to this step, all of which are known, to the disk, then starts to save the state.

    After a non-finite step the save is postponed until a step is finite. Where the run is `stopping` the state is saved
    all the same: it is that of the finite step before, as the update was skipped.

    Raises:
      NonFiniteError: the state is not finite.
    """
    run.check_folder(now=True)
    run.log.sync()
    if progress.num_nonfinite and not stopping:
        if not progress.save_postponed:
            print(f"checkpoint of step {progress.step}, which was not finite, postponed to the next finite step")
        progress.save_postponed = True
        return
    digest = corruption.check_state(run, progress)
    norms = nonfinite.finite_norms(run, progress)
    _note_saved(run, progress, run.checkpointer.wait())  # the one before: it is recorded before anything else may fail
    metadata = run.settings | {"tokens": progress.tokens, "num_nonfinite": progress.num_nonfinite, "remat": run.remat}
    if skipped := batch_of_step(progress.step, run.skipped) - progress.step:
        metadata["skipped_batches"] = skipped
    position = run.global_position(progress.position)
    run.checkpointer.copied.step = run.copier.reading_step
    run.checkpointer.exported.step = run.exporter.reading_step if run.exporter is not None else 0
    run.checkpointer.save(
        progress.step, progress.state, position=position, metadata=metadata, norms=norms, digest=digest
    )
    progress.saved_step, progress.save_postponed = progress.step, False
    if distributed.is_first():
        run.log.goodput_row(progress.step, run.ledger.goodput().shares)


def _save_and_wait(run: Run, progress: Progress) -> None:
    """Saves the state that the run stops with, unless it has made no step, and returns when that is on the disk."""
    if progress.step > run.start_step:
        _finish_steps(run, progress)
        with run.sync.signals.phase("starting to save"):
            _start_saving(run, progress, stopping=True)
            _note_saved(run, progress, run.checkpointer.wait())


def _note_saved(run: Run, progress: Progress, step: int | None) -> None:
    """Records the checkpoint that `run.checkpointer` has completed, if it has, and exports it when due."""
    if step is not None:
        run.ledger.event("saved", step=step)
        if run.config.checkpoint.keep_best and step == progress.best.step:
            run.checkpointer.keep_best(step)
        run.copier.offer(step)
        if run.exporter is not None:
            run.exporter.offer(step)


def _trace(run: Run, progress: Progress, doing: str, change: Callable[[], None]) -> None:
    """Starts or writes the trace, once all steps so far are complete; what it takes counts into no step's time."""
    _finish_steps(run, progress)
    with run.sync.signals.phase(doing):
        jax.block_until_ready(progress.state)
        change()
    progress.timed_from_s = time.monotonic()


def _next_batch(run: Run, progress: Progress) -> NextBatch | None:
    """Returns the next batch, once every process has its rows; None if a signal ended the wait for a file that is away.

    Without a batch, the steps so far are saved.

    Raises:
      ValueError: a record is bad, or data has changed, in this process or another.
      OSError: data cannot be read now, in this process or another.
    """
    asked_at_s = time.monotonic()
    overdue = 0 < run.config.checkpoint.every_minutes <= (asked_at_s - progress.saved_at_s) / 60
    signals, retries = run.sync.signals, run.batches.retries
    passed, wanted = (batch_of_step(progress.step + ahead, run.skipped) for ahead in (0, 1))
    if wanted > passed + 1:
        skipped = f"{count_text(wanted - passed - 1, 'batch')} left out, {passed + 1}:{wanted - 1}"
        print(f"step {progress.step + 1}: {skipped} (train.skip_steps)")
        run.ledger.event("skip_steps", step=progress.step + 1, first=passed + 1, last=wanted - 1)
    batch, position, error = None, progress.position, None
    try:
        for batch_index in range(passed + 1, wanted + 1):
            with signals.phase("waiting for data", status=lambda: retries.progress):
                batch, position = next(run.batches)
            if batch_index < wanted and signals.name:
                raise InterruptedError("stopped while batches were left out")
    except (ValueError, OSError) as caught:
        error = caught
    progress.data_wait_s += time.monotonic() - asked_at_s
    with signals.phase(WAITING):
        synced = run.sync.sync_step(
            batch,
            position,
            error=error,
            save=overdue,
            num_retries=retries.take_count(),
            row_sources=run.batches.row_sources if run.source_losses is not None else None,
        )
    if synced.error is not None:
        _save_and_wait(run, progress)
        if run.sync.stop and isinstance(synced.error, OSError):
            return None
        raise synced.error
    assert batch is not None
    progress.save_overdue = synced.save
    row_fields = synced.row_fields | ({"batch": wanted} if run.skipped else {})
    return NextBatch(batch=batch, position=position, row_fields=row_fields)


def _measure_sources(run: Run, progress: Progress, batch: NextBatch) -> None:
    """Adds the loss of each source of the next batch, before its update, to its row, if due."""
    if run.source_losses is None or not _due(progress.step + 1, run.config.metrics.source_losses_every_steps):
        return
    _finish_steps(run, progress)
    with run.sync.signals.phase("evaluating"):
        losses = run.source_losses(
            progress.state["params"], batch.batch, run.batches.row_sources, num_tokens=batch.row_fields
        )
    batch.row_fields.update(losses)
    progress.timed_from_s = time.monotonic()


def _step(run: Run, progress: Progress, batch: NextBatch) -> None:
    """Dispatches the next step and returns at once; its metrics stay on the device."""
    rate = learning_rate(progress.step, run.config.optimizer)
    run.sync.signals.watchdog.step = progress.step + 1
    with jax.profiler.StepTraceAnnotation("train", step_num=progress.step + 1):
        progress.state, metrics = run.train_step(progress.state, run.program.shard(batch.batch), np.float32(rate))
    run.sync.signals.unfinished = "this step, then saving a checkpoint"
    progress.step += 1
    progress.position = batch.position
    progress.pending.append(Pending(step=progress.step, metrics=metrics, learning_rate=rate, batch=batch))


def _log(run: Run, progress: Progress) -> None:
    """Writes the row of the step before, and the data position when due; raises what failed in the background."""
    _write_rows(run, progress, in_flight=1)
    if _due(progress.step, positions.EVERY_STEPS):
        position = run.global_position(progress.position)
        passed = int(position[0, 0])
        if distributed.is_first():
            identity = run.batches.definition.identity(passed)
            positions.write(run.workdir, passed, position=position, data_identity=identity)
    run.check_folder()
    _note_saved(run, progress, run.checkpointer.check())
    if run.exporter is not None:
        run.exporter.check()
        if not run.exporter.reading_step:
            run.checkpointer.release()


def _finish_steps(run: Run, progress: Progress) -> None:
    """Waits for the steps that are dispatched, and writes their rows."""
    if progress.pending:
        with run.sync.signals.phase("training"):
            _write_rows(run, progress)


def _write_rows(run: Run, progress: Progress, *, in_flight: int = 0) -> None:
    """Writes the rows of all dispatched steps but the `in_flight` newest, waiting for their metrics.

    Raises:
      NonFiniteError: `train.max_nonfinite_steps` of them in a row were not finite, or had no target.
    """
    while len(progress.pending) > in_flight:
        pending = progress.pending.pop(0)
        metrics = jax.device_get(pending.metrics)
        row = _row(run, progress, pending, metrics)
        run.log.train_row(row)
        run.sync.signals.watchdog.end_first_step()
        nonfinite.judge(run, progress, metrics=metrics, row=row)


def _row(run: Run, progress: Progress, pending: Pending, metrics: StepMetrics) -> dict[str, Any]:
    """Returns the row of a step whose metrics have just arrived; the time and the tokens of the next begin here."""
    now = time.monotonic()
    progress.tokens += int(metrics.num_tokens)
    row = {
        "step": pending.step,
        "loss": float(metrics.loss),
        "tokens": progress.tokens,
        "grad_norm": float(metrics.grad_norm),
        "param_norm": float(metrics.param_norm),
        "learning_rate": pending.learning_rate,
        "step_s": now - progress.timed_from_s,
        "data_wait_s": progress.data_wait_s,  # part of step_s, which ends now: mostly for the next step's batch
        "peak_memory_bytes": peak_memory(run.program.layout),
        **run.monitor.row_fields(),
        "nonfinite": int(not metrics.finite),
        **pending.batch.row_fields,
    }
    if metrics.spike is not None:
        row["spike"] = int(metrics.spike)
    if metrics.layer_norms is not None:
        row |= _layer_norms(metrics.layer_norms)
    progress.timed_from_s, progress.data_wait_s = now, 0.0
    return row


def _layer_norms(norms: dict[str, dict[str, np.ndarray]]) -> dict[str, float]:
    """Returns the norms of a row by parameter and layer, as `grad_norm/layer_07`, and the norm of the whole update."""
    fields = {}
    for name, parts in norms.items():
        for part, values in parts.items():
            labels = [part] if values.ndim == 0 else [f"layer_{index:02}" for index in range(len(values))]
            fields |= {f"{name}/{label}": float(x) for label, x in zip(labels, np.atleast_1d(values), strict=True)}
    return fields | {"update_norm": math.hypot(*(x for key, x in fields.items() if key.startswith("update_norm/")))}


def progress_bar(
    config: Config, read: Callable[[], tuple[float, str]], *, in_place: bool = True
) -> contextlib.AbstractContextManager:
    """Returns a context that shows progress on stdout, between the other lines, unless it is off."""
    if config.metrics.console == "off":
        return contextlib.nullcontext()
    return ProgressBar(read, stream=sys.stdout, in_place=in_place)


def _show_goodput(run: Run, progress: Progress) -> None:
    if distributed.is_first():
        goodput = run.ledger.goodput()
        say("time", goodput.line())
        run.log.goodput_row(progress.step, goodput.shares)


def _sample(run: Run, progress: Progress, when: str) -> None:
    if run.sampler is not None:
        with run.sync.signals.phase("sampling"):
            text = sample_text(run.sampler, progress.state["params"], run.tokenizer, config=run.config)
        print(f"sample {when}: {text}")
        run.log.sample(progress.step, text)


def _is_last(run: Run, progress: Progress) -> bool:
    train = run.config.train
    return progress.step >= train.num_steps or 0 < train.early_stop_evals <= progress.best.num_since


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
