"""Symbolic values of what a program computes from logits, as `rewrite.loss` needs them.

What a loss reads of the logits z of one token is their log-normaliser, the logit of its target and their sum. Values
are sums of those three, of z, and of masks where the column is the target. A maximum that is subtracted for stability
is one more term, and cancels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.rewrite.graph import EquationGraph, is_literal

V = "V"  # label of the dimension of the vocabulary; those of tokens are numbered; None is constant along a dimension
_IDENTITIES = frozenset({"stop_gradient", "copy", "name", "reduce_precision", "abs"})


class Unsupported(Exception):
    """An equation that reads logits in a way that the op does not compute; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """An array that multiplies terms: constant over the vocabulary, and not computed from the logits."""

    var: Any
    labels: tuple[Any, ...]
    is_inverse: bool = False


@dataclasses.dataclass(frozen=True)
class TargetIndex:
    var: Any
    labels: tuple[Any, ...]
    outside: str  # what an index outside the vocabulary means: "zero" or "nan"


IS_INSIDE = "is inside"  # factor: the target is in the vocabulary; 1 where an index outside it is not "zero"
# (of a column: "", "z", "hot" or "hot z"; of a token: "", "max[...]", or a product of "normaliser", "target" and "sum",
# separated by spaces; factors)
Term = tuple[str, str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Expression:
    """A symbolic value: the sum of terms, or its exponential.

    Attributes:
      terms: term -> coefficient.
      labels: of each dimension of the variable.
      is_exp: whether the value is the exponential of the sum.
      summed: labels of dimensions of tokens over which it was summed.
    """

    terms: Mapping[Term, float]
    labels: tuple[Any, ...]
    is_exp: bool = False
    summed: tuple[int, ...] = ()

    @property
    def is_statistic(self) -> bool:
        """Whether it follows from the statistics of the tokens."""
        return all(not column and "max" not in token for column, token, _ in self.terms)


class Symbolic:
    """The symbolic values of one program.

    Args:
      graph: the program.
      logits: variable of the logits.
      labels: of its dimensions.

    Attributes:
      values: variable -> value, of those whose equations were passed to `value_of`.
      target: the indices whose logits are read; None if none were.
      has_normaliser: whether exponentials were summed over the vocabulary.
      has_log: whether a logarithm of such a sum was taken.
    """

    def __init__(self, graph: EquationGraph, logits: Any, labels: Sequence[Any]):
        self.graph = graph
        self.num_columns = logits.aval.shape[list(labels).index(V)]
        self.values: dict[Any, Expression] = {logits: Expression({("z", "", ()): 1.0}, tuple(labels))}
        self.target: TargetIndex | None = None
        self.has_normaliser = self.has_log = False
        self._flags: dict[Any, Any] = {}  # result of is_finite -> its operand

    def value_of(self, eqn: Any) -> Expression:
        """Returns and keeps the value of an equation that reads values.

        Raises:
          Unsupported: it is not a sum of terms, or an exponential of one.
        """
        self.values[eqn.outvars[0]] = value = self._value(eqn)
        return value

    def _value(self, eqn: Any) -> Expression:
        name = eqn.primitive.name
        if name in ("add", "sub"):
            left, right = self._operands(eqn)
            _refuse_probabilities(left, right)
            return Expression(_sum(left.terms, right.terms, -1.0 if name == "sub" else 1.0), _joined(left, right))
        if name in ("mul", "div"):
            return self._product_of(eqn)
        if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            value = self._known(eqn, 0)
            _refuse_probabilities(value)
            return dataclasses.replace(value, terms=_times(value.terms, value.terms))
        if name == "neg":
            return self._scaled(self._known(eqn, 0), -1.0)
        if name in _IDENTITIES:
            value = self._known(eqn, 0)
            if name == "abs" and not value.is_exp:
                raise Unsupported("the absolute value of logits is read")
            return value
        if name == "convert_element_type" and jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
            return self._known(eqn, 0)
        if name == "exp":
            return self._exp(self._known(eqn, 0))
        if name == "log":
            value = self._known(eqn, 0)
            if not value.is_exp:
                raise Unsupported("a logarithm of logits is read")
            self.has_log = True
            return dataclasses.replace(value, is_exp=False)
        if name == "max":
            return self._with_initial(eqn)
        if name == "is_finite":
            value = self._known(eqn, 0)
            self._flags[eqn.outvars[0]] = eqn.invars[0]
            return value
        if name == "select_n":
            return self._selected(eqn)
        if name == "reduce_max":
            return self._reduced_max(eqn)
        if name == "reduce_sum":
            return self._reduced_sum(self._known(eqn, 0), eqn.params["axes"], eqn.invars[0].aval.shape)
        if name in ("broadcast_in_dim", "squeeze"):
            value = self._known(eqn, 0)
            return dataclasses.replace(value, labels=_moved(eqn, value.labels))
        if name == "gather":
            return self._gathered(eqn)
        raise Unsupported("the logits, or values computed from them, are also read by another operation")

    def _known(self, eqn: Any, index: int) -> Expression:
        atom = eqn.invars[index]
        if is_literal(atom) or atom not in self.values:
            raise Unsupported("the logits enter by another operand than expected")
        value = self.values[atom]
        if value.summed:
            raise Unsupported("a sum over tokens is read")
        if atom in self._flags:
            raise Unsupported("whether logits are finite is read")
        return value

    def _operands(self, eqn: Any) -> list[Expression]:
        atoms = eqn.invars
        known = [
            None if is_literal(atom) or atom not in self.values else self._known(eqn, k) for k, atom in enumerate(atoms)
        ]
        like = next(value.labels for value in known if value is not None)
        return [
            self._outside(atom, self._labels_like(atom, like)) if value is None else value
            for atom, value in zip(atoms, known, strict=True)
        ]

    def _labels_like(self, atom: Any, like: Sequence[Any]) -> tuple[Any, ...]:
        shape = atom.aval.shape
        if not shape:
            return ()
        if len(shape) != len(like):
            raise Unsupported("operands of different ranks")
        if any(size > 1 and label is None for size, label in zip(shape, like, strict=True)):
            raise Unsupported("an operand with dimensions that the logits do not have")
        return _narrowed(like, shape)

    def _outside(self, atom: Any, labels: tuple[Any, ...]) -> Expression:
        """Returns the value of something that is not computed from the logits: weights, labels."""
        shape = atom.aval.shape
        if is_literal(atom):
            return Expression({("", "", ()): float(atom.val)}, labels)
        if atom in self.values:
            return dataclasses.replace(self.values[atom], labels=labels)
        eqn = self.graph.producer(atom)
        name = None if eqn is None else eqn.primitive.name
        if name == "broadcast_in_dim" and is_literal(eqn.invars[0]):
            return Expression({("", "", ()): float(eqn.invars[0].val)}, (None,) * len(shape))
        if V not in labels:
            constant = None if shape else self.graph.constant(atom)
            if constant is not None:
                return Expression({("", "", ()): float(constant)}, labels)
            return Expression({("", "", (Factor(atom, labels),)): 1.0}, labels)
        if name in ("convert_element_type", "stop_gradient", "copy") and _keeps_values(eqn):
            return self._outside(eqn.invars[0], labels)
        if name == "broadcast_in_dim":
            inner = _narrowed([labels[axis] for axis in eqn.params["broadcast_dimensions"]], eqn.invars[0].aval.shape)
            return dataclasses.replace(self._outside(eqn.invars[0], inner), labels=labels)
        if name in ("add", "sub", "mul", "eq"):
            of = [() if not one.aval.shape else _narrowed(labels, one.aval.shape) for one in eqn.invars]
            if name == "eq":
                return self._one_hot(eqn, of, labels)
            values = [self._outside(one, each) for one, each in zip(eqn.invars, of, strict=True)]
            if name in ("add", "sub"):
                return Expression(_sum(values[0].terms, values[1].terms, -1.0 if name == "sub" else 1.0), labels)
            return Expression(_times(values[0].terms, values[1].terms), labels)
        raise Unsupported("labels that are not one-hot of integers multiply the logits")

    def _one_hot(self, eqn: Any, of: Sequence[tuple], labels: tuple[Any, ...]) -> Expression:
        for target, columns in ((0, 1), (1, 0)):
            atom, iota, column_labels = eqn.invars[target], self.graph.producer(eqn.invars[columns]), of[columns]
            if iota is not None and iota.primitive.name == "broadcast_in_dim":
                column_labels = [column_labels[axis] for axis in iota.params["broadcast_dimensions"]]
                iota = self.graph.producer(iota.invars[0])
            is_counted = iota is not None and iota.primitive.name == "iota" and V in column_labels
            is_counted = is_counted and iota.params["dimension"] == column_labels.index(V)
            if is_counted and V not in of[target] and jnp.issubdtype(atom.aval.dtype, jnp.integer):
                self._set_target(TargetIndex(atom, of[target], "zero"))
                return Expression({("hot", "", ()): 1.0}, labels)
        raise Unsupported("labels that are not one-hot of integers multiply the logits")

    def _set_target(self, target: TargetIndex) -> None:
        if is_literal(target.var) or target.var in self.values:
            raise Unsupported("the target is a literal, or computed from the logits")
        if self.target is not None and self.target != target:
            raise Unsupported("the logits of more than one target are read")
        self.target = target

    def _scaled(self, value: Expression, factor: float) -> Expression:
        _refuse_probabilities(value)
        return dataclasses.replace(value, terms={term: factor * c for term, c in value.terms.items()})

    def _product_of(self, eqn: Any) -> Expression:
        left, right = self._operands(eqn)
        labels = _joined(left, right)
        if left.is_exp and right.is_exp:
            sign = -1.0 if eqn.primitive.name == "div" else 1.0
            return Expression(_sum(left.terms, right.terms, sign), labels, is_exp=True)
        _refuse_probabilities(left, right)
        other = _inverse(right.terms) if eqn.primitive.name == "div" else right.terms
        return Expression(_times(left.terms, other), labels)

    def _exp(self, value: Expression) -> Expression:
        wide = {term: c for term, c in value.terms.items() if term[0]}
        if value.is_exp or (wide and wide != {("z", "", ()): 1.0}):
            raise Unsupported("logits with a scale per token, or with labels in them, are read")
        return dataclasses.replace(value, is_exp=True)

    def _with_initial(self, eqn: Any) -> Expression:
        first = eqn.invars[0]
        known = 0 if not is_literal(first) and first in self.values else 1
        other = self.graph.constant(eqn.invars[1 - known])
        if other is None or other.size != 1 or other != -np.inf:
            raise Unsupported("the logits are compared with other values")
        return self._known(eqn, known)

    def _selected(self, eqn: Any) -> Expression:
        which, *cases = eqn.invars
        known = None if is_literal(cases[-1]) else self.values.get(cases[-1])
        if not is_literal(which) and which in self._flags and known == self.values[self._flags[which]]:
            return known  # the maximum, if it is finite
        is_read = any(not is_literal(atom) and atom in self.values for atom in (which, *cases[:-1]))
        if len(cases) != 2 or is_literal(which) or is_read:
            raise Unsupported("the logits are selected from by values")
        value = self._known(eqn, 2)
        labels = self._labels_like(which, value.labels)
        off = self._outside(cases[0], self._labels_like(cases[0], value.labels)).terms
        if value.is_exp or any(off.values()):
            raise Unsupported("logits of some columns or tokens are replaced")
        return Expression(_times(value.terms, self._outside(which, labels).terms), value.labels)

    def _reduced_max(self, eqn: Any) -> Expression:
        value = self._known(eqn, 0)
        axes = eqn.params["axes"]
        labels = [value.labels[axis] for axis in axes]
        if V not in labels:
            raise Unsupported("a maximum over another axis than the vocabulary is read")
        if value.is_exp or value.terms != {("z", "", ()): 1.0}:
            raise Unsupported("logits with a scale per token, or with labels in them, are read")
        kept = tuple(label for axis, label in enumerate(value.labels) if axis not in axes)
        return Expression({("", f"max[{','.join(sorted(map(str, labels)))}]", ()): 1.0}, kept)

    def _reduced_sum(self, value: Expression, axes: Sequence[int], shape: Sequence[int]) -> Expression:
        labels = [value.labels[axis] for axis in axes]
        kept = tuple(label for axis, label in enumerate(value.labels) if axis not in axes)
        copies = math.prod(shape[axis] for axis in axes if value.labels[axis] is None)
        summed = tuple(label for label in labels if label not in (None, V))
        if V not in labels:
            if V in value.labels or value.is_exp or not value.is_statistic:
                raise Unsupported("logits or log-normalisers are summed over tokens")
        elif value.is_exp:
            if ("z", "", ()) not in value.terms or copies != 1:
                raise Unsupported("exponentials are summed over another axis")
            self.has_normaliser = True
            terms = dict(value.terms)
            del terms["z", "", ()]
            value = dataclasses.replace(value, terms=_sum(terms, {("", "normaliser", ()): 1.0}, 1.0))
        else:
            value = dataclasses.replace(value, terms=self._over_columns(value.terms))
        if copies != 1:
            value = self._scaled(value, float(copies))
        value = dataclasses.replace(value, labels=kept, summed=summed)
        if summed and (value.is_exp or not value.is_statistic):
            raise Unsupported("logits or exponentials are summed over tokens")
        return value

    def _over_columns(self, terms: Mapping[Term, float]) -> dict[Term, float]:
        total: dict[Term, float] = {}
        for (column, token, factors), c in terms.items():
            if column in ("z", "hot z") and token:
                raise Unsupported("logits are multiplied with each other")
            if column == "":
                new, c = ("", token, factors), c * self.num_columns
            elif column == "hot":
                new = ("", token, _sorted((*factors, IS_INSIDE)))
            else:
                new = ("", "sum" if column == "z" else "target", factors)
            total = _sum(total, {new: c}, 1.0)
        return total

    def _gathered(self, eqn: Any) -> Expression:
        value, numbers, sizes = self._known(eqn, 0), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        indices, fill = eqn.invars[1], eqn.params["fill_value"]
        axis = value.labels.index(V) if V in value.labels else None
        if [*numbers.start_index_map] != [axis] or sizes[axis] != 1:
            raise Unsupported("tokens are read by index")
        batch = [None] * (indices.aval.ndim - 1)
        for dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            batch[index_dim] = value.labels[dim]
        for dim, size in enumerate(indices.aval.shape[:-1]):
            if batch[dim] is None and size > 1:
                raise Unsupported("several logits of a token are read by index")
        skipped = {int(k) for k in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)}
        offsets = [dim for dim in range(len(sizes)) if dim not in skipped]
        rest, own = iter(batch), dict(zip((int(k) for k in numbers.offset_dims), offsets, strict=True))
        labels = tuple(
            (None if own[k] == axis else value.labels[own[k]]) if k in own else next(rest)
            for k in range(eqn.outvars[0].aval.ndim)
        )
        if any(dim != axis and sizes[dim] != eqn.invars[0].aval.shape[dim] for dim in offsets) or sorted(
            x for x in labels if x is not None
        ) != sorted(x for x in value.labels if x not in (None, V)):
            raise Unsupported("tokens are read by index")
        if eqn.params["mode"].name != "FILL_OR_DROP" or (fill is not None and not np.isnan(fill)):
            raise Unsupported("an index outside the vocabulary does not mean NaN")
        self._set_target(TargetIndex(indices, (*batch, None), "nan"))
        terms: dict[Term, float] = {}
        for (column, token, factors), c in value.terms.items():
            if column not in ("", "z") or (column and token):
                raise Unsupported("a column of labels is read by index")
            terms = _sum(terms, {("", "target" if column else token, factors): c}, 1.0)
        return Expression(terms, labels, value.is_exp)


