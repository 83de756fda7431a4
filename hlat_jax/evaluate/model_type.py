"""The model type `hlat_jax` of the LM Evaluation Harness, which makes a `harness.HarnessModel` from `--model_args`.

Imports JAX only after Neuron's environment is set for the mesh that the arguments ask for.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.evaluate.lm_eval_compat import LM
from hlat_jax.generate import inference
from hlat_jax.generate.chat import open_template
from hlat_jax.generate.inference import DEGREES


class ModelType(LM):
    """The class in the harness's registry under `hlat_jax`. Its constructors return a `harness.HarnessModel`."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of `--model_args`, as `create_from_arg_obj` does."""
        pairs = [word.split("=", 1) for word in arg_string.split(",") if word]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"--model_args {arg_string} must be KEY=VALUE,KEY=VALUE.")
        return cls.create_from_arg_obj(dict(pairs), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of the arguments that `lm_eval` was given.

        Args:
          arg_dict: values of checkpoint, tokenizer, batch_size, bos and parallel degrees, as for the command
            `evaluate`. All but `checkpoint` have a default.
          additional_config: `batch_size`, `max_batch_size` and `device` of the harness's command line.

        Raises:
          ValueError: an unknown argument, an invalid value, no checkpoint, or an error of `inference.open_model`.
        """
        of_command = additional_config or {}
        values = _parse({"batch_size": of_command.get("batch_size")} | arg_dict)
        from hlat_jax.evaluate.harness import HarnessModel

        return HarnessModel(inference.trained_model(values), batch_size=values.batch_size, bos=values.bos)


def check_template(arg_dict: dict[str, Any], template: bool | str) -> None:
    """Raises ValueError if the checkpoint of `--model_args` has no chat template, or none called `template`."""
    values = _parse(arg_dict)
    open_template(values.checkpoint, key="--apply_chat_template", name=template if isinstance(template, str) else "")


def _parse(arg_dict: dict[str, Any]) -> flags.FlagValues:
    """Returns the checked model arguments, after Neuron's environment is set for them."""
    words = [
        f"--config.parallel.{key}={value}" if key in DEGREES else f"--{key}={value}"
        for key, value in arg_dict.items()
        if value is not None and key != "trust_remote_code"  # that one is for data sets
    ]
    try:
        values = flags_lib.parse_own(words, _define, usage="")
        inference.prepare(values)
    except ValueError as error:
        raise ValueError(f"model_args: {error}") from None
    return values


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    flags.DEFINE_integer("batch_size", 8, "Rows of a batch on each replica.", 1, flag_values=values)
    flags.DEFINE_bool("bos", None, "Begin texts with BOS.", flag_values=values)
