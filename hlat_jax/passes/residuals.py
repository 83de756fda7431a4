"""Selects what the backward pass keeps of cheap work: the fewest bytes from which the rest is recomputed.

    loss = select_residuals(autocast(loss_fp32, "bf16"))
    value, grads = jax.value_and_grad(loss)(params, batch)

Automatic differentiation keeps every operand that a derivative reads: of `gelu(x @ w) @ v`, several arrays of one
shape. Here the values to keep are a minimum cut of the graph of forward values, each value with its bytes, between the
arguments, which are held in any case, and what derivatives read. Products, gathers, random bits, collectives, loops and
`custom_vjp` are never executed again.

Source: RAF's gradient input selection, arXiv 2303.04759; Jain et al. (Checkmate), arXiv 1910.02653, for recomputation
as an optimization problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from hlat_jax.host.neuron_lowering import elide_idle_roundings
from hlat_jax.passes import derivatives
from hlat_jax.passes.dataflow import Dataflow, Op, numbers_of
from hlat_jax.passes.jaxpr import bind_shard_map, is_inexact, place_of, rebind, trace_call

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
# Bytes of fp32 that are kept rather than one FLOP computed again: the first at which recomputation stays within its
# share of the FLOPs of products, else the last. Narrow values take fewer bytes and as many FLOPs.
_RATES = (0.01, 0.03, 0.1, 0.5)
_SHARE = 0.04  # of forward products; a step has three times as many
# A value that several operations read is recomputed for each group of them between which more products than these lie.
_NEAR_PRODUCTS = 3


def select_residuals(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Returns a function with the same results, whose backward pass keeps fewer bytes of cheap intermediates.

    Derivatives are those of `fn`. Each call traces `fn`: wrap the result, or its caller, in `jax.jit`. Apply it after
    `autocast`.

    Args:
      fn: a function that JAX can trace; arguments as for `autocast`.
    """

    def selected(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        elide_idle_roundings()
        closed, leaves, tree = trace_call(fn, args, kwargs)
        outs = _Selection(closed, free=[True] * len(leaves))(*leaves)
        return jax.tree.unflatten(tree, outs)

    selected.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return selected


@dataclasses.dataclass(eq=False)
class _Op(Op):
    """An operation, and what it is to a backward pass.

    Attributes:
      kind: cheap, costly, or opaque: outside every checkpoint.
      read: operands that its derivative reads.
      flops: FLOPs, or as long as they take.
      bind: operands -> results.
    """

    kind: str = "opaque"
    read: tuple[int, ...] = ()
    flops: float = 0.0
    bind: Callable | None = None

    def results(self, env: dict[int, Any]) -> list[Any]:
        ins = [value.val if isinstance(value, core.Literal) else env[value] for value in self.ins]
        with contextlib.ExitStack() as places:
            for eqn in self.enclosing:
                places.enter_context(place_of(eqn))
            return self.bind(ins)


class _Selection(Dataflow):
    """A closed jaxpr with the choice of what its derivative keeps; calling it emits the program.

    Args:
      closed: the jaxpr.
      free: for each input, whether it is held in any case.
      prevent_cse: the argument of `jax.checkpoint`.
      num_invariants: number of first inputs of a loop's body that are the same in all trips.
      trips: number of trips of that loop.

    Attributes:
      needed: values that derivatives read or that are recomputed from; the others are not kept.
      recomputed: those of `needed` that are computed again.
    """

    def __init__(
        self,
        closed: Any,
        *,
        free: Sequence[bool],
        prevent_cse: bool = True,
        num_invariants: int = 0,
        trips: int = 1,
    ):
        super().__init__(closed.jaxpr, inlined=derivatives.inlined_call, op=_Op)
        self.closed, self.prevent_cse, self.trips = closed, prevent_cse, trips
        num_consts = len(closed.jaxpr.constvars)
        self.free = set(itertools.compress(self.inputs, [*[True] * num_consts, *free]))
        self.invariants = set(self.inputs[: num_consts + num_invariants]) if trips > 1 else set()
        self.held: set[int] = set()  # by operations outside of all checkpoints
        self._classify()
        far = self._far()
        costly = [op for op in self.ops if op.kind == "costly"]
        products = sum(op.flops for op in costly)
        dtypes = [self.avals[value].dtype for op in costly if op.flops for value in op.outs]
        width = min((dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)), default=4)
        for rate in _RATES:
            self.needed, self.recomputed = self._cut(rate * min(width, 4) / 4, far)
            self.regions = self._regions()
            if sum(region.flops_again for region in self.regions) <= _SHARE * products:
                break

    def __call__(self, *args: Any) -> list[Any]:
        env = dict(zip(self.inputs, (*self.closed.consts, *args), strict=True))
        for region in self.regions:
            env.update(region.results(env))
        return [value.val if isinstance(value, core.Literal) else env[value] for value in self.outputs]

    def _classify(self) -> None:
        active = {value for value in self.inputs if is_inexact(self.avals[value])}
        for op in self.ops:
            eqn = op.eqn
            op.bind = lambda ins, eqn=eqn: rebind(eqn, ins)
            op.kind = derivatives.kind_of(eqn)
            op.flops = derivatives.flops_of(eqn)
            if self.invariants.issuperset(op.operands):
                self.invariants.update(op.outs)
            is_active = [not isinstance(value, core.Literal) and value in active for value in op.ins]
            if op.kind == "opaque":
                op.bind = self._transformed(op)
            if not any(is_active) or eqn.primitive.name == "stop_gradient":
                continue
            active |= {value for value in op.outs if is_inexact(self.avals[value])}
            if op.kind == "opaque":
                ins, outs = derivatives.held_by_derivative(eqn, is_active, bind=op.bind)
                self.held.update(numbers_of(op.ins[i] for i in ins))
                self.held |= {op.outs[i] for i in outs}
                continue
            read = derivatives.read_by_derivative(eqn, is_active)
            if read is None:
                op.kind = "opaque"
                self.held |= set(op.operands)
            else:
                op.read = tuple(set(numbers_of(op.ins[i] for i in read)))

    def _transformed(self, op: _Op) -> Callable:
        """Returns what binds an operation that stands outside of all checkpoints, with its functions transformed."""
        eqn, params = op.eqn, op.eqn.params
        is_free = [isinstance(value, core.Literal) or value in self.free for value in op.ins]
        if eqn.primitive.name == "scan":
            num_consts, num_carry = params["num_consts"], params["num_carry"]
            free = [True] * num_consts + [False] * num_carry + is_free[num_consts + num_carry :]
            body = _retrace(params["jaxpr"], free, num_invariants=num_consts, trips=params["length"])
            return lambda ins: rebind(eqn, ins, jaxpr=body)
        if eqn.primitive.name == "cond":
            branches = tuple(_retrace(branch, is_free[1:]) for branch in params["branches"])
            return lambda ins: rebind(eqn, ins, branches=branches)
        if eqn.primitive.name == "shard_map":
            closed = core.ClosedJaxpr(params["jaxpr"], [])

            def local(*ins: Any) -> list[Any]:  # selected where the axes of the mesh are bound
                return _Selection(closed, free=is_free, prevent_cse=self.prevent_cse)(*ins)

            return lambda ins: bind_shard_map(eqn, local, ins)
        return op.bind

    def _cut(self, rate: float, far: set[int]) -> tuple[set[int], set[int]]:
        """Returns (values that the backward pass needs, those of them that are recomputed), by a minimum cut.

        A value has two nodes: `out` is on the source's side if the value is needed, `again` if it is recomputed too.

        Args:
          rate: bytes to keep rather than to compute a FLOP again.
          far: values that are kept if they are needed.
        """
        source, sink, num_values = 0, 1, len(self.avals)
        edges: dict[tuple[int, int], float] = {}
        infinite: set[tuple[int, int]] = set()

        def out(value: int) -> int:
            return 2 + value

        def again(value: int) -> int:
            return 2 + num_values + value

        for number, op in enumerate(self.ops):
            node = 2 + 2 * num_values + number
            infinite |= {(source, out(value)) for value in op.read if value not in self.free}
            for value in op.outs:
                kept = 0.0 if value in self.held else max(1.0, self.num_bytes(value))
                if value in self.invariants:
                    kept /= self.trips
                if op.kind == "cheap" and value not in far:
                    edges[out(value), again(value)] = kept
                    infinite.add((again(value), node))
                elif kept:
                    edges[out(value), sink] = kept
            if op.kind == "cheap":
                # a tiny cost for moves too, so that chains are short; work that a loop would repeat counts more
                cost = rate * op.flops + 0.001 * sum(map(self.num_bytes, op.outs))
                edges[node, sink] = 8 * cost if self.invariants.issuperset(op.outs) else cost
                infinite |= {(node, out(value)) for value in op.operands if value not in self.free}
        for value in self.inputs:
            if value not in self.free and value not in self.held:
                edges[out(value), sink] = max(1, self.num_bytes(value))
        reached = _source_side(2 + 2 * num_values + len(self.ops), source, sink, edges, infinite)
        needed = {value for value in range(num_values) if out(value) in reached}
        return needed, {value for value in needed if again(value) in reached}

    def _far(self) -> set[int]:
        """Returns cheap values that are kept if they are needed, so that no chain of recomputation is long.

        Such chains pass products: each state of a residual stream could be recomputed from all results added to it. A
        value may be recomputed from one that was so before the products between them, but no further.
        """
        level = dict.fromkeys(self.inputs, 0)  # products before a value
        hops = dict.fromkeys(self.inputs, 0)  # products that the chain to a value passes
        far = set()
        for op in self.ops:
            top = max((level[value] for value in op.operands), default=0)
            size = max(map(self.num_bytes, op.outs), default=0)
            hop = 0
            for value in op.operands:
                before = self.producer.get(value)
                is_chained = before is not None and before.kind == "cheap" and value not in far
                is_passed = is_chained and level[value] < top and 8 * self.num_bytes(value) >= size
                hop = max(hop, hops[value] + is_passed)
            if op.kind != "cheap":
                top, hop = top + 1, 0
            elif hop > 1:
                far |= set(op.outs)
                hop = 0
            level.update(dict.fromkeys(op.outs, top))
            hops.update(dict.fromkeys(op.outs, hop))
        return far

    def _regions(self) -> list[_Region]:
        """Returns the program as consecutive regions, each of which is checkpointed or needs no checkpoint."""
        places = {op: place for place, op in enumerate(self.ops)}
        num_products = np.cumsum([op.kind != "cheap" for op in self.ops])
        blocked = np.zeros(len(self.ops) + 1, int)  # differences: no region may end after this operation
        uses: dict[int, list[int]] = {}
        for place, op in enumerate(self.ops):
            for value in self._recomputed_for(op):
                uses.setdefault(value, [places[self.producer[value]]]).append(place)
        for at in uses.values():
            for first, then in itertools.pairwise(at):
                if num_products[then] - num_products[first] <= _NEAR_PRODUCTS:
                    blocked[first] += 1
                    blocked[then] -= 1
        blocked = np.cumsum(blocked)
        parts: list[list[_Op]] = [[]]
        for place, op in enumerate(self.ops):
            if op.kind == "opaque":
                parts += [[op], []]
                continue
            parts[-1].append(op)
            if op.kind == "costly" and not blocked[place]:
                parts.append([])
        regions = [_Region(self, ops, places) for ops in parts if ops]
        wanted = set(numbers_of(self.outputs))
        for region in reversed(regions):
            region.outs = [value for op in region.ops for value in op.outs if value in wanted]
            wanted.update(region.inputs)
        return regions

    def _recomputed_for(self, op: _Op) -> set[int]:
        """Returns the values that are recomputed for the derivative of an operation."""
        found, stack = set(), [value for value in op.read if value in self.recomputed]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack.extend(one for one in self.producer[value].operands if one in self.recomputed)
        return found


