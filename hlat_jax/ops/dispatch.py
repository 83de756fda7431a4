"""Runs our implementations of ops in a function that was written without them.

Before differentiation, `dispatch` traces a function, finds in its jaxpr the equations that compute what one of our ops
computes, and computes them by the implementation that the op's dialect chooses:

    loss = dispatch(loss)
    value, grads = jax.value_and_grad(loss)(params, batch)
    print(loss.report())

Each replacement is first compared with the equations it replaces, by values and gradients on random inputs. What looks
like an op but is not one, or fails that comparison, is left as it is, and the report says why.
Source: RAF, arXiv 2303.04759, whose dialects take over patterns of its operators.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import core

from hlat_jax.ops import dispatch_attention, dispatch_check, dispatch_loss, dispatch_mlp
from hlat_jax.ops.dialect import CallSpec, MeasuredTimes, Op
from hlat_jax.ops.dispatch_graph import Changed, Choose, Graph, Match, Refusal
from hlat_jax.passes.jaxpr import CHECKPOINT, traced, without_consts

# Name of an op -> graph -> a Match or a Refusal for each place that looks like it.
MATCHERS = {
    "attention": dispatch_attention.matches,
    "cross_entropy": dispatch_loss.matches,
    "mlp": dispatch_mlp.matches,
}

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A match that is used.

    Attributes:
      op: its name.
      source: "file:line".
      facts: what was recognized.
      chosen: the implementation of each op in it, with the reason.
      difference: the largest relative difference from the original in values and gradients; None: not checked.
      count: how often it occurs.
    """

    op: str
    source: str
    facts: str
    chosen: tuple[str, ...]
    difference: float | None
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Report:
    """What a trace replaced, and what not; `str` prints it."""

    replacements: tuple[Replacement, ...]
    refusals: tuple[Refusal, ...]

    def __str__(self) -> str:
        lines = [] if self.replacements else ["dispatch: nothing replaced"]
        for one in self.replacements:
            checked = "not checked" if one.difference is None else f"differs by {one.difference:.0e}"
            times = f" x{one.count}" if one.count > 1 else ""
            lines.append(f"{one.op}{times} at {one.source}: {one.facts}; {', '.join(one.chosen)}; {checked}")
        counts: dict[Refusal, int] = {}
        for refusal in self.refusals:
            counts[refusal] = counts.get(refusal, 0) + 1
        for refusal, count in counts.items():
            times = f" x{count}" if count > 1 else ""
            lines.append(f"not replaced: {refusal.op}{times} at {refusal.source}: {refusal.reason}")
        return "\n".join(lines)


class Dispatched(Generic[_Args, _Result]):
    """A function with our implementations of ops; see `dispatch`."""

    def __init__(self, fn: Callable[_Args, _Result], splicer: Callable[[], _Splicer]):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._splicer, self._report = fn, splicer, None

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        closed, leaves, tree = traced(self._fn, args, kwargs, by="dispatch")
        splicer = self._splicer()
        outs = core.jaxpr_as_fun(splicer.spliced(closed))(*leaves)
        self._report = Report(tuple(splicer.replacements.values()), tuple(splicer.refusals))
        return jax.tree.unflatten(tree, outs)

    def report(self) -> Report:
        """Returns what the last trace replaced.

        Raises:
          ValueError: the function was not yet called or traced.
        """
        if self._report is None:
            raise ValueError("dispatch: call the function, or trace it with jax.eval_shape, before its report.")
        return self._report


def dispatch(
    fn: Callable[_Args, _Result],
    *,
    times: MeasuredTimes | None = None,
    platform: str | None = None,
    check: bool = True,
    ops: Sequence[str] = tuple(MATCHERS),
) -> Dispatched[_Args, _Result]:
    """Returns a function with the same arguments and results that runs our implementations of ops.

    Apply it before `jax.grad`. Each call traces `fn` again: wrap the result, or its caller, in `jax.jit`. Forward mode
    is not supported where an implementation is a `custom_vjp`.

    Args:
      fn: a function that JAX can trace; arguments as for `autocast`.
      times: measured times, by which implementations are chosen as in `Op.choose`.
      platform: for which implementations are chosen; None: that of JAX's default device.
      check: whether each replacement is compared with the original before it is used, by values and gradients, on
        this machine's CPU.
      ops: names of those that are looked for, of `MATCHERS`.

    Raises:
      ValueError: an unknown op; when called: a function that cannot be traced.
    """
    if isinstance(ops, str) or not set(ops) <= set(MATCHERS):
        raise ValueError(f"dispatch: ops={ops!r} must be a sequence of names of {', '.join(MATCHERS)}.")
    return Dispatched(fn, lambda: _Splicer(platform or jax.default_backend(), times, check=check, ops=ops))


