"""Value ranges of the indices of gathers and scatters, as far as the program determines them.

Indices computed from iotas and constants alone are evaluated. Indices that depend on data have the range of their clip,
if any. A function that is called several times is checked at each call.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.neuron.known_values import MAX_DEPTH, direction, function_of, known, source
from hlat_jax.neuron.module import Program, Tensor, defining_op, enclosing_function, symbol_name, tensor

_RANGE_PRESERVING = ("broadcast_in_dim", "reshape", "convert", "transpose", "slice", "reverse")
_ARITHMETIC = ("clamp", "add", "subtract", "multiply", "maximum", "minimum", "concatenate")
_MAX_CHAINS = 1024  # call chains of a function that are followed one by one
_MAX_ASSIGNED = 8  # operations between a gather and the scatter of what is computed from it


@dataclasses.dataclass(frozen=True)
class Range:
    """Smallest and largest value."""

    low: float
    high: float

    def within(self, other: Range) -> Range:
        """Returns this range if `other` contains it, else `other`: after an overflow any value is possible."""
        return self if other.low <= self.low and self.high <= other.high else other


def gather_findings(op: Any, program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, detail, operation) of GS01 or GS02 for a gather."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    yield from _out_of_range(op, program, dims=list(numbers.start_index_map), at=(numbers.index_vector_dim, sizes))


def scatter_findings(op: Any, program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, detail, operation) of GS01 or GS02 for a scatter; windows are assumed to have one element."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    sizes = [1] * len(tensor(op.operands[0]).dims)
    dims = list(numbers.scattered_dims_to_operand_dims)
    yield from _out_of_range(op, program, dims=dims, at=(numbers.index_vector_dim, sizes))


def slice_findings(op: Any, program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, detail, operation) of GS01 for a dynamic slice, or update, whose constant start is out of bounds.

    Starts that depend on data are clamped by definition, and not reported.
    """
    operand = tensor(op.operands[0])
    is_update = op.name == "stablehlo.dynamic_update_slice"
    sizes = tensor(op.operands[1] if is_update else op.results[0]).dims
    for dim, start in enumerate(op.operands[2 if is_update else 1 :]):
        exact = known(start, program, ())
        if exact is None or None in (operand.dims[dim], sizes[dim]):
            continue
        first, last = exact.numbers.item(), operand.dims[dim] - sizes[dim]
        if not 0 <= first <= last:
            yield "GS01", f"start {first} of {sizes[dim]} elements in dimension {dim} of {operand}", op


def assignment_findings(op: Any, program: Program) -> Iterator[tuple[str, str]]:
    """Yields KB04 for a scatter whose updates are computed from a gather of the same array at indices from data."""
    operand = source(op.operands[0], (), program)
    if len(op.results) == 1 and _is_gathered_from(op.operands[2], operand, program, ()):
        yield "KB04", f"into {tensor(op.operands[0])}"


def _is_gathered_from(value: Any, operand: tuple, program: Program, calls: tuple, *, depth: int = 0) -> bool:
    value, calls = source(value, calls, program)
    op = defining_op(value)
    if op is None or depth > _MAX_ASSIGNED or op.regions:
        return False
    if op.name == "stablehlo.gather":
        return source(op.operands[0], calls, program) == operand and known(op.operands[1], program, calls) is None
    return any(_is_gathered_from(one, operand, program, calls, depth=depth + 1) for one in op.operands)


def _out_of_range(
    op: Any, program: Program, *, dims: list[int], at: tuple[int, list[int]]
) -> Iterator[tuple[str, str, Any]]:
    index_vector_dim, sizes = at
    operand = tensor(op.operands[0])
    # the indices of a variadic scatter follow all its operands
    indices = op.operands[len(op.results) if op.name == "stablehlo.scatter" else 1]
    if 0 in tensor(indices).dims:
        return
    is_shared = len(program.callers(enclosing_function(op))) > 1
    found = {}
    for calls in _chains_to_calls(enclosing_function(op), program):
        for number, dim in enumerate(dims):
            if operand.dims[dim] is not None:
                last = operand.dims[dim] - sizes[dim]
                place = calls[-1] if is_shared else op
                values, from_iota = _index_range(indices, number, index_vector_dim, program, calls)
                if values.low >= 0 and values.high <= last:
                    continue
                what = f"dimension {dim} of {operand}"
                if from_iota is not None:
                    limit = f"up to {values.high}" if values.high > last else f"down to {values.low}"
                    what = f"{'' if from_iota else 'constant '}indices {limit} into {what}"
                found["GS02" if from_iota is None else "GS01", dim, place] = what
    yield from ((rule, what, place) for (rule, _, place), what in found.items())


def _chains_to_calls(function: str, program: Program) -> list[tuple]:
    """Returns the call chains, outermost call first, that end in a call of a function; [()] if it is never called."""
    calls = program.callers(function)
    return [(*outer, call) for call in calls for outer in _chains(enclosing_function(call), program)] or [()]


def _chains(function: str, program: Program) -> list[tuple]:
    """Returns the call chains that reach a function.

    () replaces too many: the arguments then have the union of the ranges of all calls.
    """
    if function not in program.chains:
        chains = _chains_to_calls(function, program)
        program.chains[function] = chains if len(chains) <= _MAX_CHAINS else [()]
    return program.chains[function]


