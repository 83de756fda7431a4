"""Finds cross-entropies in foreign functions: product, log-sum-exp, the logit of the target, in any spelling.

What a loss reads of the logits z of one token is their log-normaliser, the logit of its target and their sum. The
matcher evaluates the equations after the product symbolically, as sums of those three, of z, and of masks where the
column is the target. A maximum that is subtracted for stability is one more term, and cancels. Where nothing but
these three leaves, `cross_entropy.token_statistics` computes them, and the rest of the loss (z-loss, weights, mean)
stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import cross_entropy
from hlat_jax.ops.dispatch_graph import Choose, Graph, Match, Refusal, is_literal
from hlat_jax.passes.jaxpr import rebind

OP = "cross_entropy"
V = "V"  # label of the dimension of the vocabulary; those of tokens are numbered; None is constant along a dimension
# Elementwise equations between the product and the softmax that `LogitsForm.from_product` takes over.
_ELEMENTWISE = frozenset(
    {"convert_element_type", "reduce_precision", "mul", "div", "add", "sub", "neg", "tanh", "max", "min", "clamp"}
    | {"select_n", "copy", "name"}
)
_IDENTITIES = frozenset({"stop_gradient", "copy", "name", "reduce_precision", "abs"})


class _Unsupported(Exception):
    """An equation that reads logits in a way that the op does not compute; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class _Factor:
    """An array that multiplies terms: constant over the vocabulary, and not computed from the logits."""

    var: Any
    labels: tuple[Any, ...]
    is_inverse: bool = False


@dataclasses.dataclass(frozen=True)
class _Target:
    var: Any
    labels: tuple[Any, ...]
    outside: str  # what an index outside the vocabulary means: "zero", "nan" or "clip"


