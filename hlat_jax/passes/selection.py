"""Selects the cheapest set of values to save within a number of bytes: exactly, or approximately by a greedy rule.

The bytes are those of the saved values alone, not of the whole program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.recompute import RecomputeGraph

Solver = Callable[[RecomputeGraph, float], RematChoice]


def solver(name: str, *, offloaded_byte: float | None = None) -> Solver:
    """Returns the solver with this name.

    Args:
      name: exact or greedy.
      offloaded_byte: cost of a byte on the host, as `exact` takes it.

    Raises:
      ValueError: an unknown name, or `greedy` where values may go to the host.
    """
    if name not in ("exact", "greedy"):
        raise ValueError(f"solver={name!r} must be exact or greedy.")
    if name == "exact":
        return functools.partial(exact, offloaded_byte=offloaded_byte)
    if offloaded_byte is not None:
        raise ValueError("offload=True needs solver='exact': the greedy solver only keeps or drops values.")
    return greedy


def exact(graph: RecomputeGraph, budget_bytes: float, *, offloaded_byte: float | None = None) -> RematChoice:
    """Returns the choice with the cheapest recomputation within the bytes, by a mixed-integer program.

    Variables: for each value s = 1 if saved and h = 1 if offloaded; for each node c = 1 if recomputed. What gradients
    and recomputed nodes read must be saved, offloaded or recomputed. If s and h are integers, so are the optimal c.

    Args:
      graph: what is recomputed, and the values that can be saved.
      budget_bytes: on the device.
      offloaded_byte: cost of keeping a byte on the host instead, if that is allowed.

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
        kept = {column[name]: 1.0, column[name] + len(names): 1.0} if name else {}
        return {number: 1.0} | kept

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
    total = max(costs.sum(), 1.0)
    rows, columns, values = zip(*entries, strict=True)
    shape = (len(lower), len(graph.nodes) + 2 * len(names))
    moved = sizes * (offloaded_byte or 0.0) / total
    found = milp(
        np.concatenate((costs / total, 1e-6 * sizes / unit, moved)),  # ties go to fewer bytes
        constraints=LinearConstraint(coo_array((values, (rows, columns)), shape=shape), lower, np.inf),
        bounds=Bounds(0, np.r_[np.ones(shape[1] - len(names)), np.full(len(names), offloaded_byte is not None)]),
        integrality=np.r_[np.zeros(len(graph.nodes)), np.ones(2 * len(names))],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise AssertionError(f"saving nothing is always a solution: {found.message}")
    offloaded = tuple(name for name in names if found.x[column[name] + len(names)] > 0.5)
    return RematChoice(
        _without_idle(graph, [name for name in names if found.x[column[name]] > 0.5], offloaded), offloaded
    )


def _without_idle(graph: RecomputeGraph, saved: list[str], offloaded: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the saved names without those that do not reduce the cost: the solver's tolerance admits some."""
    cost = graph.cost({*saved, *offloaded})
    for name in sorted(saved, key=graph.sizes.get, reverse=True):
        rest = [other for other in saved if other != name]
        if graph.cost({*rest, *offloaded}) <= cost:
            saved = rest
    return tuple(saved)


def greedy(graph: RecomputeGraph, budget_bytes: float) -> RematChoice:
    """Returns the choice left after dropping values, the cheapest to recompute per byte first, until the rest fits.

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
    return RematChoice(tuple(sorted(saved)))
