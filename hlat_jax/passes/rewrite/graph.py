"""A flat view of one traced program, in which matchers look for ops, and its evaluation with some parts replaced."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from hlat_jax.passes.dataflow import Atom, Dataflow, upstream
from hlat_jax.passes.independence import is_elementwise_call
from hlat_jax.passes.interpret import Body, called, compound
from hlat_jax.passes.jaxpr import (
    ELEMENTWISE,
    SAME_ELEMENTS,
    aval_bytes,
    is_literal,
    jax_function,
    op_name,
    place_of,
    plain_call,
    rebind,
    source_of,
    values_of,
    variables,
)
from hlat_jax.passes.rewrite.rows import rows_first

# Functions of JAX with a derivative rule that is the derivative of their body.
_KNOWN_RULES = frozenset({"softmax", "_softmax", "silu", "logsumexp", "log_softmax", "_log_softmax"})
CHEAP = ELEMENTWISE | SAME_ELEMENTS | {"transpose", "concatenate"}  # computed again for each who reads it
# Not folded above: an array of 16,384 x 16,384 int32.
MAX_FOLDED_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Match:
    """Equations that a pass computes in another way.

    Attributes:
      op: name for the report, such as "attention".
      eqns: the equations of `EquationGraph.eqns` that are replaced. Only they may read their results, except for
        `outputs`. Equations that others need too, such as the equations of a mask, are left out.
      inputs: variables that the replacement takes.
      outputs: variables that the replacement computes.
      replacement: function from the values of `inputs` to the values of `outputs`, in the same shapes and dtypes. It
        reads sizes from its arguments, since the check may cut batch dimensions.
      source: "file:line" for the report, see `EquationGraph.source`.
      facts: the properties that were found, for the report, such as "causal, scale 0.125".
      on_cpu: the same function without a kernel, which the check runs in place of `replacement`.
      resized: function from shapes of variables to the replacement at these shapes, for the check. Without it,
        dimensions that are summed, or along which a constant differs, are not cut.
      uncut: (variable, dimension) that the check must leave at its size, although nothing is mixed along it.
      cut_to: the size to which the check cuts other dimensions.
    """

    op: str
    eqns: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    replacement: Callable[..., Sequence[Any]]
    source: str
    facts: str
    on_cpu: Callable[..., Sequence[Any]] | None = None
    resized: Callable[[Callable[[Any], Sequence[int]]], Callable[..., Sequence[Any]]] | None = None
    uncut: Sequence[tuple[Any, int]] = ()
    cut_to: int = 4


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Equations that a pass leaves as they are.

    Attributes:
      op: name of the op, as for `Match`.
      source: "file:line" of the op.
      reason: the reason why the pass does not apply.
    """

    op: str
    source: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    reads: Sequence[Any]
    defines: Sequence[Any]
    run: Callable[[Mapping[Any, Any]], Sequence[Any]]
    has_effects: bool = False


