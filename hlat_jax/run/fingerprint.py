"""The fingerprint, size and arguments of a lowered program.

A fingerprint is a hash of the StableHLO module without source locations. Programs with equal fingerprints are equal for
any compiler; compiler flags and versions are not part of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir import ir

# Operations that compute nothing.
_SCAFFOLD = ("builtin.module", "func.func", "func.return", "stablehlo.return", "sdy.return", "sdy.mesh")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Identity and size of a lowered program.

    Attributes:
      sha256: of its text, the first 16 hexadecimal digits.
      module: its name, by which JAX's cache names its files.
      num_ops: number of operations; those in the body of a loop count once.
      num_arguments: number of arrays that it takes.
      argument_bytes: bytes of all arguments, before sharding.
    """

    sha256: str
    module: str
    num_ops: int
    num_arguments: int
    argument_bytes: int


def fingerprint(lowered: Any) -> Fingerprint:
    """Returns the fingerprint of the result of `jax.jit(fn).lower(...)`."""
    root = lowered.compiler_ir("stablehlo").operation
    text = root.get_asm(enable_debug_info=False)
    [main] = [op for op in root.regions[0].blocks[0] if ir.StringAttr(op.attributes["sym_name"]).value == "main"]
    arguments = [ir.RankedTensorType(value.type) for value in main.regions[0].blocks[0].arguments]
    return Fingerprint(
        sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
        module=root.attributes["sym_name"].value,
        num_ops=sum(op.name not in _SCAFFOLD for op in _operations(root)),
        num_arguments=len(arguments),
        argument_bytes=sum(math.prod(kind.shape) * max(kind.element_type.width, 8) // 8 for kind in arguments),
    )


def _operations(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region:
            for inner in block:
                yield from _operations(inner.operation)
