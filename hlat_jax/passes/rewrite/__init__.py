"""Runs our implementations of ops in a function that was written without them.

Before differentiation, `rewrite` traces a function, finds in its jaxpr the equations that compute what one of our ops
computes, and computes them by the implementation that the op chooses. A loss of large logits is computed in
chunks, see `chunks`:

    loss = rewrite(loss)
    value, grads = jax.value_and_grad(loss)(params, batch)
    print(loss.report())

Each replacement is first compared with the equations it replaces, by values and gradients on random inputs. What looks
like an op but is not one, or fails that comparison, is left as it is, and the report says why.
Source: RAF, arXiv 2303.04759, whose implementations take over patterns of its operators.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import core

from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.ops.dialect import CallSpec, Op
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    RULE_WITH_TRACER,
    carry_of,
    trace_call,
    warn_of_rule_with_tracer,
    without_consts,
    without_dead_code,
)
from hlat_jax.passes.rewrite import attention, chunks, mlp
from hlat_jax.passes.rewrite.check import compare
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match, Refusal

Matcher = Callable[[EquationGraph], Iterable[Match | Refusal]]
# Each: graph -> a Match or a Refusal for each place that looks like its op.

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A match that is used.

    Attributes:
      op: its name.
      source: "file:line".
      facts: what was recognized.
      chosen: the implementation of each op in it, with the reason; empty where an op has one implementation.
      difference: the largest relative difference from the original in values and gradients; None if it was not checked.
      count: how often it occurs.
    """

    op: str
    source: str
    facts: str
    chosen: tuple[str, ...]
    difference: float | None
    count: int = 1


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """What a trace replaced, and what not; `str` prints it."""

    replacements: tuple[Replacement, ...]
    refusals: tuple[Refusal, ...]

    def __str__(self) -> str:
        lines = [] if self.replacements else ["rewrite: nothing replaced"]
        for one in self.replacements:
            checked = "not checked" if one.difference is None else f"differs by {one.difference:.0e}"
            parts = [one.facts, *([", ".join(one.chosen)] if one.chosen else []), checked]
            lines.append(f"{one.op}{_times(one.count)} at {one.source}: {'; '.join(parts)}")
        for refusal, count in collections.Counter(self.refusals).items():
            lines.append(f"not replaced: {refusal.op}{_times(count)} at {refusal.source}: {refusal.reason}")
        return "\n".join(lines)


def _times(count: int) -> str:
    return f" x{count}" if count > 1 else ""


class Rewritten(Generic[_Args, _Result]):
    """A function with our implementations of ops; see `rewrite`."""

    def __init__(self, fn: Callable[_Args, _Result], rewriter: Callable[[], Rewriter]):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._rewriter, self._report = fn, rewriter, None

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        closed, leaves, tree = trace_call(self._fn, args, kwargs)
        if rule := warn_of_rule_with_tracer(self._fn, closed.jaxpr):
            self._report = RewriteReport((), (Refusal(*rule, RULE_WITH_TRACER),))
            return self._fn(*args, **kwargs)
        rewriter = self._rewriter()
        outs = core.jaxpr_as_fun(rewriter.rewrite(closed))(*leaves)
        self._report = RewriteReport(tuple(rewriter.replacements.values()), tuple(rewriter.refusals))
        return jax.tree.unflatten(tree, outs)

    def report(self) -> RewriteReport:
        """Returns what the last trace replaced.

        Raises:
          ValueError: the function was not yet called or traced.
        """
        if self._report is None:
            raise ValueError("rewrite: call the function, or trace it with jax.eval_shape, before its report.")
        return self._report


def rewrite(
    fn: Callable[_Args, _Result],
    *,
    platform: str | None = None,
    max_bytes: int | str = chunks.LOSS_BYTES,
    check: bool = True,
) -> Rewritten[_Args, _Result]:
    """Returns a function with the same arguments and results that runs our implementations of ops.

    Apply it before `jax.grad` or `jax.jvp`. Each call traces `fn` again: wrap the result, or its caller, in `jax.jit`.
    The attention kernels for GPUs and Neuron have no forward mode.

    Args:
      fn: a function that JAX can trace; arguments as for `autocast`.
      platform: the platform for which implementations are chosen, by default that of JAX's default device.
      max_bytes: "2MiB" or bytes: the size up to which logits are left as they are. Those of a loss that ends in one
        number are computed in chunks of at least 128 rows, without computing any of them twice.
      check: whether each replacement is compared with the original before it is used, by values and gradients, on
        this machine's CPU.

    Raises:
      ValueError: `max_bytes` is no size.
    """
    losses = functools.partial(chunks.losses, max_bytes=parse_bytes(max_bytes, name="max_bytes"))
    matchers = attention.matches, mlp.matches, losses
    return Rewritten(fn, lambda: Rewriter(platform or jax.default_backend(), check=check, matchers=matchers))


