"""Finds the second half of MLPs in a jaxpr: GELU of a hidden array or a gated pair, and the product that reads it.

What stands between the products is recognized by its values, so that its spelling does not matter. The backward pass of
the replacement keeps the hidden arrays alone, and computes the activation from them again.
Source: arXiv 1606.08415; arXiv 2002.05202, equation 6.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.fences import checkpoint_in_order
from hlat_jax.passes.jaxpr import rebind
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match, is_literal

# Name -> function of one hidden array; of two, it is multiplied with the second.
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "GELU by tanh": functools.partial(jax.nn.gelu, approximate=True),
    "GELU": functools.partial(jax.nn.gelu, approximate=False),
    "SiLU": jax.nn.silu,
}
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "exp", "tanh", "logistic", "erf", "erfc", "square", "integer_pow", "pow"}
    | {"sqrt", "rsqrt", "convert_element_type", "copy", "copy_p"}
)
_CURVED = frozenset({"tanh", "logistic", "exp", "erf", "erfc"})
_MOST = 40  # equations of an activation
# GELU and its approximation by tanh differ by 4e-4 here, where the largest value is 6.
_GRID = np.linspace(-6.0, 6.0, 49, dtype=np.float32)
_TOLERANCE = 1e-5


def matches(graph: EquationGraph) -> Iterator[Match]:
    """Yields a match for each product of a known activation with weights."""
    numbers = {id(eqn): number for number, eqn in enumerate(graph.eqns)}
    for eqn in graph.eqns:
        if eqn.primitive.name == "dot_general" and id(eqn) not in graph.sealed:  # with a derivative of its own
            for side, var in enumerate(eqn.invars):
                found = None if is_literal(var) else _before(graph, numbers, var)
                if found is not None:
                    yield _match(eqn, side, graph, *found)
                    break


def _before(graph: EquationGraph, numbers: Mapping[int, int], var: Any) -> tuple[str, list[Any], list[Any]] | None:
    """Returns (activation, hidden arrays, equations between) of an operand; None if it is no known activation."""
    last = graph.producer(var)
    if last is None or last.primitive.name not in _ELEMENTWISE or var.aval.dtype != jnp.float32:
        return None
    found = [[one] for one in _sources(graph, numbers, var)]
    if last.primitive.name == "mul" and not any(map(graph.is_constant, last.invars)):
        for gate, up in (last.invars, last.invars[::-1]):
            found += [[one, up] for one in _sources(graph, numbers, gate)]
    for hidden in found:
        eqns = _between(graph, hidden, var)
        if eqns is not None and any(eqn.primitive.name in _CURVED for eqn in eqns):
            with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
                name = _recognized(graph, hidden, eqns, var)
            if name is not None:
                return name, hidden, eqns
    return None


def _sources(graph: EquationGraph, numbers: Mapping[int, int], var: Any) -> list[Any]:
    """Returns the variables from each of which alone another is computed elementwise, the first one first."""
    found: list[Any] = []
    left = {var}  # between what is visited and what is not; those without an equation to visit stay
    waiting = [-numbers[id(eqn)] for eqn in [_opened(graph, var)] if eqn is not None]
    for _ in range(_MOST):
        if not waiting:
            break
        eqn = graph.eqns[-heapq.heappop(waiting)]
        left -= set(eqn.outvars)
        for atom in {atom for atom in eqn.invars if not graph.is_constant(atom)} - left:
            left.add(atom)
            before = _opened(graph, atom)
            if before is not None:
                heapq.heappush(waiting, -numbers[id(before)])
        if len(left) == 1:
            found += left
    return found[::-1]


def _opened(graph: EquationGraph, var: Any) -> Any:
    """Returns the equation of a variable if it is elementwise, of operands like its result."""
    eqn = graph.producer(var)
    if eqn is None or id(eqn) in graph.sealed or eqn.primitive.name not in _ELEMENTWISE:
        return None
    operands = [atom.aval for atom in eqn.invars if not graph.is_constant(atom)]
    is_alike = all((aval.shape, aval.dtype) == (var.aval.shape, jnp.float32) for aval in operands)
    return eqn if is_alike else None


def _between(graph: EquationGraph, hidden: Sequence[Any], var: Any) -> list[Any] | None:
    """Returns the equations from the hidden arrays to `var`, in order; None if it also depends on others."""
    found: dict[int, Any] = {}
    todo = [var]
    while todo:
        one = todo.pop()
        if graph.is_constant(one) or one in hidden:
            continue
        eqn = _opened(graph, one)
        if eqn is None or len(found) > _MOST:
            return None
        found[id(eqn)] = eqn
        todo += eqn.invars
    return [eqn for eqn in graph.eqns if id(eqn) in found]


def _recognized(graph: EquationGraph, hidden: Sequence[Any], eqns: Sequence[Any], var: Any) -> str | None:
    """Returns the activation that has the values of `var`; None if it is none of them."""
    inputs = [jnp.asarray(_GRID), jnp.cos(3 * _GRID)][: len(hidden)]
    env = dict(zip(hidden, inputs, strict=True))
    for eqn in eqns:
        operands = []
        for atom in eqn.invars:
            if not graph.is_constant(atom):
                operands.append(env[atom])
                continue
            value = graph.constant(atom)
            if value is None or not value.size or not (value == value.flat[0]).all():
                return None  # it is not computed alike for every element
            operands.append(np.full_like(_GRID, value.flat[0], dtype=value.dtype))
        (env[eqn.outvars[0]],) = rebind(eqn, operands)
    for name in _ACTIVATIONS:
        if jnp.max(jnp.abs(env[var] - _activate(name, inputs))) <= _TOLERANCE:
            return name
    return None


def _activate(name: str, hidden: Sequence[jax.Array]) -> jax.Array:
    """Returns the operand of the second product."""
    activated = _ACTIVATIONS[name](hidden[0])
    return activated if len(hidden) == 1 else activated * hidden[1]


def _match(eqn: Any, side: int, graph: EquationGraph, name: str, hidden: list[Any], between: list[Any]) -> Match:
    def product(*args: jax.Array) -> list[jax.Array]:
        activated, weights = _activate(name, args[:-1]), args[-1]
        return [rebind(eqn, (activated, weights) if side == 0 else (weights, activated))[0]]

    # recomputation does not wait for the weights
    recomputed = checkpoint_in_order(
        product, policy=jax.checkpoint_policies.nothing_saveable, waiting=[*[True] * len(hidden), False]
    )

    def replacement(choose: Choose, *given: Any) -> list[Any]:
        return recomputed(*given)

    return Match(
        op="mlp",
        eqns=[*between, eqn],
        inputs=[*hidden, eqn.invars[1 - side]],
        outputs=[eqn.outvars[0]],
        replacement=replacement,
        source=graph.source(eqn),
        facts=f"{name}{' of a gate' if len(hidden) > 1 else ''}, F {hidden[0].aval.shape[-1]}",
    )
