"""Estimates the instructions of a lowered program with every loop unrolled, as the compiler may do.

See `plan.instructions` for what is counted, and how little that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir.dialects import stablehlo

from hlat_jax.neuron.module import (
    Program,
    Tensor,
    ancestors,
    constant,
    enclosing_function,
    tensor,
)
from hlat_jax.neuron.operators import static_counter
from hlat_jax.neuron.partitioned import local_result
from hlat_jax.plan.instructions import (
    NOTE,
    Instructions,
    element_tiles,
    operation_limit,
    product_tiles,
    program_limit,
    rounded,
)

# Operations without elements of their own: views, containers, and what the compiler makes no instructions of.
_FREE = {"broadcast_in_dim", "reshape", "bitcast_convert", "iota", "constant", "optimization_barrier", "tuple"}
_FREE |= {"get_tuple_element", "return", "while", "case", "if", "custom_call", "create_token", "after_all"}
# Operations that read or write a part of a large array -> the operand that has the size of that part.
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2}
_READ = ("reduce", "reduce_window", "sort")  # operations whose operand is larger than their result
_BODIES = ("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.scatter", "stablehlo.sort", "stablehlo.all_reduce")
_BODIES += ("stablehlo.reduce_scatter", "sdy.all_reduce", "sdy.reduce_scatter")


def findings(program: Program, *, target: str, compiler_flags: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of CG01 for a program, and of CG02 for each operation, above the public limits."""
    counts = _counted(program)
    whole, limit, most = _total(counts), operation_limit(target), program_limit(compiler_flags)
    if whole.unrolled > most:
        op, tiles, trips = max(counts, key=lambda count: count[1] * count[2])
        loops = f"about {rounded(whole.unrolled)} instructions with every loop unrolled, {rounded(whole.looped)} with "
        share = f"none; {tiles * trips / whole.unrolled:.0%} of them in this operation"
        yield "CG01", f"{loops}{share} (limit {most:,}; {NOTE})", op
    for op, tiles, _ in counts:
        if tiles > limit:
            yield "CG02", f"about {rounded(tiles)} instructions (limit {limit:,}; {NOTE})", op


def estimated(program: Program) -> Instructions:
    """Returns the instructions of a program, of one device if Shardy has been run on it."""
    return _total(_counted(program))


def _total(counts: list[tuple[Any, int, int]]) -> Instructions:
    unrolled, looped = sum(tiles * trips for _, tiles, trips in counts), sum(tiles for _, tiles, _ in counts)
    return Instructions(unrolled, looped, max((tiles for _, tiles, _ in counts), default=0))


def _counted(program: Program) -> list[tuple[Any, int, int]]:
    """Returns (operation, instructions of one execution, number of executions) for the operations of a program."""
    times: dict[str, int] = {}
    found = []
    for op in program.operations:
        dialect, _, opcode = op.name.partition(".")
        is_collective = dialect == "sdy" and opcode in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        is_free = opcode in _FREE and not (opcode == "broadcast_in_dim" and _is_result(op))
        if (dialect in ("stablehlo", "chlo") and not is_free) or is_collective:
            if op.parent is not None and getattr(op.parent, "operation", op.parent).name in _BODIES:
                continue  # the body of a reduction, not an operation on arrays
            tiles = num_tiles(op, program)
            found += [(op, tiles, execution_count(op, program, times))] if tiles else []
    return found


def _is_result(op: Any) -> bool:
    """Returns whether a program returns what an operation makes, so that it is written to memory."""
    return any(use.owner.name in ("func.return", "sdy.return") for use in op.results[0].uses)


def num_tiles(op: Any, program: Program) -> int:
    """Returns the instructions of one execution of an operation on one device; dynamic dims count as 1."""
    opcode = op.name.partition(".")[2]
    if opcode == "dot_general":
        return _product_tiles(op, program)
    if opcode in _UPDATES:
        return element_tiles(_elements(tensor(op.operands[_UPDATES[opcode]])))
    if not op.results:
        return 0
    share = _elements(local_result(op, program)) / max(1, _elements(tensor(op.results[0])))
    # a reduction outside of a manual computation is split as its result is
    handled = tensor(op.operands[0] if opcode in _READ else op.results[0])
    return element_tiles(_elements(handled) * share)


def _elements(kind: Tensor | None) -> int:
    return 0 if kind is None else math.prod(dim or 1 for dim in kind.dims)


def _product_tiles(dot: Any, program: Program) -> int:
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    left, result = ([dim or 1 for dim in kind.dims] for kind in (tensor(dot.operands[0]), local_result(dot, program)))
    batch = len(list(numbers.lhs_batching_dimensions))
    rows = len(left) - batch - len(list(numbers.lhs_contracting_dimensions))
    depth = math.prod(left[dim] for dim in numbers.lhs_contracting_dimensions)
    m, n = math.prod(result[batch : batch + rows]), math.prod(result[batch + rows :])
    return math.prod(result[:batch]) * product_tiles(m, n, depth)


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
    found = static_counter(loop, program)
    if found is None:
        return 1
    start = constant(loop.operands[found[0]])
    return max(1, found[1] - int(start)) if start is not None else 1
