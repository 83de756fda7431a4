"""Opens a run: everything the loop needs, and where the run stands, new or resumed from its newest checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hlat_jax import cost
from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.data import positions
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.generator import Programs
from hlat_jax.host import distributed
from hlat_jax.host.process import INDEX_FOLDER, StopSignals, closing_quietly
from hlat_jax.parallel.sharding import Layout, gather_rows, process_rows
from hlat_jax.program import StepMetrics
from hlat_jax.run import budget, exports, optional, summary
from hlat_jax.run.compilation import Compilations, compiled_sampler, compiled_step
from hlat_jax.run.init_from import begin, open_start
from hlat_jax.run.machine import fitting_program
from hlat_jax.run.settings import refuse_drift, settings_of, write_settings
from hlat_jax.run.step_sync import StepSync, only_job, require_same_settings
from hlat_jax.run.validation import Validation
from hlat_jax.store.checkpoint import Checkpointer, Restored
from hlat_jax.store.metrics import MetricsLog, SilentLog


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run is, from its first step in this process to its last.

    Attributes:
      config, workdir, layout, tokenizer: what is trained, and where.
      batches: of this process, in order.
      sync: exchanges among processes before each step.
      checkpointer: saves in the background.
      exporter: exports in the background; None: not asked for.
      validation: on held-out text; None: there is none.
      tasks: of the evaluation harness; None: not asked for.
      train_step: the compiled (state, batch, learning rate) -> (state, StepMetrics); donates the state.
      state_norms: the compiled state -> norms of its parts, see step.RunProgram.
      sampler: the compiled programs of samples; None: no sample is asked for.
      log: of metrics; silent in all processes but the first.
      settings: what a checkpoint belongs to, see settings_of.
      remat: the record of the choice made for a budget of bytes, see budget.resolved; None: no budget.
      start_step: where this process began or resumed.
    """

    config: Config
    workdir: pathlib.Path
    layout: Layout
    tokenizer: Tokenizer
    batches: TrainBatches
    sync: StepSync
    checkpointer: Checkpointer
    exporter: optional.Exporter | None
    validation: Validation | None
    tasks: optional.TasksInTraining | None
    train_step: Callable[..., Any]
    state_norms: Callable[..., Any]
    sampler: Programs | None
    log: MetricsLog | SilentLog
    settings: dict[str, Any]
    remat: dict[str, Any] | None
    start_step: int

    def global_position(self, position: np.ndarray) -> np.ndarray:
        """Returns the data position of all rows from that of this process's; every process calls it together."""
        return gather_rows(position, self.batches.rows, self.config.data.batch_size)


