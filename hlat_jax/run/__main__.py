"""Prints the time of a run, watches it, compares two, or explains a step: `python -m hlat_jax.run VERB RUN`."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Sequence

from absl import flags, logging

from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_folder
from hlat_jax.config import count_text
from hlat_jax.facts.local_paths import local_path
from hlat_jax.run import watch as watch_lib
from hlat_jax.run.goodput import goodput

USAGE = """Usage: python -m hlat_jax.run VERB RUN [flags]

  goodput RUN   prints what each second of a run went to
  watch RUN     ends, or calls a webhook, if a run needs somebody
  compare A B   prints the first step at which two runs differ, and why
  explain RUN@STEP   prints what moved before a step, and its documents

RUN is a run folder; the run may still train. Run VERB --help for details.
"""

_GOODPUT = """Usage: python -m hlat_jax.run goodput RUN [flags]

Prints the time of a run by category, from its first start to now or its end, over all restarts. Categories are training
that counts, training done again after a fault, compilation and so on. RUN is a run folder, and may still train.
"""

_WATCH = """Usage: python -m hlat_jax.run watch RUN [flags]

Watches a run until it is complete, which is exit code 0. The first alert ends the command with a code of its own:

  3 stalled   4 spike   5 not finite   6 store failing   7 goodput   8 corruption

With --webhook=URL each alert is posted there as JSON instead, and the command goes on. It imports no JAX and can run on
any machine that sees the run folder.
"""


_COMPARE = """Usage: python -m hlat_jax.run compare A B [flags]

Prints the first step at which two runs of the same model differ, in which quantity, and the settings that may be the
reason: config, data, versions, mesh, program, seed, skipped batches. A and B are run folders.
"""


_EXPLAIN = """Usage: python -m hlat_jax.run explain RUN@STEP [flags]

Prints which loss or norm left its running median first, at STEP or in the ten steps before, the three earlier steps
that are most alike, and the documents in the batch of STEP. RUN is a run folder. With metrics.layer_norms its rows have
the norms of each layer.
"""


def main(argv: Sequence[str]) -> int:
    """Runs the verb and returns the exit code."""
    verbs = {"goodput": _goodput, "watch": _watch, "compare": _compare, "explain": _explain}
    verb = flags_lib.choose_verb(argv, verbs, usage=USAGE)
    return verbs[verb](argv[1:])


def _goodput(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print the seconds by category as JSON.", flag_values=values)
    [folder] = _run_folders(argv, values, verb="goodput", usage=_GOODPUT)
    account = goodput(folder)
    print(json.dumps(account.seconds, indent=2) if values.json else account)
    return 0


def _watch(argv: Sequence[str]) -> int:
    values, default = flags.FlagValues(), watch_lib.Limits()
    about = "Seconds without a new step or phase that are an alert. Give more than a compilation takes. 0 means never."
    flags.DEFINE_float("stalled_s", default.stalled_s, about, 0.0, flag_values=values)
    about = "A spike is so many standard deviations above the last 128 steps, unless train.spikes finds them."
    flags.DEFINE_float("spike_sigmas", default.spike_sigmas, about, 1.0, flag_values=values)
    about = "Least share of time spent on new steps, such as 0.9. 0: any."
    flags.DEFINE_float("goodput", default.goodput, about, 0.0, 1.0, flag_values=values)
    flags.DEFINE_float("goodput_s", default.goodput_s, "Seconds for that share.", 1.0, flag_values=values)
    flags.DEFINE_string("webhook", "", "Web address that gets each alert by POST, as JSON.", flag_values=values)
    flags.DEFINE_float("every_s", 10.0, "Seconds between two looks.", 0.01, flag_values=values)
    [folder] = _run_folders(argv, values, verb="watch", usage=_WATCH)
    for name in ("stalled_s", "spike_sigmas", "goodput", "goodput_s", "every_s"):
        if not math.isfinite(values[name].value):  # absl lets NaN through its bounds
            raise ValueError(f"--{name}={values[name].value} is not a finite number.")
    watch_lib.check_webhook(values.webhook)
    limits = watch_lib.Limits(values.stalled_s, values.spike_sigmas, values.goodput, values.goodput_s)
    return watch_lib.watch(folder, limits, webhook=values.webhook, every_s=values.every_s)


def _compare(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags_lib.define_path(values, "plot", "PNG file to draw the losses of both runs in.", use="write")
    first, second = _run_folders(argv, values, verb="compare", usage=_COMPARE, count=2)
    flags_lib.check_output("--plot", values.plot)
    from hlat_jax.run.compare import compare  # not at the top: goodput needs no NumPy

    print(compare(first, second, plot=values.plot))
    return 0


def _explain(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    about = "Documents to show of each source."
    flags.DEFINE_integer("documents", 8, about, 0, flag_values=values)
    words = flags_lib.parse_inputs(argv, values, usage=_EXPLAIN, missing="RUN@STEP is missing, such as runs/tiny@300.")
    match = re.fullmatch("(.+)@([0-9]{1,18})", words[0])
    if len(words) > 1 or match is None:
        raise ValueError(f"explain takes one RUN@STEP, such as runs/tiny@300, not {' '.join(words)}.")
    check_folder(match[1], key="RUN")
    logging.set_verbosity(logging.ERROR)  # silence absl INFO logs
    from hlat_jax.run.explain import explain  # not at the top: goodput needs no NumPy

    explain(local_path(match[1]), int(match[2]), num_documents=values.documents)
    return 0


def _run_folders(
    argv: Sequence[str], values: flags.FlagValues, *, verb: str, usage: str, count: int = 1
) -> list[pathlib.Path]:
    """Returns the run folders that a command line names."""
    words = flags_lib.parse_inputs(argv, values, usage=usage, missing="RUN is missing: the folder of a run.")
    if len(words) != count:
        raise ValueError(f"{verb} takes {count_text(count, 'run folder')}, not {len(words)}.")
    for word in words:
        check_folder(word, key="RUN")
    return [local_path(word) for word in words]


if __name__ == "__main__":
    flags_lib.main(main)
