"""The size of a program for the tensor engine with every loop unrolled, as the compiler may do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.neuron.module import Program, ancestors, constant, defining, enclosing, inner, tensor
from hlat_jax.neuron.operators import static_limit
from hlat_jax.neuron.partitioned import local_result

MANY_TILES = 10**6
_ROWS, _COLUMNS, _DEPTH = 128, 512, 128  # of one product on the tensor engine; Source: NKI docs, nki.isa.nc_matmul


def findings(program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields CG01 at the largest product, where there are MANY_TILES of them in all on one device."""
    times: dict[str, int] = {}
    tiles = {}
    for number, op in enumerate(program.operations):
        if op.name == "stablehlo.dot_general":
            tiles[number] = num_tiles(op, program) * executions(op, program, times)
    if sum(tiles.values()) > MANY_TILES:
        largest = program.operations[max(tiles, key=tiles.get)]
        share = max(tiles.values()) / sum(tiles.values())
        yield "CG01", f"{sum(tiles.values()):,} tiles of products, {share:.0%} of them here", largest


def num_tiles(dot: Any, program: Program) -> int:
    """Returns the products of 128 x 128 by 128 x 512 that a `dot_general` takes on one device, a dynamic dim as 1."""
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    left, result = ([dim or 1 for dim in kind.dims] for kind in (tensor(dot.operands[0]), local_result(dot, program)))
    batch = len(list(numbers.lhs_batching_dimensions))
    rows = len(left) - batch - len(list(numbers.lhs_contracting_dimensions))
    depth = math.prod(left[dim] for dim in numbers.lhs_contracting_dimensions)
    m, n = math.prod(result[batch : batch + rows]), math.prod(result[batch + rows :])
    small, large = sorted((m, n))
    tiles = math.ceil(small / _ROWS) * math.ceil(large / _COLUMNS) * math.ceil(depth / _DEPTH)
    return math.prod(result[:batch]) * tiles


def executions(op: Any, program: Program, times: dict[str, int]) -> int:
    """Returns how often an operation runs in one run of the program; a loop of unknown length counts once.

    Args:
      op: the operation.
      program: that contains it.
      times: cache of the executions of functions.
    """
    count = math.prod(trips(parent, program) for parent in ancestors(op) if parent.name == "stablehlo.while")
    function = enclosing(op)
    if function not in times:
        calls = program.callers(function)
        times[function] = sum(executions(call, program, times) for call in calls) if calls else 1
    return count * times[function]


def trips(loop: Any, program: Program) -> int:
    """Returns the length of a static loop that counts up by one from a constant; 1 of any other."""
    limit = static_limit(loop, program)
    if limit is None:
        return 1
    [compare] = [op for op in inner(loop) if op.name == "stablehlo.compare"]
    [counter] = [operand for operand in compare.operands if defining(operand) is None]
    start = constant(loop.operands[ir.BlockArgument(counter).arg_number])
    return max(1, limit - int(start)) if start is not None else 1