def _refuse_probabilities(*values: Expression) -> None:
    if any(value.is_exp for value in values):
        raise Unsupported("probabilities are added to other values, or multiplied with them")


def _sorted(factors: tuple[Any, ...]) -> tuple[Any, ...]:
    # an index is in the vocabulary or not: a second time adds nothing
    once = [factor for factor in factors if factor != IS_INSIDE] + [IS_INSIDE] * (IS_INSIDE in factors)
    return tuple(sorted(once, key=lambda one: (str(type(one)), id(getattr(one, "var", None)), str(one))))


def _sum(left: Mapping[Term, float], right: Mapping[Term, float], sign: float) -> dict[Term, float]:
    terms = dict(left)
    for term, c in right.items():
        terms[term] = terms.get(term, 0.0) + sign * c
    return {term: c for term, c in terms.items() if c or term == ("", "", ())}


def _times(left: Mapping[Term, float], right: Mapping[Term, float]) -> dict[Term, float]:
    terms: dict[Term, float] = {}
    for (column, token, factors), c in left.items():
        for (other_column, other_token, other_factors), other in right.items():
            both = {*column.split(), *other_column.split()}
            if ("z" in column and "z" in other_column) or (both and token and other_token):
                raise Unsupported("logits are multiplied with each other")
            name = " ".join(part for part in ("hot", "z") if part in both)
            tokens = " ".join(sorted([*token.split(), *other_token.split()]))
            term = name, tokens, _sorted((*factors, *other_factors))
            terms = _sum(terms, {term: c * other}, 1.0)
    return terms


