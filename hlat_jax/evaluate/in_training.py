"""Tasks of the LM Evaluation Harness during training, on the sharded parameters.

The figures are the same as by `evaluate --tasks` on the checkpoint of the step. The first call compiles a scoring
program for each padded length, and two programs for each shape of generation. The requests are the same every time, so
later calls compile nothing.
"""

from __future__ import annotations

import logging
import os
import pathlib
from typing import TYPE_CHECKING, Any

from hlat_jax.config import Config
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.evaluate.tasks import Tasks, require_harness
from hlat_jax.generate.inference import TrainedModel
from hlat_jax.parallel.rows import num_microbatches, replica_rows
from hlat_jax.parallel.sharding import Layout
from hlat_jax.store.progress import Status

if TYPE_CHECKING:
    from hlat_jax.evaluate.harness import HarnessModel


class TasksInTraining:
    """The tasks of `train.eval_tasks`, evaluated by the same programs each time, with the batch size of a microbatch.

    Raises:
      ValueError: the harness is not installed, or has no such task.
    """

    def __init__(self, config: Config, *, layout: Layout, tokenizer: Tokenizer):
        t = config.train
        try:
            require_harness()
        except ValueError as error:
            raise ValueError(f"train.eval_tasks={t.eval_tasks}: {error}") from None
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: no progress bars between our lines
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        options = {"limit": t.eval_tasks_limit, "folder": t.eval_tasks_folder, "key": "train.eval_tasks"}
        self._tasks = Tasks(t.eval_tasks.split(","), standard_errors=False, **options)
        self._config, self._layout, self._tokenizer = config, layout, tokenizer
        self._model: HarnessModel | None = None
        self.status = Status()

    def load(self) -> None:
        """Fetches the data of the tasks. Call it once, before the first evaluation."""
        self._tasks.load()

    def __call__(self, params: Any) -> tuple[dict[str, float], list[str]]:
        """Returns the results as `tasks/NAME/METRIC`, and the keys to print, see `shown_keys`.

        NAME is a task or a group of the harness. METRIC is followed by `/FILTER` if the harness applies one. If the
        harness cannot compute a metric (word perplexity above e^709), it prints that, and both are empty.
        """
        from hlat_jax.evaluate.harness import HarnessModel

        self.status.share, self.status.text = 0.0, "preparing the questions"
        if self._model is None:
            c, layout = self._config, self._layout
            rows = replica_rows(c.data.batch_size, layout) // num_microbatches(c, layout)
            trained = TrainedModel(
                c.model, params, layout, self._tokenizer, pathlib.Path(), "", begins_with_bos=c.data.prepend_bos
            )
            self._model = HarnessModel(trained, batch_size=rows, status=self.status)
        self._model.use(params)
        try:
            results = self._tasks(self._model)
        except ArithmeticError as error:
            print(f"tasks: no results for this step, since the harness cannot compute a metric ({error})")
            return {}, []
        finally:
            self._model.use(None)  # the next step donates the parameters
        return figures(results), shown_keys(results)


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics in the harness's results, for tasks and groups."""
    return {key: value for name in report["results"] for key, value in _figures_of(name, report).items()}


def shown_keys(report: dict[str, Any]) -> list[str]:
    """Returns the keys of the metrics to print, without members of a group that has its own metrics."""
    groups = report["group_subtasks"]
    inner = {member for group, members in groups.items() if _figures_of(group, report) for member in members}
    return [key for name in report["results"] if name not in inner for key in _figures_of(name, report)]


def _figures_of(name: str, report: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for key, value in report["results"].get(name, {}).items():
        metric, _, named = key.partition(",")
        if named and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            numbers[f"tasks/{name}/{metric}" + (f"/{named}" if named != "none" else "")] = float(value)
    return numbers
