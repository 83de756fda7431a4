"""Selects the set of values to save within a number of bytes whose recomputation is the cheapest.

The bytes are those of the saved values alone, not of the whole program.
"""

from __future__ import annotations

import numpy as np

from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.recompute import RecomputeGraph


def cheapest_choice(graph: RecomputeGraph, budget_bytes: float) -> RematChoice:
    """Returns the choice with the cheapest recomputation within the bytes, by a mixed-integer program.

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
