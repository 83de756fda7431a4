"""Checks single operations against the rules of `rules`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.config import count_text
from hlat_jax.neuron import indices
from hlat_jax.neuron.module import (
    Program,
    Tensor,
    attribute,
    body_ops,
    callee,
    constant,
    defining_op,
    integers,
    is_constant,
    returned_values,
    tensor,
)

# Rule id, detail of the operation, and the operation whose line to report if it is another.
Hit = tuple[Any, ...]

# Source: compiler/error-codes/EHCA005 and EVRF015
_CALLS_OF_AWS = """
    Erf Gelu GeluApprxTanh GeluBackward Silu SiluBackward RmsNorm Softmax SoftmaxBackward CollectiveMatmul IntMatmult
    ArgMax ArgMin TopK DropoutMaskV1 CustomNativeKernel CustomOp DevicePrint LNCShardingConstraint
    TransferWithStaticRing ModuleMarkerStart-Forward ModuleMarkerStart-Backward ModuleMarkerEnd-Forward
    ModuleMarkerEnd-Backward
"""
_OTHER_CALLS = "ResizeNearest ResizeBilinear ResizeNearestGrad NeuronBoundaryMarker-Start NeuronBoundaryMarker-End"
CUSTOM_CALLS = {f"AwsNeuron{word}" for word in _CALLS_OF_AWS.split()} | {*_OTHER_CALLS.split()}
# The partitioner removes these before the compiler runs.
_MARKERS = re.compile(r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|(xla\.)?sdy\..*|LayoutConstraint")
_TYPES = {
    "complex.*": "DT01",
    "f8E4M3FN": "DT02",
    ".*FNUZ": "DT03",
    "f[46]E.*|u?i[24]": "DT04",
    "f64": "DT05",
    "f8E3M4": "DT08",
    "f8E8M0FNU": "DT09",
}
_FLOAT_BITS = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23), "f64": (11, 52)}  # exponent, mantissa
_LARGE_MATRIX = 2**20  # elements of a right-hand side
_IDENTITY = 128  # columns of the identity by which the tensor engine transposes
_DYNAMIC = re.compile(r"stablehlo\.(real_)?dynamic_(reshape|broadcast_in_dim|iota|pad|gather|conv)|.*dimension_size")


def violations(op: Any, program: Program) -> Iterator[Hit]:
    """Yields the rules that an operation breaks, each with a detail."""
    yield from _types(op)
    if op.name in _FINDERS:
        yield from _FINDERS[op.name](op, program)


def _types(op: Any) -> Iterator[Hit]:
    values = list(op.results)
    if op.name == "func.func":
        values = list(op.regions[0].blocks[0].arguments) if op.regions[0].blocks else []
    for kind in filter(None, map(tensor, values)):
        if None in kind.dims:
            yield "SH01", str(kind)
        for pattern, rule in _TYPES.items():
            if re.fullmatch(pattern, kind.dtype):
                yield rule, kind.dtype
        if kind.dtype in ("i64", "ui64") and kind.num_elements > 2:
            yield "DT06", str(kind)
    if _DYNAMIC.fullmatch(op.name):
        yield "SH01", op.name
    if op.name == "stablehlo.constant" and tensor(op.results[0]).dtype == "ui64":
        largest = constant(op.results[0])
        if largest is not None and largest.size and int(largest.max()) >= 2**32:
            yield "DT07", str(int(largest.max()))


def _branch(op: Any, program: Program) -> Iterator[Hit]:
    if not _is_constant_index(op.operands[0]) and _exact(op.operands[0], program) is None:
        yield "CF01", op.name.partition(".")[2]


def _is_constant_index(value: Any) -> bool:
    """Returns whether an index is a constant or a `case` of constants, as emitted by platform_dependent."""
    op = defining_op(value)
    if op is None or op.name not in _BRANCHES:
        return is_constant(value)
    results = [value for region in op.regions for value in returned_values(region)]
    return _is_constant_index(op.operands[0]) and all(map(is_constant, results))


def _loop(op: Any, program: Program) -> Iterator[Hit]:
    limit = _static_limit(op, program)
    yield ("CF03", "a trip count that is not static") if limit is None else ("CF04", f"up to {limit}")
    yield from _unsigned_sums(op, program)


def _unsigned_sums(loop: Any, program: Program) -> Iterator[Hit]:
    """Yields KB03 for each unsigned integer that a loop carries and adds to, other than a counter."""
    body = loop.regions[1]
    for carried, returned in zip(body.blocks[0].arguments, returned_values(body), strict=True):
        value, calls = indices.source(returned, program, ())
        step = defining_op(value)
        if step is None or step.name != "stablehlo.add" or not tensor(value).dtype.startswith("ui"):
            continue
        operands = [indices.source(operand, program, calls) for operand in step.operands]
        added = [value for value, calls_to_value in operands if (value, calls_to_value) != (carried, ())]
        if len(added) == 1 and not is_constant(added[0]):
            yield "KB03", str(tensor(carried)), step


def _static_limit(loop: Any, program: Program) -> int | None:
    """Returns the constant that a `while` compares its counter with.

    None if the condition is anything else, or if the start or step of the counter, or the limit, is not a constant.
    """
    compare = defining_op(_skip_true(returned_values(loop.regions[0])[0], program))
    if compare is None or compare.name != "stablehlo.compare":
        return None
    operands = [_skip_conversion(operand) for operand in compare.operands]
    limits = [_invariant(operand, loop, program) for operand in operands]
    constants = [limit for limit in limits if limit is not None]
    counters = [operand for operand, limit in zip(operands, limits, strict=True) if limit is None]
    if len(constants) != 1 or defining_op(counters[0]) is not None:
        return None
    return constants[0] if _counts_by_constants(loop, counters[0], program) else None


def _skip_true(condition: Any, program: Program) -> Any:
    """Returns a condition without an `and` with a constant true, and without a comparison with a constant false."""
    condition = _skip_conversion(condition)
    op = defining_op(condition)
    if op is None or len(op.operands) != 2 or tensor(op.operands[0]).dtype != "i1":
        return condition
    is_unequal = op.name == "stablehlo.compare" and "NE" in str(op.attributes["comparison_direction"])
    neutral = 1 if op.name == "stablehlo.and" else 0 if is_unequal else None
    others = [operand for operand in op.operands if _exact(operand, program) != neutral]
    return _skip_true(others[0], program) if neutral is not None and len(others) == 1 else condition


def _skip_conversion(value: Any) -> Any:
    """Returns what a conversion to its own type converts."""
    op = defining_op(value)
    is_idle = op is not None and op.name == "stablehlo.convert" and tensor(op.operands[0]) == tensor(value)
    return op.operands[0] if is_idle else value


def _exact(value: Any, program: Program) -> int | None:
    """Returns the integer that every element of a value is; None where the program does not determine it."""
    values = indices.index_range(value, program, ())
    return int(values.low) if values.is_number else None


def _invariant(value: Any, loop: Any, program: Program) -> int | None:
    """Returns a constant of a loop's condition, or an argument of the loop that stays as it began."""
    if defining_op(value) is not None:
        return _exact(value, program)
    index, body = ir.BlockArgument(value).arg_number, loop.regions[1]
    stays = returned_values(body)[index] == body.blocks[0].arguments[index]
    return _exact(loop.operands[index], program) if stays else None


