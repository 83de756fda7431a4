"""A flat view of one traced program, in which matchers look for ops, and its evaluation with some parts replaced."""

from __future__ import annotations

import dataclasses
import graphlib
import heapq
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core, source_info_util

from hlat_jax.ops.dialect import CallSpec, Op
from hlat_jax.passes.independence import is_rectifier
from hlat_jax.passes.jaxpr import PLAIN_CALLS, aval_bytes, place_of, rebind

# Calls with a derivative rule: part of the view, but either replaced whole or left as they are.
SEALED_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
# Not folded above: an array of 16,384 x 16,384 int32.
MAX_FOLDED_BYTES = 2**30

# Returns the name of the implementation of an op for a call, as the op chooses it.
Choose = Callable[[Op, CallSpec], str]


@dataclasses.dataclass(frozen=True)
class Match:
    """Equations that compute what one of our ops computes.

    Attributes:
      op: name of the op, for the report.
      eqns: the equations of `EquationGraph.eqns` that the op replaces. Nobody else may read their results, except
        `outputs`. What several ops share, such as the construction of a mask, is left out: what nobody reads is not
        computed.
      inputs: variables that the op takes.
      outputs: variables that it computes.
      replacement: takes a `Choose` and the values of `inputs`; returns those of `outputs`, a sequence, in the same
        shapes and dtypes. It reads sizes from its arguments: the check may cut batch dimensions.
      source: "file:line" for the report; see `EquationGraph.source`.
      facts: what was recognized, for the report: "causal, scale 0.125".
      resized: takes shapes of variables and returns the replacement at these, for the check. Without it, dimensions
        that are summed, or along which a constant differs, are not cut.
      uncut: (variable, dimension) that the check must leave at its size, although nothing is mixed along it.
    """

    op: str
    eqns: Sequence[Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    replacement: Callable[..., Sequence[Any]]
    source: str
    facts: str = ""
    resized: Callable[[Callable[[Any], Sequence[int]]], Callable[..., Sequence[Any]]] | None = None
    uncut: Sequence[tuple[Any, int]] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Equations that look like one of our ops and are left as they are.

    Attributes:
      op: name of the op.
      source: "file:line".
      reason: why it does not apply.
    """

    op: str
    source: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Change:
    """What changes in an equation.

    Attributes:
      params: those that change.
      consts: arrays that come before its operands.
    """

    params: Mapping[str, Any]
    consts: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call whose body is part of the view."""

    eqn: Any
    items: Sequence[Any]  # equations and calls
    results: Sequence[Any]  # of the body
    sealed: bool
    inside: frozenset[Any]  # variables of the body and of the calls in it


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    reads: Sequence[Any]
    defines: Sequence[Any]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    has_effects: bool = False


class EquationGraph:
    """One jaxpr with the bodies of plain `jit`, `custom_jvp` and `custom_vjp` calls inlined.

    Args:
      closed: closed jaxpr.
      known: values of its inputs that are constant in the surrounding program, by position.

    Attributes:
      eqns: the equations in order; each result is a variable of its own.
      invars: inputs.
      outvars: results: variables or literals.
      sealed: ids of the equations inside calls that have a derivative rule.
      taken: ids of the equations that are replaced already.
    """

    def __init__(self, closed: Any, known: Mapping[int, np.ndarray] | None = None):
        self.eqns: list[Any] = []
        self.sealed: set[int] = set()
        self.taken: set[int] = set()
        self.values: dict[Any, Any] = {}  # constants of the jaxpr, arrays
        self._folded: dict[Any, np.ndarray] = {}
        self._from_inputs: set[Any] = set()
        self.invars = [core.Var(aval) for aval in closed.in_avals]
        for number, array in (known or {}).items():
            self._folded[self.invars[number]] = self.values[self.invars[number]] = array
        self._from_inputs |= {var for var in self.invars if var not in self._folded}
        self._items, self.outvars, _ = self._flattened(closed, self.invars, sealed=False)
        numbers = {id(eqn): number for number, eqn in enumerate(self.eqns)}
        self._number = lambda eqn: numbers[id(eqn)]
        self._producers = {var: eqn for eqn in self.eqns for var in eqn.outvars}
        self._readers: dict[Any, list[Any]] = {}
        for eqn in reversed(self.eqns):
            is_read = eqn.effects or any(var in self._readers or self.is_output(var) for var in eqn.outvars)
            for var in {atom for atom in eqn.invars if is_read and not is_literal(atom)}:
                self._readers.setdefault(var, []).append(eqn)
        for eqn in self.eqns:
            if any(not is_literal(atom) and atom in self._from_inputs for atom in eqn.invars) or eqn.effects:
                self._from_inputs |= set(eqn.outvars)

    def producer(self, atom: Any) -> Any:
        """Returns the equation that computes a variable; None for an input, a constant of the jaxpr, a literal."""
        return None if is_literal(atom) else self._producers.get(atom)

    def readers(self, var: Any) -> list[Any]:
        """Returns the equations that have the variable as an operand and whose results are read; see `is_output`."""
        return self._readers.get(var, [])

    def is_output(self, var: Any) -> bool:
        """Returns whether the variable is a result of the jaxpr."""
        return any(var is atom for atom in self.outvars)

    def is_constant(self, atom: Any) -> bool:
        """Returns whether no input enters into the computation of a value."""
        return is_literal(atom) or atom not in self._from_inputs

    def constant(self, atom: Any) -> np.ndarray | None:
        """Returns the value of what depends on no input; None if it does, or is not folded: too large, a key."""
        if is_literal(atom):
            return np.asarray(atom.val)
        if not self.is_constant(atom) or not _is_foldable(atom.aval):
            return None
        if atom not in self._folded:
            with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
                found = self._fold(atom)
            if found is None:
                return None
        return self._folded[atom]

    def _fold(self, atom: Any) -> np.ndarray | None:
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

    def sealed_calls_of(self, eqns: Sequence[Any]) -> list[Any]:
        """Returns the calls with a derivative rule that contain some of the equations."""
        ids, found, todo = {id(eqn) for eqn in eqns}, [], [*self._items]
        while todo:
            item = todo.pop()
            if isinstance(item, _Call):
                todo += item.items
                if item.sealed and any(id(eqn) in ids for eqn in _equations(item)):
                    found.append(item.eqn)
        return found

    def source(self, eqn: Any) -> str:
        """Returns "file.py:line (function)" of the user's line that an equation comes from."""
        text = source_info_util.summarize(eqn.source_info)
        found = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((.*)\)", text)
        return f"{pathlib.PurePath(found[1]).name}:{found[2]} ({found[3]})" if found else text

    def run(
        self,
        steps: Sequence[_Step],
        values: Sequence[Any],
        *,
        inputs: Sequence[Any] | None = None,
        outputs: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Returns the values of variables from those of others by the steps that `steps` returns.

        Args:
          steps: the steps.
          values: of the inputs.
          inputs: the variables that are given; by default the inputs of the jaxpr.
          outputs: those that are wanted; by default the results of the jaxpr.
        """
        env = {**self.values, **dict(zip(self.invars if inputs is None else inputs, values, strict=True))}
        for step in steps:
            env.update(zip(step.defines, step.run(env), strict=True))
        return [atom.val if is_literal(atom) else env[atom] for atom in (self.outvars if outputs is None else outputs)]

    def steps(
        self,
        matches: Sequence[tuple[Match, Callable[..., Sequence[Any]]]],
        *,
        changes: Mapping[int, Change] | None = None,
        given: Sequence[Any] | None = None,
        wanted: Sequence[Any] | None = None,
    ) -> list[_Step]:
        """Returns the program with replacements in it, in an order in which it can run, without what nobody reads.

        Args:
          matches: each with the function from the values of its inputs to those of its outputs.
          changes: id of an equation -> how it is rebound.
          given: variables whose values are given; None: the inputs of the jaxpr.
          wanted: variables whose values are wanted; None: the results of the jaxpr.

        Raises:
          ValueError: replacements that need each other's results, or one that reads or computes a value inside a call
            that has a derivative rule.
        """
        given = self.invars if given is None else given
        wanted = self.outvars if wanted is None else wanted
        ends = {var for match, _ in matches for var in (*match.inputs, *match.outputs)} | set(given)
        ends |= {atom for atom in wanted if not is_literal(atom)}
        claimed = {var for match, _ in matches for var in match.outputs} | set(given)
        last = {id(match): max(match.eqns, key=self._number) for match, _ in matches}
        steps: list[tuple[int, _Step]] = [
            (self._number(last[id(match)]), _replacing(match, function, last[id(match)])) for match, function in matches
        ]
        self._add_steps(self._items, changes or {}, ends, claimed, steps)
        kept = _needed([step for _, step in steps], wanted, set(given) | set(self.values))
        numbers = {id(step): number for number, step in steps}
        return _ordered(kept, numbers)

    def _add_steps(self, items: Sequence[Any], changes: Mapping, ends: set, claimed: set, steps: list) -> None:
        for item in items:
            if not isinstance(item, _Call):
                reads = [atom for atom in item.invars if not is_literal(atom)]
                defines = [var for var in item.outvars if var not in claimed]
                run = _binding(item, item.outvars, defines, changes.get(id(item), Change({})))
                steps.append((self._number(item), _Step(reads, defines, run, bool(item.effects))))
                continue
            results = {atom for atom in item.results if not is_literal(atom)}
            is_open = any(var in item.inside and var not in results for var in ends)
            is_open |= any(id(eqn) in changes for eqn in _equations(item))
            if is_open and item.sealed:
                raise ValueError(f"part of {item.eqn.primitive.name}, which has a derivative rule of its own")
            if is_open:
                self._add_steps(item.items, changes, ends, claimed, steps)
                continue
            reads = [atom for atom in item.eqn.invars if not is_literal(atom)]
            defines = [atom for atom in dict.fromkeys(item.results) if atom in item.inside and atom not in claimed]
            numbers = [self._number(eqn) for eqn in _equations(item)]
            run = _binding(item.eqn, item.results, defines, Change({}))
            if numbers:
                steps.append((numbers[0], _Step(reads, defines, run, bool(item.eqn.effects))))

    def _flattened(self, closed: Any, operands: Sequence[Any], *, sealed: bool) -> tuple[list, list, frozenset]:
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.invars, operands, strict=True))
        items: list[Any] = []
        inside: set[Any] = set()
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = core.Var(var.aval)
            self.values[env[var]] = value
            if isinstance(value, jax.core.Tracer):
                self._from_inputs.add(env[var])
        for eqn in jaxpr.eqns:
            invars = [atom if is_literal(atom) else env[atom] for atom in eqn.invars]
            body = _inlined(eqn)
            if body is None:
                outvars = [core.Var(var.aval) for var in eqn.outvars]
                items.append(eqn.replace(invars=invars, outvars=outvars))
                self.eqns.append(items[-1])
                inside |= set(outvars)
                if sealed:
                    self.sealed.add(id(items[-1]))
            else:
                is_sealed = eqn.primitive.name in SEALED_CALLS
                inner, outvars, within = self._flattened(body, invars, sealed=sealed or is_sealed)
                items.append(_Call(eqn.replace(invars=invars), inner, outvars, is_sealed, within))
                inside |= within
            env.update(zip(eqn.outvars, outvars, strict=True))
        results = [atom if is_literal(atom) else env[atom] for atom in jaxpr.outvars]
        return items, results, frozenset(inside)


def is_literal(atom: Any) -> bool:
    """Returns whether an operand is a literal, which has a `val`, not a variable."""
    return isinstance(atom, core.Literal)


def _is_foldable(aval: Any) -> bool:
    is_number = hasattr(aval, "shape") and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return is_number and aval_bytes(aval) <= MAX_FOLDED_BYTES


def _inlined(eqn: Any) -> Any:
    """Returns the closed jaxpr of a call that is part of the view; None for any other equation."""
    name, params = eqn.primitive.name, eqn.params
    if name in SEALED_CALLS:
        body = params[SEALED_CALLS[name]]
        return None if _forwards(body.jaxpr) or is_rectifier(eqn) else body
    if name not in PLAIN_CALLS:
        return None
    if name == "jit":
        shardings = (*params["in_shardings"], *params["out_shardings"])
        if any(params["donated_invars"]) or any(type(one).__name__ != "UnspecifiedValue" for one in shardings):
            return None
        return params["jaxpr"]
    body = params["call_jaxpr"]
    return body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])


def _forwards(jaxpr: Any) -> bool:
    """Returns whether a result is an operand or constant, through plain calls too: its rule would have no equation."""
    same = {*jaxpr.invars, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        body = _inlined(eqn)
        if body is not None:
            own = dict(zip(body.jaxpr.invars, eqn.invars, strict=True))
            for var, atom in zip(eqn.outvars, body.jaxpr.outvars, strict=True):
                source = atom if is_literal(atom) else own.get(atom)
                if source is not None and (is_literal(source) or source in same):
                    same.add(var)
    return any(is_literal(atom) or atom in same for atom in jaxpr.outvars)


def _equations(call: _Call) -> list[Any]:
    found: list[Any] = []
    for item in call.items:
        found.extend(_equations(item) if isinstance(item, _Call) else [item])
    return found


def _binding(eqn: Any, results: Sequence[Any], defines: Sequence[Any], change: Change) -> Callable:
    kept = [next(number for number, atom in enumerate(results) if atom is var) for var in defines]

    def run(env: Mapping[Any, Any]) -> list[Any]:
        operands = [atom.val if is_literal(atom) else env[atom] for atom in eqn.invars]
        with place_of(eqn):
            outs = rebind(eqn, [*change.consts, *operands], **change.params)
        return [outs[number] for number in kept]

    return run


def _replacing(match: Match, function: Callable[..., Sequence[Any]], place: Any) -> _Step:
    def run(env: Mapping[Any, Any]) -> Sequence[Any]:
        with place_of(place):
            return function(*(env[var] for var in match.inputs))

    return _Step(match.inputs, match.outputs, run)


def _needed(steps: Sequence[_Step], wanted: Sequence[Any], given: set[Any]) -> list[_Step]:
    """Returns the steps that the wanted values depend on, and those with effects."""
    definers = {var: step for step in steps for var in step.defines}
    kept: dict[int, _Step] = {}
    todo = [atom for atom in wanted if not is_literal(atom)]
    for step in steps:
        if step.has_effects:
            kept[id(step)] = step
            todo += step.reads
    while todo:
        var = todo.pop()
        step = definers.get(var)
        if step is None:
            if var not in given:
                raise ValueError("it also depends on an input that the op does not take")
        elif id(step) not in kept:
            kept[id(step)] = step
            todo += step.reads
        # a step of which only the effects are kept may define what is wanted: it is there already
    return [step for step in steps if id(step) in kept]


def _ordered(steps: Sequence[_Step], numbers: Mapping[int, int]) -> list[_Step]:
    """Returns the steps in an order in which each comes after those it reads from; as in the program if possible."""
    definers = {var: step for step in steps for var in step.defines}
    sorter: graphlib.TopologicalSorter = graphlib.TopologicalSorter()
    for step in steps:
        sorter.add(step, *(definers[var] for var in step.reads if var in definers))
    with_effects = sorted((step for step in steps if step.has_effects), key=lambda step: numbers[id(step)])
    for before, after in itertools.pairwise(with_effects):
        sorter.add(after, before)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        raise ValueError("it needs a result of another replacement that needs its own") from error
    order: list[_Step] = []
    ready: list[tuple[int, int, _Step]] = []
    while sorter.is_active():
        for step in sorter.get_ready():
            heapq.heappush(ready, (numbers[id(step)], id(step), step))
        order.append(heapq.heappop(ready)[-1])
        sorter.done(order[-1])
    return order
