"""`python -m hlat_jax.eval ...`: the command `lm_eval ...` of the LM Evaluation Harness, which then knows our models.

The harness (0.4.13) looks model types up in a table of its own and asks no other package for more, so that `lm_eval`
itself cannot be told of one.
"""

from __future__ import annotations

import re
import sys

from absl import flags as absl_flags

from hlat_jax import inference
from hlat_jax.eval.tasks import require_harness


def main() -> None:
    """Runs the harness's own command line."""
    try:
        require_harness()
        _prepare(sys.argv[1:])
        from lm_eval.__main__ import cli_evaluate

        import hlat_jax.eval.harness  # noqa: F401  registers the model type

        cli_evaluate()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _prepare(words: list[str]) -> None:
    """Sets Neuron's environment before JAX is imported, for the mesh of `--model_args`."""
    values = absl_flags.FlagValues()
    inference.define(values)
    at = words.index("--model_args") + 1 if "--model_args" in words else len(words)
    joined = words[at] if at < len(words) else ""
    asked = dict(re.findall(rf"\b({'|'.join(inference.DEGREES)})=(-?[0-9]+)", joined))
    values(["hlat_jax", *(f"--parallel.{axis}={degree}" for axis, degree in asked.items())])
    inference.prepare(values)


if __name__ == "__main__":
    main()
