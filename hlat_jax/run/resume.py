"""Starts a run from its own checkpoint, from another run's as a branch, or from given weights, and records settings.

A run resumes only with the settings that its checkpoint records. The events "saved" and "rewound" have a `step`. After
"rewound" the checkpoints of later steps no longer count.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Collection
from typing import Any

import jax

from hlat_jax.config import ROPE_SCALING, Config, ModelConfig, count_text
from hlat_jax.data import kept_tokenizer, path_checks
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.local_paths import local_path
from hlat_jax.host import distributed, neuron_env
from hlat_jax.host.console import say
from hlat_jax.ops.registry import OPS
from hlat_jax.program import RunProgram
from hlat_jax.resolve import branch_source, resolve
from hlat_jax.run import budget
from hlat_jax.run.drift import complete, drift_of
from hlat_jax.run.goodput import EVENTS_FILE, Ledger, newest_saved, read_events
from hlat_jax.store import atomic_files
from hlat_jax.store.checkpoint import DigestError, DigestProblem, Restored, read_checkpoint
from hlat_jax.store.checkpoint_checks import problem_on_disk, saved_run
from hlat_jax.store.config_diff import differences
from hlat_jax.store.metrics import DISCARDED_FILE, ROWS_FILE, Silent, copy_rows, damaged_lines, read_rows
from hlat_jax.weights.init_model import OF_FUNCTION, same_ids
from hlat_jax.weights.path_checks import check_step
from hlat_jax.weights.trained import Weights, open_weights

EXPORTS = "huggingface"  # the folder of exports

# JAX settings that change the numbers of a step: as settings of the run, they are compared. Others are not recorded.
_JAX_NUMERICS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_allow_f16_reductions",
    "jax_softmax_custom_jvp",
)
_XLA_NUMERICS = ("fast_math", "fast_min_max", "excess_precision", "denormal")  # in the names of XLA's flags

# Keys that may differ from the model of given weights: implementations, initialization, and the sequence length.
_FREE = (
    *("max_positions", "init_std", "depth_scaled_init", "layer_loop", "remat", "allow_nki_on_trn1"),
    *OPS,
)


def settings_of(program: RunProgram, *, tokenizer: Tokenizer, batches: TrainBatches) -> dict[str, Any]:
    """Returns the settings in a checkpoint, with config, resolved implementations, input hashes and JAX's settings."""
    words = os.environ.get("XLA_FLAGS", "").split()
    flags = sorted(word for word in words if any(part in word.partition("=")[0] for part in _XLA_NUMERICS))
    in_jax = {name.upper(): getattr(jax.config, name) for name in _JAX_NUMERICS if hasattr(jax.config, name)}
    return {
        "config": program.config.to_dict(),
        "implementations": {key: getattr(program.model, key) for key in (*OPS, "remat", "layer_loop")},
        "tokenizer_sha256": tokenizer.sha256,
        "tokenizer": {  # which files beside a tokenizer.json choose
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id if program.config.data.prepend_bos else None,
        },
        "manifest": batches.manifest,
        "jax": in_jax | {"XLA_FLAGS": " ".join(flags)},
    }


def saved_config(saved: dict[str, Any]) -> Config:
    """Returns the config in the settings of a checkpoint. Keys newer than the checkpoint have their defaults."""
    return resolve(complete(saved["config"]))


def write_settings(config: Config, workdir: pathlib.Path, *, remat: dict[str, Any] | None) -> None:
    """Writes config, environment and, if `model.remat` is a budget, the choice made for it into the run folder.

    A run that resumes with the tokenizer in its folder still records the path of the original file.
    """
    values = config.to_dict()
    if pathlib.Path(config.data.tokenizer).parent == (workdir / kept_tokenizer.FOLDER).absolute():
        values["data"]["tokenizer"] = path_checks.recorded_value(workdir, "data.tokenizer") or config.data.tokenizer
    atomic_files.write_json(workdir / "config.json", values)
    atomic_files.write_json(workdir / "environment.json", neuron_env.variables_to_record(os.environ))
    if remat is not None:
        atomic_files.write_json(workdir / budget.RECORD_FILE, remat)


