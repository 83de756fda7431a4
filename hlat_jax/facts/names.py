"""Finds the nearest valid name for a name that does not exist."""

from __future__ import annotations

import difflib
from typing import Any


def nearest(word: str, candidates: Any) -> str:
    """Returns "Did you mean 'x'?" with the closest candidate, or the list of all if none is close.

    A candidate with the word between its underscores, as lr in peak_lr, is close too.
    """
    candidates = list(candidates)
    close = difflib.get_close_matches(word, sorted(candidates), n=1, cutoff=0.6) or names_with_part(word, candidates)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(candidates))}."


def names_with_part(word: str, candidates: Any) -> list[str]:
    """Returns the candidates with `word` between their underscores, first those that end with it and are short."""
    named = [name for name in candidates if word in name.split("_")]
    return sorted(named, key=lambda name: (not name.endswith(word), name.count("_")))
