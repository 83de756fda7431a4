"""Finds attention in a jaxpr: product, scale, softcap, bias, mask, softmax, dropout, product.

The dimensions of the scores are followed through transposes and reshapes as sequences of axes, `_Axis`, so that the
layout of the function does not matter. What the axes are follows from who has them: queries, keys or values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import attention, general_attention
from hlat_jax.ops.dispatch_graph import Choose, Graph, Match, Refusal, is_literal

# A score with this or less added to it, or in its place, has no weight.
_MASKED = -1e4
# Masked scores of at most this are below those that a mask which is added to them leaves.
_LOWEST = -1e29
_OP = "attention"


class _NotAttention(Exception):
    """The product does not come from a softmax of a product."""


class _Refused(Exception):
    """It does, but with something that the op does not have."""


@dataclasses.dataclass(eq=False)
class _Axis:
    """A factor of a dimension. A reshape that splits it gives it parts."""

    size: int
    parts: tuple[_Axis, ...] = ()


# For each dimension of an array its axes, outermost first; a dimension of size 1 has none.
_Layout = tuple[tuple[_Axis, ...], ...]


def _leaves(axes: Sequence[_Axis]) -> tuple[_Axis, ...]:
    return tuple(leaf for axis in axes for leaf in (_leaves(axis.parts) if axis.parts else (axis,)))


def _all_leaves(layout: _Layout) -> tuple[_Axis, ...]:
    return tuple(leaf for axes in layout for leaf in _leaves(axes))


def _new_layout(shape: Sequence[int]) -> _Layout:
    return tuple((_Axis(size),) if size > 1 else () for size in shape)


def _is_sum(add: Any, own: _Layout, layouts: tuple[_Layout, _Layout], total: _Layout) -> bool:
    """Returns whether a sum is over the axes that `total` lacks, with its results where `total` has them.

    Args:
      add: the sum.
      own: layout of its operand, by axes of its own.
      layouts: of one array by those axes, and by the axes of `total`.
      total: layout of the result.
    """
    summed = {leaf for dim in add.params["axes"] for leaf in _leaves(own[dim])}
    left = set(_all_leaves(total))
    places = {leaf: dim for dim, axes in enumerate(layouts[0]) for leaf in _leaves(axes)}
    for one, other in zip(*layouts, strict=True):
        found = {leaf in summed for leaf in _leaves(one)} | {leaf not in left for leaf in _leaves(other)}
        if len(found) > 1:
            return False
    kept = [places.get(leaf) for dim, axes in enumerate(own) if dim not in add.params["axes"] for leaf in _leaves(axes)]
    dims = [dim for number, dim in enumerate(kept) if not number or kept[number - 1] != dim]
    if None in dims or len(set(dims)) < len(dims):
        return False
    return tuple(leaf for dim in dims for leaf in _leaves(layouts[1][dim])) == _all_leaves(total)


@dataclasses.dataclass(frozen=True)
class _Term:
    """An array that is broadcast to the scores.

    Attributes:
      var: variable or literal.
      layout: of `var`.
      is_truth: it is a mask, True where `var` is not 0.
      factor: of the value.
    """

    var: Any
    layout: _Layout
    is_truth: bool = False
    factor: float = 1.0


@dataclasses.dataclass
class _Chain:
    """What happens between the first product and the softmax."""

    scale: float = 1.0
    softcap: float | None = None
    biases: list[_Term] = dataclasses.field(default_factory=list)
    masks: list[_Term] = dataclasses.field(default_factory=list)
    fills: set[float] = dataclasses.field(default_factory=set)  # what masked scores are set to
    # biases of 0 and a large negative number, with the masks that they are if every query attends to a key
    added: list[tuple[_Term, list[_Term]]] = dataclasses.field(default_factory=list)
    zeroed: list[_Term] = dataclasses.field(default_factory=list)  # masks with which the scores are multiplied


def matches(graph: Graph) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each product of probabilities and values."""
    for eqn in graph.eqns:
        if eqn.primitive.name != "dot_general":
            continue
        for side in (0, 1):
            try:
                yield _Reader(graph, eqn, side).match()
            except _NotAttention:
                continue
            except _Refused as refused:
                yield Refusal(_OP, graph.source(eqn), str(refused))
            break


