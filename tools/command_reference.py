"""Writes docs/commands.md: how every command is called, and its flags, from what `--help` prints.

python tools/command_reference.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import pathlib
import re

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "commands.md"
COMMANDS = (
    "train",
    "data build",
    "data tokenizer",
    "data stats",
    "data peek",
    "run goodput",
    "run watch",
    "run compare",
    "run explain",
    "generate",
    "evaluate",
    "hf import",
    "hf export",
    "hf average",
    "plan",
    "plan choices",
    "plan nodes",
    "neuron lint",
    "neuron ladder",
    "neuron hlo",
    "neuron doctor",
    "neuron env",
    "launch",
)
MODULES = {
    area: f"hlat_jax.{area}.__main__" for area in ("data", "run", "generate", "evaluate", "hf", "plan", "neuron")
} | {"launch": "hlat_jax.cli.launch_files"}


def reference() -> str:
    """Returns the page."""
    lines = [
        "# Every command",
        "",
        "Written by `python tools/command_reference.py` from what the commands print for `--help`. `hlat train` is",
        "`python -m hlat_jax.train`, and so with the other areas. A command without a usage below takes",
        "`--config=NAME|PATH.py`, `--config.SECTION.KEY=VALUE` for [every key](config.md), and its flags. Exit codes:",
        "0; 1 if the work failed; 2 if the command, the config or the data is wrong; 3 for a plan that does not fit;",
        "3 to 8 for an alert of `run watch`; 124 for a run that was stuck; 130 after Ctrl-C.",
    ]
    for command in COMMANDS:
        usages, flags = _parts(help_of(command))
        lines += ["", f"## {command}", ""]
        for usage in usages:
            lines += [f"`hlat {usage}`", ""]
        lines += [f"- `--{name}`: {meaning}" for name, meaning in flags]
    return "\n".join(lines) + "\n"


def help_of(command: str) -> str:
    """Returns what a command prints for --help."""
    area, *verb = command.split()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(MODULES.get(area, f"hlat_jax.{area}")).main([*verb, "--help"])
    return printed.getvalue()


def _parts(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the usages of a command without a config, and (flag, meaning) of each flag but the keys of a config."""
    before, _, after = text.partition("Flags:\n")
    usages = [] if "--config=NAME" in before else re.findall(r"(?:python -m hlat_jax\.|Usage: hlat )(.*)", before)
    # absl ends the meaning of a flag that may be repeated with a semicolon
    flags = re.findall(r"^  --(?!config\.)(\S+) +(.*?)(?: Default: ''\.|;)?$", after, re.MULTILINE)
    return usages, flags


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(reference())
