"""Optional parts of a run: the only imports of the leaf folders from below, each behind its config key."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hlat_jax.config import Config
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host import distributed
from hlat_jax.parallel.sharding import Layout
from hlat_jax.program import RunProgram

if TYPE_CHECKING:
    from hlat_jax.evaluate.in_training import TasksInTraining
    from hlat_jax.hf.background import Exporter


def open_tasks(config: Config, *, layout: Layout, tokenizer: Tokenizer) -> TasksInTraining | None:
    """Returns the tasks of `train.eval_tasks`; None if it is empty.

    Raises:
      ValueError: the harness or a task is missing, or `hlat_jax.evaluate` is not installed.
    """
    if not config.train.eval_tasks:
        return None
    with _required("hlat_jax.evaluate", key=f"train.eval_tasks={config.train.eval_tasks}"):
        from hlat_jax.evaluate.in_training import TasksInTraining
    return TasksInTraining(config, layout=layout, tokenizer=tokenizer)


def open_exporter(config: Config, workdir: pathlib.Path) -> Exporter | None:
    """Returns the background exporter; None if `checkpoint.export_every_steps` is 0, and outside process 0.

    Raises:
      ValueError: `hlat_jax.hf` is not installed.
    """
    every = config.checkpoint.export_every_steps
    if not every:
        return None
    with _required("hlat_jax.hf", key=f"checkpoint.export_every_steps={every}"):
        from hlat_jax.hf.background import Exporter
    return Exporter(workdir, config=config) if distributed.is_first() else None


def short_plan(program: RunProgram, *, budget: int) -> list[str]:
    """Returns lines on the memory and collectives of a step; none if `hlat_jax.plan` is not installed.

    They have no config key: they are printed before every compilation, and a run does not depend on them.
    """
    try:
        from hlat_jax.plan.report import short_plan as lines_of
    except ModuleNotFoundError as error:
        if _is_part(error.name, "hlat_jax.plan"):
            return []
        raise
    return lines_of(program, budget=budget)


@contextlib.contextmanager
def _required(part: str, *, key: str) -> Iterator[None]:
    """Raises ValueError with the key that needs a part of this package if the import of that part fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if _is_part(error.name, part):
            raise ValueError(
                f"{key} needs {part}, which is not installed; install all of hlat_jax, or unset this key."
            ) from None
        raise


def _is_part(module: str | None, part: str) -> bool:
    return module is not None and f"{module}.".startswith(f"{part}.")
