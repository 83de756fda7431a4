"""The collectives of a compiled program, read from its HLO text: what XLA on CPU made of those that a trace has.

The body of a loop counts once per trip.
"""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np

from hlat_jax.plan.collectives import KINDS, Collective

_COLLECTIVE = re.compile(rf" ({'|'.join(KINDS)})\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_CALLEES = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.*?)(?=, [a-z_]+=[^(]|$)")


def collectives(hlo_text, mesh):
    """Returns the `Collective`s of a text as `jax.jit(f).lower(...).compile().as_text()` prints it, in its order.

    Device i of the program is the mesh's i-th, row-major. A collective that leaves no device has the axes ().
    """
    computations, entry = _computations(hlo_text)

    @functools.cache
    def inside(name):
        found = []
        for line in computations[name]:
            if match := _COLLECTIVE.search(line):
                found.append(_collective(line, match, mesh))
                continue  # its to_apply only reduces two numbers
            for role, callees in _CALLEES.findall(line):
                for callee in re.findall(r"%?([\w.\-]+)", callees):
                    called = inside(callee)
                    trips = int(_TRIPS.search(line)[1]) if called and role == "body" else 1
                    found += [dataclasses.replace(each, trips=trips * each.trips) for each in called]
        return found

    return inside(entry)


def _computations(text):
    """Returns the instruction lines of every computation by its name, and the name of the entry."""
    computations, entry, lines = {}, None, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None and " = " in line:
            lines.append(line)
    return computations, entry


def _collective(line, match, mesh):
    kind, shape = match[1], dict(mesh.shape)
    groups = device_groups(_GROUPS.search(line)[1], math.prod(shape.values()))
    places = np.stack(np.unravel_index(groups, tuple(shape.values())), axis=-1)  # [groups, members, axes]
    differs = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, differ in zip(shape, differs, strict=True) if differ)
    is_permute = kind == "collective-permute"
    size = math.prod(shape[axis] for axis in axes) if is_permute else groups.shape[1]
    arrays = _ARRAY.findall(line[line.index(" = ") + 3 : match.start()])
    op_name = _OP_NAME.search(line)
    return Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        payload_bytes=sum(map(_num_bytes, arrays)) * (size if kind == "reduce-scatter" else 1),
        num_arrays=1 if kind == "all-to-all" else len(arrays),  # each piece of an exchange is printed
        op_name=op_name[1] if op_name else "",
    )


def _num_bytes(array):
    dtype, dims = array
    bits = 8 if dtype == "pred" else int(re.match(r"[a-z]+(\d+)", dtype)[1])
    return bits * math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim) // 8


def device_groups(text, num_devices):
    """Returns int [groups, members] for HLO's text after `replica_groups=` or `source_target_pairs=`.

    Its forms are `{{0,1},{2,3}}`, `{}` (all), `[2,4]<=[4,2]T(1,0)`, and `mesh['a'=2,'b'=4], device_ids=([8]) {'b'}`.
    """
    if text in ("{}", "{{}}"):
        return np.arange(num_devices)[None]
    if text.startswith("{{"):
        return np.array([_ints(group) for group in re.findall(r"\{([\d, ]+)\}", text)])
    if text.startswith("["):
        sizes, order = text.split("<=")
        return _iota(order).reshape(_ints(sizes))
    assert text.startswith("mesh["), text
    return _mesh_groups(text, num_devices)


def _iota(text):
    """Returns the devices that `[4,2]T(1,0)` lists: numbered in that shape, then transposed."""
    dims, *order = re.findall(r"[\[(]([\d,]+)[\])]", text)
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order[0])) if order else ids


def _mesh_groups(text, num_devices):
    """Returns the groups over some axes of a mesh, or over parts of axes, such as `'a':(2)4`.

    A part (m)k of an axis of size n splits it into m, k and n / (m k), outermost first, and takes the middle one.
    """
    declared, chosen = re.match(r"mesh\[(.*?)\](.*)$", text).groups()
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", declared)}
    order = re.search(r"device_ids=\((.*?\]\S*)\) ", chosen)
    ids = _iota(order[1]) if order else np.arange(num_devices)
    parts = {}  # axis -> the range of its divisors that a group spans
    for axis, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen[chosen.rindex("{") :]):
        parts[axis] = int(before or 1), int(before or 1) * int(size or sizes[axis])
    cuts = {axis: sorted({1, size, *parts.get(axis, ())}) for axis, size in sizes.items()}
    digits = [(axis, low, high) for axis in sizes for low, high in itertools.pairwise(cuts[axis])]
    spanned = [axis in parts and parts[axis][0] <= low and high <= parts[axis][1] for axis, low, high in digits]
    grid = ids.reshape([high // low for _, low, high in digits])
    inside = [i for i, is_spanned in enumerate(spanned) if is_spanned]
    outside = [i for i, is_spanned in enumerate(spanned) if not is_spanned]
    return grid.transpose(outside + inside).reshape(-1, math.prod(grid.shape[i] for i in inside))


def _ints(text):
    return [int(number) for number in re.findall(r"\d+", text)]
