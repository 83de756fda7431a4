"""The one module that imports the LM Evaluation Harness (the `eval` extra); most of what it uses is undocumented.

Importing it also imports Hugging Face's `datasets`, so it is imported only for tasks. It imports JAX only after the
environment of Neuron is set for the mesh that the arguments of a model ask for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM as LM
from lm_eval.api.model import TemplateLM as TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.evaluator import evaluate as evaluate
from lm_eval.models.utils import handle_stop_sequences as handle_stop_sequences
from lm_eval.models.utils import normalize_gen_kwargs as normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as postprocess_generated_text
from lm_eval.tasks import TaskManager as TaskManager
from lm_eval.utils import get_rolling_token_windows as get_rolling_token_windows
from lm_eval.utils import make_disjoint_window as make_disjoint_window
from lm_eval.utils import make_table as make_table

from hlat_jax.cli import flags as flags_lib
from hlat_jax.generate import inference
from hlat_jax.generate.inference import DEGREES

TESTED_VERSIONS = ("0.4.13",)


def register_model_type() -> None:
    """Adds the model type `hlat_jax` to the harness's registry."""
    if "hlat_jax" not in model_registry:
        model_registry.register("hlat_jax", target="hlat_jax.evaluate.lm_eval_compat:ModelType")


def run_command(argv: Sequence[str]) -> None:
    """Runs the harness's command line with our model type, which `lm_eval` itself cannot load by entry points."""
    register_model_type()
    sys.argv = ["lm_eval", *argv]
    cli_evaluate()


class ModelType(LM):
    """The model type `hlat_jax` in the harness's registry: its constructors return a `harness.HarnessModel`."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of `--model_args`, as `create_from_arg_obj`."""
        pairs = [word.split("=", 1) for word in arg_string.split(",") if word]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"--model_args {arg_string}: give KEY=VALUE,KEY=VALUE.")
        return cls.create_from_arg_obj(dict(pairs), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of the arguments that `lm_eval` was given.

        Args:
          arg_dict: values of checkpoint, tokenizer, batch_size, bos and parallel degrees, as of the command
            `evaluate`; all but `checkpoint` have a default.
          additional_config: `batch_size`, `max_batch_size` and `device` of its command line.

        Raises:
          ValueError: an unknown argument, an invalid value, no checkpoint, or an error of `inference.open_model`.
        """
        of_command = additional_config or {}
        asked = {"batch_size": of_command.get("batch_size")} | arg_dict
        words = [
            f"--config.parallel.{key}={value}" if key in DEGREES else f"--{key}={value}"
            for key, value in asked.items()
            if value is not None and key != "trust_remote_code"  # that one is for data sets
        ]
        try:
            values = flags_lib.parse_own(words, _define, usage="")
            inference.prepare(values)
        except ValueError as error:
            raise ValueError(f"model_args: {error}") from None
        from hlat_jax.evaluate.harness import HarnessModel

        return HarnessModel(inference.trained_model(values), batch_size=values.batch_size, bos=values.bos)


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    flags.DEFINE_integer("batch_size", 8, "Rows of a batch on each replica.", 1, flag_values=values)
    flags.DEFINE_bool("bos", None, "Begin texts with BOS.", flag_values=values)
