"""The training loop. The order of its operations is its contract.

With c updates done, one turn of the loop

1. evaluates the state, on held-out text and on tasks, when due: the rows say what these parameters are worth, before
   anything moves on;
2. saves, when due: first the metrics of every step up to c are fetched, written and synced, then the norms of the
   state are computed, and the state, the data position after batch c and the token count go into one checkpoint. So a
   checkpoint at c implies that the rows up to c are on disk, and a resumed run drops the rows above c, makes them
   again, and has each step exactly once. After a non-finite step, what is due is saved and exported only once a step is
   finite again: the newest checkpoint is from before the trouble. Where the run ends (its last step, a signal, a batch
   that cannot be read) the state is saved all the same, as those updates were left out. A state of which a norm is not
   finite is never saved or exported: it ends the run, which resumes from the newest checkpoint;
   exports, when due: it waits until the weights are in host memory, and a thread writes them;
3. stops, when c is the last step or a signal asked for it: after the save, so that no step is lost;
4. takes batch c + 1, agrees with the other processes that everyone has its rows, and dispatches the step, which donates
   the old state; keeps the data position, when due, for peek;
5. fetches the metrics of the step before: the device already has its next work and never waits for the host. Nor does
   it for the agreement on batch c + 1, which is made while it runs step c.

All processes run this loop and take every turn of it alike; process 0 alone prints and writes rows.

Owns this order and the stop after non-finite steps. Refuses to know how a step computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from typing import Any

import jax
import numpy as np

from hlat_jax import cost
from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.data import positions
from hlat_jax.data.held_out import HeldOut, open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.evaluate.in_training import TasksInTraining, open_tasks
from hlat_jax.generate.generator import Programs, sample_text
from hlat_jax.hf.background import Exporter
from hlat_jax.host import distributed
from hlat_jax.host.process import INDEX_FOLDER, StopSignals, closing_quietly
from hlat_jax.optimizer import learning_rate
from hlat_jax.parallel.sharding import Layout, gather_rows, process_rows, shard_batch
from hlat_jax.program import StepMetrics
from hlat_jax.run import budget, summary
from hlat_jax.run.compilation import Compilations, compiled_sampler, compiled_step
from hlat_jax.run.init_from import begin, open_start
from hlat_jax.run.machine import fitting_layout
from hlat_jax.run.settings import refuse_drift, settings_of, write_settings
from hlat_jax.run.step_sync import Agreed, Agreement, only_job, require_same_settings
from hlat_jax.run.validation import Validation
from hlat_jax.step import abstract_state, init_arguments, make_norms, state_bytes
from hlat_jax.store import atomic_files
from hlat_jax.store.checkpoint import Checkpointer, not_finite
from hlat_jax.store.metrics import MetricsLog, SilentLog


@dataclasses.dataclass
class Run:
    """What a run is made of, in order of dependence; the fields from `state` on move."""

    config: Config
    workdir: pathlib.Path
    layout: Layout
    tokenizer: Tokenizer
    batches: TrainBatches
    checkpointer: Checkpointer
    exporter: Exporter
    validation: Validation | None
    tasks: TasksInTraining | None
    train_step: Any
    state_norms: Any  # state -> the norms of its parts
    sampler: Programs | None  # None: no sample
    log: MetricsLog | SilentLog
    settings: dict[str, Any]  # what a checkpoint belongs to, see settings_of
    remat: dict[str, Any] | None  # the choice that a budget of bytes stands for, see budget.resolved
    state: Any
    step: int
    position: np.ndarray  # of the data, after batch `step`; of the rows of this process
    tokens: int
    num_nonfinite: int  # in a row, up to the last row
    saved: int  # the newest step with a checkpoint; 0: there is none
    nonfinite_rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of these, as far as made here
    save_owed: bool = False  # one was due after a non-finite step
    export_owed: bool = False  # likewise
    pending: Pending | None = None
    data_wait_s: float = 0.0  # since the last row
    mark: float = 0.0  # when the step that is timed began


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step whose metrics are still on the device.

    `facts` are the entries of its row that the batch alone decides; `position` is where its batch begins.
    """

    step: int
    metrics: StepMetrics
    learning_rate: float
    facts: dict[str, Any]
    position: np.ndarray


