"""The model type `hlat_jax` of the LM Evaluation Harness: `--model_args` to a `harness.HarnessModel`.

Imports JAX only after Neuron's environment is set for the mesh that the arguments ask for.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from hlat_jax.config import ParallelConfig
from hlat_jax.evaluate.lm_eval_compat import LM
from hlat_jax.facts.names import nearest
from hlat_jax.generate import inference
from hlat_jax.generate.inference import DEGREES

MODEL_ARGS = ("checkpoint", "tokenizer", "batch_size", "bos", *DEGREES)
_BOS = {"": None, "true": True, "1": True, "false": False, "0": False}


class ModelType(LM):
    """The class in the harness's registry under `hlat_jax`: its constructors return a `harness.HarnessModel`."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of `--model_args`, as `create_from_arg_obj`."""
        pairs = [word.split("=", 1) for word in arg_string.split(",") if word]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"--model_args {arg_string}: give KEY=VALUE,KEY=VALUE of {', '.join(MODEL_ARGS)}.")
        return cls.create_from_arg_obj(dict(pairs), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> LM:
        """Returns the model of the arguments that `lm_eval` was given.

        Args:
          arg_dict: of `MODEL_ARGS`; all but `checkpoint` have a default.
          additional_config: `batch_size`, `max_batch_size` and `device` of its command line.

        Raises:
          ValueError: an unknown argument, no checkpoint, or an error of `inference.open_model`.
        """
        arg_dict = {key: value for key, value in arg_dict.items() if key != "trust_remote_code"}  # for data sets
        unknown = sorted(arg_dict.keys() - set(MODEL_ARGS))
        if unknown:
            raise ValueError(f"model_args has no {unknown[0]!r}. {nearest(unknown[0], MODEL_ARGS)}")
        if "checkpoint" not in arg_dict:
            raise ValueError("model_args checkpoint=FOLDER is missing; give a run folder such as runs/tiny.")
        asked = {key: value for key, value in (additional_config or {}).items() if value is not None}
        batch_size = str(arg_dict.get("batch_size", asked.get("batch_size", 8)))
        if not batch_size.isdecimal() or batch_size == "0":
            raise ValueError(f"batch_size={batch_size}: give a number of rows; 'auto' is not implemented.")
        degrees = {axis: str(arg_dict.get(axis, 1)) for axis in DEGREES}
        for axis, degree in degrees.items():
            if not re.fullmatch("-1|[1-9][0-9]*", degree):
                raise ValueError(f"model_args {axis}={degree}: give a number of devices, or -1 for all devices.")
        bos = str(arg_dict.get("bos", "")).lower()
        if bos not in _BOS:
            raise ValueError(f"model_args bos={bos}: give true or false, or leave it out.")
        parallel = ParallelConfig(**{axis: int(degree) for axis, degree in degrees.items()})
        if "jax" not in sys.modules:
            inference.prepare_for(parallel)
        from hlat_jax.evaluate.harness import HarnessModel

        tokenizer = str(arg_dict.get("tokenizer", ""))
        trained = inference.open_model(str(arg_dict["checkpoint"]), parallel, tokenizer=tokenizer)
        return HarnessModel(trained, batch_size=int(batch_size), bos=_BOS[bos])
