"""Compares the derivative rule of a function with the derivative of its body, on random inputs.

Many losses have a `custom_vjp` that only saves memory or time. If you name such a function, and its rule is the
derivative of its body, passes read the body in place of the call. Some rules ignore a result that is only logged, or an
argument such as a coefficient. The body then gets a `stop_gradient` there. The comparison is a guard and no proof.
Random inputs do not show a rule that differs for single values, such as a label that does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from hlat_jax.passes.dataflow import upstream
from hlat_jax.passes.interpret import Body, called
from hlat_jax.passes.jaxpr import bind_again, is_inexact, is_literal, op_name, perturbed_at, values_of, variables
from hlat_jax.passes.rewrite import check
from hlat_jax.passes.rewrite.graph import EquationGraph, Match

_MOST_RESULTS = 4
# of the inputs, and of the cotangents: a rule that clips gradients, or is stable where its body is not, differs at one
_SCALES = ((0.3, 1.0), (3.0, 1e4), (300.0, 1e-3))
_ROUNDINGS = 10.0  # times the tolerance of a replacement: a rule may round in another order than the derivative
_known: dict[str, _Rule | None] = {}  # digest of both derivatives -> what was found, of this process


@dataclasses.dataclass(frozen=True)
class _Rule:
    """A rule that is the derivative of the body, but for some arguments and results.

    Attributes:
      ignored_args: numbers of the float arguments that get no gradient.
      ignored_results: numbers of the results that pass none on.
    """

    ignored_args: frozenset[int]
    ignored_results: frozenset[int]


def with_bodies(
    closed: core.ClosedJaxpr, *, known: Mapping[int, np.ndarray] | None, names: Collection[str]
) -> EquationGraph:
    """Returns the graph of a jaxpr with the bodies of some calls inlined: their rule is the derivative of the body.

    Args:
      closed, known: as for `EquationGraph`.
      names: names of the functions that may be inlined.
    """
    bodies: dict[int, Body | None] = {}
    while True:
        graph = EquationGraph(closed, known, opened=bodies)
        new: dict[int, list[core.JaxprEqn]] = {}
        for number, eqn in graph.calls_with_rules:
            if number not in bodies and op_name(eqn) in names:
                new.setdefault(number, []).append(eqn)
        bodies |= {number: _opened(graph, eqns) for number, eqns in new.items()}
        if not any(bodies[number] for number in new):
            return graph


def _opened(graph: EquationGraph, eqns: Sequence[core.JaxprEqn]) -> Body | None:
    """Returns the body of a call if its rule is the derivative of the body wherever it is called, else None."""
    body = called(eqns[0])
    try:
        rules = {_rule(graph, eqn, body.closed) for eqn in eqns}
    except Exception:  # a kernel, a collective, or an error of the rule, which the function's own derivative raises
        return None
    rule = rules.pop()
    if rules or rule is None:
        return None

    def with_stops(*args: Any) -> list[Any]:
        outs = core.jaxpr_as_fun(body.closed)(*_stopped(args, rule.ignored_args))
        return _stopped(outs, rule.ignored_results)

    return Body(jax.make_jaxpr(with_stops)(*body.closed.in_avals), body.reads, body.param)


def _stopped(values: Sequence[Any], numbers: frozenset[int]) -> list[Any]:
    return [jax.lax.stop_gradient(value) if at in numbers else value for at, value in enumerate(values)]


def _rule(graph: EquationGraph, eqn: core.JaxprEqn, closed: core.ClosedJaxpr) -> _Rule | None:
    results = [at for at, var in enumerate(eqn.outvars) if is_inexact(var.aval)]
    if len(results) > _MOST_RESULTS:
        return None
    of_integers = _computed_from_integers(graph, variables(eqn.invars))
    before = upstream(graph.eqns, of_integers)  # such as the equations of a one-hot, whose rows have the sum 1
    reads = {atom: None for one in (*before, eqn) for atom in variables(one.invars)}
    made = {var for one in before for var in one.outvars}
    inputs = [atom for atom in reads if atom not in made]
    args = [
        at for at, atom in enumerate(eqn.invars) if not is_literal(atom) and is_inexact(atom.aval) and atom not in made
    ]

    def both(*given: Any) -> list[Any]:
        """Returns the gradients by each float argument, for each float result in turn, by the rule and by the body."""
        env, cotangents = dict(zip(inputs, given, strict=False)), given[len(inputs) :]
        for one in before:
            env |= zip(one.outvars, bind_again(one, values_of(one.invars, env)), strict=True)
        operands, grads = values_of(eqn.invars, env), []
        for fn in (lambda *x: bind_again(eqn, x), lambda *x: core.jaxpr_as_fun(closed)(*x)):
            of_args = perturbed_at(fn, operands, args)
            _, pull = jax.vjp(lambda *x, fn=of_args: _at(fn(*x), results), *_at(operands, args))
            for chosen in range(len(results)):
                grads += pull([ct * (at == chosen) for at, ct in enumerate(cotangents)])
        return grads

    traced = jax.make_jaxpr(both)(*(atom.aval for atom in inputs), *(eqn.outvars[at].aval for at in results))
    digest = check.digest_of([traced])
    if digest not in _known:
        derivative, zero = _compared(traced, num_inputs=len(inputs))
        shape = len(results), len(args)
        _known[digest] = _as_rule(derivative.reshape(shape), zero.reshape(shape), args, results)
    return _known[digest]


def _computed_from_integers(graph: EquationGraph, atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables that are computed, and from integers only."""
    of_floats = {var for var in (*graph.invars, *graph.values) if is_inexact(var.aval)}
    for eqn in graph.eqns:
        if not of_floats.isdisjoint(variables(eqn.invars)):
            of_floats |= set(eqn.outvars)
    return [atom for atom in atoms if atom not in of_floats and graph.producer(atom) is not None]


