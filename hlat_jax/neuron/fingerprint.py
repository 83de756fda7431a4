"""The fingerprint, size and arguments of a lowered program.

A fingerprint is a hash of the StableHLO module without the Python lines it comes from. Equal fingerprints are equal
programs for any compiler; what surrounds a program (flags, versions of compilers) is not in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from hlat_jax.neuron.module import Program, tensor

# Operations that compute nothing.
_SCAFFOLD = ("builtin.module", "func.func", "func.return", "stablehlo.return", "sdy.return", "sdy.mesh")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Identity and size of a lowered program.

    Attributes:
      sha256: of its text, the first 16 hexadecimal digits.
      module: its name, under which JAX's cache files it.
      num_ops: operations; those in the body of a loop count once.
      num_arguments: arrays that it takes.
      argument_bytes: of them all, before they are spread over devices.
    """

    sha256: str
    module: str
    num_ops: int
    num_arguments: int
    argument_bytes: int


def fingerprint(lowered: Any) -> Fingerprint:
    """Returns the fingerprint of what `jax.jit(fn).lower(...)` gave."""
    root = lowered.compiler_ir("stablehlo").operation
    text = root.get_asm(enable_debug_info=False)
    program = Program(root)
    arguments = [tensor(value) for value in program.main.regions[0].blocks[0].arguments]
    return Fingerprint(
        sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
        module=root.attributes["sym_name"].value,
        num_ops=sum(op.name not in _SCAFFOLD for op in program.operations),
        num_arguments=len(arguments),
        argument_bytes=sum(argument.num_bytes for argument in arguments if argument is not None),
    )
