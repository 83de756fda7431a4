"""Tasks of the LM Evaluation Harness by name, as `evaluate --tasks=hlat,lambada_openai` asks for them.

Owns which run of the harness answers which names, and what is said when it cannot. The harness itself is the `eval`
extra, and imported when tasks are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax.config import nearest
from hlat_jax.evaluate.suites import SUITES

_RESAMPLED = 100_000  # the harness's own number
_SEED, _SEED_OF_RANDOM = 1234, 0  # likewise


@dataclasses.dataclass(frozen=True)
class Options:
    """How tasks are run.

    Attributes:
      num_fewshot: solved examples before each question; -1: as each task says. A suite has its own.
      limit: questions of each task, the first ones; 0: all.
      folder: with tasks of one's own, in YAML; "": none.
      standard_errors: beside the figures; for some of these that is a hundred thousand samples, in processes of theirs.
      key: what the names were given by, for errors.
    """

    num_fewshot: int = -1
    limit: int = 0
    folder: str = ""
    standard_errors: bool = True
    key: str = "--tasks"


def require_harness() -> None:
    """Raises ValueError where the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("tasks need the LM Evaluation Harness: pip install 'hlat_jax[eval]'.")


@functools.cache  # reading the names of all tasks takes seconds
def manager(folder: str) -> Any:
    """Returns the harness's own tasks, and those in `folder`, unless that is ""."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder or None)


class Tasks:
    """Names that were found to be tasks, groups, tags, or suites of ours.

    Raises:
      ValueError: no harness, an unknown name, or shot counts for a suite, which has its own.
    """

    def __init__(self, names: Sequence[str], options: Options):
        require_harness()
        if options.folder and not pathlib.Path(options.folder).is_dir():
            raise ValueError(f"{options.key}_folder={options.folder}: no such folder (from {pathlib.Path.cwd()}).")
        self._names, self._options, self._loaded_already = list(names), options, False
        self.suites = {name: SUITES[name] for name in names if name in SUITES}
        if self.suites and options.num_fewshot >= 0:
            raise ValueError(f"--num_fewshot: the suite {min(self.suites)} has shot counts of its own; leave it out.")
        self._manager = manager(options.folder)
        known = {*self._manager.all_tasks, *SUITES}
        for name in names:
            if name not in known:
                raise ValueError(f"{options.key}: there is no task {name!r}. {nearest(name, known)}")
        self.plan: list[tuple[int | None, list[Any]]] = [
            pair for suite in self.suites.values() for pair in suite.plan().items()
        ]
        others = [name for name in names if name not in SUITES]
        if others:
            self.plan.append((options.num_fewshot if options.num_fewshot >= 0 else None, others))

    def load(self) -> None:
        """Fetches and keeps the data of all tasks, which is done at every call where it was not done before.

        Raises:
          ValueError: data that cannot be fetched, or a task that two names ask for.
        """
        if self._loaded_already:
            return
        self._loaded_already = True
        try:
            with _seeded():
                self.plan = [(num_fewshot, self._loaded(names)) for num_fewshot, names in self.plan]
                self._refuse_twice()
        except OSError as error:
            names, why = ", ".join(self._names), str(error).splitlines()[0]
            raise ValueError(f"{self._options.key}: data of {names} cannot be fetched: {why}") from None

    def _refuse_twice(self) -> None:
        seen: set[str] = set()
        for _, found in self.plan:
            names = self._manager.load(found)["tasks"].keys()
            twice = sorted(seen & names)
            if twice:
                raise ValueError(f"{self._options.key}: {twice[0]} is asked for twice, by two names; leave one out.")
            seen |= names

    def _loaded(self, names: list[str]) -> list[Any]:
        """Returns the tasks and groups of some names as the harness takes them instead of these."""
        found = self._manager.load(names)
        groups = list(found["groups"].values())
        inner = {task.task_name for group in groups for task in group.get_all_tasks()}
        inner |= {below.name for group in groups for below in group.get_all_groups()}
        return [found[kind][name] for kind in ("groups", "tasks") for name in found[kind] if name not in inner]

    def __call__(self, model: Any) -> dict[str, Any]:
        """Returns what the harness reports of a `harness.HarnessModel`: results, groups, versions and so on, by task.

        Raises:
          ValueError: a task is asked for with two shot counts.
        """
        from lm_eval.evaluator import evaluate

        self.load()
        found: dict[str, Any] = {}
        for num_fewshot, names in self.plan:
            with _seeded():
                loaded = self._manager.load(names)
                for task in loaded["tasks"].values():
                    _set_shots(task, num_fewshot)
                part = evaluate(
                    lm=model,
                    task_dict=loaded,
                    limit=self._options.limit or None,
                    bootstrap_iters=_RESAMPLED if self._options.standard_errors else 0,
                    log_samples=False,
                    fewshot_as_multiturn=True,
                )
            for key, value in part.items():
                found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
        return found


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Has tasks that shuffle draw the same at every call, and leaves the generators as they were."""
    states = random.getstate(), np.random.get_state()
    random.seed(_SEED_OF_RANDOM)
    np.random.seed(_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    """Has a task show so many solved examples, the same ones at every call, as the harness's `simple_evaluate` does.

    We do not call that: it then describes the machine, which takes longer than small tasks during a training.
    """
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=_SEED)


def report(found: dict[str, Any], tasks: Tasks, *, name: str) -> str:
    """Returns the tables of what `Tasks` found: the harness's, and each suite's beside the paper."""
    from lm_eval.utils import make_table

    tables = [make_table(found)]
    if found.get("groups"):
        tables.append(make_table(found, "groups"))
    return "\n".join([*tables, *(suite.table(found["results"], name=name) for suite in tasks.suites.values())])
