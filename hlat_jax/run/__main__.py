"""Prints the time of a run by category, `python -m hlat_jax.run goodput RUN`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_folder
from hlat_jax.facts.local_paths import local_path
from hlat_jax.run.goodput import goodput

USAGE = """Usage: python -m hlat_jax.run goodput RUN [flags]

Prints the time of a run by category, from its first start to now or its end, over all restarts. Categories are training
that counts, training done again after a fault, compilation and so on. RUN is a run folder, and may still train.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the verb and returns the exit code."""
    flags_lib.choose_verb(argv, ["goodput"], usage=USAGE)
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print the seconds by category as JSON.", flag_values=values)
    words = flags_lib.parse_inputs(argv[1:], values, usage=USAGE, missing="RUN is missing. Give the folder of a run.")
    if len(words) != 1:
        raise ValueError(f"goodput takes one run folder, not {len(words)}.")
    check_folder(words[0], key="RUN")
    account = goodput(local_path(words[0]))
    print(json.dumps(account.seconds, indent=2) if values.json else account)
    return 0


if __name__ == "__main__":
    flags_lib.main(main)
