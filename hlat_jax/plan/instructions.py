"""Estimates how many instructions neuronx-cc makes of a program, from the tiles of its operations.

An order of magnitude, not calibrated: no program has been compiled, and the one public count of the compiler to compare
with, of SmolLM2-360M, is 1.4 to 3.8 times higher than the estimate. A product is counted as the tensor
engine's instructions, any other operation as one instruction of another engine per tile of its elements; broadcasts and
reshapes count nothing, and neither does the fusion of elementwise operations. A kernel counts as its reference.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hlat_jax.passes.jaxpr import CALL_JAXPRS, SAME_ELEMENTS, inner_jaxprs, inner_trips, reference_jaxpr

NOTE = "an order of magnitude: the one public count of the compiler is 1.4 to 3.8 times higher"
# Numbers in the errors of public logs; the documentation gives none.
# Source: github.com/aws-neuron/aws-neuron-sdk/issues/987, 1003 (a program); reports of NCC_EXTP003 (an operation).
PROGRAM_LIMIT = 5_000_000
OPERATION_LIMIT, OPERATION_LIMIT_TRN1 = 300_000, 150_000
# Undocumented. Source: a public launch script of AXLearn for trn2 raises the limit to 20,000,000 by the first; ports of
# other models set the second too, because the first passes of the compiler have a check of their own.
LIMIT_FLAG = "--internal-max-instruction-limit"
PROGRAM_ADVICE = (
    "fewer rows in a microbatch, more parallel.tensor or parallel.pipe; in train.compiler_flags (undocumented) "
    f"{LIMIT_FLAG}=N moves the limit, and --internal-hlo2tensorizer-options='--tiled-inst-limit=N' one before it"
)
PROGRAMS_ADVICE = "train.accumulate=programs (a program holds one microbatch, or one tick of a pipeline)"
OPERATION_ADVICE = (
    "fewer rows in a microbatch, a shorter data.seq_len, more parallel.tensor; for the loss model.cross_entropy=chunked"
)
_ROWS, _COLUMNS, _DEPTH = 128, 512, 128  # one product of the tensor engine. Source: NKI docs, nki.isa.nc_matmul
_TILE = 128 * 512  # partitions by a bank of PSUM, of the other engines. Source: NKI docs, architecture guide
_LOOPS = {"scan", "while", "cond", "shard_map", "pallas_call", *CALL_JAXPRS}
_VIEWS = SAME_ELEMENTS | {"optimization_barrier", "sharding_constraint"}
# Operations that read or write a part of a large array -> the operand that has the size of that part.
_UPDATES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
_READ = ("reduce_", "argm", "cumsum", "sort")  # operations whose operand is larger than their result


@dataclasses.dataclass(frozen=True)
class Instructions:
    """Estimated instructions of one program on one device.

    Attributes:
      unrolled: of the program with every loop unrolled, as the compiler may do.
      looped: of the program with every loop kept.
      largest: of one execution of its largest operation.
    """

    unrolled: int
    looped: int
    largest: int

    def count_for_limit(self, name: str) -> int:
        """Returns what is compared with the limit, for a program of this name.

        Of `eval` the loops are kept: 11 of 11 pipelined configs that ran elsewhere are above the limit without them.
        """
        return self.looped if name == "eval" else self.unrolled


def program_limit(compiler_flags: str) -> int:
    """Returns the instructions of a program at which the compiler stops, under flags such as NEURON_CC_FLAGS."""
    given = re.findall(rf"{LIMIT_FLAG}[= ](\d+)", compiler_flags)
    return int(given[-1]) if given else PROGRAM_LIMIT


def operation_limit(target: str) -> int:
    """Returns the instructions of one operation above which public logs show errors, by chip or instance type."""
    return OPERATION_LIMIT_TRN1 if target.startswith("trn1") else OPERATION_LIMIT


def program_advice(names: Iterable[str]) -> str:
    """Returns what makes programs of these names smaller; `train` has all microbatches, of train.accumulate=scan."""
    return f"{PROGRAMS_ADVICE}, {PROGRAM_ADVICE}" if "train" in names else PROGRAM_ADVICE


def round_estimate(number: int) -> str:
    """Returns a number with its first two digits, all that an estimate has."""
    step = 10 ** max(0, len(str(number)) - 2)
    return f"{round(number / step) * step:,}"


def estimate_instructions(jaxpr: Any, *, num_shards: float) -> Instructions:
    """Returns the instructions of a traced program.

    Args:
      jaxpr: of the whole program; shapes inside `shard_map` are those of one device.
      num_shards: number of devices that an array outside `shard_map` is split over.
    """
    return total(list(counts(jaxpr, num_shards=num_shards)))


def total(counted: Sequence[tuple[Any, int, int]]) -> Instructions:
    """Returns the instructions of a program from its `counts`."""
    unrolled, looped = sum(trips * tiles for _, tiles, trips in counted), sum(tiles for _, tiles, _ in counted)
    return Instructions(unrolled, looped, max((tiles for _, tiles, _ in counted), default=0))


def counts(jaxpr: Any, *, num_shards: float, trips: int = 1) -> Iterator[tuple[Any, int, int]]:
    """Yields (equation, instructions of one execution, number of executions) for the operations of a jaxpr."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _LOOPS:
            shards = 1 if name == "shard_map" else num_shards
            for inner in inner_jaxprs(eqn):
                yield from counts(inner, num_shards=shards, trips=trips * inner_trips(eqn))
        elif (reference := reference_jaxpr(eqn)) is not None:
            yield from counts(reference, num_shards=num_shards, trips=trips)
        elif name not in _VIEWS:
            yield eqn, _tiles(eqn, num_shards), trips


def _tiles(eqn: Any, num_shards: float) -> int:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        left, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        rows = len(left) - len(contracted) - len(batch)
        depth = math.prod(left[dim] for dim in contracted)
        free = result[len(batch) :]
        small, large = sorted((math.prod(free[:rows]), math.prod(free[rows:])))  # either may be the stationary
        tiles = math.ceil(small / _ROWS) * math.ceil(large / _COLUMNS) * math.ceil(depth / _DEPTH)
        return math.ceil(math.prod(result[: len(batch)]) * tiles / num_shards)
    if name in _UPDATES:
        handled = eqn.invars[_UPDATES[name]]
    else:
        handled = eqn.invars[0] if name.startswith(_READ) else eqn.outvars[0]
    return math.ceil(math.prod(getattr(handled.aval, "shape", ())) / num_shards / _TILE)
