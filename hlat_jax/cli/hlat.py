"""The console command `hlat AREA ...`. `hlat train --config=tiny` runs `python -m hlat_jax.train --config=tiny`."""

from __future__ import annotations

import runpy
import sys

import hlat_jax
from hlat_jax.facts.names import nearest
from hlat_jax.host import process

AREAS = {
    "train": "trains a model: hlat train --config=tiny",
    "run": "goodput, watch, compare, explain: time of a run, alerts, two runs, a step",
    "generate": "continues text with a trained model",
    "evaluate": "measures a trained model: perplexity and tasks",
    "data": "build, tokenizer, stats, peek: text for training",
    "hf": "import, export, average: weights from and to Hugging Face",
    "plan": "estimates memory, traffic and time before a run",
    "neuron": "lint, ladder, hlo, doctor, env: checks for Trainium",
    "launch": "node.sh, restart.sh and the files for Slurm and EKS",
}
_MODULES = {"launch": "cli.launch_files"}  # of areas that are not named as their module


def main() -> None:
    """Runs the area that sys.argv names as `python -m` does, and exits with its code, or with 2 if it is unknown."""
    process.exit_on_interrupt()
    name, *words = sys.argv[1:] or [""]
    if name not in AREAS:
        sys.exit(_explain_areas(name))
    sys.argv = [f"hlat {name}", *words]
    # by name, so that nothing but the area is imported
    runpy.run_module(f"{hlat_jax.__name__}.{_MODULES.get(name, name)}", run_name="__main__", alter_sys=True)


def _explain_areas(word: str) -> int:
    """Prints the areas or an error; returns the exit code."""
    if word in ("", "--help", "-h", "help"):
        lines = (f"  {name:<10} {does}" for name, does in AREAS.items())
        print(
            "Usage: hlat AREA ...\n\n`hlat AREA --help` prints the help of an area. AREA is one of:\n", *lines, sep="\n"
        )
        return 0 if word else 2
    if word == "--version":
        print(hlat_jax.__version__)
        return 0
    print(f"error: {word!r} is not an area. {nearest(word, AREAS)}", file=sys.stderr)
    return 2