class Rewriter:
    """Replaces ops in jaxprs, and records what it does."""

    def __init__(self, platform: str, *, check: bool, matchers: Sequence[Matcher]):
        self.platform, self.check, self.matchers = platform, check, matchers
        self.replacements: dict[Any, Replacement] = {}
        self.refusals: list[Refusal] = []

    def rewrite(self, closed: Any, *, known: Mapping[int, np.ndarray] | None = None) -> Any:
        """Returns the closed jaxpr with ops replaced, also in the jaxprs inside it; itself if there are none.

        Args:
          closed: closed jaxpr.
          known: values of its inputs that are constant, by position.
        """
        graph = EquationGraph(closed, known)
        eqns = {id(eqn): self._changed(graph, eqn) for eqn in graph.eqns}
        changed = {number: eqn for number, eqn in eqns.items() if eqn is not None}
        used = self._select_matches(graph)
        if not used and not changed:
            return closed
        steps = graph.steps(used, changed=changed)
        new = jax.make_jaxpr(lambda *args: graph.run(steps, args))(*closed.in_avals)
        return core.ClosedJaxpr(without_dead_code(new.jaxpr), new.consts)

    def _select_matches(self, graph: EquationGraph) -> list[tuple[Match, Callable]]:
        """Returns the matches that are used, each with its replacement; records them and the refusals."""
        used: list[tuple[Match, Callable]] = []
        for matches in self.matchers:
            for candidate in matches(graph):
                if isinstance(candidate, Refusal):
                    self.refusals.append(candidate)
                    continue
                if any(id(eqn) in graph.taken for eqn in candidate.eqns):
                    continue  # replaced as part of a larger op
                chosen: list[str] = []
                pair = candidate, functools.partial(candidate.replacement, self._chooser(chosen))
                try:
                    difference = self._examine(graph, *pair)
                    graph.steps([*used, pair])
                except (TypeError, ValueError, AssertionError, NameError) as error:  # NameError: of a mesh axis
                    self.refusals.append(Refusal(candidate.op, candidate.source, " ".join(str(error).split())))
                    continue
                used.append(pair)
                graph.taken |= {id(eqn) for eqn in candidate.eqns}
                self._record(candidate, tuple(dict.fromkeys(chosen)), difference)
        return used

    def _record(self, match: Match, chosen: tuple[str, ...], difference: float | None) -> None:
        key = match.op, match.source, match.facts, chosen
        before = self.replacements.get(key)
        if before is None:
            self.replacements[key] = Replacement(match.op, match.source, match.facts, chosen, difference)
            return
        worst = None if difference is None else max(difference, before.difference or 0.0)
        self.replacements[key] = dataclasses.replace(before, count=before.count + 1, difference=worst)

    def _examine(self, graph: EquationGraph, match: Match, replacement: Callable) -> float | None:
        """Returns the difference of a replacement from the original, None without a check.

        Raises:
          ValueError, TypeError: the match cannot be used.
        """
        _check_readers(graph, match)
        avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in match.inputs]
        outs = [(out.shape, out.dtype) for out in jax.eval_shape(replacement, *avals)]
        wanted = [(var.aval.shape, var.aval.dtype) for var in match.outputs]
        if outs != wanted:
            raise ValueError(f"our op returns {outs} where the function has {wanted}")
        if not self.check:
            return None
        difference, tolerance = compare(graph, match)
        if not difference <= tolerance:
            raise ValueError(f"our op differs from it by {difference:.1e}, more than {tolerance:.0e}")
        return difference

    def _chooser(self, chosen: list[str]) -> Choose:
        """Returns a function that chooses implementations, and adds each choice with its reason to `chosen`."""

        def choose(op: Op, call: CallSpec) -> str:
            choice = op.choose("auto", self.platform, call=call)
            chosen.append(f"{choice.name} ({choice.because})")
            return choice.name

        return choose

    def _changed(self, graph: EquationGraph, eqn: Any) -> Any:
        """Returns an equation with the ops in its jaxpr replaced; None if there are none."""
        name, params = eqn.primitive.name, eqn.params
        if name not in ("scan", "jit", CHECKPOINT):  # a jit that places arrays, which the graph does not inline
            return None
        closed = core.ClosedJaxpr(params["jaxpr"], []) if name == CHECKPOINT else params["jaxpr"]
        fixed = eqn.invars[: carry_of(eqn)[1].start] if name == "scan" else eqn.invars
        values = {number: graph.constant(atom) for number, atom in enumerate(fixed)}
        new = self.rewrite(closed, known={number: value for number, value in values.items() if value is not None})
        if new is closed:
            return None
        if name != CHECKPOINT:
            return eqn.replace(params={**params, "jaxpr": new})
        opened, consts = without_consts(new)
        literals = [core.Literal(const, jax.typeof(const)) for const in consts]
        return eqn.replace(params={**params, "jaxpr": opened}, invars=[*literals, *eqn.invars])


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
