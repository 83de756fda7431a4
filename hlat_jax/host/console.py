"""Prints lines with a label in front of a text, with all texts in one column."""

from __future__ import annotations

_LABEL_CHARS = 16


def labelled(label: str, text: object) -> str:
    """Returns the label and the text in their columns. Further lines of a text are indented."""
    return f"{label:<{_LABEL_CHARS}} {text}".replace("\n", "\n" + " " * (_LABEL_CHARS + 1))


def say(label: str, text: object) -> None:
    """Prints a labelled line."""
    print(labelled(label, text))
