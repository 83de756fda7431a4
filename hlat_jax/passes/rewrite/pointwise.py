"""What an array goes through elementwise, such as scores before a softmax, read by its values.

Spellings do not matter: the equations are evaluated at single numbers of the array and for both values of each mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hlat_jax.passes.jaxpr import ELEMENTWISE, is_literal, rebind, without_consts
from hlat_jax.passes.rewrite.axes import VIEWS, Axis, Layout, Placed, arranged, operands_of
from hlat_jax.passes.rewrite.graph import EquationGraph

MASKED = -1e4  # a score with this or less in its place has no weight
_POINTWISE = (ELEMENTWISE | VIEWS) - {"stop_gradient"}
_MOST = 80  # equations
_MOST_FLAGS = 4
_SCORES = (-16.0, 0.5, 16.0)  # at every position; a mask of -1e9 that is added absorbs them
_POWERS = 2.0 ** np.arange(-6, 21)
_GRID = np.concatenate([_POWERS, -_POWERS]).astype(np.float32)  # at one position
_TOLERANCE = 1e-5
_TRUTHS = (np.True_, np.False_)
_compiled: dict[str, Callable[..., Any]] = {}  # text of a jaxpr -> it, compiled; of this process


class NotAttention(Exception):
    """The product does not come from a softmax of a product."""


class Refused(ValueError):
    """It does, but with something that the op does not have."""


class Flag(NamedTuple):
    """A bool array; scores or probabilities are kept where it has the value `when`."""

    array: Placed
    when: bool


class Pointwise:
    """The elementwise equations from one array and bool arrays to another array.

    Attributes:
      axes: of the other array.
      start: the array, which an equation computes for which `is_start` holds.
      flags: the bool arrays.
      others: arrays that are neither.
    """

    def __init__(self, graph: EquationGraph, end: Placed, is_start: Callable[[Any], bool], *, whole: bool = False):
        """Reads backwards from `end`; with `whole`, a bool array that is computed from others is one flag."""
        self.graph, self._end, self._is_start, self._whole = graph, end, is_start, whole
        self.axes: list[Axis] = [axis for axis in end[1] if axis]
        self._leaves: dict[Placed, list[Placed]] = {}
        self._starts = lambda one: (eqn := graph.producer(one[0])) is not None and is_start(eqn)
        leaves = self._leaves_of(end)
        starts = [one for one in leaves if self._starts(one)]
        if not starts:
            raise NotAttention
        self.start = starts[0]
        self.flags = [one for one in leaves if one[0].aval.dtype == bool]
        self.others = [one for one in leaves if one not in (self.start, *self.flags)]

    def _leaves_of(self, one: Placed) -> list[Placed]:
        """Returns what is not constant, and not computed elementwise from bool arrays or the start."""
        if self.graph.is_constant(one[0]):
            return []
        if one not in self._leaves:
            if len(self._leaves) > _MOST:
                raise NotAttention
            self._leaves[one] = [one]
            operands = None if self._starts(one) else operands_of(self.graph, one, _POINTWISE)
            leaves = dict.fromkeys(leaf for operand in operands or () for leaf in self._leaves_of(operand))
            is_open = all(leaf[0].aval.dtype == bool for leaf in leaves) and not (
                self._whole and one[0].aval.dtype == bool
            )
            if leaves and (is_open or any(map(self._starts, leaves))):
                self._leaves[one] = list(leaves)
        return self._leaves[one]

    def with_whole_masks(self) -> Pointwise | None:
        """Returns the same equations with masks that are computed from others as one each; None if they are so."""
        return None if self._whole else Pointwise(self.graph, self._end, self._is_start, whole=True)

    def value(self, number: Any, truths: Sequence[bool], *, others: Any = 0.0, at: Sequence[int] = ()) -> Any:
        """Returns the values with a number in the place of the array, in fp32.

        Args:
          number: the number, or numbers if nothing but them has dimensions.
          truths: the values of the flags.
          others: the number in the place of the other arrays.
          at: index of one position, with one dimension for each axis; by default all positions.
        """
        known = dict.fromkeys(self.others, np.float32(others)) | {self.start: number}
        return self._value(self._end, known | dict(zip(self.flags, truths, strict=True)), at)

    def slope(self, truths: Sequence[bool], *, at: Sequence[int]) -> float:
        """Returns the derivative of the value at one position by the number, at 0.5."""
        one = jnp.ones((1,), jnp.float32)
        return float(jnp.sum(jax.jvp(lambda number: self.value(number, truths, at=at), [0.5 * one], [one])[1]))

    def values(self, numbers: Sequence[float], truths: Sequence[bool]) -> list[np.ndarray]:
        """Returns the values for several numbers, with one dimension for each axis, 1 where all are equal."""
        opened, consts = without_consts(jax.make_jaxpr(self.value)(np.float32(0), list(truths)))
        # one pass over large masks; what each layer does alike is compiled once
        run = _compiled.setdefault(str(opened), jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(opened, []))))
        arrays = [np.asarray(*run(*consts, np.float32(number), *truths)) for number in numbers]
        return [one.reshape(one.shape or [1] * len(self.axes)) for one in arrays]

    def _value(self, one: Placed, known: dict[Placed, Any], at: Sequence[int]) -> Any:
        if is_literal(one[0]):
            return _wide(np.asarray(one[0].val, one[0].aval.dtype))
        if one not in known:
            operands = operands_of(self.graph, one, _POINTWISE)
            known[one] = self._folded(one, at) if operands is None else self._computed(one, operands, known, at)
        return known[one]

    def _folded(self, one: Placed, at: Sequence[int]) -> Any:
        (var, layout), eqn = one, self.graph.producer(one[0])
        if eqn is not None and eqn.primitive.name == "iota":
            dim = eqn.params["dimension"]
            value, layout = np.arange(var.aval.shape[dim], dtype=var.aval.dtype), (layout[dim],)
        elif (value := self.graph.constant(var)) is None:
            raise Refused("a constant is too large to be evaluated")
        value = arranged(value, layout, [(axis,) for axis in self.axes], sizes={axis: axis.size for axis in self.axes})
        return _wide(value[tuple(map(min, at, (size - 1 for size in value.shape)))])

    def _computed(self, one: Placed, operands: Sequence[Placed], known: dict, at: Sequence[int]) -> Any:
        eqn = self.graph.producer(one[0])
        values = [self._value(operand, known, at) for operand in operands]
        if eqn.primitive.name == "convert_element_type":
            dtype = one[0].aval.dtype
            return values[0].astype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype)
        return values[0] if eqn.primitive.name in VIEWS else rebind(eqn, jnp.broadcast_arrays(*values))[0]


def _wide(value: Any) -> Any:
    return value.astype(np.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value


class ScoreFunction(NamedTuple):
    """What happens to scores before the softmax.

    Attributes:
      scale: factor of the scores.
      softcap: c: scores become c * tanh(scale * scores / c).
      flags: masks that are not constant.
      allowed: the constant masks together, bool, and the layout.
      is_filled: whether all masked scores are one number.
    """

    scale: float
    softcap: float | None
    flags: list[Flag]
    allowed: tuple[np.ndarray, Layout]
    is_filled: bool


def score_function(region: Pointwise) -> ScoreFunction:
    """Returns what happens to scores. Raises Refused if it is something else."""
    refused = Refused("the scores go through more than a scale, a softcap and masks")
    if region.others or len(region.flags) > _MOST_FLAGS:
        raise refused
    unmasked, fills = [], set()
    for truths in itertools.product(_TRUTHS, repeat=len(region.flags)):
        values = region.values(_SCORES, truths)
        allowed = ~(values[0] <= MASKED)
        if any(((value <= MASKED) == allowed).any() for value in values):
            raise refused
        fills |= {extreme for value in values for extreme in _extremes(value, ~allowed)}
        if allowed.any():
            unmasked.append((truths, allowed, [_extremes(value, allowed) for value in values]))
    if len(unmasked) != 1:
        whole = region.with_whole_masks()  # such as a prefix or what is causal
        if whole is None:
            raise refused
        return score_function(whole)
    ((truths, allowed, shown),) = unmasked
    position = np.unravel_index(np.argmax(allowed), allowed.shape)
    line = np.asarray(region.value(_GRID, truths, at=position))
    hidden = [other for other in itertools.product(_TRUTHS, repeat=len(region.flags)) if other != truths]
    if any(region.slope(other, at=position) for other in hidden):
        raise Refused("a mask that depends on data is added to the scores; set them by jnp.where instead")
    scale, softcap = _scale_and_softcap(line)
    for scores, shown_as in ((_GRID, [line]), *zip(_SCORES, shown, strict=True)):
        expected = scale * scores if softcap is None else softcap * np.tanh(scale * scores / softcap)
        if not scale or not all(np.allclose(one, expected, _TOLERANCE, 1e-6) for one in shown_as):
            raise refused
    layout = tuple(axis if size > 1 else None for axis, size in zip(region.axes, allowed.shape, strict=True))
    return ScoreFunction(scale, softcap, list(map(Flag, region.flags, truths)), (allowed, layout), len(fills) <= 1)


def _extremes(value: np.ndarray, where: np.ndarray) -> list[np.ndarray]:
    """Returns the least and the largest value at some positions, if there are any."""
    if not where.any():
        return []
    return [value.min(where=where, initial=np.inf), value.max(where=where, initial=-np.inf)]


def _scale_and_softcap(line: np.ndarray) -> tuple[float, float | None]:
    """Returns the parameters that fit the values on the grid at its smallest and two largest numbers."""
    scale, (before, most) = float(line[0] / _GRID[0]), line[len(_POWERS) - 2 : len(_POWERS)]
    if before != most or not 0 < most < np.inf:
        return scale, None
    return math.atanh(min(float(line[0] / most), 0.99)) * float(most / _GRID[0]), float(most)


def dropout(region: Pointwise) -> tuple[Flag | None, float]:
    """Returns (what is kept of weights that are divided by their sum, its factor). Raises Refused for anything else."""
    refused = Refused("the probabilities go through more than dropout")
    if len(region.flags) > 1:
        raise refused
    kept = {}
    for truths in itertools.product(_TRUTHS, repeat=len(region.flags)):
        one, quarter = (
            np.asarray(region.value(np.float32(weight), truths, others=total)) for weight, total in ((3, 3), (0.5, 2))
        )
        factor = float(one.flat[0])
        if not np.allclose(one, factor, _TOLERANCE) or not np.allclose(quarter, factor / 4, _TOLERANCE):
            raise refused
        if factor:
            kept[truths] = factor
    if len(kept) != 1 or (not region.flags and not math.isclose(factor, 1.0, rel_tol=_TOLERANCE)):
        raise refused
    ((truths, factor),) = kept.items()
    return Flag(*region.flags, *truths) if region.flags else None, factor
