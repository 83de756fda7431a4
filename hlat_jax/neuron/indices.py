"""The range of the indices of a gather or scatter, as far as the program itself determines it.

Indices computed from iotas and constants alone are evaluated. Those that depend on data have the range that a clip
leaves. A function that is called several times is judged at each call.
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
from hlat_jax.neuron.module import Program, Tensor, defining, enclosing, name, tensor

_SAME = ("broadcast_in_dim", "reshape", "convert", "transpose", "slice", "reverse")
_ARITHMETIC = ("clamp", "add", "subtract", "multiply", "maximum", "minimum", "concatenate")
_MAX_CHAINS = 1024  # of a function, to follow each by itself
_MAX_COMPARED = 2**16  # elements of an argument
Found = tuple[str, str, Any]  # the id of a rule, what is meant, and the operation whose line is to blame


@dataclasses.dataclass(frozen=True)
class Range:
    """Least and greatest value."""

    low: float
    high: float

    def within(self, other: Range) -> Range:
        """Returns this range where the other holds it, else the other: integers that overflow can be any."""
        return self if other.low <= self.low and self.high <= other.high else other


def of_gather(op: Any, program: Program) -> Iterator[Found]:
    """Yields GS01 or GS02 for a gather."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes = list(ir.DenseI64ArrayAttr(op.attributes["slice_sizes"]))
    yield from _reach(op, program, dims=list(numbers.start_index_map), at=(numbers.index_vector_dim, sizes))


