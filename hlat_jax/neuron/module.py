"""Reads the operations of StableHLO modules, with types, attributes and the Python lines that they come from."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.mlir import ir

# MLIR prints a Python frame of a location as "function"("path":line:column ..., innermost frame first
_FRAME = re.compile(r'"((?:[^"\\]|\\.)*)"\("((?:[^"\\]|\\.)*)":(\d+):')
# Frames of these libraries are less useful to report than the line that called them.
_LIBRARY_PATH = re.compile(r"[/\\]site-packages[/\\](jax|jaxlib|flax|optax|orbax|chex|equinox|haiku)[/\\]")
# `lint.check` traces the function, so lint.py is in the traceback too.
_LINT = str(pathlib.Path(__file__).with_name("lint.py"))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The type of a ranked tensor, with its dims (None if dynamic) and MLIR's name of the element type."""

    dims: tuple[int | None, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(dim or 0 for dim in self.dims)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _bits(self.dtype) // 8

    @property
    def is_integer(self) -> bool:
        """Whether the elements are integers of more than one bit."""
        return re.fullmatch(r"u?i\d+", self.dtype) is not None and self.dtype != "i1"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join('?' if dim is None else str(dim) for dim in self.dims)}]"


def tensor(value_or_type: Any) -> Tensor | None:
    """Returns the type of a value as a `Tensor`, or None for tokens, tuples and other types."""
    kind = getattr(value_or_type, "type", value_or_type)
    try:
        ranked = ir.RankedTensorType(kind)
    except (TypeError, ValueError):
        return None
    dims = tuple(None if ranked.is_dynamic_dim(i) else ranked.get_dim_size(i) for i in range(ranked.rank))
    return Tensor(dims, str(ranked.element_type))


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a Python traceback."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.function})"


class Program:
    """A StableHLO module with its calls resolved.

    Attributes:
      operations: all operations in pre-order, so that an operation precedes its regions.
      functions: every `func.func` by its symbol.
    """

    def __init__(self, root: Any):
        self.operations = list(_walk(root))
        self.functions = {symbol_name(op): op for op in self.operations if op.name == "func.func"}
        self.ranges: dict[Any, Any] = {}
        self._callers: dict[str, list[Any]] = {}
        for op in self.operations:
            if op.name == "func.call":
                self._callers.setdefault(callee(op), []).append(op)

    @property
    def main(self) -> Any:
        """The entry function."""
        return self.functions.get("main") or next(iter(self.functions.values()))

    def callers(self, function: str) -> list[Any]:
        """Returns the `func.call` operations that call a function."""
        return self._callers.get(function, [])

    def frames(self, op: Any) -> list[Frame]:
        """Returns the Python frames of an operation and of the calls that lead to it, innermost first."""
        frames, seen = list(_frames(str(op.location))), set()
        function = enclosing_function(op)
        while function is not None and function not in seen:
            seen.add(function)
            calls = self.callers(function)
            if not calls:
                break
            frames += [frame for frame in _frames(str(calls[0].location)) if frame not in frames]
            function = enclosing_function(calls[0])
        return frames

    @functools.cached_property
    def meshes(self) -> dict[str, dict[str, int]]:
        """The name of each `sdy.mesh` -> {axis: size}, outermost axis first."""
        meshes = {}
        for op in self.operations:
            if op.name == "sdy.mesh":
                text = str(op.attributes["mesh"])
                meshes[symbol_name(op)] = {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', text)}
        return meshes

    @property
    def has_many_devices(self) -> bool:
        """Whether any mesh of the program has more than one device."""
        return any(size > 1 for mesh in self.meshes.values() for size in mesh.values())


def line_of(frames: list[Frame]) -> str:
    """Returns the innermost frame outside of libraries and the linter, else the innermost, or "" without frames."""
    own = (frame for frame in frames if _LIBRARY_PATH.search(frame.path) is None and frame.path != _LINT)
    return str(next(own, frames[0])) if frames else ""


def attribute(op: Any, key: str) -> Any:
    """Returns an attribute of an operation, or None."""
    return op.attributes[key] if key in op.attributes else None  # noqa: SIM401 - the mapping has no get


def symbol_name(op: Any) -> str:
    """Returns the symbol that an operation defines."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def callee(op: Any) -> str:
    """Returns the function that a `func.call` calls."""
    return ir.FlatSymbolRefAttr(op.attributes["callee"]).value


def enclosing_function(op: Any) -> str | None:
    """Returns the symbol of the function that contains an operation, or None at the top level."""
    function = enclosing_op(op, "func.func")
    return None if function is None else symbol_name(function)


def enclosing_op(op: Any, kind: str) -> Any:
    """Returns the nearest ancestor of an operation that has a given type, such as `func.func`, or None."""
    while op.name != "builtin.module":  # a cloned module has no `parent`
        op = as_operation(op.parent)
        if op.name == kind:
            return op
    return None


def as_operation(op: Any) -> Any:
    """Returns the generic operation of jaxlib's view of one."""
    return getattr(op, "operation", op)


def body_ops(op: Any) -> list[Any]:
    """Returns the operations at the top level of an operation's first region, except the terminator."""
    return [as_operation(member) for member in op.regions[0].blocks[0]][:-1]


def returned_values(region: Any) -> Any:
    """Returns the values that the first block of a region returns."""
    return list(region.blocks[0].operations)[-1].operation.operands


def defining_op(value: Any) -> Any:
    """Returns the operation that produces a value, or None for a block argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else as_operation(owner)


def argument_owner(argument: Any) -> Any:
    """Returns the operation that a block argument belongs to."""
    return as_operation(ir.BlockArgument(argument).owner.owner)


def integers(op: Any, key: str) -> list[int]:
    """Returns the integers of an array attribute, or none without it."""
    return list(ir.DenseI64ArrayAttr(op.attributes[key])) if key in op.attributes else []


def attribute_numbers(attr: Any) -> np.ndarray | None:
    """Returns a dense attribute as an array, or None if jaxlib cannot convert it."""
    try:
        dense = ir.DenseElementsAttr(attr)
        if dense.is_splat:
            return np.broadcast_to(dense.get_splat_value().value, tensor(dense.type).dims)
        return np.asarray(attr)
    except (TypeError, ValueError, AttributeError):
        return None


def is_constant(value: Any) -> bool:
    """Returns whether a value is a constant of the program."""
    op = defining_op(value)
    return op is not None and op.name in ("stablehlo.constant", "sdy.constant")


def constant(value: Any) -> np.ndarray | None:
    """Returns the elements of a constant, or None for other values and types that jaxlib cannot convert."""
    if not is_constant(value):
        return None
    try:
        return attribute_numbers(defining_op(value).attributes["value"])
    except TypeError:  # jaxlib cannot return a complex attribute
        return None


def _bits(dtype: str) -> int:
    if dtype == "i1":
        return 8
    if dtype.startswith("complex"):
        return 2 * _bits(dtype[len("complex<") : -1])
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0


def _frames(text: str) -> Iterator[Frame]:
    for function, path, line in _FRAME.findall(text):
        yield Frame(path, int(line), function)


def _walk(op: Any) -> Iterator[Any]:
    op = as_operation(op)
    yield op
    for region in op.regions:
        for block in region:
            for member in block:
                yield from _walk(member)