_IS_INSIDE = "is inside"  # factor: the target is in the vocabulary; 1 where an index outside it is not "zero"
# (of a column: "", "z", "hot" or "hot z"; of a token: "", "max[...]", or a product of "normaliser", "target" and "sum",
# separated by spaces; factors)
_Term = tuple[str, str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A symbolic value: the sum of terms, or its exponential.

    Attributes:
      terms: term -> coefficient.
      labels: of each dimension of the variable.
      is_exp: whether the value is the exponential of the sum.
      summed: labels of dimensions of tokens over which it was summed.
    """

    terms: Mapping[_Term, float]
    labels: tuple[Any, ...]
    is_exp: bool = False
    summed: tuple[int, ...] = ()

    @property
    def is_statistic(self) -> bool:
        """Whether it follows from the statistics of the tokens."""
        return all(not column and "max" not in token for column, token, _ in self.terms)


def matches(graph: Graph) -> Iterator[Match | Refusal]:
    """Yields a match for each cross-entropy whose logits nobody else reads, or the reason why it is none."""
    live = _live(graph)
    for eqn in graph.eqns:
        if eqn.primitive.name == "dot_general" and id(eqn) in live:
            found = [one for side in (1, 0) if (one := _at_product(graph, live, eqn, side)) is not None]
            yield from [one for one in found if isinstance(one, Match)][:1] or found[:1]


def _at_product(graph: Graph, live: set[int], eqn: Any, side: int) -> Match | Refusal | None:
    """Returns what follows a product with the head on `side` (0 or 1); None if it is no loss."""
    contracted, batched = eqn.params["dimension_numbers"]
    head, hidden = eqn.invars[side], eqn.invars[1 - side]
    if any(batched) or len(contracted[0]) != 1 or head.aval.ndim != 2 or is_literal(head) or is_literal(hidden):
        return None
    if not all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in (head, hidden, eqn.outvars[0])):
        return None
    product = _Product(graph, live, eqn, head, contracted[side][0], hidden, contracted[1 - side][0])
    if product.logits.aval.shape[product.axis] < 2:
        return None
    return _Loss(graph, live, product).found()


def _live(graph: Graph) -> set[int]:
    """Returns the ids of the equations that the results depend on."""
    live: set[int] = set()
    wanted = {atom for atom in graph.outvars if not is_literal(atom)}
    for eqn in reversed(graph.eqns):
        if eqn.effects or any(var in wanted for var in eqn.outvars):
            live.add(id(eqn))
            wanted |= {atom for atom in eqn.invars if not is_literal(atom)}
    return live


class _Product:
    """The product with the head and what follows it, elementwise, until the logits are read more than once."""

    def __init__(self, graph: Graph, live: set[int], eqn: Any, head: Any, head_axis: int, hidden: Any, axis: int):
        self.graph, self.eqn, self.hidden = graph, eqn, hidden
        producer = graph.producer(head)
        if producer is not None and producer.primitive.name == "transpose":  # not materialized for a loop
            head, head_axis = producer.invars[0], 1 - head_axis
        self.head, self.contracted = head, head_axis
        self.params: list[Any] = []
        self.elementwise: list[tuple[Any, list[tuple[str, Any]]]] = []
        self.eqns = [eqn]
        # the dimension of the vocabulary in the result of the product
        self.axis = hidden.aval.ndim - 1 if eqn.invars[0] is hidden else 0
        self._moves: list[Callable[[Any], Any]] = [lambda x, to=self.axis: jnp.moveaxis(x, axis, to)]
        self.logits = eqn.outvars[0]
        while True:
            readers = [one for one in graph.readers(self.logits) if id(one) in live]
            if len(readers) != 1 or graph.is_output(self.logits) or not self._absorbs(readers[0]):
                break
            self.eqns.append(readers[0])
            self.logits = readers[0].outvars[0]
        self.labels: list[Any] = list(range(self.logits.aval.ndim - 1))
        self.labels.insert(self.axis, V)

    def rows(self, hidden: Any) -> Any:
        """Returns the hidden states with the dimensions of the logits, D for the vocabulary, and that one last."""
        for move in self._moves:
            hidden = move(hidden)
        return jnp.moveaxis(hidden, self.axis, -1)

    def form(self) -> cross_entropy.LogitsForm:
        """Returns how the logits follow from the product."""
        dtype, steps = self.eqn.outvars[0].aval.dtype, self.elementwise

        def from_product(product, *params):
            x = product.astype(dtype)
            for eqn, operands in steps:
                env = {"logits": lambda _: x, "param": lambda k: jnp.broadcast_to(params[k], x.shape)}  # noqa: B023
                args = [value if kind == "literal" else env[kind](value) for kind, value in operands]
                (x,) = rebind(eqn, args)
            return x

        return cross_entropy.LogitsForm(self.contracted, from_product, self.eqn.params["precision"])

    def _absorbs(self, eqn: Any) -> bool:
        name, shape, params = eqn.primitive.name, self.logits.aval.shape, eqn.params
        new_shape = eqn.outvars[0].aval.shape
        if name == "reshape" and params.get("dimensions") is None:
            return self._reshaped(shape, new_shape)
        if name == "transpose":
            self._moves.append(lambda x, order=params["permutation"]: jnp.transpose(x, order))
            self.axis = tuple(params["permutation"]).index(self.axis)
            return True
        if name == "slice" and new_shape[self.axis] == shape[self.axis]:
            strides = params["strides"] or (1,) * len(shape)
            cuts = [
                slice(*each) for each in zip(params["start_indices"], params["limit_indices"], strides, strict=True)
            ]
            cuts[self.axis] = slice(None)
            self._moves.append(lambda x: x[tuple(cuts)])
            return True
        if name not in _ELEMENTWISE or new_shape != shape:
            return False
        params_before, operands = list(self.params), []
        for atom in eqn.invars:
            operand = ("logits", None) if atom is self.logits else self._param(atom, shape)
            if operand is None:
                self.params = params_before
                return False
            operands.append(operand)
        self.elementwise.append((eqn, operands))
        return True

    def _reshaped(self, shape: Sequence[int], new_shape: Sequence[int]) -> bool:
        old = self.axis
        for new, size in enumerate(new_shape):
            same_before = math.prod(new_shape[:new]) == math.prod(shape[:old])
            if size == shape[old] and same_before and math.prod(new_shape[new + 1 :]) == math.prod(shape[old + 1 :]):
                self._moves.append(_reshaping(new_shape, old, new))
                self.axis = new
                return True
        return False

    def _param(self, atom: Any, shape: Sequence[int]) -> tuple[str, Any] | None:
        """Returns an operand beside the logits: a literal, or the number of a param that is a scalar or [V]."""
        if is_literal(atom):
            return ("literal", atom.val) if not atom.aval.shape else None
        producer = self.graph.producer(atom)
        while producer is not None and producer.primitive.name == "broadcast_in_dim":
            operand = producer.invars[0]
            if is_literal(operand):
                return "literal", operand.val
            dims, out = producer.params["broadcast_dimensions"], producer.outvars[0].aval.shape
            place = len(shape) - len(out) + dims[-1] if dims else None
            if operand.aval.size > 1 and (operand.aval.size != shape[self.axis] or place != self.axis):
                break
            atom, producer = operand, self.graph.producer(operand)
        size = atom.aval.size
        if size > 1 and (size != shape[self.axis] or not self._is_along_vocabulary(atom.aval.shape, shape)):
            return None
        self.params.append(atom)
        return "param", len(self.params) - 1

    def _is_along_vocabulary(self, own: Sequence[int], shape: Sequence[int]) -> bool:
        if len(own) == 1:
            return True  # what was broadcast: its place is checked above
        return len(own) == len(shape) and own[self.axis] == shape[self.axis]


def _reshaping(shape: Sequence[int], old: int, new: int) -> Callable[[Any], Any]:
    return lambda x: x.reshape(*shape[:new], x.shape[old], *shape[new + 1 :])


class _Loss:
    """The equations after the logits."""

    def __init__(self, graph: Graph, live: set[int], product: _Product):
        self.graph, self.live, self.product = graph, live, product
        self.num_columns = product.logits.aval.shape[product.axis]
        self.values: dict[Any, _Value] = {product.logits: _Value({("z", "", ()): 1.0}, tuple(product.labels))}
        self.target: _Target | None = None
        self.factors: list[_Factor] = []
        self.has_normaliser = self.has_log = False
        self.flags: dict[Any, Any] = {}  # result of is_finite -> its operand

    def found(self) -> Match | Refusal | None:
        graph, product = self.graph, self.product
        eqns, outputs, problems = list(product.eqns), [], []
        if graph.is_output(product.logits):
            problems.append("the logits are returned")
        for eqn in graph.eqns:
            known = [atom for atom in eqn.invars if not is_literal(atom) and atom in self.values]
            if id(eqn) not in self.live or not known:
                continue
            statistics_only = all(self.values[atom].is_statistic for atom in known)
            # a call with a derivative rule is replaced whole
            absorbed = not statistics_only or id(eqn) in graph.sealed
            try:
                value = self._value(eqn)
            except _Unsupported as error:
                if not statistics_only:
                    problems.append(f"{error} ({eqn.primitive.name} at {graph.source(eqn)})")
                continue
            self.values[eqn.outvars[0]] = value
            if absorbed:
                eqns.append(eqn)
                if value.is_statistic:
                    outputs.append(eqn.outvars[0])
                elif graph.is_output(eqn.outvars[0]):
                    problems.append(f"the result of {eqn.primitive.name} at {graph.source(eqn)} is returned")
        if not self.has_normaliser and not (self.target and problems):
            return None
        source = graph.source(product.eqn)
        if problems:
            # a softmax that feeds products, as in attention and routers, is not a loss
            return Refusal(OP, source, problems[0]) if self.has_log or self.target else None
        eqns += self._unread_readers(eqns, outputs)
        inside = {id(eqn) for eqn in eqns}
        outputs = [var for var in outputs if self._is_read_outside(var, inside)]
        return self._match(eqns, outputs, source) if outputs else None

    def _unread_readers(self, eqns: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Returns the equations that read values between, but whose results nobody needs: the sign of a sum."""
        between = {var for eqn in eqns for var in eqn.outvars if var not in outputs}
        found = []
        for eqn in self.graph.eqns:
            if id(eqn) not in self.live and any(not is_literal(atom) and atom in between for atom in eqn.invars):
                found.append(eqn)
                between |= set(eqn.outvars)
        return found

    def _is_read_outside(self, var: Any, inside: set[int]) -> bool:
        readers = [eqn for eqn in self.graph.readers(var) if id(eqn) in self.live]
        return self.graph.is_output(var) or any(id(eqn) not in inside for eqn in readers)

    def _match(self, eqns: list[Any], outputs: list[Any], source: str) -> Match:
        product, target, values = self.product, self.target, self.values
        factors = dict.fromkeys(
            factor for var in outputs for _, _, all_of in values[var].terms for factor in all_of if factor != _IS_INSIDE
        )
        inputs = [product.hidden, product.head, *product.params, *([target.var] if target else [])]
        inputs = list(dict.fromkeys([*inputs, *(factor.var for factor in factors)]))
        num_columns = self.num_columns

        def replacement(choose: Choose, *given: Any) -> list[Any]:
            env = dict(zip(inputs, given, strict=True))
            hidden, head = product.rows(env[product.hidden]), env[product.head]
            shape = hidden.shape[:-1]
            targets = jnp.zeros(shape, jnp.int32)
            if target:
                targets = jnp.broadcast_to(_by_token(env[target.var], target.labels, len(shape)), shape)
            is_inside = (targets >= 0) & (targets < num_columns)
            if target and target.outside == "clip":
                targets = jnp.clip(targets, 0, num_columns - 1)
            call = cross_entropy.describe_call(hidden.shape, num_columns, dtype=hidden.dtype)
            found = cross_entropy.token_statistics(
                hidden,
                head=head,
                targets=targets,
                params=tuple(
                    env[var].reshape(-1) if env[var].size > 1 else env[var].reshape(()) for var in product.params
                ),
                form=product.form(),
                implementation=choose(cross_entropy.TOKEN_OP, call),
            )
            target_logit = found.target_logit
            if target and target.outside == "nan":
                target_logit = jnp.where(is_inside, target_logit, jnp.nan)
            columns = {"normaliser": found.log_normaliser, "target": target_logit, "sum": found.logit_sum}
            return [_evaluated(values[var], var.aval, columns, is_inside, env, len(shape)) for var in outputs]

        known = [f"{num_columns} columns", f"{target.outside} outside" if target else "no target"]
        if product.elementwise:
            known.append(", ".join(dict.fromkeys(eqn.primitive.name for eqn, _ in product.elementwise)))
        bounds = {target.var: num_columns} if target else {}
        return Match(OP, eqns, inputs, outputs, replacement, source, "; ".join(known), bounds)

    # Symbolic values of equations.

    def _value(self, eqn: Any) -> _Value:
        name = eqn.primitive.name
        if name in ("add", "sub"):
            left, right = self._operands(eqn)
            if left.is_exp or right.is_exp:
                raise _Unsupported("probabilities are added to other values")
            return _Value(_sum(left.terms, right.terms, -1.0 if name == "sub" else 1.0), _joined(left, right))
        if name in ("mul", "div"):
            return self._product_of(eqn)
        if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            value = self._known(eqn, 0)
            if value.is_exp:
                raise _Unsupported("probabilities are squared")
            return dataclasses.replace(value, terms=_times(value.terms, value.terms))
        if name == "neg":
            return self._scaled(self._known(eqn, 0), -1.0)
        if name in _IDENTITIES:
            value = self._known(eqn, 0)
            if name == "abs" and not value.is_exp:
                raise _Unsupported("the absolute value of logits is read")
            return value
        if name == "convert_element_type":
            if not jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
                raise _Unsupported("the logits are converted to integers")
            return self._known(eqn, 0)
        if name == "exp":
            return self._exp(self._known(eqn, 0))
        if name == "log":
            value = self._known(eqn, 0)
            if not value.is_exp:
                raise _Unsupported("a logarithm of something else than a sum of exponentials")
            self.has_log = True
            return dataclasses.replace(value, is_exp=False)
        if name == "max":
            return self._with_initial(eqn)
        if name == "is_finite":
            value = self._known(eqn, 0)
            self.flags[eqn.outvars[0]] = eqn.invars[0]
            return value
        if name == "select_n":
            return self._selected(eqn)
        if name == "reduce_max":
            return self._reduced_max(eqn)
        if name == "reduce_sum":
            return self._reduced_sum(self._known(eqn, 0), eqn.params["axes"], eqn.invars[0].aval.shape)
        if name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"):
            value = self._known(eqn, 0)
            return dataclasses.replace(value, labels=_moved(eqn, value.labels))
        if name == "gather":
            return self._gathered(eqn)
        if name == "dot_general":
            return self._contracted(eqn)
        raise _Unsupported("the logits, or values computed from them, are also read by another operation")

    def _known(self, eqn: Any, index: int) -> _Value:
        atom = eqn.invars[index]
        if is_literal(atom) or atom not in self.values:
            raise _Unsupported("the logits enter by another operand than expected")
        value = self.values[atom]
        if value.summed:
            raise _Unsupported("a sum over tokens is read")
        if atom in self.flags:
            raise _Unsupported("whether logits are finite is read")
        return value

    def _operands(self, eqn: Any) -> list[_Value]:
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
            raise _Unsupported("operands of different ranks")
        labels = [None if size == 1 else label for size, label in zip(shape, like, strict=True)]
        for k, (size, label) in enumerate(zip(shape, labels, strict=True)):
            if size > 1 and label is None:
                if size != self.num_columns or V in labels:
                    raise _Unsupported("an operand with dimensions that the logits do not have")
                labels[k] = V
        return tuple(labels)

    def _outside(self, atom: Any, labels: tuple[Any, ...]) -> _Value:
        """Returns the value of something that is not computed from the logits: weights, labels."""
        shape = atom.aval.shape
        if is_literal(atom):
            return _Value({("", "", ()): float(atom.val)}, labels)
        if atom in self.values:
            return dataclasses.replace(self.values[atom], labels=labels)
        eqn = self.graph.producer(atom)
        name = None if eqn is None else eqn.primitive.name
        if name == "broadcast_in_dim" and is_literal(eqn.invars[0]):
            return _Value({("", "", ()): float(eqn.invars[0].val)}, (None,) * len(shape))
        if V not in labels:
            if not shape and self.graph.is_constant(atom):
                constant = self.graph.constant(atom)
                if constant is not None:
                    return _Value({("", "", ()): float(constant)}, labels)
            return _Value({("", "", (_Factor(atom, labels),)): 1.0}, labels)
        if name in ("convert_element_type", "stop_gradient", "copy"):
            return self._outside(eqn.invars[0], labels)
        if name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims"):
            inner = _moved_back(eqn, labels)
            return dataclasses.replace(self._outside(eqn.invars[0], inner), labels=labels)
        if name in ("add", "sub", "mul", "div", "neg", "select_n", "eq"):
            of = [() if not one.aval.shape else _narrowed(labels, one.aval.shape) for one in eqn.invars]
            if name == "eq":
                return self._one_hot(eqn, of, labels)
            values = [self._outside(one, each) for one, each in zip(eqn.invars, of, strict=True)]
            if name == "neg":
                return self._scaled(values[0], -1.0)
            if name in ("add", "sub"):
                return _Value(_sum(values[0].terms, values[1].terms, -1.0 if name == "sub" else 1.0), labels)
            if name == "mul":
                return _Value(_times(values[0].terms, values[1].terms), labels)
            if name == "div":
                return _Value(_times(values[0].terms, _inverse(values[1].terms)), labels)
            off, on = values[1].terms, values[2].terms
            return _Value(_sum(off, _times(values[0].terms, _sum(on, off, -1.0)), 1.0), labels)
        raise _Unsupported("labels that are not one-hot of integers multiply the logits")

    def _one_hot(self, eqn: Any, of: Sequence[tuple], labels: tuple[Any, ...]) -> _Value:
        for target, columns in ((0, 1), (1, 0)):
            atom = eqn.invars[target]
            if V not in of[target] and self._is_column_index(eqn.invars[columns], of[columns]):
                if not jnp.issubdtype(atom.aval.dtype, jnp.integer):
                    break
                self._set_target(_Target(atom, of[target], "zero"))
                return _Value({("hot", "", ()): 1.0}, labels)
        raise _Unsupported("labels that are not one-hot of integers multiply the logits")

    def _is_column_index(self, atom: Any, labels: tuple[Any, ...]) -> bool:
        if V not in labels or is_literal(atom):
            return False
        eqn = self.graph.producer(atom)
        if eqn is not None and eqn.primitive.name == "iota":
            return eqn.params["dimension"] == labels.index(V)
        if atom.aval.size != self.num_columns:
            if eqn is not None and eqn.primitive.name in ("broadcast_in_dim", "convert_element_type"):
                inner = _moved_back(eqn, labels) if eqn.primitive.name == "broadcast_in_dim" else labels
                return self._is_column_index(eqn.invars[0], inner)
            return False
        constant = self.graph.constant(atom)
        return constant is not None and np.array_equal(constant.reshape(-1), np.arange(self.num_columns))

    def _set_target(self, target: _Target) -> None:
        if is_literal(target.var):
            raise _Unsupported("the target is a literal")
        if target.var in self.values:
            raise _Unsupported("the target is computed from the logits")
        if self.target is not None and self.target != target:
            raise _Unsupported("the logits of more than one target are read")
        self.target = target

    def _scaled(self, value: _Value, factor: float) -> _Value:
        if value.is_exp:
            raise _Unsupported("probabilities are scaled")
        return dataclasses.replace(value, terms={term: factor * c for term, c in value.terms.items()})

    def _product_of(self, eqn: Any) -> _Value:
        left, right = self._operands(eqn)
        labels = _joined(left, right)
        if left.is_exp and right.is_exp:
            sign = -1.0 if eqn.primitive.name == "div" else 1.0
            return _Value(_sum(left.terms, right.terms, sign), labels, is_exp=True)
        if left.is_exp or right.is_exp:
            raise _Unsupported("probabilities are multiplied with other values")
        other = _inverse(right.terms) if eqn.primitive.name == "div" else right.terms
        return _Value(_times(left.terms, other), labels)

    def _exp(self, value: _Value) -> _Value:
        wide = {term: c for term, c in value.terms.items() if term[0]}
        if value.is_exp or (wide and wide != {("z", "", ()): 1.0}):
            raise _Unsupported("logits with a scale per token, or with labels in them, are read")
        return dataclasses.replace(value, is_exp=True)

    def _with_initial(self, eqn: Any) -> _Value:
        first = eqn.invars[0]
        known = 0 if not is_literal(first) and first in self.values else 1
        other = self.graph.constant(eqn.invars[1 - known])
        if other is None or other.size != 1 or other != -np.inf:
            raise _Unsupported("the logits are compared with other values")
        return self._known(eqn, known)

    def _selected(self, eqn: Any) -> _Value:
        which, *cases = eqn.invars
        if len(cases) != 2:
            raise _Unsupported("the logits are selected from")
        if which in self.flags and cases[1] is self.flags[which]:
            return self.values[cases[1]]
        if is_literal(which) or which in self.values or (not is_literal(cases[0]) and cases[0] in self.values):
            raise _Unsupported("the logits are selected from by values")
        value = self._known(eqn, 2)
        labels = self._labels_like(which, value.labels)
        off = self._outside(cases[0], self._labels_like(cases[0], value.labels)).terms
        if value.is_exp or any(off.values()):
            raise _Unsupported("logits of some columns or tokens are replaced")
        return _Value(_times(value.terms, self._outside(which, labels).terms), value.labels)

    def _reduced_max(self, eqn: Any) -> _Value:
        value = self._known(eqn, 0)
        axes = eqn.params["axes"]
        labels = [value.labels[axis] for axis in axes]
        if V not in labels:
            raise _Unsupported("a maximum over another axis than the vocabulary is read")
        if value.is_exp or value.terms != {("z", "", ()): 1.0}:
            raise _Unsupported("logits with a scale per token, or with labels in them, are read")
        kept = tuple(label for axis, label in enumerate(value.labels) if axis not in axes)
        return _Value({("", f"max[{','.join(sorted(map(str, labels)))}]", ()): 1.0}, kept)

    def _reduced_sum(self, value: _Value, axes: Sequence[int], shape: Sequence[int]) -> _Value:
        labels = [value.labels[axis] for axis in axes]
        kept = tuple(label for axis, label in enumerate(value.labels) if axis not in axes)
        copies = math.prod(shape[axis] for axis in axes if value.labels[axis] is None)
        summed = tuple(label for label in labels if label not in (None, V))
        if V not in labels:
            if V in value.labels or value.is_exp or not value.is_statistic:
                raise _Unsupported("logits or log-normalisers are summed over tokens")
        elif value.is_exp:
            if ("z", "", ()) not in value.terms or copies != 1:
                raise _Unsupported("exponentials are summed over another axis")
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
            raise _Unsupported("logits or exponentials are summed over tokens")
        return value

    def _over_columns(self, terms: Mapping[_Term, float]) -> dict[_Term, float]:
        total: dict[_Term, float] = {}
        for (column, token, factors), c in terms.items():
            if column in ("z", "hot z") and token:
                raise _Unsupported("logits are multiplied with each other")
            if column == "":
                new, c = ("", token, factors), c * self.num_columns
            elif column == "hot":
                new = ("", token, _sorted((*factors, _IS_INSIDE)))
            else:
                new = ("", "sum" if column == "z" else "target", factors)
            total = _sum(total, {new: c}, 1.0)
        return total

    def _gathered(self, eqn: Any) -> _Value:
        value, numbers, sizes = self._known(eqn, 0), eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        indices, mode = eqn.invars[1], eqn.params["mode"].name
        if V not in value.labels:
            raise _Unsupported("single tokens are read by index")
        axis = value.labels.index(V)
        mapped = [int(k) for k in numbers.start_index_map]
        if axis not in mapped or sizes[axis] != 1:
            raise _Unsupported("single tokens are read by index")
        parts = self._index_parts(indices, len(mapped))
        batch = [None] * (indices.aval.ndim - 1)
        for dim, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            batch[index_dim] = value.labels[dim]
        for dim, part in zip(mapped, parts, strict=True):
            if dim != axis:
                batch[self._counted_dim(part, value.labels[dim], eqn.invars[0].aval.shape[dim])] = value.labels[dim]
        for dim, size in enumerate(indices.aval.shape[:-1]):
            if batch[dim] is None and size > 1:
                raise _Unsupported("several logits of a token are read by index")
        skipped = {int(k) for k in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)}
        offsets = [dim for dim in range(len(sizes)) if dim not in skipped]
        if any(dim != axis and sizes[dim] != eqn.invars[0].aval.shape[dim] for dim in offsets):
            raise _Unsupported("some tokens are read by index")
        rest, own = iter(batch), dict(zip((int(k) for k in numbers.offset_dims), offsets, strict=True))
        labels = tuple(
            (None if own[k] == axis else value.labels[own[k]]) if k in own else next(rest)
            for k in range(eqn.outvars[0].aval.ndim)
        )
        if sorted(x for x in labels if x is not None) != sorted(x for x in value.labels if x not in (None, V)):
            raise _Unsupported("some tokens are read by index")
        outside = "nan" if mode == "FILL_OR_DROP" else "clip"
        self._set_target(_Target(parts[mapped.index(axis)], (*batch, None), outside))
        terms: dict[_Term, float] = {}
        for (column, token, factors), c in value.terms.items():
            if column not in ("", "z") or (column and token):
                raise _Unsupported("a column of labels is read by index")
            terms = _sum(terms, {("", "target" if column else token, factors): c}, 1.0)
        return _Value(terms, labels, value.is_exp)

    def _index_parts(self, indices: Any, count: int) -> list[Any]:
        if count == 1:
            return [indices]
        eqn = self.graph.producer(indices)
        if eqn is None or eqn.primitive.name != "concatenate" or len(eqn.invars) != count:
            raise _Unsupported("logits are read by indices that are not understood")
        return list(eqn.invars)

    def _counted_dim(self, part: Any, label: Any, size: int) -> int:
        """Returns the dimension along which indices are 0, 1, 2, ... for every token of a dimension."""
        found = self.graph.constant(part)
        for dim in range(part.aval.ndim - 1) if found is not None else ():
            shape = [1] * part.aval.ndim
            shape[dim] = -1
            if found.shape[dim] == size and np.array_equal(
                found, np.broadcast_to(np.arange(size).reshape(shape), found.shape)
            ):
                return dim
        raise _Unsupported("logits of other tokens are read by index")

    def _contracted(self, eqn: Any) -> _Value:
        left, right = self._operands_of_dot(eqn)
        (left_axes, right_axes), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        batch = [left.labels[axis] for axis in left_batch]
        over = [left.labels[axis] for axis in left_axes]
        is_elementwise = batch == [right.labels[axis] for axis in right_batch]
        is_elementwise &= over == [right.labels[axis] for axis in right_axes] and over.count(V) == 1
        if left.is_exp or right.is_exp or not is_elementwise or len(batch) + len(over) != len(left.labels):
            raise _Unsupported("the logits are read by a product")
        value = _Value(_times(left.terms, right.terms), left.labels)
        order = [*left_batch, *left_axes]
        value = dataclasses.replace(value, labels=tuple(left.labels[axis] for axis in order))
        shape = [eqn.invars[0].aval.shape[axis] for axis in order]
        return self._reduced_sum(value, range(len(left_batch), len(order)), shape)

    def _operands_of_dot(self, eqn: Any) -> list[_Value]:
        if eqn.invars[0].aval.shape != eqn.invars[1].aval.shape:
            raise _Unsupported("the logits are read by a product")
        return self._operands(eqn)


