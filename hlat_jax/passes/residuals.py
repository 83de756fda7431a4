"""Selects the residuals of cheap operations: the fewest bytes from which the backward pass recomputes the rest.

    loss = select_residuals(autocast(loss_fp32, "bf16"))
    value, grads = jax.value_and_grad(loss)(params, batch)

Automatic differentiation keeps every operand that a derivative reads, which for `gelu(x @ w) @ v` are several arrays
of one shape. This pass keeps the values with the fewest bytes from which these operands follow. They are a minimum cut
of the forward pass. Products, gathers, random bits, collectives and loops are never executed again.

Source: RAF's gradient input selection, arXiv 2303.04759.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.passes import fences
from hlat_jax.passes.dataflow import Dataflow, Op, num_bytes, upstream
from hlat_jax.passes.interpret import Body, called, compound, evaluate, map_jaxpr
from hlat_jax.passes.jaxpr import (
    ELEMENTWISE,
    REDUCTIONS,
    TRANSCENDENTAL,
    bind_again,
    called_jaxpr,
    equations,
    is_literal,
    linearized_at,
    op_name,
    place_of,
    plain_call,
    primitives,
    rebind,
    values_of,
    variables,
)
from hlat_jax.passes.products import PRODUCTS, product_flops
from hlat_jax.passes.recompute import Node, RecomputeGraph

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
# Bytes of fp32 that are kept rather than one FLOP computed again: the first at which recomputation stays within its
# share of the FLOPs of products, else the last. Narrow values take fewer bytes and as many FLOPs.
_RATES = (0.01, 0.03, 0.1, 0.5)
_SHARE = 0.1  # of forward products; a step has three times as many

_MOVES = primitives(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice pad concatenate stack unstack split
    iota copy copy_p name stop_gradient convert_element_type reduce_precision saturated_cast pvary pcast
    split_tangent with_tangent
    """
)
# A `while` has no backward pass, and a checkpoint or a derivative rule already says what is kept.
_SELECTED_BODIES = primitives("shard_map scan cond")
_CHEAP = _MOVES | (ELEMENTWISE - {"lgamma", "digamma"}) | REDUCTIONS


