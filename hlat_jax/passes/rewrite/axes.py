"""Dimensions of arrays as sequences of axes, followed through transposes, reshapes and broadcasts of a jaxpr."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.rewrite.graph import EquationGraph, is_literal


@dataclasses.dataclass(eq=False)
class Axis:
    """A factor of a dimension. A reshape that splits it gives it parts."""

    size: int
    parts: tuple[Axis, ...] = ()


# For each dimension of an array its axes, outermost first; a dimension of size 1 has none.
ArrayAxes = tuple[tuple[Axis, ...], ...]


def leaves_of(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Returns the axes without those that were split, in order: their parts stand for them."""
    return tuple(leaf for axis in axes for leaf in (leaves_of(axis.parts) if axis.parts else (axis,)))


def all_leaves(layout: ArrayAxes) -> tuple[Axis, ...]:
    """Returns the leaves of all dimensions."""
    return tuple(leaf for axes in layout for leaf in leaves_of(axes))


def new_layout(shape: Sequence[int]) -> ArrayAxes:
    """Returns the layout of an array whose dimensions are axes of their own."""
    return tuple((Axis(size),) if size > 1 else () for size in shape)


def size_of(axes: Sequence[Axis]) -> int:
    """Returns the number of positions along axes together."""
    return math.prod(axis.size for axis in axes)


def _spans(groups: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(group) for group in groups])
    return [(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)]


def scalar(graph: EquationGraph, atom: Any) -> float | None:
    """Returns the number of which all elements of a constant are; None if there is none."""
    if not is_literal(atom):
        atom, _ = broadcast_source(graph, atom, new_layout(atom.aval.shape))
    if atom.aval.size > 4096 and not is_literal(atom) and graph.producer(atom) is None:
        return None
    value = graph.constant(atom)
    if value is None or not value.size or value.dtype == bool or not np.isreal(value).all():
        return None
    first = value.ravel()[0]
    return float(first) if (value == first).all() else None


def through(graph: EquationGraph, var: Any, layout: ArrayAxes) -> tuple[Any, ArrayAxes]:
    """Returns what a value is a view or a change of dtype of, and its layout; nothing is broadcast in between."""
    while True:
        eqn = graph.producer(var)
        before = None if eqn is None else _layout_before(eqn, layout, may_broadcast=False)
        if before is None:
            return var, layout
        var, layout = eqn.invars[0], before


def broadcast_source(graph: EquationGraph, var: Any, layout: ArrayAxes) -> tuple[Any, ArrayAxes]:
    """Returns the smallest array of which a value is a view, with its layout; its dtype is the same."""
    if len(layout) != len(var.aval.shape):
        return var, tuple(() for _ in var.aval.shape)  # a scalar
    while not is_literal(var):
        eqn = graph.producer(var)
        if eqn is None or (var.aval.dtype != eqn.invars[0].aval.dtype if eqn.invars else True):
            break
        before = _layout_before(eqn, layout, may_broadcast=True)
        if before is None:
            break
        var, layout = eqn.invars[0], before
    shape = var.aval.shape
    return var, tuple(axes if size > 1 else () for axes, size in zip(layout, shape, strict=True))