def _counts_by_constants(loop: Any, counter: Any, program: Program) -> bool:
    """Returns whether an argument of a loop starts at a constant and changes by a constant in each iteration."""
    index, body = ir.BlockArgument(counter).arg_number, loop.regions[1]
    step = defining_op(returned_values(body)[index])
    if step is None or step.name not in ("stablehlo.add", "stablehlo.subtract"):
        return False
    start = indices.index_range(loop.operands[index], program, ())
    previous, increment = step.operands
    if step.name == "stablehlo.add" and is_constant(previous):
        previous, increment = increment, previous
    return start.is_number and previous == body.blocks[0].arguments[index] and is_constant(increment)


def _reduce(op: Any, _: Program) -> Iterator[Hit]:
    if len(op.results) > 1:
        yield "RED01", f"{len(op.results)} operands"


def _window(op: Any, _: Program) -> Iterator[Hit]:
    is_dilated = _has_above_one(op, "base_dilations", "window_dilations")
    yield ("RED03" if is_dilated or len(op.results) > 1 else "RED02"), "reduce_window"


def _has_above_one(op: Any, *keys: str) -> bool:
    return any(size > 1 for key in keys for size in integers(op, key))


def _call(op: Any, _: Program) -> Iterator[Hit]:
    if callee(op).startswith("threefry2x32"):
        yield "RNG01", callee(op)
    if re.fullmatch(r"_?randint(_\d+)?", callee(op)):
        yield "RNG04", callee(op)