def select_residuals(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Returns a function with the same results and derivatives that keeps fewer bytes for the backward pass.

    Each call traces `fn`, so wrap the result, or its caller, in `jax.jit`. Apply it after `autocast`.

    Args:
      fn: a function that JAX can trace, with arguments as for `autocast`.
    """
    return map_jaxpr(fn, lambda closed, leaves: _of_jaxpr(closed, _Scope())(*leaves))


@dataclasses.dataclass(frozen=True)
class _Scope:
    """The surroundings of a selected function.

    Attributes:
      free: for each argument, whether it is held in any case. All are if it is empty.
      is_body: whether the function is the body of a loop or a branch, which is compiled apart from its backward pass.
      num_invariants: number of first arguments of the body of a loop that are the same in all trips.
      trips: number of trips of that loop.
    """

    free: tuple[bool, ...] = ()
    is_body: bool = False
    num_invariants: int = 0
    trips: int = 1


_NAME = "select_residuals_of"


def selected_jaxpr(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the jaxpr of a call of `select_residuals`, or None for other equations."""
    is_ours = eqn.primitive.name == "custom_jvp_call" and (op_name(eqn) or "").startswith(_NAME)
    return called_jaxpr(eqn) if is_ours else None


def opened_call(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the jaxpr of a call that only runs its function or selects its residuals, or None for other equations."""
    closed = plain_call(eqn)
    return selected_jaxpr(eqn) if closed is None or closed.consts else closed.jaxpr


def select_again(eqn: core.JaxprEqn, fn: Callable, args: Sequence[Any]) -> list[Any]:
    """Returns the results of `fn`, arrays -> list of arrays, with residuals selected as for this equation."""
    run = core.jaxpr_as_fun(jax.make_jaxpr(fn)(*args))  # so that it is traced once
    return _selected(run, _Scope(is_body=op_name(eqn) != _NAME))(*args)


def _of_jaxpr(closed: core.ClosedJaxpr, scope: _Scope) -> Callable[..., list[Any]]:
    """Returns a jaxpr as a function of its inputs, with the residuals of its bodies selected too."""
    jaxpr, num_consts = closed.jaxpr, len(closed.consts)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    scope = dataclasses.replace(scope, free=(True,) * num_consts + (scope.free or (True,) * len(jaxpr.invars)))
    free = {*itertools.compress(inputs, scope.free)}
    selected = _selected(lambda *args: _evaluate(jaxpr, args, free, scope.is_body), scope)
    return functools.partial(selected, *closed.consts)


def _evaluate(jaxpr: core.Jaxpr, args: Sequence[Any], free: set[core.Var], is_body: bool) -> list[Any]:
    """Returns the results of a jaxpr, its bodies selected; `free` has the inputs that are held in any case."""

    def on_equation(eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        is_free = [is_literal(var) or var in free for var in eqn.invars]
        inner, inside = _inlined(eqn), compound(eqn)
        with place_of(eqn):
            if inner is not None:
                return _evaluate(
                    inner.closed.jaxpr, ins, {*itertools.compress(inner.closed.jaxpr.invars, is_free)}, is_body
                )
            if inside is None or inside.name not in _SELECTED_BODIES:
                return rebind(eqn, ins)
            own = {"is_body": is_body or inside.name != "shard_map"}
            if inside.carried is not None:
                start, stop = inside.carried.start, inside.carried.stop
                is_free[:stop] = [True] * start + [False] * (stop - start)
                own |= {"num_invariants": start, "trips": eqn.params["length"]}
            return inside.bind(ins, lambda body: _of_jaxpr(body.closed, _Scope(tuple(body.inputs(is_free)), **own)))

    return evaluate(jaxpr, args, on_equation)


def _inlined(eqn: core.JaxprEqn) -> Body | None:
    """Returns the body, without constants, of a call that can be inlined; None for other equations."""
    closed = None if has_effects(eqn) else plain_call(eqn)
    return None if closed is None or closed.consts else called(eqn)


def has_effects(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation or a jaxpr does more than compute results. Reading a mesh axis does not count."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _selected(fn: Callable, scope: _Scope) -> Callable:
    """Returns `fn`, arrays -> list of arrays, with a derivative that keeps few bytes."""

    def linearize(primals: Sequence[Any], places: Sequence[int]) -> fences.Linearized:
        structures = []

        def with_held(*args: Any) -> list:
            outs, pushforward = linearized_at(fn, args, places)
            held, structure = jax.tree.flatten(pushforward)
            structures.append(structure)
            return [*outs, *held]

        closed = jax.make_jaxpr(with_held)(*primals)
        forward = _Forward(closed, structures[0].num_leaves, scope)
        outs, kept = forward.run(primals)

        def push(kept: Sequence[Any], tangents: Sequence[Any]) -> list:
            return jax.tree.unflatten(structures[0], forward.run_again(kept))(*tangents)

        waits = (not scope.is_body,) * len(kept)
        return fences.Linearized(outs, kept, push, fences.barrier, waits, (False,) * len(places))

    return fences.with_derivative(fn, linearize, name=_NAME + ("_body" if scope.is_body else ""))


class _Forward(Dataflow):
    """The operations of a forward pass, with a choice of values to keep, in `kept`.

    The jaxpr returns the results, and then the `num_held` values that the derivative holds.
    """

    def __init__(self, closed: core.ClosedJaxpr, num_held: int, scope: _Scope):
        super().__init__(closed.jaxpr, inlined=_inlined, consts=closed.consts)
        self.trips = scope.trips
        split = len(self.outputs) - num_held
        self.results, self.held = self.outputs[:split], self.outputs[split:]
        num_consts = len(closed.jaxpr.constvars)
        arguments = self.inputs[num_consts:]
        self.free = {*self.constants, *itertools.compress(arguments, scope.free or [True] * len(arguments))}
        self.invariants = set(arguments[: scope.num_invariants]) if scope.trips > 1 else set()
        self.cheap = {op for op in self.ops if _is_cheap(op.eqn)}
        # what only the derivative reads is computed once, in the forward pass or in the backward pass
        self.flops = {op: _flops(op.eqn) for op in upstream(self.ops, variables(self.results)) if op in self.cheap}
        for op in self.ops:
            if self.invariants.issuperset(op.operands):
                self.invariants.update(op.outvars)
        products = [op for op in self.ops if op.name in PRODUCTS]
        flops = sum(product_flops(op.eqn) for op in products)
        dtypes = [value.aval.dtype for op in products for value in op.outvars]
        width = min((dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)), default=4)
        far = self._far()
        for rate in _RATES:
            kept = self._cheapest(rate * min(width, 4) / 4, far)
            self.again = upstream(self.ops, {*variables(self.held)} - kept, without=kept)
            if sum(self.flops.get(op, 0.0) for op in self.again) <= _SHARE * flops:
                break
        read = {value for op in self.again for value in op.operands} | {*variables(self.held)}
        made = {value for op in self.again for value in op.outvars}
        self.kept = sorted(read - made - self.constants.keys(), key=self.number.__getitem__)

    def run(self, args: Sequence[Any]) -> tuple[list, list]:
        """Returns (the results, the values that are kept)."""
        env = self.constants | dict(zip(self.inputs[len(self.inputs) - len(args) :], args, strict=True))
        acting = [op for op in self.ops if has_effects(op.eqn)]  # such as prints, which nothing depends on
        wanted = [*variables(self.results), *self.kept, *(value for op in acting for value in op.operands)]
        needed_ops = {*acting, *upstream(self.ops, wanted)}
        kept = set(self.kept)
        for op in self.ops:
            if op in needed_ops:
                _compute([op], env)
                env.update({value: _as_kept(env[value]) for value in op.outvars if value in kept})
        return values_of(self.results, env), values_of(self.kept, env)

    def run_again(self, kept: Sequence[Any]) -> list:
        """Returns the values that the derivative holds."""
        env = self.constants | dict(zip(self.kept, kept, strict=True))
        _compute(self.again, env)
        return values_of(self.held, env)

    def _cheapest(self, rate: float, far: set[core.Var]) -> set[core.Var]:
        """Returns the values to keep, a minimum cut of the values that the derivative depends on.

        `rate` is the bytes worth a FLOP, and values in `far` are kept if they are needed.
        """
        held = {value: None for value in variables(self.held) if value not in self.free}
        node = {value: at for at, value in enumerate(value for value in held if value not in self.producer)}
        nodes = [Node(0.0, math.inf, (), str(at), is_read=True) for at in node.values()]
        for op in upstream(self.ops, held, without=self.free):
            for value in op.operands:
                if value not in node and value not in self.free:  # what a loop carries
                    node[value] = len(nodes)
                    nodes.append(Node(0.0, math.inf, (), str(node[value]), is_read=False))
            parents = tuple({node[value] for value in op.operands if value not in self.free})
            # a tiny cost for moves too, so that chains are short; work that a loop would repeat counts more
            cost = rate * self.flops.get(op, 0.0) + 0.001 * sum(map(num_bytes, op.outvars))
            cost *= 8 if self.invariants.issuperset(op.outvars) else 1
            for value in op.outvars:
                node[value] = len(nodes)
                is_kept = op not in self.cheap or value in far
                above = () if is_kept else parents
                nodes.append(Node(0.0, math.inf if is_kept else cost, above, str(node[value]), value in held))
        sizes = {
            str(at): max(1, num_bytes(value) / (self.trips if value in self.invariants else 1))
            for value, at in node.items()
        }
        saved = {int(name) for name in RecomputeGraph(tuple(nodes), sizes).cheapest(byte_cost=1.0)}
        return {value for value, at in node.items() if at in saved}

    def _far(self) -> set[core.Var]:
        """Returns cheap values that are kept if they are needed, so that no chain of recomputation is long.

        Such chains pass products: each state of a residual stream could be recomputed from all results added to it. A
        value may be recomputed from one that was so before the products between them, but no further.
        """
        level = dict.fromkeys(self.inputs, 0)  # products before a value
        hops = dict.fromkeys(self.inputs, 0)  # products that the chain to a value passes
        far: set[core.Var] = set()
        for op in self.ops:
            top = max((level[value] for value in op.operands), default=0)
            size = max(map(num_bytes, op.outvars), default=0)
            hop = 0
            for value in op.operands:
                before = self.producer.get(value)
                is_chained = before is not None and before in self.cheap and value not in far
                is_passed = is_chained and level[value] < top and 8 * num_bytes(value) >= size
                hop = max(hop, hops[value] + is_passed)
            if op not in self.cheap:
                top, hop = top + 1, 0
            elif hop > 1:
                far |= set(op.outvars)
                hop = 0
            level.update(dict.fromkeys(op.outvars, top))
            hops.update(dict.fromkeys(op.outvars, hop))
        return far


def _compute(ops: Iterable[Op], env: dict[core.Var, Any]) -> None:
    for op in ops:
        with contextlib.ExitStack() as places:
            for call in op.calls:
                places.enter_context(place_of(call.eqn))
            env.update(zip(op.outvars, bind_again(op.eqn, values_of(op.invars, env)), strict=True))


def _as_kept(value: Any) -> Any:
    """Returns a narrow value rounded for all that read it, as XLA rounds what is kept.

    XLA may leave out the rounding to a narrow dtype where a wide value is read. The backward pass would then read other
    logits than the log of their sum of exponentials. `jax.checkpoint` rounds the values that it saves in the same way.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize != 2:
        return value
    info = jnp.finfo(value.dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant)


def _is_cheap(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is done again rather than its results kept."""
    if eqn.primitive.name == "custom_jvp_call" and not has_effects(eqn):
        return all(_is_cheap(one) or _inlined(one) is not None for one, _ in equations(called_jaxpr(eqn)))
    return eqn.primitive.name in _CHEAP and not has_effects(eqn)


def _flops(eqn: core.JaxprEqn) -> float:
    """Returns the FLOPs of a cheap equation; an exponential counts as four, and moving elements or casting as none."""
    name = eqn.primitive.name
    if name == "custom_jvp_call":
        return sum(map(_flops, called_jaxpr(eqn).eqns))
    if name in _MOVES:
        return 0.0
    size = max((getattr(var.aval, "size", 0) for var in (*eqn.invars, *eqn.outvars)), default=0)
    return (4.0 if name in TRANSCENDENTAL - {"div"} else 1.0) * size
