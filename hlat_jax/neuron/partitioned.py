"""A program split over devices: which collectives run where, and the largest array of one device.

Collectives inside a `shard_map` are in the program already. Those that the partitioner adds, and the shapes it gives,
come from running Shardy, which jaxlib holds and Neuron uses since SDK 2.30, on a copy: for the program's own number of
devices, in seconds, with nothing compiled. Operations that Shardy leaves to XLA's SPMD pass are not seen.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.mlir import ir, passmanager

from hlat_jax import cost
from hlat_jax.byte_sizes import format_bytes
from hlat_jax.neuron.module import Program, Tensor, around_of, attribute, defining, enclosing, name, numbers, tensor
from hlat_jax.neuron.rules import TARGETS

MAX_GROUP_SETS = 16  # 12 before SDK 2.32
LARGE_BYTES = 4 * 10**9
MAX_ARGUMENTS = 128
DONATED_BYTES = 2**20
_GROUPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast")
_SUMS_ADDED, _PERMUTE_ADDED = ("sdy.all_reduce", "sdy.reduce_scatter"), "sdy.collective_permute"
_SHARDY = (
    "sdy-propagation-pipeline,func.func(sdy-insert-explicit-reshards{enable-full-version=true}),"
    "func.func(sdy-reshard-to-collectives)"
)


def _instance(target: str) -> cost.Instance:
    return cost.INSTANCES[TARGETS[target]]


def split(root: Any) -> Program | None:
    """Returns the program with the shardings that Shardy gives every value and the collectives that it adds.

    None for a program of one device, or where this JAX's Shardy has no such pipeline.
    """
    if not Program(root).is_spread:
        return None
    with root.context, ir.Location.unknown():
        copy = root.clone()
        try:
            passmanager.PassManager.parse(f"builtin.module({_SHARDY})").run(copy.operation)
        except (ValueError, ir.MLIRError):
            return None
        return Program(copy.operation)


def group_findings(program: Program, parted: Program | None, *, target: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of CC01 to CC03 over the collectives of a program and those that Shardy adds.

    Also INT03 over the latter; for the program's own, `operators` has it.
    """
    seen: dict[bytes, Any] = {}
    for op, groups in replica_groups(program, parted):
        key = np.asarray(groups, np.int32).tobytes() + str(groups.shape).encode()
        if groups.shape[1] > 1 and key not in seen:
            seen[key] = op
            if not is_regular(groups, cores_per_chip=_instance(target).devices_per_chip()):
                yield "CC03", f"{groups.shape[0]} groups, the first {_short(groups[0])}", op
    if len(seen) > MAX_GROUP_SETS:
        yield "CC01", f"{len(seen)} sets of replica groups", list(seen.values())[-1]
    for op in program.operations:
        if op.name == "stablehlo.collective_permute":
            pairs = numbers(op.attributes["source_target_pairs"])
            why = None if pairs is None else permute_trouble(pairs, target=target)
            if why:
                yield "CC02", why, op
    for op in parted.operations if parted else ():
        kind = tensor(op.results[0]) if op.name in (*_SUMS_ADDED, _PERMUTE_ADDED) else None
        if op.name == _PERMUTE_ADDED:  # another order of axes: the first device keeps its part, others exchange theirs
            yield "CC02", f"{kind}, added by the partitioner: a device sends to itself", _placed(op, parted)
        elif kind is not None and kind.is_integer:
            yield "INT03", f"{kind}, added by the partitioner", op


def replica_groups(program: Program, parted: Program | None) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields every collective but permutes, the program's own and those that Shardy adds, with its groups [n, size]."""
    yield from itertools.chain(_written(program), _added(parted))


def _placed(op: Any, parted: Program) -> Any:
    """Returns an operation that has a Python line: this one, what it reads, or what reads it."""
    near = [op, defining(op.operands[0]), *(use.owner for use in op.results[0].uses)]
    return next((one for one in near if one is not None and parted.frames(one)), op)


