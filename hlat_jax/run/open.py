"""Opens a run with its inputs, its starting state and its compiled programs for the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Collection
from typing import Any

import jax

from hlat_jax.config import Config
from hlat_jax.data import kept_tokenizer, path_checks, positions
from hlat_jax.data.formats.files import NotFound, Unreadable
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.retries import Retries
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts import hardware
from hlat_jax.facts.local_paths import local_path
from hlat_jax.host import compile_cache, distributed
from hlat_jax.host.console import say
from hlat_jax.host.process import INDEX_FOLDER, StopSignals, closing_quietly
from hlat_jax.parallel.rows import pad_rows, process_rows
from hlat_jax.parallel.sharding import Layout
from hlat_jax.program import RunProgram, host_state
from hlat_jax.resolve import branch_source, skipped_batches
from hlat_jax.run import budget, costs, optional, results, resume, summary
from hlat_jax.run.compilation import Compilations, compiled_recompute, compiled_sampler, compiled_step
from hlat_jax.run.copying import Copier
from hlat_jax.run.digests import make_state_digest
from hlat_jax.run.drift import refuse_drift
from hlat_jax.run.goodput import Ledger
from hlat_jax.run.neuron_monitor import NeuronMonitor
from hlat_jax.run.profiling import StepTrace
from hlat_jax.run.state import Inputs, Progress, Run
from hlat_jax.run.step_sync import FolderCheck, StepSync, only_job, require_same_settings
from hlat_jax.run.validation import Best, SourceLosses, Validation
from hlat_jax.store.checkpoint import Checkpointer, Restored
from hlat_jax.store.metrics import ROWS_FILE, MetricsLog, Silent, read_rows
from hlat_jax.weights.hf_files import KEPT, keep_companions
from hlat_jax.weights.trained import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run from a checkpoint, from weights, or, without either, from its own initialization.

    Attributes:
      restored: the checkpoint, from this run or from `train.branch_from`.
      is_own: whether the checkpoint is from this run, which resumes.
      weights: the weights of `train.init_from`, not read yet.
    """

    restored: Restored | None = None
    is_own: bool = False
    weights: Weights | None = None


def open_run(
    program: RunProgram,
    workdir: pathlib.Path,
    *,
    copier: Copier,
    signals: StopSignals,
    stack: contextlib.ExitStack,
    begin_again: bool = False,
    given: Collection[str] = (),
) -> tuple[Run, Progress] | None:
    """Returns a run and its progress, ready for the next step, or None if the run is complete.

    Args:
      program: the program of the run, over the devices of this job.
      workdir: the run folder, which is locked, and created if missing.
      signals: the signals that stop the run, and its watchdog.
      stack: the stack that closes all that is opened.
      copier: fetches the newest checkpoint of a bucket, if it is newer.
      begin_again: whether to train from step 0 if all checkpoints are lost.
      given: the config keys given on the command line, see `resume.open_init`.

    Raises:
      ValueError: the config, data, machine or folder cannot be used to train. Nothing was changed.
    """
    inputs = open_inputs(program, workdir, copier=copier, signals=signals, stack=stack)
    start = choose_start(inputs, signals=signals, begin_again=begin_again, given=given)
    if start.restored is not None and start.restored.step >= inputs.config.train.num_steps:
        inputs.ledger.finish(start.restored.step)
        with signals.phase("finishing a complete run", unfinished="the export and the summary"):
            _finish(inputs, start.restored)
            distributed.barrier()  # the others wait here while process 0 draws the results
        return None
    with signals.phase("compiling"):
        return compile_run(inputs, start, signals=signals, stack=stack)