def of_scatter(op: Any, program: Program) -> Iterator[Found]:
    """Yields GS01 or GS02 for a scatter; windows count as one element, so a long window is taken to fit."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    sizes = [1] * len(tensor(op.operands[0]).dims)
    dims = list(numbers.scattered_dims_to_operand_dims)
    yield from _reach(op, program, dims=dims, at=(numbers.index_vector_dim, sizes))


def _reach(op: Any, program: Program, *, dims: list[int], at: tuple[int, list[int]]) -> Iterator[Found]:
    index_vector_dim, sizes = at
    operand = tensor(op.operands[0])
    # a scatter of several arrays has its indices after all of them
    indices = op.operands[len(op.results) if op.name == "stablehlo.scatter" else 1]
    if 0 in tensor(indices).dims:
        return
    is_shared = len(program.callers(enclosing(op))) > 1
    found = {}
    for calls in _chains_to_calls(enclosing(op), program):
        for number, dim in enumerate(dims):
            if operand.dims[dim] is not None:
                last = operand.dims[dim] - sizes[dim]
                place = calls[-1] if is_shared else op
                reach, from_iota = _column(indices, number, index_vector_dim, program, calls)
                if reach.low >= 0 and reach.high <= last:
                    continue
                what = f"dimension {dim} of {operand}"
                if from_iota is not None:
                    limit = f"up to {reach.high}" if reach.high > last else f"down to {reach.low}"
                    what = f"{'' if from_iota else 'constant '}indices {limit} into {what}"
                found["GS01" if from_iota else "GS02", dim, place] = what
    yield from ((rule, what, place) for (rule, _, place), what in found.items())


def _chains_to_calls(function: str, program: Program) -> list[tuple]:
    """Returns the chains of calls, outermost first, that end in a call of a function; (()) without any call."""
    calls = program.callers(function)
    return [(*outer, call) for call in calls for outer in _chains(enclosing(call), program)] or [()]


def _chains(function: str, program: Program) -> list[tuple]:
    """Returns the chains of calls that reach a function; of many, one of those that give it the same arguments.

    Where too many differ, () stands for the rest of them: the arguments have the range of all calls together.
    """
    if function not in program.chains:
        chains = _chains_to_calls(function, program)
        if len(chains) > _MAX_CHAINS:
            chains = list({_arguments(calls, program): calls for calls in chains}.values())
        if len(chains) > _MAX_CHAINS:
            chains = [*chains[: _MAX_CHAINS - 1], ()]
        program.chains[function] = chains
    return program.chains[function]


def _arguments(calls: tuple, program: Program) -> tuple:
    """Returns a key of the arguments of the last call: where two are equal, they decide the same indices."""
    if not calls:
        return ()
    return tuple(_argument(value, program, calls[:-1]) for value in calls[-1].operands)


def _argument(value: Any, program: Program, calls: tuple) -> Any:
    exact = known(value, program, calls)
    if exact is not None and exact.numbers.size <= _MAX_COMPARED:
        return exact.numbers.shape, exact.numbers.tobytes(), exact.from_iota
    value, calls = source(value, calls, program)
    op, kind = defining(value), tensor(value)
    is_looked_into = exact is not None or (op is not None and op.name == "stablehlo.concatenate")
    if is_looked_into or (kind is not None and kind.dtype == "i1"):  # `_column` and `_decided` do
        return value, calls
    return bounds(value, program, calls)


def _column(value: Any, number: int, dim: int, program: Program, calls: tuple) -> tuple[Range, bool | None]:
    """Returns the range of one index of each index vector, and whether an iota is part of it; None: not known."""
    value, calls = source(value, calls, program)
    op = defining(value)
    is_joined = op is not None and op.name == "stablehlo.concatenate"
    if is_joined and ir.IntegerAttr(op.attributes["dimension"]).value == dim:
        for operand in op.operands:
            if number < tensor(operand).dims[dim]:
                return _column(operand, number, dim, program, calls)
            number -= tensor(operand).dims[dim]
    exact = known(value, program, calls)
    if exact is None:
        return bounds(value, program, calls), None
    found = exact.numbers
    if dim < found.ndim and found.shape[dim] > 1:
        found = found.take(number, axis=dim)
    return Range(found.min().item(), found.max().item()), exact.from_iota


def bounds(value: Any, program: Program, calls: tuple, *, depth: int = 0) -> Range:
    """Returns the range of the numbers of a value: all that its type has where the program does not determine it."""
    key = (value, calls)
    if key not in program.ranges:
        whole = _whole(tensor(value))
        program.ranges[key] = _bounds(value, program, calls, depth).within(whole) if depth < MAX_DEPTH else whole
    return program.ranges[key]


def _whole(kind: Tensor | None) -> Range:
    integer = re.fullmatch(r"(u?)i(\d+)", kind.dtype) if kind is not None else None
    if integer is None:
        return Range(-math.inf, math.inf)
    bits = int(integer[2])
    is_unsigned = integer[1] or bits == 1
    return Range(0, 2**bits - 1) if is_unsigned else Range(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _bounds(value: Any, program: Program, calls: tuple, depth: int) -> Range:
    exact, whole = known(value, program, calls), _whole(tensor(value))
    if exact is not None:
        is_finite = exact.numbers.size and np.isfinite(exact.numbers).all()
        return Range(exact.numbers.min().item(), exact.numbers.max().item()) if is_finite else whole
    value, calls = source(value, calls, program)
    op = defining(value)
    if op is None:
        return _of_argument(value, program, depth)
    word = op.name.partition(".")[2]
    if math.isinf(whole.high) or word not in ("select", *_SAME, *_ARITHMETIC):
        return whole
    if word == "select":
        decided = _decided(op.operands[0], program, calls, depth + 1)
        chosen = [op.operands[number] for number, taken in ((1, True), (2, False)) if decided in (taken, None)]
        return _union([bounds(one, program, calls, depth=depth + 1) for one in chosen])
    return _of_arithmetic(word, [bounds(operand, program, calls, depth=depth + 1) for operand in op.operands])


def _of_argument(value: Any, program: Program, depth: int) -> Range:
    """Returns the range of an argument: of a function's over all calls of it, of a loop's whatever its type has."""
    function = function_of(value)
    calls = program.callers(name(function)) if function is not None else []
    number = ir.BlockArgument(value).arg_number
    given = [bounds(call.operands[number], program, (), depth=depth + 1) for call in calls]
    return _union(given) if given else _whole(tensor(value))


def _decided(condition: Any, program: Program, calls: tuple, depth: int) -> bool | None:
    """Returns what a comparison is for all elements; None where it differs between them, or depends on data.

    JAX adds the number of rows to an index that is less than 0: so it writes the indices that count from the end.
    """
    condition, calls = source(condition, calls, program)
    op = defining(condition)
    if op is not None and op.name == "stablehlo.broadcast_in_dim":
        return _decided(op.operands[0], program, calls, depth + 1)
    if op is None or op.name != "stablehlo.compare" or direction(op) in ("EQ", "NE"):
        return None
    left, right = (bounds(operand, program, calls, depth=depth + 1) for operand in op.operands)
    if direction(op) in ("GT", "LE"):
        left, right = right, left
    is_less = True if left.high < right.low else False if left.low >= right.high else None
    return is_less if is_less is None or direction(op) in ("LT", "GT") else not is_less


def _of_arithmetic(word: str, given: Sequence[Range]) -> Range:
    if word in (*_SAME, "concatenate"):
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
    return Range(min(ends), max(ends))


def _union(given: Sequence[Range]) -> Range:
    return Range(min(reach.low for reach in given), max(reach.high for reach in given))
