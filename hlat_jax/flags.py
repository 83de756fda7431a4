"""One grammar for every command: `--config=NAME|PATH --config.section.key=VALUE`, plus the command's own flags.

Owns how a command line becomes a ConfigDict. Refuses to import JAX: flags are read before it may be loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from hlat_jax import config as config_lib


def parse(argv: Sequence[str], define: Callable[[flags.FlagValues], None] = lambda _: None) -> tuple[Any, Any]:
    """Returns (ConfigDict with every override applied, the command's own flags).

    Args:
      argv: the command line without the program.
      define: declares the command's own flags on the `absl` FlagValues it is given.

    Raises:
      ValueError: no --config, an unknown config, key or flag (with the nearest valid one), or a value of a wrong type.
    """
    values = flags.FlagValues()
    define(values)
    known = {f"--{name}" for name in values} | {"--config"}
    words = list(argv)
    index = next((i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")), None)
    if index is None:
        raise ValueError("--config=NAME is missing; NAME is a shipped config such as tiny, or a path that ends in .py.")
    if words[index] == "--config":
        words[index : index + 2] = [f"--config={words[index + 1]}" if index + 1 < len(words) else "--config="]
    mutable = config_lib.load(words.pop(index).removeprefix("--config="))
    for word in words:
        _check_word(word, mutable, known)
    config_flags.DEFINE_config_dict("config", mutable, flag_values=values, sys_argv=["hlat_jax", *words])
    try:
        rest = values(["hlat_jax", *words])
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(str(error)) from None
    if len(rest) > 1:
        raise ValueError(f"unexpected argument {rest[1]!r}; every argument is --flag=value.")
    return values.config, values


def main(command: Callable[[Sequence[str]], int]) -> None:
    """Runs a command on sys.argv and exits; an error of the user's is one line on stderr and exit code 2."""
    try:
        code = command(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _check_word(word: str, mutable: Any, known: set[str]) -> None:
    name = word.split("=", 1)[0]
    if not name.startswith("--config."):
        if name.startswith("--") and name not in known and f"--{name.removeprefix('--no')}" not in known:
            raise ValueError(f"unknown flag {name}. {config_lib.nearest(name, known)}")
        return
    node, path = mutable, name.removeprefix("--config.").split(".")
    for depth, key in enumerate(path):
        valid = list(node) if hasattr(node, "keys") else []
        if key not in valid:
            where = ".".join(path[:depth]) or "config"
            raise ValueError(f"{where} has no key {key!r}. {config_lib.nearest(key, valid)}")
        node = node[key]
    if hasattr(node, "keys"):
        raise ValueError(f"{name} is a section; set one of its keys: {', '.join(node)}.")
