"""The cheapest set of values to save within a number of bytes, exact where SciPy is there, near it by a greedy rule.

Owns the choice among the nodes of a `recompute.Graph`. Refuses to know what a program's memory is: its bytes are those
of the saved values alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np

from hlat_jax.passes.recompute import Graph

Solver = Callable[[Graph, float], tuple[str, ...]]


def solver(name: str) -> Solver:
    """Returns `exact`, or `greedy` where `auto` finds no SciPy.

    Raises:
      ValueError: another name, or `exact` without SciPy.
    """
    has_scipy = importlib.util.find_spec("scipy") is not None
    if name not in ("auto", "exact", "greedy"):
        raise ValueError(f"solver={name!r} must be auto, exact or greedy.")
    if name == "exact" and not has_scipy:
        raise ValueError("solver='exact' takes SciPy, which is not installed; install it or take 'greedy'.")
    return greedy if name == "greedy" or not has_scipy else exact


def exact(graph: Graph, budget_bytes: float) -> tuple[str, ...]:
    """Returns the names, in order, that make recomputation cheapest within the bytes: a mixed-integer program.

    For each value s, 1: saved; for each node c, 1: computed again. What gradients read is saved or computed again, and
    so is what a node that is computed again reads. With every s whole the best c are whole too.

    Source: Jain et al. (Checkmate), arXiv 1910.02653, without the order of execution, which is the compiler's here.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    names = sorted(graph.sizes)
    column = {name: len(graph.nodes) + number for number, name in enumerate(names)}
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []

    def require(terms: dict[int, float], least: float) -> None:
        entries.extend((len(lower), at, value) for at, value in terms.items())
        lower.append(least)

    def at_hand(number: int) -> dict[int, float]:
        name = graph.nodes[number].name
        return {number: 1.0} | ({column[name]: 1.0} if name else {})

    for number, node in enumerate(graph.nodes):
        if node.is_read:
            require(at_hand(number), 1.0)
        for parent in node.parents:
            require(at_hand(parent) | {number: -1.0}, 0.0)
    # scaled, so that the solver's tolerances are small parts of both
    sizes = np.array([graph.sizes[name] for name in names], float)
    costs = np.array([node.cost for node in graph.nodes])
    unit = max(sizes.sum(), 1.0)
    require({column[name]: -size / unit for name, size in zip(names, sizes, strict=True)}, -budget_bytes / unit)
    total = max(costs.sum(), 1.0)
    rows, columns, values = zip(*entries, strict=True)
    shape = (len(lower), len(graph.nodes) + len(names))
    found = milp(
        np.concatenate((costs / total, 1e-6 * sizes / unit)),  # of equal costs the fewest bytes
        constraints=LinearConstraint(coo_array((values, (rows, columns)), shape=shape), lower, np.inf),
        bounds=Bounds(0, 1),
        integrality=np.r_[np.zeros(len(graph.nodes)), np.ones(len(names))],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise AssertionError(f"saving nothing is always a solution: {found.message}")
    return _without_idle(graph, [name for name in names if found.x[column[name]] > 0.5])


def _without_idle(graph: Graph, saved: list[str]) -> tuple[str, ...]:
    """Returns the names without those that make nothing cheaper: the solver's tolerance lets some through."""
    cost = graph.cost(saved)
    for name in sorted(saved, key=graph.sizes.get, reverse=True):
        rest = [other for other in saved if other != name]
        if graph.cost(rest) <= cost:
            saved = rest
    return tuple(saved)


def greedy(graph: Graph, budget_bytes: float) -> tuple[str, ...]:
    """Returns names, in order: all, less those that cost least per byte to do without, until they fit.

    Source: the score of RAF's rematerialization, awslabs/raf `src/pass/rematerialization.cc`.
    """
    saved = set(graph.sizes)
    cost = graph.cost(saved)
    while saved:
        without = {name: graph.cost(saved - {name}) - cost for name in sorted(saved)}
        name = min(without, key=lambda name: without[name] / max(graph.sizes[name], 1))
        if without[name] > 0 and graph.num_bytes(saved) <= budget_bytes:
            break
        saved.remove(name)
        cost += without[name]
    return tuple(sorted(saved))
