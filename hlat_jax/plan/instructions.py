"""Estimates how many instructions neuronx-cc makes of a program, from the tiles of its operations.

An estimate is an order of magnitude without calibration. No program has been compiled, and no public count of the
compiler can be compared with it, see `compiler_limits.ESTIMATE_NOTE`. A product is counted as the tensor engine's
instructions. Any other operation counts as one instruction of another engine per tile of its elements. Broadcasts and
reshapes count nothing, and neither does the fusion of elementwise operations. A kernel counts as its reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hlat_jax.passes.jaxpr import CALL_JAXPRS, SAME_ELEMENTS, inner_jaxprs, inner_trips, reference_jaxpr

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
      unrolled: the instructions with every loop unrolled, as the compiler may do.
      looped: the instructions with every loop kept.
      largest: the instructions of one execution of the largest operation.
    """

    unrolled: int
    looped: int
    largest: int

    def count_for_limit(self, name: str) -> int:
        """Returns the instructions to compare with the limit, for a program of this name.

        The loops of `eval` are kept, as 11 of 11 pipelined configs that ran elsewhere exceed the limit without them.
        """
        return self.looped if name == "eval" else self.unrolled


def estimate_instructions(jaxpr: Any, *, num_shards: float) -> Instructions:
    """Returns the instructions of a traced program.

    Args:
      jaxpr: the jaxpr of the whole program. Shapes inside `shard_map` belong to one device.
      num_shards: the number of devices over which an array outside `shard_map` is split.
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
