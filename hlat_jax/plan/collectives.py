"""Reads the collectives of a partitioned program from its HLO text: kind, mesh axes, executions and bytes.

The input is `compiled.as_text()` and a mesh, or any object with a `shape` of axis names and sizes. The body of a loop
counts once per trip.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hlat_jax.passes.jaxpr import COLLECTIVES

KINDS = tuple(dict.fromkeys(COLLECTIVES.values()))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a program.

    Attributes:
      kind: one of `KINDS`; a `-start` counts as the collective, its `-done` is left out.
      axes: mesh axes along which the devices of a group differ, outermost first; () if no data leaves a device.
      group_size: number of devices in a group. Less than the product of `axes` if a group has part of an axis; for a
        permute always that product.
      num_arrays: number of arrays of the instruction; compilers merge small collectives.
      payload_bytes: bytes of the full arrays on one device, in one execution: the operand of a reduction or a scatter,
        the result of a gather, what is exchanged or sent.
      trips: executions in one run of the program: the product of the trip counts of the loops around it.
      dtypes: HLO names of the arrays' element types, each once, sorted.
      op_name: its origin, from the metadata.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    num_arrays: int
    payload_bytes: int
    trips: int
    dtypes: tuple[str, ...]
    op_name: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution, by the bus factor of the kind."""
        return self.payload_bytes * bus_factor(self.kind, self.group_size)


@dataclasses.dataclass(frozen=True)
class Count:
    """Sums over collectives of one kind and one set of axes.

    Attributes:
      instructions: number of instructions in the text.
      arrays: number of their arrays; unlike `instructions`, not changed by merging.
      executions: instructions times trips.
      payload_bytes: of all executions, on one device.
      wire_bytes: sent by one device in all executions.
    """

    instructions: int
    arrays: int
    executions: int
    payload_bytes: int
    wire_bytes: float


def count_collectives(hlo_text: str, mesh: Any) -> dict[tuple[str, tuple[str, ...]], Count]:
    """Returns the sums of `collectives` by (kind, axes); collectives that leave no device are left out."""
    return counted(collectives(hlo_text, mesh))


def counted(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], Count]:
    """Returns sums by (kind, axes) of collectives that leave a device, sorted by both."""
    groups = collections.defaultdict(list)
    for collective in found:
        if collective.axes:
            groups[collective.kind, collective.axes].append(collective)
    return {
        key: Count(
            instructions=len(members),
            arrays=sum(c.num_arrays for c in members),
            executions=sum(c.trips for c in members),
            payload_bytes=sum(c.payload_bytes * c.trips for c in members),
            wire_bytes=sum(c.wire_bytes * c.trips for c in members),
        )
        for key, members in sorted(groups.items())
    }


def collectives(hlo_text: str, mesh: Any) -> list[Collective]:
    """Returns the collectives of a program in the order of its execution, callers before callees.

    Args:
      hlo_text: a partitioned module, as `jax.jit(f).lower(...).compile().as_text()` prints it.
      mesh: its `shape` maps the axes to sizes, outermost first; device i of the program is the mesh's i-th, row-major.

    Raises:
      ValueError: a loop that contains a collective has an unknown trip count, or groups are in an unknown notation.
    """
    mesh_shape = tuple(mesh.shape.items())
    computations, entry = _computations(hlo_text)
    holders = _reaching_collectives(computations)
    return list(_walk(entry, 1, computations=computations, holders=holders, mesh_shape=mesh_shape))


def bus_factor(kind: str, group_size: int) -> float:
    """Returns the share of the payload that each of `group_size` devices sends.

    Source: the bus factors of AWS's `nccom-test`: all-reduce 2(r - 1)/r, gather, scatter and exchange (r - 1)/r.
    """
    if kind == "collective-permute":
        return 1.0
    once = (group_size - 1) / group_size
    return 2 * once if kind == "all-reduce" else once


