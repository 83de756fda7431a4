"""The operations of a training step, each with the shapes of one device and operands to run it by itself.

They come from the trace of the step. Inside `shard_map`, where forward, backward and all collectives are, shapes are
those of one device; the optimizer's elementwise operations outside get the shapes of the state's shards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.neuron.module import Frame, is_library_frame, line_of
from hlat_jax.passes.jaxpr import CALL_JAXPRS, COLLECTIVES, aval_bytes, inner_jaxprs, rebind
from hlat_jax.passes.products import PRODUCTS, live_jaxpr
from hlat_jax.program import RunProgram

# Sums of small integers are exact in fp32 in any order, and in bf16 up to 256.
SUMS = PRODUCTS | frozenset({"reduce_sum", "cumsum", "scatter-add", "scatter_add", "reduce_window_sum"})
# Operations with these devices' coordinates or values as operands.
ACROSS_DEVICES = frozenset(COLLECTIVES) | {"axis_index"}
_CONTROL = frozenset(CALL_JAXPRS) | {"scan", "while", "cond"}
# Nothing to compare: no operation on the device, or numbers that each backend draws differently.
_LEFT_OUT = frozenset({"sharding_constraint", "name", "stop_gradient", "rng_bit_generator", "rng_uniform"})
_POSITIVE = frozenset({"log", "log1p", "sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "lgamma", "digamma"})
_INSIDE_ONE = frozenset({"erf_inv", "atanh", "asin", "acos"})
_ANGLES = frozenset({"sin", "cos", "tan"})
_SHIFTS = frozenset({"shift_left", "shift_right_logical", "shift_right_arithmetic"})
_MAX_ANGLE = 4096.0  # of RoPE: the last positions of a long sequence
_DRAWN = 1_048_573  # prime, so that repeated numbers do not line up with any dim


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One operation of a step.

    Attributes:
      name: of the JAX primitive.
      operands: shapes and dtypes.
      params: of the primitive.
      run: (*operands, **changed) -> list of results; `changed` replaces parameters of a collective.
      num_bytes: of operands and results on one device.
      line: the Python line that it comes from, `file:line (function)`.
      position: among the operations of the step.
    """

    name: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    params: Mapping[str, Any]
    run: Callable[..., list[Any]]
    num_bytes: int
    line: str
    position: int

    @property
    def is_collective(self) -> bool:
        """Whether devices exchange values, or compute with their coordinates."""
        return self.name in ACROSS_DEVICES

    def axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the parameter of a collective that names mesh axes, with its value."""
        key = "axes" if "axes" in self.params else "axis_name"
        named = self.params[key]
        return {key: (named,) if isinstance(named, str) else tuple(named)}

    def __str__(self) -> str:
        shapes = ", ".join(f"{one.dtype.name}{list(one.shape)}" for one in self.operands)
        return f"{self.name} of {shapes}" + (f" at {self.line}" if self.line else "")


def step_operations(program: RunProgram) -> list[Operation]:
    """Returns the operations of the programs of a run's step in the order of their traces, equal ones once."""
    shards = {}  # shape of a state's array -> that of its shard; the optimizer's shards, where parameters differ
    for part in (program.abstract_state["params"], program.abstract_state["opt_state"]):
        for leaf in jax.tree.leaves(part):
            shards[leaf.shape] = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
    if program.accumulate != "dispatch":
        return operations([live_jaxpr(program.trace_step())], shards)
    names = program.training.microbatch_step.programs
    return operations([live_jaxpr(program.trace_microbatch_step(name)) for name in names], shards)


def operations(jaxprs: Sequence[Any], shards: Mapping[tuple[int, ...], tuple[int, ...]]) -> list[Operation]:
    """Returns the operations of jaxprs in their order, equal ones once.

    Args:
      jaxprs: open.
      shards: shape of an array -> that of its shard, for operations outside `shard_map`.
    """
    found: dict[Any, Operation] = {}
    for eqn, is_local in itertools.chain.from_iterable(_leaves(jaxpr, False) for jaxpr in jaxprs):
        for name, avals, results, params, run in _parts(eqn):
            if any(not isinstance(getattr(aval, "dtype", None), np.dtype) for aval in (*avals, *results)):
                continue  # tokens and random keys
            operands, outs = map(_shapes, (avals, results))
            if not is_local:
                operands, outs = _on_shards(operands, outs, run, shards=shards)
            key = (name, tuple((one.shape, one.dtype) for one in operands), str(params))
            if key not in found:
                num_bytes = sum(map(aval_bytes, (*operands, *outs)))
                found[key] = Operation(name, operands, params, run, num_bytes, _line(eqn), len(found))
    return list(found.values())


