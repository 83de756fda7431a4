"""Constant folding of values that are computed from iotas and constants, across function calls.

A value is evaluated in the context of one call: `calls` are the `func.call` operations, outermost first, that lead to
its function. Without `calls` the arguments of the function are unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from hlat_jax.neuron.module import Program, attribute, callee, constant, defining_op, tensor

MAX_DEPTH = 100  # operations between a value and its iotas and constants
_MAX_ELEMENTS = 2**24
DTYPES = {f"{sign}i{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES |= {"i1": np.dtype(bool), "bf16": jnp.dtype("bfloat16"), "f16": np.dtype("float16")}
DTYPES |= {"f32": np.dtype("float32"), "f64": np.dtype("float64")}


@dataclasses.dataclass(frozen=True)
class Known:
    """Values that do not depend on the inputs of the program.

    Attributes:
      numbers: array of the value's rank; a dim along which all elements are equal may have size 1.
      from_iota: whether they are computed from an iota.
    """

    numbers: np.ndarray
    from_iota: bool


def source(value: Any, calls: tuple, program: Program) -> tuple[Any, tuple]:
    """Returns the value that a function argument or result stands for, and the calls that lead to it."""
    while True:
        op = defining_op(value)
        if op is None:
            if not calls or function_of(value) is None:
                return value, calls
            value, calls = calls[-1].operands[ir.BlockArgument(value).arg_number], calls[:-1]
        elif op.name == "func.call" and program.functions[callee(op)].regions[0].blocks:
            body = program.functions[callee(op)].regions[0].blocks[0]
            returned = list(body.operations)[-1].operation
            value, calls = returned.operands[ir.OpResult(value).result_number], (*calls, op)
        elif op.name == "stablehlo.optimization_barrier":
            value = op.operands[ir.OpResult(value).result_number]
        else:
            return value, calls


def function_of(argument: Any) -> Any:
    """Returns the function that a block argument belongs to; None if the block belongs to another operation."""
    owner = ir.BlockArgument(argument).owner.owner
    owner = getattr(owner, "operation", owner)
    return owner if owner.name == "func.func" else None


def known(value: Any, program: Program, calls: tuple, *, depth: int = 0) -> Known | None:
    """Returns the elements of a value that is computed from iotas and constants alone, else None."""
    key = (value, calls)
    if key not in program.known:
        program.known[key] = _known(value, program, calls, depth) if depth < MAX_DEPTH else None
    return program.known[key]


def _known(value: Any, program: Program, calls: tuple, depth: int) -> Known | None:
    value, calls = source(value, calls, program)
    op, kind = defining_op(value), tensor(value)
    if op is None or kind is None or None in kind.dims or kind.dtype not in DTYPES:
        return None
    dtype, opcode = DTYPES[kind.dtype], op.name.partition(".")[2]
    if opcode == "constant":
        found = constant(value)
        if found is None:
            return None
        distinct = tuple(slice(1) if stride == 0 else slice(None) for stride in found.strides)
        return Known(found[distinct].astype(dtype), False)
    if opcode == "iota":
        dim = ir.IntegerAttr(op.attributes["iota_dimension"]).value
        if kind.dims[dim] > _MAX_ELEMENTS:
            return None
        shape = [-1 if number == dim else 1 for number in range(len(kind.dims))]
        return Known(np.arange(kind.dims[dim]).astype(dtype).reshape(shape), True)
    if opcode not in _COMPUTED:
        return None
    operands = [known(operand, program, calls, depth=depth + 1) for operand in op.operands]
    if any(operand is None for operand in operands):
        return None
    with np.errstate(all="ignore"):
        result = _COMPUTED[opcode](op, *(operand.numbers for operand in operands))
    return None if result is None else Known(np.asarray(result).astype(dtype), any(one.from_iota for one in operands))


def _elementwise(fn: Callable) -> Callable:
    def compute(_, *operands):
        fits = math.prod(np.broadcast_shapes(*(operand.shape for operand in operands))) <= _MAX_ELEMENTS
        return fn(*operands) if fits else None

    return compute


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if jnp.issubdtype(a.dtype, jnp.floating):
        return a / b
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0)))  # rounds toward zero


def _compare(op: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray | None:
    return _elementwise(_COMPARISONS[direction(op)])(op, a, b)


def direction(compare: Any) -> str:
    """Returns the direction of a comparison: EQ, NE, LT, LE, GT or GE."""
    return re.search(r"\b(EQ|NE|LT|LE|GT|GE)\b", str(attribute(compare, "comparison_direction"))).group()


def _convert(op: Any, x: np.ndarray) -> np.ndarray | None:
    is_rounded = jnp.issubdtype(x.dtype, jnp.floating) and tensor(op.results[0]).dtype[0] in "iu"
    is_safe = not is_rounded or (np.abs(x.astype(np.float64)) < 2**31).all()
    return x if is_safe else None


def _broadcast_in_dim(op: Any, x: np.ndarray) -> np.ndarray:
    dims = _integers(op, "broadcast_dimensions")
    shape = [1] * len(tensor(op.results[0]).dims)
    for size, dim in zip(x.shape, dims, strict=True):
        shape[dim] = size
    return x.transpose(np.argsort(dims)).reshape(shape)


def _reshape(op: Any, x: np.ndarray) -> np.ndarray | None:
    before, after = (tensor(value) for value in (op.operands[0], op.results[0]))
    if x.size == 1:
        return x.reshape((1,) * len(after.dims))
    return np.broadcast_to(x, before.dims).reshape(after.dims) if before.num_elements <= _MAX_ELEMENTS else None


def _slice(op: Any, x: np.ndarray) -> np.ndarray:
    parts = zip(*(_integers(op, key) for key in ("start_indices", "limit_indices", "strides")), strict=True)
    return x[tuple(slice(None) if size == 1 else slice(*part) for size, part in zip(x.shape, parts, strict=True))]


def _concatenate(op: Any, *arrays: np.ndarray) -> np.ndarray | None:
    dim = ir.IntegerAttr(op.attributes["dimension"]).value
    shapes = [list(array.shape) for array in arrays]
    for shape, operand in zip(shapes, op.operands, strict=True):
        shape[:] = np.max([array.shape for array in arrays], axis=0)
        shape[dim] = tensor(operand).dims[dim]
    if sum(math.prod(shape) for shape in shapes) > _MAX_ELEMENTS:
        return None
    return np.concatenate([np.broadcast_to(x, shape) for x, shape in zip(arrays, shapes, strict=True)], axis=dim)


def _integers(op: Any, key: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[key]))


_COMPARISONS = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_ELEMENTWISE = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": _divide,
    "remainder": np.fmod,  # with the sign of the dividend
    "maximum": np.maximum,
    "minimum": np.minimum,
    "negate": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "select": np.where,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}
_COMPUTED: dict[str, Callable] = {opcode: _elementwise(fn) for opcode, fn in _ELEMENTWISE.items()} | {
    "compare": _compare,
    "convert": _convert,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": lambda op, x: x.transpose(_integers(op, "permutation")),
    "slice": _slice,
    "reverse": lambda op, x: np.flip(x, _integers(op, "dimensions")),
    "concatenate": _concatenate,
}
