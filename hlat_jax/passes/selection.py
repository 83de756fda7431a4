"""Selects the values to save under a memory budget: the cheapest set within some bytes, and a search for the bytes.

The search compiles a choice, measures it, and corrects the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.recompute import RecomputeGraph

# After a choice that leaves less than this share of the budget unused, only the next larger one is tried.
_CLOSE = 0.02


def cheapest_choice(graph: RecomputeGraph, budget_bytes: float) -> RematChoice:
    """Returns the choice with the cheapest recomputation within the bytes of saved values, by a mixed-integer program.

    Variables: for each value s = 1 if saved; for each node c = 1 if recomputed. What gradients and recomputed nodes
    read must be saved or recomputed. If s are integers, so are the optimal c.

    Source: Jain et al. (Checkmate), arXiv 1910.02653, without the order of execution, which the compiler chooses.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # not at the top: slow to import
    from scipy.sparse import coo_array

    names = sorted(graph.sizes)
    column = {name: len(graph.nodes) + number for number, name in enumerate(names)}
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []

    def require(terms: dict[int, float], least: float) -> None:
        entries.extend((len(lower), at, value) for at, value in terms.items())
        lower.append(least)

    def available(number: int) -> dict[int, float]:
        name = graph.nodes[number].name
        return {number: 1.0} | ({column[name]: 1.0} if name else {})

    for number, node in enumerate(graph.nodes):
        if node.is_read:
            require(available(number), 1.0)
        for parent in node.parents:
            require(available(parent) | {number: -1.0}, 0.0)
    # scaled, so that the solver's tolerances are small relative to both
    sizes = np.array([graph.sizes[name] for name in names], float)
    costs = np.array([node.cost for node in graph.nodes])
    unit = max(sizes.sum(), 1.0)
    require({column[name]: -size / unit for name, size in zip(names, sizes, strict=True)}, -budget_bytes / unit)
    rows, columns, values = zip(*entries, strict=True)
    shape = (len(lower), len(graph.nodes) + len(names))
    found = milp(
        np.concatenate((costs / max(costs.sum(), 1.0), 1e-6 * sizes / unit)),  # ties go to fewer bytes
        constraints=LinearConstraint(coo_array((values, (rows, columns)), shape=shape), lower, np.inf),
        bounds=Bounds(0, 1),
        integrality=np.r_[np.zeros(len(graph.nodes)), np.ones(len(names))],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise AssertionError(f"saving nothing is always a solution: {found.message}")
    saved = [name for name in names if found.x[column[name]] > 0.5]
    # the solver's tolerance admits some values that do not reduce the cost
    cost = graph.cost(saved)
    for name in sorted(saved, key=graph.sizes.get, reverse=True):
        rest = [other for other in saved if other != name]
        if graph.cost(rest) <= cost:
            saved = rest
    return RematChoice(tuple(saved))


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
    above = (
        graph.num_bytes(cheapest_choice(graph, float("inf")).saved) + 1
    )  # does not fit, or nothing more can be saved
    above_measured = None
    guess = budget_bytes - measured
    while trial.count < most:
        is_close = kept > 0 and budget_bytes - measured < _CLOSE * budget_bytes
        choice = _next(graph, low=kept, high=above) if is_close else _between(graph, low=kept, high=above, guess=guess)
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


def _between(graph: RecomputeGraph, *, low: int, high: int, guess: float) -> RematChoice | None:
    """Returns a choice near `guess` that saves more than `low` and fewer than `high` bytes; None if none is found."""
    guess = min(max(guess, low + 0.1 * (high - low)), high - 1)
    for _ in range(6):
        choice = cheapest_choice(graph, guess)
        if low < graph.num_bytes(choice.saved) < high:
            return choice
        guess = (guess + high) / 2
    return None


def _next(graph: RecomputeGraph, *, low: int, high: int) -> RematChoice | None:
    """Returns a choice that saves little more than `low`, and fewer than `high` bytes; None if none is found."""
    short, found = low, None  # the largest budget known to save nothing more
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0):
        limit = low + share * (high - 1 - low)
        choice = cheapest_choice(graph, limit)
        if low < graph.num_bytes(choice.saved) < high:
            found = choice
            break
        short = limit
    for _ in range(5 if found else 0):
        middle = (short + graph.num_bytes(found.saved)) / 2
        choice = cheapest_choice(graph, middle)
        if low < graph.num_bytes(choice.saved) < high:
            found = choice
        else:
            short = middle
    return found