def open_inputs(
    program: RunProgram, workdir: pathlib.Path, *, copier: Copier, signals: StopSignals, stack: contextlib.ExitStack
) -> Inputs:
    """Locks the run folder, opens and describes the inputs and outputs of the run, see `open_run`."""
    config = program.config
    tokenizer = Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    tasks = optional.open_tasks(config, layout=program.layout, tokenizer=tokenizer)
    stack.enter_context(only_job(workdir))
    copier.open(signals)
    ledger = stack.enter_context(Ledger(workdir, signals.watchdog) if distributed.is_first() else Silent())
    copier.on_failure = lambda problem: ledger.event("store_failed", reason=problem)
    rows, index_folder = process_rows(program.layout, config.data.batch_size), workdir / INDEX_FOLDER
    retries = Retries(lambda: bool(signals.name))
    # what an earlier process of the run has read was not mistyped
    errors = (Unreadable, NotFound) if path_checks.was_opened(config.data, workdir) else (Unreadable,)
    batches = retries(
        lambda: TrainBatches(config.data, tokenizer=tokenizer, rows=rows, index_folder=index_folder, retries=retries),
        errors=errors,
    )
    stack.enter_context(contextlib.closing(batches))
    num_batches = config.train.num_eval_batches
    held_out, manifest = retries(
        lambda: open_held_out(
            config.data, num_batches=num_batches, tokenizer=tokenizer, rows=rows, index_folder=index_folder
        ),
        errors=errors,
    )
    settings = resume.settings_of(program, tokenizer=tokenizer, batches=batches) | {"validation_manifest": manifest}
    require_same_settings(settings)
    checkpointer = stack.enter_context(closing_quietly(Checkpointer(workdir, config=config.checkpoint)))
    exporter = optional.open_exporter(config, workdir)
    if exporter is not None:
        stack.enter_context(closing_quietly(exporter))
    if distributed.is_first():
        for path in (workdir / resume.EXPORTS).glob("*.partial"):  # which a kill leaves behind
            shutil.rmtree(path, ignore_errors=True)
    compilations = Compilations(program)
    summary.describe(program)
    summary.describe_data(batches, held_out, vocab_size=config.model.vocab_size, tokenizer=tokenizer)
    return Inputs(
        config=config,
        workdir=workdir,
        program=program,
        tokenizer=tokenizer,
        tasks=tasks,
        ledger=ledger,
        batches=batches,
        held_out=held_out,
        settings=settings,
        checkpointer=checkpointer,
        copier=copier,
        exporter=exporter,
        first_compilations=compilations,
        state_digest=make_state_digest(functools.partial(compilations.compile, "digest"), program),
    )


def choose_start(inputs: Inputs, *, signals: StopSignals, begin_again: bool, given: Collection[str]) -> Start:
    """Returns the start of the run from its newest checkpoint, else from its config, see `open_run`."""
    config, workdir, ledger = inputs.config, inputs.workdir, inputs.ledger
    saved = inputs.checkpointer.latest_metadata()
    if saved is None and distributed.is_first():
        resume.check_new_run(workdir, ledger=ledger, begin_again=begin_again)
    is_complete = saved is not None and saved[0] >= config.train.num_steps
    if inputs.tasks is not None and not is_complete:
        with signals.phase("fetching the data of the tasks"):
            inputs.tasks.load()
    if saved is not None:
        signals.saved_step = saved[0]
        refuse_drift(saved[1], inputs.settings, step=saved[0], workdir=workdir)
    if not is_complete:
        ledger.begin()  # not for a start that is refused; a complete run only gets what its ledger lacks, by `finish`
    if saved is not None:
        with signals.phase("compiling"):  # for the time of a restore, see `goodput`
            inputs.state_digest.compiled()
    with signals.phase("restoring the checkpoint"):
        abstract_state, digest_problem = inputs.program.abstract_state, inputs.state_digest.problem
        restored = None if saved is None else inputs.checkpointer.restore(abstract_state, digest_problem=digest_problem)
    if restored is not None and restored.step >= config.train.num_steps:
        return Start(restored=restored, is_own=True)
    if distributed.is_first():
        inputs.checkpointer.require_space(inputs.program.abstract_state)
    if restored is not None:
        for key in ("init_from", "branch_from"):
            if getattr(config.train, key):
                say(f"train.{key}", "ignored, as this run resumes from its own checkpoint")
        if begin_again:
            say("--begin_again", "ignored, as this run resumes from its own checkpoint")
        print(f"resuming from step {restored.step} of {config.train.num_steps}")
        return Start(restored=restored, is_own=True)
    if config.train.branch_from:
        with signals.phase("restoring the checkpoint"):
            digest_problem = inputs.state_digest.problem
            branch = resume.open_branch(
                inputs.program, workdir, settings=inputs.settings, digest_problem=digest_problem
            )
            return Start(restored=branch)
    if config.train.init_from:
        with signals.phase("opening the initial weights"):
            return Start(weights=resume.open_init(config, inputs.tokenizer, given=given))
    return Start()