def is_regular(groups: np.ndarray, *, cores_per_chip: int) -> bool:
    """Returns whether groups [n, size] are one pattern of strides, laid alike on every chip that they touch."""
    ordered = np.sort(groups, axis=1)
    offsets = ordered - ordered[:, :1]
    if (offsets != offsets[0]).any() or not _is_box(offsets[0]):
        return False
    for group in ordered[: 4 * cores_per_chip]:
        places = {chip: set() for chip in group // cores_per_chip}
        for core in group:
            places[core // cores_per_chip].add(core % cores_per_chip)
        if any(place != places[group[0] // cores_per_chip] for place in places.values()):
            return False
    return True


def _is_box(offsets: np.ndarray) -> bool:
    """Returns whether sorted offsets from 0 are all sums of one multiple of each of a few strides."""
    while offsets.size > 1:
        stride = offsets[1]
        run = 1
        while run < offsets.size and offsets[run] == run * stride:
            run += 1
        if offsets.size % run:
            return False
        blocks = offsets.reshape(-1, run)
        if (blocks - blocks[:, :1] != blocks[0]).any():
            return False
        offsets = blocks[:, 0]
    return True


def permute_trouble(pairs: np.ndarray, *, target: str) -> str | None:
    """Returns why pairs [n, (source, target)] are not rings of neighbouring cores; None when they are.

    Chips of a node form a torus of 4 by 4, row by row; neighbours are on one chip or on linked ones.
    Source: AWS Neuron docs, Trn1 and Trn2 architecture.
    """
    cores_per_chip, devices_per_node = _instance(target).devices_per_chip(), _instance(target).num_devices()
    target_of = dict(pairs.tolist())
    if len(target_of) != len(pairs) or set(target_of) != set(target_of.values()):
        return "not rings: a device sends or receives twice or not at all"
    if any(source == target for source, target in target_of.items()):
        return "a device sends to itself"
    across = sum(a // devices_per_node != b // devices_per_node for a, b in target_of.items())
    if across:
        return f"{across} of {len(pairs)} pairs leave a node of {devices_per_node} devices"

    def are_linked(source: int, to: int) -> bool:
        a, b = (core % devices_per_node // cores_per_chip for core in (source, to))
        rows, columns = (a // 4 - b // 4) % 4, (a % 4 - b % 4) % 4
        return (rows, columns) in ((0, 0), (0, 1), (0, 3), (1, 0), (3, 0))

    apart = sum(not are_linked(source, to) for source, to in target_of.items())
    return f"{apart} of {len(pairs)} pairs are on chips without a link" if apart else None


def argument_findings(program: Program, *, target: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (rule, what, operation) of SH03, DN01 and MEM1: over arguments and results."""
    main = program.main
    arguments = list(main.regions[0].blocks[0].arguments)
    if len(arguments) > MAX_ARGUMENTS:
        yield "SH03", f"{len(arguments)} arguments", main
    attributes = _attributes(main, "arg_attrs", len(arguments))
    results = [tensor(kind) for kind in ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results]
    result_attributes = _attributes(main, "res_attrs", len(results))
    held = [
        _local(tensor(value), sharding_of(attrs), program) for value, attrs in zip(arguments, attributes, strict=True)
    ]
    made = [_local(kind, sharding_of(attrs), program) for kind, attrs in zip(results, result_attributes, strict=True)]
    donated = ["tf.aliasing_output" in attrs or "jax.buffer_donor" in attrs for attrs in attributes]
    free = list(map(str, results))
    for value, is_donated in zip(arguments, donated, strict=True):
        if is_donated and str(tensor(value)) in free:
            free.remove(str(tensor(value)))
    for value, is_donated, local in zip(arguments, donated, held, strict=True):
        kind = tensor(value)
        if not is_donated and kind is not None and str(kind) in free and local.num_bytes >= DONATED_BYTES:
            free.remove(str(kind))
            yield "DN01", f"argument {value_name(value)} {kind}", main
    taken = sum(local.num_bytes for local in held if local is not None)
    total = taken + sum(local.num_bytes for local in made if local is not None)
    total -= sum(local.num_bytes for local, is_donated in zip(held, donated, strict=True) if local and is_donated)
    device = cost.DEVICES[target]
    if max(taken, total) > device.memory_bytes - device.reserved_bytes:
        yield "MEM1", f"arguments and results alone need {format_bytes(max(taken, total))} of a device", main


def size_findings(program: Program) -> Iterator[tuple[str, str, Any]]:
    """Yields SH02 for values of LARGE_BYTES or more on one device, by the shardings that Shardy gave.

    In a program for several devices the values of functions inside it are judged where they are called.
    """
    for op in program.operations:
        if program.is_spread and _function_around(op) not in (None, name(program.main)):
            continue
        if op.name == "func.func":
            values = list(op.regions[0].blocks[0].arguments) if op.regions[0].blocks else []
            shardings = [sharding_of(attrs) for attrs in _attributes(op, "arg_attrs", len(values))]
        else:
            values = list(op.results)
            keys = ("sdy.sharding", "out_shardings", "out_sharding")  # of any operation, of a region, of a collective
            per_value = next((str(op.attributes[key]) for key in keys if key in op.attributes), "")
            shardings = re.findall(r"<@\w+, \[.*?\](?:, replicated=\{.*?\})?>", per_value)
        inside = around_of(op, "sdy.manual_computation") is not None
        for number, value in enumerate(values):
            kind = tensor(value)
            if kind is None or kind.num_bytes < LARGE_BYTES:
                continue
            sharding = shardings[number] if number < len(shardings) and not inside else ""
            local = _local(kind, sharding, program)
            if local.num_bytes >= LARGE_BYTES:
                yield "SH02", f"{local}, {local.num_bytes / 1e9:.1f} GB", op


def local_result(op: Any, program: Program) -> Tensor:
    """Returns the type of an operation's first result as one device holds it, by the shardings that Shardy gave."""
    inside = around_of(op, "sdy.manual_computation") is not None
    return _local(tensor(op.results[0]), "" if inside else sharding_of(str(attribute(op, "sdy.sharding"))), program)


def _function_around(op: Any) -> str | None:
    return name(op) if op.name == "func.func" else enclosing(op)


def value_name(argument: Any) -> str:
    """Returns the name that JAX gave an argument of main, such as state['params']['embed']."""
    found = re.match(r'loc\("(.*)"\)?$', str(argument.location))
    return found.group(1) if found else str(ir.BlockArgument(argument).arg_number)


def sharding_of(attrs: str) -> str:
    """Returns the first sharding in a printed dictionary of attributes, or ""."""
    found = re.search(r"<@\w+, \[.*?\](?:, replicated=\{.*?\})?>", attrs)
    return found.group() if found else ""


def _attributes(function: Any, key: str, count: int) -> list[str]:
    attrs = attribute(function, key)
    return [str(attr) for attr in ir.ArrayAttr(attrs)] if attrs is not None else [""] * count


def _local(kind: Tensor | None, sharding: str, program: Program) -> Tensor | None:
    """Returns the part of a tensor that one device holds under a printed sharding."""
    if kind is None or not sharding:
        return kind
    mesh = program.meshes.get(re.match(r"<@(\w+)", sharding).group(1), {})
    parts = re.findall(r"\{(.*?)\}", sharding)[: len(kind.dims)]
    degrees = [math.prod(mesh.get(axis, 1) for axis in re.findall(r'"([^"]+)"(?!:)', part)) for part in parts]
    degrees += [1] * (len(kind.dims) - len(degrees))
    return Tensor(tuple(-(-(dim or 0) // n) for dim, n in zip(kind.dims, degrees, strict=True)), kind.dtype)


def _written(program: Program) -> Iterator[tuple[Any, np.ndarray]]:
    for op in program.operations:
        if op.name.partition(".")[2] in _GROUPED and op.name.startswith("stablehlo."):
            groups = numbers(op.attributes["replica_groups"])
            if groups is not None and groups.ndim == 2:
                yield op, groups


def _added(parted: Program | None) -> Iterator[tuple[Any, np.ndarray]]:
    for op in parted.operations if parted else ():
        if op.name in ("sdy.all_gather", "sdy.all_reduce", "sdy.reduce_scatter", "sdy.all_to_all"):
            sharding = sharding_of(str(op.attributes["out_sharding"]))
            mesh = parted.meshes[re.match(r"<@(\w+)", sharding).group(1)]
            keys = [key if isinstance(key, str) else key.name for key in op.attributes]
            named = " ".join(str(op.attributes[key]) for key in keys if "axes" in key or key == "params")
            axes = [axis for axis in mesh if f'"{axis}"' in named]
            if axes:
                yield op, groups_along(mesh, axes)


def groups_along(mesh: dict[str, int], axes: list[str]) -> np.ndarray:
    """Returns the groups [n, size] of the devices of a mesh, numbered row-major, that differ along some axes only."""
    numbered = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    names = list(mesh)
    order = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return numbered.transpose(order).reshape(-1, math.prod(mesh[axis] for axis in axes))


def _short(group: np.ndarray) -> str:
    words = [str(core) for core in group[:6]]
    return ", ".join(words + (["..."] if group.size > 6 else []))