def _evaluated(
    value: _Value, aval: Any, columns: Mapping[str, Any], is_inside: Any, env: Mapping[Any, Any], rank: int
) -> jax.Array:
    """Returns a variable of shape `aval.shape` from the statistics [...] of all tokens."""
    total: Any = 0.0
    for (_, token, factors), coefficient in value.terms.items():
        term = math.prod((columns[word] for word in token.split()), start=coefficient)
        for factor in factors:
            if factor == _IS_INSIDE:
                term = term * is_inside
            else:
                array = _by_token(env[factor.var], factor.labels, rank)
                term = term / array if factor.is_inverse else term * array
        total = total + term
    total = jnp.exp(total) if value.is_exp else total
    total = jnp.broadcast_to(total, is_inside.shape).sum(axis=value.summed)
    left = [label for label in range(rank) if label not in value.summed]
    dropped = [label for label in left if label not in value.labels]
    if any(is_inside.shape[label] > 1 for label in dropped):
        raise ValueError("a value of every token is read where the function has one for all")
    total = total.squeeze(tuple(left.index(label) for label in dropped))
    left = [label for label in left if label not in dropped]
    order = [label for label in value.labels if label is not None]
    total = total.transpose([left.index(label) for label in order])
    total = jnp.expand_dims(total, tuple(axis for axis, label in enumerate(value.labels) if label is None))
    return jnp.broadcast_to(total, aval.shape).astype(aval.dtype)


