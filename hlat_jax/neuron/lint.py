"""Checks a JAX function against what Neuron documents as unsupported, on any machine.

    from hlat_jax.neuron import lint
    for finding in lint.check(jax.jit(step), state, batch):
        print(finding)

The function is lowered for platform `neuron`, so this is the program that Neuron's compiler would be given, before its
own passes; a program without findings may still fail to compile.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.extend.mlir import ir

from hlat_jax.host.jax_compat import mlir
from hlat_jax.neuron import operators as operators_lib
from hlat_jax.neuron import partitioned, unrolled
from hlat_jax.neuron.module import Frame, Program, line_of
from hlat_jax.neuron.rules import RULES, SEVERITIES, TARGETS
from hlat_jax.passes.jaxpr import inner_jaxprs


@dataclasses.dataclass(frozen=True)
class Finding:
    """One violation of one rule at one line.

    Attributes:
      rule: its id in `rules.RULES`.
      severity: "error", "warning" or "info".
      op: operations of the lowered program, by name.
      what: detail of the first of them, such as its type.
      line: `file:line (function)` of the Python line that it comes from; "" where unknown.
      frames: the Python frames, innermost first.
      count: operations from this line that break the rule.
      why: what happens on the device.
      instead: what to write.
      source: page of the Neuron documentation.
    """

    rule: str
    severity: str
    op: str
    what: str
    line: str
    frames: tuple[str, ...]
    count: int
    why: str
    instead: str
    source: str

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        where = f"\n    at {self.line}" if self.line else ""
        return (
            f"{self.severity} {self.rule}: {self.op} ({self.what}){times}{where}\n"
            f"    why: {self.why}\n    instead: {self.instead}\n    source: {self.source}"
        )


def check(
    fn: Callable,
    *args: Any,
    target: str = "trn1",
    recurring: bool = True,
    operators: Collection[str] = (),
    **kwargs: Any,
) -> list[Finding]:
    """Returns the rules that a function breaks when lowered for Neuron with these arguments, the most severe first.

    Args:
      fn: a function, jitted or not.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
      target: one of `rules.TARGETS`.
      recurring: it runs every step; False: once, as an initialisation does.
      operators: the only operations allowed, as `neuronx-cc list-operators` prints them; empty: not checked.
      **kwargs: further arguments of `fn`.

    Raises:
      ValueError: an unknown target.
    """
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    return check_traced(jitted.trace(*args, **kwargs), target=target, recurring=recurring, operators=operators)


def check_traced(
    traced: Any, *, target: str = "trn1", recurring: bool = True, operators: Collection[str] = ()
) -> list[Finding]:
    """Returns `check` of what `jax.jit(fn).trace(...)` gave."""
    try:
        lowered = traced.lower(lowering_platforms=("neuron",))
    except (NotImplementedError, ValueError) as error:
        if not isinstance(error, NotImplementedError) and "not supported on neuron" not in str(error):
            raise  # a host callback raises this ValueError; any other comes from the user's function
        return [_not_lowered(traced, error)]
    module = lowered.compiler_ir("stablehlo")
    return check_module(module, target=target, recurring=recurring, operators=operators)


def check_module(
    module: Any, *, target: str = "trn1", recurring: bool = True, operators: Collection[str] = ()
) -> list[Finding]:
    """Returns `check` of a StableHLO module that was lowered for Neuron: an `ir.Module`, or its text."""
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is not one of {', '.join(TARGETS)}.")
    if isinstance(module, str):
        with mlir.make_ir_context():
            module = ir.Module.parse(module)
    program = Program(module.operation)
    parted = partitioned.split(module.operation)
    listed = {operators_lib.normalized(word) for word in operators}
    groups: dict[tuple[str, str], list[tuple]] = {}
    for rule, what, op, owner, *place in _hits(program, parted, target=target, listed=listed):
        frames = owner.frames(*place or [op])
        groups.setdefault((rule, line_of(frames)), []).append((what, op.name, frames))
    findings = [_finding(key, hits, target=target, recurring=recurring) for key, hits in groups.items()]
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))


def _hits(program: Program, parted: Program | None, *, target: str, listed: set[str]) -> Iterator[tuple]:
    """Yields (rule, what, operation, its program), and the operation whose line is to blame, where that differs."""
    for op in program.operations:
        for rule, what, *place in operators_lib.offences(op, program):
            yield rule, what, op, program, *place
        if listed:
            for rule, what in operators_lib.not_listed(op, listed):
                yield rule, what, op, program
    split = parted or program
    for owner, found in (
        (program, partitioned.argument_findings(program, target=target)),
        (program, partitioned.group_findings(program, parted, target=target)),
        (split, partitioned.size_findings(split)),
        (split, unrolled.findings(split)),
    ):
        for rule, what, op in found:
            yield rule, what, op, owner


def _finding(key: tuple[str, str], hits: list[tuple], *, target: str, recurring: bool) -> Finding:
    """Returns what the hits (what, operation's name, frames) of one rule at one line come to."""
    rule_id, line = key
    rule, (what, _, frames) = RULES[rule_id], hits[0]
    severity = rule.severity_on(target, recurring=recurring)
    if rule_id == "INT01" and not all(hit[0].startswith(("i32", "ui32")) for hit in hits):
        severity = rule.severity  # the milder severity is for 32 bits
    op = ", ".join(dict.fromkeys(hit[1] for hit in hits))
    places = tuple(map(str, frames))
    return Finding(rule_id, severity, op, what, line, places, len(hits), rule.why, rule.instead, rule.source)


def _not_lowered(traced: Any, error: Exception) -> Finding:
    """Returns the finding for a program that JAX could not lower, at the line that traced the equation to blame."""
    trace = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ is not None else []
    blamed = [Frame(place.filename, place.lineno or 0, place.name) for place in reversed(trace)]
    frames = _chain(traced.jaxpr.jaxpr, {(frame.path, frame.line) for frame in blamed}) or blamed
    named = re.search(r"(?:primitive '?|^`)(\w+)", str(error))
    rule, what = RULES["LW01"], str(error).split("\n")[0][:160]
    op, line = named.group(1) if named else "unknown", line_of(frames)
    places = tuple(map(str, frames))
    return Finding("LW01", rule.severity, op, what, line, places, 1, rule.why, rule.instead, rule.source)


def _chain(jaxpr: Any, places: set[tuple[str, int]]) -> list[Frame]:
    """Returns the frames of the first equation traced at one of the places, then those of the calls around it."""
    for equation in jaxpr.eqns:
        trace = equation.source_info.traceback
        own = [Frame(f.file_name, f.line_num, f.function_name) for f in (trace.frames if trace else ())]
        for inner in inner_jaxprs(equation):
            found = _chain(inner, places)
            if found:
                return found + own
        if any((frame.path, frame.line) in places for frame in own):
            return own
    return []
