"""Searches for the bytes of values to save under a memory budget.

The search compiles a choice, measures it, and corrects the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.recompute import RecomputeGraph

# After a choice that leaves less than this share of the budget unused, only the next larger one is tried.
_CLOSE = 0.02


class Trials:
    """Compiles the program of each choice once: (measured bytes, FLOPs of its products).

    Args:
      traced: choice -> the traced program.
      measure: traced program -> bytes.
      plain: result of the program without rematerialization, if it is known.
    """

    def __init__(
        self,
        traced: Callable[[RematChoice | None], Any],
        measure: Callable[[Any], int],
        plain: tuple[int, float] | None = None,
    ):
        self.trace, self._measure = functools.cache(traced), measure
        self._results: dict[RematChoice | None, tuple[int, float]] = {} if plain is None else {None: plain}

    @property
    def count(self) -> int:
        return len(self._results)

    def __call__(self, choice: RematChoice | None) -> tuple[int, float]:
        if choice not in self._results:
            program = self.trace(choice)
            self._results[choice] = self._measure(program), total_flops(live_jaxpr(program))
        return self._results[choice]


def search_choice(trial: Trials, graph: RecomputeGraph, *, budget_bytes: int, most: int) -> RematChoice:
    """Returns the cheapest choice found that fits, by a secant search for the bytes to save.

    Near the budget, one more choice is tried nevertheless: saving more may need less working memory.
    """
    fits, kept, measured = RematChoice(), 0, trial(RematChoice())[0]
    full = measured
    above = graph.num_bytes(graph.cheapest()) + 1  # does not fit, or nothing more can be saved
    above_measured = None
    guess = budget_bytes - measured
    while trial.count < most:
        is_close = kept > 0 and budget_bytes - measured < _CLOSE * budget_bytes
        choice = _larger(graph, low=kept, high=above, guess=kept if is_close else guess)
        if choice is None:
            break
        found_kept, found = graph.num_bytes(choice.saved), trial(choice)[0]
        if found <= budget_bytes:
            fits, kept, measured = choice, found_kept, found
        elif is_close:
            break
        else:
            above, above_measured = found_kept, found
        if above_measured is None:
            slope = min(4.0, max(1.0, kept / max(measured - full, 1)))  # bytes saved per additional measured byte
        else:
            slope = (above - kept) / max(above_measured - measured, 1)
        guess = kept + slope * (budget_bytes - measured)
    return fits


def _larger(graph: RecomputeGraph, *, low: int, high: int, guess: float) -> RematChoice | None:
    """Returns a choice near `guess` that saves more than `low` and fewer than `high` bytes; None if none is found."""
    step = max(guess - low, 0.01 * (high - low))
    for _ in range(8):
        choice = RematChoice(graph.cheapest(budget_bytes=min(low + step, high - 1)))
        if low < graph.num_bytes(choice.saved) < high:
            return choice
        step *= 2
    return None