@dataclasses.dataclass(kw_only=True)
class Progress:
    """What moves while a run trains.

    Attributes:
      state: after `step` updates.
      step: updates dispatched so far.
      position: of the data after batch `step`, for the rows of this process.
      tokens: counted so far, up to the last metrics row.
      saved_step: of the newest checkpoint; 0: there is none.
      num_nonfinite: non-finite steps in a row, up to the last metrics row.
      nonfinite_rows: the metrics rows of these, as far as this process made them.
      save_postponed: a checkpoint was due after a non-finite step.
      export_postponed: an export was.
      save_overdue: a checkpoint is due by the clock.
      pending: dispatched steps whose metrics are still on the device, oldest first.
      saved_at_s: when the last save was started, by time.monotonic.
      timed_from_s: when the step that is timed began, likewise.
      data_wait_s: waited for data since the last metrics row.
    """

    state: Any
    step: int
    position: np.ndarray
    tokens: int
    saved_step: int
    num_nonfinite: int
    nonfinite_rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    save_postponed: bool = False
    export_postponed: bool = False
    save_overdue: bool = False
    pending: list[Pending] = dataclasses.field(default_factory=list)
    saved_at_s: float = 0.0
    timed_from_s: float = 0.0
    data_wait_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextBatch:
    """The rows of this process, the data position after them, and the metrics entries that the global batch decides."""

    batch: Batch
    position: np.ndarray
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A dispatched step with its metrics, still on the device, the `facts` of its batch, and the position before it."""

    step: int
    metrics: StepMetrics
    learning_rate: float
    facts: dict[str, Any]
    position: np.ndarray


def open_run(
    config: Config, workdir: pathlib.Path, *, signals: StopSignals, stack: contextlib.ExitStack
) -> tuple[Run, Progress] | None:
    """Returns a run ready to step and where it stands; None when it is already complete.

    Args:
      config: of the run.
      workdir: its folder; locked, and made when missing.
      signals: that stop it.
      stack: closes what is opened.

    Raises:
      ValueError: a config, data, machine or folder that cannot be trained with; nothing was changed.
    """
    program = fitting_program(config, jax.devices())
    layout = program.layout
    tokenizer = Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    tasks = optional.open_tasks(config, layout=layout, tokenizer=tokenizer)
    stack.enter_context(only_job(workdir))
    rows = process_rows(layout, config.data.batch_size)
    source = {"tokenizer": tokenizer, "rows": rows, "index_folder": workdir / INDEX_FOLDER}
    batches = stack.enter_context(contextlib.closing(TrainBatches(config.data, **source)))
    held_out, held_out_manifest = open_held_out(config.data, num_batches=config.train.num_eval_batches, **source)
    settings = settings_of(program, tokenizer=tokenizer, batches=batches)
    settings |= {"validation_manifest": held_out_manifest}
    require_same_settings(settings)
    checkpointer = stack.enter_context(closing_quietly(Checkpointer(workdir, config=config.checkpoint)))
    exporter = optional.open_exporter(config, workdir, tokenizer=tokenizer)
    if exporter is not None:
        stack.enter_context(closing_quietly(exporter))
    if distributed.is_first():
        exports.remove_leftovers(workdir)
    summary.describe(program)
    summary.describe_data(batches, held_out, vocab_size=config.model.vocab_size, tokenizer=tokenizer)

    saved = checkpointer.latest_metadata()
    if tasks is not None and (saved is None or saved[0] < config.train.num_steps):
        tasks.load()
    if saved is not None:
        refuse_drift(saved[1], settings, step=saved[0])
    restored = None if saved is None else checkpointer.restore(program.abstract_state, norms=program.norms)
    if restored is not None and restored.step >= config.train.num_steps:
        _finish(config, workdir, exporter=exporter, restored=restored)
        return None

    weights = open_start(config, tokenizer) if restored is None and config.train.init_from else None
    program, remat = budget.resolved(program, recorded=restored and restored.metadata.get("remat"))
    compilations = Compilations(program)
    if restored is not None:
        settings |= {key: value for key, value in restored.metadata.items() if key == "init_from"}
        progress = _resumed(config, restored, batches=batches)
    else:
        state = compilations.compiled("init")(program.seed)
        if weights is not None:
            state, settings["init_from"] = begin(weights, state)
        position = batches.get_state()
        progress = Progress(state=state, step=0, position=position, tokens=0, saved_step=0, num_nonfinite=0)
    if distributed.is_first():
        write_settings(config, workdir, remat=remat)
        positions.rewind(workdir, progress.step)
        exports.rewind(workdir, progress.step)
    log = stack.enter_context(closing_quietly(_open_log(config, workdir, layout=layout, start_step=progress.step)))
    run = Run(
        config=config,
        workdir=workdir,
        layout=layout,
        tokenizer=tokenizer,
        batches=batches,
        sync=StepSync(config, batches.rows, signals),
        checkpointer=checkpointer,
        exporter=exporter,
        train_step=compiled_step(compilations),
        state_norms=compilations.compiled("norms"),
        validation=Validation(held_out, compilations.compiled("eval"), layout) if held_out else None,
        tasks=tasks,
        sampler=compiled_sampler(compilations) if config.train.sample_prompt else None,
        log=log,
        settings=settings,
        remat=remat,
        start_step=progress.step,
    )
    if distributed.is_first():
        compilations.write(workdir)
    return run, progress


def _resumed(config: Config, restored: Restored, *, batches: TrainBatches) -> Progress:
    """Returns where a checkpoint stands, and moves `batches` there."""
    position = restored.position[list(batches.rows)]
    batches.set_state(position)
    if config.train.init_from:
        print("train.init_from  ignored: resuming from this run's own checkpoint")
    print(f"resuming from step {restored.step} of {config.train.num_steps}")
    return Progress(
        state=restored.state,
        step=restored.step,
        position=position,
        tokens=restored.metadata["tokens"],
        saved_step=restored.step,
        num_nonfinite=restored.metadata["num_nonfinite"],
    )


def _finish(config: Config, workdir: pathlib.Path, *, exporter: optional.Exporter | None, restored: Restored) -> None:
    """Does for a complete run what a kill between its last save and its end prevented."""
    print(f"complete: {workdir} is at step {restored.step} of train.num_steps={config.train.num_steps}.")
    if exporter is not None and exporter.due(restored.step, last=True):
        exporter.start(restored.step, restored.state)
        exporter.wait()
    if distributed.is_first():
        summary.finish(config, workdir, restored.step)


def _open_log(config: Config, workdir: pathlib.Path, *, layout: Layout, start_step: int) -> MetricsLog | SilentLog:
    if not distributed.is_first():
        return SilentLog()
    device = cost.device(layout.mesh.devices.flat[0].device_kind)
    return MetricsLog(
        workdir,
        config=config.metrics,
        num_steps=config.train.num_steps,
        start_step=start_step,
        flops_per_token=(
            cost.flops_per_token_6n(config.model),
            cost.flops_per_token(config.model, config.data.seq_len),
        ),
        peak_flops=device.peak_flops * layout.mesh.size if device else None,
    )
