"""The one reader of what runs, builds and imports write as JSON: values of declared types, or an error with the place.

A kind is written as an annotation: `int`, `float`, `str`, `bool`, `list[int]`, `dict[str, float]`, `int | None`,
`Literal["a", "b"]`, a TypedDict, a dataclass, whose fields with a default may be missing, or, for what a type does not
say, `Annotated[int, "an integer above 0", lambda value: value > 0]`. Fields that a kind does not name are not checked.
An integer is one of 64 bits; a float may be written as such an integer.
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

_MAX_DEPTH = 100  # of nested JSON: far below Python's recursion limit, what is left of which depends on the caller
_MAX_NAME_BYTES = 255
_SHOWN = 100  # characters of a value in an error
_MISSING = object()

Count = Annotated[int, "an integer of at least 0", lambda value: value >= 0]
# Times are summed and shown as hours and days: of more than 30,000 years nothing is left.
Seconds = Annotated[float, "a number of seconds", lambda value: abs(value) < 1e12]


class Line(NamedTuple):
    """A line of a log: `row` is None where `why` says what is wrong with it, or where a kill cut it."""

    raw: bytes
    row: Any
    why: str


def read_json(path: pathlib.Path, *, kind: Any = dict, allow_nan: bool = False) -> Any:
    """Returns the JSON in a file, as `parse_json` does.

    Raises:
      ValueError: it is not a regular file, or not of that kind; the message names the file.
      OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():  # to open a FIFO would block
        raise ValueError(f"{path} is not a regular file.")
    return parse_json(path.read_bytes(), where=str(path), kind=kind, allow_nan=allow_nan)


def read_lines(path: str | os.PathLike, kind_of: Callable[[dict], Any], *, allow_nan: bool = False) -> Iterator[Line]:
    """Yields every line of a log; `kind_of` returns the kind of a row from its fields. A missing file has no lines."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as lines:
        for number, raw in enumerate(lines, 1):
            row, why = None, ""
            if raw.endswith(b"\n"):
                where = f"{path}, line {number}"
                try:
                    row = parse_json(raw, where=where, allow_nan=allow_nan)
                    row = checked(row, kind_of(row), where=where)
                except ValueError as error:
                    row, why = None, str(error).rstrip(".")
            yield Line(raw, row, why)


def parse_json(raw: bytes, *, where: str, kind: Any = dict, allow_nan: bool = False) -> Any:
    """Returns the JSON value in `raw`, of the given kind.

    Raises:
      ValueError: not UTF-8, not JSON, half of a surrogate pair, nested too deeply, a key that appears twice, another
        kind, or, without `allow_nan`, a number that is not finite; the message begins with `where`.
    """
    number = float if allow_nan else _finite
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=number, parse_float=number)
        if b"\\u" in raw:
            # half a pair stands in no file name, but for those that stand for bytes of one that is not UTF-8
            json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {_MAX_DEPTH} levels.") from None
    level, depth = [found] if isinstance(found, (dict, list)) else [], 0
    while level:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise ValueError(f"{where} is nested deeper than {_MAX_DEPTH} levels.")
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    return checked(found, kind, where=where)


def checked(value: Any, kind: Any, *, where: str, field: str = "") -> Any:
    """Returns the value if it is of the kind.

    Args:
      value: as JSON has it.
      kind: see above.
      where: the file, for the error.
      field: the path of the value in the file.

    Raises:
      ValueError: it is not; the message is `where`, the field and what is allowed.
    """
    fault = _finder(kind)(value)
    if fault is None:
        return value
    inside, found, words = fault
    field = f"{field}{inside}".lstrip(".")
    if not field:
        raise ValueError(f"{where} must hold {words}.")
    if found is _MISSING:
        raise ValueError(f"{where}: {field} is missing; it must be {words}.")
    raise ValueError(f"{where}: {field}={_shown(found)} must be {words}.")


def check_name(name: Any, what: str) -> str:
    """Returns `name`, a file name read from another file, after checking that it stays in that file's folder.

    Raises:
      ValueError: not text, empty, "." or "..", with "/" or unprintable characters, or longer than file systems allow;
        the message begins with `what`, the file and field that hold the name.
    """
    is_plain = isinstance(name, str) and name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not is_plain or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(f"{what}={_shown(name)} must be a plain name without '/'.")
    return name


# (path of a field below the value, such as ".a[0].b"; its value or _MISSING; what is allowed)
_Fault = tuple[str, Any, str]
_WORDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    types.NoneType: "null",
}


@functools.cache
def _finder(kind: Any) -> Callable[[Any], _Fault | None]:
    """Returns a function that finds what is wrong with a value of a kind; it returns None where nothing is."""
    origin, args, words = typing.get_origin(kind), typing.get_args(kind), _words(kind)
    if kind is Any:
        return lambda value: None
    if origin is Annotated:
        inner, holds = _finder(args[0]), args[2]
        return lambda value: None if inner(value) is None and holds(value) else ("", value, words)
    if origin is typing.Literal:
        return lambda value: None if isinstance(value, str) and value in args else ("", value, words)
    if origin in (types.UnionType, typing.Union):
        options = [_finder(each) for each in args]

        def of_any(value: Any) -> _Fault | None:
            faults = [option(value) for option in options]
            inside = [fault for fault in faults if fault and fault[0]]
            return None if None in faults else inside[0] if len(inside) == 1 else ("", value, words)

        return of_any
    if (origin or kind) is list:
        item = _finder(args[0]) if args else None

        def of_list(value: Any) -> _Fault | None:
            if not isinstance(value, list):
                return "", value, words
            for number, each in enumerate(value) if item else ():
                if fault := item(each):
                    return (f"[{number}]{fault[0]}", *fault[1:])
            return None

        return of_list
    if (origin or kind) is dict:
        item = _finder(args[1]) if args and args[1] is not Any else None

        def of_dict(value: Any) -> _Fault | None:
            if not isinstance(value, dict):
                return "", value, words
            for key, each in value.items() if item else ():
                if fault := item(each):
                    return (f"[{key!r:.{_SHOWN}}]{fault[0]}", *fault[1:])
            return None

        return of_dict
    if typing.is_typeddict(kind) or dataclasses.is_dataclass(kind):
        fields = _fields(kind)

        def of_fields(value: Any) -> _Fault | None:
            if not isinstance(value, dict):
                return "", value, words
            for name, (is_optional, item, words_of_item) in fields.items():
                if name in value:
                    if fault := item(value[name]):
                        return (f".{name}{fault[0]}", *fault[1:])
                elif not is_optional:
                    return f".{name}", _MISSING, words_of_item
            return None

        return of_fields
    allowed = (int, float) if kind is float else (kind,)
    return lambda value: None if type(value) in allowed and _is_small(value) else ("", value, words)


def _is_small(value: Any) -> bool:
    return type(value) is not int or -(1 << 63) <= value < 1 << 63


def _fields(kind: Any) -> dict[str, tuple[bool, Callable[[Any], _Fault | None], str]]:
    """Returns name -> (whether it may be missing, its finder, what is allowed) of a TypedDict or a dataclass."""
    optional = set()
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        optional = {f.name for f in dataclasses.fields(kind) if (f.default, f.default_factory) != (missing, missing)}
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if typing.get_origin(hint) is typing.NotRequired:
            optional.add(name)
            [hint] = typing.get_args(hint)
        found[name] = name in optional, _finder(hint), _words(hint)
    return found


def _words(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return args[1]
    if origin is typing.Literal:
        return " or ".join(map(repr, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_words, args))
    return _WORDS.get(origin or kind, "an object")


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {_shown(twice)} appears twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is not a finite number")
    return value