_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})(-start)?\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$|^(ENTRY )?%?([\w.\-]+) \{$")
_CALLEES = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the instruction lines of every computation by its name, and the name of the entry."""
    found, entry, lines = {}, None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[2] or header[4]
            lines = found[name] = []
            if header[1] or header[3]:
                entry = name
        elif line.startswith("}"):
            lines = None
        elif lines is not None and " = " in line:
            lines.append(line)
    if entry is None:
        raise ValueError("the text has no ENTRY computation; give the HLO text of a compiled module.")
    return found, entry


def _callees(line: str) -> Iterator[tuple[str, str]]:
    for role, names in _CALLEES.findall(line):
        for name in re.findall(r"%?([\w.\-]+)", names):
            yield role, name


def _reaching_collectives(computations: dict[str, list[str]]) -> set[str]:
    """Returns the computations that contain a collective, directly or in a computation that they call."""
    callers, pending = collections.defaultdict(set), []
    for name, lines in computations.items():
        for line in lines:
            for _, callee in _callees(line):
                callers[callee].add(name)
        if any(_COLLECTIVE.search(line) for line in lines):
            pending.append(name)
    reached = set()
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending.extend(callers[name])
    return reached


def _walk(name: str, trips: int, **program: Any) -> Iterator[Collective]:
    """Yields the collectives of a computation that runs `trips` times, and of all that it calls."""
    computations, holders = program["computations"], program["holders"]
    for line in computations[name]:
        if match := _COLLECTIVE.search(line):
            yield _collective(line, match, trips=trips, mesh_shape=program["mesh_shape"])
            continue  # its to_apply only reduces two numbers
        for role, callee in _callees(line):
            if callee in holders:
                inner = _trip_count(line, computations) if role in ("body", "condition") else 1
                yield from _walk(callee, trips * inner, **program)


def _trip_count(line: str, computations: dict[str, list[str]]) -> int:
    """Returns the trips of a while: the compiler's annotation, or the bound of a counter that starts at zero."""
    if match := _TRIPS.search(line):
        return int(match[1])
    name = line.split(" = ")[0].strip()
    condition = computations[dict(_callees(line))["condition"]]
    bounds = [match[1] for test in condition if (match := re.search(r" s32\[\]\S* constant\((\d+)\)", test))]
    if len(bounds) != 1 or not any("direction=LT" in test for test in condition):
        raise ValueError(f"loop {name} has a collective, and its trip count is not in the text; use a static scan.")
    return int(bounds[0])


def _collective(line: str, match: re.Match, *, trips: int, mesh_shape: tuple) -> Collective:
    kind, is_start = match[1], match[2] is not None
    arrays = _arrays(line[line.index(" = ") + 3 : match.start()], kind, is_start)
    axes, group_size = _groups(kind, line, mesh_shape)
    num_bytes = sum(size for _, size in arrays) * (group_size if kind == "reduce-scatter" else 1)
    op_name = _OP_NAME.search(line)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        num_arrays=len(arrays),
        payload_bytes=int(num_bytes),
        trips=trips,
        dtypes=tuple(sorted({dtype for dtype, _ in arrays})),
        op_name=op_name[1] if op_name else "",
    )


def _arrays(result_type: str, kind: str, is_start: bool) -> list[tuple[str, float]]:
    """Returns (dtype, bytes) of each array of a result type."""
    arrays = [(dtype, _item_bytes(dtype) * _size(dims)) for dtype, dims in _ARRAY.findall(result_type)]
    if is_start and kind != "all-reduce":
        # (operands, results, context...): the context is scalar, and there are as many results as operands
        arrays = [array for array, dims in zip(arrays, _ARRAY.findall(result_type), strict=True) if dims[1]]
        arrays = arrays[len(arrays) // 2 :]
    if kind == "all-to-all" and len(arrays) > 1:
        # each piece of an exchange is printed; together they are one array
        return [(arrays[0][0], sum(size for _, size in arrays))]
    return arrays


def _size(dims: str) -> int:
    return math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)