class _Splicer:
    """Replaces ops in jaxprs, and records what it does."""

    def __init__(self, platform: str, times: MeasuredTimes | None, *, check: bool, ops: Sequence[str]):
        self.platform, self.times, self.check = platform, times, check
        self.matchers = [matcher for op, matcher in MATCHERS.items() if op in ops]
        self.replacements: dict[Any, Replacement] = {}
        self.refusals: list[Refusal] = []

    def spliced(self, closed: Any, *, known: Mapping[int, np.ndarray] | None = None) -> Any:
        """Returns the closed jaxpr with ops replaced, also in the jaxprs inside it; itself if there are none.

        Args:
          closed: closed jaxpr.
          known: values of its inputs that are constant, by position.
        """
        graph = Graph(closed, known)
        changed = {}
        for eqn in graph.eqns:
            change = None if id(eqn) in graph.sealed else self._inside(graph, eqn)
            if change is not None:
                changed[id(eqn)] = change
        used = self._used(graph)
        if not used and not changed:
            return closed
        steps = graph.steps(used, changed=changed)
        return jax.make_jaxpr(lambda *args: graph.run(steps, args))(*closed.in_avals)

    def _used(self, graph: Graph) -> list[tuple[Match, Callable]]:
        used: list[tuple[Match, Callable]] = []
        taken: set[int] = set()
        for matcher in self.matchers:
            for found in matcher(graph):
                if isinstance(found, Refusal):
                    self.refusals.append(found)
                    continue
                if any(id(eqn) in taken for eqn in found.eqns):
                    continue  # replaced as part of a larger op
                pair = found, functools.partial(found.replacement, self._choose([]))
                reason, difference, chosen = self._judged(graph, found)
                if not reason:
                    try:
                        graph.steps([*used, pair])
                    except ValueError as error:
                        reason = str(error)
                if reason:
                    self.refusals.append(Refusal(found.op, found.source, reason))
                    continue
                used.append(pair)
                taken |= {id(eqn) for eqn in found.eqns}
                self._record(found, chosen, difference)
        return used

    def _record(self, match: Match, chosen: tuple[str, ...], difference: float | None) -> None:
        key = match.op, match.source, match.facts, chosen
        if key in self.replacements:
            before = self.replacements[key]
            worst = None if difference is None else max(difference, before.difference or 0.0)
            self.replacements[key] = dataclasses.replace(before, count=before.count + 1, difference=worst)
        else:
            self.replacements[key] = Replacement(match.op, match.source, match.facts, chosen, difference)

    def _judged(self, graph: Graph, match: Match) -> tuple[str, float | None, tuple[str, ...]]:
        """Returns (the reason against a match or "", its difference from the original, the implementations chosen)."""
        reason = _read_elsewhere(graph, match)
        if reason:
            return reason, None, ()
        chosen: list[str] = []
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in match.inputs]
        try:
            outs = jax.eval_shape(functools.partial(match.replacement, self._choose(chosen)), *avals)
        except (ValueError, TypeError) as error:
            return " ".join(str(error).split()), None, ()
        wanted = [(var.aval.shape, var.aval.dtype) for var in match.outputs]
        if [(out.shape, out.dtype) for out in outs] != wanted:
            found = ", ".join(f"{out.dtype}{list(out.shape)}" for out in outs)
            return f"our op returns {found} where the function has {wanted}", None, ()
        if not self.check:
            return "", None, tuple(chosen)
        try:
            difference, tolerance = dispatch_check.difference(graph, match)
        except ValueError as error:
            return " ".join(str(error).split()), None, ()
        if not difference <= tolerance:
            return f"our op differs from it by {difference:.1e}, more than {tolerance:.0e}", difference, ()
        return "", difference, tuple(chosen)

    def _choose(self, chosen: list[str]) -> Choose:
        def choose(op: Op, call: CallSpec) -> str:
            choice = op.choose("auto", self.platform, call=call, times=self.times)
            chosen.append(f"{choice.name} ({choice.because})")
            return choice.name

        return choose

    def _inside(self, graph: Graph, eqn: Any) -> Changed | None:
        """Returns the changes to an equation whose jaxprs have ops to replace; None if there are none."""
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._replaced_body(graph, eqn, "jaxpr", eqn.invars[: params["num_consts"]])
        if name == "while":
            first = params["cond_nconsts"]
            body = eqn.invars[first : first + params["body_nconsts"]]
            return self._replaced_body(graph, eqn, "body_jaxpr", body)
        if name == "jit":  # not a plain call: it has shardings
            return self._replaced_body(graph, eqn, "jaxpr", eqn.invars)
        if name == CHECKPOINT:
            closed = core.ClosedJaxpr(params["jaxpr"], [])
            new = self.spliced(closed, known=self._known(graph, eqn.invars))
            if new is closed:
                return None
            opened, consts = without_consts(new)
            return Changed({"jaxpr": opened}, consts)
        if name == "cond":
            known = self._known(graph, eqn.invars[1:])
            branches = tuple(self.spliced(branch, known=known) for branch in params["branches"])
            is_changed = any(new is not old for new, old in zip(branches, params["branches"], strict=True))
            return Changed({"branches": branches}) if is_changed else None
        return None

    def _replaced_body(self, graph: Graph, eqn: Any, key: str, consts: Sequence[Any]) -> Changed | None:
        new = self.spliced(eqn.params[key], known=self._known(graph, consts))
        return None if new is eqn.params[key] else Changed({key: new})

    def _known(self, graph: Graph, atoms: Sequence[Any]) -> dict[int, np.ndarray]:
        """Returns the values of the operands that are constant, by position."""
        values = {number: graph.constant(atom) for number, atom in enumerate(atoms) if graph.is_constant(atom)}
        return {number: value for number, value in values.items() if value is not None}


def _read_elsewhere(graph: Graph, match: Match) -> str:
    """Returns the reason against a match of which others read what is between its inputs and outputs; "" if none do."""
    inside = {id(eqn) for eqn in match.eqns}
    outputs = set(match.outputs)
    for eqn in match.eqns:
        for var in eqn.outvars:
            if var in outputs:
                continue
            if graph.is_output(var):
                return f"the result of {eqn.primitive.name} at {graph.source(eqn)} is returned"
            for reader in graph.readers(var):
                if id(reader) not in inside:
                    where = graph.source(reader)
                    return f"the result of {eqn.primitive.name} at {graph.source(eqn)} is also read at {where}"
    return ""
