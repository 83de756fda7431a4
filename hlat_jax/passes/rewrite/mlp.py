"""Finds the second half of MLPs in a jaxpr: an activation, whatever it is, and the product that reads it.

The activation is computed elementwise from one hidden array, or from two, such as a gate beside another one. The
backward pass of the replacement keeps these alone, and computes the activation from them again; what dropout keeps is
kept as bools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.passes.fences import checkpoint_in_order
from hlat_jax.passes.jaxpr import ELEMENTWISE, bind_again, is_literal, primitives, values_of
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match

_MOST_ARRAYS = 2  # hidden ones
_MOST_EQUATIONS = 40
_LEAST_KEPT = 2  # arrays that the backward pass keeps of an activation which is worth it
# Of these the derivative reads an operand or the result; of a product and a quotient where both operands vary.
_CURVED = primitives("tanh logistic exp exp2 log log1p log2 erf erfc integer_pow pow sqrt square one_minus_square")
_BILINEAR = frozenset({"mul", "div"})


def matches(graph: EquationGraph) -> Iterator[Match]:
    """Yields a match for each product of an activation with weights."""
    for eqn in graph.eqns:
        if eqn.primitive.name == "dot_general":
            for side, var in enumerate(eqn.invars):
                inputs, between = _activation(graph, var)
                is_new = eqn.invars[1 - side] not in {one for step in between for one in step.outvars}
                num_kept = sum(_is_kept(graph, one) for one in between)
                if is_new and num_kept >= _LEAST_KEPT:
                    facts = f"{num_kept} arrays computed again, F {between[-1].outvars[0].aval.shape[-1]}"
                    yield _match(graph, eqn, side, inputs, between, facts)
                    break


def _activation(graph: EquationGraph, var: Any) -> tuple[list[Any], list[Any]]:
    """Returns (arrays, equations) by which an operand is computed elementwise; nothing if there are too many."""
    inputs: dict[Any, None] = {}
    elementwise: dict[int, Any] = {}
    todo = [] if is_literal(var) or not jnp.issubdtype(var.aval.dtype, jnp.floating) else [var]
    while todo:
        one = todo.pop()
        eqn = graph.producer(one)
        if is_literal(one) or (eqn is None and graph.is_constant(one)) or one in inputs:
            continue
        if eqn is None or not _is_elementwise(graph, eqn):
            inputs[one] = None
        elif id(eqn) not in elementwise:
            elementwise[id(eqn)] = eqn
            todo += eqn.invars
        if len(elementwise) > _MOST_EQUATIONS:
            return [], []
    eqns = [eqn for eqn in graph.eqns if id(eqn) in elementwise]
    for eqn in list(eqns):  # such as the sum with a bias, whose result is kept instead
        reads = {atom for atom in eqn.invars if not graph.is_constant(atom)}
        others = {atom for other in eqns if other is not eqn for atom in other.invars if not is_literal(atom)}
        if reads <= set(inputs) and not reads & others and not _is_kept(graph, eqn):
            eqns.remove(eqn)
            inputs = {one: None for one in inputs if one not in reads} | dict.fromkeys(eqn.outvars)
    num_arrays = sum(one.aval.dtype != bool and not graph.is_constant(one) for one in inputs)
    return (list(inputs), eqns) if num_arrays <= _MOST_ARRAYS else ([], [])


def _is_elementwise(graph: EquationGraph, eqn: Any) -> bool:
    """Returns whether an equation is one of an activation: of arrays like its result, with JAX's derivative."""
    shape = eqn.outvars[0].aval.shape
    alike = all(atom.aval.shape in (shape, ()) for atom in eqn.invars)
    return eqn.primitive.name in ELEMENTWISE and alike and not eqn.effects


def _is_kept(graph: EquationGraph, eqn: Any) -> bool:
    """Returns whether the derivative of an equation reads its operands or its result."""
    num_varying = sum(not graph.is_constant(atom) for atom in eqn.invars)
    return num_varying > 0 and (eqn.primitive.name in _CURVED or (eqn.primitive.name in _BILINEAR and num_varying > 1))


def _match(graph: EquationGraph, eqn: Any, side: int, inputs: list[Any], between: list[Any], facts: str) -> Match:
    weights = eqn.invars[1 - side]

    def product(*args: jax.Array) -> list[jax.Array]:
        env = {**graph.values, **dict(zip((*inputs, weights), args, strict=True))}
        for step in (*between, eqn):
            env |= zip(step.outvars, bind_again(step, values_of(step.invars, env)), strict=True)
        return [env[eqn.outvars[0]]]

    # recomputation does not wait for the weights
    recomputed = checkpoint_in_order(
        product, policy=jax.checkpoint_policies.nothing_saveable, waiting=[*[True] * len(inputs), False]
    )

    def replacement(choose: Choose, *given: Any) -> list[Any]:
        return recomputed(*given)

    return Match(
        op="mlp",
        eqns=[*between, eqn],
        inputs=[*inputs, weights],
        outputs=[eqn.outvars[0]],
        replacement=replacement,
        source=graph.source(eqn),
        facts=facts,
    )