def open_branch(
    program: RunProgram, workdir: pathlib.Path, *, settings: dict[str, Any], digest_problem: DigestProblem | None = None
) -> Restored:
    """Returns the checkpoint of `train.branch_from`, and copies the metrics of its run up to it into `workdir`.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, or its run had another model, data or precision.
    """
    source, step = branch_source(program.config.train)
    asked, folder = f"train.branch_from={program.config.train.branch_from}", local_path(source)
    if folder.absolute().resolve() == workdir.absolute().resolve():
        raise ValueError(f"{asked} is the run folder itself. Give the branch another one with --workdir.")
    check_step(source, step, key=asked)
    checkpoint = folder.absolute() / "checkpoints" / str(step)
    if problem := problem_on_disk(checkpoint, deep=True):
        raise ValueError(f"{asked}: the checkpoint of step {step} is damaged ({problem}). Use another one.")
    if drift := drift_of(saved_run(checkpoint)["metadata"], settings, step=step, branch=True):
        lines = "\n  ".join(drift)
        raise ValueError(
            f"{asked}: that run had settings that a branch must keep:\n  {lines}\nRestore these settings. A branch may "
            "change optimizer except its name, train, parallel, held-out text, implementations and JAX settings."
        )
    try:
        restored = read_checkpoint(checkpoint, program.abstract_state, digest_problem=digest_problem)
    except DigestError as error:
        raise ValueError(f"{asked}: the checkpoint of step {step} is damaged ({error}). Use another one.") from None
    if distributed.is_first():
        copy_rows(folder, workdir, last_step=restored.step)
    say("branch", f"from step {step} of {folder.absolute()}, with its state, optimizer and data position")
    return restored


def open_init(config: Config, tokenizer: Tokenizer, *, given: Collection[str] = ()) -> Weights:
    """Opens the weights of `train.init_from`, with fp32 masters if it has them. Reads no arrays yet.

    Keys of the command line, `given`, that are in `OF_FUNCTION` may differ from the model of the weights. With
    `model.rope_scaling` in `given`, so may the keys that the scaling reads.

    Raises:
      ValueError: the weights are missing, damaged, or belong to another model or vocabulary. The message has details.
    """
    path = config.train.init_from
    try:
        weights = open_weights(path, masters=True, fuse_qkv=config.model.fuse_qkv)
    except ValueError as error:
        raise ValueError(f"train.init_from: {error}") from None
    scaled = ROPE_SCALING[config.model.rope_scaling] if "model.rope_scaling" in given else ()
    names = {key for key in OF_FUNCTION if f"model.{key}" in given} | set(scaled)
    changed = {key: getattr(config.model, key) for key in names}
    expected = dataclasses.replace(weights.model, **changed)
    if others := differences(settings_of_weights(expected), settings_of_weights(config.model)):
        lines = "\n  ".join(others)
        raise ValueError(
            f"train.init_from={path} holds the weights of another model:\n  {lines}\nSet these keys to the values "
            "in the checkpoint, or leave them out. For another model.fuse_qkv, begin with their `hf export`."
        )
    if weights.tokenizer:
        theirs = weights.open_tokenizer()
        if not same_ids(theirs, tokenizer):
            raise ValueError(
                f"data.tokenizer={tokenizer.path} has other ids than the tokenizer of train.init_from. "
                f"Set data.tokenizer={theirs.path}."
            )
    return weights


def with_weights(state: Any, weights: Weights, *, config: Config) -> tuple[Any, dict[str, Any]]:
    """Returns a new run's state with these weights, and the record of their origin. Prints the recipe.

    Dtypes and shardings come from the weights in `state`, which are deleted if they are arrays.
    """

    def read(drawn: Any) -> Any:
        [dtype] = {leaf.dtype for leaf in jax.tree.leaves(drawn)}
        shardings = jax.tree.map(lambda leaf: leaf.sharding, drawn)
        for leaf in jax.tree.leaves(drawn):
            if isinstance(leaf, jax.Array):
                leaf.delete()  # before the weights that replace them are read
        return weights.restore(shardings, dtype=dtype)

    state = state | {"params": read(state["params"])}
    if "master" in state["opt_state"]:
        state["opt_state"] = state["opt_state"] | {"master": read(state["opt_state"]["master"])}
    rate, data = config.optimizer, config.data
    end = "" if rate.schedule == "constant" else f" to {rate.peak_lr * rate.min_lr_ratio:g} at {rate.horizon_steps:,}"
    warmup, steps = (count_text(count, "step") for count in (rate.warmup_steps, config.train.num_steps))
    say("weights", f"from {weights.folder}, step {weights.step}, with a new optimizer state")
    say(
        "recipe",
        f"{rate.name}, learning rate {rate.peak_lr:g} after {warmup} of warm-up, {rate.schedule}{end}, {steps} of "
        f"{data.batch_size:,} x {data.seq_len:,} tokens",
    )
    return state, {"folder": str(weights.folder), "step": weights.step}