def _inverse(terms: Mapping[Term, float]) -> dict[Term, float]:
    if len(terms) != 1:
        raise Unsupported("the logits are divided by a sum")
    (((column, token, factors), c),) = terms.items()
    if column or token or not c or IS_INSIDE in factors:
        raise Unsupported("values are divided by logits")
    return {("", "", tuple(dataclasses.replace(one, is_inverse=not one.is_inverse) for one in factors)): 1.0 / c}


def _joined(left: Expression, right: Expression) -> tuple[Any, ...]:
    if not left.labels or not right.labels:
        return left.labels or right.labels
    labels = []
    for one, other in zip(left.labels, right.labels, strict=True):
        if one is not None and other is not None and one != other:
            raise Unsupported("values of different dimensions are combined")
        labels.append(other if one is None else one)
    return tuple(labels)


def _narrowed(labels: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    return tuple(None if size == 1 else label for label, size in zip(labels, shape, strict=True))


def _moved(eqn: Any, labels: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the labels of the result of a broadcast or of a squeeze."""
    if eqn.primitive.name == "broadcast_in_dim":
        new: list[Any] = [None] * eqn.outvars[0].aval.ndim
        for label, axis in zip(labels, eqn.params["broadcast_dimensions"], strict=True):
            new[axis] = label
        return tuple(new)
    dropped = {axis % len(labels) for axis in eqn.params["dimensions"]}
    return tuple(label for axis, label in enumerate(labels) if axis not in dropped)


def _keeps_values(eqn: Any) -> bool:
    """Returns whether a cast, if it is one, only rounds: the result is floating-point."""
    return (
        jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating) or eqn.outvars[0].aval.dtype == eqn.invars[0].aval.dtype
    )
