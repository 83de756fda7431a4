"""Config files, shipped or of one's own: found, run, checked with the line of a fault; their paths made absolute."""

from __future__ import annotations

import functools
import glob
import importlib.util
import linecache
import os
import pathlib
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hlat_jax.config import SECTIONS, check_section, field_of, typed
from hlat_jax.facts import synonyms
from hlat_jax.facts.names import nearest

# Paths in a config file are relative to it, those in a shipped one to the working directory.
_TEXT_KEYS = ("data.train", "data.validation", "data.tokenizer")
PATH_KEYS = (*_TEXT_KEYS, "model.ops_table", "train.init_from", "train.branch_from", "train.eval_tasks_folder")


def load(name_or_path: str) -> Any:
    """Returns the ConfigDict of a shipped config (`tiny`) or of a file (`path/to/run.py`), its `name` filled in.

    Raises:
      ValueError: no such name or file (the message has the nearest name), or a file that does not run, has no
        `get_config`, or sets a value of a wrong type (the message has the line).
    """
    names = shipped()
    is_path = name_or_path.endswith(".py")
    path = pathlib.Path(name_or_path) if is_path else names.get(name_or_path)
    if path is None:
        raise ValueError(f"--config={name_or_path}: no such config. {_meant_by(name_or_path, names)}")
    if not path.is_file():
        raise ValueError(f"--config={name_or_path}: no such file. Shipped configs: {', '.join(names)}.")
    spec = importlib.util.spec_from_file_location(f"hlat_jax_config_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ValueError("defines no get_config(); add one that edits and returns hlat_jax.config.default().")
        config = module.get_config()
        if not hasattr(config, "to_dict"):
            raise ValueError(f"get_config() returns {config!r:.100}; end it with `return c`, the config it edits.")
    except Exception as error:  # anything may go wrong in a user's file
        raise ValueError(_file_error(path, error)) from error
    _check_values(config, path)
    if path.resolve().parent != config_folder().resolve():
        _anchor_paths(config, path.parent.resolve(), keys=PATH_KEYS)
    config.name = path.stem
    return config


def _meant_by(word: str, names: dict[str, pathlib.Path]) -> str:
    """Returns the rest of the error for a --config that is neither a shipped name nor a path that ends in .py."""
    path = pathlib.Path(word)
    is_path = path.suffix or "/" in word or path.exists()
    hint = f"It is one of {', '.join(names)}, or a path that ends in .py." if is_path else nearest(word, names)
    if path.is_dir():
        return f"{hint} A folder is given as --workdir={word} beside the --config of its run."
    if path.suffix in (".model", ".json"):
        return f"{hint} A tokenizer is given as --config.data.tokenizer={word}."
    if path.suffix in (".jsonl", ".txt", ".md", ".parquet", ".arrow"):
        return f"{hint} Text is given as --config.data.train={word}."
    return hint if is_path else f"{hint} Paths end in .py."


def _file_error(path: pathlib.Path, error: Exception) -> str:
    """Returns the file, the line and the fault of an error in a config file."""
    where = str(path.absolute())
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    if isinstance(error, SyntaxError) and error.filename == where:
        lines, message = [error.lineno or 0], f"SyntaxError: {error.msg}"
    elif isinstance(error, ValueError):
        message = str(error)
    elif isinstance(error, (AttributeError, KeyError, TypeError)):  # of a ConfigDict: an unknown key or a wrong type
        cause = error.args[0] if error.args else error
        cause = cause.args[0] if isinstance(cause, KeyError) else cause  # str(KeyError) puts quotes around its text
        message = re.sub(r"^'\w+'(?=$| Did you)", r"there is no key \g<0>.", " ".join(str(cause).split()))
    else:
        message = f"{type(error).__name__}: {error}"
    if not lines:
        return f"{path}: {message}"
    source = linecache.getline(where, lines[-1]).strip()
    kinds = re.search(r"field '(\w+)'.*\. (.*) is of original type <class '(\w+)'>.* to type <class '(\w+)'>", message)
    if kinds:
        message = f"{kinds[1]} must be {kinds[4]}, and {kinds[2]} is {kinds[3]}."
    return f"{path}, line {lines[-1]}, `{source}`: {message}"


def _check_values(config: Any, path: pathlib.Path) -> None:
    """Raises ValueError for a section, key or value in a config file that there is not; it has the line, if found."""
    for section, values in config.to_dict().items():
        key = ""
        try:
            if section != "name":
                check_section(section, values)
                for key, value in values.items():
                    meant, answer = synonyms.meant_by(key)
                    if key not in SECTIONS[section].__dataclass_fields__ and (meant or answer):
                        hint = answer or f"Did you mean {' and '.join(map(repr, meant))}?"
                        raise ValueError(f"config has no key {section}.{key}. {hint}")
                    field = field_of(section, key)
                    if value is not None:  # left to `resolve`, or for the command line
                        typed(f"{section}.{key}", field, value)
        except ValueError as error:
            raise ValueError(f"{path}{_line_of(section, key, path)}: {error}") from None


def _line_of(section: str, key: str, path: pathlib.Path) -> str:
    """Returns ", line 7", where a config file sets a key last; "" if no line is found."""
    lines = list(enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1))
    named = rf"\b{re.escape(key or section)}\b[\"']?\]?\s*[+*/-]?[=:][^=]"
    for pattern in (rf"\b{re.escape(section)}\b.*{named}", named):  # sections share names of keys, such as seed
        found = [number for number, line in lines if re.search(pattern, line)]
        if found:
            return f", line {found[-1]}"
    return ""


