"""Checks a JAX function for operations that Neuron documents as unsupported, on any machine.

    from hlat_jax.neuron import lint
    for finding in lint.check(jax.jit(step), state, batch):
        print(finding)

The function is lowered for platform `neuron`, so the program checked is the input of Neuron's compiler. A program
without findings may still fail to compile.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir

from hlat_jax.facts import compiler_limits
from hlat_jax.host.jax_compat import mlir
from hlat_jax.neuron import operators as operators_lib
from hlat_jax.neuron import partitioned
from hlat_jax.neuron.module import Frame, Program, line_of
from hlat_jax.neuron.rules import LINTED, RULES, SEVERITIES
from hlat_jax.passes.jaxpr import inner_jaxprs
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan import instructions


@dataclasses.dataclass(frozen=True)
class Finding:
    """The violations of one rule at one Python line.

    Attributes:
      rule: the id of the rule in `rules.RULES`.
      severity: "error", "warning" or "info".
      op: the names of the operations in the lowered program.
      what: the detail of the first operation, such as its type.
      line: the Python line of the operations, `file:line (function)`, or "" if it is unknown.
      count: the number of operations from this line that break the rule.
      why: the effect on the device.
      instead: the code to write instead.
      source: the page of the Neuron documentation.
    """

    rule: str
    severity: str
    op: str
    what: str
    line: str
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
    compiler_flags: str = "",
) -> list[Finding]:
    """Returns the rules that a function breaks if lowered for Neuron with these arguments, most severe first.

    Args:
      fn: the function, jitted or not, of positional arguments. Use `functools.partial` for keyword arguments.
      *args: the arguments of `fn`, arrays or `jax.ShapeDtypeStruct`s.
      target: the chip, one of `rules.LINTED`.
      recurring: whether the program runs every step, or only once, such as an initialization.
      compiler_flags: the NEURON_CC_FLAGS of the run, which may move the limit of CG01.

    Raises:
      ValueError: the target is unknown.
    """
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    return check_traced(jitted.trace(*args), target=target, recurring=recurring, compiler_flags=compiler_flags)


def check_traced(
    traced: Any,
    *,
    target: str = "trn1",
    recurring: bool = True,
    compiler_flags: str = "",
    placement: Sequence[int] = (),
) -> list[Finding]:
    """Returns the findings of `check` for a result of `jax.jit(fn).trace(...)`. `check_module` explains `placement`."""
    try:
        lowered = traced.lower(lowering_platforms=("neuron",))
    except (NotImplementedError, ValueError) as error:
        if not isinstance(error, NotImplementedError) and "not supported on neuron" not in str(error):
            raise  # host callbacks raise this ValueError; any other comes from the user's function
        return [_not_lowered(traced, error)]
    return check_module(
        lowered.compiler_ir("stablehlo"),
        target=target,
        recurring=recurring,
        compiler_flags=compiler_flags,
        placement=placement,
        jaxpr=live_jaxpr(traced),
    )


def check_module(
    module: Any,
    *,
    target: str = "trn1",
    recurring: bool = True,
    compiler_flags: str = "",
    placement: Sequence[int] = (),
    jaxpr: Any = None,
) -> list[Finding]:
    """Returns the findings of `check`, with its options, for a StableHLO module lowered for Neuron.

    Args:
      module: an `ir.Module` or its text.
      placement: the device at each place of the mesh, or empty if the devices are in their order.
      jaxpr: the trace of the module, to estimate its instructions. None skips CG01 and CG02.
    """
    if target not in LINTED:
        raise ValueError(f"target={target!r} is not one of {', '.join(LINTED)}.")
    if isinstance(module, str):
        with mlir.make_ir_context():
            module = ir.Module.parse(module)
    program = Program(module.operation)
    sharded = partitioned.run_shardy(module.operation)
    groups: dict[tuple[str, str], list[tuple]] = {}
    for rule, detail, op, owner, *reported in _hits(program, sharded, target=target, placement=placement):
        groups.setdefault((rule, line_of(owner.frames(*reported or [op]))), []).append((detail, op.name))
    if jaxpr is not None:
        shards = partitioned.num_shards(sharded or program)
        for rule, detail, eqn in _instruction_hits(jaxpr, shards, target=target, compiler_flags=compiler_flags):
            groups.setdefault((rule, line_of(_frames_of(eqn))), []).append((detail, eqn.primitive.name))
    findings = []
    for (rule_id, line), hits in groups.items():
        rule, detail, op = RULES[rule_id], hits[0][0], ", ".join(dict.fromkeys(hit[1] for hit in hits))
        severity = rule.severity_in(recurring=recurring, many_devices=program.has_many_devices, target=target)
        if rule_id == "CC02" and any(hit[0].endswith(partitioned.OF_A_NODE) for hit in hits):
            severity = "error"  # nothing documents permutes between nodes
        explained = (rule.why, rule.instead, rule.source)
        findings.append(Finding(rule_id, severity, op, detail, line, len(hits), *explained))
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.rule))


def _hits(program: Program, sharded: Program | None, *, target: str, placement: Sequence[int]) -> Iterator[tuple]:
    """Yields (rule, what, operation, its program), and the operation whose line to report if it is another."""
    for op in program.operations:
        for rule, detail, *reported in operators_lib.violations(op, program):
            yield rule, detail, op, program, *reported
    per_device = sharded or program
    for owner, hits in (
        (program, partitioned.argument_findings(program, target=target)),
        (program, partitioned.group_findings(program, sharded, target=target, placement=placement)),
        (per_device, partitioned.shift_findings(per_device)),
        (per_device, partitioned.lookup_findings(per_device)),
        (per_device, partitioned.local_findings(per_device, target=target)),
    ):
        for rule, detail, op in hits:
            yield rule, detail, op, owner


def _instruction_hits(
    jaxpr: Any, num_shards: float, *, target: str, compiler_flags: str
) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, equation) of CG01 for a program and CG02 for each operation that may exceed a limit."""
    counts = list(instructions.counts(jaxpr, num_shards=num_shards))
    whole = instructions.total(counts)
    most, limit = compiler_limits.program_limit(compiler_flags), compiler_limits.operation_limit(target)
    if compiler_limits.may_exceed(whole.unrolled, most):
        eqn, tiles, trips = max(counts, key=lambda count: count[1] * count[2])
        unrolled, looped = map(compiler_limits.round_estimate, (whole.unrolled, whole.looped))
        loops = f"about {unrolled} instructions with every loop unrolled, {looped} with none"
        share = f"{tiles * trips / whole.unrolled:.0%} of them in this operation"
        may = "may exceed the " * (whole.unrolled <= most)
        yield "CG01", f"{loops}; {share} ({may}limit {most:,}; {compiler_limits.ESTIMATE_NOTE})", eqn
    for eqn, tiles, _ in counts:
        if compiler_limits.may_exceed(tiles, limit):
            about, may = compiler_limits.round_estimate(tiles), "may exceed the " * (tiles <= limit)
            yield "CG02", f"about {about} instructions ({may}limit {limit:,}; {compiler_limits.ESTIMATE_NOTE})", eqn