class EquationGraph:
    """One jaxpr with the bodies of plain `jit` calls inlined.

    Calls with a derivative rule are inlined if the rule is known to be the derivative of the body. Others stay calls.

    Args:
      closed: closed jaxpr.
      known: values of inputs that are constant in the surrounding program, by position.
      opened: a number from `calls_with_rules` -> the body that is inlined in place of this call, or None.

    Attributes:
      eqns: the equations in order, each with new variables for its results.
      invars: inputs.
      outvars: results, which are variables or literals.
      calls_with_rules: (number, call) of the calls that stay because of their derivative rule. Each graph of the same
        jaxpr has the same numbers.
      taken: ids of the equations that are replaced already.
      copied: variable of `copy_of_constant` -> the variable that it copies.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        known: Mapping[int, np.ndarray] | None = None,
        *,
        opened: Mapping[int, Body | None] | None = None,
    ):
        bodies = opened or {}
        flow = Dataflow(
            closed.jaxpr, inlined=lambda eqn: _inlined(eqn) or bodies.get(id(eqn.params)), consts=closed.consts
        )
        self.eqns = [op.eqn.replace(invars=op.invars, outvars=op.outvars) for op in flow.ops]
        self._calls = {id(eqn): op.calls for eqn, op in zip(self.eqns, flow.ops, strict=True)}  # outermost first
        self.invars, self.outvars = flow.inputs[len(closed.consts) :], flow.outputs
        self.taken: set[int] = set()
        self.copied: dict[core.Var, core.Var] = {}
        self.calls_with_rules = [(id(eqn.params), eqn) for eqn in self.eqns if own_rule(eqn)]
        self._folded = {self.invars[number]: array for number, array in (known or {}).items()}
        self.values = flow.constants | self._folded  # of constants of the jaxpr, arrays
        tracers = {var for var, value in flow.constants.items() if isinstance(value, jax.core.Tracer)}
        self._from_inputs = {*self.invars, *tracers} - self._folded.keys()
        for eqn in self.eqns:
            if eqn.effects or not self._from_inputs.isdisjoint(variables(eqn.invars)):
                self._from_inputs |= set(eqn.outvars)
        self._producers = {var: eqn for eqn in self.eqns for var in eqn.outvars}
        self.eqns = [each for eqn in self.eqns for each in self._batched(eqn)]
        self._producers = {var: eqn for eqn in self.eqns for var in eqn.outvars}
        self._read_early: set[Any] = set()  # by rows of products
        self._take_rows_first()
        self._copies: dict[tuple[int, Any], Any] = {}  # (id of an equation, a constant that it reads) -> its own
        self._readers: dict[Any, list[Any]] = {}
        for eqn in reversed(self.eqns):
            is_read = eqn.effects or any(var in self._readers or self.is_output(var) for var in eqn.outvars)
            for var in set(variables(eqn.invars)) if is_read else ():
                self._readers.setdefault(var, []).append(eqn)

    def producer(self, atom: Atom) -> core.JaxprEqn | None:
        """Returns the equation that computes a variable, or None for an input, a constant of the jaxpr, a literal."""
        return None if is_literal(atom) else self._producers.get(atom)

    def readers(self, var: core.Var) -> list[core.JaxprEqn]:
        """Returns the equations that have the variable as an operand, unless nothing reads their results."""
        return self._readers.get(var, [])

    def is_output(self, var: core.Var) -> bool:
        """Returns whether the variable is a result of the jaxpr."""
        return any(var is atom for atom in self.outvars)

    def is_constant(self, atom: Atom) -> bool:
        """Returns whether no input enters into the computation of a value."""
        return is_literal(atom) or atom not in self._from_inputs

    def constant(self, atom: Atom) -> np.ndarray | None:
        """Returns the value of an atom that depends on no input. None if it does, is too large, or is a key."""
        if is_literal(atom):
            return np.asarray(atom.val)
        if not self.is_constant(atom) or not _is_foldable(atom.aval):
            return None
        if atom not in self._folded:
            with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
                self._fold(atom)
        return self._folded[atom]

    def _fold(self, atom: Atom) -> np.ndarray | None:
        if is_literal(atom):
            return np.asarray(atom.val)
        if atom in self._folded:
            return self._folded[atom]
        if atom in self.values:
            value = self.values[atom]
            self._folded[atom] = None if isinstance(value, jax.core.Tracer) else np.asarray(value)
            return self._folded[atom]
        eqn = self._producers[atom]
        operands = [self._fold(operand) if _is_foldable(operand.aval) else None for operand in eqn.invars]
        results: Sequence[Any] = [None] * len(eqn.outvars)
        if eqn.primitive.name in ("pvary", "pcast"):
            results = operands
        elif all(operand is not None for operand in operands) and all(_is_foldable(var.aval) for var in eqn.outvars):
            results = [np.asarray(out) for out in rebind(eqn, operands)]
        self._folded.update(zip(eqn.outvars, results, strict=True))
        return self._folded[atom]

    def _batched(self, eqn: core.JaxprEqn) -> list[core.JaxprEqn]:
        """Returns a gather as one with batch dimensions, where it reads index i of a dimension for index i of them.

        z[arange(N), y] is then take_along_axis(z, y[:, None], 1), which computes every index alike. Any other equation
        is returned as it is.
        """
        columns = self.producer(eqn.invars[1]) if eqn.primitive.name == "gather" else None
        if columns is None or columns.primitive.name != "concatenate":
            return [eqn]
        numbers, (operand, indices) = eqn.params["dimension_numbers"], eqn.invars
        last = indices.aval.ndim - 1
        if columns.params["dimension"] != last or any(column.aval.shape[-1] != 1 for column in columns.invars):
            return [eqn]
        own = {}  # dimension of the operand -> dimension of the indices that counts it
        for dim, column in zip(numbers.start_index_map, columns.invars, strict=True):
            value = self.constant(column)
            for place in range(last if value is not None and dim in numbers.collapsed_slice_dims else 0):
                counts = np.arange(operand.aval.shape[dim]).reshape(
                    [-1 if at == place else 1 for at in range(last + 1)]
                )
                is_counted = value.shape[place] == counts.size and not (value - counts).any()
                if is_counted and place not in own.values():
                    own.setdefault(dim, place)
        left = [dim for dim in numbers.start_index_map if dim not in own]
        first = numbers.start_index_map.index(left[0]) if left else 0
        if not own or numbers.operand_batching_dims or numbers.start_index_map[first:] != tuple(left) or not left:
            return [eqn]
        batching = sorted(own)
        changed = numbers._replace(
            collapsed_slice_dims=tuple(dim for dim in numbers.collapsed_slice_dims if dim not in own),
            start_index_map=tuple(left),
            operand_batching_dims=tuple(batching),
            start_indices_batching_dims=tuple(own[dim] for dim in batching),
        )
        [cut] = jax.make_jaxpr(lambda indices: jax.lax.slice_in_dim(indices, first, None, axis=last))(indices.aval).eqns
        cut = cut.replace(invars=[indices], outvars=[core.Var(var.aval) for var in cut.outvars])
        batched = eqn.replace(invars=[operand, *cut.outvars], params=eqn.params | {"dimension_numbers": changed})
        return self._in_place_of(eqn, [cut, batched])

    def _take_rows_first(self) -> None:
        """Takes rows of products, such as all logits but the last, before these are computed."""
        reads = collections.Counter(atom for eqn in self.eqns for atom in variables(eqn.invars))
        reads.update(variables(self.outvars))

        def producer(atom: Any) -> Any:
            return None if is_literal(atom) or reads[atom] > 1 else self._producers.get(atom)

        eqns: list[Any] = []
        for eqn in self.eqns:
            taken = rows_first(eqn, producer)
            if taken != [eqn]:
                made = {var for one in taken for var in one.outvars}
                self._read_early |= {atom for one in taken for atom in variables(one.invars)} - made
                taken = self._in_place_of(eqn, taken)
            eqns += taken
        self.eqns = eqns

    def _in_place_of(self, eqn: core.JaxprEqn, new: list[core.JaxprEqn]) -> list[core.JaxprEqn]:
        """Returns equations that compute the results of another one, entered in its place."""
        made = {var for one in new for var in one.outvars}
        for one in new:
            self._calls[id(one)] = self._calls[id(eqn)]
            if not self._from_inputs.isdisjoint(variables(one.invars)):
                self._from_inputs |= set(one.outvars)
            self._producers |= dict.fromkeys(one.outvars, one)
        for call in self._calls[id(eqn)]:
            call.own |= made
        return new

    def copy_of_constant(self, atom: Atom, reader: core.JaxprEqn) -> Atom:
        """Returns a copy of a mask or an index for one reader, which may cut it unlike others.

        Returns the atom as it is if it depends on an input, if no other reads it, or if it is costly to compute again.
        """
        copy = self._copies.get((id(reader), atom))
        if copy is not None or not self.is_constant(atom) or self.producer(atom) is None:
            return atom if copy is None else copy
        chain = upstream(self.eqns, [atom])
        own = {id(eqn) for eqn in (*chain, reader)}
        made = [var for one in chain for var in one.outvars]
        is_shared = any(self.is_output(var) or any(id(eqn) not in own for eqn in self.readers(var)) for var in made)
        if not is_shared or any(one.primitive.name not in CHEAP for one in chain):
            return atom
        names = {var: core.Var(var.aval) for var in made}
        self.copied |= {copy: self.copied.get(var, var) for var, copy in names.items()}
        at = next(number for number, eqn in enumerate(self.eqns) if eqn is reader)
        for one in chain:
            invars = [each if is_literal(each) else names.get(each, each) for each in one.invars]
            new = one.replace(invars=invars, outvars=[names[var] for var in one.outvars])
            self.eqns.insert(at, new)
            at += 1
            self._calls[id(new)] = ()
            self._producers |= dict.fromkeys(new.outvars, new)
            for var in variables(invars):
                self._readers.setdefault(var, []).append(new)
        self._readers[names[atom]] = [reader]
        return self._copies.setdefault((id(reader), atom), names[atom])

    def between(self, starts: Collection[Any], ends: Collection[Any], *, without: Collection[Any] = ()) -> list[Any]:
        """Returns the equations, in order, between some variables and others.

        Args:
          starts: variables. Each equation returned depends on one of them.
          ends: variables. One of them depends on each equation returned.
          without: variables at which the walk from `ends` stops.
        """
        reached, connecting = set(starts), []
        for eqn in upstream(self.eqns, ends, without=without):
            if not reached.isdisjoint(variables(eqn.invars)):
                reached |= set(eqn.outvars)
                connecting.append(eqn)
        return connecting

    def source(self, eqn: core.JaxprEqn) -> str:
        """Returns "file.py:line (function)" of the user's line that an equation, or a call around it, comes from."""
        around = (call.eqn for call in reversed(self._calls.get(id(eqn), ())))
        return next(filter(None, map(source_of, (eqn, *around))), "")

    def run(self, steps: Sequence[_Step], values: Sequence[Any]) -> list[Any]:
        """Returns the results of the program that the method `steps` returns, for values of the inputs."""
        env = {**self.values, **dict(zip(self.invars, values, strict=True))}
        for step in steps:
            env.update(zip(step.defines, step.run(env), strict=True))
        return values_of(self.outvars, env)

    def steps(self, matches: Sequence[Match], *, changed: Mapping[int, core.ClosedJaxpr] | None = None) -> list[_Step]:
        """Returns the program with replacements in it, in an order in which it can run.

        Calls remain, unless a replacement is inside. The replaced equations are computed too, and are dead code.

        Args:
          matches: the parts that are replaced.
          changed: id of an equation -> the new body of the equation.

        Raises:
          ValueError: replacements that need each other's results.
        """
        changed = changed or {}
        claimed = {var for match in matches for var in match.outputs}
        ends = claimed.union(self._read_early, *(match.inputs for match in matches))
        # calls of which a value inside is read, that they do not return
        opened = {
            call
            for calls in self._calls.values()
            for call in calls
            if (call.own & ends).difference(variables(call.results))
        }
        opened = opened.union(*(self._calls[number] for number in changed))
        order = {id(eqn): number for number, eqn in enumerate(self.eqns)}
        replacing = {max(order[id(eqn)] for eqn in match.eqns): match for match in matches}
        steps, whole = [], set()
        for number, eqn in enumerate(self.eqns):
            call = next((call for call in self._calls[id(eqn)] if call not in opened), None)
            if call is None:
                steps.append(_binding(eqn, eqn.outvars, set(eqn.outvars) - claimed, body=changed.get(id(eqn))))
            elif call not in whole:
                whole.add(call)
                steps.append(_binding(call.eqn.replace(invars=call.invars), call.results, call.own - claimed))
            if number in replacing:
                steps.append(_replacing(replacing[number], eqn))
        return _ordered(steps, {*self.invars, *self.values})


