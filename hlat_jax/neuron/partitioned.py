"""Checks collectives, arguments and the largest array of a device in a program partitioned over devices.

Collectives inside a `shard_map` are already in the program. Shardy, which is part of jaxlib and Neuron's partitioner
since SDK 2.30, runs on a copy to find the other collectives and the local shapes. It runs for the real number of
devices, in seconds, without compiling. Collectives that Shardy leaves to XLA's SPMD pass are not in that copy. The
operations for which that pass adds permutes are found by the shardings of their values (CC06).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.facts import core_groups, hardware
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.core_groups import DISPUTED, FINE, REFUSED
from hlat_jax.neuron.module import (
    Program,
    Tensor,
    argument_owner,
    attribute,
    attribute_numbers,
    body_ops,
    defining_op,
    enclosing_op,
    integers,
    tensor,
)
from hlat_jax.neuron.operators import row_shift

MAX_GROUP_SETS = 16  # 12 before SDK 2.32
MAX_ARGUMENTS = 128
DONATED_BYTES = 2**20
_ROW = 128  # elements
_TABLE_BYTES = 1_610_000_000  # the largest table from which a gather has been seen to be right
_TOO_LARGE_BYTES = 2**32
_NEVER_STORED = ("broadcast_in_dim", "iota", "constant", "reshape")
OF_A_NODE = "leave their node"  # of a permute
_GROUPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast")
_SUMS_ADDED, _PERMUTE_ADDED = ("sdy.all_reduce", "sdy.reduce_scatter"), "sdy.collective_permute"
_ADDED = (*_SUMS_ADDED, _PERMUTE_ADDED, "sdy.all_to_all")
_SHARDING = re.compile(r"<@\w+, \[.*?\](?:, replicated=\{.*?\})?>")
_SHARDINGS = ("sdy.sharding", "out_shardings", "out_sharding")  # of an operation, a region, a collective
_SHARDY = (
    "sdy-propagation-pipeline,func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives)"
)


def run_shardy(root: Any) -> Program | None:
    """Returns a copy of the program with the shardings and collectives that Shardy adds.

    None for a program on one device, or if this jaxlib does not have these Shardy passes.
    """
    if not Program(root).has_many_devices:
        return None
    with root.context, ir.Location.unknown():
        copy = root.clone()
        try:
            passmanager.PassManager.parse(f"builtin.module({_SHARDY})").run(copy.operation)
        except (ValueError, ir.MLIRError):
            return None
        return Program(copy.operation)


def group_findings(
    program: Program, sharded: Program | None, *, target: str, placement: Sequence[int] = ()
) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of CC01 to CC05 for the collectives of a program and those that Shardy adds.

    Also yields INT03 for added collectives. `operators` checks the program's own. `placement` has the device at each
    place of the mesh, and is empty if the devices are in their order.
    """
    seen: dict[tuple[bytes, bool], Any] = {}
    placed = np.asarray(placement, np.int64) if len(placement) else None
    for op, groups in replica_groups(program, sharded):
        exchanges = op.name.endswith("all_to_all")
        key = np.asarray(groups, np.int32).tobytes() + str(groups.shape).encode(), exchanges
        if groups.shape[1] > 1 and key not in seen:
            seen[key] = op
            groups = groups if placed is None else placed[groups]
            server = core_groups.server_for(target, groups.size)  # all devices are in a group
            level, reason = core_groups.verdict(groups, server, all_to_all=exchanges)
            if level != FINE:
                yield {REFUSED: "CC04", DISPUTED: "CC05"}[level], reason, op
    num_sets = len({groups for groups, _ in seen})
    if num_sets > MAX_GROUP_SETS:
        yield "CC01", f"{num_sets} sets of replica groups", list(seen.values())[-1]
    for op in program.operations:
        if op.name == "stablehlo.collective_permute":
            pairs = attribute_numbers(op.attributes["source_target_pairs"])
            if pairs is not None and placed is not None:
                pairs = placed[pairs]
            problem = None if pairs is None else permute_problem(pairs, target=target)
            if problem:
                yield "CC02", problem, op
    for op in sharded.operations if sharded else ():
        kind = tensor(op.results[0]) if op.name in _ADDED else None
        if op.name == _PERMUTE_ADDED:  # a permutation of mesh axes, in which device 0 keeps its shard
            yield "CC02", f"{kind}, added by the partitioner: a device sends to itself", _with_python_line(op, sharded)
        elif kind is not None and kind.is_integer:
            rule = "INT03" if op.name in _SUMS_ADDED else "KB14"
            yield rule, f"{kind}, added by the partitioner", _with_python_line(op, sharded)