def sample(operation: Operation, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns operands of an operation for which its result is defined: indices in range, no division by zero, ...

    Terms of sums are small integers, whose sums are exact in any order.
    """
    drawn = [_drawn(operation, number, rng) for number in range(len(operation.operands))]
    if operation.name == "scatter":
        rows = drawn[1].reshape(-1, drawn[1].shape[-1])
        if len(np.unique(rows, axis=0)) < len(rows):  # which of several writes to an element is the last is undefined
            drawn[2] = np.full_like(drawn[2], 1)
    return drawn


def _leaves(jaxpr: Any, is_local: bool) -> Iterator[tuple[Any, bool]]:
    """Yields (equation, whether it is inside `shard_map`) for scans and all equations that call no function."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan" or name not in _CONTROL | _LEFT_OUT:
            yield eqn, is_local
        if name in _CONTROL:
            for inner in inner_jaxprs(eqn):
                yield from _leaves(inner, is_local or name == "shard_map")


def _shapes(avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


def _on_shards(operands: tuple, outs: tuple, run: Callable, *, shards: Mapping[tuple, tuple]) -> tuple[tuple, tuple]:
    """Returns the operands and results with the shapes of one device, if the operation can run on shards."""

    def local(kinds: tuple) -> tuple:
        return tuple(jax.ShapeDtypeStruct(shards.get(one.shape, one.shape), one.dtype) for one in kinds)

    try:
        found = jax.eval_shape(run, *local(operands))
    except (TypeError, ValueError):  # of an operation with shapes among its parameters
        return operands, outs
    runs = [one.shape for one in found] == [one.shape for one in local(outs)]
    return (local(operands), local(outs)) if runs else (operands, outs)


def _parts(eqn: Any) -> Iterator[tuple[str, list[Any], list[Any], Mapping[str, Any], Callable]]:
    """Yields (name, operands, results, parameters, function) of an equation; of a scan, reads and writes of a trip."""
    if eqn.primitive.name != "scan":
        avals = [[var.aval for var in each] for each in (eqn.invars, eqn.outvars)]
        # shardings name the mesh of the trace
        unsharded = {key: None for key in ("sharding", "out_sharding") if key in eqn.params}
        params = {**eqn.params, **unsharded}
        yield eqn.primitive.name, *avals, params, lambda *args, **changed: rebind(eqn, args, **unsharded, **changed)
        return
    index = jax.ShapeDtypeStruct((), jnp.int32)

    def one_trip(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *aval.shape[1:]), aval.dtype)

    def read(x: jax.Array, i: jax.Array) -> list[jax.Array]:
        return [jax.lax.dynamic_slice_in_dim(x, i, 1)]

    def write(x: jax.Array, row: jax.Array, i: jax.Array) -> list[jax.Array]:
        return [jax.lax.dynamic_update_slice_in_dim(x, row, i, 0)]

    num_carry = eqn.params["num_carry"]
    for var in eqn.invars[eqn.params["num_consts"] + num_carry :]:
        row = one_trip(var.aval)
        yield "dynamic_slice", [var.aval, index], [row], {"slice_sizes": row.shape}, read
    for var in eqn.outvars[num_carry:]:
        yield "dynamic_update_slice", [var.aval, one_trip(var.aval), index], [var.aval], {}, write


def _line(eqn: Any) -> str:
    trace = eqn.source_info.traceback
    frames = [Frame(f.file_name, f.line_num, f.function_name) for f in (trace.frames if trace else ())]
    return line_of([frame for frame in frames if not is_library_frame(frame)])


def _drawn(operation: Operation, number: int, rng: np.random.Generator) -> np.ndarray:
    kind = operation.operands[number]
    if (indices := _indices(operation, number, rng)) is not None:
        return indices
    size = min(math.prod(kind.shape), _DRAWN)
    if jnp.issubdtype(kind.dtype, jnp.floating):
        numbers = _floats(operation, number, rng, size=size)
    elif jnp.issubdtype(kind.dtype, jnp.complexfloating):
        numbers = rng.standard_normal(size) + 1j * rng.standard_normal(size)
    else:
        numbers = _integers(operation, number, rng, size=size)
    return np.resize(numbers.astype(kind.dtype), kind.shape)


def _floats(operation: Operation, number: int, rng: np.random.Generator, *, size: int) -> np.ndarray:
    name = operation.name
    if name in SUMS or operation.is_collective:
        # partial sums may be stored in 16 bits, except in products
        most = 1 if operation.operands[0].dtype.itemsize < 4 and name not in PRODUCTS | COLLECTIVES.keys() else 3
        return rng.integers(-most, most + 1, size)
    if name in ("scatter-mul", "scatter_mul", "reduce_prod", "cumprod"):
        return rng.choice([-1.0, 1.0], size)
    normal = rng.standard_normal(size, np.float32)
    if name == "is_finite":
        normal[::2] = rng.choice([np.inf, -np.inf, np.nan], normal[::2].size)
        return normal
    if name in _POSITIVE:
        return np.exp(normal)
    if name in ("div", "rem") and number == 1:
        return np.copysign(np.exp(normal), rng.standard_normal(size, np.float32))
    if name in _INSIDE_ONE:
        return np.tanh(normal) * np.float32(0.99)
    if name == "acosh":
        return 1 + np.abs(normal)
    if name in _ANGLES:
        return rng.uniform(-_MAX_ANGLE, _MAX_ANGLE, size)
    if name == "clamp" and number != 1:
        return np.abs(normal) * (number - 1)
    if name == "convert_element_type" and not jnp.issubdtype(operation.params["new_dtype"], jnp.floating):
        return 100 * np.abs(normal)
    return normal


def _integers(operation: Operation, number: int, rng: np.random.Generator, *, size: int) -> np.ndarray:
    name, dtype = operation.name, operation.operands[number].dtype
    if dtype.kind == "b":
        return rng.random(size) < 0.5
    if name == "select_n" and number == 0:
        return rng.integers(0, len(operation.operands) - 1, size)
    if name in _SHIFTS and number == 1:
        return rng.integers(0, 8 * dtype.itemsize, size)
    if name in ("div", "rem") and number == 1:
        return rng.integers(1, 100, size)
    if name == "clamp" and number != 1:
        return rng.integers(0, 100, size) + 100 * (number == 2)
    if name in SUMS or operation.is_collective:
        return rng.integers(0 if dtype.kind == "u" else -3, 4, size)
    if dtype.kind == "u":
        return rng.integers(0, 2 ** (8 * dtype.itemsize), size, np.uint64)
    largest = min(1000, 2 ** (8 * dtype.itemsize - 1) - 1)
    return rng.integers(-largest, largest + 1, size)


def _indices(operation: Operation, number: int, rng: np.random.Generator) -> np.ndarray | None:
    """Returns an operand that indexes another one; None for any other operand."""
    name, operands, params = operation.name, operation.operands, operation.params
    shape, dtype = operands[number].shape, operands[number].dtype
    whole = operands[0].shape if operands else ()
    if name == "dynamic_slice" and number > 0:
        highest = whole[number - 1] - params["slice_sizes"][number - 1]
        return np.asarray(rng.integers(0, highest + 1), dtype)
    if name == "dynamic_update_slice" and number > 1:
        dim = number - 2
        return np.asarray(rng.integers(0, whole[dim] - operands[1].shape[dim] + 1), dtype)
    if number != 1 or not (name == "gather" or name.startswith("scatter")):
        return None
    numbers = params["dimension_numbers"]
    if name == "gather":
        dims, window = numbers.start_index_map, params["slice_sizes"]
    else:
        dims, window = numbers.scatter_dims_to_operand_dims, _scatter_window(operands, numbers)
    highest = [whole[dim] - window[dim] for dim in dims]
    if name == "scatter" and len(highest) == 1 and shape[-1] == 1 and math.prod(shape) <= highest[0] + 1:
        return rng.permutation(highest[0] + 1)[: math.prod(shape)].reshape(shape).astype(dtype)
    drawn = [rng.integers(0, high + 1, shape[:-1]) for high in highest]
    return np.stack(drawn, axis=-1).astype(dtype)


def _scatter_window(operands: Sequence[Any], numbers: Any) -> list[int]:
    """Returns the size of an update in each dim of the array that it is written to."""
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter([operands[2].shape[dim] for dim in numbers.update_window_dims])
    return [1 if dim in single else next(sizes) for dim in range(len(operands[0].shape))]
