"""The task suites of the HLAT paper, with tasks of the harness, shot counts, and the published figures.

Source: HLAT, arXiv 2404.10630, tables II and V, with their shot counts. The paper does not give three choices made
here. BoolQ has no examples. `acc_norm`, normalised by the length of the answers, is used if a task has it. GSM8K is
scored by the part of the answer after `####` (`strict-match`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table, which is the mean of a metric over tasks, in percent.

    Attributes:
      title: title in the paper.
      num_fewshot: number of solved examples before a question.
      metrics: task of the harness -> the key of its metric there, "METRIC,FILTER".
    """

    title: str
    num_fewshot: int
    metrics: Mapping[str, str]

    def mean(self, results: Mapping[str, Mapping[str, Any]]) -> float:
        """Returns the figure from `results` of the harness."""
        return 100.0 * statistics.mean(results[task][metric] for task, metric in self.metrics.items())

    def standard_error(self, results: Mapping[str, Mapping[str, Any]]) -> float | None:
        """Returns the standard error of a figure over independent tasks, or None if a task has none."""
        keys = {task: metric.replace(",", "_stderr,") for task, metric in self.metrics.items()}
        errors = [results[task].get(key) for task, key in keys.items()]
        if not all(isinstance(error, float | int) for error in errors):  # "N/A", or a metric without
            return None
        return 100.0 * math.hypot(*errors) / len(errors)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Columns, the rows published for them, and notes printed below the table."""

    columns: tuple[Column, ...]
    published: Mapping[str, tuple[float, ...]]
    notes: tuple[str, ...]

    def plan(self) -> dict[int, list[str]]:
        """Returns shot count -> tasks."""
        tasks_by_shots: dict[int, list[str]] = {}
        for column in self.columns:
            tasks_by_shots.setdefault(column.num_fewshot, []).extend(column.metrics)
        return tasks_by_shots

    def table(self, results: Mapping[str, Mapping[str, Any]], *, name: str) -> str:
        """Returns the figures of `results` in a row called `name`, with their standard errors, above the paper's."""
        cells = {"": [column.title for column in self.columns]}
        cells[" "] = [f"{column.num_fewshot}-shot" for column in self.columns]
        cells[name] = [f"{column.mean(results):.1f}" for column in self.columns]
        errors = [column.standard_error(results) for column in self.columns]
        cells["standard error"] = ["–" if error is None else f"{error:.1f}" for error in errors]
        cells |= {label: [f"{figure:.1f}" for figure in figures] for label, figures in self.published.items()}
        first, width = max(map(len, cells)), 2 + max(map(len, cells[""]))
        lines = [label.ljust(first) + "".join(cell.rjust(width) for cell in row) for label, row in cells.items()]
        return "\n".join((*lines, *self.notes))


_TABLE_2 = Suite(
    columns=(
        Column("MMLU", 5, {"mmlu": "acc,none"}),
        Column(
            "CR",
            0,
            {
                "piqa": "acc_norm,none",
                "hellaswag": "acc_norm,none",
                "winogrande": "acc,none",
                "arc_easy": "acc_norm,none",
                "arc_challenge": "acc_norm,none",
                "openbookqa": "acc_norm,none",
            },
        ),
        Column("WK", 5, {"nq_open": "exact_match,remove_whitespace", "triviaqa": "exact_match,remove_whitespace"}),
        Column("RC", 0, {"boolq": "acc,none"}),
        Column("Math", 8, {"gsm8k": "exact_match,strict-match"}),
    ),
    published={
        "OpenLLaMA-1 7B": (30.5, 58.4, 40.6, 70.5, 5.2),
        "OpenLLaMA-2 7B": (41.1, 61.3, 37.9, 72.4, 6.8),
        "LLaMA-1 7B": (35.1, 63.5, 43.6, 76.5, 11.0),
        "LLaMA-2 7B": (45.3, 64.0, 45.2, 77.4, 14.6),
        "HLAT-7B": (41.3, 59.5, 38.8, 72.5, 9.4),
        "OpenLLaMA-1 13B": (43.5, 62.0, 45.9, 72.3, 8.3),
        "LLaMA-1 13B": (46.9, 65.3, 49.7, 78.1, 17.8),
        "LLaMA-2 13B": (45.3, 66.3, 50.5, 81.7, 28.7),
        "LLaMA-1 33B": (57.8, 68.9, 54.6, 83.1, 35.6),
        "LLaMA-1 65B": (63.4, 69.8, 57.0, 85.3, 50.9),
        "LLaMA-2 70B": (68.9, 70.7, 59.0, 85.0, 56.8),
        "HLAT-70B": (65.1, 67.3, 54.5, 82.6, 48.5),
    },
    notes=(
        "All but the first row: HLAT, arXiv 2404.10630, table II. CR: commonsense reasoning, WK: world knowledge,",
        "RC: reading comprehension. Not run: HumanEval (it executes what the model writes), so no average.",
    ),
)
_TABLE_5 = Suite(
    columns=(
        Column("CrowS en", 0, {"crows_pairs_english": "pct_stereotype,none"}),
        Column("CrowS fr", 0, {"crows_pairs_french": "pct_stereotype,none"}),
        Column("TruthfulQA mc1", 0, {"truthfulqa_mc1": "acc,none"}),
        Column("TruthfulQA mc2", 0, {"truthfulqa_mc2": "acc,none"}),
    ),
    published={
        "OpenLLaMA-1 7B": (64.6, 50.1, 23.1, 35.1),
        "OpenLLaMA-2 7B": (65.6, 51.7, 22.6, 34.6),
        "LLaMA-1 7B": (53.7, 47.5, 22.0, 34.1),
        "LLaMA-2 7B": (66.9, 54.9, 25.2, 39.0),
        "HLAT-7B": (65.2, 54.5, 23.6, 37.2),
        "LLaMA-1 65B": (69.3, 58.3, 27.9, 42.6),
        "LLaMA-2 70B": (69.8, 63.5, 30.6, 44.8),
        "HLAT-70B": (68.1, 59.1, 32.3, 45.9),
    },
    notes=("All but the first row: HLAT, arXiv 2404.10630, table V. For CrowS-Pairs lower is better.",),
)
SUITES = {"hlat": _TABLE_2, "hlat_bias": _TABLE_5}
