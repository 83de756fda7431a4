"""Estimates the size of a program with every loop unrolled, as the compiler may do, in matmul tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.neuron.module import Program, ancestors, body_ops, constant, defining_op, enclosing_function, tensor
from hlat_jax.neuron.operators import static_limit
from hlat_jax.neuron.partitioned import local_result

MANY_TILES = 10**6
_ROWS, _COLUMNS, _DEPTH = 128, 512, 128  # one matmul of the tensor engine. Source: NKI docs, nki.isa.nc_matmul


def findings(program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields CG01 at the largest `dot_general` if one device has more than MANY_TILES tiles in total."""
    times: dict[str, int] = {}
    tiles = {}
    for number, op in enumerate(program.operations):
        if op.name == "stablehlo.dot_general":
            tiles[number] = num_tiles(op, program) * execution_count(op, program, times)
    if sum(tiles.values()) > MANY_TILES:
        largest = program.operations[max(tiles, key=tiles.get)]
        share = max(tiles.values()) / sum(tiles.values())
        yield "CG01", f"{sum(tiles.values()):,} matmul tiles, {share:.0%} of them in this operation", largest


def num_tiles(dot: Any, program: Program) -> int:
    """Returns the number of 128x128 by 128x512 tiles of a `dot_general` on one device; dynamic dims count as 1."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    left, result = ([dim or 1 for dim in kind.dims] for kind in (tensor(dot.operands[0]), local_result(dot, program)))
    batch = len(list(numbers.lhs_batching_dimensions))
    rows = len(left) - batch - len(list(numbers.lhs_contracting_dimensions))
    depth = math.prod(left[dim] for dim in numbers.lhs_contracting_dimensions)
    m, n = math.prod(result[batch : batch + rows]), math.prod(result[batch + rows :])
    small, large = sorted((m, n))
    tiles = math.ceil(small / _ROWS) * math.ceil(large / _COLUMNS) * math.ceil(depth / _DEPTH)
    return math.prod(result[:batch]) * tiles


def execution_count(op: Any, program: Program, times: dict[str, int]) -> int:
    """Returns how often an operation runs in one run of the program; loops of unknown trip count count once.

    Args:
      op: the operation.
      program: the program that contains it.
      times: cache of the execution counts of functions.
    """
    count = math.prod(trip_count(parent, program) for parent in ancestors(op) if parent.name == "stablehlo.while")
    function = enclosing_function(op)
    if function not in times:
        calls = program.callers(function)
        times[function] = sum(execution_count(call, program, times) for call in calls) if calls else 1
    return count * times[function]


def trip_count(loop: Any, program: Program) -> int:
    """Returns the trip count of a static loop that counts up by one from a constant; 1 for any other."""
    limit = static_limit(loop, program)
    if limit is None:
        return 1
    [compare] = [op for op in body_ops(loop) if op.name == "stablehlo.compare"]
    [counter] = [operand for operand in compare.operands if defining_op(operand) is None]
    start = constant(loop.operands[ir.BlockArgument(counter).arg_number])
    return max(1, limit - int(start)) if start is not None else 1