def local_findings(owner: Program, *, target: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of CC07, KB11, KB12, and KB13 on cores of two, by a device's part of arrays."""
    for op in owner.operations:
        opcode, hits = op.name.partition(".")[2], []
        kinds = [_local_value(value, owner) for value in op.results if tensor(value) is not None]
        if op == owner.main:
            kinds = [local for _, local in _types(owner, "arg_attrs") if local is not None]
        if opcode in ("gather", *_GROUPED, "collective_permute"):
            given = _local_value(op.operands[0], owner)
            if opcode == "gather":
                hits += [("KB11", given)] if given.num_bytes > _TABLE_BYTES else []
            elif len(given.dims) > 1 and (given.dims[-1] or 0) > _ROW and given.dims[-1] % _ROW:
                hits += [("CC07", given)]
        if opcode not in _NEVER_STORED:
            hits += [("KB12", kind) for kind in kinds if kind.num_bytes >= _TOO_LARGE_BYTES]
        if target == "trn2" and (shift := row_shift(op, owner)):
            hits += [("KB13", shift)]
        for rule, found in hits:
            size = f", {format_bytes(found.num_bytes)}" if rule in ("KB11", "KB12") else ""
            yield rule, f"{found}{size}", op if op == owner.main else _with_python_line(op, owner)


def replica_groups(program: Program, sharded: Program | None) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields (operation, replica groups [n, size]) of all collectives except permutes, including added ones."""
    for op in program.operations:
        if op.name.partition(".")[2] in _GROUPED and op.name.startswith("stablehlo."):
            groups = attribute_numbers(op.attributes["replica_groups"])
            if groups is not None and groups.ndim == 2:
                yield op, groups
    for op in sharded.operations if sharded else ():
        if op.name in ("sdy.all_gather", "sdy.all_reduce", "sdy.reduce_scatter", "sdy.all_to_all"):
            sharding = sharding_of(str(op.attributes["out_sharding"]))
            mesh = sharded.meshes[re.match(r"<@(\w+)", sharding).group(1)]
            keys = [key if isinstance(key, str) else key.name for key in op.attributes]
            named = " ".join(str(op.attributes[key]) for key in keys if "axes" in key or key == "params")
            axes = [axis for axis in mesh if f'"{axis}"' in named]
            if axes:
                yield op, core_groups.groups_along(mesh, axes, devices=np.arange(math.prod(mesh.values())))


def _with_python_line(op: Any, sharded: Program) -> Any:
    """Returns the first operation with a Python line among this one, the producer of its operand and its users."""
    near = [op, defining_op(op.operands[0]), *(use.owner for use in op.results[0].uses)]
    return next((candidate for candidate in near if candidate is not None and sharded.frames(candidate)), op)


def permute_problem(pairs: np.ndarray, *, target: str) -> str | None:
    """Returns why pairs [n, (source, target)] are not rings of neighboring cores, or None if they are.

    The 16 chips of a node form a 4 x 4 torus in row-major order. Neighbors are on the same chip or on linked chips.
    Source: AWS Neuron docs, Trn1 and Trn2 architecture.
    """
    target_of = dict(pairs.tolist())
    if len(target_of) != len(pairs) or set(target_of) != set(target_of.values()):
        return "not rings: some device does not send and receive exactly once"
    if any(source == target for source, target in target_of.items()):
        return "a device sends to itself"
    devices_per_node = core_groups.RULES[target].server
    across = sum(a // devices_per_node != b // devices_per_node for a, b in target_of.items())
    if across:
        return f"{across} of {len(pairs)} pairs {OF_A_NODE}"

    def are_linked(source: int, to: int) -> bool:
        a, b = (core % devices_per_node * 16 // devices_per_node for core in (source, to))
        rows, columns = (a // 4 - b // 4) % 4, (a % 4 - b % 4) % 4
        return (rows, columns) in ((0, 0), (0, 1), (0, 3), (1, 0), (3, 0))

    unlinked = sum(not are_linked(source, to) for source, to in target_of.items())
    return f"{unlinked} of {len(pairs)} pairs are on chips without a link" if unlinked else None


def argument_findings(program: Program, *, target: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of SH03, DN01 and MEM1, the rules for arguments and results."""
    main = program.main
    arguments = list(main.regions[0].blocks[0].arguments)
    if len(arguments) > MAX_ARGUMENTS:
        yield "SH03", f"{len(arguments)} arguments", main
    donated = ["tf.aliasing_output" in a or "jax.buffer_donor" in a for a in _attributes(main, "arg_attrs", arguments)]
    local_arguments, results = _types(program, "arg_attrs"), _types(program, "res_attrs")
    unaliased = [str(whole) for whole, _ in results]  # results that no argument is donated for
    for (whole, _), is_donated in zip(local_arguments, donated, strict=True):
        if is_donated and str(whole) in unaliased:
            unaliased.remove(str(whole))
    argument_bytes, kept_bytes = 0, 0
    for value, is_donated, (whole, local) in zip(arguments, donated, local_arguments, strict=True):
        if whole is None:
            continue
        argument_bytes += local.num_bytes
        kept_bytes += 0 if is_donated else local.num_bytes
        if not is_donated and str(whole) in unaliased and local.num_bytes >= DONATED_BYTES:
            unaliased.remove(str(whole))
            named = re.match(r'loc\("(.*)"\)?$', str(value.location))  # JAX's name: state['params']['embed']
            yield "DN01", f"argument {named[1] if named else ir.BlockArgument(value).arg_number} {whole}", main
    total = kept_bytes + sum(local.num_bytes for _, local in results if local is not None)
    if max(argument_bytes, total) > hardware.DEVICES[target].program_bytes:
        yield "MEM1", f"arguments and results already need {format_bytes(max(argument_bytes, total))} per device", main


def num_shards(program: Program) -> float:
    """Returns the number of devices that split the arguments and results of a program, averaged over their bytes."""
    types = [pair for key in ("arg_attrs", "res_attrs") for pair in _types(program, key) if pair[0] is not None]
    local_bytes = sum(local.num_bytes for _, local in types)
    return sum(whole.num_bytes for whole, _ in types) / local_bytes if local_bytes else 1


def _types(program: Program, key: str) -> list[tuple[Tensor | None, Tensor | None]]:
    """Returns (type, type of one device's part) of each argument or result, whose attributes have a key."""
    main = ir.FunctionType(ir.TypeAttr(program.main.attributes["function_type"]).value)
    wholes = [tensor(kind) for kind in (main.inputs if key == "arg_attrs" else main.results)]
    printed = _attributes(program.main, key, wholes)
    return [
        (whole, _local_type(whole, sharding_of(attrs), program)) for whole, attrs in zip(wholes, printed, strict=True)
    ]


def _local_value(value: Any, program: Program) -> Tensor:
    """Returns the per-device type of a value; inside a manual computation, and without a sharding, its own."""
    op = defining_op(value)
    if op is None:
        argument = ir.BlockArgument(value)
        function = argument_owner(value)
        is_function = function.name == "func.func"
        attributes = _attributes(function, "arg_attrs", argument.owner.arguments) if is_function else []
        printed = attributes[argument.arg_number] if is_function else ""
        return _local_type(tensor(value), sharding_of(printed), program)
    if enclosing_op(op, "sdy.manual_computation") is not None:
        return tensor(value)
    printed = next((str(op.attributes[key]) for key in _SHARDINGS if key in op.attributes), "")
    shardings, index = _SHARDING.findall(printed), ir.OpResult(value).result_number
    return _local_type(tensor(value), shardings[index] if index < len(shardings) else "", program)


def split_dims(value: Any, program: Program) -> set[int]:
    """Returns the dimensions of a value that shardings split over devices."""
    whole, local = tensor(value), _local_value(value, program)
    if whole is None:
        return set()
    return {dim for dim, (size, part) in enumerate(zip(whole.dims, local.dims, strict=True)) if size != part}


def shift_findings(sharded: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (CC06, what, operation) for operations that move elements along a dimension that Shardy splits.

    Shardy leaves them to XLA's SPMD partitioner, which then adds permutes that are not in the program.
    """
    for op in sharded.operations:
        moved = _moved_dims(op)
        dims = moved & split_dims(op.results[0], sharded) if moved else set()
        if dims:
            detail = f"{tensor(op.results[0])} along dimension {min(dims)}, of which a device has "
            detail += f"{_local_value(op.results[0], sharded).dims[min(dims)]}"
            yield "CC06", detail, _with_python_line(op, sharded)


def _moved_dims(op: Any) -> set[int]:
    """Returns the dimensions along which an operation moves elements to other indices."""
    numbers_of, opcode = functools.partial(integers, op), op.name.removeprefix("stablehlo.")
    if opcode == "convolution":
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        windows = [tensor(op.operands[1]).dims[dim] for dim in numbers.kernel_spatial_dimensions]
        strides = numbers_of("window_strides") or [1] * len(windows)
        padding = attribute(op, "padding")
        edges = np.zeros((len(windows), 2)) if padding is None else attribute_numbers(padding)
        parts = zip(numbers.output_spatial_dimensions, windows, strides, edges, strict=True)
        return {dim for dim, window, stride, edge in parts if window > stride or edge.any()}
    if opcode == "slice":
        parts = zip(*(numbers_of(key) for key in ("start_indices", "limit_indices", "strides")), strict=True)
        sizes = tensor(op.operands[0]).dims
        return {dim for dim, part in enumerate(parts) if part != (0, sizes[dim], 1)}
    if opcode == "pad":
        keys = ("edge_padding_low", "edge_padding_high", "interior_padding")
        return {dim for dim, part in enumerate(zip(*map(numbers_of, keys), strict=True)) if any(part)}
    if opcode == "reverse":
        return set(numbers_of("dimensions"))
    if opcode == "concatenate" and len(op.operands) > 1:
        return {ir.IntegerAttr(op.attributes["dimension"]).value}
    if opcode == "reduce_window":
        return {dim for dim, size in enumerate(numbers_of("window_dimensions")) if size > 1}
    return set()


def lookup_findings(sharded: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of KB01 and KB02 for gathers and scatters that shardings split over devices."""
    for op in sharded.operations:
        if op.name == "stablehlo.gather" or (op.name == "stablehlo.scatter" and body_ops(op)):
            split = [value for value in (*op.operands, *op.results) if split_dims(value, sharded)]
            if split:
                rule = "KB01" if op.name == "stablehlo.gather" else "KB02"
                whole, local = tensor(split[0]), _local_value(split[0], sharded)
                yield rule, f"{whole}, of which a device has {local}", _with_python_line(op, sharded)


def sharding_of(attrs: str) -> str:
    """Returns the first sharding in a printed attribute dictionary, or ""."""
    match = _SHARDING.search(attrs)
    return match.group() if match else ""


def _attributes(function: Any, key: str, values: Sequence[Any]) -> list[str]:
    attrs = attribute(function, key)
    return [str(attr) for attr in ir.ArrayAttr(attrs)] if attrs is not None else [""] * len(values)


def _local_type(kind: Tensor | None, sharding: str, program: Program) -> Tensor | None:
    """Returns the per-device type of a tensor under a printed sharding."""
    if kind is None or not sharding:
        return kind
    mesh = program.meshes.get(re.match(r"<@(\w+)", sharding).group(1), {})
    parts = re.findall(r"\{(.*?)\}", sharding)[: len(kind.dims)]
    degrees = [math.prod(mesh.get(axis, 1) for axis in re.findall(r'"([^"]+)"(?!:)', part)) for part in parts]
    degrees += [1] * (len(kind.dims) - len(degrees))
    return Tensor(tuple(-(-(dim or 0) // n) for dim, n in zip(kind.dims, degrees, strict=True)), kind.dtype)