def _at(values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    return [values[at] for at in numbers]


def _as_rule(derivative: np.ndarray, zero: np.ndarray, args: Sequence[int], results: Sequence[int]) -> _Rule | None:
    """Returns the rule whose gradients, for each result and argument, are the derivative, or zero."""
    no_result = zero.all(1) & ~derivative.all(1)
    left = derivative[~no_result], zero[~no_result]
    no_arg = left[1].all(0) & ~left[0].all(0)
    if not left[0][:, ~no_arg].all():
        return None
    chosen = np.asarray(args)[no_arg], np.asarray(results)[no_result]
    return _Rule(*(frozenset(map(int, numbers)) for numbers in chosen))


def _compared(traced: core.ClosedJaxpr, *, num_inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each gradient whether it is that of the body, and whether it is zero, at all scales.

    Large dimensions along which nothing is mixed are cut, as for replacements. None is the body's without a scale at
    which all gradients are finite.
    """
    graph, num_pairs = EquationGraph(traced), len(traced.out_avals) // 2
    made = list(dict.fromkeys(atom for atom in graph.outvars if graph.producer(atom) is not None))
    match = Match("rule", graph.eqns, graph.invars, made, lambda *_: [], "", "", resized=lambda _: lambda *_: [])
    cut = check.Cut(graph, match, cuts_taken=True)
    floats = {var.aval.dtype.name for eqn in graph.eqns for var in eqn.outvars if is_inexact(var.aval)}
    tolerance = _ROUNDINGS * max(check.TOLERANCES.get(name, 0.0) for name in floats)
    is_derivative, is_zero, was_finite = np.ones(num_pairs, bool), np.ones(num_pairs, bool), False
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        evaluate = jax.jit(cut.evaluate, compiler_options=check.FAST_COMPILE)
        for scales in _SCALES:
            inputs = {
                var: check.random(cut.shape(var), var.aval.dtype, scale=scales[at >= num_inputs], seed=at)
                for at, var in enumerate(graph.invars)
            }
            env = inputs | dict(zip(made, evaluate(list(inputs.values())), strict=True))
            grads = [np.asarray(value) for value in values_of(graph.outvars, env)]
            by_rule, by_body = grads[:num_pairs], grads[num_pairs:]
            was_finite |= all(np.isfinite(grad).all() for grad in grads)
            is_derivative &= [check.relative(b, a) <= tolerance for a, b in zip(by_rule, by_body, strict=True)]
            is_zero &= [not grad.any() for grad in by_rule]
    return is_derivative & was_finite, is_zero