def _layout_before(eqn: Any, layout: ArrayAxes, *, may_broadcast: bool) -> ArrayAxes | None:
    """Returns the layout of the operand of an equation that only views it; None for any other equation."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape if eqn.invars else ()
    if name in ("convert_element_type", "copy", "copy_p", "name"):
        is_float = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
        return layout if name != "convert_element_type" or is_float else None
    if name == "transpose":
        before: list[Any] = [()] * len(shape)
        for axes, dim in zip(layout, eqn.params["permutation"], strict=True):
            before[dim] = axes
        return tuple(before)
    if name == "squeeze":
        rest = iter(layout)
        return tuple(() if dim in eqn.params["dimensions"] else next(rest) for dim in range(len(shape)))
    if name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        new = [size for dim, size in enumerate(eqn.params["shape"]) if dim not in dims]
        grown = any(eqn.params["shape"][dim] != size for dim, size in zip(dims, shape, strict=True))
        if not may_broadcast and (grown or math.prod(new) > 1):
            return None
        return tuple(layout[dim] if size > 1 else () for dim, size in zip(dims, shape, strict=True))
    if name == "reshape" and eqn.params["dimensions"] is None:
        return _regrouped(layout, shape)
    return None


def _regrouped(layout: ArrayAxes, shape: Sequence[int]) -> ArrayAxes | None:
    """Returns the layout of an array of another shape with the same elements in order; None if no axis can be split."""
    left = list(all_leaves(layout))
    if math.prod(axis.size for axis in left) != math.prod(shape):
        return None  # it has broadcast dimensions
    found = []
    for size in shape:
        axes: list[Axis] = []
        while math.prod(axis.size for axis in axes) < size:
            axis, need = left.pop(0), size // math.prod(one.size for one in axes)
            if axis.size > need:
                if axis.size % need:
                    return None
                axis.parts = (Axis(need), Axis(axis.size // need))
                left.insert(0, axis.parts[1])
                axis = axis.parts[0]
            axes.append(axis)
        if math.prod(axis.size for axis in axes) != size:
            return None
        found.append(tuple(axes))
    return tuple(found)


def reduced_axes(layout: ArrayAxes, total: ArrayAxes) -> tuple[Axis, ...]:
    """Returns the axes of a layout that another lacks."""
    left = set(all_leaves(total))
    return tuple(axis for axis in all_leaves(layout) if axis not in left)


def is_sum_over(add: Any, own: ArrayAxes, *, layouts: tuple[ArrayAxes, ArrayAxes], total: ArrayAxes) -> bool:
    """Returns whether a sum is over the axes that `total` lacks, with its results where `total` has them.

    Args:
      add: the sum.
      own: layout of its operand, by axes of its own.
      layouts: of one array by those axes, and by the axes of `total`.
      total: layout of the result.
    """
    summed = {leaf for dim in add.params["axes"] for leaf in leaves_of(own[dim])}
    left = set(all_leaves(total))
    places = {leaf: dim for dim, axes in enumerate(layouts[0]) for leaf in leaves_of(axes)}
    for one, other in zip(*layouts, strict=True):
        found = {leaf in summed for leaf in leaves_of(one)} | {leaf not in left for leaf in leaves_of(other)}
        if len(found) > 1:
            return False
    kept = [
        places.get(leaf) for dim, axes in enumerate(own) if dim not in add.params["axes"] for leaf in leaves_of(axes)
    ]
    dims = [dim for number, dim in enumerate(kept) if not number or kept[number - 1] != dim]
    if None in dims or len(set(dims)) < len(dims):
        return False
    return tuple(leaf for dim in dims for leaf in leaves_of(layouts[1][dim])) == all_leaves(total)


def arranged(x: Any, layout: ArrayAxes, groups: Sequence[Sequence[Axis]], *, sizes: dict, full: bool = False) -> Any:
    """Returns an array with one dimension for each group of axes, 1 where it has none of them.

    Args:
      x: NumPy or JAX array.
      layout: of it.
      groups: axes, in order.
      sizes: size of each axis, for those that `x` lacks.
      full: whether axes that `x` lacks are broadcast; otherwise only where it has others of the group.
    """
    leaves = all_leaves(layout)
    x = x.reshape([sizes[axis] for axis in leaves])
    order = [axis for group in groups for axis in group if axis in leaves]
    x = x.transpose([leaves.index(axis) for axis in order])
    shape, target = [], []
    for group in groups:
        has = full or any(axis in leaves for axis in group)
        shape += [sizes[axis] if axis in leaves else 1 for axis in group]
        target += [sizes[axis] if has else 1 for axis in group]
    x = (np if isinstance(x, np.ndarray | np.generic) else jnp).broadcast_to(x.reshape(shape), target)
    return x.reshape([math.prod(target[start:stop]) for start, stop in _spans(groups)])
