"""Parses and formats sizes in bytes."""

from __future__ import annotations

import numbers
import re

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
FORMS = f"a size with its unit, such as '12GiB' or '900MB' ({', '.join(UNITS)}), or an int of bytes of 4096 or more"
_LEAST = 4096  # a smaller bare number is more likely in another unit


def parse_bytes(size: int | str, *, name: str) -> int:
    """Returns the bytes of a size in one of `FORMS`. `name` is the setting, for the error.

    Raises:
      ValueError: the size has no unit or an unknown unit, or is not positive.
    """
    if isinstance(size, numbers.Integral) and not isinstance(size, bool) and size >= _LEAST:  # NumPy's too
        return int(size)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        raise ValueError(f"{name}={size!r} is not a size in bytes. Give {FORMS}.")
    return int(float(match[1]) * UNITS[match[2]])


def format_bytes(num_bytes: float) -> str:
    """Returns bytes in the largest unit that fits, such as `1.25 GiB`."""
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if num_bytes >= UNITS[unit]), "B")
    return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes / UNITS[unit]:,.2f} {unit}"
