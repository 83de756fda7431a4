"""Reads scores in a jaxpr backwards, from the probabilities to the product of queries and keys.

Dropout, softmax, masks, softcap and scale, in this order, as functions write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.rewrite.axes import (
    ArrayAxes,
    Axis,
    broadcast_source,
    is_sum_over,
    new_layout,
    reduced_axes,
    scalar,
    through,
)
from hlat_jax.passes.rewrite.graph import EquationGraph, is_literal

# A score with this or less in its place has no weight.
MASKED = -1e4


class NotAttention(Exception):
    """The product does not come from a softmax of a product."""


class Refused(Exception):
    """It does, but with something that the op does not have."""


@dataclasses.dataclass(frozen=True)
class ScoreTerm:
    """A mask that is broadcast to the scores: True where the array is not 0, or with a negative factor where it is.

    Attributes:
      var: variable or literal.
      layout: of `var`.
      factor: of what dropout keeps.
    """

    var: Any
    layout: ArrayAxes
    factor: float = 1.0


@dataclasses.dataclass
class Chain:
    """What happens between the first product and the softmax; `fills`: what masked scores are set to."""

    scale: float = 1.0
    softcap: float | None = None
    masks: list[ScoreTerm] = dataclasses.field(default_factory=list)
    fills: set[float] = dataclasses.field(default_factory=set)


class Scores:
    """Reads the scores of one candidate."""

    def __init__(self, graph: EquationGraph):
        self.graph = graph

    def softmax(self, probs: Any, layout: ArrayAxes) -> tuple[ScoreTerm | None, Any, ArrayAxes, tuple[Axis, ...]]:
        """Returns (what dropout keeps, the scores, their layout, the axes of the softmax)."""
        keep, factor, var, changed = None, 1.0, probs, True
        while changed:
            changed = False
            var, layout = through(self.graph, var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                raise NotAttention
            name = eqn.primitive.name
            following = self._scaled(eqn)
            if following is not None:
                var, number = following
                factor, changed = factor * number, True
                continue
            if name == "mul":
                first, second = (self._kept(atom, layout) for atom in eqn.invars)
                found = second or first
                if found is not None and keep is None:
                    keep, factor = found, factor * found.factor
                    var, changed = eqn.invars[0 if found is second else 1], True
            elif (
                name == "select_n" and len(eqn.invars) == 3 and scalar(self.graph, eqn.invars[1]) == 0 and keep is None
            ):
                keep = ScoreTerm(*broadcast_source(self.graph, eqn.invars[0], layout))
                var, changed = eqn.invars[2], True
        scores, layout, reduced = self._normalized(eqn, layout)
        if keep is None and factor != 1.0:
            raise Refused(f"the probabilities are multiplied by {factor:g}")
        keep = None if keep is None else dataclasses.replace(keep, factor=factor)
        return keep, scores, layout, reduced

    def _kept(self, atom: Any, layout: ArrayAxes) -> ScoreTerm | None:
        """Returns the bool array of a factor that is 0 where dropout drops and a constant elsewhere."""
        factor, var = 1.0, atom
        while True:
            var, layout = broadcast_source(self.graph, var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                return None
            name = eqn.primitive.name
            if name in ("mul", "div") and scalar(self.graph, eqn.invars[1]) is not None:
                number = scalar(self.graph, eqn.invars[1])
                factor = factor * number if name == "mul" else factor / number
            elif name == "convert_element_type":
                if eqn.invars[0].aval.dtype == bool:
                    source, layout = broadcast_source(self.graph, eqn.invars[0], layout)
                    return ScoreTerm(source, layout, factor=factor)
            else:
                return None
            var = eqn.invars[0]

    def _normalized(self, div: Any, layout: ArrayAxes) -> tuple[Any, ArrayAxes, tuple[Axis, ...]]:
        """Returns (scores, layout, axes) of exp(scores) / sum(exp(scores))."""
        if div.primitive.name != "div":
            raise NotAttention
        weights, weights_layout = through(self.graph, div.invars[0], layout)
        total, total_layout = broadcast_source(self.graph, div.invars[1], layout)
        exp, add = self.graph.producer(weights), self.graph.producer(total)
        if exp is None or exp.primitive.name != "exp" or add is None or add.primitive.name != "reduce_sum":
            raise NotAttention
        own = new_layout(add.invars[0].aval.shape)
        summed, summed_layout = through(self.graph, add.invars[0], own)
        reduced = reduced_axes(weights_layout, total_layout)
        layouts = summed_layout, weights_layout
        if summed is not weights or not reduced or not is_sum_over(add, own, layouts=layouts, total=total_layout):
            raise NotAttention
        scores, scores_layout = self._shifted(exp.invars[0], weights_layout, reduced)
        return scores, scores_layout, reduced

    def _shifted(self, var: Any, layout: ArrayAxes, reduced: Sequence[Axis]) -> tuple[Any, ArrayAxes]:
        """Returns the scores of which a value that is the same for all keys was subtracted."""
        var, layout = through(self.graph, var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and eqn.primitive.name == "sub":
            shift, shift_layout = broadcast_source(self.graph, eqn.invars[1], layout)
            if not is_literal(shift) and {*reduced} <= {*reduced_axes(layout, shift_layout)}:
                return through(self.graph, eqn.invars[0], layout)
        return var, layout

    def chain(self, var: Any, layout: ArrayAxes) -> tuple[Chain, Any, ArrayAxes]:
        """Returns (what happens to the scores, the product that computes them, the layout of its result)."""
        chain, is_capped, after = Chain(), False, 1.0
        while True:
            var, layout = through(self.graph, var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                raise NotAttention
            name = eqn.primitive.name
            if name == "dot_general":
                break
            following = self._scaled(eqn)
            if following is not None:
                var, number = following
                after *= number
                continue
            if name == "tanh" and not is_capped:
                chain.softcap, after, is_capped = after, 1.0, True
                var = eqn.invars[0]
                continue
            following = None if after != 1.0 or is_capped else self._masked(eqn, layout, chain)
            if following is None:
                if self._leads_to_product(eqn):
                    raise Refused(f"the scores go through {name} at {self.graph.source(eqn)}")
                raise NotAttention
            var = following
        chain.scale = after
        if chain.softcap is not None:
            chain.scale = after * chain.softcap  # softcap * tanh(after * product)
            if chain.softcap <= 0:
                raise Refused(f"the scores go through {chain.softcap:g} * tanh")
        return chain, eqn, layout

    def _leads_to_product(self, eqn: Any) -> bool:
        """Returns whether a product of the size of the scores is near, so that a refusal is worth a line."""
        todo, seen = [eqn], 0
        while todo and seen < 40:
            one, seen = todo.pop(), seen + 1
            if one.primitive.name == "dot_general":
                contracted = one.params["dimension_numbers"][0][0]
                is_batched = bool(one.params["dimension_numbers"][1][0])
                return is_batched and bool(contracted)
            todo += [producer for atom in one.invars if (producer := self.graph.producer(atom)) is not None]
        return False

    def _scaled(self, eqn: Any) -> tuple[Any, float] | None:
        name = eqn.primitive.name
        if name == "neg":
            return eqn.invars[0], -1.0
        if name == "mul":
            for one, other in (eqn.invars, reversed(eqn.invars)):
                number = scalar(self.graph, other)
                if number is not None and number != 0:
                    return one, number
        if name == "div" and scalar(self.graph, eqn.invars[1]):
            return eqn.invars[0], 1 / scalar(self.graph, eqn.invars[1])
        return None

    def _masked(self, eqn: Any, layout: ArrayAxes, chain: Chain) -> Any:
        """Returns the scores before a mask, which is added to the chain; None for any other equation."""
        if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
            return None
        which, *cases = eqn.invars
        for number, other in ((1, 0), (0, 1)):
            masked = scalar(self.graph, cases[other])
            if masked is not None and masked <= MASKED:
                chain.masks += self._truths(which, layout, negated=number == 0)
                chain.fills.add(masked)
                return cases[number]
        return None

    def _truths(self, var: Any, layout: ArrayAxes, *, negated: bool = False) -> list[ScoreTerm]:
        """Returns the masks whose conjunction is the truth of a value; a negated one has the factor -1."""
        var, layout = broadcast_source(self.graph, var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and self.graph.constant(var) is None:
            name, operands = eqn.primitive.name, eqn.invars
            if name in ("and", "mul", "min") and not negated and all(map(self._is_zero_or_one, operands)):
                return [term for atom in operands for term in self._truths(atom, layout)]
            if name == "convert_element_type" and _keeps_truth(operands[0].aval.dtype, var.aval.dtype):
                return self._truths(operands[0], layout, negated=negated)
            if name in ("ne", "eq", "gt") and not is_literal(operands[0]):
                number = scalar(self.graph, operands[1])
                is_flag = self._is_zero_or_one(operands[0])
                if (name, number) == ("ne", 0) or (is_flag and (name, number) in (("gt", 0), ("eq", 1), ("gt", 0.5))):
                    return self._truths(operands[0], layout, negated=negated)
        return [ScoreTerm(var, layout, factor=-1.0 if negated else 1.0)]

    def _is_zero_or_one(self, atom: Any) -> bool:
        value = self.graph.constant(atom)
        if value is not None:
            return bool(np.isin(value, (0, 1)).all())
        eqn = self.graph.producer(atom)
        if atom.aval.dtype == bool or eqn is None:
            return atom.aval.dtype == bool
        name = eqn.primitive.name
        is_moved = name in ("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze")
        return is_moved and self._is_zero_or_one(eqn.invars[0])


def _keeps_truth(old: Any, new: Any) -> bool:
    return bool in (old, new) or jnp.issubdtype(old, jnp.integer)
