"""Serialised HLO modules with small instruction ids, rewritten byte by byte: no class of that message is installed.

XLA numbers an instruction by its computation in the upper 32 bits and its place in the lower, so ids of a module from
JAX 0.8.2 on lie around 2^37; Neuron's compiler stops at ids from 2^31. A way through HLO's text keeps them, so the
fields themselves are rewritten. Everything else is copied as it stands.

Owns the wire format and the numbers of the few fields that hold ids. Refuses to know what an instruction does.
Source: xla/service/hlo.proto; protobuf's encoding page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

ID_LIMIT = 2**31

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PROTO_MODULE = 1  # of HloProto
_MODULE_COMPUTATIONS, _MODULE_ID, _MODULE_ENTRY, _MODULE_SCHEDULE = 3, 5, 6, 7  # of HloModuleProto
_COMPUTATION_INSTRUCTIONS, _COMPUTATION_ID, _COMPUTATION_ROOT = 2, 5, 6  # of HloComputationProto
_ID, _OPERANDS, _PREDECESSORS, _CALLED = 35, 36, 37, 38  # of HloInstructionProto


@dataclasses.dataclass(frozen=True)
class Ids:
    """The ids of one computation, as a module has them; `instructions` in their order."""

    computation: int
    root: int
    instructions: tuple[int, ...]
    operands: tuple[int, ...]
    predecessors: tuple[int, ...]
    called: tuple[int, ...]


def renumbered(module: bytes) -> bytes:
    """Returns a serialised HloModuleProto with its instructions and computations numbered from 1, in the same order.

    Raises:
      ValueError: bytes that are no such message, a scheduled module, an id that nothing defines, or too many of them.
    """
    found = ids(module)
    computations = {one.computation: number for number, one in enumerate(found, 1)}
    instructions, count = [], 0
    for one in found:
        # in the order of their ids, by which XLA lists the instructions of a computation that it reads
        instructions.append({old: count + place for place, old in enumerate(sorted(one.instructions), 1)})
        count += len(one.instructions)
    if count >= ID_LIMIT:
        raise ValueError(f"a module of {count:,} instructions; ids must stay below 2^31.")
    numbered = iter(instructions)

    def computation(body: bytes) -> bytes:
        return _computation(body, computations=computations, instructions=next(numbered))

    rules: dict[int, Callable] = {_MODULE_COMPUTATIONS: computation, _MODULE_ENTRY: _through(computations)}
    rules[_MODULE_ID] = lambda _: 1
    return _rewritten(module, rules)


def ids(module: bytes) -> list[Ids]:
    """Returns the ids of every computation of a serialised HloModuleProto.

    Raises:
      ValueError: bytes that are no such message, or a scheduled module, whose schedule names ids too.
    """
    found = []
    for field, kind, value in _fields(module):
        if field == _MODULE_SCHEDULE:
            raise ValueError("this HLO module is scheduled; give one from before the scheduler.")
        if field == _MODULE_COMPUTATIONS and kind == _BYTES:
            found.append(_ids(value))
    if not found:
        raise ValueError(f"{len(module):,} bytes without a computation: no HloModuleProto.")
    return found


def module_of(proto: bytes) -> bytes:
    """Returns the HloModuleProto inside a serialised HloProto, which is what XLA dumps."""
    return next(value for field, kind, value in _fields(proto) if (field, kind) == (_PROTO_MODULE, _BYTES))


def _computation(body: bytes, *, computations: Mapping[int, int], instructions: Mapping[int, int]) -> bytes:
    own = _through(instructions)
    fields = {_ID: own, _OPERANDS: own, _PREDECESSORS: own, _CALLED: _through(computations)}

    def instruction(inner: bytes) -> bytes:
        return _rewritten(inner, fields, packed=(_OPERANDS, _PREDECESSORS, _CALLED))

    rules = {_COMPUTATION_INSTRUCTIONS: instruction, _COMPUTATION_ID: _through(computations), _COMPUTATION_ROOT: own}
    return _rewritten(body, rules)


def _ids(body: bytes) -> Ids:
    number = root = 0
    many: dict[int, list[int]] = {_ID: [], _OPERANDS: [], _PREDECESSORS: [], _CALLED: []}
    for field, kind, value in _fields(body):
        if field == _COMPUTATION_ID:
            number = value
        elif field == _COMPUTATION_ROOT:
            root = value
        elif field == _COMPUTATION_INSTRUCTIONS and kind == _BYTES:
            for key, inner_kind, inner in _fields(value):
                if key in many:
                    many[key] += [inner] if inner_kind == _VARINT else _unpacked(inner)
    return Ids(number, root, *(tuple(many[key]) for key in (_ID, _OPERANDS, _PREDECESSORS, _CALLED)))


def _through(table: Mapping[int, int]) -> Callable[[int], int]:
    def mapped(old: int) -> int:
        if old not in table:
            raise ValueError(f"HLO module refers to id {old}, which nothing in reach defines.")
        return table[old]

    return mapped


def _rewritten(message: bytes, rules: Mapping[int, Callable], packed: tuple[int, ...] = ()) -> bytes:
    """Returns a message with the fields of `rules` mapped: a number, each of packed numbers, or a message inside."""
    out = bytearray()
    for field, kind, value in _fields(message):
        if field in rules:
            rule = rules[field]
            is_list = kind == _BYTES and field in packed
            value = b"".join(_varint(rule(one)) for one in _unpacked(value)) if is_list else rule(value)
        out += _varint(field << 3 | kind)
        if kind == _VARINT:
            out += _varint(value)
        elif kind == _BYTES:
            out += _varint(len(value)) + value
        else:
            out += value
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yields (field, wire type, value) of a message: the number of a varint, the bytes of everything else."""
    at, end = 0, len(message)
    while at < end:
        key, at = _read_varint(message, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield field, kind, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at}: no protobuf message.")
        if at + size > end:
            raise ValueError(f"field {field} is said to have {size:,} bytes, of which {end - at:,} are there.")
        yield field, kind, message[at : at + size]
        at += size


def _unpacked(values: bytes) -> list[int]:
    found, at = [], 0
    while at < len(values):
        value, at = _read_varint(values, at)
        found.append(value)
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError(f"no whole number at byte {at}: no protobuf message.")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
