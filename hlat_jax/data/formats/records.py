"""Records in files of any format: their numbers across files, their text, and the error for one without usable text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

MAX_RECORD_BYTES = 1 << 30
_REMEDY = "Fix or remove it, set {field} if the text is under another name, or skip such records with {skip}."
_KEYS_SHOWN = 10
_KEY_CHARS_SHOWN = 40


class BadRecord(ValueError):
    """One record without usable text, which `data.on_bad_record="skip"` skips; a damaged file is a plain ValueError.

    Attributes:
      problem: file, row and reason, without what to change.
    """

    def __init__(self, problem: str):
        remedy = _REMEDY.format(field="data.text_field", skip='data.on_bad_record="skip"')
        super().__init__(f"{problem} {remedy} After changing a file, start a new run in another --workdir.")
        self.problem = problem

    def for_command(self) -> ValueError:
        """Returns the error with the flags of `build` and `tokenizer` in place of the config's keys."""
        remedy = _REMEDY.format(field="--text_field", skip="--on_bad_record=skip")
        return ValueError(f"{self.problem} {remedy}")


def starts(counts: Iterable[int]) -> np.ndarray:
    """Returns int64[n + 1]: the number of the first record of each of n consecutive parts, and the total."""
    return np.cumsum([0, *counts], dtype=np.int64)


def place(starts: np.ndarray, index: int) -> tuple[int, int]:
    """Returns (the part that holds record `index`, the number of the record in that part)."""
    part = int(np.searchsorted(starts, index, side="right")) - 1
    return part, int(index) - int(starts[part])


def bad_record(where: str, row: int | None, reason: str) -> BadRecord:
    """Returns the error for `row` of the file `where`, rows counted from 1; None: the file is one document."""
    place = where if row is None else f"{where}, row {row}"
    return BadRecord(f"{place}: {reason}")


def checked_text(text: Any, *, field: str, where: str, row: int) -> str:
    """Returns `text` if it is a string that UTF-8 can encode.

    Raises:
      BadRecord: it is null, empty, of another type, or has a lone surrogate.
    """
    if text == "":
        raise bad_record(where, row, f"{field!r} is empty.")
    if isinstance(text, str):
        if text.isascii():
            return text
        try:
            for start in range(0, len(text), 1 << 20):  # in blocks, to avoid a copy of a long document
                text[start : start + (1 << 20)].encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can hold a lone surrogate
            reason = f"{field!r} is invalid UTF-8: {error.reason} at character {start + error.start}."
            raise bad_record(where, row, reason) from None
        return text
    kind = "null" if text is None else f"{type(text).__name__}, not text"
    raise bad_record(where, row, f"{field!r} is {kind}.")


def decoded(raw: bytes | bytearray) -> str:
    """Returns the text of the bytes of a file, or of its first part, without a byte order mark."""
    return raw.decode("utf-8-sig")


def utf8_text(raw: bytes | bytearray, *, where: str, row: int | None) -> str:
    """Returns the text of a record of bare UTF-8; `row` is None for a file, or a part of one.

    Raises:
      BadRecord: it is empty, or not UTF-8.
    """
    try:
        text = decoded(raw) if row is None else raw.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8: {error.reason} at byte {error.start}; iconv -t UTF-8 converts it."
        raise bad_record(where, row, reason) from None
    if not text:
        raise bad_record(where, row, "it is empty.")
    return text


def json_text(line: bytes | bytearray, *, field: str, where: str, row: int) -> str:
    """Returns the text under the key `field` of one line of JSON.

    Raises:
      BadRecord: invalid UTF-8, broken or truncated JSON, not an object, no such key, no text under it.
    """
    num_bytes = len(line)
    try:
        text = decoded(line)
        del line  # nor does the caller hold it: no third copy of a long document while it is parsed
        record = json.loads(text)
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8: {error.reason} at byte {error.start} of the row."
        raise bad_record(where, row, reason) from None
    except json.JSONDecodeError as error:
        reason = f"invalid or truncated JSON: {error.msg} at character {error.pos} of {num_bytes} bytes."
        raise bad_record(where, row, reason) from None
    except ValueError as error:  # such as an integer of more digits than Python reads
        raise bad_record(where, row, f"JSON that cannot be read: {error}.") from None
    except RecursionError:
        raise bad_record(where, row, "JSON nested too deeply.") from None
    if not isinstance(record, dict):
        raise bad_record(where, row, "not a JSON object.")
    if field not in record:
        raise _no_key(record, field=field, where=where, row=row)
    return checked_text(record[field], field=field, where=where, row=row)


def _no_key(record: dict[str, Any], *, field: str, where: str, row: int) -> BadRecord:
    # repr: JSON keys may be unprintable, or hold a lone surrogate
    keys = [repr(key if len(key) <= _KEY_CHARS_SHOWN else f"{key[:_KEY_CHARS_SHOWN]}...") for key in sorted(record)]
    more = f" and {len(keys) - _KEYS_SHOWN} more" if len(keys) > _KEYS_SHOWN else ""
    listed = f"{', '.join(keys[:_KEYS_SHOWN])}{more}" if keys else "none"
    return bad_record(where, row, f"no key {field!r}; its keys are {listed}.")