def _generator(op: Any, _: Program) -> Iterator[Hit]:
    algorithm = str(attribute(op, "rng_algorithm"))
    if "DEFAULT" not in algorithm:
        yield "RNG02", algorithm


def _precision(op: Any, _: Program) -> Iterator[Hit]:
    bits = tuple(ir.IntegerAttr(op.attributes[key]).value for key in ("exponent_bits", "mantissa_bits"))
    dtype = tensor(op.operands[0]).dtype
    exponent, mantissa = _FLOAT_BITS.get(dtype, (0, 0))
    is_narrower = bits[0] < exponent or bits[1] < mantissa
    yield ("RP01" if is_narrower else "RP02"), f"{dtype} to e{bits[0]}m{bits[1]}"


def _custom_call(op: Any, _: Program) -> Iterator[Hit]:
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target in ("mhlo.topk", "TopK"):
        yield from _top_k(op, _)
    elif target not in CUSTOM_CALLS and not _MARKERS.fullmatch(target):
        yield "CB01", target


def _top_k(op: Any, _: Program) -> Iterator[Hit]:
    kind = tensor(op.operands[0])
    yield ("OP03" if kind.is_integer else "OP02"), str(kind)


def _sort(op: Any, _: Program) -> Iterator[Hit]:
    members = body_ops(op)
    if len(members) != 1 or members[0].name != "stablehlo.compare":
        yield "OP04", f"a comparator of {count_text(len(members), 'operation')}"
    elif not re.search(r"\b(LT|LE|GT|GE)\b", str(attribute(members[0], "comparison_direction"))):
        yield "OP04", "a comparison other than LT, LE, GT, GE"


def _convolution(op: Any, _: Program) -> Iterator[Hit]:
    if _has_above_one(op, "lhs_dilation") and _has_above_one(op, "rhs_dilation", "window_strides"):
        yield "OP08", "lhs dilation with rhs dilation or stride"


def _dot(op: Any, _: Program) -> Iterator[Hit]:
    kind = tensor(op.operands[0])
    if kind.is_integer:
        yield "INT01", str(kind)
    if attribute(op, "algorithm") is not None:
        yield "DA01", str(attribute(op, "algorithm"))
    yield from _transposed_product(op)


def _transposed_product(dot: Any) -> Iterator[Hit]:
    """Yields DG01 for a product of few rows whose right-hand side is large and contracted after a dimension it keeps.

    The tensor engine then transposes it by a product with an identity, _IDENTITY / rows of the product's work, which
    gives both numbers of the issue that the rule cites. The issue is about products without batch dimensions.
    """
    left, right = map(tensor, dot.operands)
    numbers = stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    if list(numbers.rhs_batching_dimensions):
        return
    of_left, of_right = list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)
    rows = math.prod(size or 1 for dim, size in enumerate(left.dims) if dim not in of_left)
    is_contracted = [dim in of_right for dim, size in enumerate(right.dims) if size != 1]
    is_first = is_contracted == sorted(is_contracted, reverse=True)
    if not is_first and right.num_elements >= _LARGE_MATRIX and rows < _IDENTITY:
        yield "DG01", f"{left} x {right}: transposing the second adds {_IDENTITY / rows:.0%} to the product"