def compile_run(
    inputs: Inputs, start: Start, *, signals: StopSignals, stack: contextlib.ExitStack
) -> tuple[Run, Progress]:
    """Returns the run with its programs compiled, and its progress at the start, see `open_run`."""
    config, workdir, restored, is_first = inputs.config, inputs.workdir, start.restored, distributed.is_first()
    kept_in = jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None
    say("compile cache", compile_cache.describe(kept_in, platform=jax.default_backend()))
    say("compiling", "the programs of this run")
    program, remat = budget.choose_remat(inputs.program, recorded=restored and restored.metadata.get("remat"))
    layout, compilations = program.layout, Compilations(program, beside=inputs.first_compilations)
    progress, origin = _progress(inputs, start, compilations)
    if is_first:
        _rewind_folder(inputs, start, progress)
        resume.write_settings(config, workdir, remat=remat)
    log = stack.enter_context(closing_quietly(_open_log(config, workdir, layout=layout, progress=progress)))
    if config.checkpoint.keep_best or config.train.early_stop_evals:
        progress.best = _best_validation(config, workdir)
        if config.checkpoint.keep_best and (inputs.checkpointer.folder / str(progress.best.step)).is_dir():
            inputs.checkpointer.keep_best(progress.best.step)  # a kill may have come before the link
    monitor = NeuronMonitor(config.metrics.neuron_monitor if is_first else "off", platform=layout.platform)
    stack.enter_context(contextlib.closing(monitor))
    step_trace = stack.enter_context(closing_quietly(StepTrace(config, workdir, start_step=progress.step)))
    check_folder = FolderCheck(workdir)
    signals.watchdog.problem = check_folder.problem
    validation = source_losses = None
    evaluate: Any = compilations.compile("eval") if config.has_eval_step else None
    if inputs.held_out:
        num_rows, sources = config.data.batch_size, {}
        for name, held_out in inputs.held_out.items():
            batches = [pad_rows(batch, layout, num_rows=num_rows) for batch in held_out.batches]
            sources[name] = dataclasses.replace(held_out, batches=batches)
        validation = Validation(sources, evaluate, layout, num_parts=program.num_eval_parts)
    if config.metrics.source_losses_every_steps:
        source_losses = SourceLosses(
            [source.name for source in inputs.batches.definition.sources],
            evaluate,
            layout,
            num_parts=program.num_eval_parts,
            num_rows=config.data.batch_size,
        )
    train_step = compiled_step(compilations)
    recompute = compiled_recompute(compilations, train_step) if config.train.check_devices_every_steps else None
    run = Run(
        config=config,
        workdir=workdir,
        program=program,
        tokenizer=inputs.tokenizer,
        tasks=inputs.tasks,
        ledger=inputs.ledger,
        batches=inputs.batches,
        held_out=inputs.held_out,
        settings=inputs.settings | origin,
        checkpointer=inputs.checkpointer,
        copier=inputs.copier,
        exporter=inputs.exporter,
        first_compilations=inputs.first_compilations,
        state_digest=inputs.state_digest,
        check_folder=check_folder,
        sync=StepSync(config, inputs.batches.rows, signals),
        validation=validation,
        source_losses=source_losses,
        train_step=train_step,
        state_norms=compilations.compile("norms"),
        recompute=recompute,
        sampler=compiled_sampler(compilations) if config.train.sample_prompt else None,
        log=log,
        monitor=monitor,
        step_trace=step_trace,
        remat=remat,
        start_step=progress.step,
        skipped=skipped_batches(config.train.skip_steps),
    )
    inputs.state_digest.compiled()  # before the first step
    if is_first:
        compilations.write(workdir)
    return run, progress