def _index_range(value: Any, number: int, dim: int, program: Program, calls: tuple) -> tuple[Range, bool | None]:
    """Returns the range of one component of the index vectors, and whether it comes from an iota; None: unknown."""
    value, calls = source(value, calls, program)
    op = defining_op(value)
    is_joined = op is not None and op.name == "stablehlo.concatenate"
    if is_joined and ir.IntegerAttr(op.attributes["dimension"]).value == dim:
        for operand in op.operands:
            if number < tensor(operand).dims[dim]:
                return _index_range(operand, number, dim, program, calls)
            number -= tensor(operand).dims[dim]
    exact = known(value, program, calls)
    if exact is None:
        return bounds(value, program, calls), None
    found = exact.numbers
    if dim < found.ndim and found.shape[dim] > 1:
        found = found.take(number, axis=dim)
    return Range(found.min().item(), found.max().item()), exact.from_iota


def bounds(value: Any, program: Program, calls: tuple, *, depth: int = 0) -> Range:
    """Returns the range of a value's elements; the range of its type if the program does not determine it."""
    key = (value, calls)
    if key not in program.ranges:
        whole = _type_range(tensor(value))
        program.ranges[key] = _bounds(value, program, calls, depth).within(whole) if depth < MAX_DEPTH else whole
    return program.ranges[key]


def _type_range(kind: Tensor | None) -> Range:
    integer = re.fullmatch(r"(u?)i(\d+)", kind.dtype) if kind is not None else None
    if integer is None:
        return Range(-math.inf, math.inf)
    bits = int(integer[2])
    is_unsigned = integer[1] or bits == 1
    return Range(0, 2**bits - 1) if is_unsigned else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _bounds(value: Any, program: Program, calls: tuple, depth: int) -> Range:
    exact, whole = known(value, program, calls), _type_range(tensor(value))
    if exact is not None:
        is_finite = exact.numbers.size and np.isfinite(exact.numbers).all()
        return Range(exact.numbers.min().item(), exact.numbers.max().item()) if is_finite else whole
    value, calls = source(value, calls, program)
    op = defining_op(value)
    if op is None:
        return _argument_range(value, program, depth)
    opcode = op.name.partition(".")[2]
    if math.isinf(whole.high) or opcode not in ("select", *_RANGE_PRESERVING, *_ARITHMETIC):
        return whole
    if opcode == "select":
        decided = _comparison_result(op.operands[0], program, calls, depth + 1)
        chosen = [op.operands[number] for number, taken in ((1, True), (2, False)) if decided in (taken, None)]
        return _union([bounds(one, program, calls, depth=depth + 1) for one in chosen])
    return _arithmetic_range(opcode, [bounds(operand, program, calls, depth=depth + 1) for operand in op.operands])


def _argument_range(value: Any, program: Program, depth: int) -> Range:
    """Returns the range of an argument: over all calls for a function, the range of its type for a loop."""
    function = function_of(value)
    calls = program.callers(symbol_name(function)) if function is not None else []
    number = ir.BlockArgument(value).arg_number
    ranges = [bounds(call.operands[number], program, (), depth=depth + 1) for call in calls]
    return _union(ranges) if ranges else _type_range(tensor(value))


def _comparison_result(condition: Any, program: Program, calls: tuple, depth: int) -> bool | None:
    """Returns the result of a comparison if it is the same for all elements, else None.

    JAX normalizes negative indices by a comparison with 0, and a select between the index and index + size.
    """
    condition, calls = source(condition, calls, program)
    op = defining_op(condition)
    if op is not None and op.name == "stablehlo.broadcast_in_dim":
        return _comparison_result(op.operands[0], program, calls, depth + 1)
    if op is None or op.name != "stablehlo.compare" or direction(op) in ("EQ", "NE"):
        return None
    left, right = (bounds(operand, program, calls, depth=depth + 1) for operand in op.operands)
    if direction(op) in ("GT", "LE"):
        left, right = right, left
    is_less = True if left.high < right.low else False if left.low >= right.high else None
    return is_less if is_less is None or direction(op) in ("LT", "GT") else not is_less


def _arithmetic_range(opcode: str, ranges: Sequence[Range]) -> Range:
    if opcode in (*_RANGE_PRESERVING, "concatenate"):
        return _union(ranges)
    if opcode == "clamp":
        low, x, high = ranges
        return _arithmetic_range("minimum", [_arithmetic_range("maximum", [low, x]), high])
    a, b = ranges
    ends = {
        "add": [a.low + b.low, a.high + b.high],
        "subtract": [a.low - b.high, a.high - b.low],
        "multiply": [x * y for x in (a.low, a.high) for y in (b.low, b.high)],
        "maximum": [max(a.low, b.low), max(a.high, b.high)],
        "minimum": [min(a.low, b.low), min(a.high, b.high)],
    }[opcode]
    return Range(min(ends), max(ends))


def _union(ranges: Sequence[Range]) -> Range:
    return Range(min(one.low for one in ranges), max(one.high for one in ranges))