def _item_bytes(dtype: str) -> float:
    if dtype == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0  # tokens and opaque values have no size


def _groups(kind: str, line: str, mesh_shape: tuple) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which devices of a group differ, and how many there are in one."""
    if kind == "collective-permute":
        text = re.search(r"source_target_pairs=(\{[\d{},]*\})", line)[1]
    else:
        text = re.search(r"replica_groups=(.*?)(?=, [a-z_]+=[^(]|$)", line)[1]
    return _groups_of(kind, text, mesh_shape)


@functools.lru_cache(maxsize=4096)
def _groups_of(kind: str, text: str, mesh_shape: tuple) -> tuple[tuple[str, ...], int]:
    shape = dict(mesh_shape)
    groups = device_groups(text, math.prod(shape.values()))
    places = np.stack(np.unravel_index(groups, tuple(shape.values())), axis=-1)  # [groups, members, axes]
    differs = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, differ in zip(shape, differs, strict=True) if differ)
    if kind == "collective-permute":
        return axes, math.prod(shape[axis] for axis in axes)
    return axes, groups.shape[1]


def device_groups(text: str, num_devices: int) -> np.ndarray:
    """Returns int [groups, members]: the groups of HLO's text after `replica_groups=` or `source_target_pairs=`.

    Args:
      text: `{{0,1},{2,3}}`, `{}` (all), `[2,4]<=[4,2]T(1,0)`, or `mesh['a'=2,'b'=4], device_ids=([8]) {'b'}`.
      num_devices: of the program.

    Raises:
      ValueError: another notation.
    """
    text = text.strip()
    if text in ("{}", "{{}}"):
        return np.arange(num_devices)[None]
    if text.startswith("{{"):
        return np.array([_ints(group) for group in re.findall(r"\{([\d, ]+)\}", text)])
    if text.startswith("["):
        sizes, order = text.split("<=")
        return _iota(order).reshape(_ints(sizes))
    if text.startswith("mesh["):
        return _mesh_groups(text, num_devices)
    raise ValueError(f"replica groups {text[:80]!r} are in an unknown notation.")


def _iota(text: str) -> np.ndarray:
    """Returns the devices that `[4,2]T(1,0)` lists: numbered in that shape, then transposed."""
    dims, *order = re.findall(r"[\[(]([\d,]+)[\])]", text)
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order[0])) if order else ids


def _mesh_groups(text: str, num_devices: int) -> np.ndarray:
    """Returns the groups over some axes of a mesh, or over parts of axes, such as `'a':(2)4`.

    A part (m)k of an axis of size n splits it into m, k and n / (m k), outermost first, and takes the middle one.
    """
    declared, chosen = re.match(r"mesh\[(.*?)\](.*)$", text).groups()
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", declared)}
    order = re.search(r"device_ids=\((.*?\]\S*)\) ", chosen)
    ids = _iota(order[1]) if order else np.arange(num_devices)
    members = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen[chosen.rindex("{") :])
    cuts = {axis: {1, size} for axis, size in sizes.items()}
    for axis, before, size in members:
        cuts[axis] |= {int(before or 1), int(before or 1) * int(size or sizes[axis])}
    digits = [(axis, low, high) for axis in sizes for low, high in _steps(cuts[axis])]
    inside = [
        i
        for axis, before, size in members
        for i, (name, low, high) in enumerate(digits)
        if name == axis and int(before or 1) <= low and high <= int(before or 1) * int(size or sizes[axis])
    ]
    grid = ids.reshape([high // low for _, low, high in digits])
    outside = [i for i in range(len(digits)) if i not in inside]
    group_size = math.prod(grid.shape[i] for i in inside)
    return grid.transpose(outside + inside).reshape(-1, group_size)


def _steps(cuts: set[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(sorted(cuts))) or [(1, 1)]


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
