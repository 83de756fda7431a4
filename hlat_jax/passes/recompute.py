"""The recompute graph of a backward pass: its recomputed operations, their costs, and the saved values that avoid them.

It is read from the trace of the whole differentiated program, in which every checkpoint saves nothing. JAX marks the
recomputed equations, and `naming` has named their results. So the graph has the dtypes of autocast and the trips of
every loop. It has the shapes of one device inside `shard_map`, and only values that some gradient reads.

Costs are in FLOPs of matrix products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
from jax.extend import core

from hlat_jax.passes.dataflow import Dataflow, num_bytes
from hlat_jax.passes.interpret import called
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    COLLECTIVES,
    SAME_ELEMENTS,
    TRANSCENDENTAL,
    aval_bytes,
    inner_jaxprs,
    inner_trips,
    is_transposed,
)
from hlat_jax.passes.products import PRODUCTS, product_flops

_FREE = SAME_ELEMENTS | {"optimization_barrier"}
# Nodes of the search tree. One program of the Gemma in tests/passes/foreign takes 2.5 s with so many, for a choice that
# costs 0.2 % more than the cheapest, and 57 s with all.
_MOST_NODES = 1000

# Costs of other work, in FLOPs of products that take as long; only their proportions matter: of an element of
# elementwise work and reductions, of an exponential, root or quotient, and of a byte of a collective. They approximate
# an H100 whose products reach half of 989 TFLOP/s: 67 TFLOP/s elementwise in fp32 and twice that in bf16, a sixteenth
# of the fp32 rate for exponentials, 450 GB/s of NVLink. Source: its data sheet.
_ELEMENT, _TRANSCENDENTAL, _SENT_BYTE = 4.0, 16.0, 1_000.0


@dataclasses.dataclass(frozen=True)
class Node:
    """One recomputed operation of a backward pass.

    Attributes:
      flops: FLOPs of the products of the operation, over the whole program.
      cost: total cost, `flops` included, over the whole program. It is infinite if the operation cannot be recomputed.
      parents: the nodes that the operation reads. The checkpoint's arguments are always available and not listed.
      name: name by which the result can be saved. It is empty if the result cannot be saved.
      is_read: whether gradients read the result directly.
    """

    flops: float
    cost: float
    parents: tuple[int, ...]
    name: str
    is_read: bool


@dataclasses.dataclass(frozen=True)
class RecomputeGraph:
    """Everything that a program recomputes if nothing is saved.

    Attributes:
      nodes: the recomputed operations, in order of computation.
      sizes: name of a value that can be saved -> its bytes on one device, over all its copies.
    """

    nodes: tuple[Node, ...]
    sizes: dict[str, int]

    def recomputed_nodes(self, saved: Iterable[str]) -> list[Node]:
        """Returns the nodes that are recomputed if the values of these names are saved."""
        saved = set(saved)
        needed = [node.is_read and node.name not in saved for node in self.nodes]
        for number in range(len(self.nodes) - 1, -1, -1):
            if needed[number]:
                for parent in self.nodes[number].parents:
                    needed[parent] |= self.nodes[parent].name not in saved
        return [node for node, is_needed in zip(self.nodes, needed, strict=True) if is_needed]

    def cost(self, saved: Iterable[str]) -> float:
        """Returns the cost of recomputation if the values of these names are saved."""
        return sum(node.cost for node in self.recomputed_nodes(saved))

    def flops(self, saved: Iterable[str]) -> float:
        """Returns the FLOPs of the recomputed products if the values of these names are saved."""
        return sum(node.flops for node in self.recomputed_nodes(saved))

    def num_bytes(self, saved: Iterable[str]) -> int:
        """Returns the bytes of the values of these names."""
        return sum(self.sizes[name] for name in saved)

    def cheapest(self, *, budget_bytes: float = math.inf, byte_cost: float = 0.0) -> tuple[str, ...]:
        """Returns the names of saved values with which recomputation is cheapest, or nearly, by an integer program.

        It minimizes `sum(cost * c) + byte_cost * sum(size * s)`. A saved value has s = 1, and a recomputed node has
        c = 1. Each value that gradients and recomputed nodes read must be saved or recomputed. If all s are integers,
        so are the optimal c. Without a budget, both are. After `_MOST_NODES` nodes of the search tree the best choice
        found is returned.

        Args:
          budget_bytes: most bytes of the saved values.
          byte_cost: cost of keeping a byte.

        Source: Jain et al. (Checkmate), arXiv 1910.02653, without the order of execution, which the compiler chooses.
        """
        if not any(node.is_read for node in self.nodes):
            return ()  # as of a linear function; the program below would have no constraint
        from scipy.optimize import Bounds, LinearConstraint, milp  # not at the top: slow to import
        from scipy.sparse import coo_array

        names = sorted(self.sizes)
        column = {name: len(self.nodes) + number for number, name in enumerate(names)}
        entries: list[tuple[int, int, float]] = []
        lower: list[float] = []

        def require(terms: dict[int, float], least: float) -> None:
            entries.extend((len(lower), at, value) for at, value in terms.items())
            lower.append(least)

        def available(number: int) -> dict[int, float]:
            name = self.nodes[number].name
            return {number: 1.0} | ({column[name]: 1.0} if name else {})

        for number, node in enumerate(self.nodes):
            if node.is_read:
                require(available(number), 1.0)
            for parent in node.parents:
                require(available(parent) | {number: -1.0}, 0.0)
        # scaled, so that the solver's tolerances are small relative to both
        sizes = np.array([self.sizes[name] for name in names], float)
        costs = np.array([node.cost for node in self.nodes])
        is_possible = np.isfinite(costs)
        costs = np.where(is_possible, costs, 0.0)
        unit = max(sizes.sum(), 1.0)
        has_budget = budget_bytes < unit or not byte_cost
        if has_budget:
            require({column[name]: -size / unit for name, size in zip(names, sizes, strict=True)}, -budget_bytes / unit)
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(lower), len(self.nodes) + len(names))
        most = max(costs.sum(), byte_cost * unit, 1.0)
        solution = milp(
            np.concatenate((costs / most, sizes * max(byte_cost / most, 1e-6 / unit))),  # ties go to fewer bytes
            constraints=LinearConstraint(coo_array((values, (rows, columns)), shape=shape), lower, np.inf),
            bounds=Bounds(0, np.r_[is_possible, np.ones(len(names))]),
            integrality=np.r_[np.zeros(len(self.nodes)), np.full(len(names), has_budget)],
            options={"mip_rel_gap": 0.0, "node_limit": _MOST_NODES},
        )
        if solution.x is None:
            assert solution.status in (1, 4), solution.message  # none was found among these nodes
            return ()
        saved = [name for name in names if solution.x[column[name]] > 0.5]
        # the solver's tolerance admits some values that do not reduce the cost
        cost = self.cost(saved)
        for name in sorted(saved, key=self.sizes.get, reverse=True) if has_budget else ():
            rest = [other for other in saved if other != name]
            if self.cost(rest) <= cost:
                saved = rest
        return tuple(saved)


def recompute_graph(jaxpr: core.Jaxpr, *, min_bytes: int) -> RecomputeGraph:
    """Returns the recompute graph of a program.

    Args:
      jaxpr: the whole program, with checkpoints of `naming` that save nothing.
      min_bytes: smallest size of a value that can be saved, over all its copies, as in `RecomputeGraph.sizes`.

    Its `sizes` are empty if nothing can be saved, because nothing is differentiated or all values are too small.
    """
    regions: dict[tuple[str, ...], list[_Region]] = {}
    for region in _regions(jaxpr, trips=1, copies=1):
        regions.setdefault(tuple(sorted(region.sizes)), []).append(region)
    nodes: list[Node] = []
    sizes: dict[str, int] = {}
    for alike in regions.values():
        largest = max(alike, key=lambda region: len(region.nodes))
        trips, first = sum(region.trips for region in alike), len(nodes)
        for node in largest.nodes:
            parents = tuple(sorted(first + parent for parent in node.parents))
            nodes.append(dataclasses.replace(node, flops=trips * node.flops, cost=trips * node.cost, parents=parents))
        for name, size in largest.sizes.items():
            sizes[name] = sizes.get(name, 0) + size * sum(region.copies for region in alike)
    sizes = {name: size for name, size in sizes.items() if size >= min_bytes}
    nodes = [node if node.name in sizes else dataclasses.replace(node, name="") for node in nodes]
    return RecomputeGraph(tuple(nodes), sizes)


class _Region:
    """One differentiated checkpoint.

    Args:
      jaxpr: what its backward pass runs.
      trips: number of executions in the program.
      copies: number of copies of each saved value at one time: a differentiated loop stacks one per trip.

    Attributes:
      nodes: what one execution recomputes, in order.
      sizes: bytes of each named value.
    """

    def __init__(self, jaxpr: core.Jaxpr, *, trips: int, copies: int):
        self.trips, self.copies = trips, copies
        self.nodes: list[Node] = []
        self.sizes: dict[str, int] = {}
        flow = Dataflow(jaxpr, inlined=lambda eqn: None if eqn.primitive.name == "shard_map" else called(eqn))
        node_of: dict[core.Var, int] = {}
        for op in flow.ops:
            parents = {node_of[value] for value in op.operands if value in node_of}
            if any(map(_is_recomputed, op.enclosing)):
                name = op.eqn.params["name"] if op.name == "name" else ""
                node_of |= dict.fromkeys(op.outvars, len(self.nodes))
                self.nodes.append(Node(*_work(op.eqn), tuple(parents), name, is_read=False))
                self.sizes |= {name: num_bytes(op.outvars[0])} if name else {}
            else:
                for parent in parents:
                    self.nodes[parent] = dataclasses.replace(self.nodes[parent], is_read=True)


def _regions(jaxpr: core.Jaxpr, *, trips: int, copies: int, is_backward: bool = False) -> Iterator[_Region]:
    for eqn in jaxpr.eqns:
        # name stacks start empty inside a call or a loop
        is_inside = is_backward or is_transposed(eqn)
        inner = list(inner_jaxprs(eqn))
        is_ours = eqn.primitive.name == CHECKPOINT and getattr(eqn.params["policy"], "is_choice", False)
        if is_ours and any(map(_is_recomputed, inner[0].eqns)):
            region = _Region(inner[0], trips=trips, copies=copies)
            if region.sizes:
                yield region
            continue
        length = inner_trips(eqn)
        # a loop in a backward pass reads what its forward pass has stacked; a loop around both stacks nothing
        stacked = length if is_inside else 1
        for each in inner:
            yield from _regions(each, trips=trips * length, copies=copies * stacked, is_backward=is_inside)


def _is_recomputed(eqn: core.JaxprEqn) -> bool:
    return "rematted_computation" in str(eqn.source_info.name_stack)


def _work(eqn: core.JaxprEqn) -> tuple[float, float]:
    """Returns (FLOPs in products, cost) of one execution of an equation."""
    name = eqn.primitive.name
    if name in _FREE:
        return 0.0, 0.0
    if name in PRODUCTS:
        flops = product_flops(eqn)
        return flops, flops
    inner = list(inner_jaxprs(eqn))
    if inner:
        trips = inner_trips(eqn)
        works = [_work(each) for jaxpr in inner for each in jaxpr.eqns]
        return trips * sum(flops for flops, _ in works), trips * sum(cost for _, cost in works)
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    if name in COLLECTIVES:
        return 0.0, _SENT_BYTE * max(map(aval_bytes, avals))
    rate = _TRANSCENDENTAL if name in TRANSCENDENTAL else _ELEMENT
    return 0.0, rate * max(math.prod(getattr(aval, "shape", ())) for aval in avals)