def _not_lowered(traced: Any, error: Exception) -> Finding:
    """Returns the finding for a program that JAX could not lower, at the line of the equation that failed."""
    trace = traceback.extract_tb(error.__cause__.__traceback__) if error.__cause__ is not None else []
    failing = [Frame(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(trace)]
    frames = _frames_at(traced.jaxpr.jaxpr, {(frame.path, frame.line) for frame in failing}) or failing
    named = re.search(r"(?:primitive '?|^`)(\w+)", str(error))
    rule, detail = RULES["LW01"], str(error).split("\n")[0][:160]
    op, line = named.group(1) if named else "unknown", line_of(frames)
    return Finding("LW01", rule.severity, op, detail, line, 1, rule.why, rule.instead, rule.source)


def _frames_of(equation: Any) -> list[Frame]:
    """Returns the Python frames of an equation of a trace, innermost first."""
    trace = equation.source_info.traceback
    return [Frame(f.file_name, f.line_num, f.function_name) for f in (trace.frames if trace else ())]


def _frames_at(jaxpr: Any, places: set[tuple[str, int]]) -> list[Frame]:
    """Returns the frames of the first equation traced at one of the places, followed by those of enclosing calls."""
    for equation in jaxpr.eqns:
        own = _frames_of(equation)
        for inner in inner_jaxprs(equation):
            frames = _frames_at(inner, places)
            if frames:
                return frames + own
        if any((frame.path, frame.line) in places for frame in own):
            return own
    return []
