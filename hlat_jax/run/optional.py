"""Optional parts of a run, each behind its config key. A run imports the packages at the leaves only here."""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from hlat_jax.config import Config
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host import distributed
from hlat_jax.parallel.sharding import Layout

if TYPE_CHECKING:
    from hlat_jax.evaluate.in_training import TasksInTraining
    from hlat_jax.hf.background import Exporter
    from hlat_jax.program import RunProgram


def open_tasks(config: Config, *, layout: Layout, tokenizer: Tokenizer) -> TasksInTraining | None:
    """Returns the tasks of `train.eval_tasks`, or None if it is empty.

    Raises:
      ValueError: the harness or a task is missing, or `hlat_jax.evaluate` is not installed.
    """
    if not config.train.eval_tasks:
        return None
    in_training = _import_leaf("hlat_jax.evaluate.in_training", key=f"train.eval_tasks={config.train.eval_tasks}")
    return in_training.TasksInTraining(config, layout=layout, tokenizer=tokenizer)


def open_exporter(config: Config, workdir: pathlib.Path) -> Exporter | None:
    """Returns the background exporter, or None outside process 0 or if `checkpoint.export_every_steps` is 0.

    Raises:
      ValueError: `hlat_jax.hf` is not installed.
    """
    every = config.checkpoint.export_every_steps
    if not every:
        return None
    background = _import_leaf("hlat_jax.hf.background", key=f"checkpoint.export_every_steps={every}")
    return background.Exporter(workdir, config=config) if distributed.is_first() else None


def short_plan(program: RunProgram, *, budget: int) -> list[str]:
    """Returns lines on the memory and collectives of a step, or none if `hlat_jax.plan` is not installed.

    They have no config key, are printed before every compilation, and do not affect the run.
    """
    report = _import_leaf("hlat_jax.plan.report", key="")
    return report.short_plan(program, budget=budget) if report is not None else []


def _import_leaf(module: str, *, key: str) -> Any:
    """Returns a module of a leaf folder; without that folder None, or, if a `key` needs it, raises ValueError."""
    leaf = module.rpartition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"{leaf}."):
            raise
        if not key:
            return None
        raise ValueError(
            f"{key} needs {leaf}, which is not installed. Install all of hlat_jax, or unset this key."
        ) from None
