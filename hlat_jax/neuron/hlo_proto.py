"""Renumbers the instructions of serialized HLO modules, because neuronx-cc fails on ids of 2^31 or more.

Since JAX 0.8.2 ids are around 2^37. XLA puts the computation of an instruction in the upper 32 bits of its id, and its
position in the lower bits. Parsing a module in jaxlib keeps the ids, even from text, and jaxlib does not install the
message classes. So the fields that hold ids are declared here, and protobuf preserves all other fields as unknown
fields. Source: xla/service/hlo.proto.
"""

from __future__ import annotations

import functools
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
# message -> field -> (number, type); a list is a repeated field, a string the name of another message.
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
    },
    "HloProto": {"hlo_module": (1, "HloModuleProto")},
}


def renumber(module: bytes) -> bytes:
    """Returns a serialized HloModuleProto with instructions and computations renumbered from 1 in the same order.

    The module must not be scheduled, as a schedule contains ids too.
    """
    parsed = parse(module)
    computations = {computation.id: new_id for new_id, computation in enumerate(parsed.computations, 1)}
    count = 0
    for computation in parsed.computations:
        # by id, because XLA orders the instructions of a parsed computation by id
        ordered = sorted(instruction.id for instruction in computation.instructions)
        instructions = {old: count + position for position, old in enumerate(ordered, 1)}
        count += len(ordered)
        for instruction in computation.instructions:
            instruction.id = instructions[instruction.id]
            for ids, table in (
                (instruction.operand_ids, instructions),
                (instruction.control_predecessor_ids, instructions),
                (instruction.called_computation_ids, computations),
            ):
                ids[:] = [table[old] for old in ids]
        computation.id, computation.root_id = computations[computation.id], instructions[computation.root_id]
    parsed.entry_computation_id = computations[parsed.entry_computation_id]
    parsed.id = 1
    return parsed.SerializeToString()


def parse(module: bytes) -> Any:
    """Returns a parsed HloModuleProto with the fields of `_MESSAGES`."""
    return _classes()["HloModuleProto"].FromString(module)


def module_from_dump(proto: bytes) -> bytes:
    """Returns the HloModuleProto inside a serialized HloProto, the message that XLA dumps."""
    return _classes()["HloProto"].FromString(proto).hlo_module.SerializeToString()


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
                field.type, field.options.packed = _FIELD.TYPE_INT64, is_list
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"hlat_jax.{name}")) for name in _MESSAGES}