class _Region:
    """Consecutive operations of a program, in one checkpoint if its backward pass recomputes something.

    Attributes:
      ops: the operations.
      foreign: values of earlier regions that are recomputed here.
      chain: operations that recompute them, from values that are kept.
      inputs: values that the region reads.
      outs: values that are read after it.
    """

    def __init__(self, program: _Selection, ops: list[_Op], places: dict[_Op, int]):
        self.program, self.ops = program, ops
        self.outs: list[int] = []
        made = {value for op in ops for value in op.outs}
        again = set().union(*map(program._recomputed_for, ops)) if ops[0].kind != "opaque" else set()
        self.is_checkpointed = bool(again)
        self.flops_again = sum(op.flops for op in {program.producer[value] for value in again})
        read = dict.fromkeys(value for op in ops for value in op.operands)
        self.foreign = [value for value in read if value in again - made]
        chain = sorted({program.producer[value] for value in again - made}, key=places.get)
        self.chain = [op for op in chain if op.kind == "cheap"]
        above = {value for op in self.chain for value in op.outs}
        inputs = [value for value in read if value not in made]
        inputs += [value for op in self.chain for value in op.operands if value not in above]
        self.inputs = list(dict.fromkeys(inputs))
        self.named = program.needed - program.recomputed if self.is_checkpointed else set()

    def results(self, env: dict[int, Any]) -> dict[int, Any]:
        """Returns value -> array for the values that are read after this region."""
        ins = [env[value] for value in self.inputs]
        run = self._run
        if self.is_checkpointed:
            policy = jax.checkpoint_policies.save_only_these_names(_KEPT)
            run = jax.checkpoint(run, policy=policy, prevent_cse=self.program.prevent_cse)
        return dict(zip(self.outs, run(*ins), strict=True))

    def _run(self, *ins: Any) -> list[Any]:
        env = dict(zip(self.inputs, ins, strict=True))
        if self.chain:
            again = dict(env)
            for op in self.chain:
                again.update(zip(op.outs, op.results(again), strict=True))
            env |= {value: _as_recomputed(again[value], env[value]) for value in self.foreign}
        for op in self.ops:
            outs = op.results(env)
            env.update(
                (value, checkpoint_name(out, _KEPT) if value in self.named else out)
                for value, out in zip(op.outs, outs, strict=True)
            )
        return [env[value] for value in self.outs]


