"""Finds RMSNorm and LayerNorm in a jaxpr, in any spelling.

From the array that may be normalized on, equations are evaluated as polynomials in it, its mean, its mean square, the
root of these and the parameters. Of the variables that have the polynomial of a norm, the last is replaced: `E[x^2] -
E[x]^2`, a gain that comes before the product with `x`, and `1 + gain` then need no case of their own.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from hlat_jax.ops import general_norm
from hlat_jax.ops.dispatch_graph import Choose, Graph, Match, Refusal, is_literal

OP = "norm"
# Relative difference of a coefficient that a factor 1/D rounded to fp32 makes; with D - 1 it is 1/D.
_ROUNDING = 3e-7
_MOST_TERMS = 16
_NEAR = 32  # equations between a root and the sum under it
_CASTS = frozenset({"convert_element_type", "copy", "copy_p"})
_MOVES = _CASTS | {"broadcast_in_dim", "reshape", "squeeze"}
_BEHIND_ROOT = _MOVES | {"add", "sub", "mul", "div", "max", "select_n", "square", "integer_pow"}

# Atoms of the polynomials; the others are roots and variables, which are parameters.
_X, _MEAN, _SQUARE = "x", "mean of x", "mean of x^2"


@dataclasses.dataclass(frozen=True)
class _Root:
    """The square root of the variance or mean square plus `eps`."""

    is_centered: bool
    eps: float


_Monomial = frozenset  # of (atom, power)
_Terms = Mapping[_Monomial, float]
_ONE: _Monomial = frozenset()
_VARIANCE = {frozenset({(_SQUARE, 1)}): 1.0, frozenset({(_MEAN, 2)}): -1.0}
_MEAN_SQUARE = {frozenset({(_SQUARE, 1)}): 1.0}


@dataclasses.dataclass(frozen=True)
class _Value:
    """A polynomial, and of which dimension of `x` each dimension of its array is; None: it is constant along it."""

    terms: _Terms
    labels: tuple[int | None, ...]


def matches(graph: Graph) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each root of a mean of squares."""
    numbers = {id(eqn): number for number, eqn in enumerate(graph.eqns)}
    for eqn in graph.eqns:
        if id(eqn) in graph.sealed or _root_power(graph, eqn) is None:
            continue
        refusal = match = None
        for x, axis in _candidates(graph, eqn):
            region = _Region(graph, numbers, x, axis)
            found = region.match(eqn)
            refusal = refusal or (found if isinstance(found, Refusal) else None)
            if isinstance(found, Match):
                match = match or found
                if not region.leaks(found):  # otherwise `x` may be what something else reads too: its cast
                    match = found
                    break
        if match or refusal:
            yield match or refusal


def _root_power(graph: Graph, eqn: Any) -> int | None:
    """Returns 1 for a square root, -1 for the inverse of one, None for other equations."""
    name = eqn.primitive.name
    if name == "pow":
        exponent = graph.constant(eqn.invars[1])
        return None if exponent is None or exponent.size != 1 else {0.5: 1, -0.5: -1}.get(float(exponent.reshape(())))
    return {"sqrt": 1, "rsqrt": -1}.get(name)


