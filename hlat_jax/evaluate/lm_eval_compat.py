"""The one module that imports the LM Evaluation Harness (the `eval` extra); most of what it uses is undocumented.

Importing it also imports Hugging Face's `datasets`, so it is imported only for tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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

TESTED_VERSIONS = ("0.4.13",)


def register_model_type() -> None:
    """Adds the model type `hlat_jax` to the harness's registry, which imports the class when it is asked for."""
    if "hlat_jax" not in model_registry:
        model_registry.register("hlat_jax", target="hlat_jax.evaluate.model_type:ModelType")


def run_command(argv: Sequence[str]) -> None:
    """Runs the harness's command line with our model type, which `lm_eval` itself cannot load by entry points."""
    register_model_type()
    sys.argv = ["lm_eval", *argv]
    cli_evaluate()
