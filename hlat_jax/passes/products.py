"""The matrix products of a traced program: FLOPs, bytes moved, executions."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from hlat_jax.passes.jaxpr import aval_bytes, equations, reference_jaxpr, without_dead_code

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot"})


def live_jaxpr(traced: Any) -> Any:
    """Returns the jaxpr of a trace without dead code, such as values that only come with the gradients.

    Compilers remove the same code, collectives included.
    """
    return without_dead_code(traced.jaxpr.jaxpr)


def total_flops(jaxpr: core.Jaxpr) -> float:
    """Returns the FLOPs of all products of a program on one device. Every branch of a `cond` counts."""
    return sum(trips * count for count, _, trips in products(jaxpr))


def products(jaxpr: core.Jaxpr, *, trips: int = 1) -> Iterator[tuple[float, int, int]]:
    """Yields (FLOPs, bytes read and written, executions) of every product of a program, on one device."""
    for eqn, times in equations(jaxpr, trips=trips):
        if eqn.primitive.name in PRODUCTS:
            operands = [var.aval for var in (*eqn.invars, *eqn.outvars)]
            yield product_flops(eqn), sum(map(aval_bytes, operands)), times
        elif (reference := reference_jaxpr(eqn)) is not None:  # a kernel keeps what is between its products on the chip
            operands = [var.aval for var in (*eqn.invars, *eqn.outvars)]
            yield total_flops(reference), sum(map(aval_bytes, operands)), times


def products_by_dtype(jaxpr: core.Jaxpr) -> dict[str, int]:
    """Returns the number of products that a program executes, by the dtypes of their operands."""
    counts: collections.Counter[str] = collections.Counter()
    for eqn, trips in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            counts[" x ".join(sorted({str(var.aval.dtype) for var in eqn.invars[:2]}))] += trips
    return dict(counts)


def product_flops(eqn: core.JaxprEqn) -> float:
    """Returns the FLOPs of one product, which are two for each element of the result and each term of its sum.

    Groups of a ragged product count as if they cover the ragged dimension, with each index in one group. The zeros
    that `lhs_dilation` puts between the elements of a convolution do not count, but zeros of its padding do.
    """
    left, right, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "conv_general_dilated":
        terms = math.prod(right.shape) / right.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(out.shape) * terms / math.prod(eqn.params["lhs_dilation"])
    groups: tuple[int, ...] = ()
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        groups = tuple(numbers.rhs_group_dimensions)
    else:
        (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    shared = {*contracted, *batch, *groups}
    return 2.0 * math.prod(left.shape) * math.prod(size for dim, size in enumerate(right.shape) if dim not in shared)


def is_dot_of_vectors(eqn: core.JaxprEqn) -> bool:
    """Returns whether a product only contracts pairs of vectors, with one result each."""
    if eqn.primitive.name != "dot_general":
        return all(var.aval.size <= 1 for var in eqn.outvars)
    (_, (batch, _)), left = eqn.params["dimension_numbers"], eqn.invars[0].aval
    return eqn.outvars[0].aval.size == math.prod(left.shape[dim] for dim in batch)
