"""Reads the JSON of runs, builds and imports as values of declared types, or raises an error with the place.

A kind is an annotation such as `int`, `float`, `str`, `bool`, `list[int]`, `dict[str, float]`, `int | None` or
`Literal["a", "b"]`. It may be a TypedDict or a dataclass, and fields of a dataclass with a default may be missing. More
conditions need `Annotated[int, "an integer above 0", lambda value: value > 0]`. Fields that a kind does not name are
not checked. An integer has at most 64 bits, and a float may be written as such an integer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

_MAX_NAME_BYTES = 255
_SHOWN = 100  # characters of a value in an error

Count = Annotated[int, "an integer of at least 0", lambda value: value >= 0]
# Times are summed and shown as hours and days: of more than 30,000 years nothing is left.
Seconds = Annotated[float, "a number of seconds", lambda value: abs(value) < 1e12]


class Line(NamedTuple):
    """A line of a log. `row` is None if the line has a `problem`, or if a kill cut it."""

    raw: bytes
    row: Any
    problem: str


def read_json(path: pathlib.Path, *, kind: Any = dict, allow_nan: bool = False) -> Any:
    """Returns the JSON in a file, as `parse_json` does.

    Raises:
      ValueError: the path is not a regular file, or its content not of that kind. The message names the file.
      OSError: the file cannot be read.
    """
    if path.exists() and not path.is_file():  # to open a FIFO would block
        raise ValueError(f"{path} is not a regular file.")
    return parse_json(path.read_bytes(), where=str(path), kind=kind, allow_nan=allow_nan)


def read_lines(path: str | os.PathLike, kind_of: Callable[[dict], Any], *, allow_nan: bool = False) -> Iterator[Line]:
    """Yields every line of a log. `kind_of` returns the kind of a row from its fields. A missing file has no lines."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as lines:
        for line_number, raw in enumerate(lines, 1):
            row, problem = None, ""
            if raw.endswith(b"\n"):
                where = f"{path}, line {line_number}"
                try:
                    row = parse_json(raw, where=where, allow_nan=allow_nan)
                    row = check_kind(row, kind_of(row), where=where)
                except ValueError as error:
                    row, problem = None, str(error).rstrip(".")
            yield Line(raw, row, problem)


def parse_json(raw: bytes, *, where: str, kind: Any = dict, allow_nan: bool = False) -> Any:
    """Returns the JSON value in `raw`, of the given kind.

    Raises:
      ValueError: `raw` is not UTF-8, not JSON, nested too deeply, of another kind, has a key twice or, without
        `allow_nan`, a number that is not finite. The message begins with `where`.
    """
    parse = float if allow_nan else _finite
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=parse, parse_float=parse)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply.") from None
    return check_kind(value, kind, where=where)


def check_kind(value: Any, kind: Any, *, where: str, field: str = "") -> Any:
    """Returns the value if it is of the kind.

    Raises:
      ValueError: it is not. The message has `where` (the file), `field` (the path in it) and the allowed values.
    """
    if problem := _problem(value, kind, field):
        raise ValueError(f"{where}: {problem}.")
    return value


def check_name(name: Any, subject: str) -> str:
    """Returns `name`, a file name read from another file, after checking that it stays in that file's folder.

    Raises:
      ValueError: `name` is not text, empty, "." or "..", has "/" or unprintable characters, or is longer than file
        systems allow. The message begins with `subject`, the file and field that hold the name.
    """
    is_plain = isinstance(name, str) and name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not is_plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{subject}={_short_repr(name)} must be a plain name without '/'.")
    return name


_WORDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


def _problem(value: Any, kind: Any, field: str) -> str:
    """Returns what is wrong with the value of a field; "" when it is of the kind."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any:
        return ""
    if origin is Annotated:
        base, words, holds = args
        return "" if not _problem(value, base, field) and holds(value) else _must_be(words, value, field)
    if origin is typing.Literal:
        is_one = isinstance(value, str) and value in args
        return "" if is_one else _must_be(" or ".join(map(repr, args)), value, field)
    if origin in (types.UnionType, typing.Union):
        problems = [_problem(value, option, field) for option in args]
        return "" if "" in problems else problems[0]
    if origin not in _WORDS:
        return _problem_of_fields(value, kind, field)
    is_small = type(value) is not int or -(1 << 63) <= value < 1 << 63
    if not is_small or type(value) not in ((int, float) if kind is float else (origin,)):
        return _must_be(_WORDS[origin], value, field)
    items = () if not args else value.items() if origin is dict else enumerate(value)
    problems = (_problem(item, args[-1], f"{field}[{_short_repr(key)}]") for key, item in items)
    return next(filter(None, problems), "")


def _problem_of_fields(value: Any, kind: Any, field: str) -> str:
    """Returns `_problem` of a TypedDict or a dataclass."""
    if not isinstance(value, dict):
        return _must_be("an object", value, field)
    for name, (item, is_optional) in _fields(kind).items():
        path = f"{field}.{name}" if field else name
        problem = _problem(value[name], item, path) if name in value else "" if is_optional else f"{path} is missing"
        if problem:
            return problem
    return ""


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Returns name -> (kind, whether it may be missing) of the fields of a TypedDict or a dataclass."""
    fields, missing = {}, dataclasses.MISSING
    of_class = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    with_default = {each.name for each in of_class if (each.default, each.default_factory) != (missing, missing)}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        is_marked = typing.get_origin(hint) is typing.NotRequired
        fields[name] = typing.get_args(hint)[0] if is_marked else hint, is_marked or name in with_default
    return fields


def _must_be(words: str, value: Any, field: str) -> str:
    return f"{f'{field}=' if field else ''}{_short_repr(value)} must be {words}"


def _short_repr(value: Any) -> str:
    return repr(value)[:_SHOWN]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {_short_repr(twice)} appears twice")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return value