def _is_foldable(aval: Any) -> bool:
    is_number = hasattr(aval, "shape") and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return is_number and aval_bytes(aval) <= MAX_FOLDED_BYTES


def own_rule(eqn: core.JaxprEqn) -> str:
    """Returns why a call with a derivative rule is not inlined, or "" for other equations."""
    is_own = eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call") and not is_elementwise_call(eqn)
    return f"{op_name(eqn)} has a derivative rule of its own, see chunk(rules=)" if is_own else ""


def _inlined(eqn: core.JaxprEqn) -> Body | None:
    """Returns the body of a call that is part of the view; None for any other equation."""
    if eqn.params.get("branches_platforms") == (("mosaic",), None):  # a kernel of Pallas is not traced here
        return compound(eqn).bodies[-1]
    is_known = own_rule(eqn) and jax_function(eqn) in _KNOWN_RULES
    return called(eqn) if is_known or plain_call(eqn) is not None else None


def _binding(
    eqn: core.JaxprEqn, results: Sequence[Any], wanted: Collection[Any], *, body: core.ClosedJaxpr | None = None
) -> _Step:
    """Returns a step that binds an equation, with another body if one is given, and defines its wanted results."""
    places = {atom: at for at, atom in enumerate(results) if not is_literal(atom) and atom in wanted}

    def run(env: Mapping[Any, Any]) -> list[Any]:
        with place_of(eqn):
            ins = values_of(eqn.invars, env)
            outs = rebind(eqn, ins) if body is None else compound(eqn).bind(ins, lambda _: body)
        return [outs[at] for at in places.values()]

    return _Step(variables(eqn.invars), list(places), run, bool(eqn.effects))


def _replacing(match: Match, place: Any) -> _Step:
    def run(env: Mapping[Any, Any]) -> Sequence[Any]:
        with place_of(place):
            return match.replacement(*(env[var] for var in match.inputs))

    return _Step(match.inputs, match.outputs, run)


def _ordered(steps: Sequence[_Step], available: set[Any]) -> list[_Step]:
    """Returns the steps in an order in which each comes after those it reads from; as they are if possible."""

    def is_ready(step: _Step) -> bool:
        waits = step.has_effects and any(one.has_effects for one in waiting[: waiting.index(step)])
        return available.issuperset(step.reads) and not waits

    order: list[_Step] = []
    waiting: list[_Step] = []
    for step in steps:
        waiting.append(step)
        while (ready := next(filter(is_ready, waiting), None)) is not None:
            waiting.remove(ready)
            order.append(ready)
            available.update(ready.defines)
    if waiting:
        raise ValueError("it needs a result of another replacement that needs its own")
    return order
