"""The nearest valid name for one that there is not."""

from __future__ import annotations

import difflib
from typing import Any


def nearest(word: str, candidates: Any) -> str:
    """Returns "Did you mean 'x'?" with the closest candidate, or the list of all when none is close."""
    candidates = sorted(candidates)
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(candidates)}."