def _division(op: Any, program: Program) -> Iterator[Hit]:
    """Yields KB09 for a division of integers by anything but a power of two, at each call of its function."""
    if not tensor(op.results[0]).is_integer:
        return
    for calls in indices.calls_to(op, program):
        divisor = indices.index_range(op.operands[1], program, calls)
        size = abs(int(divisor.low)) if divisor.is_number else 0
        if size == 0 or size & (size - 1):
            yield "KB09", f"{tensor(op.results[0])} by {size or 'a number from data'}", calls[0] if calls else op


def _cast(op: Any, program: Program) -> Iterator[Hit]:
    """Yields KB10 for the second of two casts of floats that only round."""
    kind, narrow = tensor(op.results[0]).dtype, tensor(op.operands[0]).dtype
    if not {kind, narrow} <= set(_FLOAT_BITS) or _FLOAT_BITS[narrow] >= _FLOAT_BITS[kind]:
        return
    if any(_is_cast_from(kind, op.operands[0], calls, program, set()) for calls in indices.calls_to(op, program)):
        yield "KB10", f"{kind} to {narrow} and back"


def _is_cast_from(kind: str, value: Any, calls: tuple, program: Program, seen: set) -> bool:
    """Returns whether digits of a value come from a cast of this type, through operations that keep digits."""
    value, calls = indices.source(value, program, calls)
    op = defining_op(value)
    if op is None or (value, calls) in seen:
        return False
    seen.add((value, calls))
    if op.name == "stablehlo.convert":
        return tensor(op.operands[0]).dtype == kind
    if op.name not in _MOVES:
        return False
    operands = list(op.operands)[1:] if op.name == "stablehlo.select" else op.operands
    return any(_is_cast_from(kind, operand, calls, program, seen) for operand in operands)


def row_shift(op: Any, program: Program) -> str:
    """Returns how an operation shifts rows, along a dimension other than the last, or "" for other operations.

    A shift keeps the number of rows. It is a convolution, a slice of a padded array, padding of a slice, padding by a
    negative number, or slices that are joined again.
    """
    opcode = op.name.removeprefix("stablehlo.")
    if opcode == "convolution":
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        sizes = [tensor(op.operands[1]).dims[dim] for dim in numbers.kernel_spatial_dimensions]
        return f"a convolution with a window of {sizes}" if any(size > 1 for size in sizes) else ""
    rows: set[int] = set()
    if op.name in _SHIFTS:
        inner = defining_op(indices.source(op.operands[0], program, indices.calls_to(op, program)[0])[0])
        steps = [op, inner] if inner is not None and {inner.name, op.name} == set(_SHIFTS) else [op]
        shifts = np.sum([_SHIFTS[step.name](step) for step in steps], axis=0)
        sizes = zip(tensor(steps[-1].operands[0]).dims, tensor(op.results[0]).dims, shifts, strict=True)
        rows = {dim for dim, (before, after, shift) in enumerate(sizes) if before == after and shift}
    elif opcode == "concatenate":
        dim = ir.IntegerAttr(op.attributes["dimension"]).value
        parts = [part for part in map(defining_op, op.operands) if part is not None and dim in _cut_dims(part)]
        sizes = {tensor(part.operands[0]).dims[dim] for part in parts}
        rows = {dim} if tensor(op.results[0]).dims[dim] in sizes else set()
    is_last = rows and min(rows) == len(tensor(op.results[0]).dims) - 1
    return f"{tensor(op.results[0])} along dimension {min(rows)}" if rows and not is_last else ""


