"""Where a gather or a scatter reaches: the range of its indices, as far as the program itself tells.

An index that comes from data has no range. One that was clipped has, and so has an iota with what is added to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.neuron.module import Program, attribute, callee, constant, defining, name, tensor

_SAME = {"broadcast_in_dim", "reshape", "convert", "transpose", "slice", "optimization_barrier"}
_MAX_DEPTH = 40
_FAR = 2**62  # beyond what an index can be


@dataclasses.dataclass(frozen=True)
class Range:
    """Least and greatest value, as far as they are known, and whether an iota is part of it."""

    low: int = -_FAR
    high: int = _FAR
    from_iota: bool = False


ANY = Range()


def of_gather(op: Any, program: Program) -> Iterator[tuple[str, str]]:
    """Yields GS01 or GS02 for a gather."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    yield from _reach(op, program, dims=list(numbers.start_index_map), at=(numbers.index_vector_dim, sizes))


def of_scatter(op: Any, program: Program) -> Iterator[tuple[str, str]]:
    """Yields GS01 or GS02 for a scatter; windows count as one element, so a long window is taken to fit."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    sizes = [1] * len(tensor(op.operands[0]).dims)
    dims = list(numbers.scattered_dims_to_operand_dims)
    yield from _reach(op, program, dims=dims, at=(numbers.index_vector_dim, sizes))


def _reach(op: Any, program: Program, *, dims: list[int], at: tuple[int, list[int]]) -> Iterator[tuple[str, str]]:
    index_vector_dim, sizes = at
    operand = tensor(op.operands[0])
    # a scatter of several arrays has its indices after all of them
    indices = op.operands[len(op.results) if op.name == "stablehlo.scatter" else 1]
    for dim, column in zip(dims, _columns(indices, len(dims), index_vector_dim), strict=True):
        reach, last = bounds(column, program), (operand.dims[dim] or 0) - sizes[dim]
        if reach.from_iota and last < reach.high < _FAR:
            yield "GS01", f"indices up to {reach.high} into dimension {dim} of {operand}"
        elif reach.low < 0 or reach.high > last:
            yield "GS02", f"dimension {dim} of {operand}"


def _columns(value: Any, count: int, dim: int) -> list[Any]:
    op = defining(value)
    is_joined = count > 1 and op is not None and op.name == "stablehlo.concatenate" and len(op.operands) == count
    if is_joined and ir.IntegerAttr(op.attributes["dimension"]).value == dim:
        return list(op.operands)
    return [value] * count


def bounds(value: Any, program: Program, *, depth: int = 0) -> Range:
    """Returns the range of the integers of a value; `ANY` where the program does not tell."""
    if value not in program.ranges:
        program.ranges[value] = ANY if depth > _MAX_DEPTH else _bounds(value, program, depth)
    return program.ranges[value]


def _bounds(value: Any, program: Program, depth: int) -> Range:
    op = defining(value)
    if op is None:
        return _of_argument(value, program, depth)
    word = op.name.partition(".")[2]
    if word == "constant":
        numbers = constant(value)
        return ANY if numbers is None or not numbers.size else Range(int(numbers.min()), int(numbers.max()))
    if word == "iota":
        dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
        return Range(0, (tensor(value).dims[dim] or 1) - 1, True)
    if op.name == "func.call":
        inside = program.functions[callee(op)].regions[0].blocks[0].operations
        returned = list(inside)[-1].operation.operands[ir.OpResult(value).result_number]
        return bounds(returned, program, depth=depth + 1)
    if word in _SAME:
        number = ir.OpResult(value).result_number if word == "optimization_barrier" else 0
        return bounds(op.operands[number], program, depth=depth + 1)
    if word == "select":
        return _of_select(op, program, depth)
    if word in ("clamp", "add", "subtract", "multiply", "maximum", "minimum", "concatenate"):
        return _of_arithmetic(word, [bounds(operand, program, depth=depth + 1) for operand in op.operands])
    return ANY


def _of_argument(value: Any, program: Program, depth: int) -> Range:
    """Returns the range of a function's argument over all calls of it."""
    argument = ir.BlockArgument(value)
    owner = getattr(argument.owner.owner, "operation", argument.owner.owner)
    if owner.name != "func.func":
        return ANY
    calls = program.callers(name(owner))
    return _union([bounds(call.operands[argument.arg_number], program, depth=depth + 1) for call in calls])


def _of_select(op: Any, program: Program, depth: int) -> Range:
    on_true, on_false = (bounds(operand, program, depth=depth + 1) for operand in list(op.operands)[1:])
    condition = defining(op.operands[0])
    if condition is not None and condition.name == "stablehlo.compare":
        left, right = (bounds(operand, program, depth=depth + 1) for operand in condition.operands)
        if "LT" in str(attribute(condition, "comparison_direction")) and left.low >= right.high:
            return on_false  # never less: how JAX writes the indices that count from the end
    return _union([on_true, on_false])


def _of_arithmetic(word: str, given: Sequence[Range]) -> Range:
    if word == "concatenate":
        return _union(given)
    if word == "clamp":
        low, reach, high = given
        return _of_arithmetic("minimum", [_of_arithmetic("maximum", [low, reach]), high])
    a, b = given
    ends = {
        "add": [a.low + b.low, a.high + b.high],
        "subtract": [a.low - b.high, a.high - b.low],
        "multiply": [x * y for x in (a.low, a.high) for y in (b.low, b.high)],
        "maximum": [max(a.low, b.low), max(a.high, b.high)],
        "minimum": [min(a.low, b.low), min(a.high, b.high)],
    }[word]
    return Range(max(min(ends), -_FAR), min(max(ends), _FAR), a.from_iota or b.from_iota)


def _union(given: Sequence[Range]) -> Range:
    if not given:
        return ANY
    iota = any(reach.from_iota for reach in given)
    return Range(min(reach.low for reach in given), max(reach.high for reach in given), iota)
