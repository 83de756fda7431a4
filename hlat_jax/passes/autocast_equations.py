"""Autocast of a traced function: rebinds each equation at dtypes that follow from the rules and its operands.

Equations with bodies are bound with bodies for the kinds of their operands. `autocast_calls` casts derivative rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.ops.own_backward import has_own_backward
from hlat_jax.passes import autocast_calls, distances
from hlat_jax.passes.autocast_kinds import Kind, Value, is_fp32, kind_of_constant, mix, saturated, value
from hlat_jax.passes.interpret import Body, Compound, compound, evaluate, reaching
from hlat_jax.passes.jaxpr import (
    ALL_REDUCES,
    CALL_JAXPRS,
    called_jaxpr,
    is_literal,
    op_name,
    place_of,
    primitives,
    rebind,
)
from hlat_jax.passes.products import is_dot_of_vectors

_ADDS = frozenset({"add", "sub", "add_any"})

# fp32 if a full-size operand is fp32 because of `never`: rounding a sum loses more than rounding a factor.
_SUMS = _ADDS | {"dynamic_update_slice", "scatter"}

# fp32 if only `never` operations read the result, directly or through more of these, ...
_ARITHMETIC = _SUMS | {"mul"}
# ... through these, ...
_MOVES = primitives(
    """
    neg abs max min clamp select_n reduce_max reduce_min stop_gradient copy copy_p convert_element_type
    broadcast_in_dim reshape transpose squeeze slice dynamic_slice pad rev concatenate stack unstack split gather name
    sharding_constraint reshard
    """
)
# ... through these, whose result i is operand i, ...
_PASSES = frozenset({"optimization_barrier", "device_put", "pvary", "pcast"})

# On integers, their results are accurate enough when narrow: the tables of RoPE, a softmax of distances.
_BOUNDED = frozenset({"sin", "cos", "tanh", "logistic", "erf", "erfc", "exp"})

# The kind of result i is that of operand i.
_EACH = ALL_REDUCES | {"optimization_barrier", "pvary", "pcast", "sort"}

# In place of True for a result that only `never` operations read: sums of squares cancel it, so its product is fp32.
CANCELLED = 2


class Cast:
    """One call of a cast function, with its rules and the jaxprs that it has traced so far.

    Attributes:
      low: the narrow dtype.
      rule: function from an equation to "always", "never" or "infer".
      wide_distances: whether products that sums of squares cancel are fp32.
    """

    def __init__(self, low: Any, rule: Callable[[core.JaxprEqn], str], *, wide_distances: bool):
        self.low, self.rule, self.wide_distances = low, rule, wide_distances
        self._traced: dict[Any, Any] = {}
        self._read: dict[Any, Any] = {}

    def outputs(self, closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr in their declared dtypes."""
        kinds = [Kind.SOFT if is_fp32(aval) else Kind.FIXED for aval in closed.in_avals]
        # wide, because they are returned in fp32 in any case: an updated weight, a moment
        outs = self._run_closed(closed, args, kinds, wide=[True] * len(closed.out_avals))
        outs = [out.declared() for out in outs]
        return [out if isinstance(out, jax.Array) else jnp.asarray(out) for out in outs]  # a literal

    def retrace(
        self,
        closed: core.ClosedJaxpr,
        kinds: Sequence[Kind],
        *,
        forced: Sequence[Kind | None] = (),
        wide: Sequence[bool] = (),
    ) -> tuple[core.ClosedJaxpr, list[Kind]]:
        """Returns (the jaxpr for operands of the given kinds, the kinds of its results).

        Args:
          closed: the declared program.
          kinds: kinds of its inputs.
          forced: kind that each result must have, or None.
          wide: for each result, whether only `never` operations read it; see `CANCELLED`.
        """
        key = id(closed.jaxpr), tuple(map(id, closed.consts)), tuple(kinds), tuple(forced), tuple(wide)
        if key not in self._traced:
            out_kinds: list[Kind] = []
            avals = [
                aval.update(dtype=self.low, weak_type=False) if kind is Kind.LOW else aval
                for aval, kind in zip(closed.in_avals, kinds, strict=True)
            ]
            traced = jax.make_jaxpr(self._function(closed, kinds, forced, wide, out_kinds))(*avals)
            self._traced[key] = traced, out_kinds, closed  # kept alive: the key is its id
        jaxpr, out_kinds, _ = self._traced[key]
        return jaxpr, list(out_kinds)

    def _function(
        self,
        closed: core.ClosedJaxpr,
        kinds: Sequence[Kind],
        forced: Sequence[Kind | None],
        wide: Sequence[bool],
        out_kinds: list[Kind],
    ) -> Callable[..., list[Any]]:
        """Returns the function of arrays that `retrace` traces; each call sets `out_kinds`."""

        def run(*arrays: Any) -> list[Any]:
            outs = self._run_closed(closed, arrays, kinds, wide)
            out_kinds[:] = [want or out.kind for want, out in zip(forced or [None] * len(outs), outs, strict=True)]
            return self._arrays(outs, out_kinds)

        return run

    def _arrays(self, values: Sequence[Value], kinds: Sequence[Kind]) -> list[Any]:
        """Returns the arrays of values, held as these kinds."""
        pairs = zip(values, kinds, strict=True)
        return [one.narrow(self.low, saturate=True) if kind is Kind.LOW else one.declared() for one, kind in pairs]

    def run(self, jaxpr: core.Jaxpr, values: Sequence[Value], wide: Sequence[bool]) -> list[Value]:
        """Returns the results of an open jaxpr, its equations rebound under the current trace.

        Args:
          jaxpr: open.
          values: its inputs.
          wide: for each result, whether only `never` operations read it. Empty means False for all.
        """
        narrow_read, cancelled = self._narrow_read(jaxpr, wide or [False] * len(jaxpr.outvars))

        def on_equation(eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
            with place_of(eqn):
                wide_outs = [CANCELLED if var in cancelled else var not in narrow_read for var in eqn.outvars]
                if eqn.primitive.name in _ARITHMETIC and wide_outs[0] and self.rule(eqn) == "infer":
                    kind = mix(operand.kind for operand in operands)
                    return self._declared(eqn, operands, max(Kind.WIDE, kind))
                return self._equation(eqn, operands, wide_outs)

        return evaluate(jaxpr, values, on_equation, on_literal=lambda literal: self._constant(literal.val, literal))

    def _constant(self, array: Any, atom: core.Literal | core.Var) -> Value:
        return value(array, kind=kind_of_constant(array, atom.aval, self.low), aval=atom.aval, low=self.low)

    def is_product(self, eqn: core.JaxprEqn) -> bool:
        """Returns whether the rule for an equation is `always`."""
        return self.rule(eqn) == "always"

    def _narrow_read(self, jaxpr: core.Jaxpr, wide: Sequence[int]) -> tuple[set[core.Var], set[core.Var]]:
        """Returns the variables that operations other than `never` read, and those that sums of squares cancel.

        Narrowing others than the former would only lose bits.
        """
        key = id(jaxpr), tuple(wide)
        if key in self._read:
            return self._read[key][0]
        cancelled = set()
        if self.wide_distances:
            cancelled = distances.cancelled_variables(jaxpr, [one == CANCELLED for one in wide])
        narrow_read = {
            atom for atom, is_wide in zip(jaxpr.outvars, wide, strict=True) if not (is_wide or is_literal(atom))
        }
        for eqn in reversed(jaxpr.eqns):
            outs = [CANCELLED if var in cancelled else var not in narrow_read for var in eqn.outvars]
            read = self._wide_operands(eqn, outs)
            operands = zip(eqn.invars, read, strict=True)
            narrow_read |= {atom for atom, is_wide in operands if not (is_wide or is_literal(atom))}
        narrow_read -= cancelled
        self._read[key] = (narrow_read, cancelled), jaxpr  # kept alive: the key is its id
        return narrow_read, cancelled

    def _wide_operands(self, eqn: core.JaxprEqn, wide: list[int]) -> list[int]:
        """Returns for each operand whether only `never` operations read it; `wide`: the same for each result."""
        name, rule = eqn.primitive.name, self.rule(eqn)
        # ... and through calls; those with a backward pass of their own may keep operands for it
        if rule == "infer" and name in CALL_JAXPRS and not has_own_backward(eqn):
            narrow_read, _ = self._narrow_read(called_jaxpr(eqn), wide)
            return [var not in narrow_read for var in called_jaxpr(eqn).invars]
        if rule == "infer" and name in _PASSES and len(wide) == len(eqn.invars):
            return wide
        is_open = rule == "infer" and name in _ARITHMETIC | _MOVES and is_fp32(eqn.outvars[0].aval)
        is_wide = rule == "never" or (rule == "always" and wide[0] == CANCELLED)
        return [is_wide or (is_open and all(wide))] * len(eqn.invars)

    def _run_closed(
        self, closed: core.ClosedJaxpr, args: Sequence[Any], kinds: Sequence[Kind], wide: Sequence[bool] = ()
    ) -> list[Value]:
        values = [self._constant(*each) for each in zip(closed.consts, closed.jaxpr.constvars, strict=True)]
        for arg, kind, var in zip(args, kinds, closed.jaxpr.invars, strict=True):
            values.append(value(arg, kind=kind, aval=var.aval, low=self.low))
        return self.run(closed.jaxpr, values, wide)

    def _equation(self, eqn: core.JaxprEqn, operands: list[Value], wide: Sequence[bool]) -> list[Value]:
        name, rule = eqn.primitive.name, self.rule(eqn)
        is_array = all(isinstance(var.aval, jax.core.ShapedArray) for var in [*eqn.invars, *eqn.outvars])
        if rule == "never" or not is_array:
            are_integers = name == "iota" or mix(operand.kind for operand in operands) is Kind.INTEGER
            return self._declared(eqn, operands, Kind.INTEGER if are_integers and name not in _BOUNDED else Kind.WIDE)
        inside = compound(eqn)
        if inside is not None:
            if rule == "always":
                operands = [self._narrowed(operand) for operand in operands]
            return self.results(eqn, *self._compound(inside, operands, wide))
        if name == "pallas_call":
            raise ValueError(
                f"autocast rule {op_name(eqn)}={rule!r} is for a Pallas kernel, which only runs in its declared dtypes."
            )
        if rule == "always":
            return self._product(eqn, operands) if wide[0] != CANCELLED else self._declared(eqn, operands, Kind.WIDE)
        return self._infer(eqn, operands)

    def _compound(
        self, inside: Compound, operands: list[Value], wide: Sequence[bool]
    ) -> tuple[Sequence[Any], Sequence[Kind]]:
        """Returns the results of an equation with bodies, which are cast, and the kinds of the results."""
        eqn, kinds = inside.eqn, [operand.kind for operand in operands]
        if has_own_backward(eqn):
            arrays = self._arrays(operands, kinds)
            return autocast_calls.own_backward(self.retrace, eqn, arrays=arrays, given_kinds=kinds)
        if inside.name == "custom_jvp_call":
            arrays = self._arrays(operands, kinds)
            return autocast_calls.custom_jvp(self.retrace, eqn, arrays=arrays, given_kinds=kinds, wide=wide)
        forced: list[Kind | None] = []
        if inside.has_branches:  # each result is narrow if it is in every branch, and otherwise as declared
            forced, wide = inside.forward(kinds, self._out_kinds, _joined), ()
        elif inside.carried is not None:
            kinds = self._kinds_in_loop(inside, kinds)
            carry = kinds[inside.carried]
            num_stacked = len(eqn.outvars) - len(carry)
            forced = [*carry, *[None] * num_stacked]
            wide = [*(kind >= Kind.KEPT for kind in carry), *[False] * num_stacked]
        out_kinds: list[Kind] = []

        def replacement(body: Body) -> core.ClosedJaxpr | Callable:
            if inside.name == "shard_map":
                return self._function(body.closed, kinds, forced, wide, out_kinds)
            if body is inside.condition:
                return self.retrace(body.closed, body.inputs(kinds))[0]
            closed, out_kinds[:] = self.retrace(body.closed, body.inputs(kinds), forced=forced, wide=wide)
            return closed

        return inside.bind(self._arrays(operands, kinds), replacement), out_kinds

    def _out_kinds(self, closed: core.ClosedJaxpr, kinds: Sequence[Kind]) -> list[Kind]:
        return self.retrace(closed, kinds)[1]

    def _kinds_in_loop(self, loop: Compound, kinds: Sequence[Kind]) -> list[Kind]:
        """Returns the kinds in which the bodies of a loop hold its operands.

        A carry that matrix products read, such as the activations of layers, is narrow if the body's result is. One
        that they never read is an accumulator: it stays fp32, and so does the arithmetic on it. The kinds are a fixed
        point: each only moves up in SOFT < LOW < WIDE < KEPT < HUGE, so the iteration ends. An INTEGER stays one while
        the body's result is INTEGER; otherwise it restarts from the kind that it would have had.
        """
        (body,) = loop.bodies
        feeds = dict(zip(body.reads, reaching(body.closed.jaxpr, self.is_product), strict=True))
        order = [Kind.FIXED, Kind.SOFT, Kind.LOW, Kind.WIDE, Kind.KEPT, Kind.HUGE]

        def start(kind: Kind, is_read: bool) -> Kind:
            if kind in (Kind.FIXED, Kind.HUGE):
                return kind
            if not is_read:
                return Kind.KEPT
            return kind if kind is Kind.LOW else Kind.SOFT

        def joined(old: Kind, new: Kind, first: Kind) -> Kind:
            if old is Kind.LOW and new is not Kind.LOW:
                new = Kind.WIDE  # narrow on entry but fp32 on exit: fp32
            if old is Kind.FIXED or new is Kind.FREE or old is new:
                return old
            if old is Kind.INTEGER:
                return first
            return max(old, Kind.KEPT if new is Kind.INTEGER else new, key=order.index)

        carried = range(len(kinds))[loop.carried]
        firsts = [start(kinds[at], feeds[at]) for at in carried]
        kinds = list(kinds)
        kinds[loop.carried] = [
            kinds[at] if kinds[at] is Kind.INTEGER else first for at, first in zip(carried, firsts, strict=True)
        ]
        return loop.in_any_trip(kinds, self._out_kinds, lambda paths, _: list(map(joined, *paths, firsts)))

    def _declared(self, eqn: core.JaxprEqn, operands: list[Value], kind: Kind) -> list[Value]:
        """Runs the equation as declared; fp32 results get the given kind."""
        outs = rebind(eqn, [operand.declared() for operand in operands])
        kinds = [kind if is_fp32(var.aval) else Kind.FIXED for var in eqn.outvars]
        return self.results(eqn, outs, kinds)

    def _product(self, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        fp32 = [operand for operand in operands if operand.kind is not Kind.FIXED]
        floats = [operand for operand in operands if jnp.issubdtype(operand.dtype, jnp.floating)]
        is_user_choice = isinstance(eqn.params.get("precision"), (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset))
        # the user has chosen the dtypes, or an algorithm for fp32
        if not fp32 or is_user_choice or any(o.dtype not in (jnp.float32, self.low) for o in floats):
            return self._declared(eqn, operands, Kind.WIDE)
        kinds = {operand.kind for operand in fp32}
        is_vector_dot = is_dot_of_vectors(eqn)
        if Kind.INTEGER in kinds or (is_vector_dot and kinds != {Kind.LOW}):
            return self._declared(eqn, operands, Kind.WIDE)
        return self._narrow(eqn, operands, keep_result=is_vector_dot)

    def _narrow(
        self, eqn: core.JaxprEqn, operands: list[Value], *, keep_result: bool = False, saturate: bool = False
    ) -> list[Value]:
        changed = {}
        if eqn.params.get("preferred_element_type") == jnp.float32:
            changed["preferred_element_type"] = jnp.dtype(jnp.float32) if keep_result else self.low
        outs = rebind(eqn, [operand.narrow(self.low, saturate=saturate) for operand in operands], **changed)
        kinds = [
            Kind.FIXED if not is_fp32(var.aval) else Kind.LOW if out.dtype == self.low else Kind.WIDE
            for out, var in zip(outs, eqn.outvars, strict=True)
        ]
        return self.results(eqn, outs, kinds)

    def _infer(self, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return self._convert(eqn, operands)
        if name in _EACH and len(operands) == len(eqn.outvars):
            outs = rebind(eqn, [operand.held(self.low) for operand in operands])
            return self.results(eqn, outs, [operand.kind for operand in operands])
        kind = self._inferred_kind(eqn, operands)
        if kind is not Kind.LOW:
            return self._declared(eqn, operands, kind)
        if name in _ADDS and any(operand.kind > Kind.LOW for operand in operands):
            # such as scores plus a mask of finfo(float32).min that is an argument: the sum must stay finite
            (out,) = rebind(eqn, [operand.declared() for operand in operands])
            return self.results(eqn, [saturated(out, self.low)], [Kind.LOW])
        return self._narrow(eqn, operands, saturate=True)

    def _inferred_kind(self, eqn: core.JaxprEqn, operands: list[Value]) -> Kind:
        kinds = [operand.kind for operand in operands]
        highest = mix(kinds)
        size = max((var.aval.size for var in eqn.outvars if is_fp32(var.aval)), default=0)
        if size > 1 and eqn.primitive.name == "mul" and set(kinds) == {Kind.INTEGER, Kind.LOW}:
            return Kind.LOW  # a factor, such as a mask of integers: its rounding error is small relative to the product
        # constants alone, or a value that must stay fp32
        if highest <= Kind.FREE or highest >= Kind.KEPT:
            return Kind.SOFT if highest is Kind.FIXED else highest
        is_wide_sum = eqn.primitive.name in _SUMS and any(
            operand.kind is Kind.WIDE and operand.size == size for operand in operands
        )
        counted = [kind for kind in kinds if kind > Kind.FREE]
        if size > 1 and not is_wide_sum and 2 * counted.count(Kind.LOW) >= len(counted):
            return Kind.LOW
        return max(highest, Kind.SOFT)

    def _convert(self, eqn: core.JaxprEqn, operands: list[Value]) -> list[Value]:
        (operand,), new = operands, eqn.params["new_dtype"]
        if operand.kind is Kind.LOW and new in (self.low, jnp.float32):
            return self.results(eqn, [operand.narrow(self.low)], [Kind.FIXED if new == self.low else Kind.LOW])
        if operand.kind is not Kind.FIXED and new == jnp.float32:  # only the weak type changes
            return self._declared(eqn, operands, operand.kind)
        if jnp.issubdtype(operand.dtype, jnp.floating):
            return self._declared(eqn, operands, Kind.WIDE)
        is_wide = jnp.issubdtype(operand.dtype, jnp.integer) and jnp.iinfo(operand.dtype).bits > 8
        return self._declared(eqn, operands, Kind.INTEGER if is_wide else Kind.SOFT)

    def _narrowed(self, operand: Value) -> Value:
        if operand.kind is Kind.FIXED:
            return operand
        return Value(Kind.LOW, operand.dtype, operand.size, {self.low: operand.narrow(self.low, saturate=True)})

    def results(self, eqn: core.JaxprEqn, outs: Sequence[Any], kinds: Sequence[Kind]) -> list[Value]:
        """Returns the results of an equation as values of these kinds."""
        typed_outs = zip(outs, kinds, eqn.outvars, strict=True)
        return [value(out, kind=kind, aval=var.aval, low=self.low) for out, kind, var in typed_outs]


def _joined(branches: Sequence[Sequence[Kind]], _: Sequence[Kind]) -> list[Kind]:
    """Returns the kinds of the results of a `cond`."""

    def join(kinds: Sequence[Kind]) -> Kind:
        if set(kinds) == {Kind.LOW} or Kind.FIXED in kinds:
            return kinds[0]
        return max(Kind.SOFT, mix(kinds))

    return list(map(join, zip(*branches, strict=True)))