def settings_of_weights(model: ModelConfig) -> dict[str, Any]:
    """Returns path -> value of the settings on which the weights of a model depend, all except `_FREE`."""
    unread = {key for keys in ROPE_SCALING.values() for key in keys} - {*ROPE_SCALING[model.rope_scaling]}
    free = {*_FREE, *unread}
    return {f"model.{key}": value for key, value in vars(model).items() if key not in free}


def check_new_run(workdir: pathlib.Path, *, ledger: Ledger | Silent, begin_again: bool) -> None:
    """Checks that a run without a checkpoint has never had one. Process 0 calls it.

    Raises:
      ValueError: the run had a checkpoint, and `begin_again` is false.
    """
    last, step = _last_row(workdir), newest_saved(read_events(workdir))
    if step and not begin_again:
        raise ValueError(
            f"{workdir / 'checkpoints'} holds no checkpoint, but one of step {step} was saved ({EVENTS_FILE}), and the "
            f"rows reach step {last}. Put the checkpoints back, or give another --workdir, or give --begin_again to "
            f"train from step 0 with the rows moved to {DISCARDED_FILE}."
        )
    if step:
        ledger.event("rewound", step=0)
    if last:
        reason = "--begin_again" if step else "no checkpoint was saved"
        say("beginning again", f"at step 0 ({reason}), and rows up to step {last} move to {DISCARDED_FILE}")


def report_losses(workdir: pathlib.Path, step: int, *, ledger: Ledger | Silent) -> None:
    """Prints the lost checkpoints and rows of a run that resumes at the checkpoint of `step`. Process 0 calls it."""
    newest = newest_saved(read_events(workdir))
    if newest > step:
        print(
            f"the checkpoint of step {newest} is gone or damaged, and the rows reach step {_last_row(workdir)}. The "
            f"run continues from the checkpoint of step {step} and trains the later steps again"
        )
        ledger.event("rewound", step=step)
    if newest != step:
        ledger.event("saved", step=step)
    print_missing_rows(workdir, step)
    if damaged := damaged_lines(workdir / ROWS_FILE):
        print(
            f"{ROWS_FILE} has {count_text(len(damaged), 'damaged line')}, moved to {DISCARDED_FILE}. Such rows stay "
            f"missing ({damaged[0]})"
        )


def print_missing_rows(workdir: pathlib.Path, step: int) -> None:
    """Prints how many steps up to the checkpoint of `step` have no row."""
    there = {row["step"] for row in read_rows(workdir / ROWS_FILE) if "loss" in row}
    if missing := [each for each in range(1, step + 1) if each not in there]:
        print(
            f"{ROWS_FILE} lacks {count_text(len(missing), 'row')} of the {step:,} steps up to the checkpoint (the "
            f"first for step {missing[0]}). Such rows stay missing"
        )


def _last_row(workdir: pathlib.Path) -> int:
    return max((row["step"] for row in read_rows(workdir / ROWS_FILE) if "loss" in row), default=0)


def set_exports_aside(workdir: pathlib.Path, step: int) -> None:
    """Moves exports of steps after `step` aside, as `metrics.rewind` moves rows, since the run repeats these steps."""
    for path in (workdir / EXPORTS).glob("*"):
        if path.name.isdecimal() and int(path.name) > step:
            aside = path.with_name(f"{path.name}.discarded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"export of step {path.name} moved to {aside}, as this run resumes from step {step}")