def _by_token(array: Any, labels: tuple[Any, ...], rank: int) -> jax.Array:
    """Returns an array with its dimensions in the order of the tokens' dimensions, 1 where it is constant."""
    array = jnp.squeeze(array, tuple(axis for axis, label in enumerate(labels) if label is None))
    left = [label for label in labels if label is not None]
    array = jnp.transpose(array, [left.index(label) for label in sorted(left)])
    return jnp.expand_dims(array, tuple(label for label in range(rank) if label not in left))


def _sorted(factors: tuple[Any, ...]) -> tuple[Any, ...]:
    # an index is in the vocabulary or not: a second time adds nothing
    once = [factor for factor in factors if factor != _IS_INSIDE] + [_IS_INSIDE] * (_IS_INSIDE in factors)
    return tuple(sorted(once, key=lambda one: (str(type(one)), id(getattr(one, "var", None)), str(one))))


def _sum(left: Mapping[_Term, float], right: Mapping[_Term, float], sign: float) -> dict[_Term, float]:
    terms = dict(left)
    for term, c in right.items():
        terms[term] = terms.get(term, 0.0) + sign * c
    return {term: c for term, c in terms.items() if c or term == ("", "", ())}


def _times(left: Mapping[_Term, float], right: Mapping[_Term, float]) -> dict[_Term, float]:
    terms: dict[_Term, float] = {}
    for (column, token, factors), c in left.items():
        for (other_column, other_token, other_factors), other in right.items():
            both = {*column.split(), *other_column.split()}
            if ("z" in column and "z" in other_column) or (both and token and other_token):
                raise _Unsupported("logits are multiplied with each other")
            name = " ".join(part for part in ("hot", "z") if part in both)
            tokens = " ".join(sorted([*token.split(), *other_token.split()]))
            term = name, tokens, _sorted((*factors, *other_factors))
            terms = _sum(terms, {term: c * other}, 1.0)
    return terms


