"""Damages the files of a folder at random, as a disk, an editor or another program may: bytes, lines and fields."""

import copy
import dataclasses
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

_VALUES = (
    *("abc", "", "\ud800", "1", None, True, [], [1, 2], ["a"], [[1], [1, 2]], {}, {"a": None}),
    *(-1, 0, 1, 1.5, 10**30, 10**400, 1e308, -1e308, float("nan"), float("inf"), 2**63 - 1, "x" * 300),
)


@dataclasses.dataclass(frozen=True)
class Damage:
    """What `damage` did to a file."""

    path: pathlib.Path
    what: str


def damage(folder: pathlib.Path, path: pathlib.Path, rng: random.Random) -> Damage:
    """Changes one file of a folder in one way; nothing but `rng` decides how."""
    raw = path.read_bytes()
    is_log, tree = path.suffix == ".jsonl", None
    if not is_log and raw[:1] in b"{[":
        tree = json.loads(raw)
    if tree is not None and rng.random() < 0.75:
        what, tree = _changed(tree, rng)
        raw = json.dumps(tree).encode()
        if rng.random() < 0.05:
            raw = raw.replace(b"{", b'{"a": 1, "a": 2, ', 1)
            what += ", a key twice"
    elif is_log and raw and rng.random() < 0.85:
        what, raw = _changed_log(raw, rng)
    else:
        what, raw = _changed_bytes(raw, rng)
    path.write_bytes(raw)
    return Damage(path.relative_to(folder), what)


def _changed(tree: Any, rng: random.Random) -> tuple[str, Any]:
    """Returns a JSON value with one field deleted, renamed or replaced, or one entry repeated."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    holder, key = rng.choice(places) if places and rng.random() < 0.97 else (None, None)
    if holder is None:
        value = rng.choice(_VALUES)
        return f"all is {value!r:.40}", value
    how = rng.choice(("delete", "rename", "repeat", *["value"] * 7))
    if how == "value":
        value = rng.choice(_VALUES)
        what = f"{key!r:.60} is {value!s:.40} instead of {str(holder[key])[:40]}"
        holder[key] = value
        return what.encode("ascii", "backslashreplace").decode(), tree
    if how == "delete":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[rng.choice((f"{key}x", "\ud800", "", "a/b", "../a"))] = holder.pop(key)
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = [holder[key]]
    return f"{how} {key!r:.60}", tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (dict or list, key) of every value; of long lists only some."""
    pairs = tree.items() if isinstance(tree, dict) else list(enumerate(tree))[:4] if isinstance(tree, list) else ()
    for key, value in pairs:
        yield tree, key
        yield from _places(value)


def _changed_log(raw: bytes, rng: random.Random) -> tuple[str, bytes]:
    lines = raw.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    how = rng.choice((*["field"] * 8, "delete", "repeat", "move", "torn", "bytes"))
    if how == "field":
        what, row = _changed(json.loads(lines[number]), rng)
        lines[number] = json.dumps(row).encode() + b"\n"
        how = f"field: {what}"
    elif how == "delete":
        del lines[number]
    elif how == "repeat":
        lines.insert(number, lines[number])
    elif how == "move":
        lines.append(lines.pop(number))
    elif how == "torn":
        lines[number] = lines[number][: rng.randrange(len(lines[number]))]
    else:
        how, lines[number] = _changed_bytes(lines[number], rng)
    return f"line {number + 1}, {how}", b"".join(lines)


def _changed_bytes(raw: bytes, rng: random.Random) -> tuple[str, bytes]:
    how = rng.choice(("empty", "cut", "flip", "flip", "flip", "many", "zeros", "insert"))
    if how == "empty" or not raw:
        return "empty", b""
    place, changed = rng.randrange(len(raw)), bytearray(raw)
    if how == "cut":
        del changed[place:]
    elif how == "zeros":
        changed[place : place + 64] = bytes(len(changed[place : place + 64]))
    elif how == "insert":
        changed[place:place] = rng.choice((b"\\ud800", b"\xff", b"\0", b"1", b'"', b"\n", b"{", "é".encode()))
    else:
        for _ in range(1 if how == "flip" else 20):
            changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return f"{how} at {place}", bytes(changed)
