"""Opens a run, new or resumed from its newest checkpoint: all parts that the loop uses, and the progress so far."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.data import kept_tokenizer, path_checks, positions
from hlat_jax.data.formats.files import NotFound, Unreadable
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.retries import Retries
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts import hardware
from hlat_jax.generate.generator import Programs
from hlat_jax.host import compile_cache, distributed
from hlat_jax.host.process import INDEX_FOLDER, StopSignals, closing_quietly
from hlat_jax.parallel.rows import gather_rows, process_rows
from hlat_jax.parallel.sharding import Layout
from hlat_jax.resolve import branch_source, skipped_batches
from hlat_jax.run import budget, costs, exports, history, optional, summary
from hlat_jax.run.branch import open_branch
from hlat_jax.run.compilation import Compilations, compiled_sampler, compiled_step
from hlat_jax.run.goodput import Ledger, SilentLedger
from hlat_jax.run.init_from import begin, open_start
from hlat_jax.run.machine import fitting_program
from hlat_jax.run.neuron_monitor import NeuronMonitor
from hlat_jax.run.profiling import StepTrace
from hlat_jax.run.rewind import rewound
from hlat_jax.run.settings import jax_changes, refuse_drift, settings_of, write_settings
from hlat_jax.run.step_sync import FolderCheck, StepSync, only_job, require_same_settings
from hlat_jax.run.validation import Validation
from hlat_jax.store.checkpoint import Checkpointer, Restored
from hlat_jax.store.metrics import MetricsLog, SilentLog
from hlat_jax.train_step import StepMetrics
from hlat_jax.weights.hf_files import KEPT, keep_companions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The fixed parts of a run; what changes while it trains is in `Progress`.

    Attributes:
      config, workdir, layout, tokenizer: settings, run folder, mesh and tokenizer.
      check_folder: notices that the run folder is gone.
      batches: iterator over the batches of this process.
      sync: synchronizes the processes before each step.
      checkpointer: saves in the background.
      exporter: exports in the background; None if not configured.
      validation: loss on held-out text; None if there is none.
      tasks: tasks of the evaluation harness; None if not configured.
      shard: this process's rows of a batch -> what `train_step` takes, on devices.
      train_step: the compiled (state, batch, learning rate) -> (state, StepMetrics); donates the state.
      state_norms: the compiled state -> norms of its parts, see program.RunProgram.
      sampler: the compiled programs of samples; None if not configured.
      log, ledger: metrics log and ledger; silent in all processes but process 0.
      monitor: utilization of the devices of this node; of process 0 alone, whose rows are written.
      step_trace: the trace of `train.profile_steps`.
      settings: recorded in every checkpoint, see `settings_of`.
      remat: record of the choice for a memory budget, see `budget.resolved`; None without a budget.
      start_step: step at which this process started or resumed.
      skipped: the batches of `train.skip_steps`.
    """

    config: Config
    workdir: pathlib.Path
    check_folder: FolderCheck
    layout: Layout
    tokenizer: Tokenizer
    batches: TrainBatches
    sync: StepSync
    checkpointer: Checkpointer
    exporter: optional.Exporter | None
    validation: Validation | None
    tasks: optional.TasksInTraining | None
    shard: Callable[[Batch], Any]
    train_step: Callable[..., Any]
    state_norms: Callable[..., Any]
    sampler: Programs | None
    log: MetricsLog | SilentLog
    ledger: Ledger | SilentLedger
    monitor: NeuronMonitor
    step_trace: StepTrace
    settings: dict[str, Any]
    remat: dict[str, Any] | None
    start_step: int
    skipped: tuple[range, ...]

    def global_position(self, position: np.ndarray) -> np.ndarray:
        """Returns the data position of all rows, gathered from all processes, which call it together."""
        return gather_rows(position, self.batches.rows, self.config.data.batch_size)


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The state of a run while it trains.

    Attributes:
      state: after `step` updates.
      step: updates dispatched so far.
      position: data position after batch `step`, for the rows of this process.
      tokens: trained on, up to the last metrics row.
      saved_step: step of the newest checkpoint; 0 if there is none.
      num_nonfinite: non-finite steps in a row, up to the last metrics row.
      nonfinite_rows: their metrics rows, without those from before a resume.
      save_postponed: a checkpoint was due after a non-finite step.
      export_postponed: an export was due after a non-finite step.
      save_overdue: a checkpoint is due by the clock.
      pending: dispatched steps whose metrics are still on the device, oldest first.
      saved_at_s: time.monotonic() at the start of the last save.
      timed_from_s: time.monotonic() from which the current step is timed.
      data_wait_s: time spent waiting for data since the last metrics row.
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
    """The rows of this process, the data positions before and after, and the metrics that describe the global batch."""

    batch: Batch
    begin: np.ndarray
    position: np.ndarray
    row_fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A dispatched step: metrics still on the device, `row_fields` of its batch, and the data position before it."""

    step: int
    metrics: StepMetrics
    learning_rate: float
    row_fields: dict[str, Any]
    position: np.ndarray


def open_run(
    config: Config,
    workdir: pathlib.Path,
    *,
    signals: StopSignals,
    stack: contextlib.ExitStack,
    begin_again: bool = False,
    given: Collection[str] = (),
) -> tuple[Run, Progress] | None:
    """Returns a run and its progress, ready for the next step; None if the run is complete.

    Args:
      config: of the run.
      workdir: the run folder; locked, and created if missing.
      signals: stop the run.
      stack: closes the parts of the run.
      begin_again: train from step 0 where all checkpoints of the run are lost.
      given: keys of the command line, see `open_start`.

    Raises:
      ValueError: a config, data, machine or folder that cannot be trained with; nothing was changed.
    """
    config = positions.with_order_of_run(config, workdir)
    program = fitting_program(config, jax.devices())
    layout = program.layout
    tokenizer = Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    tasks = optional.open_tasks(config, layout=layout, tokenizer=tokenizer)
    stack.enter_context(only_job(workdir))
    ledger = stack.enter_context(Ledger(workdir, signals.activity) if distributed.is_first() else SilentLedger())
    rows = process_rows(layout, config.data.batch_size)
    source = {"tokenizer": tokenizer, "rows": rows, "index_folder": workdir / INDEX_FOLDER}
    retries = Retries(lambda: bool(signals.name))
    # what an earlier process of the run has read was not mistyped
    patiently = {"errors": (Unreadable, NotFound)} if path_checks.was_opened(config.data, workdir) else {}
    opened = retries(lambda: TrainBatches(config.data, retries=retries, **source), **patiently)
    batches = stack.enter_context(contextlib.closing(opened))
    num_batches = config.train.num_eval_batches
    opened = retries(lambda: open_held_out(config.data, num_batches=num_batches, **source), **patiently)
    held_out, held_out_manifest = opened
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

    saved = rewound(config, workdir, checkpointer, settings=settings, ledger=ledger)
    if saved is None and distributed.is_first():
        history.begin(workdir, ledger=ledger, begin_again=begin_again)
    if tasks is not None and (saved is None or saved[0] < config.train.num_steps):
        with signals.during("fetching the data of the tasks", unfinished=""):
            tasks.load()
    if saved is not None:
        signals.saved_step, signals.doing = saved[0], "restoring the checkpoint"
        refuse_drift(saved[1], settings, step=saved[0], workdir=workdir)
    if saved is None or saved[0] < config.train.num_steps:
        ledger.begin()  # a start that is refused, or finds the run complete, changes nothing
    restored = None if saved is None else checkpointer.restore(program.abstract_state, norms=program.norms)
    if restored is not None and restored.step >= config.train.num_steps:
        with signals.during("finishing a complete run", unfinished="the export and the summary"):
            _finish(config, workdir, exporter=exporter, restored=restored)
        return None
    if distributed.is_first():
        checkpointer.require_space(program.abstract_state)

    branched = restored is None and bool(config.train.branch_from)
    if branched:
        signals.doing = "restoring the checkpoint"
        restored = open_branch(program, workdir, settings=settings)
        settings["branch_from"] = config.train.branch_from
    signals.doing = "opening the initial weights"
    weights = open_start(config, tokenizer, given=given) if restored is None and config.train.init_from else None
    signals.doing = "compiling"
    kept_in = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    print(f"compile cache    {compile_cache.described(kept_in)}")
    print("compiling        the programs of this run")
    program, remat = budget.resolved(program, recorded=restored and restored.metadata.get("remat"))
    compilations = Compilations(program)
    if restored is not None:
        origin = {key: restored.metadata[key] for key in ("init_from", "branch_from") if key in restored.metadata}
        settings = origin | settings
        progress = _resumed(restored, batches=batches, saved_step=0 if branched else restored.step)
        if not branched:
            for key in ("init_from", "branch_from"):
                if getattr(config.train, key):
                    print(f"train.{key}  ignored: resuming from this run's own checkpoint")
            print(f"resuming from step {restored.step} of {config.train.num_steps}")
            for line in jax_changes(restored.metadata, settings):
                print(f"JAX setting      {line}: not that of the run's first start; it does not change the weights")
            settings["jax_others"] |= restored.metadata.get("jax_others", {})  # those of the first start
            if begin_again:
                print("--begin_again    ignored: resuming from this run's own checkpoint")
            if distributed.is_first():
                is_branch = "branch_from" in settings
                history.resume(workdir, restored.step, ledger=ledger, config=config, is_branch=is_branch)
    else:
        state = compilations.compiled("init")(program.seed)
        if weights is not None:
            state, settings["init_from"] = begin(weights, state)
        position = batches.get_state()
        progress = Progress(state=state, step=0, position=position, tokens=0, saved_step=0, num_nonfinite=0)
    if distributed.is_first():
        write_settings(config, workdir, remat=remat)
        kept_tokenizer.keep_tokenizer(tokenizer.path, workdir)
        if saved is None:
            branch = branch_source(config.train)
            of_branch = pathlib.Path(branch[0]).expanduser() / KEPT if branch else None
            keep_companions(of_branch if weights is None else weights.companions, workdir)
        positions.rewind(workdir, int(progress.position[0, 0]))
        exports.rewind(workdir, progress.step)
    log = stack.enter_context(closing_quietly(_open_log(config, workdir, layout=layout, progress=progress)))
    monitored = config.metrics.neuron_monitor if distributed.is_first() else "off"
    monitor = NeuronMonitor(monitored, platform=layout.mesh.devices.flat[0].platform)
    stack.enter_context(contextlib.closing(monitor))
    step_trace = stack.enter_context(closing_quietly(StepTrace(config, workdir, start_step=progress.step)))
    check_folder = FolderCheck(workdir)
    signals.activity.problem = check_folder.problem
    run = Run(
        config=config,
        workdir=workdir,
        check_folder=check_folder,
        layout=layout,
        tokenizer=tokenizer,
        batches=batches,
        sync=StepSync(config, batches.rows, signals),
        checkpointer=checkpointer,
        exporter=exporter,
        shard=program.shard,
        train_step=compiled_step(compilations),
        state_norms=compilations.compiled("norms"),
        validation=(
            Validation(held_out, compilations.compiled("eval"), layout, num_parts=program.num_eval_parts)
            if held_out
            else None
        ),
        tasks=tasks,
        sampler=compiled_sampler(compilations) if config.train.sample_prompt else None,
        log=log,
        ledger=ledger,
        monitor=monitor,
        step_trace=step_trace,
        settings=settings,
        remat=remat,
        start_step=progress.step,
        skipped=skipped_batches(config.train.skip_steps),
    )
    if distributed.is_first():
        compilations.write(workdir)
    return run, progress


def _resumed(restored: Restored, *, batches: TrainBatches, saved_step: int) -> Progress:
    """Returns the progress that a checkpoint records, and sets `batches` to its position."""
    position = restored.position[list(batches.rows)]
    batches.set_state(position)
    return Progress(
        state=restored.state,
        step=restored.step,
        position=position,
        tokens=restored.metadata["tokens"],
        saved_step=saved_step,
        num_nonfinite=restored.metadata["num_nonfinite"],
    )


def _finish(config: Config, workdir: pathlib.Path, *, exporter: optional.Exporter | None, restored: Restored) -> None:
    """Finishes a complete run that was killed after its last save: the last export, the plot and the summary."""
    print(f"complete: {workdir} is at step {restored.step} of train.num_steps={config.train.num_steps}.")
    if exporter is not None and exporter.due(restored.step, last=True):
        exporter.start(restored.step, restored.state)
        exporter.wait()
    if distributed.is_first():
        is_branch = "branch_from" in restored.metadata
        history.print_missing_rows(workdir, restored.step, config=config, is_branch=is_branch)
        summary.finish(config, workdir, restored.step)


def _open_log(config: Config, workdir: pathlib.Path, *, layout: Layout, progress: Progress) -> MetricsLog | SilentLog:
    if not distributed.is_first():
        return SilentLog()
    device = hardware.device(layout.mesh.devices.flat[0].device_kind)
    return MetricsLog(
        workdir,
        config=config.metrics,
        num_steps=config.train.num_steps,
        start_step=progress.step,
        start_tokens=progress.tokens,
        hyperparameters=config.to_dict(),
        flops_per_token=(
            costs.flops_per_token_6n(config.model),
            costs.flops_per_token(config.model, config.data.seq_len),
        ),
        peak_flops=device.peak_flops * layout.mesh.size if device else None,
    )