def _candidates(graph: Graph, root: Any) -> Iterator[tuple[Any, int]]:
    """Yields (variable, axis) of what may be normalized, from the sums under a root: the one with most after it first.

    Under a root are sums of `x`, `x^2` or `(x - mean)^2`, and `x` may be a cast of another variable.
    """
    todo, sums, seen = [root.invars[0]], [], set()
    while todo and len(seen) < _NEAR:
        eqn = graph.producer(todo.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if eqn.primitive.name == "reduce_sum" and len(eqn.params["axes"]) == 1:
            sums.append(eqn)
        elif eqn.primitive.name in _BEHIND_ROOT:
            todo += [atom for atom in eqn.invars if not graph.is_constant(atom)]
    found: dict[tuple[Any, int], None] = {}
    for eqn in sums:
        own = _uncast(graph, eqn.invars[0])
        squared = graph.producer(own[-1])
        if squared is not None and squared.primitive.name in ("square", "integer_pow", "mul"):
            own = _uncast(graph, squared.invars[0])
        difference = graph.producer(own[-1])
        if difference is not None and difference.primitive.name == "sub":
            own += _uncast(graph, difference.invars[0])
        own = [var for var in reversed(own) if not is_literal(var) and var.aval.shape == eqn.invars[0].aval.shape]
        found |= dict.fromkeys((var, *eqn.params["axes"]) for var in own)
    for var, axis in found:
        if not graph.is_constant(var) and jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.shape[axis] > 1:
            yield var, axis


def _uncast(graph: Graph, var: Any) -> list[Any]:
    """Returns the variable, and those before each cast of it."""
    found = [var]
    while (eqn := graph.producer(found[-1])) is not None and eqn.primitive.name in _CASTS:
        found.append(eqn.invars[0])
    return found


class _Region:
    """What is computed from `x` by polynomials.

    Attributes:
      values: variable -> its polynomial.
    """

    def __init__(self, graph: Graph, numbers: Mapping[int, int], x: Any, axis: int):
        self.graph, self.x, self.axis = graph, x, axis
        labels = tuple(dim if size > 1 else None for dim, size in enumerate(x.aval.shape))
        self.values: dict[Any, _Value] = {x: _Value({frozenset({(_X, 1)}): 1.0}, labels)}
        waiting = sorted(numbers[id(eqn)] for eqn in graph.readers(x))
        while waiting:
            eqn = graph.eqns[heapq.heappop(waiting)]
            if len(eqn.outvars) != 1 or eqn.outvars[0] in self.values or id(eqn) in graph.sealed:
                continue
            value = self._evaluated(eqn)
            if value is not None and value.terms and len(value.terms) <= _MOST_TERMS:
                self.values[eqn.outvars[0]] = value
                for reader in graph.readers(eqn.outvars[0]):
                    heapq.heappush(waiting, numbers[id(reader)])

    def match(self, root: Any) -> Match | Refusal | None:
        """Returns what stands around a root; None if there is no statistic of `x` under it."""
        graph, source = self.graph, self.graph.source(root)
        under = self.values.get(root.invars[0])
        if under is None:
            return None
        if root.outvars[0] not in self.values:
            share = abs(under.terms.get(frozenset({(_SQUARE, 1)}), 0.0) - 1)
            if _ONE not in under.terms or share > 0.5:
                return None  # the length of a vector
            return Refusal(OP, source, "under the root is not the mean of squares or the variance plus a number")
        found = {var: self._norm(var, value) for var, value in self.values.items()}
        norms = {var: norm for var, norm in found.items() if norm and any(eqn is root for eqn in self._before(var))}
        if not norms:
            return Refusal(OP, source, "its inverse root is not multiplied with the same array, a gain along its axis")
        out = next(iter(norms))
        while not graph.is_output(out) and len(readers := graph.readers(out)) == 1 and readers[0].outvars[0] in norms:
            out = readers[0].outvars[0]
        return self._match(out, *norms[out])

    def leaks(self, match: Match) -> bool:
        """Returns whether something else reads what is between the input and the output."""
        inside = {id(eqn) for eqn in match.eqns}
        between = [var for eqn in match.eqns for var in eqn.outvars if var not in match.outputs]
        readers = [reader for var in between for reader in self.graph.readers(var)]
        return any(id(reader) not in inside for reader in readers) or any(map(self.graph.is_output, between))

    def _before(self, var: Any) -> list[Any]:
        """Returns the equations of the region from which a variable is computed."""
        todo, found = [var], {}
        while todo:
            eqn = self.graph.producer(todo.pop())
            if eqn is not None and id(eqn) not in found:
                found[id(eqn)] = eqn
                todo += [
                    atom for atom in eqn.invars if not is_literal(atom) and atom in self.values and atom is not self.x
                ]
        return list(found.values())

    def _norm(self, var: Any, value: _Value) -> tuple[_Root, _Terms, _Terms] | None:
        """Returns (root, gain, bias) of a variable that is a norm of `x`, else None."""
        roots = {atom for monomial in value.terms for atom, _ in monomial if isinstance(atom, _Root)}
        if len(roots) != 1 or var.aval.shape != self.x.aval.shape or value.labels != self.values[self.x].labels:
            return None
        (root,) = roots
        parts: dict[Any, dict[_Monomial, float]] = {_X: {}, _MEAN: {}, None: {}}
        for monomial, coefficient in value.terms.items():
            own = {atom: power for atom, power in monomial if isinstance(atom, (str, _Root))}
            of = next((atom for atom in own if atom != root), None)
            if of not in parts or own not in ({}, {of: 1, root: -1}):
                return None
            parts[of][frozenset((atom, power) for atom, power in monomial if atom not in own)] = coefficient
        centering = _product({_ONE: -1.0}, parts[_X]) if root.is_centered else {}
        return (root, parts[_X], parts[None]) if parts[_X] and _are_equal(parts[_MEAN], centering) else None

    def _match(self, out: Any, root: _Root, gain: _Terms, bias: _Terms) -> Match:
        axis, rank = self.axis, self.x.aval.ndim
        params = list(dict.fromkeys(atom for terms in (gain, bias) for monomial in terms for atom, _ in monomial))
        is_plain = _are_equal(gain, {_ONE: 1.0})

        def replacement(choose: Choose, x: Any, *given: Any) -> list[Any]:
            wide = jnp.promote_types(x.dtype, jnp.float32)
            shape = [x.shape[axis] if dim == axis else 1 for dim in range(rank)]
            env = {
                var: jnp.broadcast_to(array.reshape(shape if array.size > 1 else ()), shape).astype(wide)
                for var, array in zip(params, given, strict=True)
            }

            def evaluated(terms: _Terms) -> Any:
                total: Any = 0.0
                for monomial, coefficient in terms.items():
                    total += coefficient * math.prod(env[atom] ** power for atom, power in monomial)
                return jnp.broadcast_to(jnp.asarray(total, wide), shape)

            return [
                general_norm.general_norm(
                    x,
                    gain=None if is_plain else evaluated(gain),
                    bias=evaluated(bias) if bias else None,
                    variant=general_norm.Variant(axis, root.eps, root.is_centered, out.aval.dtype),
                    implementation=choose(general_norm.OP, general_norm.describe_call(x.shape, dtype=x.dtype)),
                )
            ]

        name = "LayerNorm" if root.is_centered else "RMSNorm"
        known = [f"{name} over {self.x.aval.shape[axis]}", f"eps {root.eps:.3g}"]
        known += ["gain"] * (not is_plain) + ["bias"] * bool(bias)
        eqns = self._before(out)
        return Match(OP, eqns, [self.x, *params], [out], replacement, self.graph.source(eqns[0]), ", ".join(known))

    # polynomials

    def _evaluated(self, eqn: Any) -> _Value | None:
        """Returns the value of a result; None if it is no such polynomial, or is rounded on the way."""
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        if not jnp.issubdtype(out.dtype, jnp.floating):
            return None
        if name == "select_n":  # of `jnp.var`: NaN if nothing is counted
            which = self._number(eqn.invars[0])
            chosen = None if which is None else eqn.invars[1 + int(which)]
            return None if chosen is None or is_literal(chosen) else self.values.get(chosen)
        operands = [self._operand(atom) for atom in eqn.invars]
        if None in operands:
            return None
        if name in _MOVES:
            terms, labels = operands[0].terms, self._moved(eqn, operands[0].labels)
        elif name == "reduce_sum":
            terms, labels = self._summed(eqn, operands[0])
        else:
            labels = self._joined([one.labels for one in operands], out.ndim)
            terms = self._arithmetic(eqn, [one.terms for one in operands])
        if terms is None or labels is None:
            return None
        x, is_statistic = self.x.aval, not any(isinstance(atom, _Root) for monomial in terms for atom, _ in monomial)
        is_x = terms == self.values[self.x].terms and out.dtype == x.dtype
        is_rounded = out.dtype.itemsize < max(4, x.dtype.itemsize) and is_statistic and not is_x
        return None if is_rounded else _Value(terms, labels)

    def _operand(self, atom: Any) -> _Value | None:
        if not is_literal(atom) and atom in self.values:
            return self.values[atom]
        number, none = self._number(atom), (None,) * atom.aval.ndim
        if number is not None:
            return _Value({_ONE: number}, none)
        dims, var = list(range(atom.aval.ndim)), atom
        while any(size > 1 and dims[dim] != self.axis for dim, size in enumerate(var.aval.shape)):
            eqn = self.graph.producer(var)
            if eqn is None or eqn.primitive.name != "broadcast_in_dim":
                return None
            var, dims = eqn.invars[0], [dims[dim] for dim in eqn.params["broadcast_dimensions"]]
        is_along = var.aval.size > 1
        if not jnp.issubdtype(var.aval.dtype, jnp.floating) or (
            is_along and (atom.aval.ndim, var.aval.size) != (self.x.aval.ndim, self.x.aval.shape[self.axis])
        ):
            return None
        labels = tuple(self.axis if is_along and dim == self.axis else None for dim in range(atom.aval.ndim))
        return _Value({frozenset({(var, 1)}): 1.0}, labels)

    def _number(self, atom: Any) -> float | None:
        value = self.graph.constant(atom)
        if value is None or not value.size or not (value == value.flat[0]).all():
            return None
        return float(value.flat[0])

    def _moved(self, eqn: Any, labels: Sequence[int | None]) -> tuple[int | None, ...] | None:
        name, shape, old = eqn.primitive.name, eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
        if name in _CASTS:
            return tuple(labels)
        if name == "broadcast_in_dim":
            pairs = list(enumerate(eqn.params["broadcast_dimensions"]))
        else:  # dimensions of size 1 come and go
            dims, places = ([dim for dim, size in enumerate(one) if size > 1] for one in (old, shape))
            if [old[dim] for dim in dims] != [shape[place] for place in places]:
                return None
            pairs = list(zip(dims, places, strict=True))
        moved = {place: labels[dim] for dim, place in pairs}
        return tuple(moved.get(place) for place in range(len(shape)))

    def _joined(self, all_labels: Sequence[Sequence[int | None]], rank: int) -> tuple[int | None, ...] | None:
        found = [{own[dim] for own in all_labels if dim < len(own)} - {None} for dim in range(rank)]
        labels = tuple(next(iter(one), None) for one in found)
        named = [label for label in labels if label is not None]
        return labels if all(len(one) < 2 for one in found) and len(set(named)) == len(named) else None

    def _summed(self, eqn: Any, value: _Value) -> tuple[_Terms | None, Any]:
        if len(eqn.params["axes"]) != 1 or value.labels[eqn.params["axes"][0]] != self.axis:
            return None, None
        terms: dict[_Monomial, float] = {}
        for monomial, coefficient in value.terms.items():
            powers = dict(monomial)
            mean = {0: _ONE, 1: frozenset({(_MEAN, 1)}), 2: frozenset({(_SQUARE, 1)})}.get(powers.pop(_X, 0))
            if mean is None or any(not isinstance(atom, (str, _Root)) and atom.aval.size > 1 for atom in powers):
                return None, None
            own = {frozenset(powers.items()): coefficient * self.x.aval.shape[self.axis]}
            terms = _added(terms, _product(own, {mean: 1.0}))
        (summed,) = eqn.params["axes"]
        return terms, tuple(label for dim, label in enumerate(value.labels) if dim != summed)

    def _arithmetic(self, eqn: Any, operands: Sequence[_Terms]) -> _Terms | None:
        name, first = eqn.primitive.name, operands[0]
        power = _root_power(self.graph, eqn)
        if power is not None:
            return _rooted(first, power)
        if name in ("add", "add_any"):
            return _added(*operands)
        if name == "sub":
            return _added(first, _product({_ONE: -1.0}, operands[1]))
        if name == "neg":
            return _product({_ONE: -1.0}, first)
        if name == "mul":
            return _product(*operands)
        if name == "div":
            inverse = _inverse(operands[1])
            return None if inverse is None else _product(first, inverse)
        if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            return _product(first, first)
        if name == "integer_pow" and eqn.params["y"] == -1:
            return _inverse(first)
        if name == "max":  # a variance is not negative but for rounding
            zero, other = operands if set(first) <= {_ONE} else reversed(operands)
            is_clipped = not any(zero.values()) and any(_are_equal(other, one) for one in (_VARIANCE, _MEAN_SQUARE))
            return other if is_clipped else None
        return None


def _added(one: _Terms, other: _Terms) -> _Terms:
    total = dict(one)
    for monomial, coefficient in other.items():
        total[monomial] = total.get(monomial, 0.0) + coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def _product(one: _Terms, other: _Terms) -> _Terms:
    total: _Terms = {}
    for (first, a), (second, b) in itertools.product(one.items(), other.items()):
        powers = dict(first)
        for atom, power in second:
            powers[atom] = powers.get(atom, 0) + power
        total = _added(total, {frozenset(item for item in powers.items() if item[1]): a * b})
    return total


def _inverse(terms: _Terms) -> _Terms | None:
    """Returns 1 / terms of a number or a root; None of others."""
    if len(terms) != 1:
        return None
    ((monomial, coefficient),) = terms.items()
    if not coefficient or not all(isinstance(atom, _Root) for atom, _ in monomial):
        return None
    return {frozenset((atom, -power) for atom, power in monomial): 1 / coefficient}


def _rooted(terms: _Terms, power: int) -> _Terms | None:
    eps = terms.get(_ONE, 0.0)
    rest = {monomial: coefficient for monomial, coefficient in terms.items() if monomial != _ONE}
    for is_centered, statistic in ((True, _VARIANCE), (False, _MEAN_SQUARE)):
        if eps >= 0 and _are_equal(rest, statistic):
            return {frozenset({(_Root(is_centered, eps), power)}): 1.0}
    return None


def _are_equal(one: _Terms, other: _Terms) -> bool:
    largest = max(map(abs, [*one.values(), *other.values()]), default=0.0)
    return all(abs(one.get(key, 0.0) - other.get(key, 0.0)) <= _ROUNDING * largest for key in {*one, *other})