def _rewind_folder(inputs: Inputs, start: Start, progress: Progress) -> None:
    """Puts the run folder into the state of the step at which the run starts; process 0 calls it."""
    config, workdir = inputs.config, inputs.workdir
    if start.is_own:
        resume.report_losses(workdir, progress.step, ledger=inputs.ledger)
    else:
        branch = branch_source(config.train)
        of_branch = local_path(branch[0]) / KEPT if branch else None
        keep_companions(of_branch if start.weights is None else start.weights.companions, workdir)
    kept_tokenizer.keep_tokenizer(inputs.tokenizer.path, workdir)
    positions.rewind(workdir, int(progress.position[0, 0]))
    resume.set_exports_aside(workdir, progress.step)


def _best_validation(config: Config, workdir: pathlib.Path) -> Best:
    """Returns the best validation in the rows of the run, which process 0 reads for all."""
    _, first = branch_source(config.train) or ("", -1)  # the rows up to there are those of the other run
    rows = read_rows(workdir / ROWS_FILE) if distributed.is_first() else []
    best = functools.reduce(Best.after, [row for row in rows if row["step"] > first], Best())
    return Best(**json.loads(distributed.exchange(json.dumps(vars(best)))[0]))


def _progress(inputs: Inputs, start: Start, compilations: Compilations) -> tuple[Progress, dict[str, Any]]:
    """Returns the progress that a run starts with, and the settings that say where it comes from."""
    restored, batches = start.restored, inputs.batches
    if restored is None:
        state = _initial_state(compilations, draws=start.weights is None)
        origin: dict[str, Any] = {}
        if start.weights is not None:
            state, origin["init_from"] = resume.with_weights(state, start.weights, config=inputs.config)
        position = batches.get_state()
        return Progress(state=state, step=0, position=position, tokens=0, saved_step=0, num_nonfinite=0), origin
    metadata, position = restored.metadata, restored.position[list(batches.rows)]
    batches.set_state(position)
    origin = {key: metadata[key] for key in ("init_from", "branch_from") if key in metadata}
    if not start.is_own:
        origin["branch_from"] = inputs.config.train.branch_from
    progress = Progress(
        state=restored.state,
        step=restored.step,
        position=position,
        tokens=metadata["tokens"],
        saved_step=restored.step if start.is_own else 0,
        num_nonfinite=metadata["num_nonfinite"],
    )
    return progress, origin


def _initial_state(compilations: Compilations, *, draws: bool) -> Any:
    """Returns the state before the first step; on Neuron with the shapes of the weights alone if not `draws`."""
    program, began = compilations.program, time.monotonic()
    if not program.inits_on_host:
        return compilations.compile("init")(program.seed)
    state = host_state(program, draws=draws)
    say("initial state", f"made on the host's CPU in {time.monotonic() - began:.1f} s, without a device program")
    return state


def _finish(inputs: Inputs, restored: Restored) -> None:
    """Finishes a complete run that was killed after its last save: the last export, the plot and the summary."""
    config, exporter = inputs.config, inputs.exporter
    print(f"complete: {inputs.workdir} is at step {restored.step} of train.num_steps={config.train.num_steps}.")
    if exporter is not None:
        exporter.begin(restored.step, is_saved=True)
        exporter.wait()
    if distributed.is_first():
        resume.print_missing_rows(inputs.workdir, restored.step)
        results.show(config, inputs.workdir, restored.step)


def _open_log(config: Config, workdir: pathlib.Path, *, layout: Layout, progress: Progress) -> MetricsLog | Silent:
    if not distributed.is_first():
        return Silent()
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