def _inverse(terms: Mapping[_Term, float]) -> dict[_Term, float]:
    if len(terms) != 1:
        raise _Unsupported("the logits are divided by a sum")
    (((column, token, factors), c),) = terms.items()
    if column or token or not c or _IS_INSIDE in factors:
        raise _Unsupported("values are divided by logits")
    return {("", "", tuple(dataclasses.replace(one, is_inverse=not one.is_inverse) for one in factors)): 1.0 / c}


def _joined(left: _Value, right: _Value) -> tuple[Any, ...]:
    if not left.labels or not right.labels:
        return left.labels or right.labels
    labels = []
    for one, other in zip(left.labels, right.labels, strict=True):
        if one is not None and other is not None and one != other:
            raise _Unsupported("values of different dimensions are combined")
        labels.append(other if one is None else one)
    return tuple(labels)


def _narrowed(labels: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    return tuple(None if size == 1 else label for label, size in zip(labels, shape, strict=True))


def _moved(eqn: Any, labels: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the labels of the result of an equation that moves, adds or removes dimensions."""
    name, params = eqn.primitive.name, eqn.params
    shape, new_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "transpose":
        return tuple(labels[axis] for axis in params["permutation"])
    if name == "broadcast_in_dim":
        new: list[Any] = [None] * len(new_shape)
        for label, axis in zip(labels, params["broadcast_dimensions"], strict=True):
            new[axis] = label
        return tuple(new)
    # dimensions of size 1 come and go
    wide = [(size, label) for size, label in zip(shape, labels, strict=True) if size > 1]
    if [size for size, _ in wide] != [size for size in new_shape if size > 1]:
        raise _Unsupported("dimensions of logits are merged or split")
    if name == "squeeze":
        dropped = {axis % len(shape) for axis in params["dimensions"]}
        return tuple(label for axis, label in enumerate(labels) if axis not in dropped)
    if any(size == 1 and label is not None for size, label in zip(shape, labels, strict=True)):
        return _reshaped_labels(shape, labels, new_shape)
    left = iter([label for _, label in wide])
    return tuple(next(left) if size > 1 else None for size in new_shape)


def _reshaped_labels(shape: Sequence[int], labels: Sequence[Any], new_shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns the labels after a reshape of one that has dimensions of one token: they are kept at the same place."""
    if len(new_shape) >= len(shape) and tuple(new_shape[: len(shape)]) == tuple(shape):
        return (*labels, *[None] * (len(new_shape) - len(shape)))
    kept, dropped = labels[: len(new_shape)], labels[len(new_shape) :]
    if tuple(shape[: len(new_shape)]) == tuple(new_shape) and not any(label is not None for label in dropped):
        return tuple(kept)
    raise _Unsupported("dimensions of one token are moved")


def _moved_back(eqn: Any, labels: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the labels of the operand of an equation whose result has these."""
    shape, params = eqn.invars[0].aval.shape, eqn.params
    if eqn.primitive.name == "broadcast_in_dim":
        return _narrowed([labels[axis] for axis in params["broadcast_dimensions"]], shape)
    left = iter([label for label, size in zip(labels, eqn.outvars[0].aval.shape, strict=True) if size > 1])
    if [size for size in shape if size > 1] != [size for size in eqn.outvars[0].aval.shape if size > 1]:
        raise _Unsupported("labels whose dimensions are merged or split")
    return tuple(next(left) if size > 1 else None for size in shape)
