"""Finds cross-entropies in foreign functions: product, log-sum-exp, the logit of the target, in any spelling.

The equations after a product are evaluated symbolically (`loss_terms`). Where nothing but the statistics of tokens
leaves them, `token_statistics` computes these, and the rest of the loss (z-loss, weights, mean) stays as
it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops import token_statistics
from hlat_jax.passes.jaxpr import rebind
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match, Refusal, is_literal
from hlat_jax.passes.rewrite.loss_terms import IS_INSIDE, Expression, Symbolic, Unsupported, V

OP = "cross_entropy"
# Elementwise equations between the product and the softmax that `LogitsForm.from_product` takes over.
_ELEMENTWISE = frozenset(
    {"convert_element_type", "reduce_precision", "mul", "div", "add", "sub", "neg", "tanh", "max", "min", "clamp"}
    | {"select_n", "copy", "name"}
)


def matches(graph: EquationGraph) -> Iterator[Match | Refusal]:
    """Yields a match for each cross-entropy whose logits nobody else reads, or the reason why it is none."""
    live = _live(graph)
    for eqn in graph.eqns:
        if eqn.primitive.name == "dot_general" and id(eqn) in live:
            found = [one for side in (1, 0) if (one := _at_product(graph, live, eqn, side)) is not None]
            yield from [one for one in found if isinstance(one, Match)][:1] or found[:1]


def _at_product(graph: EquationGraph, live: set[int], eqn: Any, side: int) -> Match | Refusal | None:
    """Returns what follows a product with the head on `side` (0 or 1); None if it is no loss."""
    contracted, batched = eqn.params["dimension_numbers"]
    head, hidden = eqn.invars[side], eqn.invars[1 - side]
    if any(batched) or len(contracted[0]) != 1 or head.aval.ndim != 2 or is_literal(head) or is_literal(hidden):
        return None
    if not all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in (head, hidden, eqn.outvars[0])):
        return None
    product = _Product(graph, live, eqn, (head, contracted[side][0]), (hidden, contracted[1 - side][0]))
    if product.logits.aval.shape[product.axis] < 2:
        return None
    return _Loss(graph, live, product).found()


def _live(graph: EquationGraph) -> set[int]:
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

    def __init__(
        self, graph: EquationGraph, live: set[int], eqn: Any, head_side: tuple[Any, int], hidden_side: tuple[Any, int]
    ):
        (head, head_axis), (hidden, axis) = head_side, hidden_side
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
        to = self.axis
        self._moves: list[Callable[[Any], Any]] = [lambda x: jnp.moveaxis(x, axis, to)]
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

    def form(self) -> token_statistics.LogitsForm:
        """Returns how the logits follow from the product."""
        dtype, steps = self.eqn.outvars[0].aval.dtype, self.elementwise

        def from_product(product, *params):
            x = product.astype(dtype)
            for eqn, operands in steps:
                env = {"logits": lambda _: x, "param": lambda k: jnp.broadcast_to(params[k], x.shape)}  # noqa: B023
                args = [value if kind == "literal" else env[kind](value) for kind, value in operands]
                (x,) = rebind(eqn, args)
            return x

        return token_statistics.LogitsForm(self.contracted, from_product, self.eqn.params["precision"])

    def _absorbs(self, eqn: Any) -> bool:
        name, shape, permutation = eqn.primitive.name, self.logits.aval.shape, eqn.params.get("permutation")
        if name == "transpose":
            self._moves.append(lambda x: jnp.transpose(x, permutation))
            self.axis = tuple(permutation).index(self.axis)
            return True
        if name not in _ELEMENTWISE or eqn.outvars[0].aval.shape != shape:
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


class _Loss:
    """The equations after the logits."""

    def __init__(self, graph: EquationGraph, live: set[int], product: _Product):
        self.graph, self.live, self.product = graph, live, product
        self.symbolic = Symbolic(graph, product.logits, product.labels)

    def found(self) -> Match | Refusal | None:
        graph, product, symbolic = self.graph, self.product, self.symbolic
        eqns, outputs, problems = list(product.eqns), [], []
        if graph.is_output(product.logits):
            problems.append("the logits are returned")
        for eqn in graph.eqns:
            known = [atom for atom in eqn.invars if not is_literal(atom) and atom in symbolic.values]
            if id(eqn) not in self.live or not known:
                continue
            statistics_only = all(symbolic.values[atom].is_statistic for atom in known)
            # a call with a derivative rule is replaced whole
            absorbed = not statistics_only or id(eqn) in graph.sealed
            try:
                value = symbolic.value_of(eqn)
            except Unsupported as error:
                if not statistics_only:
                    problems.append(f"{error} ({eqn.primitive.name} at {graph.source(eqn)})")
                continue
            if absorbed:
                eqns.append(eqn)
                if value.is_statistic:
                    outputs.append(eqn.outvars[0])
                elif graph.is_output(eqn.outvars[0]):
                    problems.append(f"the result of {eqn.primitive.name} at {graph.source(eqn)} is returned")
        if not symbolic.has_normaliser and not (symbolic.target and problems):
            return None
        source = graph.source(product.eqn)
        if problems:
            # a softmax that feeds products, as in attention and routers, is not a loss
            return Refusal(OP, source, problems[0]) if symbolic.has_log or symbolic.target else None
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
        product, target, values = self.product, self.symbolic.target, self.symbolic.values
        factors = dict.fromkeys(
            factor for var in outputs for _, _, all_of in values[var].terms for factor in all_of if factor != IS_INSIDE
        )
        inputs = [product.hidden, product.head, *product.params, *([target.var] if target else [])]
        inputs = list(dict.fromkeys([*inputs, *(factor.var for factor in factors)]))
        num_columns = self.symbolic.num_columns

        def replacement(choose: Choose, *given: Any) -> list[Any]:
            env = dict(zip(inputs, given, strict=True))
            hidden, head = product.rows(env[product.hidden]), env[product.head]
            shape = hidden.shape[:-1]
            targets = jnp.zeros(shape, jnp.int32)
            if target:
                targets = jnp.broadcast_to(_by_token(env[target.var], target.labels, len(shape)), shape)
            is_inside = (targets >= 0) & (targets < num_columns)
            statistics = token_statistics.token_statistics(
                hidden,
                head=head,
                targets=targets,
                params=tuple(
                    env[var].reshape(-1) if env[var].size > 1 else env[var].reshape(()) for var in product.params
                ),
                form=product.form(),
            )
            target_logit = statistics.target_logit
            if target and target.outside == "nan":
                target_logit = jnp.where(is_inside, target_logit, jnp.nan)
            columns = {"normaliser": statistics.log_normaliser, "target": target_logit, "sum": statistics.logit_sum}
            return [_evaluated(values[var], var.aval, columns, is_inside, env, len(shape)) for var in outputs]

        known = [f"vocabulary {num_columns}"]
        if target:
            known.append("one-hot targets" if target.outside == "zero" else "targets by index")
        if product.elementwise:
            between = dict.fromkeys(eqn.primitive.name for eqn, _ in product.elementwise)
            known.append(f"{', '.join(between)} after the product")
        bounds = {target.var: num_columns} if target else {}
        return Match(OP, eqns, inputs, outputs, replacement, source, ", ".join(known), int_bounds=bounds)


def _evaluated(
    value: Expression, aval: Any, columns: Mapping[str, Any], is_inside: Any, env: Mapping[Any, Any], rank: int
) -> jax.Array:
    """Returns a variable of shape `aval.shape` from the statistics [...] of all tokens."""
    total: Any = 0.0
    for (_, token, factors), coefficient in value.terms.items():
        term = math.prod((columns[word] for word in token.split()), start=coefficient)
        for factor in factors:
            if factor == IS_INSIDE:
                term = term * is_inside
            else:
                array = _by_token(env[factor.var], factor.labels, rank)
                if array.dtype == bool:  # of a select: what is not selected may be NaN
                    term = jnp.where(array, term, 0)
                else:
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
    # dimensions along which the variable is constant have its size, the others that of the tokens
    shape = [aval.shape[k] if label is None else total.shape[k] for k, label in enumerate(value.labels)]
    return jnp.broadcast_to(total, shape).astype(aval.dtype)


def _by_token(array: Any, labels: tuple[Any, ...], rank: int) -> jax.Array:
    """Returns an array with its dimensions in the order of the tokens' dimensions, 1 where it is constant."""
    array = jnp.squeeze(array, tuple(axis for axis, label in enumerate(labels) if label is None))
    left = [label for label in labels if label is not None]
    array = jnp.transpose(array, [left.index(label) for label in sorted(left)])
    return jnp.expand_dims(array, tuple(label for label in range(rank) if label not in left))
