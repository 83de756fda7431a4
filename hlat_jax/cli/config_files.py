"""Finds, runs and checks config files, shipped or the user's, and makes their paths absolute."""

from __future__ import annotations

import glob
import linecache
import os
import pathlib
import re
import runpy
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hlat_jax.config import PATH_KEYS, check_section, convert_value, field_of
from hlat_jax.facts.local_paths import local_path
from hlat_jax.facts.names import nearest

# Paths in a config file are relative to it, those in a shipped one to the working directory.
_TEXT_KEYS = ("data.train", "data.validation", "data.tokenizer")
ANCHORED_KEYS = (*_TEXT_KEYS[:2], *PATH_KEYS)


def load(name_or_path: str) -> Any:
    """Returns the ConfigDict of a shipped config (`tiny`) or of a file (`path/to/run.py`), its `name` filled in.

    Raises:
      ValueError: there is no such name or file, and the message has the nearest name. Or the file does not run, has no
        `get_config`, or sets a value of a wrong type.
    """
    names = shipped_configs()
    is_path = name_or_path.endswith(".py")
    path = local_path(name_or_path, key="--config") if is_path else names.get(name_or_path)
    if path is None:
        raise ValueError(
            f"--config={name_or_path} is not a shipped config, nor a path that ends in .py. "
            f"{nearest(name_or_path, names)}"
        )
    if not path.is_file():
        raise ValueError(f"--config={name_or_path} does not exist. The shipped configs are {', '.join(names)}.")
    try:
        module = runpy.run_path(str(path.absolute()))
        if "get_config" not in module:
            raise ValueError("defines no get_config(). Add one that edits and returns hlat_jax.config.default().")
        config = module["get_config"]()
        if not hasattr(config, "to_dict"):
            raise ValueError(f"get_config() returns {config!r:.100}. End it with `return c`, the config that it edits.")
        for section, values in config.to_dict().items():
            if section != "name":
                check_section(section, values)
                for key, value in values.items():
                    field = field_of(section, key)
                    if value is not None:  # left to `resolve`, or for the command line
                        convert_value(f"{section}.{key}", field, value)
    except Exception as error:  # anything may go wrong in a user's file
        raise ValueError(_file_error(path, error)) from error
    if path.resolve().parent != config_folder().resolve():
        _anchor_paths(config, path.parent.resolve(), keys=ANCHORED_KEYS)
    config.name = path.stem
    return config


def _file_error(path: pathlib.Path, error: Exception) -> str:
    """Returns the file, the line, if it is in that file, and the fault of an error in a config file."""
    where = str(path.absolute())
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == where]
    if isinstance(error, SyntaxError) and error.filename == where:
        lines = [error.lineno or 0]
    message = " ".join(str(error).split())
    if not isinstance(error, ValueError):
        message = f"{type(error).__name__}: {message}"
    location = f", line {lines[-1]}, `{linecache.getline(where, lines[-1]).strip()}`" if lines else ""
    return f"{path}{location}: {message}"


def make_text_paths_absolute(mutable: Any) -> None:
    """Makes relative paths of text and tokenizer in a ConfigDict absolute, from the working directory.

    URLs, package:NAME and a share of data.train do not change.
    """
    _anchor_paths(mutable, pathlib.Path.cwd(), keys=_TEXT_KEYS)


def _anchor_paths(config: Any, folder: pathlib.Path, *, keys: Sequence[str]) -> None:
    """Makes relative paths absolute: from `folder`, or from the working directory where only that has them."""
    places = [base for base in (str(folder), os.getcwd()) if not set(",;") & set(base)]  # which separate paths

    def anchor(path: str) -> str:
        plain = path.strip()
        # package:NAME, URLs, a share of data.train
        if not plain or ":" in plain or plain.endswith("%") or plain.startswith("~") or os.path.isabs(plain):
            return path
        words = [f"{glob.escape(base) if glob.has_magic(plain) else base}/{plain}" for base in places]
        return next(filter(exists, words), words[0])

    for section, key in (path.split(".") for path in keys):
        value = config[section][key] if section in config and key in config[section] else ""
        if isinstance(value, str) and places:
            run, sign, step = value.rpartition("@")
            if key in ("train", "validation"):
                config[section][key] = map_paths(anchor, value)
            elif key == "branch_from":
                config[section][key] = anchor(run) + sign + step
            else:
                config[section][key] = anchor(value)


def map_paths(change: Callable[[str], str], spec: str) -> str:
    """Returns `PATHS` or `NAME=PATHS;NAME=PATHS` with each path changed."""
    parts = [re.fullmatch(r"(\s*[A-Za-z]\w*\s*=)?(.*)", part, re.DOTALL) for part in spec.split(";")]
    return ";".join((part[1] or "") + ",".join(map(change, part[2].split(","))) for part in parts if part)


def exists(path: str) -> bool:
    """Returns whether there is a file, a folder or a match of a glob, or for `**` the folder before it."""
    head, deep, _ = path.partition("**")
    return os.path.exists(path) or any(glob.iglob((os.path.dirname(head) or os.curdir) if deep else path))


def shipped_configs() -> dict[str, pathlib.Path]:
    """Returns the file of every shipped config by its name."""
    return {path.stem: path for path in sorted(config_folder().glob("*.py")) if not path.stem.startswith("_")}


def config_folder() -> pathlib.Path:
    """Returns the folder of the shipped configs, inside an installed package, or next to it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"
