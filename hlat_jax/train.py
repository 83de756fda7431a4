"""Trains a model, as a function or by `python -m hlat_jax.train --config=NAME`, which sets the environment first.

JAX is imported only in functions, as it has to see that environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Collection, Sequence
from typing import Any

from absl import flags, logging

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_folder
from hlat_jax.facts.local_paths import local_path
from hlat_jax.host import compile_cache, neuron_env, neuron_start, neuron_topology, process
from hlat_jax.host.console import say
from hlat_jax.host.limits import too_many_files
from hlat_jax.host.watchdog import TERMINATED_CODE, Watchdog
from hlat_jax.run import costs


def main(argv: Sequence[str]) -> int:
    """Trains with the config and flags of a command line, and returns the exit code."""
    mutable, values = flags_lib.parse(argv, _define)
    with contextlib.ExitStack() as opening:
        opening.enter_context(process.ending_when_stopped(values.stopped_code or TERMINATED_CODE))
        return _run(mutable, values, opening=opening)


def _run(mutable: Any, values: flags.FlagValues, *, opening: contextlib.ExitStack) -> int:
    """Prepares this process and trains; closes `opening` when `train` takes the signals."""
    from hlat_jax.data.tokenizer import resolve_with_tokenizer  # not at the top: --help does not need it
    from hlat_jax.weights.init_model import check_starts, take_model

    workdir, given = pathlib.Path(values.workdir or f"runs/{mutable.name}"), flags_lib.given_keys(values)
    config_files.make_text_paths_absolute(mutable)  # the run records them
    if not values.coordinator:  # of several processes all end alike, with the reason, once they have joined
        check_starts(mutable.train, workdir, given=given)
    taken = take_model(mutable, given=given, workdir=workdir)
    named_tokenizer = mutable.data.tokenizer
    config = resolve_with_tokenizer(mutable, workdir=workdir)
    if values.print_config:
        print(json.dumps(config.to_dict(), indent=2))
        print(costs.describe(config))
        return 0
    process.drop_unwritable()
    logging.set_verbosity(logging.ERROR)  # silences the INFO logs of libraries; ours are printed
    if not values.process_id:
        print("\n".join(taken), end="\n" * bool(taken))
    if not values.coordinator:
        _check_paths(config, workdir, given=given)
    if config.data.tokenizer != named_tokenizer and not values.process_id:
        say("tokenizer", f"{config.data.tokenizer}, because {named_tokenizer} is missing")
    _set_environment(config, values, workdir=workdir)
    from hlat_jax.host import distributed  # imports JAX, which must see the environment as it is now
    from hlat_jax.run.corruption import CorruptionError
    from hlat_jax.run.nonfinite import NonFiniteError
    from hlat_jax.store import checkpoint

    checkpoint.silence_orbax_retry_logs()
    timeouts = {"join_timeout_s": values.join_timeout_s, "peer_timeout_s": values.peer_timeout_s}
    job = distributed.resolve_job(values.coordinator, values.num_processes, values.process_id, **timeouts)
    try:
        watchdog = Watchdog(least_s=values.stuck_timeout_s, began_s=process.began_s())
        with distributed.join(job, watchdog=watchdog, stacks=workdir / "stuck"):
            opening.close()
            options = {"begin_again": values.begin_again, "stopped_code": values.stopped_code, "given": given}
            return train(config, workdir, watchdog=watchdog, **options)
    except (OSError, NonFiniteError, CorruptionError) as error:  # the run failed, not the command: code 1
        print(f"error: {error}{too_many_files(getattr(error, 'errno', None))}", file=sys.stderr)
        return 1


def train(
    config: config_lib.Config,
    workdir: pathlib.Path,
    *,
    watchdog: Watchdog | None = None,
    begin_again: bool = False,
    stopped_code: int = 0,
    given: Collection[str] = (),
) -> int:
    """Trains to `train.num_steps`, or resumes the run in `workdir`.

    Returns the exit code, which is 0 after the last step, 130 after Ctrl-C, else `stopped_code`. It is COPY_CODE if
    `checkpoint.copy_to` lacks the last checkpoint.

    Args:
      config: the config, from `resolve`.
      workdir: the run folder.
      watchdog: the watchdog to keep up to date, if any.
      begin_again: whether to train from step 0 if the checkpoints are lost.
      stopped_code: the exit code if a signal other than SIGINT ends the run before its last step.
      given: the config keys given on the command line, as `resume.open_init` takes them.

    On CPU, glibc's allocator then keeps freed memory in this process, see `allocator.keep_freed_memory`.

    Raises:
      ValueError: the config, data, machine or folder cannot be used to train. Nothing was changed.
      OSError: the disk failed. The last complete checkpoint is intact.
      NonFiniteError: `train.max_nonfinite_steps` steps in a row were not finite or had no target.
      CorruptionError: a persistent finding of `train.check_devices_every_steps`.
    """
    workdir = local_path(workdir, key="workdir", use="run")
    import jax  # in here: the environment is set before

    from hlat_jax import loop
    from hlat_jax.host import allocator, distributed
    from hlat_jax.run.copying import COPY_CODE, Copier
    from hlat_jax.run.machine import fitting_program
    from hlat_jax.run.open import open_run

    with process.StopSignals(watchdog, alone=not jax.distributed.is_initialized()) as signals:
        stop = ""
        with contextlib.ExitStack() as stack, signals.watchdog.ending_without_memory():
            with loop.progress_bar(config, lambda: (0.0, signals.doing), in_place=False):  # lines are printed meanwhile
                program = fitting_program(config, jax.devices())
                copier = stack.enter_context(contextlib.closing(Copier(config, workdir)))
                options = {"begin_again": begin_again, "given": given}
                opened = open_run(program, workdir, copier=copier, signals=signals, stack=stack, **options)
            copier.begin()
            if opened is not None:
                if jax.default_backend() == "cpu":
                    allocator.keep_freed_memory()
                stop = loop.train(*opened)
            not_copied = copier.finish(signals)
            if opened is not None and not stop:
                run, progress = opened
                run.ledger.event("complete", step=progress.step)  # last: `run watch` ends with it
        names = distributed.exchange(signals.name)  # of signals after the last step too
    if "SIGINT" in (stop, *names, signals.name):
        return 130  # so that `train && evaluate` stops
    if not_copied:
        print(f"error: {workdir} is saved, but {not_copied}. Run the same command to copy it.", file=sys.stderr)
        return stopped_code if stop and stopped_code else COPY_CODE  # the next start copies it
    return stopped_code if stop else 0


def _check_paths(config: config_lib.Config, workdir: pathlib.Path, *, given: Collection[str]) -> None:
    """Raises ValueError for a path that does not exist, or settings that are wrong, before JAX is imported.

    Text and tokenizer that a shipped config sets, and not the command line, whose keys are `given`, are left to the
    run, which first checks that the model fits this machine.
    """
    keys = given if config.name in config_files.shipped_configs() else config_files.ANCHORED_KEYS
    from hlat_jax.data import path_checks  # not at the top: --help does not need them
    from hlat_jax.data.tokenizer import Tokenizer
    from hlat_jax.run.drift import check_settings

    path_checks.check_mixture(config.data)
    if not path_checks.was_opened(config.data, workdir):  # else the run waits for what is away
        given_texts = [key for key in ("train", "validation") if {f"data.{key}", "data.text_field"} & set(keys)]
        path_checks.check_texts(config.data, keys=given_texts)
        path_checks.check_records(config.data, keys=given_texts)
    if "data.tokenizer" in keys:
        path_checks.check_tokenizer(config.data.tokenizer)
    if {"data.tokenizer", "model.vocab_size"} & set(given):
        Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    if config.train.eval_tasks_folder:
        check_folder(config.train.eval_tasks_folder, key="train.eval_tasks_folder")
    check_settings(config, workdir)


def _set_environment(config: config_lib.Config, values: flags.FlagValues, *, workdir: pathlib.Path) -> None:
    """Sets the environment variables of Neuron's software if this process trains on its devices, else of JAX's cache.

    Processes of one job would write the same entries of the cache; their launcher may name a folder for each.
    """
    machine, platforms = neuron_topology.HERE, os.environ.get("JAX_PLATFORMS", "")
    instance = neuron_topology.instance_to_serve(values.instance, platforms, machine=machine)
    if not instance:
        if not values.coordinator:
            compile_cache.use_default_folder(os.environ)
        return
    nodes, rank = values.num_processes or 1, values.process_id or 0
    host, _, port = values.coordinator.rpartition(":")
    topology = neuron_topology.Topology(
        instance,
        nodes=nodes,
        rank=rank,
        coordinator=host,
        port=int(port) if port.isdecimal() else neuron_topology.JAX_PORT,
        lnc=neuron_topology.lnc_of(os.environ),
        cores=values.cores,
    )
    # process 0 alone takes the trace
    profile = str((workdir / neuron_env.PROFILE_FOLDER).absolute()) if config.train.profile_steps and not rank else ""
    options = {"profile": profile, "config_flags": config.train.compiler_flags}
    computed = neuron_env.environment(config.precision, config.parallel, topology, current=os.environ, **options)
    os.environ.update(computed.variables)
    neuron_start.clear_way(os.environ, topology, neuron_topology.HERE)
    if rank == 0:
        say("environment", f"for {nodes} x {instance}")
        for note in computed.notes:
            print(note)


def _define(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags_lib.define_path(values, "workdir", "Run folder. The default is runs/NAME.", use="run")
    flags.DEFINE_bool("print_config", False, "Print the resolved config and its costs, then stop.", **options)
    flags.DEFINE_bool("begin_again", False, "Train from step 0 if the checkpoints of the run are lost.", **options)
    flags.DEFINE_integer(
        "stopped_code",
        0,
        "Exit code if a signal such as SIGTERM stops the run before its last step. The run is saved.",
        lower_bound=0,
        upper_bound=255,
        **options,
    )
    flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0, for several processes.", **options)
    flags.DEFINE_integer("num_processes", None, "Number of processes of the job, one per node.", **options)
    flags.DEFINE_integer("process_id", None, "Index of this process, from 0.", **options)
    flags.DEFINE_string("instance", "", "Type of the Trainium instance. The default is detected.", **options)
    flags.DEFINE_integer(
        "cores", 0, "NeuronCores of this instance to train on, as JAX sees them. 0 means all.", **options
    )
    flags.DEFINE_integer(
        "join_timeout_s", 300, "Longest wait for the other processes at the start, in seconds.", **options
    )
    flags.DEFINE_integer(
        "peer_timeout_s", 60, "All processes end if one sends no heartbeat for this many seconds.", **options
    )
    flags.DEFINE_integer(
        "stuck_timeout_s",
        300,
        "Shortest time without progress, in seconds, after which all processes end with code 124. 0 means never.",
        lower_bound=0,
        **options,
    )


if __name__ == "__main__":
    flags_lib.main(main)
