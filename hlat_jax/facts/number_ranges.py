"""Parses ranges of numbers in a setting, such as the steps 1200:1400."""

from __future__ import annotations

import re


def parse_ranges(path: str, text: str, *, example: str) -> tuple[range, ...]:
    """Returns the numbers, from 1, of a value FIRST:LAST,FIRST:LAST as ascending ranges with gaps, none for "".

    Raises:
      ValueError: the form is wrong, or ranges are out of order or overlap. The message has `path` and `example`.
    """
    ranges: list[range] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", part)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not max(ranges[-1].stop if ranges else 1, 1) <= first <= last:
            raise ValueError(
                f"{path}={text!r}: {part!r} must be FIRST:LAST, such as {example}. It needs 1 <= FIRST <= LAST, and "
                "comes after the previous range."
            )
        joined = bool(ranges) and ranges[-1].stop == first
        ranges[-1 if joined else len(ranges) :] = [range(ranges[-1].start if joined else first, last + 1)]
    return tuple(ranges)
