"""Sets the config of a run to the model and tokenizer of the weights that it begins with. Imports no JAX."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import ROPE_SCALING, Config
from hlat_jax.data.path_checks import recorded_value
from hlat_jax.data.tokenizer import Tokenizer, resolve_with_tokenizer
from hlat_jax.host.console import labelled
from hlat_jax.store.bucket import local_copy
from hlat_jax.weights.description import describe
from hlat_jax.weights.hf_config import architecture
from hlat_jax.weights.path_checks import check_checkpoint, check_step

# Keys of a model that change what the same weights compute.
OF_FUNCTION = (
    *("norm_eps", "rope_theta", "rope_scaling", "sliding_window", "sliding_window_layers"),
    *sorted({key for keys in ROPE_SCALING.values() for key in keys}),
)
_PROBES = ("It is a truth universally acknowledged", "def f(x):\n    return 2 * x\n", "naïve — 12,345.6 € 東京")


def take_model(mutable: Any, *, given: Collection[str], workdir: pathlib.Path | None = None) -> list[str]:
    """Sets model, tokenizer and BOS of a ConfigDict from the weights of its `train.init_from` or `branch_from`.

    A run that has checkpoints takes its own. The weights themselves are opened, and checked, when the run begins. If
    none can be read here, nothing changes.

    Args:
      mutable: the ConfigDict, changed in place.
      given: keys of the command line, which stay, such as "model.rope_theta".
      workdir: the run folder, if there is one.

    Returns:
      Lines that list the changes, and the given keys that change the function of the weights.

    Raises:
      ValueError: a model that is not supported, or a damaged description of one.
    """
    key = "init_from" if mutable.train.init_from else "branch_from"
    path = mutable.train.init_from or mutable.train.branch_from.rpartition("@")[0]
    if not path:
        return []
    begun = workdir and describe(workdir)
    folder = workdir if begun else local_copy(path, key=f"train.{key}")
    try:
        weights = begun or describe(folder)
    except ValueError as error:
        raise ValueError(f"train.{key}: {error}") from None
    if weights is None:
        return []
    values, tokenizer = architecture(weights.model), weights.tokenizer
    if weights.companions != weights.folder:  # for a Hugging Face folder it is chosen as the weights are read
        values["fuse_qkv"] = weights.model.fuse_qkv
    others = {key: value for key, value in values.items() if value != mutable.model[key]}
    taken = {key: value for key, value in others.items() if f"model.{key}" not in given}
    changes = ", ".join(f"{key} {value} ({mutable.model[key]})" for key, value in taken.items())
    lines = [labelled("model", f"of {folder}; in parentheses, of config {mutable.name}: {changes}")] if changes else []
    lines += [
        f"warning: model.{key}={mutable.model[key]} changes what the weights of {folder} compute: it was {value}"
        for key, value in others.items()
        if key in OF_FUNCTION and key not in taken
    ]
    mutable.model.update(taken)
    begins_scaling = "model.rope_scaling" in given and values["rope_scaling"] == "none"
    reads = "rope_original_positions" in ROPE_SCALING.get(mutable.model.rope_scaling, ())
    if begins_scaling and reads and "model.rope_original_positions" not in given:
        mutable.model.rope_original_positions = values["max_positions"]
        lines.append(labelled("model", f"rope_original_positions {values['max_positions']}, those of {folder}"))
    if tokenizer and "data.tokenizer" not in given and not _fits(mutable.data.tokenizer, tokenizer):
        other = f"; that of config {mutable.name} has other ids" if mutable.data.tokenizer else ""
        lines.append(labelled("tokenizer", f"{tokenizer}{other}"))
        mutable.data.tokenizer = tokenizer
    if tokenizer and "data.prepend_bos" not in given and weights.begins_with_bos != mutable.data.prepend_bos:
        begins = f"texts begin with{'out' * mutable.data.prepend_bos} BOS, as those of {folder}"
        lines.append(labelled("tokenizer", begins))
        mutable.data.prepend_bos = weights.begins_with_bos
    return lines


def check_starts(train: Any, workdir: pathlib.Path, *, given: Collection[str]) -> None:
    """Raises ValueError for a path of weights to begin with that does not exist, or with which the run did not begin.

    A run that resumes does not read them, so they may be gone. A path that it was not given before is still an error.
    """
    resumes = any(workdir.glob("checkpoints/*"))
    for key in ("train.init_from", "train.branch_from"):
        value = train[key.removeprefix("train.")]
        recorded = recorded_value(workdir, key) if resumes else None
        if not value or (resumes and (key not in given or recorded == value)):
            continue
        path, _, step = value.rpartition("@") if key == "train.branch_from" else (value, "", "")
        check_checkpoint(path, key=key)
        if step.isdecimal():
            check_step(path, int(step), key=f"{key}={value}")
        before, now = (os.path.abspath(os.path.expanduser(path or "")) for path in (recorded, value))
        if key == "train.init_from" and recorded is not None and before != now:
            raise ValueError(
                f"{key}={value}: the run in {workdir} began with {recorded or 'random weights'}. To resume it, leave "
                "the key out, or give this run another folder with --workdir."
            )


def parse_config(argv: Sequence[str], define: Callable[[flags.FlagValues], None]) -> tuple[Config, flags.FlagValues]:
    """Returns the resolved config of a command line, with the model of its initial weights, and its other flags.

    If there is a flag --workdir, by default runs/NAME, with a run in it, model and tokenizer come from this run.
    """
    mutable, values = flags_lib.parse(argv, define)
    workdir = pathlib.Path(values.workdir or f"runs/{mutable.name}") if "workdir" in values else None
    take_checked_model(mutable, given=flags_lib.given_keys(values), workdir=workdir)
    return resolve_with_tokenizer(mutable, workdir=workdir), values


def take_checked_model(mutable: Any, *, given: Collection[str], workdir: pathlib.Path | None = None) -> None:
    """Calls `take_model`, prints its lines on stderr, and checks a path of the command line.

    Raises:
      ValueError: as for `take_model`, or the path holds no weights.
    """
    for line in take_model(mutable, given=given, workdir=workdir):
        print(line, file=sys.stderr)
    if workdir is not None and any(workdir.glob("checkpoints/*")):
        return  # the run has weights of its own, and what it began with may be gone
    starts = {"init_from": mutable.train.init_from, "branch_from": mutable.train.branch_from.rpartition("@")[0]}
    for key, path in starts.items():
        if path and f"train.{key}" in given:
            check_checkpoint(path, key=f"train.{key}")


def same_ids(first: Tokenizer, second: Tokenizer) -> bool:
    """Returns whether two tokenizers give the same ids, such as a .model and a tokenizer.json made from it."""
    return first.sha256 == second.sha256 or (
        np.array_equal(first.token_bytes, second.token_bytes)
        and all(np.array_equal(first.encode(text), second.encode(text)) for text in _PROBES)
    )


def _fits(tokenizer: str, theirs: str) -> bool:
    try:
        return same_ids(Tokenizer(tokenizer), Tokenizer(theirs))
    except ValueError:  # no such file, or none that is read here: what it is begun with says so
        return False
