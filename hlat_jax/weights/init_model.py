"""The model and tokenizer of the weights that a run begins with, which its config takes over. Imports no JAX."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Collection
from typing import Any

import numpy as np

from hlat_jax.config import ModelConfig, typed
from hlat_jax.data import kept_tokenizer
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights.hf_config import architecture, model_config
from hlat_jax.weights.hf_files import is_hugging_face, tokenizer_file
from hlat_jax.weights.path_checks import FILES, WEIGHTS_FILE, check_checkpoint, check_hugging_face

# Keys of a model that change what the same weights compute.
OF_FUNCTION = (
    *("norm_eps", "rope_theta", "rope_scaling", "rope_factor"),
    *("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions"),
)
_PROBES = ("It is a truth universally acknowledged", "def f(x):\n    return 2 * x\n", "naïve — 12,345.6 € 東京")


def take_model(mutable: Any, *, given: Collection[str], workdir: pathlib.Path | None = None) -> list[str]:
    """Sets the model and tokenizer of a ConfigDict with `train.init_from` or `branch_from` to those of its weights.

    A run that has checkpoints takes its own. The weights themselves are opened, and checked, when the run begins; where
    there are none that can be read here, nothing changes.

    Args:
      mutable: changed in place.
      given: keys of the command line, which stay: "model.rope_theta".
      workdir: the run folder; None: there is none.

    Returns:
      Lines that say what was changed, and which given keys change the function of the weights.

    Raises:
      ValueError: a model that is not supported, or a damaged description of one.
    """
    key = "init_from" if mutable.train.init_from else "branch_from"
    path = mutable.train.init_from or mutable.train.branch_from.rpartition("@")[0]
    if not path:
        return []
    begun, source = workdir and _described(workdir), pathlib.Path(path).expanduser()
    try:
        folder, found = (workdir, begun) if begun else (source, _described(source))
    except ValueError as error:
        raise ValueError(f"train.{key}: {error}") from None
    if found is None:
        return []
    values, tokenizer = found
    others = {key: value for key, value in values.items() if value != mutable.model[key]}
    taken = {key: value for key, value in others.items() if f"model.{key}" not in given}
    changes = ", ".join(f"{key} {value} ({mutable.model[key]})" for key, value in taken.items())
    lines = [f"model            of {folder}; in parentheses, of config {mutable.name}: {changes}"] if changes else []
    lines += [
        f"warning: model.{key}={mutable.model[key]} changes what the weights of {folder} compute: it was {value}"
        for key, value in others.items()
        if key in OF_FUNCTION and key not in taken
    ]
    mutable.model.update(taken)
    if tokenizer and "data.tokenizer" not in given and not _fits(mutable.data.tokenizer, tokenizer):
        lines.append(f"tokenizer        {tokenizer}; that of config {mutable.name} has other ids")
        mutable.data.tokenizer = tokenizer
    return lines


def take_checked_model(mutable: Any, *, given: Collection[str], workdir: pathlib.Path | None = None) -> None:
    """Does what `take_model` does, prints its lines on stderr, and checks a path of the command line.

    Raises:
      ValueError: as `take_model`, or such a path holds no weights.
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
    """Returns whether two tokenizers give the same ids: a tokenizer.json may be converted from a .model."""
    return first.sha256 == second.sha256 or (
        np.array_equal(first.token_bytes, second.token_bytes)
        and all(np.array_equal(first.encode(text), second.encode(text)) for text in _PROBES)
    )


def stored_model(values: dict[str, Any], *, where: str) -> ModelConfig:
    """Returns the model config that was saved at `where`; keys added since take their defaults."""
    unknown = values.keys() - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise ValueError(
            f"{where}: the model has the unknown key {min(unknown)!r}; use the version of hlat_jax that wrote it."
        )
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    model = ModelConfig(
        **{name: typed(f"{where}: model.{name}", fields[name], value) for name, value in values.items()}
    )
    model.check()
    return model


def _fits(tokenizer: str, theirs: str) -> bool:
    try:
        return same_ids(Tokenizer(tokenizer), Tokenizer(theirs))
    except ValueError:  # no such file, or none that is read here: what it is begun with says so
        return False


def _described(folder: pathlib.Path) -> tuple[dict[str, Any], str] | None:
    """Returns (keys of the model that its weights come with, path of the tokenizer or ""); None if they are not there.

    Raises:
      ValueError: a model that is not supported.
    """
    if is_hugging_face(folder):
        path = folder / "config.json"
        check_hugging_face(folder)
        model = model_config(read_json(path), where=str(path))
        name = tokenizer_file(folder, vocab_size=model.vocab_size)
        return architecture(model), name and str((folder / name).absolute())  # fuse_qkv is chosen as they are read
    try:
        model, tokenizer = _of_weights(folder) if (folder / WEIGHTS_FILE).is_file() else _of_run(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # `trained.open_weights` has the reason
        return None
    return architecture(model) | {"fuse_qkv": model.fuse_qkv}, tokenizer


def _of_weights(folder: pathlib.Path) -> tuple[ModelConfig, str]:
    about = read_json(folder / WEIGHTS_FILE)
    tokenizer = about["tokenizer"] and str((folder / FILES / about["tokenizer"]).absolute())
    return stored_model(about["model"], where=str(folder)), tokenizer


def _of_run(folder: pathlib.Path) -> tuple[ModelConfig, str]:
    """Returns the model and tokenizer of a checkpoint, or of the newest one of a run folder."""
    steps = [path for path in folder.glob("checkpoints/*") if path.name.isdecimal()]
    newest = folder if (folder / "state").is_dir() else max(steps, key=lambda path: int(path.name))
    saved = read_json(newest / "run/metadata", allow_nan=True)["metadata"]
    kept = kept_tokenizer.find_kept(newest.resolve().parents[1], sha256=saved["tokenizer_sha256"])
    tokenizer = saved["config"]["data"]["tokenizer"] if kept is None else str(kept)
    return stored_model(saved["config"]["model"], where=str(folder)), tokenizer
