"""Tasks of the LM Evaluation Harness by name, as `evaluate --tasks=hlat,lambada_openai` asks for them."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hlat_jax.cli.path_checks import check_folder
from hlat_jax.evaluate.suites import SUITES
from hlat_jax.facts.local_paths import local_path

if TYPE_CHECKING:
    from hlat_jax.evaluate.harness import HarnessModel

_BOOTSTRAP_SAMPLES = 100_000  # the harness's default
_ALLOWS_CODE = "HF_ALLOW_CODE_EVAL"
_SEED, _PYTHON_SEED = 1234, 0  # the harness's defaults
_NAME_LINE = re.compile(rb"""^(?:task|group|tag):[ \t]*["']?([\w.-]+)["']?[ \t]*$""", re.MULTILINE)


def require_harness() -> None:
    """Raises ValueError if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("tasks need the LM Evaluation Harness. Install it with\n  pip install 'hlat_jax[eval]'")


@functools.cache  # listing all tasks takes 8 CPU-s
def manager(folder: str) -> Any:
    """Returns the harness's tasks, and the tasks in `folder` unless it is ""."""
    from hlat_jax.evaluate import lm_eval_compat

    return lm_eval_compat.TaskManager(include_path=folder or None)


class Tasks:
    """Tasks, groups and tags of the harness, and suites of ours, by name."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_fewshot: int = -1,
        limit: int = 0,
        folder: str = "",
        standard_errors: bool = True,
        allow_code: bool = False,
        key: str = "--tasks",
    ):
        """Looks the names up, and fetches nothing.

        Args:
          names: names of tasks, groups, tags and suites.
          num_fewshot: number of solved examples before a question, or -1 for the task's number.
          limit: most questions of each task, or 0 for all.
          folder: folder with more tasks, or "".
          standard_errors: whether to compute standard errors.
          allow_code: whether tasks may execute programs that the model writes, as in HumanEval.
          key: flag or config key that gave the names, for errors.

        Raises:
          ValueError: the harness is not installed, an unknown name, or `num_fewshot` with a suite, which has its own.
        """
        require_harness()
        if folder:
            check_folder(folder, key=f"{key}_folder")
        self._names, self._key, self._limit, self._is_loaded = list(names), key, limit, False
        self._allow_code = allow_code
        self._bootstrap_samples = _BOOTSTRAP_SAMPLES if standard_errors else 0
        self.suites = {name: SUITES[name] for name in names if name in SUITES}
        if self.suites and num_fewshot >= 0:
            raise ValueError(f"--num_fewshot cannot be set, since {min(self.suites)} has shot counts. Leave it out.")
        folder = folder and str(local_path(folder))
        others = [name for name in names if name not in SUITES]
        self._manager = manager(folder)
        for name in others:
            if name not in self._manager.task_index:
                raise _unknown(name, self._manager.all_tasks, folder=folder, key=key)
        self.plan: list[tuple[int | None, list[Any]]] = []
        for suite in self.suites.values():
            self.plan += suite.plan().items()
        if others:
            self.plan.append((num_fewshot if num_fewshot >= 0 else None, others))

    def load(self) -> None:
        """Fetches the data of all tasks and keeps it in memory. A second call does nothing.

        Raises:
          ValueError: data that cannot be fetched, or a task that executes code, which is not allowed.
        """
        if self._is_loaded:
            return
        self._is_loaded = True
        if self._allow_code:
            os.environ[_ALLOWS_CODE] = "1"  # which the metric of `evaluate` asks for
        try:
            with _seed():
                self.plan = [(num_fewshot, self._load_tasks(names)) for num_fewshot, names in self.plan]
        except OSError as error:
            names, reason = ", ".join(self._names), str(error).splitlines()[0]
            raise ValueError(f"{self._key}: data of {names} cannot be fetched ({reason})") from None
        except ValueError as error:  # some tasks try their metric when they are loaded
            raise self._code_refusal(", ".join(self._names)) if _ALLOWS_CODE in str(error) else error from None

    def _code_refusal(self, name: str) -> ValueError:
        return ValueError(
            f"{self._key}: {name} executes programs that the model writes, here and with your rights. Run it "
            "in a container without anything of value, by `evaluate --allow_code`."
        )

    def _load_tasks(self, names: list[str]) -> list[Any]:
        """Returns the loaded tasks and groups of some names, which the harness accepts instead of names."""
        loaded = self._manager.load(names)
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) and not self._allow_code:
                raise self._code_refusal(name)
        groups = list(loaded["groups"].values())
        inner = {task.task_name for group in groups for task in group.get_all_tasks()}
        inner |= {below.name for group in groups for below in group.get_all_groups()}
        return [loaded[kind][name] for kind in ("groups", "tasks") for name in loaded[kind] if name not in inner]

    def __call__(self, model: HarnessModel) -> dict[str, Any]:
        """Returns the harness's report on a model: results, groups, versions and so on, by task."""
        from hlat_jax.evaluate import lm_eval_compat

        self.load()
        results: dict[str, Any] = {}
        for num_fewshot, names in self.plan:
            with _seed():
                loaded = self._manager.load(names)
                for task in loaded["tasks"].values():
                    _set_shots(task, num_fewshot)
                part = lm_eval_compat.evaluate(
                    lm=model,
                    task_dict=loaded,
                    limit=self._limit or None,
                    bootstrap_iters=self._bootstrap_samples,
                    log_samples=False,
                    fewshot_as_multiturn=True,
                    confirm_run_unsafe_code=self._allow_code,
                )
            for key, value in part.items():
                results[key] = {**results.get(key, {}), **value} if isinstance(value, dict) else value
        return results


def _unknown(name: str, known: Iterable[str], *, folder: str, key: str) -> ValueError:
    near = difflib.get_close_matches(name, sorted({*known, *SUITES}), n=5, cutoff=0.0)
    path = f" --include_path {folder}" if folder else ""
    return ValueError(
        f"{key}: there is no task {name!r}. The nearest names are {', '.join(near)}; "
        f"`python -m hlat_jax.evaluate lm_eval ls tasks{path}` lists all."
    )


@contextlib.contextmanager
def _seed() -> Iterator[None]:
    """Seeds Python's and NumPy's global generators, so that tasks shuffle alike at every call; restores both."""
    states = random.getstate(), np.random.get_state()
    random.seed(_PYTHON_SEED)
    np.random.seed(_SEED)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    """Sets the number of solved examples of a task, and their seed, as the harness's `simple_evaluate` does.

    `simple_evaluate` itself also describes the machine, which takes longer than a small task during training.
    """
    own = task.get_config("num_fewshot")
    if own is None or (num_fewshot is not None and own != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=_SEED)


def report(results: dict[str, Any], tasks: Tasks, *, name: str) -> str:
    """Returns the harness's tables of the results of `Tasks`, and each suite's table with the paper's figures."""
    from hlat_jax.evaluate import lm_eval_compat

    tables = [lm_eval_compat.make_table(results)]
    if results.get("groups"):
        tables.append(lm_eval_compat.make_table(results, "groups"))
    return "\n".join([*tables, *(suite.table(results["results"], name=name) for suite in tasks.suites.values())])