def _cut_dims(op: Any) -> set[int]:
    """Returns the dimensions of which a slice takes a part; none for any other operation."""
    if op.name != "stablehlo.slice":
        return set()
    sizes = zip(tensor(op.operands[0]).dims, tensor(op.results[0]).dims, strict=True)
    return {dim for dim, (whole, part) in enumerate(sizes) if whole != part}


def _exchange(op: Any, program: Program) -> Iterator[Hit]:
    kind = tensor(op.operands[0])
    if kind.is_integer:
        yield "KB14", str(kind)
    value, _ = indices.source(op.operands[0], program, ())
    while (first := defining_op(value)) is not None and first.name == "stablehlo.reshape":
        value = first.operands[0]
    if first is not None and first.name == "stablehlo.broadcast_in_dim":
        yield "CC08", str(kind)


def _scatter(op: Any, program: Program) -> Iterator[Hit]:
    kind = tensor(op.operands[0])
    if body_ops(op) and (kind.is_integer or kind.dtype == "i1"):
        yield "INT02", str(kind)
    yield from indices.findings(op, program)
    yield from indices.assignment_findings(op, program)


_MOVES = {  # the result has the digits of an operand
    f"stablehlo.{name}"
    for name in (
        *("broadcast_in_dim", "reshape", "transpose", "slice", "reverse", "abs", "negate", "maximum", "minimum"),
        *("select", "concatenate", "pad"),
    )
}
_SHIFTS: dict[str, Callable[[Any], list[int]]] = {  # to higher indices, in each dimension
    "stablehlo.slice": lambda op: [-start for start in integers(op, "start_indices")],
    "stablehlo.pad": lambda op: integers(op, "edge_padding_low"),
}
_BRANCHES = ("stablehlo.case", "stablehlo.if")


def _always(rule: str) -> Callable[[Any, Program], Iterator[Hit]]:
    return lambda op, _: iter([(rule, op.name.partition(".")[2])])


def _of_types(rule: str, is_wrong: Callable[[Tensor], bool]) -> Callable[[Any, Program], Iterator[Hit]]:
    """Returns a finder of a rule that depends on the type of the first operand alone."""
    return lambda op, _: iter([(rule, str(kind))] if is_wrong(kind := tensor(op.operands[0])) else [])


_FINDERS: dict[str, Callable[[Any, Program], Iterator[Hit]]] = {
    "stablehlo.case": _branch,
    "stablehlo.if": _branch,
    "stablehlo.while": _loop,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _window,
    "stablehlo.rng_bit_generator": _generator,
    "stablehlo.reduce_precision": _precision,
    "stablehlo.custom_call": _custom_call,
    "stablehlo.triangular_solve": _always("OP01"),
    "stablehlo.cholesky": _always("OP01"),
    "stablehlo.fft": _always("OP01"),
    "stablehlo.sort": _sort,
    "stablehlo.shift_right_arithmetic": _of_types("OP05", lambda kind: kind.dtype not in ("i32", "ui32")),
    "stablehlo.convolution": _convolution,
    "stablehlo.dot_general": _dot,
    "stablehlo.power": _of_types("INT04", lambda kind: kind.dtype in ("i64", "ui64")),
    "stablehlo.all_reduce": _of_types("INT03", lambda kind: kind.is_integer),
    "stablehlo.reduce_scatter": _of_types("INT03", lambda kind: kind.is_integer),
    "stablehlo.all_to_all": _exchange,
    "stablehlo.convert": _cast,
    "stablehlo.divide": _division,
    "stablehlo.remainder": _division,
    "stablehlo.gather": indices.findings,
    "stablehlo.scatter": _scatter,
    "chlo.top_k": _top_k,
    "func.call": _call,
} | {f"stablehlo.{name}": _always("CB01") for name in ("infeed", "outfeed", "send", "recv")}
