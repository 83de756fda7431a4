"""Reads the files next to the weights in a Hugging Face folder. Imports no JAX."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.store.atomic_files import write_whole
from hlat_jax.store.typed_json import read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = ("float32", "bfloat16")  # of exports
# Files that are copied along with the weights.
COMPANIONS = (
    *("config.json", "generation_config.json", "tokenizer.model", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
KEPT = "huggingface_files"  # in the folder of a run that began with weights of Hugging Face
_NATIVE, _JSON = "tokenizer.model", "tokenizer.json"  # the native one is preferred: it needs no extra package


def is_hugging_face(folder: pathlib.Path) -> bool:
    """Returns whether a folder has Hugging Face weights, or a config.json of one of their models."""
    if (folder / INDEX_FILE).is_file() or any(folder.glob("*.safetensors")):
        return True
    try:  # a run folder has a config.json too
        return not {"model_type", "architectures"}.isdisjoint(_json_if_there(folder / "config.json"))
    except ValueError:  # damaged, and no weights beside it
        return False


def companions(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns name -> path of the files of a folder that are copied along with its weights."""
    return {name: folder / name for name in COMPANIONS if (folder / name).is_file()}


def keep_companions(source: pathlib.Path | None, workdir: pathlib.Path) -> None:
    """Copies the files next to the weights that a new run begins with, if any, into its folder, for its exports."""
    shutil.rmtree(workdir / KEPT, ignore_errors=True)  # of a start before the first checkpoint
    if source is not None and (source / "config.json").is_file():
        (workdir / KEPT).mkdir()
        for name, path in companions(source).items():
            write_whole(workdir / KEPT / name, path.read_bytes())


def kept_companions(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns the fields `companions` and `stop_ids` of `trained.Weights` for a run folder."""
    folder = workdir / KEPT
    if not (folder / "config.json").is_file():
        return {}
    return {"companions": folder, "stop_ids": ids_that_end_a_text(folder)}


def tokenizer_file(folder: pathlib.Path, *, vocab_size: int) -> str:
    """Returns the name of the tokenizer file of a folder; "" if there is none.

    Tokens that were added to a native one, and that a model of `vocab_size` has rows for, are only in tokenizer.json.
    """
    present = [name for name in (_NATIVE, _JSON) if (folder / name).is_file()]
    if len(present) < 2:
        return "".join(present)
    added = added_tokens(folder)
    try:
        known = Tokenizer(str(folder / _NATIVE)).has_tokens(added)
    except ValueError:  # of another kind than SentencePiece
        return _JSON
    return _NATIVE if known or max(added) >= vocab_size else _JSON


def begins_texts_with_bos(folder: pathlib.Path) -> bool:
    """Returns whether transformers puts BOS before a text with the tokenizer of a folder, from its files.

    As in transformers 5, a tokenizer.json decides, and `add_bos_token` in other files does not.

    Raises:
      ValueError: a file is damaged. The message names it.
    """
    settings, path = _json_if_there(folder / "tokenizer_config.json"), folder / "tokenizer.json"
    if path.is_file():
        after = read_json(path).get("post_processor") or {}
        try:
            templates = [each.get("single") or [{}] for each in after.get("processors", [after])]
            return any("SpecialToken" in pieces[0] for pieces in templates)
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{path} has the post_processor {str(after)[:80]}. Fetch that file again.") from None
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    kind = settings.get("tokenizer_class")
    return isinstance(kind, str) and kind.startswith("Llama")  # its default


def ids_that_end_a_text(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns the tokens at which transformers ends a generation, from generation_config.json, or else config.json.

    Raises:
      ValueError: a file is damaged, or has a value that is not a token id. The message names it.
    """
    path = folder / "generation_config.json"
    path = path if path.is_file() else folder / "config.json"
    named = _json_if_there(path).get("eos_token_id")
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(type(token) is not int for token in ids):
        raise ValueError(f"{path}: eos_token_id={named!r} must be a token id or a list of token ids.")
    return tuple(ids)


def added_tokens(folder: pathlib.Path) -> dict[int, str]:
    """Returns id -> text of the tokens that files next to a tokenizer add.

    Raises:
      ValueError: a file is damaged. The message names it.
    """
    of_texts = _json_if_there(folder / "added_tokens.json")
    settings = _json_if_there(folder / "tokenizer_config.json")
    of_ids = settings.get("added_tokens_decoder") or {}
    try:
        of_texts_by_id = {int(token): text for text, token in of_texts.items()}
        return of_texts_by_id | {int(token): content["content"] for token, content in of_ids.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{folder}: added_tokens.json, or added_tokens_decoder in tokenizer_config.json, does not give each token "
            "an id. Fetch both again."
        ) from None


def _json_if_there(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