class NonFiniteError(RuntimeError):
    """Too many non-finite steps in a row, or a state that is not finite when it was to be saved or exported."""


def train(config: Config, workdir: pathlib.Path) -> int:
    """Trains to `train.num_steps`, or goes on with the run in `workdir`; returns the exit code.

    Raises:
      ValueError: a config, data, machine or folder that cannot be trained with; nothing was changed.
      OSError: the disk failed; the last complete checkpoint is intact.
      NonFiniteError: see `train.max_nonfinite_steps`.
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())
        layout = fitting_layout(config, jax.devices())
        run = _open(config, workdir, layout, stack)
        if run is None:
            return 0
        if run.step == 0:
            _sample(run, "before training")
        agreement = Agreement(config, run.batches.rows, stop)
        _loop(run, agreement)
        run.checkpointer.wait()
        run.exporter.wait()
        if run.step < config.train.num_steps:
            how = f"saved in {workdir}; the same command goes on"
            nothing = "before anything was there to save; the same command begins again"
            print(f"stopped by {agreement.stop} after step {run.step}, {how if run.step else nothing}")
            return 0
        run.log.close()
        _sample(run, "after training")
        if distributed.is_first():
            summary.finish(config, workdir, run.step)
    return 0


def _open(config: Config, workdir: pathlib.Path, layout: Layout, stack: contextlib.ExitStack) -> Run | None:
    """Returns a run ready to step, new or resumed; None when it is already complete."""
    tokenizer = Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    tasks = open_tasks(config) if config.train.eval_tasks else None
    stack.enter_context(only_job(workdir))
    index = workdir / INDEX_FOLDER
    options = {"tokenizer": tokenizer, "rows": process_rows(layout, config.data.batch_size), "index_folder": index}
    batches = stack.enter_context(contextlib.closing(TrainBatches(config.data, **options)))
    held_out, held_out_manifest = open_held_out(config.data, num_batches=config.train.num_eval_batches, **options)
    settings = settings_of(config, layout, tokenizer=tokenizer, batches=batches)
    settings |= {"validation_manifest": held_out_manifest}
    require_same_settings(settings)
    checkpointer = stack.enter_context(closing_quietly(Checkpointer(workdir, config=config.checkpoint)))
    exporter = Exporter(workdir, config=config, tokenizer_sha256=tokenizer.sha256)
    stack.enter_context(closing_quietly(exporter))
    abstract = abstract_state(config, layout)
    num_bytes = state_bytes(abstract)
    summary.describe(config, layout, implementations=settings["implementations"], num_bytes=num_bytes)
    _tell_data(batches, held_out, unused_rows=config.model.vocab_size - tokenizer.vocab_size)

    saved = checkpointer.latest_metadata()
    if tasks is not None and (saved is None or saved[0] < config.train.num_steps):
        tasks.load()
    if saved is not None:
        refuse_drift(saved[1], settings, step=saved[0])
    restored = checkpointer.restore(abstract, norms=make_norms(config, layout)) if saved is not None else None
    if restored is not None and restored[0] >= config.train.num_steps:
        _finish_complete(config, workdir, exporter, *restored[:2])
        return None

    beginning = open_start(config, tokenizer) if restored is None and config.train.init_from else None
    planned, remat = budget.resolved(config, layout, recorded=restored and restored[3].get("remat"))
    compilations = Compilations(planned, layout)
    if restored is None:
        step, state, position = 0, compilations.compiled("init")(*init_arguments(config)), batches.get_state()
        if beginning is not None:
            state, settings["init_from"] = begin(beginning, state)
        moving = {"tokens": 0, "num_nonfinite": 0}
    else:
        step, state, position, moving = restored
        position = position[list(batches.rows)]
        batches.set_state(position)
        settings |= {key: moving[key] for key in ("init_from",) if key in moving}
        if config.train.init_from:
            print("train.init_from  passed over: this run has a checkpoint of its own")
        print(f"resuming from step {step} of {config.train.num_steps}")
    if distributed.is_first():
        write_settings(config, workdir, remat=remat)
        positions.rewind(workdir, step)
        exporter.rewind(step)
    log = stack.enter_context(closing_quietly(_metrics_log(config, workdir, layout, step)))
    programs = compiled_step(planned, layout, compilations), compilations.compiled("norms")
    validation = Validation(held_out, compilations.compiled("eval"), layout) if held_out else None
    in_training = TasksInTraining(tasks, config, layout=layout, tokenizer=tokenizer) if tasks else None
    sampler = compiled_sampler(config, layout, compilations) if config.train.sample_prompt else None
    if distributed.is_first():
        compilations.write(workdir)
    parts = (config, workdir, layout, tokenizer, batches, checkpointer, exporter, validation, in_training)
    counts = (moving["tokens"], moving["num_nonfinite"], step)
    return Run(*parts, *programs, sampler, log, settings, remat, state, step, position, *counts)


def _finish_complete(config: Config, workdir: pathlib.Path, exporter: Exporter, step: int, state: Any) -> None:
    """Makes up what a kill between the last save and the end has left undone."""
    print(f"complete: {workdir} is at step {step} of train.num_steps={config.train.num_steps}.")
    if exporter.due(step, last=True):
        exporter.start(step, state)
        exporter.wait()
    if distributed.is_first():
        summary.finish(config, workdir, step)


def _loop(run: Run, agreement: Agreement) -> None:
    """Runs to the last step or a signal, and saves the state it ends with."""
    train, checkpoint, start = run.config.train, run.config.checkpoint, run.step
    saved_at = run.mark = time.monotonic()
    timed = False
    while True:
        last = run.step >= train.num_steps
        # what is due at the step a run resumed from was done before that checkpoint was written
        fresh = run.step > start or run.step == 0
        if agreement.stop and run.step > start:  # tasks may take longer than whoever sent the signal waits
            _save_whole(run)
        if fresh:
            _evaluate(run, last=last)
        stopping = last or bool(agreement.stop)  # asked once: a signal between the save and the return must not be lost
        due = _due(run.step, checkpoint.every_steps) or _due(run.step, checkpoint.keep_every_steps)
        if run.step > start and (stopping or timed or due or run.save_owed):
            _save(run, stopping=stopping)
            saved_at = run.mark = time.monotonic()
        owed, run.export_owed = run.export_owed, False
        # where a run resumed too: a kill may have cut this one short
        if run.exporter.due(run.step, last=last, owed=owed):
            _export(run, last=last, owed=owed)
            run.mark = time.monotonic()
        if stopping:
            return

        overdue = 0 < checkpoint.every_minutes <= (time.monotonic() - saved_at) / 60
        batch, position, error = _next_batch(run)
        agreed = agreement.reach(batch, position, error=str(error or ""), save=overdue)
        if agreed.error:  # a record that cannot be read: what was trained until here stays
            if run.step > start:
                _save_whole(run)
            raise error or ValueError(agreed.error)
        timed = agreed.save
        dispatched = _dispatch(run, batch, agreed)
        _fetch(run)
        run.pending, run.position = dispatched, position
        if _due(run.step, run.config.data.position_every_steps):
            whole, identity = _whole_position(run, position), run.batches.definition.identity(run.step)
            if distributed.is_first():
                positions.write(run.workdir, run.step, position=whole, data_identity=identity)
        run.checkpointer.check()
        run.exporter.check()


def _evaluate(run: Run, *, last: bool) -> None:
    """Evaluates the state on what is due; steps are timed without that."""
    train = run.config.train
    if run.validation is not None and (last or _due(run.step, train.eval_every_steps)):
        _fetch(run)
        run.log.eval_row({"step": run.step, **run.validation(run.state["params"])})
        run.mark = time.monotonic()
    # before the first step too: all programs are compiled then, and what fails has cost nothing
    if run.tasks is not None and (last or run.step == 0 or _due(run.step, train.eval_tasks_every_steps)):
        _fetch(run)
        figures, shown = run.tasks(run.state["params"])
        if figures:
            run.log.tasks_row({"step": run.step, **figures}, shown=shown)
        run.mark = time.monotonic()


def _next_batch(run: Run) -> tuple[Batch | None, np.ndarray | None, ValueError | None]:
    """Returns the next batch and the data position after it, or why there is none."""
    asked_at = time.monotonic()
    try:
        return *next(run.batches), None
    except ValueError as error:
        return None, None, error
    finally:
        run.data_wait_s += time.monotonic() - asked_at


def _dispatch(run: Run, batch: Batch, agreed: Agreed) -> Pending:
    """Starts the next step on the device and returns at once."""
    rate = learning_rate(run.step, run.config.optimizer)
    run.state, metrics = run.train_step(run.state, shard_batch(batch, run.layout), np.float32(rate))
    run.step += 1
    return Pending(run.step, metrics, rate, agreed.facts, run.position)


def _save(run: Run, *, stopping: bool) -> None:
    """Brings every row up to this step to the disk, then starts to save the state.

    After a non-finite step it does not, and the save is owed until a step is finite. Where the run is `stopping` the
    state is saved all the same: it is that of the finite step before, as the update was left out.

    Raises:
      NonFiniteError: the state is not finite.
    """
    _fetch(run)
    run.log.sync()
    if run.num_nonfinite and not stopping:
        if not run.save_owed:
            print(f"checkpoint of step {run.step} left out: that step was not finite; due again after one that is")
        run.save_owed = True
        return
    norms = _finite_norms(run)
    moving = {"tokens": run.tokens, "num_nonfinite": run.num_nonfinite, "remat": run.remat}
    position = _whole_position(run, run.position)
    run.checkpointer.save(run.step, run.state, position=position, metadata=run.settings | moving, norms=norms)
    run.saved, run.save_owed = run.step, False


def _export(run: Run, *, last: bool, owed: bool) -> None:
    """Starts to export the weights; after a non-finite step, but for the `last`, it is owed. Raises as `_save`."""
    _fetch(run)
    if run.num_nonfinite and not last:
        if not owed:
            print(f"export of step {run.step} left out: that step was not finite; due again after one that is")
        run.export_owed = True
        return
    _finite_norms(run)
    run.exporter.start(run.step, run.state)


def _finite_norms(run: Run) -> dict[str, float]:
    """Returns the norms of the parts of the state. Raises NonFiniteError when one of them is not finite."""
    norms = {part: float(norm) for part, norm in jax.device_get(run.state_norms(run.state)).items()}
    if why := not_finite(norms):
        raise NonFiniteError(
            f"after step {run.step} {why}; nothing was saved or exported. The same command resumes from "
            f"{_newest_saved(run)}. Where it ends here again, begin again with a lower optimizer.peak_lr in another "
            "--workdir."
        )
    return norms


def _newest_saved(run: Run) -> str:
    return f"the checkpoint of step {run.saved}" if run.saved else "the beginning"


def _save_whole(run: Run) -> None:
    """Saves the state that a run stops with, and returns when that is on the disk."""
    _save(run, stopping=True)
    run.checkpointer.wait()


def _whole_position(run: Run, position: np.ndarray) -> np.ndarray:
    return gather_rows(position, run.batches.rows, run.config.data.batch_size)


def _fetch(run: Run) -> None:
    """Waits for the pending step, if there is one, and writes its row."""
    pending, run.pending = run.pending, None
    if pending is None:
        return
    metrics = jax.device_get(pending.metrics)
    now = time.monotonic()
    run.tokens += int(metrics.num_tokens)
    row = {
        "step": pending.step,
        "loss": float(metrics.loss),
        "tokens": run.tokens,
        "grad_norm": float(metrics.grad_norm),
        "param_norm": float(metrics.param_norm),
        "learning_rate": pending.learning_rate,
        "step_s": now - run.mark,
        "data_wait_s": run.data_wait_s,  # within step_s, which ends now: mostly for the batch of the step after
        "nonfinite": int(not metrics.finite),
        **pending.facts,
    }
    run.mark, run.data_wait_s = now, 0.0
    run.log.train_row(row)
    run.num_nonfinite = 0 if metrics.finite else run.num_nonfinite + 1
    run.nonfinite_rows = [] if metrics.finite else [*run.nonfinite_rows, row]
    if not metrics.finite:
        print(f"step {pending.step}: {_describe_nonfinite([row])}; update left out")
    if run.num_nonfinite >= run.config.train.max_nonfinite_steps:
        _stop_nonfinite(run, row, pending)


def _stop_nonfinite(run: Run, row: dict[str, Any], pending: Pending) -> None:
    run.log.sync()
    evidence = run.workdir / "nonfinite.json"
    record = {
        "last_step": row,
        "steps_in_a_row": run.num_nonfinite,
        "data_position_before_that_batch": _whole_position(run, pending.position).tolist(),
    }
    if distributed.is_first():
        atomic_files.write_json(evidence, record)
    distributed.barrier()  # the evidence is there before any process ends the others
    look = "Look at that batch, raise train.max_nonfinite_steps"
    if not math.isfinite(row["param_norm"]):
        look = f"The weights are damaged: run the same command again, which resumes from {_newest_saved(run)}"
    raise NonFiniteError(
        f"{run.num_nonfinite} steps in a row were not finite, the last one step {row['step']} (batch "
        f"{row['batch_hash']}): {_describe_nonfinite(run.nonfinite_rows)}. Their updates were left out. Evidence: "
        f"{evidence}. {look}, or begin again with a lower optimizer.peak_lr in another --workdir."
    )


def _describe_nonfinite(rows: list[dict[str, Any]]) -> str:
    """Returns which figures of consecutive rows were not finite, and at which steps."""
    names = {"loss": "the loss", "grad_norm": "the gradient norm", "param_norm": "the weights' norm (param_norm)"}
    said, finite = [], []
    for key, name in names.items():
        bad = [row for row in rows if not math.isfinite(row[key])]
        if not bad:
            finite.append(name)
            continue
        values = " or ".join(sorted({str(row[key]) for row in bad}))
        first, last = bad[0]["step"], bad[-1]["step"]
        steps = f"step {first}" if first == last else f"{len(bad)} steps from {first} to {last}"
        said.append(f"{name} was {values} at {steps}")
    if finite:
        said.append(f"{' and '.join(finite)} {'was' if len(finite) == 1 else 'were'} finite")
    return ", ".join(said)


def _tell_data(batches: TrainBatches, held_out: dict[str, HeldOut], *, unused_rows: int) -> None:
    if unused_rows:
        print(f"vocabulary       {unused_rows:,} of the rows of model.vocab_size are of no token of data.tokenizer")
    if len(batches.definition.sources) > 1:
        print(f"sources          {batches.definition.mixture.describe()}")
    for source in batches.definition.sources:
        if source.documents.ignored:
            print(f"data             source {source.name}: {source.documents.ignored}")
    for name, source in held_out.items():
        print(f"validation       {source.described(name)}")


def _metrics_log(config: Config, workdir: pathlib.Path, layout: Layout, start_step: int) -> MetricsLog | SilentLog:
    if not distributed.is_first():
        return SilentLog()
    row = cost.device(layout.mesh.devices.flat[0].device_kind)
    return MetricsLog(
        workdir,
        config=config.metrics,
        num_steps=config.train.num_steps,
        start_step=start_step,
        flops_per_token=(
            cost.flops_per_token_6n(config.model),
            cost.flops_per_token(config.model, config.data.seq_len),
        ),
        peak_flops=row.peak_flops * layout.mesh.size if row else None,
    )


def _sample(run: Run, when: str) -> None:
    if run.sampler is not None:
        text = sample_text(run.sampler, run.state["params"], run.tokenizer, config=run.config)
        print(f"sample {when}: {text}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
