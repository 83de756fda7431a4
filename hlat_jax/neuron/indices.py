"""Finds value ranges of the indices of gathers and scatters, as far as the program determines them.

Indices computed from iotas and constants have the range of that arithmetic. Indices that depend on data have the range
of their clip, if any. A function is checked at each call. `calls` has the `func.call` operation out of which a value is
followed, if any. The arguments of functions further out have the union of the ranges of all their calls.
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

from hlat_jax.neuron.module import (
    Program,
    Tensor,
    argument_owner,
    attribute,
    callee,
    constant,
    defining_op,
    enclosing_function,
    integers,
    returned_values,
    symbol_name,
    tensor,
)

_MAX_DEPTH = 100  # operations between a value and its iotas and constants
_MAX_ASSIGNED = 8  # operations between a gather and the scatter of what is computed from it
_UNCHANGED = ("broadcast_in_dim", "reshape", "convert", "transpose", "reverse")


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of the elements of a value.

    Attributes:
      is_exact: whether the program determines that both bounds occur.
      from_iota: whether the bounds are computed from an iota.
    """

    low: float
    high: float
    is_exact: bool = False
    from_iota: bool = False

    @property
    def is_number(self) -> bool:
        """Whether every element is the same number."""
        return self.is_exact and self.low == self.high


def findings(op: Any, program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, detail, operation) of GS01 or GS02 for a gather or a scatter with windows of one element."""
    operand = tensor(op.operands[0])
    if op.name == "stablehlo.gather":
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        dims, sizes = list(numbers.start_index_map), integers(op, "slice_sizes")
        indices = op.operands[1]
    else:
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        dims, sizes = list(numbers.scattered_dims_to_operand_dims), [1] * len(operand.dims)
        indices = op.operands[len(op.results)]  # they follow all operands of a variadic scatter
    if 0 in tensor(indices).dims:
        return
    hits, all_calls = {}, calls_to(op, program)
    for calls in all_calls:
        for component, dim in enumerate(dims):
            if operand.dims[dim] is None:
                continue
            last = operand.dims[dim] - sizes[dim]
            values = _component_range(indices, component, numbers.index_vector_dim, program, calls)
            if values.low >= 0 and values.high <= last:
                continue
            detail = f"dimension {dim} of {operand}"
            if values.is_exact:
                limit = f"up to {values.high}" if values.high > last else f"down to {values.low}"
                detail = f"{'' if values.from_iota else 'constant '}indices {limit} into {detail}"
            hits["GS01" if values.is_exact else "GS02", dim, calls[0] if len(all_calls) > 1 else op] = detail
    yield from ((rule, detail, reported) for (rule, _, reported), detail in hits.items())


def assignment_findings(op: Any, program: Program) -> Iterator[tuple[str, str]]:
    """Yields KB04 for a scatter with updates computed from a gather of the same array at indices from data."""
    if len(op.results) == 1 and _is_gathered_from(op.operands[2], source(op.operands[0], program, ()), program, ()):
        yield "KB04", f"into {tensor(op.operands[0])}"


def _is_gathered_from(value: Any, array: tuple, program: Program, calls: tuple, *, depth: int = 0) -> bool:
    """Returns whether a value is computed from elements of an array, a result of `source`, at indices from data."""
    value, calls = source(value, program, calls)
    op = defining_op(value)
    if op is None or op.regions or depth > _MAX_ASSIGNED:
        return False
    if op.name == "stablehlo.gather" and source(op.operands[0], program, calls) == array:
        return not index_range(op.operands[1], program, calls).is_exact
    return any(_is_gathered_from(operand, array, program, calls, depth=depth + 1) for operand in op.operands)


def _component_range(value: Any, component: int, dim: int, program: Program, calls: tuple) -> Range:
    """Returns the range of one component of index vectors, which lie along a dimension of a value."""
    value, calls = source(value, program, calls)
    op, sizes = defining_op(value), tensor(value).dims
    is_joined = op is not None and op.name == "stablehlo.concatenate"
    if is_joined and ir.IntegerAttr(op.attributes["dimension"]).value == dim:
        for operand in op.operands:
            if component < tensor(operand).dims[dim]:
                return _component_range(operand, component, dim, program, calls)
            component -= tensor(operand).dims[dim]
    values = index_range(value, program, calls)
    is_shared = dim < len(sizes) and sizes[dim] > 1  # the bounds are those of all components
    return dataclasses.replace(values, is_exact=values.is_exact and not is_shared)


def calls_to(op: Any, program: Program) -> list[tuple]:
    """Returns the calls that lead to each call of the function around an operation, or [()] without calls."""
    return [(call,) for call in program.callers(enclosing_function(op))] or [()]


def source(value: Any, program: Program, calls: tuple) -> tuple[Any, tuple]:
    """Returns the value that a function argument or result stands for, and the calls that lead to it."""
    while True:
        op = defining_op(value)
        if op is None:
            if not calls or _function_of(value) is None:
                return value, calls
            value, calls = calls[-1].operands[ir.BlockArgument(value).arg_number], calls[:-1]
        elif op.name == "func.call" and program.functions[callee(op)].regions[0].blocks:
            returned = returned_values(program.functions[callee(op)].regions[0])
            value, calls = returned[ir.OpResult(value).result_number], (*calls, op)
        elif op.name == "stablehlo.optimization_barrier":
            value = op.operands[ir.OpResult(value).result_number]
        else:
            return value, calls


def _function_of(argument: Any) -> Any:
    """Returns the function that a block argument belongs to; None if the block belongs to another operation."""
    owner = argument_owner(argument)
    return owner if owner.name == "func.func" else None


def index_range(value: Any, program: Program, calls: tuple, *, depth: int = 0) -> Range:
    """Returns the range of a value's elements, or of its type if the program does not determine it."""
    key = (value, calls)
    if key not in program.ranges:
        whole = _type_range(tensor(value))
        inner = _bounds(value, program, calls, depth) if depth < _MAX_DEPTH else None
        is_within = inner is not None and whole.low <= inner.low and inner.high <= whole.high  # else it overflows
        program.ranges[key] = inner if is_within else whole
    return program.ranges[key]


