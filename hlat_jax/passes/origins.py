"""Finds the origins of the values of a traced program: floating-point arguments, and parts that mesh axes split.

A value has the label `DATA` if it was computed from a floating-point argument. Inside `shard_map` it also has the
manual mesh axes over which it varies. Values computed only from integers and constants have no `DATA`. Results of an
all-reduce or an all-gather over an axis lack the axis. Labels do not depend on `check_vma` of `shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from hlat_jax.passes.interpret import Compound, compound, evaluate
from hlat_jax.passes.jaxpr import ALL_REDUCES, COLLECTIVES, is_inexact

Labels = frozenset[str]
DATA = "(data)"
NONE: Labels = frozenset()

# Primitives whose result i comes from operand i alone.
EACH = ALL_REDUCES | {"optimization_barrier", "pvary", "pcast", "device_put"}
_REPLICATES = ALL_REDUCES | {"all_gather", "all_gather_invariant"}


def constant_labels(constant: Any) -> Labels:
    """Returns the labels of a constant, which are none, or `DATA` for a value of a surrounding trace."""
    return frozenset({DATA}) if isinstance(constant, jax.core.Tracer) else NONE


def labels_of_outs(closed: core.ClosedJaxpr, own: Sequence[Labels]) -> list[Labels]:
    """Returns the labels of the results of a jaxpr from the labels of its inputs."""
    args = [*map(constant_labels, closed.consts), *own]
    return evaluate(closed.jaxpr, args, labels_of_results, on_literal=lambda literal: NONE)


def labels_of_results(eqn: core.JaxprEqn, own: list[Labels]) -> list[Labels]:
    """Returns the labels of the results of an equation from the labels of its operands."""
    inside = compound(eqn)
    outs = _labels_of_operation(eqn, own) if inside is None else _labels_of_compound(inside, own)
    return [out if is_inexact(var.aval) else out - {DATA} for var, out in zip(eqn.outvars, outs, strict=True)]


def labels_in_loop(loop: Compound, own: Sequence[Labels]) -> list[Labels]:
    """Returns the labels of the operands of a loop, in any trip."""
    return loop.in_any_trip(own, labels_of_outs, _union)


def labels_in_shard_map(eqn: core.JaxprEqn, own: Sequence[Labels]) -> list[Labels]:
    """Returns the labels of the inputs of the jaxpr of a `shard_map`."""
    return [
        one | frozenset(jax.tree.leaves(tuple(spec))) for one, spec in zip(own, eqn.params["in_specs"], strict=True)
    ]


def manual_axes(eqn: core.JaxprEqn) -> frozenset[str]:
    """Returns the mesh axes that a `shard_map` makes manual."""
    return frozenset(eqn.params["newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"])


def _union(paths: Sequence[Sequence[Labels]], selection: Sequence[Labels]) -> list[Labels]:
    return [frozenset().union(*each, *selection) for each in zip(*paths, strict=True)]


def _labels_of_compound(inside: Compound, own: list[Labels]) -> list[Labels]:
    if inside.name == "shard_map":
        outs = labels_of_outs(inside.bodies[0].closed, labels_in_shard_map(inside.eqn, own))
        return [out - manual_axes(inside.eqn) for out in outs]
    return inside.forward(own, labels_of_outs, _union)


def _labels_of_operation(eqn: core.JaxprEqn, own: list[Labels]) -> list[Labels]:
    name, params = eqn.primitive.name, eqn.params
    if name in COLLECTIVES or name == "axis_index":
        axes = params["axes"] if "axes" in params else params["axis_name"]
        axes = frozenset(axes if isinstance(axes, tuple) else [axes])
        is_replicated = name in _REPLICATES and params.get("axis_index_groups") is None
        own = [one - axes if is_replicated else one | axes for one in own or [NONE]]
    return own if name in EACH else [frozenset().union(*own)] * len(eqn.outvars)
