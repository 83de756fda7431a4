"""Checks a JAX function against what Neuron documents that it does not take, on any machine.

    from hlat_jax.neuron import lint
    for finding in lint.check(jax.jit(step), state, batch):
        print(finding)

Owns findings: what was found, where, how grave. It lowers for platform `neuron`, so it sees the program that Neuron's
compiler would be given, before that compiler's own passes; a program without findings is not one that was compiled.
Knows no model, config or trainer of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir

from hlat_jax.neuron import operators as operators_lib
from hlat_jax.neuron import partitioned, unrolled
from hlat_jax.neuron.module import Frame, Program, is_plumbing, line_of
from hlat_jax.neuron.rules import RULES, SEVERITIES, TARGETS


@dataclasses.dataclass(frozen=True)
class Finding:
    """One offence against one rule at one line.

    Attributes:
      rule: its id in `rules.RULES`.
      severity: "error", "warning" or "info".
      op: operations of the lowered program, by name.
      what: what of the first of them is meant, such as its type.
      line: `file:line (function)` of the Python line that it comes from; "" where the program does not say.
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
    """Returns what a function breaks when it is lowered for Neuron with these arguments, the gravest first.

    Args:
      fn: a function, jitted or not.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
      target: one of `rules.TARGETS`.
      recurring: it runs every step; False: once, as an initialisation does.
      operators: names of operations, as `neuronx-cc list-operators` prints them, beside which none is allowed; empty:
        no list.
      **kwargs: further arguments of `fn`.

    Raises:
      ValueError: another target.
    """
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    return check_traced(jitted.trace(*args, **kwargs), target=target, recurring=recurring, operators=operators)


def check_traced(
    traced: Any, *, target: str = "trn1", recurring: bool = True, operators: Collection[str] = ()
) -> list[Finding]:
    """Returns `check` of what `jax.jit(fn).trace(...)` gave."""
    try:
        lowered = traced.lower(lowering_platforms=("neuron",))
    except NotImplementedError as error:
        return [_not_lowered(traced, str(error))]
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
    hits = list(_hits(program, parted, target=target, operators=operators))
    return _grouped(hits, target=target, recurring=recurring)


def _hits(
    program: Program, parted: Program | None, *, target: str, operators: Collection[str]
) -> Iterator[tuple[str, str, str, tuple[str, ...], str]]:
    """Yields (rule, what, operation, frames, line)."""
    listed = {operators_lib.normalized(word) for word in operators}

    def found(rule: str, what: str, op: Any, owner: Program) -> tuple:
        frames = owner.frames(op)
        return rule, what, op.name, tuple(map(str, frames)), line_of(frames)

    for op in program.operations:
        for rule, what in operators_lib.offences(op, program):
            yield found(rule, what, op, program)
        if listed:
            for rule, what in operators_lib.not_listed(op, listed):
                yield found(rule, what, op, program)
    for rule, what, op in partitioned.argument_findings(program, target=target):
        yield found(rule, what, op, program)
    for rule, what, op in partitioned.group_findings(program, parted, target=target):
        yield found(rule, what, op, program)
    for rule, what, op in partitioned.size_findings(program, parted):
        yield found(rule, what, op, parted or program)
    for rule, what, op in unrolled.findings(program, parted):
        yield found(rule, what, op, parted or program)


def _grouped(hits: list[tuple], *, target: str, recurring: bool) -> list[Finding]:
    groups: dict[tuple[str, str], list[tuple]] = {}
    for hit in hits:
        groups.setdefault((hit[0], hit[4]), []).append(hit)
    findings = [_finding(members, target=target, recurring=recurring) for members in groups.values()]
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))


def _finding(hits: list[tuple], *, target: str, recurring: bool) -> Finding:
    rule_id, what, _, frames, line = hits[0]
    op = ", ".join(dict.fromkeys(hit[2] for hit in hits))
    rule = RULES[rule_id]
    severity = rule.severity_on(target, recurring=recurring)
    if rule_id == "INT01" and not all("i32[" in hit[1] for hit in hits):
        severity = rule.severity
    return Finding(rule_id, severity, op, what, line, frames, len(hits), rule.why, rule.instead, rule.source)


def _not_lowered(traced: Any, message: str) -> Finding:
    named = {equation.primitive.name: equation for equation in _equations(traced.jaxpr.jaxpr)}
    primitive = next((name for name in named if f"'{name}'" in message or f" {name} " in message), "unknown")
    trace = named[primitive].source_info.traceback if primitive in named else None
    frames = [Frame(f.file_name, f.line_num, f.function_name) for f in (trace.frames if trace else ())]
    frames = [frame for frame in frames if not is_plumbing(frame)] or frames
    rule = RULES["LW01"]
    what = message.split("\n")[0][:160]
    line = line_of(frames)
    return Finding(
        "LW01", rule.severity, primitive, what, line, tuple(map(str, frames)), 1, rule.why, rule.instead, rule.source
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for param in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
