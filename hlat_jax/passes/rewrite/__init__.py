"""Replaces equations of a function by others that compute the same. `passes.chunk` and `passes.kernels` use it.

A matcher looks for equations in a flat view of the function's jaxpr, see `graph`. Each match is compared with the
equations that it replaces, by values and gradients on random inputs, see `check`. A match that fails is not used, and
the report says why.
Source: RAF, arXiv 2303.04759, in which kernels take over patterns of operators.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import core

from hlat_jax.passes.interpret import compound
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    RULE_WITH_TRACER,
    trace_call,
    warn_of_rule_with_tracer,
    without_dead_code,
)
from hlat_jax.passes.rewrite import derivative_rules
from hlat_jax.passes.rewrite.check import compare
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal

# Returns a Match or a Refusal for each part of the graph that a pass looks for.
Matcher = Callable[[EquationGraph], Iterable[Match | Refusal]]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A match that is used.

    Attributes:
      op: name of the op.
      source: "file:line" of the op.
      facts: the properties that were found.
      difference: the largest relative difference from the original in values and gradients. None without a check.
      count: number of occurrences.
    """

    op: str
    source: str
    facts: str
    difference: float | None
    count: int = 1


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """The parts of a trace that a pass replaced, and the parts that it left. `str` prints them.

    Attributes:
      name: the pass.
      replacements: the matches that are used.
      refusals: the parts that are left.
      note: the reason if no matcher ran, else "".
    """

    name: str
    replacements: tuple[Replacement, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        note = f": {self.note}" if self.note else ""
        lines = [] if self.replacements else [f"{self.name}: nothing replaced{note}"]
        for one in self.replacements:
            checked = "not checked" if one.difference is None else f"differs by {one.difference:.0e}"
            lines.append(f"{one.op}{_times(one.count)} at {one.source}: {one.facts}; {checked}")
        for refusal, count in collections.Counter(self.refusals).items():
            lines.append(f"not replaced: {refusal.op}{_times(count)} at {refusal.source}: {refusal.reason}")
        return "\n".join(lines)


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


class Rewritten(Generic[_Args, _Result]):
    """A function in which matches are replaced.

    Args:
      fn: a function that JAX can trace.
      name: the pass, for the report.
      matchers: the matchers, in order. Each skips the matches of earlier ones. Without any, `fn` is called as it is.
      rules: names of functions with a derivative rule that are read through, see `derivative_rules`.
      check: whether each match is compared with the original before it is used.
      note: the reason for no matchers.
    """

    def __init__(
        self,
        fn: Callable[_Args, _Result],
        *,
        name: str,
        matchers: Sequence[Matcher],
        check: bool,
        rules: Collection[str] = (),
        note: str = "",
    ):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._name, self._note = fn, name, note
        self._matchers, self._check, self._rules = matchers, check, rules
        self._report: RewriteReport | None = None

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if not self._matchers:
            self._report = RewriteReport(self._name, note=self._note)
            return self._fn(*args, **kwargs)
        closed, leaves, tree = trace_call(self._fn, args, kwargs)
        if rule := warn_of_rule_with_tracer(self._fn, closed.jaxpr):
            self._report = RewriteReport(self._name, refusals=(Refusal(*rule, RULE_WITH_TRACER),))
            return self._fn(*args, **kwargs)
        rewriter = Rewriter(self._matchers, check=self._check, rules=self._rules)
        outs = core.jaxpr_as_fun(rewriter.rewrite(closed))(*leaves)
        self._report = RewriteReport(self._name, tuple(rewriter.replacements.values()), tuple(rewriter.refusals))
        return jax.tree.unflatten(tree, outs)

    def report(self) -> RewriteReport:
        """Returns the report of the last trace.

        Raises:
          ValueError: the function was not yet called or traced.
        """
        if self._report is None:
            raise ValueError(f"{self._name} has no report yet. Call the function, or trace it with jax.eval_shape.")
        return self._report


class Rewriter:
    """Replaces matches in jaxprs, and records the replacements and refusals."""

    def __init__(self, matchers: Sequence[Matcher], *, check: bool, rules: Collection[str]):
        self.matchers, self.check, self.rules = matchers, check, rules
        self.replacements: dict[Any, Replacement] = {}
        self.refusals: list[Refusal] = []

    def rewrite(self, closed: core.ClosedJaxpr, *, known: Mapping[int, np.ndarray] | None = None) -> core.ClosedJaxpr:
        """Returns the closed jaxpr with matches replaced, also in the jaxprs inside it, or itself if there are none.

        Args:
          closed: closed jaxpr.
          known: values of its inputs that are constant, by position.
        """
        graph = derivative_rules.with_bodies(closed, known=known, names=self.rules)
        bodies = {id(eqn): self._changed_body(graph, eqn) for eqn in graph.eqns}
        changed = {number: body for number, body in bodies.items() if body is not None}
        used = self._select_matches(graph)
        if not used and not changed:
            return closed
        steps = graph.steps(used, changed=changed)
        new = jax.make_jaxpr(lambda *args: graph.run(steps, args))(*closed.in_avals)
        return core.ClosedJaxpr(without_dead_code(new.jaxpr), new.consts)

    def _select_matches(self, graph: EquationGraph) -> list[Match]:
        """Returns the matches that are used; records them and the refusals."""
        used: list[Match] = []
        for matches in self.matchers:
            for candidate in matches(graph):
                if isinstance(candidate, Refusal):
                    self.refusals.append(candidate)
                    continue
                if any(id(eqn) in graph.taken for eqn in candidate.eqns):
                    continue  # part of a larger match
                try:
                    difference = self._examine(graph, candidate)
                    graph.steps([*used, candidate])
                # NameError: a mesh axis; RuntimeError: a library of kernels that is not there or refuses the call
                except (TypeError, ValueError, AssertionError, NameError, RuntimeError) as error:
                    self.refusals.append(Refusal(candidate.op, candidate.source, " ".join(str(error).split())))
                    continue
                used.append(candidate)
                graph.taken |= {id(eqn) for eqn in candidate.eqns}
                self._record(candidate, difference)
        return used

    def _record(self, match: Match, difference: float | None) -> None:
        key = match.op, match.source, match.facts
        before = self.replacements.get(key)
        if before is None:
            self.replacements[key] = Replacement(*key, difference)
            return
        worst = None if difference is None else max(difference, before.difference or 0.0)
        self.replacements[key] = dataclasses.replace(before, count=before.count + 1, difference=worst)

    def _examine(self, graph: EquationGraph, match: Match) -> float | None:
        """Returns the difference of a replacement from the original, None without a check.

        Raises:
          ValueError, TypeError: the match cannot be used.
        """
        _check_readers(graph, match)
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in match.inputs]
        outs = [(out.shape, out.dtype) for out in jax.eval_shape(match.replacement, *avals)]
        wanted = [(var.aval.shape, var.aval.dtype) for var in match.outputs]
        if outs != wanted:
            raise ValueError(f"the replacement returns {outs}, and the function {wanted}")
        if not self.check:
            return None
        difference, tolerance = compare(graph, match)
        if not difference <= tolerance:
            raise ValueError(f"the replacement differs from it by {difference:.1e}, more than {tolerance:.0e}")
        return difference

    def _changed_body(self, graph: EquationGraph, eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
        """Returns the body of an equation with matches replaced; None if there are none."""
        if eqn.primitive.name not in ("scan", "jit", CHECKPOINT):  # a jit that the graph does not inline places arrays
            return None
        inside = compound(eqn)
        fixed = eqn.invars if inside.carried is None else eqn.invars[: inside.carried.start]
        values = {number: graph.constant(atom) for number, atom in enumerate(fixed)}
        closed = inside.bodies[0].closed
        new = self.rewrite(closed, known={number: value for number, value in values.items() if value is not None})
        return None if new is closed else new


def _check_readers(graph: EquationGraph, match: Match) -> None:
    """Raises ValueError for a match of which others read what is between its inputs and outputs."""
    inside = {id(eqn) for eqn in match.eqns}
    for eqn in match.eqns:
        for var in set(eqn.outvars) - set(match.outputs):
            result = f"the result of {eqn.primitive.name} at {graph.source(eqn)}"
            if graph.is_output(var):
                raise ValueError(f"{result} is returned")
            for reader in graph.readers(var):
                if id(reader) not in inside:
                    raise ValueError(f"{result} is also read at {graph.source(reader)}")
