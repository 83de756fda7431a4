"""Command lines: `--config=NAME|PATH --config.section.key=VALUE` and a command's own flags; error and exit codes."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.facts import synonyms
from hlat_jax.facts.names import nearest
from hlat_jax.host import limits, process


def parse(argv: Sequence[str], define: Callable[[flags.FlagValues], None] = lambda _: None) -> tuple[Any, Any]:
    """Returns (ConfigDict with every override applied, the command's own flags).

    Args:
      argv: the command line without the program.
      define: declares the command's own flags on the `absl` FlagValues it is given.

    Raises:
      ValueError: no --config or two, an unknown config, key or flag (with the nearest valid one), or a value of a wrong
        type.
      SystemExit: with code 0, after `--help`.
    """
    values = flags.FlagValues()
    define(values)
    if any(word in ("--help", "-h") for word in argv):
        print(usage(values))
        sys.exit(0)
    named = flags.FlagValues()
    flags.DEFINE_multi_string("config", [], "Name or path of the config.", flag_values=named)
    words = _parsed(named, argv, known_only=True)
    if not named.config:
        raise ValueError(_missing_config(words, values))
    if len(named.config) > 1:
        raise ValueError(
            f"--config is given {len(named.config)} times; a run has one config. Change keys with --config.a.b=VALUE."
        )
    mutable = config_files.load(named.config[0])
    before = mutable.copy_and_resolve_references()
    for word in words:
        _check_key(word, mutable)
    config_flags.DEFINE_config_dict("config", mutable, flag_values=values, sys_argv=["hlat_jax", *words])
    rest = _parsed(values, words, keys=_config_keys())
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; every argument is --flag=value.")
    _drop_settings_of_replaced_text(values.config, before, given=given_keys(values))
    return values.config, values


def _drop_settings_of_replaced_text(mutable: Any, before: Any, *, given: Collection[str]) -> None:
    """Changes settings that describe the text or tokenizer of a config whose command line replaces these.

    If data.train is replaced and data.validation would remain text that ships with the package, a share of data.train
    is held out instead. If text, tokenizer, initial weights or the number of steps are replaced, no final validation
    loss is expected.

    Args:
      mutable: ConfigDict with the values of the command line, changed in place.
      before: the same without them.
      given: keys that the command line sets, which stay as they are: "data.train".
    """
    replaced = {key for key in ("train", "validation", "tokenizer") if mutable.data[key] != before.data[key]}
    if "train" in replaced and "data.validation" not in given and mutable.data.validation.startswith("package:"):
        mutable.data.validation = config_lib.HELD_OUT
    replaced |= {key for key in ("num_steps", "init_from") if mutable.train[key] != before.train[key]}
    if replaced and not {"train.eval_loss_low", "train.eval_loss_high"} & set(given):
        mutable.train.update(eval_loss_low=0.0, eval_loss_high=0.0)


def given_keys(values: flags.FlagValues) -> set[str]:
    """Returns the keys, such as data.train, that a command line sets; `values` is what `parse` returned for it."""
    return set(config_flags.get_override_values(values["config"]))


def config_words(argv: Sequence[str]) -> list[str]:
    """Returns the words of a command line that choose and change the config, as --config=NAME and --config.a.b=VALUE.

    `argv` is one that `parse` takes: a value may also be the word after its flag.
    """
    words = []
    for word, after in zip(argv, [*argv[1:], "--"], strict=True):
        if re.match(r"--?(?:no)?config(?:[.=]|$)", word):
            is_value = "=" not in word and not re.match("--|-[a-z]", after)
            words.append(f"--{word.lstrip('-')}" + (f"={after}" if is_value else ""))
    return words


def parse_inputs(argv: Sequence[str], values: flags.FlagValues, *, usage: str, missing: str) -> list[str]:
    """Returns the positional arguments of a command without a config, after `values` has parsed its flags.

    Args:
      argv: the command line without the program and its verb.
      values: the flags that the command has declared; `out` is required where it is one of them.
      usage: what `--help` prints before the flags.
      missing: the error where there are no positional arguments.

    Raises:
      ValueError: an unknown flag (with the nearest valid one), a value of a wrong type, no --out, or no argument.
      SystemExit: with code 0, after `--help`.
    """
    inputs = _rest(argv, values, usage=usage)
    if not inputs:
        raise ValueError(missing)
    if "out" in values and not values.out:
        raise ValueError("--out is missing; give the path to write to.")
    return inputs


def parse_own(argv: Sequence[str], define: Callable[[flags.FlagValues], None], *, usage: str) -> flags.FlagValues:
    """Returns the flags of a command without a config.

    Args:
      argv: the command line without the program.
      define: as for `parse`.
      usage: the first lines of `--help`.

    Raises:
      ValueError: an unknown flag (with the nearest valid one), a value of a wrong type, or a positional argument.
      SystemExit: with code 0, after `--help`.
    """
    values = flags.FlagValues()
    define(values)
    rest = _rest(argv, values, usage=usage)
    if rest:
        raise ValueError(f"unexpected argument {rest[0]!r}; every argument is --flag=value.")
    return values


def _rest(argv: Sequence[str], values: flags.FlagValues, *, usage: str) -> list[str]:
    """Returns the positional arguments after `values` has parsed the flags; for `--help` prints and exits."""
    words = [word for word in argv if word not in ("--help", "-h")]
    rest = _parsed(values, words)
    if len(words) < len(argv):
        rows = [f"  --{name:<20} {values[name].help} Default: {values[name].default!r}." for name in values]
        print("\n".join((usage, "Flags:", *rows)))
        sys.exit(0)
    return rest


def _missing_config(words: Sequence[str], values: flags.FlagValues) -> str:
    """Returns the error for a command line without --config; names a word that was meant as one."""
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            if word.endswith(".py") or word in config_files.shipped():
                return f"unexpected argument {word!r}. Did you mean '--config={word}'?"
        elif name not in values and difflib.get_close_matches(name, ["config"]):
            return f"unknown flag --{name}. Did you mean '--config={value}'?"
    return "--config=NAME is missing; NAME is a shipped config such as tiny, or a path that ends in .py."


def _parsed(
    values: flags.FlagValues,
    argv: Sequence[str],
    *,
    known_only: bool = False,
    keys: Mapping[str, dataclasses.Field] = types.MappingProxyType({}),
) -> list[str]:
    """Returns the arguments that are not flags of `values`.

    Args:
      values: parses the flags.
      argv: the command line.
      known_only: other flags are arguments too.
      keys: `_config_keys()` for a command with a config.

    Raises:
      ValueError: an unknown flag, with the nearest flag or key, or a value of a wrong type, with what is allowed.
    """
    for word in argv:  # absl obeys these two though nobody has declared them
        if word.lstrip("-").split("=")[0] in ("undefok", "flagfile"):
            raise ValueError(_unknown_flag(word, list(values), keys))
    try:
        return values(["hlat_jax", *argv], known_only=known_only)[1:]
    except flags.UnrecognizedFlagError as error:
        given = (word for word in argv if word.lstrip("-").split("=")[0] == error.flagname)
        word = next(given, f"--{error.flagname}")
        raise ValueError(_unknown_flag(word, list(values), keys)) from None
    except (flags.Error, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(_wrong_value(str(error), values)) from None


def _unknown_flag(word: str, own: Sequence[str], keys: Mapping[str, dataclasses.Field]) -> str:
    """Returns the error for an unknown flag, with flags of the command or keys of the config that are like it.

    Args:
      word: as it was given, such as --lr=0.1.
      own: names of the command's flags.
      keys: `_config_keys()` for a command with a config.
    """
    name, equals, value = word.lstrip("-").partition("=")
    meant = _like(name, [*own, "help"], keys)
    if keys and (answer := synonyms.meant_by(name)[1]):
        return f"unknown flag --{name}. {answer}"
    if not meant:
        more = "; --config.SECTION.KEY=VALUE sets a key of the config" if keys else ""
        return f"unknown flag --{name}. Known: {', '.join(f'--{known}' for known in sorted([*own, 'help']))}{more}."
    return f"unknown flag --{name}. Did you mean {_alternatives(meant, value=equals + value)}?"


def _alternatives(meant: Sequence[str], *, value: str = "") -> str:
    """Returns "'--config.data.seed=1' or '--config.train.seed=1'"; `value` is that of keys, with its sign."""
    return " or ".join(f"'--{known}{value if known.startswith('config.') else ''}'" for known in meant)


def _like(name: str, own: Sequence[str], keys: Mapping[str, dataclasses.Field]) -> list[str]:
    """Returns at most two flags or keys that `name` may stand for, the likeliest first."""
    by_last = {known.rpartition(".")[2]: known for known in (*keys, *own)}
    words = set(re.findall(r"[a-z]+", name.lower()))

    def near(cutoff: float) -> list[str]:
        close = difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1, cutoff=cutoff)
        return [by_last[last] for last in close]

    def has_words(text: str) -> bool:
        return bool(words) and words <= set(re.findall(r"[a-z]+", text.lower()))

    of_others = [f"config.{key}".removeprefix("config.--") for key in synonyms.meant_by(name)[0]]
    likely = (
        [known for known in (*own, *keys) if known.endswith(f".{name}")]
        or [known for known in of_others if known in own or known in keys]
        or near(0.8)
        or sorted((key for key in keys if has_words(key)), key=len)
        or near(0.6)
        or [key for key, field in keys.items() if has_words(field.metadata["doc"])]
    )
    return likely[:2]


def _config_keys() -> dict[str, dataclasses.Field]:
    """Returns config.SECTION.KEY -> its field, for every key."""
    sections = config_lib.SECTIONS.items()
    return {f"config.{name}.{field.name}": field for name, cls in sections for field in dataclasses.fields(cls)}


def _wrong_value(message: str, values: flags.FlagValues) -> str:
    """Returns absl's message, or for a value of another type, or out of bounds, one that has what is allowed."""
    given = re.match(r"flag --(?P<name>[\w.]+)=(?P<value>.*?): ", message, re.DOTALL)
    if given is None:
        return message
    name, value = given["name"], given["value"]
    flag, keys = values[name], _config_keys()
    if isinstance(flag, flags.EnumFlag):
        return f"--{name}={value}: no such value. {nearest(value, filter(None, flag.parser.enum_values))}"
    kind = type(keys[name].default).__name__ if name in keys else flag.flag_type()
    if kind == "bool":
        return f"--{name}={value} must be true or false."
    try:
        number = float(value)
    except ValueError:
        number = None
    if kind == "float" and number is None:
        return f"--{name}={value} must be a number, such as 0.1 or 3e-4."
    if kind == "float" or (kind == "int" and re.fullmatch(r"[+-]?\d+", value)):
        bounds = {"at least": "lower_bound", "at most": "upper_bound"}
        limits_given = {words: getattr(flag.parser, bound, None) for words, bound in bounds.items()}
        allowed = " and ".join(f"{words} {limit}" for words, limit in limits_given.items() if limit is not None)
        return f"--{name}={value} must be {allowed}." if allowed else message
    if kind != "int":
        return message
    thousands = re.fullmatch(r"(\d+)[kK]", value)
    if thousands:
        example = f"; write {int(thousands[1]) * 1000} or {int(thousands[1]) * 1024}"
    else:
        example = f"; write {int(number)}" if number is not None and number.is_integer() else ""
    return f"--{name}={value} must be a whole number in digits{example}."


def main(command: Callable[[Sequence[str]], int]) -> None:
    """Runs a command on sys.argv and exits: a ValueError is one line on stderr and code 2, an OSError one and code 1.

    Ctrl-C is code 130, a closed pipe 141. Characters that standard output cannot show are replaced.

    Not `absl.app.run`, which parses flags of its own, prints usage errors over several lines and exits with 1.
    """
    process.replace_unprintable()
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


def check_output(flag: str, path: str) -> None:
    """Raises ValueError where the file `path` cannot be written, before the work whose result goes there."""
    file = pathlib.Path(path)
    if file.is_dir():
        raise ValueError(f"{flag}={path} is a folder; give a file in it, such as {file / 'report.json'}.")
    if not file.parent.is_dir():
        raise ValueError(f"{flag}={path}: there is no folder {file.parent}; make it first, or give another path.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{flag}={path} cannot be written; give another path.")


def make_folder(flag: str, path: str) -> pathlib.Path:
    """Returns the folder `path`, created if missing; raises ValueError before the work whose result goes there."""
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}={path} cannot be created as a folder: {error.strerror}; name another.") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag}={path} cannot be written to; name another folder.")
    return folder