def _type_range(kind: Tensor | None) -> Range:
    integer = re.fullmatch(r"(u?)i(\d+)", kind.dtype) if kind is not None else None
    if integer is None:
        return Range(-math.inf, math.inf)
    bits = int(integer[2])
    is_unsigned = integer[1] or bits == 1
    return Range(0, 2**bits - 1) if is_unsigned else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _bounds(value: Any, program: Program, calls: tuple, depth: int) -> Range | None:
    """Returns the range of a constant, or of an integer that is computed from others; None for other values."""
    value, calls = source(value, program, calls)
    op, kind = defining_op(value), tensor(value)
    if op is None:  # an argument of a function, over all its calls; of a loop nothing is known
        function, index = _function_of(value), ir.BlockArgument(value).arg_number
        callers = program.callers(symbol_name(function)) if function is not None else []
        ranges = [index_range(call.operands[index], program, (), depth=depth + 1) for call in callers]
        return _union(ranges) if ranges else None
    elements = constant(value)
    if elements is not None and elements.size and elements.dtype.kind in "biuf" and np.isfinite(elements).all():
        return Range(elements.min().item(), elements.max().item(), True)
    opcode = op.name.partition(".")[2]
    if not _is_integer(kind):
        return None
    if opcode == "iota":
        last = kind.dims[ir.IntegerAttr(op.attributes["iota_dimension"]).value] - 1
        return Range(0, last, True, True)

    def range_of(operand: Any) -> Range:
        return index_range(operand, program, calls, depth=depth + 1)

    if opcode == "select":
        decided = _comparison_result(op.operands[0], program, calls, depth + 1)
        chosen = [op.operands[index] for index, taken in ((1, True), (2, False)) if decided in (taken, None)]
        return _union([range_of(operand) for operand in chosen])
    if opcode in _UNCHANGED and _is_integer(tensor(op.operands[0])):  # a conversion rounds other numbers
        return range_of(op.operands[0])
    if opcode == "slice":
        return dataclasses.replace(range_of(op.operands[0]), is_exact=range_of(op.operands[0]).is_number)
    if opcode == "concatenate":
        parts = [range_of(operand) for operand in op.operands]
        return dataclasses.replace(_union(parts), is_exact=all(part.is_exact for part in parts))
    if opcode == "clamp":
        low, x, high = map(range_of, op.operands)
        return _arithmetic_range("minimum", _arithmetic_range("maximum", low, x), high)
    return _arithmetic_range(opcode, *map(range_of, op.operands)) if opcode in _ENDS else None


def _is_integer(kind: Tensor | None) -> bool:
    return kind is not None and re.fullmatch(r"u?i\d+", kind.dtype) is not None


def _comparison_result(condition: Any, program: Program, calls: tuple, depth: int) -> bool | None:
    """Returns the result of a comparison if it is the same for all elements, else None.

    JAX normalizes negative indices by a comparison with 0, and a select between the index and index + size.
    """
    condition, calls = source(condition, program, calls)
    op, known = defining_op(condition), index_range(condition, program, calls, depth=depth)
    if known.is_number:
        return bool(known.low)
    direction = op and re.search(r"\b(LT|LE|GT|GE|EQ|NE)\b", str(attribute(op, "comparison_direction")))
    if not direction:
        return None
    left, right = (index_range(operand, program, calls, depth=depth + 1) for operand in op.operands)
    if direction[1] in ("EQ", "NE"):
        are_apart = left.high < right.low or right.high < left.low
        are_equal = left.is_number and right.is_number and left.low == right.low
        return are_equal == (direction[1] == "EQ") if are_apart or are_equal else None
    if direction[1] in ("GT", "LE"):
        left, right = right, left
    is_less = True if left.high < right.low else False if left.low >= right.high else None
    return is_less if is_less is None or direction[1] in ("LT", "GT") else not is_less


_ENDS = {
    "add": lambda a, b: [a.low + b.low, a.high + b.high],
    "subtract": lambda a, b: [a.low - b.high, a.high - b.low],
    "multiply": lambda a, b: [x * y for x in (a.low, a.high) for y in (b.low, b.high)],
    "maximum": lambda a, b: [max(a.low, b.low), max(a.high, b.high)],
    "minimum": lambda a, b: [min(a.low, b.low), min(a.high, b.high)],
}


def _arithmetic_range(opcode: str, a: Range, b: Range) -> Range:
    ends = _ENDS[opcode](a, b)
    is_exact = a.is_exact and b.is_exact and (a.is_number or b.is_number)
    return Range(min(ends), max(ends), is_exact, a.from_iota or b.from_iota)


def _union(ranges: Sequence[Range]) -> Range:
    """Returns a range that contains each; which of them a program takes is not known."""
    if len(set(ranges)) == 1:
        return ranges[0]
    from_iota = any(part.from_iota for part in ranges)
    return Range(min(part.low for part in ranges), max(part.high for part in ranges), from_iota=from_iota)
