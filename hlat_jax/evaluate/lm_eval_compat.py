"""The one module that imports the LM Evaluation Harness (the `eval` extra). It uses mostly undocumented parts.

Importing it also imports Hugging Face's `datasets`, so it is imported only for tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval._cli import HarnessCLI
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
from lm_eval.utils import setup_logging

TESTED_VERSIONS = ("0.4.13",)
_MODEL_TYPE = "hlat_jax"


def register_model_type() -> None:
    """Adds the model type `hlat_jax` to the harness's registry, which imports the class when it is asked for."""
    if _MODEL_TYPE not in model_registry:
        model_registry.register(_MODEL_TYPE, target="hlat_jax.evaluate.model_type:ModelType")


def run_command(argv: Sequence[str], *, check_template: Callable[[Any, bool | str], None]) -> None:
    """Runs the harness's command line with our model type, which `lm_eval` itself cannot load by entry points.

    Args:
      argv: words of the command line after `lm_eval`.
      check_template: function of the dict of `--model_args` and the name of the template, or True. It is called before
        any work for `--apply_chat_template` of our model type.
    """
    register_model_type()
    sys.argv = ["lm_eval", *argv]
    setup_logging()
    command = HarnessCLI()
    args = command.parse_args()
    template = getattr(args, "apply_chat_template", False)
    if template and getattr(args, "model", "") == _MODEL_TYPE:
        check_template(args.model_args or {}, template)
    command.execute(args)
