"""Reads scores in a jaxpr backwards, from the probabilities to the product of queries and keys.

Dropout, softmax, masks, biases, softcap and scale, in this order, as functions write them.
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

# A score with this or less added to it, or in its place, has no weight.
MASKED = -1e4


class NotAttention(Exception):
    """The product does not come from a softmax of a product."""


class Refused(Exception):
    """It does, but with something that the op does not have."""


@dataclasses.dataclass(frozen=True)
class ScoreTerm:
    """An array that is broadcast to the scores.

    Attributes:
      var: variable or literal.
      layout: of `var`.
      is_truth: it is a mask, True where `var` is not 0.
      factor: of the value.
    """

    var: Any
    layout: ArrayAxes
    is_truth: bool = False
    factor: float = 1.0


@dataclasses.dataclass
class Chain:
    """What happens between the first product and the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    biases: list[ScoreTerm] = dataclasses.field(default_factory=list)
    masks: list[ScoreTerm] = dataclasses.field(default_factory=list)
    fills: set[float] = dataclasses.field(default_factory=set)  # what masked scores are set to
    # biases of 0 and a large negative number, with the masks that they are if every query attends to a key
    added: list[tuple[ScoreTerm, list[ScoreTerm]]] = dataclasses.field(default_factory=list)
    zeroed: list[ScoreTerm] = dataclasses.field(default_factory=list)  # masks with which the scores are multiplied


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
            if name == "mul" and self._is_exp(eqn.invars[0]) is self._is_exp(eqn.invars[1]):
                first, second = (self._kept(atom, layout) for atom in eqn.invars)
                found = second or first
                if found is not None and keep is None:
                    keep, factor = found, factor * found.factor
                    var, changed = eqn.invars[0 if found is second else 1], True
            elif (
                name == "select_n" and len(eqn.invars) == 3 and scalar(self.graph, eqn.invars[1]) == 0 and keep is None
            ):
                keep = ScoreTerm(*broadcast_source(self.graph, eqn.invars[0], layout), is_truth=True)
                var, changed = eqn.invars[2], True
        scores, layout, reduced = self._normalized(eqn, var, layout)
        if keep is None and factor != 1.0:
            raise Refused(f"the probabilities are multiplied by {factor:g}")
        keep = None if keep is None else dataclasses.replace(keep, factor=factor)
        return keep, scores, layout, reduced

    def _is_exp(self, atom: Any) -> bool:
        var, _ = through(self.graph, atom, new_layout(atom.aval.shape))
        eqn = self.graph.producer(var)
        return eqn is not None and eqn.primitive.name == "exp"

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
                    return ScoreTerm(source, layout, is_truth=True, factor=factor)
            else:
                return None
            var = eqn.invars[0]

    def _normalized(self, eqn: Any, var: Any, layout: ArrayAxes) -> tuple[Any, ArrayAxes, tuple[Axis, ...]]:
        name = eqn.primitive.name
        if name in ("div", "mul"):
            for weights, total in (tuple(eqn.invars), tuple(reversed(eqn.invars)))[: 1 if name == "div" else 2]:
                found = self._divided(weights, total, layout, inverse=name == "mul")
                if found is not None:
                    return found
        if name == "exp":
            return self._log_softmax(eqn, layout)
        raise NotAttention

    def _divided(self, weights: Any, total: Any, layout: ArrayAxes, *, inverse: bool) -> Any:
        """Returns (scores, layout, axes) of weights / total, or of weights * (1 / total)."""
        weights, weights_layout = through(self.graph, weights, layout)
        exp = self.graph.producer(weights)
        if exp is None or exp.primitive.name != "exp":
            return None
        total, total_layout = broadcast_source(self.graph, total, layout)
        if inverse:
            one = self.graph.producer(total)
            if one is None or not (
                (one.primitive.name == "div" and scalar(self.graph, one.invars[0]) == 1)
                or (one.primitive.name == "integer_pow" and one.params["y"] == -1)
            ):
                return None
            total, total_layout = broadcast_source(self.graph, one.invars[-1], total_layout)
        add = self.graph.producer(total)
        if add is None or add.primitive.name != "reduce_sum":
            return None
        own = new_layout(add.invars[0].aval.shape)
        summed, summed_layout = through(self.graph, add.invars[0], own)
        reduced = reduced_axes(weights_layout, total_layout)
        if (
            summed is not weights
            or not reduced
            or not is_sum_over(add, own, layouts=(summed_layout, weights_layout), total=total_layout)
        ):
            return None
        scores, scores_layout = self._shifted(exp.invars[0], weights_layout, reduced)
        return scores, scores_layout, reduced

    def _log_softmax(self, exp: Any, layout: ArrayAxes) -> tuple[Any, ArrayAxes, tuple[Axis, ...]]:
        """Returns (scores, layout, axes) of exp(scores - log(sum(exp(scores))))."""
        var, layout = through(self.graph, exp.invars[0], layout)
        sub = self.graph.producer(var)
        if sub is None or sub.primitive.name != "sub":
            raise NotAttention
        total, total_layout = broadcast_source(self.graph, sub.invars[1], layout)
        reduced = reduced_axes(layout, total_layout)
        log = self.graph.producer(total)
        if log is not None and log.primitive.name == "add":  # log-sum-exp: log(sum(exp(x - max))) + max
            for atom in log.invars:
                source, source_layout = broadcast_source(self.graph, atom, total_layout)
                one = self.graph.producer(source)
                if one is not None and one.primitive.name == "log":
                    log, total_layout = one, source_layout
                    break
        if not reduced or log is None or log.primitive.name != "log":
            raise NotAttention
        source, total_layout = broadcast_source(self.graph, log.invars[0], total_layout)
        add = self.graph.producer(source)
        if add is not None and add.primitive.name == "abs":
            source, total_layout = broadcast_source(self.graph, add.invars[0], total_layout)
            add = self.graph.producer(source)
        if add is None or add.primitive.name != "reduce_sum":
            raise NotAttention
        own = new_layout(add.invars[0].aval.shape)
        summed, summed_layout = through(self.graph, add.invars[0], own)
        inner = self.graph.producer(summed)
        if inner is None or inner.primitive.name != "exp":
            raise NotAttention
        scores, scores_layout = self._shifted(sub.invars[0], layout, reduced)
        other, other_layout = self._shifted(inner.invars[0], summed_layout, None)
        if other is not scores or not is_sum_over(add, own, layouts=(other_layout, scores_layout), total=total_layout):
            raise NotAttention
        return scores, scores_layout, reduced

    def _shifted(self, var: Any, layout: ArrayAxes, reduced: Sequence[Axis] | None) -> tuple[Any, ArrayAxes]:
        """Returns the scores of which a value that is the same for all keys was subtracted."""
        var, layout = through(self.graph, var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and eqn.primitive.name == "sub":
            shift, shift_layout = broadcast_source(self.graph, eqn.invars[1], layout)
            axes = reduced_axes(layout, shift_layout)
            if not is_literal(shift) and (set(reduced) <= set(axes) if reduced is not None else axes):
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
            if name == "tanh":
                if is_capped:
                    raise Refused("the scores go through tanh twice")
                chain.softcap, after, is_capped = after, 1.0, True
                var = eqn.invars[0]
                continue
            if after != 1.0 and name in ("add", "sub", "select_n", "mul"):
                if self._leads_to_product(eqn):
                    raise Refused("a bias or mask comes before a scale of the scores")
                raise NotAttention
            if is_capped and name in ("add", "sub", "select_n"):
                raise Refused("a bias or mask comes before the softcap")
            following = self._masked(eqn, layout, chain)
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
        """Returns the scores before a bias or mask, which is added to the chain; None for any other equation."""
        name = eqn.primitive.name
        if name == "select_n" and len(eqn.invars) == 3:
            which, *cases = eqn.invars
            for number, other in ((1, 0), (0, 1)):
                masked = scalar(self.graph, cases[other])
                if masked is not None and masked <= MASKED:
                    terms = self._truths(which, layout, negated=number == 0)
                    chain.masks += terms
                    chain.fills.add(masked)
                    return cases[number]
            return None
        if name in ("add", "sub"):
            one, other = eqn.invars
            if name == "add" and self._is_scores(other) and not self._is_scores(one):
                one, other = other, one
            if self._is_scores(other):
                return None
            for term in self._sums(other, layout, 1.0 if name == "add" else -1.0):
                self._add_bias(term, chain)
            return one
        if name == "mul":
            for one, other in (eqn.invars, tuple(reversed(eqn.invars))):
                value = self.graph.constant(other)
                if value is not None and np.isin(value, (0, 1)).all():
                    chain.zeroed.append(ScoreTerm(*broadcast_source(self.graph, other, layout), is_truth=True))
                    return one
        return None

    def _is_scores(self, atom: Any) -> bool:
        """Returns whether a value comes from the product through operations on single elements."""
        todo, seen = [atom], 0
        while todo and seen < 64:
            var, seen = todo.pop(), seen + 1
            eqn = self.graph.producer(var)
            if eqn is None or self.graph.is_constant(var):
                continue
            name = eqn.primitive.name
            if name == "dot_general":
                return True
            if name in ("add", "sub", "mul", "div", "tanh", "select_n", "convert_element_type", "transpose", "reshape"):
                todo += [one for one in eqn.invars if not is_literal(one) and one.aval.size == var.aval.size]
        return False

    def _add_bias(self, term: ScoreTerm, chain: Chain) -> None:
        truths = self._added_masks(term)
        value = self.graph.constant(term.var)
        if value is not None and value.size == 1 and float(term.factor * value.ravel()[0]) > MASKED:
            return  # the softmax does not change
        if truths is None:
            chain.biases.append(term)
        else:
            chain.added.append((term, truths))

    def _added_masks(self, term: ScoreTerm) -> list[ScoreTerm] | None:
        """Returns the masks of a term that is 0 where they are True and large and negative elsewhere, else None."""
        value = self.graph.constant(term.var)
        if value is not None:
            value = term.factor * value
            return [term] if ((value == 0) | (value <= MASKED)).all() and (value == 0).any() else None
        eqn = self.graph.producer(term.var)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "select_n" and len(eqn.invars) == 3:
            cases = [scalar(self.graph, atom) for atom in eqn.invars[1:]]
            if (
                None not in cases
                and max(c * term.factor for c in cases) == 0
                and min(c * term.factor for c in cases) <= MASKED
            ):
                return self._truths(eqn.invars[0], term.layout, negated=cases[0] == 0)
        if name == "mul":
            for one, other in (eqn.invars, tuple(reversed(eqn.invars))):
                number = scalar(self.graph, other)
                if number is not None:
                    var, layout = broadcast_source(self.graph, one, term.layout)
                    return self._added_masks(ScoreTerm(var, layout, factor=term.factor * number))
        is_inverse = name == "sub" and scalar(self.graph, eqn.invars[0]) == 1 and self._is_zero_or_one(eqn.invars[1])
        if is_inverse and term.factor <= MASKED:  # 1 - mask
            return self._truths(eqn.invars[1], term.layout)
        if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool and term.factor <= MASKED:
            return self._truths(eqn.invars[0], term.layout, negated=True)
        return None

    def _sums(self, var: Any, layout: ArrayAxes, factor: float) -> list[ScoreTerm]:
        """Returns the terms of a sum that is added to the scores."""
        var, layout = broadcast_source(self.graph, var, layout)
        eqn = self.graph.producer(var)
        is_sum = eqn is not None and eqn.primitive.name in ("add", "sub") and self.graph.constant(var) is None
        if is_sum and self._added_masks(ScoreTerm(var, layout, factor=factor)) is None:
            first, second = eqn.invars
            sign = 1.0 if eqn.primitive.name == "add" else -1.0
            return self._sums(first, layout, factor) + self._sums(second, layout, sign * factor)
        return [ScoreTerm(var, layout, factor=factor)]

    def _truths(self, var: Any, layout: ArrayAxes, *, negated: bool = False) -> list[ScoreTerm]:
        """Returns the masks whose conjunction is the truth of a value; a negated one has the factor -1."""
        var, layout = broadcast_source(self.graph, var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and self.graph.constant(var) is None:
            name, operands = eqn.primitive.name, eqn.invars
            if name == "not" and var.aval.dtype == bool:
                return self._truths(operands[0], layout, negated=not negated)
            if (name in ("and", "mul", "min") and not negated) or (name == "or" and negated and var.aval.dtype == bool):
                if name in ("and", "or") and var.aval.dtype != bool:
                    return [ScoreTerm(var, layout, is_truth=True, factor=-1.0 if negated else 1.0)]
                if name != "min" or all(self._is_zero_or_one(atom) for atom in operands):
                    return [term for atom in operands for term in self._truths(atom, layout, negated=negated)]
            if name == "convert_element_type" and _keeps_truth(operands[0].aval.dtype, var.aval.dtype):
                return self._truths(operands[0], layout, negated=negated)
            if name in ("ne", "eq", "gt") and not is_literal(operands[0]):
                number = scalar(self.graph, operands[1])
                is_flag = self._is_zero_or_one(operands[0])
                if (name, number) == ("ne", 0) or (is_flag and (name, number) in (("gt", 0), ("eq", 1), ("gt", 0.5))):
                    return self._truths(operands[0], layout, negated=negated)
                if (name, number) == ("eq", 0) or (is_flag and (name, number) == ("ne", 1)):
                    return self._truths(operands[0], layout, negated=not negated)
        return [ScoreTerm(var, layout, is_truth=True, factor=-1.0 if negated else 1.0)]

    def _is_zero_or_one(self, atom: Any) -> bool:
        value = self.graph.constant(atom)
        if value is not None:
            return bool(np.isin(value, (0, 1)).all())
        if atom.aval.dtype == bool:
            return True
        eqn = self.graph.producer(atom)
        if eqn is None:
            return False
        name = eqn.primitive.name
        if name in ("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze"):
            return self._is_zero_or_one(eqn.invars[0])
        return name in ("mul", "min", "max") and all(self._is_zero_or_one(one) for one in eqn.invars)


def _keeps_truth(old: Any, new: Any) -> bool:
    return bool in (old, new) or jnp.issubdtype(old, jnp.integer)
