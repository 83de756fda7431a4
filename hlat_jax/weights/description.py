"""Describes weights at a path by the small files next to them, without reading an array. Imports no JAX."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from hlat_jax.config import ModelConfig, convert_value
from hlat_jax.data import kept_tokenizer
from hlat_jax.store.config_diff import without_gone
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights.hf_config import model_config
from hlat_jax.weights.hf_files import (
    begins_texts_with_bos,
    ids_that_end_a_text,
    is_hugging_face,
    kept_companions,
    tokenizer_file,
)
from hlat_jax.weights.path_checks import check_hugging_face


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """Weights of a run or of Hugging Face.

    Attributes:
      folder: a checkpoint or a Hugging Face folder.
      model: the config, in which `auto` implementations are not resolved yet.
      step: the number of updates, or 0 for imported weights.
      tokenizer: the argument of `data.tokenizer.Tokenizer`, or "" without a tokenizer.
      tokenizer_sha256: the checksum of the tokenizer if its file is outside `folder`, else "".
      begins_with_bos: whether texts begin with BOS, for a run by data.prepend_bos.
      stop_ids: the tokens that end a generated text, apart from the tokenizer's EOS.
      companions: the folder with the config.json, generation_config.json and tokenizer files of the Hugging Face
        weights, or of the weights that the run began with. None without any.
    """

    folder: pathlib.Path
    model: ModelConfig
    step: int = 0
    tokenizer: str = ""
    tokenizer_sha256: str = ""
    begins_with_bos: bool = False
    stop_ids: tuple[int, ...] = ()
    companions: pathlib.Path | None = None


def describe(folder: pathlib.Path) -> Description | None:
    """Returns the weights of a folder, or of the newest checkpoint of a run, or None if it has none.

    Unlike `trained.open_weights`, it does not compare files with their checksums, or report errors.

    Raises:
      ValueError: a Hugging Face folder without a config.json, or of a model that is not supported.
    """
    if is_hugging_face(folder):
        check_hugging_face(folder)
        path = folder / "config.json"
        return describe_hugging_face(folder, model_config(read_json(path), where=str(path)))
    try:
        steps = [path for path in folder.glob("checkpoints/*") if path.name.isdecimal()]
        newest = folder if (folder / "state").is_dir() else max(steps, key=lambda path: int(path.name))
        return describe_checkpoint(newest.resolve(), read_json(newest / "run/metadata", allow_nan=True))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def describe_hugging_face(folder: pathlib.Path, model: ModelConfig) -> Description:
    """Returns the description of a Hugging Face folder with this `model` in its config.json.

    Raises:
      ValueError: a file next to the weights is damaged. The message names it.
    """
    name = tokenizer_file(folder, vocab_size=model.vocab_size)
    return Description(
        folder=folder,
        model=model,
        tokenizer=name and os.path.abspath(folder / name),
        begins_with_bos=begins_texts_with_bos(folder),
        stop_ids=ids_that_end_a_text(folder),
        companions=folder,
    )


def describe_checkpoint(folder: pathlib.Path, record: dict[str, Any], *, step: int = 0) -> Description:
    """Returns the description of a checkpoint of a run from its record, `checkpoint_checks.saved_run`."""
    config, sha256 = record["metadata"]["config"], record["metadata"]["tokenizer_sha256"]
    run = folder.parent.parent
    kept = kept_tokenizer.find_kept(run, sha256=sha256) if sha256 else None
    return Description(
        folder=folder,
        model=stored_model(config["model"], where=str(folder)),
        step=step,
        tokenizer=config["data"]["tokenizer"] if kept is None else str(kept),
        tokenizer_sha256=sha256,
        begins_with_bos=config["data"]["prepend_bos"],
        **kept_companions(run),
    )


def stored_model(values: dict[str, Any], *, where: str) -> ModelConfig:
    """Returns the model config that was saved at `where`. Keys added since take their defaults.

    Raises:
      ValueError: an unknown key, or an invalid value.
    """
    values = without_gone("model", values)
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    if unknown := values.keys() - fields.keys():
        raise ValueError(
            f"{where}: the model has the unknown key {min(unknown)!r}. Use the version of hlat_jax that wrote it."
        )
    model = ModelConfig(
        **{name: convert_value(f"{where}: model.{name}", fields[name], value) for name, value in values.items()}
    )
    model.check()
    return model
