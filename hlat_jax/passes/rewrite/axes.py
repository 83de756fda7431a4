"""Follows the axes of arrays through equations, so that a function may have its dimensions in any order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.independence import links
from hlat_jax.passes.rewrite.graph import EquationGraph

VIEWS = frozenset({"transpose", "squeeze", "broadcast_in_dim", "reshape"})
CASTS = frozenset({"convert_element_type", "copy", "copy_p", "name"})


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
    """One axis, which linked dimensions of several arrays share."""

    size: int


Layout = tuple[Axis | None, ...]  # the axis of each dimension; None of those of size 1
Placed = tuple[Any, Layout]  # a variable or literal, and its layout


def new_layout(shape: Sequence[int]) -> Layout:
    """Returns the layout of an array with a new axis for each dimension."""
    return tuple(Axis(size) if size > 1 else None for size in shape)


def size_of(axes: Sequence[Axis]) -> int:
    """Returns the number of positions along axes together."""
    return math.prod(axis.size for axis in axes)


def linked(eqn: Any, known: Mapping[int, Layout]) -> list[Layout]:
    """Returns the layouts of the operands and results of an equation from the known layouts, by number.

    Dimensions that are linked to no known dimension get new axes.
    """
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    layouts: list[list[Axis | None]] = [[None] * len(shape) for shape in shapes]
    for link in links(eqn):
        ends = [(at, dim) for at, dim in enumerate((*link.operands, *link.results)) if dim is not None]
        known_axes = [known[at][dim] for at, dim in ends if at in known]
        axis = known_axes[0] if known_axes else Axis(shapes[ends[0][0]][ends[0][1]])
        for at, dim in ends:
            if axis is not None and shapes[at][dim] == axis.size > 1:
                layouts[at][dim] = axis
    return [tuple(layout) for layout in layouts]


def operands_of(graph: EquationGraph, one: Placed, names: Collection[str]) -> list[Placed] | None:
    """Returns the operands of the equation that computes a value, or None if it has none of these names.

    It is None too if an operand has a dimension without a link to the value, such as a dimension that a reshape splits.
    """
    eqn = graph.producer(one[0])
    if eqn is None or eqn.primitive.name not in names:
        return None
    operands = list(zip(eqn.invars, linked(eqn, {len(eqn.invars): one[1]}), strict=False))
    is_known = all(
        axis or size == 1 for atom, layout in operands for axis, size in zip(layout, atom.aval.shape, strict=True)
    )
    return operands if is_known else None


def source_of(graph: EquationGraph, one: Placed, *, names: Collection[str] = VIEWS) -> Placed:
    """Returns the array from which equations of these names, with one operand each, compute a value."""
    while (operands := operands_of(graph, one, names)) is not None:
        (one,) = operands
    return one


def arranged(
    x: Any, layout: Layout, groups: Sequence[Sequence[Axis]], *, sizes: Mapping[Axis, int], full: bool = False
) -> Any:
    """Returns an array with one dimension for each group of axes, of size 1 if it has none of them.

    Args:
      x: NumPy or JAX array.
      layout: layout of the array.
      groups: axes of each dimension of the result, in order.
      sizes: size of each axis.
      full: whether all axes that `x` lacks are broadcast, or only axes of groups of which `x` has another axis.
    """
    own, order = [axis for axis in layout if axis], [axis for group in groups for axis in group]
    x = x.reshape([sizes[axis] for axis in own]).transpose([own.index(axis) for axis in order if axis in own])
    x = x.reshape([sizes[axis] if axis in own else 1 for axis in order])
    is_wide = [full or any(axis in own for axis in group) for group in groups]
    shapes = [[sizes[axis] if wide else 1 for axis in group] for wide, group in zip(is_wide, groups, strict=True)]
    broadcast_to = (np if isinstance(x, np.ndarray | np.generic) else jnp).broadcast_to
    return broadcast_to(x, [size for shape in shapes for size in shape]).reshape([math.prod(one) for one in shapes])
