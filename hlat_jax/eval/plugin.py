"""Tells the LM Evaluation Harness's own command, `lm_eval`, of our model type.

The harness (0.4.13) looks model types up in a table of its own and asks no other package for more, by entry points or
otherwise. So the wheel brings a file `hlat_jax_lm_eval.pth`, by which Python calls `register` as it starts where the
program is `lm_eval`; every other program passes it by. Refuses to import JAX before Neuron's environment is set.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

from absl import flags as absl_flags

from hlat_jax import inference

NAME = "hlat_jax"
_MODEL = "HarnessModel"


def register(*, target: Any = f"{__name__}:{_MODEL}") -> None:
    """Adds our model type to the harness's, unless it is there or no harness is.

    Args:
      target: the class, or `module:name` of it, which is imported when the model is asked for.
    """
    if importlib.util.find_spec("lm_eval") is None:
        return
    import lm_eval.models  # noqa: F401  the other types, which it adds only to an empty registry
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=target)


def __getattr__(name: str) -> Any:
    """The model type as the command line asks for it: Neuron's environment is set before JAX is imported."""
    if name != _MODEL:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _prepare(sys.argv[1:])
    from hlat_jax.eval.harness import HarnessModel

    return HarnessModel


def _prepare(words: list[str]) -> None:
    """Sets Neuron's environment for the mesh of `--model_args`."""
    values = absl_flags.FlagValues()
    inference.define(values)
    joined = re.search(r" (?:--model_args|-a)[ =](.*?)(?: -|$)", " ".join(["", *words]))
    asked = dict(re.findall(rf"\b({'|'.join(inference.DEGREES)})=(-?[0-9]+)", joined[1] if joined else ""))
    values(["hlat_jax", *(f"--parallel.{axis}={degree}" for axis, degree in asked.items())])
    inference.prepare(values)