def usage(values: flags.FlagValues) -> str:
    """Returns what `--help` prints: the grammar, a command's own flags, the shipped configs and every key."""
    own = [f"  --{name:<24} {values[name].help}" for name in values]
    keys = [
        f"  --config.{f'{section}.{key.name}={key.default}':<40} {key.metadata['doc']}"
        + (f" One of {', '.join(key.metadata['choices'])}." if key.metadata["choices"] else "")
        for section, cls in config_lib.SECTIONS.items()
        for key in dataclasses.fields(cls)
    ]
    shipped = ", ".join(config_files.shipped())
    return "\n".join(
        (
            "Usage: --config=NAME|PATH.py [--config.SECTION.KEY=VALUE ...] [flags]",
            f"\nNAME is one of {shipped}; --print_config shows the values of one.",
            "\nFlags:",
            *own,
            "\nKeys, with the value of a config that does not set them:",
            *keys,
        )
    )


def _check_key(word: str, mutable: Any) -> None:
    """Raises ValueError for `--config.a.b` that is not a key; ml_collections would not name the section."""
    key_word = re.match(r"--?(?:no)?config\.([^=]*)", word)  # absl takes all of these
    if key_word is None:
        return
    path_text = key_word[1]
    node, path = mutable, path_text.split(".")
    for depth, key in enumerate(path):
        valid = list(node) if hasattr(node, "keys") else []
        if key not in valid:
            where = ".".join(path[:depth]) or "config"
            of_others, answer = synonyms.meant_by(path_text)
            if answer:
                raise ValueError(f"{where} has no key {key!r}. {answer}")
            keys = _config_keys()
            meant = [known for known in keys if depth and known.endswith(f".{key}")]  # of another section
            is_far = depth == 0 and not difflib.get_close_matches(key, valid)
            if not meant and (of_others or is_far):
                meant = _like(path_text, ["workdir"], keys)
            if meant:
                raise ValueError(f"{where} has no key {key!r}. Did you mean {_alternatives(meant)}?")
            raise ValueError(f"{where} has no key {key!r}. {nearest(key, valid)}")
        node = node[key]
    if hasattr(node, "keys"):
        raise ValueError(f"--config.{path_text} is a section; set one of its keys: {', '.join(node)}.")
