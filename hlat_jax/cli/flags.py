"""Parses command lines, `--config=NAME|PATH --config.section.key=VALUE` and a command's own flags. Exits on errors."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.facts.local_paths import check_local
from hlat_jax.facts.names import names_with_part, nearest
from hlat_jax.host import compile_cache, limits, process


def parse(argv: Sequence[str], define: Callable[[flags.FlagValues], None] = lambda _: None) -> tuple[Any, Any]:
    """Returns (ConfigDict with every override applied, the command's own flags).

    `--init_from=PATH` sets train.init_from, and the config `continue` if no other is given.

    Args:
      argv: the command line without the program.
      define: the function that declares the command's own flags on `absl` FlagValues.

    Raises:
      ValueError: --config is missing, or it or --init_from is given twice. Or a config, key or flag is unknown (with
        the nearest valid one), or a value has a wrong type.
      SystemExit: `--help` was given. The code is 0.
    """
    values = flags.FlagValues()
    define(values)
    if any(word in ("--help", "-h") for word in argv):
        print(usage(values))
        sys.exit(0)
    named = flags.FlagValues()
    flags.DEFINE_multi_string("config", [], "Name or path of the config.", flag_values=named)
    flags.DEFINE_multi_string("init_from", [], "Initial weights.", flag_values=named)
    words = _parse_words(named, argv, known_only=True)
    starts = named.init_from + [word for word in words if re.match("--?config.train.init_from(=|$)", word)]
    if named.init_from and len(starts) > 1:
        raise ValueError(f"initial weights are given {len(starts)} times. Give one --init_from.")
    if any(named.init_from):
        words.append(f"--config.train.init_from={named.init_from[0]}")
        named.config = named.config or ["continue"]
    if not named.config:
        likely = [word for word in words if word.endswith(".py") or word in config_files.shipped_configs()]
        advice = (
            f"Did you mean --config={likely[0]}?" if likely else "Give a shipped config such as tiny, or a .py file."
        )
        raise ValueError(f"--config=NAME is missing. {advice}")
    if len(named.config) > 1:
        raise ValueError(
            f"--config is given {len(named.config)} times, but a run has one config. Change its keys with "
            "--config.SECTION.KEY=VALUE."
        )
    mutable = config_files.load(named.config[0])
    before = mutable.copy_and_resolve_references()
    for word in words:
        _check_key(word)
    config_flags.DEFINE_config_dict("config", mutable, flag_values=values, sys_argv=["hlat_jax", *words])
    rest = _parse_words(values, words, keys=list(_config_keys()))
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}. Write every argument as --flag=value.")
    for path in config_lib.PATH_KEYS:
        section, key = path.split(".")
        if (value := values.config[section][key]) is not None:  # left to `resolve`
            values.config[section][key] = config_lib.convert_value(path, config_lib.field_of(section, key), value)
    _drop_settings_of_replaced_text(values.config, before, given=given_keys(values))
    return values.config, values


class _PathParser(flags.ArgumentParser):
    """Parses a path of this machine; its arguments are `check_local`'s."""

    def __init__(self, *, key: str, use: str):
        self.key, self._use = key, use

    def parse(self, argument: str) -> str:
        return os.path.expanduser(check_local(argument, key=self.key, use=self._use))

    def flag_type(self) -> str:
        return "string"


def define_path(values: flags.FlagValues, name: str, about: str, *, default: str = "", use: str = "read") -> None:
    """Declares a flag for a path on this machine. Its value has `~` expanded, and a URL is a ValueError.

    `use` is an argument of `facts.local_paths.check_local`.
    """
    parser = _PathParser(key=f"--{name}", use=use)
    flags.DEFINE(parser, name, default, about, values, flags.ArgumentSerializer())


def _drop_settings_of_replaced_text(mutable: Any, before: Any, *, given: Collection[str]) -> None:
    """Changes settings that describe the text of a config whose command line replaces it, but for those in `given`.

    If data.train is replaced and data.validation would remain text that ships with the package, a share of data.train
    is held out instead. If text, tokenizer, initial weights or the number of steps are replaced, no final validation
    loss is expected. `before` is the config without the command line.
    """
    replaced = {key for key in ("train", "validation", "tokenizer") if mutable.data[key] != before.data[key]}
    if "train" in replaced and "data.validation" not in given and mutable.data.validation.startswith("package:"):
        mutable.data.validation = config_lib.HELD_OUT
    replaced |= {key for key in ("num_steps", "init_from") if mutable.train[key] != before.train[key]}
    if replaced and not {"train.eval_loss_low", "train.eval_loss_high"} & set(given):
        mutable.train.update(eval_loss_low=0.0, eval_loss_high=0.0)


def given_keys(values: flags.FlagValues) -> set[str]:
    """Returns the keys, such as data.train, that a command line sets, from the flags that `parse` returned for it."""
    return set(config_flags.get_override_values(values["config"]))


def config_words(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command line with config and init_from, as --flag=VALUE.

    `argv` is as for `parse`, so a value may also be the word after its flag.
    """
    words = []
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        if re.match(r"--?(?:no)?(?:config(?:[.=]|$)|init_from(?:=|$))", word):
            is_value = "=" not in word and not re.match("--|-[a-z]", after)
            words.append(f"--{word.lstrip('-')}" + (f"={after}" if is_value else ""))
    return words


def parse_inputs(argv: Sequence[str], values: flags.FlagValues, *, usage: str, missing: str) -> list[str]:
    """Returns the positional arguments of a command without a config, after `values` has parsed its flags.

    `usage` is the text of `--help` before the flags, and `missing` the error without positional arguments. Raises the
    errors of `parse_own`, and ValueError without --out, if that is one of the flags.
    """
    inputs = _rest(argv, values, usage=usage)
    if not inputs:
        raise ValueError(missing)
    if "out" in values and not values.out:
        raise ValueError("--out is missing. Give the path to write to.")
    return inputs


def parse_own(argv: Sequence[str], define: Callable[[flags.FlagValues], None], *, usage: str) -> flags.FlagValues:
    """Returns the flags of a command without a config. `define` declares them, and `usage` begins the `--help`.

    Raises:
      ValueError: a flag is unknown (with the nearest valid one), a type is wrong, or an argument is positional.
      SystemExit: `--help` was given. The code is 0.
    """
    values = flags.FlagValues()
    define(values)
    rest = _rest(argv, values, usage=usage)
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}. Write every argument as --flag=value.")
    return values


def _rest(argv: Sequence[str], values: flags.FlagValues, *, usage: str) -> list[str]:
    """Returns the positional arguments after `values` has parsed the flags; for `--help` prints and exits."""
    words = [word for word in argv if word not in ("--help", "-h")]
    rest = _parse_words(values, words)
    if len(words) < len(argv):
        rows = [f"  --{name:<20} {values[name].help} Default: {values[name].default!r}." for name in values]
        print("\n".join((usage, "Flags:", *rows)))
        sys.exit(0)
    return rest


def _parse_words(
    values: flags.FlagValues, argv: Sequence[str], *, known_only: bool = False, keys: Sequence[str] = ()
) -> list[str]:
    """Returns the arguments that are not flags of `values`.

    Args:
      known_only: other flags are arguments too.
      keys: names in `_config_keys` for a command with a config.

    Raises:
      ValueError: an unknown flag, with the nearest flag or key, or a value of a wrong type, with what is allowed.
    """
    own = sorted(["help", *(name for name in values if not name.startswith("config."))])
    for word in argv:  # absl obeys these two though nobody has declared them
        if (name := word.lstrip("-").split("=")[0]) in ("undefok", "flagfile"):
            raise ValueError(f"unknown flag --{name}. {_nearest_flag(name, own, keys)}")
    try:
        return values(["hlat_jax", *argv], known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        raise ValueError(f"unknown flag --{name}. {_nearest_flag(name, own, keys)}") from None
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(_wrong_value(str(error), values)) from None


def _nearest_flag(name: str, own: Sequence[str], keys: Sequence[str]) -> str:
    """Returns "Did you mean '--config.data.seed'?", with the same or the nearest last part; else lists `own`."""
    last, word = {known: known.rpartition(".")[2] for known in (*own, *keys)}, name.rpartition(".")[2]
    same = [known for known, part in last.items() if part == word]
    close = difflib.get_close_matches(word, last.values(), n=1, cutoff=0.8) or names_with_part(word, last.values())[:1]
    if meant := same or [known for known, part in last.items() if part in close]:
        words = " or ".join(f"'--{known}'" for known in meant[:2])
        return f"Did you mean {words}?"
    more = ", and --config.SECTION.KEY=VALUE for a key of the config" if keys else ""
    return f"Known: {', '.join(f'--{known}' for known in own)}{more}."


def _config_keys() -> dict[str, dataclasses.Field]:
    """Returns config.SECTION.KEY -> its field, for every key."""
    sections = config_lib.SECTIONS.items()
    return {f"config.{name}.{field.name}": field for name, cls in sections for field in dataclasses.fields(cls)}


def _check_key(word: str) -> None:
    """Raises ValueError for `--config.a.b` that is not a key; ml_collections would not name the nearest."""
    match = re.match(r"--?(?:no)?(config\.[^=]*)", word)  # absl takes all of these
    if match is None or match[1] == "config.name":
        return
    name, keys = match[1], list(_config_keys())
    in_section = [key for key in keys if key.startswith(f"{name}.")]
    if in_section:
        raise ValueError(f"--{name} is a section. Set one of its keys: {', '.join(in_section)}.")
    if name not in keys:
        beside = [key for key in keys if key.rpartition(".")[0] == name.rpartition(".")[0]]
        raise ValueError(f"the config has no key --{name}. {_nearest_flag(name, beside, keys)}")


_KINDS = {"int": "a whole number in digits", "float": "a number, such as 0.1 or 3e-4", "bool": "true or false"}


def _wrong_value(message: str, values: flags.FlagValues) -> str:
    """Returns absl's message, or for a value of another type one that has what is allowed."""
    given = re.match(r"flag --(?P<name>[\w.]+)=(?P<value>.*?): ", message, re.DOTALL)
    if given is None:
        return message
    name, value = given["name"], given["value"]
    flag, keys = values[name], _config_keys()
    if isinstance(flag.parser, _PathParser):
        return message[message.rindex(f" {flag.parser.key}=") + 1 :]  # what `check_local` says
    if isinstance(flag, flags.EnumFlag):
        return f"--{name}={value}: no such value. {nearest(value, filter(None, flag.parser.enum_values))}"
    kind = type(keys[name].default).__name__ if name in keys else flag.flag_type()
    is_of_kind = re.fullmatch(r"[+-]?\d+" if kind == "int" else r"[+-]?[\d.]+(e[+-]?\d+)?", value)  # and out of bounds
    return message if kind not in _KINDS or is_of_kind else f"--{name}={value} must be {_KINDS[kind]}."


def main(command: Callable[[Sequence[str]], int]) -> None:
    """Runs a command on sys.argv and exits. An error is a line on stderr, with code 2 for ValueError and 1 for OSError.

    Ctrl-C is code 130, a closed pipe 141. Characters that standard output cannot show are replaced.

    This is not `absl.app.run`, which parses other flags, prints usage errors over several lines and exits with 1.
    """
    process.replace_unprintable()
    compile_cache.silence_tuning_hints(os.environ)
    try:
        try:
            code = command(sys.argv[1:])
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        except BrokenPipeError:
            raise
        except OSError as error:  # such as text that cannot be read now
            print(f"error: {error}{limits.too_many_files(error.errno)}", file=sys.stderr)
            code = 1
        except Exception as error:
            if (refused := limits.out_of_memory(error)) is None:
                raise
            print(f"error: {limits.describe(refused)}", file=sys.stderr)
            code = 1
        finally:
            if sys.stdout is not None:  # None in a process without a console
                sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as after `... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python discards the rest when it flushes at exit
        code = 141
    except KeyboardInterrupt:
        process.end_interrupted()
    sys.exit(code)


def choose_verb(argv: Sequence[str], verbs: Collection[str], *, usage: str) -> str:
    """Returns the verb at the beginning of a command line. Raises ValueError for an unknown verb.

    For `--help`, and without any word, prints `usage` and exits.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(usage)
        sys.exit(0 if argv else 2)
    if argv[0] not in verbs:
        raise ValueError(f"unknown verb {argv[0]!r}. {nearest(argv[0], verbs)}")
    return argv[0]


def check_output(flag: str, path: str) -> None:
    """Raises ValueError if the file `path` cannot be written, before the work for it begins. "" is no file."""
    if not path:
        return
    file = pathlib.Path(path)
    if not file.parent.is_dir():
        raise ValueError(f"{flag}={path} needs the folder {file.parent}. Make it first, or give another path.")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{flag}={path} cannot be written. Give the path of a file.")


def write_report(path: str, report: dict[str, Any]) -> None:
    """Writes a report to the file that `--json` names, or nowhere for ""."""
    if path:
        pathlib.Path(path).write_text(json.dumps(report, indent=1, default=str) + "\n")


def usage(values: flags.FlagValues) -> str:
    """Returns the text of `--help`, with the grammar, a command's own flags, the shipped configs and every key."""
    own = [f"  --{name:<24} {values[name].help}" for name in values]
    keys = [
        f"  --config.{f'{section}.{key.name}={key.default}':<40} {key.metadata['doc']}"
        + (f" One of {', '.join(key.metadata['choices'])}." if key.metadata["choices"] else "")
        for section, cls in config_lib.SECTIONS.items()
        for key in dataclasses.fields(cls)
    ]
    shipped = ", ".join(config_files.shipped_configs())
    return "\n".join(
        (
            "Usage: --config=NAME|PATH.py [--config.SECTION.KEY=VALUE ...] [flags]",
            f"\nNAME is one of {shipped}. --print_config shows its values.",
            "--init_from=FOLDER sets train.init_from. Without --config it takes --config=continue.",
            "\nFlags:",
            *own,
            "\nKeys and their defaults:",
            *keys,
        )
    )