_KEPT = "kept by select_residuals"


def _as_recomputed(recomputed: Any, value: Any) -> Any:
    """Returns `recomputed`, with the derivative of the equal `value`."""
    return _recomputed(recomputed, value) if is_inexact(value) else recomputed


@jax.custom_jvp
def _recomputed(recomputed, value):
    return recomputed


@_recomputed.defjvp
def _recomputed_jvp(primals, tangents):
    return primals[0], tangents[1]  # the former has its own derivative, which a second derivative reads


def _retrace(closed: Any, free: Sequence[bool], *, num_invariants: int = 0, trips: int = 1) -> Any:
    """Returns the transformed jaxpr of the body of a loop or branch, which is compiled apart from its backward pass."""
    selection = _Selection(closed, free=free, prevent_cse=False, num_invariants=num_invariants, trips=trips)
    if not any(region.is_checkpointed for region in selection.regions):
        return closed
    return jax.make_jaxpr(selection)(*closed.in_avals)


def _source_side(num_nodes: int, source: int, sink: int, edges: dict, infinite: set) -> set[int]:
    """Returns the nodes on the source's side of a minimum cut, as few as possible."""
    from scipy.sparse import coo_array, csr_array  # not at the top: slow to import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    most = 1 << 29
    total = sum(edges.values())
    scale = min(16.0, most / max(total, 1.0))
    pairs = [*edges, *infinite]
    capacities = [max(0, round(scale * size)) for size in edges.values()] + [most * 2] * len(infinite)
    if not pairs:
        return set()
    rows, columns = zip(*pairs, strict=True)
    shape = (num_nodes, num_nodes)
    graph = csr_array(coo_array((np.array(capacities, np.int32), (rows, columns)), shape=shape))
    left = csr_array(graph - maximum_flow(graph, source, sink).flow)
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    return set(breadth_first_order(left, source, return_predecessors=False).tolist())