class _Reader:
    """Reads one candidate backwards, from the product of probabilities and values to the queries and keys."""

    def __init__(self, graph: Graph, eqn: Any, side: int):
        self.graph, self.last, self.side = graph, eqn, side

    def match(self) -> Match:
        last = self.last
        probs, values = last.invars[self.side], last.invars[1 - self.side]
        probs_layout = _new_layout(probs.aval.shape)
        keep, scores, layout, reduced = self._softmax(probs, probs_layout)
        chain, first = self._chain(scores, layout)
        q_layout, k_layout = self._operand_layouts(first)
        v_layout, out_layout = self._value_layouts(probs_layout)
        operands = self._operands(first, (q_layout, k_layout), (values, v_layout), set(_leaves(reduced)))
        shape = _Shape(operands, out_layout, set(_leaves(reduced)), last.outvars[0].aval, self._mask_axes(chain))
        terms = _Terms(self, shape, chain, keep)
        _check_precision(first, last)
        return terms.match(first)

    # softmax

    def _softmax(self, probs: Any, layout: _Layout) -> tuple[_Term | None, Any, _Layout, tuple[_Axis, ...]]:
        """Returns (what dropout keeps, the scores, their layout, the axes of the softmax)."""
        keep, factor, var, changed = None, 1.0, probs, True
        while changed:
            changed = False
            var, layout = self._through(var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                raise _NotAttention
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
            elif name == "select_n" and len(eqn.invars) == 3 and self._scalar(eqn.invars[1]) == 0 and keep is None:
                keep = _Term(*self._broadcast_source(eqn.invars[0], layout), is_truth=True)
                var, changed = eqn.invars[2], True
        scores, layout, reduced = self._normalized(eqn, var, layout)
        if keep is None and factor != 1.0:
            raise _Refused(f"the probabilities are multiplied by {factor:g}")
        keep = None if keep is None else dataclasses.replace(keep, factor=factor)
        return keep, scores, layout, reduced

    def _is_exp(self, atom: Any) -> bool:
        var, _ = self._through(atom, _new_layout(atom.aval.shape))
        eqn = self.graph.producer(var)
        return eqn is not None and eqn.primitive.name == "exp"

    def _kept(self, atom: Any, layout: _Layout) -> _Term | None:
        """Returns the bool array of a factor that is 0 where dropout drops and a constant elsewhere."""
        factor, var = 1.0, atom
        while True:
            var, layout = self._broadcast_source(var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                return None
            name = eqn.primitive.name
            if name in ("mul", "div") and self._scalar(eqn.invars[1]) is not None:
                number = self._scalar(eqn.invars[1])
                factor = factor * number if name == "mul" else factor / number
            elif name == "convert_element_type":
                if eqn.invars[0].aval.dtype == bool:
                    source, layout = self._broadcast_source(eqn.invars[0], layout)
                    return _Term(source, layout, is_truth=True, factor=factor)
            else:
                return None
            var = eqn.invars[0]

    def _normalized(self, eqn: Any, var: Any, layout: _Layout) -> tuple[Any, _Layout, tuple[_Axis, ...]]:
        name = eqn.primitive.name
        if name in ("div", "mul"):
            for weights, total in (tuple(eqn.invars), tuple(reversed(eqn.invars)))[: 1 if name == "div" else 2]:
                found = self._divided(weights, total, layout, inverse=name == "mul")
                if found is not None:
                    return found
        if name == "exp":
            return self._log_softmax(eqn, layout)
        raise _NotAttention

    def _divided(self, weights: Any, total: Any, layout: _Layout, *, inverse: bool) -> Any:
        """Returns (scores, layout, axes) of weights / total, or of weights * (1 / total)."""
        weights, weights_layout = self._through(weights, layout)
        exp = self.graph.producer(weights)
        if exp is None or exp.primitive.name != "exp":
            return None
        total, total_layout = self._broadcast_source(total, layout)
        if inverse:
            one = self.graph.producer(total)
            if one is None or not (
                (one.primitive.name == "div" and self._scalar(one.invars[0]) == 1)
                or (one.primitive.name == "integer_pow" and one.params["y"] == -1)
            ):
                return None
            total, total_layout = self._broadcast_source(one.invars[-1], total_layout)
        add = self.graph.producer(total)
        if add is None or add.primitive.name != "reduce_sum":
            return None
        own = _new_layout(add.invars[0].aval.shape)
        summed, summed_layout = self._through(add.invars[0], own)
        reduced = self._reduced_axes(weights_layout, total_layout)
        if summed is not weights or not reduced or not _is_sum(add, own, (summed_layout, weights_layout), total_layout):
            return None
        scores, scores_layout = self._shifted(exp.invars[0], weights_layout, reduced)
        return scores, scores_layout, reduced

    def _log_softmax(self, exp: Any, layout: _Layout) -> tuple[Any, _Layout, tuple[_Axis, ...]]:
        """Returns (scores, layout, axes) of exp(scores - log(sum(exp(scores))))."""
        var, layout = self._through(exp.invars[0], layout)
        sub = self.graph.producer(var)
        if sub is None or sub.primitive.name != "sub":
            raise _NotAttention
        total, total_layout = self._broadcast_source(sub.invars[1], layout)
        reduced = self._reduced_axes(layout, total_layout)
        log = self.graph.producer(total)
        if log is not None and log.primitive.name == "add":  # log-sum-exp: log(sum(exp(x - max))) + max
            for atom in log.invars:
                source, source_layout = self._broadcast_source(atom, total_layout)
                one = self.graph.producer(source)
                if one is not None and one.primitive.name == "log":
                    log, total_layout = one, source_layout
                    break
        if not reduced or log is None or log.primitive.name != "log":
            raise _NotAttention
        source, total_layout = self._broadcast_source(log.invars[0], total_layout)
        add = self.graph.producer(source)
        if add is not None and add.primitive.name == "abs":
            source, total_layout = self._broadcast_source(add.invars[0], total_layout)
            add = self.graph.producer(source)
        if add is None or add.primitive.name != "reduce_sum":
            raise _NotAttention
        own = _new_layout(add.invars[0].aval.shape)
        summed, summed_layout = self._through(add.invars[0], own)
        inner = self.graph.producer(summed)
        if inner is None or inner.primitive.name != "exp":
            raise _NotAttention
        scores, scores_layout = self._shifted(sub.invars[0], layout, reduced)
        other, other_layout = self._shifted(inner.invars[0], summed_layout, None)
        if other is not scores or not _is_sum(add, own, (other_layout, scores_layout), total_layout):
            raise _NotAttention
        return scores, scores_layout, reduced

    def _reduced_axes(self, layout: _Layout, total: _Layout) -> tuple[_Axis, ...]:
        left = set(_all_leaves(total))
        return tuple(axis for axis in _all_leaves(layout) if axis not in left)

    def _shifted(self, var: Any, layout: _Layout, reduced: Sequence[_Axis] | None) -> tuple[Any, _Layout]:
        """Returns the scores of which a value that is the same for all keys was subtracted."""
        var, layout = self._through(var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and eqn.primitive.name == "sub":
            shift, shift_layout = self._broadcast_source(eqn.invars[1], layout)
            axes = self._reduced_axes(layout, shift_layout)
            if not is_literal(shift) and (set(reduced) <= set(axes) if reduced is not None else axes):
                return self._through(eqn.invars[0], layout)
        return var, layout

    # scores

    def _chain(self, var: Any, layout: _Layout) -> tuple[_Chain, Any]:
        """Returns (what happens to the scores, the product that computes them)."""
        chain, is_capped, after, reached = _Chain(), False, 1.0, []
        while True:
            var, layout = self._through(var, layout)
            eqn = self.graph.producer(var)
            if eqn is None:
                raise _NotAttention
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
                    raise _Refused("the scores go through tanh twice")
                chain.softcap, after, is_capped = after, 1.0, True
                var = eqn.invars[0]
                continue
            if after != 1.0 and name in ("add", "sub", "select_n", "mul"):
                if self._leads_to_product(eqn):
                    raise _Refused("a bias or mask comes before a scale of the scores")
                raise _NotAttention
            if is_capped and name in ("add", "sub", "select_n"):
                raise _Refused("a bias or mask comes before the softcap")
            following = self._masked(eqn, layout, chain, reached)
            if following is None:
                if self._leads_to_product(eqn):
                    raise _Refused(f"the scores go through {name} at {self.graph.source(eqn)}")
                raise _NotAttention
            var = following
        chain.scale = after
        if chain.softcap is not None:
            chain.scale = after * chain.softcap  # softcap * tanh(after * product)
            if chain.softcap <= 0:
                raise _Refused(f"the scores go through {chain.softcap:g} * tanh")
        self._scores_layout = layout
        return chain, eqn

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
                number = self._scalar(other)
                if number is not None and number != 0:
                    return one, number
        if name == "div" and self._scalar(eqn.invars[1]):
            return eqn.invars[0], 1 / self._scalar(eqn.invars[1])
        return None

    def _masked(self, eqn: Any, layout: _Layout, chain: _Chain, reached: list) -> Any:
        """Returns the scores before a bias or mask, which is added to the chain; None for any other equation."""
        name = eqn.primitive.name
        if name == "select_n" and len(eqn.invars) == 3:
            which, *cases = eqn.invars
            for number, other in ((1, 0), (0, 1)):
                masked = self._scalar(cases[other])
                if masked is not None and masked <= _MASKED:
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
                    chain.zeroed.append(_Term(*self._broadcast_source(other, layout), is_truth=True))
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

    def _add_bias(self, term: _Term, chain: _Chain) -> None:
        truths = self._added_masks(term)
        value = self.graph.constant(term.var)
        if value is not None and value.size == 1 and float(term.factor * value.ravel()[0]) > _MASKED:
            return  # the softmax does not change
        if truths is None:
            chain.biases.append(term)
        else:
            chain.added.append((term, truths))

    def _added_masks(self, term: _Term) -> list[_Term] | None:
        """Returns the masks of a term that is 0 where they are True and large and negative elsewhere, else None."""
        value = self.graph.constant(term.var)
        if value is not None:
            value = term.factor * value
            return [term] if ((value == 0) | (value <= _MASKED)).all() and (value == 0).any() else None
        eqn = self.graph.producer(term.var)
        if eqn is None:
            return None
        name = eqn.primitive.name
        if name == "select_n" and len(eqn.invars) == 3:
            cases = [self._scalar(atom) for atom in eqn.invars[1:]]
            if (
                None not in cases
                and max(c * term.factor for c in cases) == 0
                and min(c * term.factor for c in cases) <= _MASKED
            ):
                return self._truths(eqn.invars[0], term.layout, negated=cases[0] == 0)
        if name == "mul":
            for one, other in (eqn.invars, tuple(reversed(eqn.invars))):
                number = self._scalar(other)
                if number is not None:
                    var, layout = self._broadcast_source(one, term.layout)
                    return self._added_masks(_Term(var, layout, factor=term.factor * number))
        is_inverse = name == "sub" and self._scalar(eqn.invars[0]) == 1 and self._is_zero_or_one(eqn.invars[1])
        if is_inverse and term.factor <= _MASKED:  # 1 - mask
            return self._truths(eqn.invars[1], term.layout)
        if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool and term.factor <= _MASKED:
            return self._truths(eqn.invars[0], term.layout, negated=True)
        return None

    def _sums(self, var: Any, layout: _Layout, factor: float) -> list[_Term]:
        """Returns the terms of a sum that is added to the scores."""
        var, layout = self._broadcast_source(var, layout)
        eqn = self.graph.producer(var)
        is_sum = eqn is not None and eqn.primitive.name in ("add", "sub") and self.graph.constant(var) is None
        if is_sum and self._added_masks(_Term(var, layout, factor=factor)) is None:
            first, second = eqn.invars
            sign = 1.0 if eqn.primitive.name == "add" else -1.0
            return self._sums(first, layout, factor) + self._sums(second, layout, sign * factor)
        return [_Term(var, layout, factor=factor)]

    def _truths(self, var: Any, layout: _Layout, *, negated: bool = False) -> list[_Term]:
        """Returns the masks whose conjunction is the truth of a value; a negated one has the factor -1."""
        var, layout = self._broadcast_source(var, layout)
        eqn = self.graph.producer(var)
        if eqn is not None and self.graph.constant(var) is None:
            name, operands = eqn.primitive.name, eqn.invars
            if name == "not" and var.aval.dtype == bool:
                return self._truths(operands[0], layout, negated=not negated)
            if (name in ("and", "mul", "min") and not negated) or (name == "or" and negated and var.aval.dtype == bool):
                if name in ("and", "or") and var.aval.dtype != bool:
                    return [_Term(var, layout, is_truth=True, factor=-1.0 if negated else 1.0)]
                if name != "min" or all(self._is_zero_or_one(atom) for atom in operands):
                    return [term for atom in operands for term in self._truths(atom, layout, negated=negated)]
            if name == "convert_element_type" and _keeps_truth(operands[0].aval.dtype, var.aval.dtype):
                return self._truths(operands[0], layout, negated=negated)
            if name in ("ne", "eq", "gt") and not is_literal(operands[0]):
                number = self._scalar(operands[1])
                is_flag = self._is_zero_or_one(operands[0])
                if (name, number) == ("ne", 0) or (is_flag and (name, number) in (("gt", 0), ("eq", 1), ("gt", 0.5))):
                    return self._truths(operands[0], layout, negated=negated)
                if (name, number) == ("eq", 0) or (is_flag and (name, number) == ("ne", 1)):
                    return self._truths(operands[0], layout, negated=not negated)
        return [_Term(var, layout, is_truth=True, factor=-1.0 if negated else 1.0)]

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

    def _mask_axes(self, chain: _Chain) -> set[_Axis]:
        terms = [*chain.masks, *(truth for _, truths in chain.added for truth in truths), *chain.biases]
        return {axis for term in terms for axis in _all_leaves(term.layout)}

    # layouts

    def _scalar(self, atom: Any) -> float | None:
        """Returns the number of which all elements of a constant are; None if there is none."""
        if not is_literal(atom):
            atom, _ = self._broadcast_source(atom, _new_layout(atom.aval.shape))
        if atom.aval.size > 4096 and not is_literal(atom) and self.graph.producer(atom) is None:
            return None
        value = self.graph.constant(atom)
        if value is None or not value.size or value.dtype == bool or not np.isreal(value).all():
            return None
        first = value.ravel()[0]
        return float(first) if (value == first).all() else None

    def _through(self, var: Any, layout: _Layout) -> tuple[Any, _Layout]:
        """Returns what a value is a view or a change of dtype of, and its layout; nothing is broadcast in between."""
        while True:
            eqn = self.graph.producer(var)
            before = None if eqn is None else _layout_before(eqn, layout, may_broadcast=False)
            if before is None:
                return var, layout
            var, layout = eqn.invars[0], before

    def _broadcast_source(self, var: Any, layout: _Layout) -> tuple[Any, _Layout]:
        """Returns the smallest array of which a value is a view, with its layout; its dtype is the same."""
        if len(layout) != len(var.aval.shape):
            return var, tuple(() for _ in var.aval.shape)  # a scalar
        while not is_literal(var):
            eqn = self.graph.producer(var)
            if eqn is None or (var.aval.dtype != eqn.invars[0].aval.dtype if eqn.invars else True):
                break
            before = _layout_before(eqn, layout, may_broadcast=True)
            if before is None:
                break
            var, layout = eqn.invars[0], before
        shape = var.aval.shape
        return var, tuple(axes if size > 1 else () for axes, size in zip(layout, shape, strict=True))

    def _operand_layouts(self, first: Any) -> tuple[_Layout, _Layout]:
        """Returns the layouts of both operands of the first product from that of its result."""
        (left_contracted, right_contracted), (left_batch, right_batch) = first.params["dimension_numbers"]
        left, right = ([None] * len(atom.aval.shape) for atom in first.invars)
        axes = iter(self._scores_layout)
        for one, other in zip(left_batch, right_batch, strict=True):
            left[one] = right[other] = next(axes)
        for layout, contracted in ((left, left_contracted), (right, right_contracted)):
            for dim in range(len(layout)):
                if layout[dim] is None and dim not in contracted:
                    layout[dim] = next(axes)
        for one, other in zip(left_contracted, right_contracted, strict=True):
            left[one] = right[other] = _new_layout([first.invars[0].aval.shape[one]])[0]
        return tuple(left), tuple(right)

    def _value_layouts(self, probs: _Layout) -> tuple[_Layout, _Layout]:
        """Returns the layouts of the values and of the result."""
        contracted, batch = self.last.params["dimension_numbers"]
        values = self.last.invars[1 - self.side]
        layout: list[Any] = [None] * len(values.aval.shape)
        for own, theirs in (*zip(batch[self.side], batch[1 - self.side], strict=True),):
            layout[theirs] = probs[own]
        out = [probs[dim] for dim in batch[self.side]]
        for own, theirs in zip(contracted[self.side], contracted[1 - self.side], strict=True):
            layout[theirs] = probs[own]
        free = [dim for dim, axes in enumerate(layout) if axes is None]
        for dim in free:
            layout[dim] = _new_layout([values.aval.shape[dim]])[0]
        taken = (*batch[self.side], *contracted[self.side])
        own_free = [axes for dim, axes in enumerate(probs) if dim not in taken]
        values_free = [layout[dim] for dim in free]
        out += own_free + values_free if self.side == 0 else values_free + own_free
        return tuple(layout), tuple(out)

    def _operands(self, first: Any, layouts: Any, values: Any, reduced: set[_Axis]) -> Any:
        """Returns ((queries, layout), (keys, layout), (values, layout)), without heads that are repeated."""
        has_keys = [reduced <= set(_all_leaves(layout)) for layout in layouts]
        if has_keys.count(True) != 1 or reduced & set(_all_leaves(layouts[has_keys.index(False)])):
            raise _Refused("the softmax is not over the dimensions that only the keys have")
        number = has_keys.index(True)
        queries = first.invars[1 - number], layouts[1 - number]
        keys = first.invars[number], layouts[number]
        sources = [self._broadcast_source(*one) for one in (keys, values)]
        lost = [
            set(_all_leaves(one[1])) - set(_all_leaves(source[1]))
            for one, source in zip((keys, values), sources, strict=True)
        ]
        if lost[0] and lost[0] == lost[1]:
            keys, values = sources
        return queries, keys, values


def _keeps_truth(old: Any, new: Any) -> bool:
    return bool in (old, new) or jnp.issubdtype(old, jnp.integer)


def _layout_before(eqn: Any, layout: _Layout, *, may_broadcast: bool) -> _Layout | None:
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


def _regrouped(layout: _Layout, shape: Sequence[int]) -> _Layout | None:
    """Returns the layout of an array of another shape with the same elements in order; None if no axis can be split."""
    left = list(_all_leaves(layout))
    if math.prod(axis.size for axis in left) != math.prod(shape):
        return None  # it has broadcast dimensions
    found = []
    for size in shape:
        axes: list[_Axis] = []
        while math.prod(axis.size for axis in axes) < size:
            axis, need = left.pop(0), size // math.prod(one.size for one in axes)
            if axis.size > need:
                if axis.size % need:
                    return None
                axis.parts = (_Axis(need), _Axis(axis.size // need))
                left.insert(0, axis.parts[1])
                axis = axis.parts[0]
            axes.append(axis)
        if math.prod(axis.size for axis in axes) != size:
            return None
        found.append(tuple(axes))
    return tuple(found)


def _same_segments(graph: Graph, term: _Term) -> tuple[Any, _Layout, _Layout] | None:
    """Returns (ids, layout on the queries' side, on the keys' side) of `ids[:, :, None] == ids[:, None, :]`."""
    eqn = graph.producer(term.var)
    if eqn is None or eqn.primitive.name != "eq" or term.factor != 1.0:
        return None
    reader = _Reader(graph, eqn, 0)
    (one, one_layout), (other, other_layout) = (reader._broadcast_source(atom, term.layout) for atom in eqn.invars)
    if one is not other or is_literal(one) or not jnp.issubdtype(one.aval.dtype, jnp.integer):
        return None
    return one, one_layout, other_layout


class _Shape:
    """Which axes are batch, heads, positions: B, K (key-value heads), G (query heads for each), T, S, H."""

    def __init__(self, operands: Any, out_layout: _Layout, reduced: set[_Axis], out: Any, mask_axes: set[_Axis]):
        self.operands, self.out_layout, self.out = operands, out_layout, out
        (self.q, q_layout), (self.k, k_layout), (self.v, v_layout) = operands
        in_q, in_k, in_v = (_all_leaves(layout) for layout in (q_layout, k_layout, v_layout))
        if len({var.aval.dtype for var in (self.q, self.k, self.v)}) > 1:
            raise _Refused("queries, keys and values have different dtypes")
        if not jnp.issubdtype(self.q.aval.dtype, jnp.floating):
            raise _Refused(f"queries have dtype {self.q.aval.dtype}")
        in_out = _all_leaves(out_layout)
        self.S = tuple(axis for axis in in_k if axis in reduced)
        if set(self.S) != reduced or not reduced <= set(in_v) or reduced & set(in_out):
            raise _Refused("the softmax is not over the dimensions that the product with the values sums")
        self.H = tuple(axis for axis in in_q if axis in in_k and axis not in in_out)
        self.V = tuple(axis for axis in in_v if axis not in in_q and axis not in in_k and axis in in_out)
        free = [axis for axis in in_q if axis not in self.H]
        if (
            set(in_out) != {*free, *self.V}
            or set(in_k) - {*free, *self.H, *self.S}
            or set(in_v) - {*free, *self.V, *self.S}
        ):
            raise _Refused("a dimension of the scores is summed with the keys")
        shared = [axis for axis in free if axis in in_k or axis in in_v]
        own = [axis for axis in free if axis not in in_k and axis not in in_v]
        first = _leaves(q_layout[0])
        has_batch = (len(q_layout) > 3 or first) and set(first) <= set(shared)
        self.B = first if has_batch else tuple(shared[:1])
        self.K = tuple(axis for axis in shared if axis not in self.B)
        self.T = self._positions(own, mask_axes)
        self.G = tuple(axis for axis in own if axis not in self.T)
        if not self.T or not self.S or not self.H:
            raise _Refused("there is one query, one key or one feature")
        if _size(self.V) != _size(self.H):
            raise _Refused(f"values have {_size(self.V)} features, keys {_size(self.H)}")

    def _positions(self, own: list[_Axis], mask_axes: set[_Axis]) -> tuple[_Axis, ...]:
        masked = [axis for axis in own if axis in mask_axes]
        same_size = [axis for axis in own if axis.size == _size(self.S)]
        for candidates in (masked, same_size, own):
            if len(candidates) == 1:
                return tuple(candidates)
        best = [axis for axis in masked if axis in same_size] or masked or same_size or own
        return tuple(best[-1:])

    def arranged(self, x: Any, layout: _Layout, groups: Sequence[Sequence[_Axis]], *, sizes: dict, full: bool) -> Any:
        """Returns an array with one dimension for each group of axes, 1 where it has none of them.

        Args:
          x: array.
          layout: of it.
          groups: axes, in order.
          sizes: size of each axis, for those that `x` lacks.
          full: whether axes that `x` lacks are broadcast; otherwise only where it has others of the group.
        """
        leaves = _all_leaves(layout)
        x = x.reshape([sizes[axis] for axis in leaves])
        order = [axis for group in groups for axis in group if axis in leaves]
        x = x.transpose([leaves.index(axis) for axis in order])
        shape, target = [], []
        for group in groups:
            has = full or any(axis in leaves for axis in group)
            shape += [sizes[axis] if axis in leaves else 1 for axis in group]
            target += [sizes[axis] if has else 1 for axis in group]
        x = jnp.broadcast_to(x.reshape(shape), target)
        return x.reshape([math.prod(target[start:stop]) for start, stop in _spans(groups)])

    def sizes(self, arrays: Sequence[Any], layouts: Sequence[_Layout]) -> dict[_Axis, int]:
        """Returns the size of each axis: a dimension that is one axis gives its size, which may have been cut."""
        found = {}
        for layout in layouts:
            found.update({axis: axis.size for axis in _all_leaves(layout)})
        for x, layout in zip(arrays, layouts, strict=True):
            for size, axes in zip(x.shape, layout, strict=True):
                if len(_leaves(axes)) == 1:
                    found[_leaves(axes)[0]] = size
        return found

    def restored(self, out: Any, sizes: dict[_Axis, int]) -> Any:
        """Returns the result [B, T, N, H] in the layout of the function."""
        order = [*self.B, *self.T, *self.K, *self.G, *self.V]
        leaves = _all_leaves(self.out_layout)
        widths = dict(sizes)
        out = out.reshape([widths[axis] for axis in order]).transpose([order.index(axis) for axis in leaves])
        return out.reshape([math.prod(widths[axis] for axis in _leaves(axes)) for axes in self.out_layout])


def _check_precision(*products: Any) -> None:
    """Raises _Refused for products with a precision of their own, which ours do not have."""
    for product in products:
        precision = product.params["precision"]
        each = precision if isinstance(precision, tuple) else (precision,)
        if any(one not in (None, jax.lax.Precision.DEFAULT) for one in each):
            raise _Refused(f"a product has precision={each[0]}")


def _above_masked(bias: jax.Array) -> jax.Array:
    """Returns a bias that is above the scores of masked keys: a query whose keys are all padding attends to those."""
    return jnp.maximum(bias, _LOWEST) if jnp.finfo(bias.dtype).min < _LOWEST else bias


def _size(axes: Sequence[_Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def _spans(groups: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(group) for group in groups])
    return [(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)]


class _Terms:
    """What the op is called with: masks that are proven by their values, segments, and the arrays of all others."""

    def __init__(self, reader: _Reader, shape: _Shape, chain: _Chain, keep: _Term | None):
        self.reader, self.graph, self.shape, self.chain, self.keep = reader, reader.graph, shape, chain, keep
        self.groups = (shape.B, (*shape.K, *shape.G), shape.T, shape.S)
        self.biases = list(chain.biases)
        added = [truth for _, truths in chain.added for truth in truths]
        self._read_masks([*chain.masks, *added])
        has_other_masks = any(self._may_mask(bias) for bias in self.biases)
        if not self.every_query_sees or has_other_masks:
            # added to the scores, so that queries that attend to no key get what the function gives them
            self.biases += [term for term, _ in chain.added]
            self._read_masks(chain.masks)
        if not self.every_query_sees and len(chain.fills) > 1:
            raise _Refused("masked scores are set to different numbers, and a query may attend to no key")
        if (
            chain.masks
            and (has_other_masks or (chain.added and not self.every_query_sees))
            and max(chain.fills) > _LOWEST
        ):
            raise _Refused("masks are set and added, and a query may attend to no key")
        for term in chain.zeroed:
            if not (self._folded(term) | ~self.constant).all():
                raise _Refused("the scores are multiplied by a mask and not set to a large negative number there")

    def _read_masks(self, terms: Sequence[_Term]) -> None:
        self.constant = np.ones((1, 1, 1, 1), bool)  # [B, N, T, S], the conjunction of constant masks
        self.segments: tuple[Any, _Layout] | None = None
        self.masks: list[_Term] = []
        for term in terms:
            self._add_mask(term)
        self._prove()

    def _may_mask(self, bias: _Term) -> bool:
        """Returns whether a bias may be large and negative: it is an input, or computed with such a number."""
        todo, seen = [bias.var], 0
        if self.graph.producer(bias.var) is None and not self.graph.is_constant(bias.var):
            return True
        while todo and seen < 64:
            var, seen = todo.pop(), seen + 1
            if is_literal(var) or self.graph.is_constant(var):
                value = self.graph.constant(var)
                if value is None or (
                    value.dtype != bool and np.abs(value.astype(np.float64)).max(initial=0) >= -_MASKED
                ):
                    return True
                continue
            eqn = self.graph.producer(var)
            if eqn is None and jnp.issubdtype(var.aval.dtype, jnp.inexact):
                return True
            todo += eqn.invars if eqn is not None else []
        return bool(todo)

    def _add_mask(self, term: _Term) -> None:
        if self.graph.constant(term.var) is not None:
            self.constant = self.constant & self._folded(term)
            return
        found = _same_segments(self.graph, term)
        if found is not None and self.segments is None:
            ids, one, other = found
            sides = [set(_all_leaves(layout)) for layout in (one, other)]
            batch = set(_all_leaves(one)) & {*self.shape.B, *self.shape.K}
            swapped = sides == [batch | {*self.shape.S}, batch | {*self.shape.T}]
            if (sides == [batch | {*self.shape.T}, batch | {*self.shape.S}] or swapped) and len(self.shape.T) == len(
                self.shape.S
            ) == 1:
                queries, keys = (other, one) if swapped else (one, other)
                renamed = tuple(
                    tuple(self.shape.T[0] if axis is self.shape.S[0] else axis for axis in _leaves(axes))
                    for axes in keys
                )
                if renamed == tuple(_leaves(axes) for axes in queries) and batch <= {*self.shape.B}:
                    self.segments = ids, queries
                    return
        self.masks.append(term)

    def _folded(self, term: _Term) -> np.ndarray:
        value = self.graph.constant(term.var)
        if value is None:
            raise _Refused("the scores are multiplied by an array")
        truth = value != 0 if term.factor > 0 else value == 0
        value = truth if term.is_truth else term.factor * value > _MASKED
        layout, sizes = term.layout, {}
        for axes in (*self.groups, *layout):
            sizes.update({axis: axis.size for axis in _leaves(axes)})
        extra = set(_all_leaves(layout)) - {axis for group in self.groups for axis in group}
        if extra:
            raise _Refused("a mask has a dimension that the scores do not have")
        return np.asarray(_arranged_constant(value, layout, self.groups, sizes))

    def _prove(self) -> None:
        """Recognizes the constant mask: none, causal, a causal band; what it is otherwise stays an array."""
        for axis in range(4):
            first = self.constant.take([0], axis=axis)
            if (self.constant == first).all():
                self.constant = first
        num_queries, num_keys = _size(self.shape.T), _size(self.shape.S)
        self.causal, self.window = False, None
        self.every_query_sees = self.constant.any(axis=-1).all() and not self.masks
        if (
            self.constant.shape[:2] == (1, 1)
            and self.constant.shape[2:] == (num_queries, num_keys)
            and num_queries == num_keys
        ):
            mask = self.constant[0, 0]
            width = int(mask[-1].sum())
            behind = np.arange(num_queries)[:, None] - np.arange(num_keys)
            if (mask == (behind >= 0)).all():
                self.causal = True
            elif 0 < width < num_keys and (mask == ((behind >= 0) & (behind < width))).all():
                self.causal, self.window = True, width
        if self.segments is not None:
            self.every_query_sees = self.every_query_sees and (self.causal or self.constant.all())
        if self.segments is not None and num_queries != num_keys:
            raise _Refused("segment ids with other keys than queries")

    def match(self, first: Any) -> Match:
        """Returns the match."""
        shape, graph, chain = self.shape, self.graph, self.chain
        arrays: list[tuple[Any, _Layout]] = [(shape.q, shape.operands[0][1]), (shape.k, shape.operands[1][1])]
        arrays.append((shape.v, shape.operands[2][1]))
        plain = len(arrays)
        known = {axis for group in self.groups for axis in group}
        for term in (
            *([_Term(*self.segments)] if self.segments else ()),
            *self.masks,
            *self.biases,
            *([self.keep] if self.keep else ()),
        ):
            if set(_all_leaves(term.layout)) - known:
                raise _Refused("a mask or bias has a dimension that the scores do not have")
            arrays.append((term.var, term.layout))
        extra = None
        if not self.causal and not self.constant.all():
            extra = self.constant
        layouts = [layout for _, layout in arrays]
        positions: dict[Any, int] = {}
        inputs: list[Any] = []
        indices: list[int | None] = []
        for number, (var, _) in enumerate(arrays):
            if number >= plain and (is_literal(var) or (graph.is_constant(var) and graph.constant(var) is not None)):
                indices.append(None)
                continue
            if var not in positions:
                positions[var] = len(inputs)
                inputs.append(var)
            indices.append(positions[var])
        constants = [
            None if index is not None else graph.constant(var) for (var, _), index in zip(arrays, indices, strict=True)
        ]
        has_segments, num_masks, num_biases = self.segments is not None, len(self.masks), len(self.biases)
        causal, window, softcap = self.causal, self.window, chain.softcap
        scale, keep = chain.scale, self.keep
        default_scale = 1 / math.sqrt(_size(shape.H))
        scale_or_none = None if math.isclose(scale, default_scale, rel_tol=1e-6) else scale
        terms = [*self.masks, *self.biases]
        out_dtype = self.reader.last.outvars[0].aval.dtype

        def replacement(choose: Choose, *values: Any) -> list[Any]:
            found = [
                jnp.asarray(const) if index is None else values[index]
                for index, const in zip(indices, constants, strict=True)
            ]
            sizes = shape.sizes(
                [x for x, index in zip(found, indices, strict=True) if index is not None],
                [layout for layout, index in zip(layouts, indices, strict=True) if index is not None],
            )
            for layout in layouts:
                for axis in _all_leaves(layout):
                    sizes.setdefault(axis, axis.size)
            heads = (*shape.K, *shape.G)
            q = shape.arranged(found[0], layouts[0], (shape.B, shape.T, heads, shape.H), sizes=sizes, full=True)
            k = shape.arranged(found[1], layouts[1], (shape.B, shape.S, shape.K, shape.H), sizes=sizes, full=True)
            v = shape.arranged(found[2], layouts[2], (shape.B, shape.S, shape.K, shape.V), sizes=sizes, full=True)
            rest = list(zip(found[plain:], layouts[plain:], strict=True))
            ids = None
            if has_segments:
                x, layout = rest.pop(0)
                ids = shape.arranged(x, layout, (shape.B, shape.T), sizes=sizes, full=True).astype(jnp.int32)
            arranged = [shape.arranged(x, layout, self.groups, sizes=sizes, full=False) for x, layout in rest]
            masks = [
                x != 0 if term.factor > 0 else x == 0
                for x, term in zip(arranged[:num_masks], terms[:num_masks], strict=True)
            ]
            if extra is not None:
                masks.append(jnp.asarray(extra))
            biases = [
                _above_masked(x.astype(jnp.float32) * term.factor if term.factor != 1 else x)
                for x, term in zip(arranged[num_masks : num_masks + num_biases], terms[num_masks:], strict=True)
            ]
            variant = general_attention.Variant(
                causal=causal,
                scale=scale_or_none,
                softcap=softcap,
                biases=tuple(biases),
                masks=tuple(masks),
                keep=arranged[-1] if keep is not None else None,
                keep_factor=keep.factor if keep is not None else 1.0,
            )
            out = _attend(choose, q, k, v, ids, window, variant)
            return [shape.restored(out, sizes).astype(out_dtype)]

        return Match(
            op=_OP,
            eqns=_between(graph, inputs, self.reader.last, inputs[:3]),
            inputs=inputs,
            outputs=[self.reader.last.outvars[0]],
            replacement=replacement,
            source=graph.source(self.reader.last),
            uncut=[(shape.v, dim) for dim, axes in enumerate(shape.operands[2][1]) if {*_leaves(axes)} & {*shape.V}],
            facts=self._facts(scale, extra),
        )

    def _facts(self, scale: float, extra: np.ndarray | None) -> str:
        shape = self.shape
        kind = "causal" if self.causal else "bidirectional"
        facts = [kind if self.window is None else f"causal, window {self.window}", f"scale {scale:.4g}"]
        facts += [f"softcap {self.chain.softcap:g}"] if self.chain.softcap else []
        facts += ["segments"] if self.segments else []
        facts += ["a constant mask"] if extra is not None else []
        facts += [f"{len(self.masks)} masks"] if self.masks else []
        facts += [f"{len(self.biases)} biases"] if self.biases else []
        facts += ["dropout"] if self.keep is not None else []
        sizes = (_size(one) for one in (shape.B, shape.T, shape.S, (*shape.K, *shape.G), shape.K, shape.H))
        return ", ".join(facts) + ", B {} T {} S {} N {} K {} H {}".format(*sizes)


def _arranged_constant(
    value: np.ndarray, layout: _Layout, groups: Sequence[Sequence[_Axis]], sizes: dict
) -> np.ndarray:
    leaves = _all_leaves(layout)
    value = value.reshape([sizes[axis] for axis in leaves])
    order = [axis for group in groups for axis in group if axis in leaves]
    value = value.transpose([leaves.index(axis) for axis in order])
    shape, target = [], []
    for group in groups:
        has = any(axis in leaves for axis in group)
        shape += [sizes[axis] if axis in leaves else 1 for axis in group]
        target += [sizes[axis] if has else 1 for axis in group]
    value = np.broadcast_to(value.reshape(shape), target)
    return value.reshape([math.prod(target[start:stop]) for start, stop in _spans(groups)])


def _attend(
    choose: Choose, q: Any, k: Any, v: Any, ids: Any, window: int | None, variant: general_attention.Variant
) -> Any:
    has_segments, features = ids is not None, variant.features
    if not features and k.shape[1] == q.shape[1]:
        call = attention.describe_call(q.shape, k.shape[2], dtype=q.dtype, has_segments=has_segments, window=window)
        name = choose(attention.OP, call)
        return attention.attention(q, k_BSKH=k, v_BSKH=v, segment_ids_BT=ids, implementation=name, window=window)
    call = general_attention.describe_call(
        q.shape, k.shape[1:3], dtype=q.dtype, has_segments=has_segments, window=window, features=features
    )
    return general_attention.general_attention(
        q,
        k_BSKH=k,
        v_BSKH=v,
        segment_ids_BT=ids,
        implementation=choose(general_attention.OP, call),
        window=window,
        variant=variant,
    )


def _between(graph: Graph, inputs: Sequence[Any], last: Any, starts: Sequence[Any]) -> list[Any]:
    """Returns the equations on the ways from `starts` to the result, in order."""
    stop = set(inputs)
    above: dict[int, Any] = {}
    todo = [last]
    while todo:
        eqn = todo.pop()
        if id(eqn) in above:
            continue
        above[id(eqn)] = eqn
        for atom in eqn.invars:
            producer = graph.producer(atom)
            if not is_literal(atom) and atom not in stop and producer is not None and not graph.is_constant(atom):
                todo.append(producer)
    reached = set(starts)
    between = []
    for eqn in graph.eqns:
        if id(eqn) in above and any(not is_literal(atom) and atom in reached for atom in eqn.invars):
            reached |= set(eqn.outvars)
            between.append(eqn)
    return between
