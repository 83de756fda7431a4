"""Checks for Trainium that need no device, `python -m hlat_jax.neuron VERB --config=NAME ...`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hlat_jax.cli import flags as flags_lib

# verb -> (module with a `main`, help text)
VERBS = {
    "lint": (
        "hlat_jax.neuron.lint_command",
        "checks the programs of a config against what Neuron supports",
    ),
    "ladder": (
        "hlat_jax.neuron.ladder_command",
        "lists programs from one layer to the whole config, as commands for a device",
    ),
    "hlo": ("hlat_jax.neuron.hlo_command", "lists the programs of a run, and writes them as files for neuronx-cc"),
    "doctor": ("hlat_jax.neuron.doctor_command", "checks that this machine is ready for a run"),
    "env": ("hlat_jax.neuron.env_command", "prints the environment variables of each process of a run"),
}


def main(argv: Sequence[str]) -> int:
    """Runs one verb, and returns its exit code."""
    usage = "Usage: python -m hlat_jax.neuron VERB --config=NAME [flags]. VERB --help lists its flags.\n"
    usage += "".join(f"\n  {verb:<10} {summary}" for verb, (_, summary) in VERBS.items())
    verb = flags_lib.choose_verb(argv, VERBS, usage=usage)
    return importlib.import_module(VERBS[verb][0]).main(argv[1:])


if __name__ == "__main__":
    flags_lib.main(main)