def make_text_paths_absolute(mutable: Any) -> None:
    """Makes relative paths of text and tokenizer in a ConfigDict absolute, from the working directory.

    URLs, package:NAME and a share of data.train stay as they are.
    """
    _anchor_paths(mutable, pathlib.Path.cwd(), keys=_TEXT_KEYS)


def _anchor_paths(config: Any, folder: pathlib.Path, *, keys: Sequence[str]) -> None:
    """Makes relative paths absolute: from `folder`, or from the working directory where only that has them."""
    places = [place for place in (str(folder), os.getcwd()) if not set(",;") & set(place)]  # which separate paths

    def anchored(path: str) -> str:
        plain = path.strip()
        # package:NAME, URLs, a share of data.train
        if not plain or ":" in plain or plain.endswith("%") or plain.startswith("~") or os.path.isabs(plain):
            return path
        words = [f"{glob.escape(place) if glob.has_magic(plain) else place}/{plain}" for place in places]
        return next(filter(exists, words), words[0])

    def anchored_step(spec: str) -> str:
        run, sign, step = spec.rpartition("@")
        return anchored(run) + sign + step

    for section, key in (path.split(".") for path in keys):
        value = config[section][key] if section in config and key in config[section] else ""
        if isinstance(value, str) and places:
            anchored_text = functools.partial(map_paths, anchored)
            own: dict[str, Callable[[str], str]]
            own = {"train": anchored_text, "validation": anchored_text, "branch_from": anchored_step}
            config[section][key] = own.get(key, anchored)(value)


def map_paths(change: Callable[[str], str], spec: str) -> str:
    """Returns `PATHS` or `NAME=PATHS;NAME=PATHS` with each path changed."""
    parts = [re.fullmatch(r"(\s*[A-Za-z]\w*\s*=)?(.*)", part, re.DOTALL) for part in spec.split(";")]
    return ";".join((part[1] or "") + ",".join(map(change, part[2].split(","))) for part in parts if part)


def exists(path: str) -> bool:
    """Returns whether there is a file, a folder or a match of a glob; of one with `**`, the folder before it."""
    head, deep, _ = path.partition("**")
    return os.path.exists(path) or any(glob.iglob((os.path.dirname(head) or os.curdir) if deep else path))


def shipped() -> dict[str, pathlib.Path]:
    """Returns the file of every shipped config by its name."""
    return {path.stem: path for path in sorted(config_folder().glob("*.py")) if not path.stem.startswith("_")}


def config_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs: inside an installed package, or beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
