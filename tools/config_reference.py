"""Writes docs/config.md: every key of a config with its default and meaning, from the dataclasses.

python tools/config_reference.py
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from hlat_jax.cli.config_files import shipped_configs
from hlat_jax.config import SECTIONS

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "config.md"


def reference() -> str:
    """Returns the page."""
    lines = [
        "# Every key of a config",
        "",
        "Written by `python tools/config_reference.py` from the dataclasses in `hlat_jax/config.py`. On a command line",
        "a key is `--config.SECTION.KEY=VALUE`; in a config file, `c.SECTION.KEY = VALUE`. The shipped configs",
        f"({', '.join(f'`{name}`' for name in shipped_configs())}) set what differs from these defaults.",
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"## {section}", "", cls.__doc__.strip(), "", "| key | default | meaning |", "|---|---|---|"]
        for field in dataclasses.fields(cls):
            choices = field.metadata["choices"]
            meaning = field.metadata["doc"] + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")
            lines.append(f"| `{field.name}` | `{field.default!r}` | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(reference())
