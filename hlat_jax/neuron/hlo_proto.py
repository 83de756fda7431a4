"""Serialised HLO modules with small instruction ids.

XLA numbers an instruction by its computation in the upper 32 bits and its place in the lower, so ids of a module from
JAX 0.8.2 on lie around 2^37; Neuron's compiler stops at ids from 2^31. jaxlib parses a module but keeps its ids, even
by way of its text, and installs no class of the message; so the fields that hold ids are declared here, and protobuf
carries every other field through unchanged. Source: xla/service/hlo.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

ID_LIMIT = 2**31

_FIELD = descriptor_pb2.FieldDescriptorProto
# message -> field -> (number, type); a list type is a repeated field, another message is named.
_MESSAGES = {
    "HloInstructionProto": {
        "id": (35, int),
        "operand_ids": (36, [int]),
        "control_predecessor_ids": (37, [int]),
        "called_computation_ids": (38, [int]),
    },
    "HloComputationProto": {"instructions": (2, ["HloInstructionProto"]), "id": (5, int), "root_id": (6, int)},
    "HloModuleProto": {
        "computations": (3, ["HloComputationProto"]),
        "id": (5, int),
        "entry_computation_id": (6, int),
        "schedule": (7, bytes),
    },
    "HloProto": {"hlo_module": (1, "HloModuleProto")},
}


def renumbered(module: bytes) -> bytes:
    """Returns a serialised HloModuleProto with its instructions and computations numbered from 1, in the same order.

    Raises:
      ValueError: bytes that are not such a message, a scheduled module, an undefined id, or too many instructions.
    """
    parsed = parse(module)
    computations = {one.id: number for number, one in enumerate(parsed.computations, 1)}
    count = 0
    for one in parsed.computations:
        # in the order of their ids, by which XLA lists the instructions of a computation that it reads
        ordered = sorted(instruction.id for instruction in one.instructions)
        instructions = {old: count + place for place, old in enumerate(ordered, 1)}
        count += len(ordered)
        for instruction in one.instructions:
            instruction.id = instructions[instruction.id]
            instruction.operand_ids[:] = _mapped(instruction.operand_ids, instructions)
            instruction.control_predecessor_ids[:] = _mapped(instruction.control_predecessor_ids, instructions)
            instruction.called_computation_ids[:] = _mapped(instruction.called_computation_ids, computations)
        one.id = computations[one.id]
        [one.root_id] = _mapped([one.root_id], instructions)
    if count >= ID_LIMIT:
        raise ValueError(f"a module of {count:,} instructions; ids must stay below 2^31.")
    [parsed.entry_computation_id] = _mapped([parsed.entry_computation_id], computations)
    parsed.id = 1
    return parsed.SerializeToString()


def parse(module: bytes) -> Any:
    """Returns the HloModuleProto of its serialised bytes, with the fields of `_MESSAGES`.

    Raises:
      ValueError: bytes that are not such a message, or a scheduled module, whose schedule holds ids too.
    """
    parsed = _parsed("HloModuleProto", module)
    if parsed.HasField("schedule"):
        raise ValueError("this HLO module is scheduled; give one from before the scheduler.")
    if not parsed.computations:
        raise ValueError(f"{len(module):,} bytes without a computation: not an HloModuleProto.")
    return parsed


def module_of(proto: bytes) -> bytes:
    """Returns the HloModuleProto inside a serialised HloProto, which is what XLA dumps."""
    return _parsed("HloProto", proto).hlo_module.SerializeToString()


def _mapped(ids: Iterable[int], table: Mapping[int, int]) -> list[int]:
    for old in ids:
        if old not in table:
            raise ValueError(f"HLO module refers to id {old}, which is not defined where it is used.")
    return [table[old] for old in ids]


def _parsed(name: str, serialised: bytes) -> Any:
    parsed = _classes()[name]()
    try:
        parsed.ParseFromString(serialised)
    except message.DecodeError as error:
        raise ValueError(f"{len(serialised):,} bytes that are not an {name}: {error}.") from None
    return parsed


@functools.cache
def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="hlo_ids.proto", package="hlat_jax", syntax="proto2")
    for name, fields in _MESSAGES.items():
        declared = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            is_list = isinstance(kind, list)
            item = kind[0] if is_list else kind
            field = declared.field.add(name=key, number=number)
            field.label = _FIELD.LABEL_REPEATED if is_list else _FIELD.LABEL_OPTIONAL
            if isinstance(item, str):
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".hlat_jax.{item}"
            else:
                field.type = {int: _FIELD.TYPE_INT64, bytes: _FIELD.TYPE_BYTES}[item]
                field.options.packed = is_list
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hlat_jax.{name}")) for name in _MESSAGES}
