"""What the values of a traced program come from: floating-point arguments, and parts that mesh axes split.

A value has labels: `DATA` if it was computed from a floating-point argument, and, inside `shard_map`, the manual mesh
axes over which it varies. What is computed from integers and constants alone has no `DATA`, and what an all-reduce or
an all-gather over an axis returns has no label of that axis. Labels do not depend on `check_vma` of `shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from hlat_jax.passes.jaxpr import ALL_REDUCES, CALL_JAXPRS, COLLECTIVES, called_jaxpr, carry_of, is_inexact, is_literal

Labels = frozenset[str]
DATA = "(data)"
NONE: Labels = frozenset()

# Primitives whose result i comes from operand i alone.
EACH = ALL_REDUCES | {"optimization_barrier", "pvary", "pcast", "device_put"}
_REPLICATES = ALL_REDUCES | {"all_gather", "all_gather_invariant"}


def opened(closed: Any) -> tuple[Any, list[Any]]:
    """Returns (open jaxpr, constants) of a jaxpr, closed or open."""
    return (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, [])


def label(atom: Any, found: dict[Any, Labels]) -> Labels:
    """Returns the labels of an operand or result; a literal has none."""
    return NONE if is_literal(atom) else found[atom]


def labels_of(closed: Any, own: Sequence[Labels]) -> dict[Any, Labels]:
    """Returns the labels of every variable of a jaxpr for those of its inputs; constants have none."""
    jaxpr, consts = opened(closed)
    of_consts = [frozenset({DATA}) if isinstance(const, jax.core.Tracer) else NONE for const in consts]
    found = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*of_consts, *own], strict=True))
    for eqn in jaxpr.eqns:
        outs = _labels_of_results(eqn, [label(atom, found) for atom in eqn.invars])
        for var, out in zip(eqn.outvars, outs, strict=True):
            found[var] = out if is_inexact(var.aval) else out - {DATA}
    return found


def labels_of_outs(closed: Any, own: Sequence[Labels]) -> list[Labels]:
    """Returns the labels of the results of a jaxpr for those of its inputs."""
    found = labels_of(closed, own)
    return [label(atom, found) for atom in opened(closed)[0].outvars]


def labels_in_loop(
    body: Any, own: Sequence[Labels], carried: slice, *, condition: Any = None, read: Sequence[Labels] = ()
) -> list[Labels]:
    """Returns the labels of what the body of a loop reads in any iteration; those of its carry only grow.

    Args:
      body: closed.
      own: labels of its inputs in the first iteration.
      carried: which of them are carried.
      condition: of a `while`; what it stops on enters into the carry.
      read: labels of its constants.
    """
    labels = list(own)
    while True:
        more = NONE if condition is None else labels_of_outs(condition, [*read, *labels[carried]])[0]
        outs = labels_of_outs(body, labels)
        joined = [one.union(out, more) for one, out in zip(labels[carried], outs, strict=False)]
        if joined == labels[carried]:
            return labels
        labels[carried] = joined


def labels_in_shard_map(eqn: Any, own: Sequence[Labels]) -> list[Labels]:
    """Returns the labels of the inputs of the jaxpr of a `shard_map`."""
    return [
        one | frozenset(jax.tree.leaves(tuple(spec))) for one, spec in zip(own, eqn.params["in_specs"], strict=True)
    ]


def manual_axes(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes that a `shard_map` makes manual."""
    return frozenset(eqn.params["newly_manual_axes" if "newly_manual_axes" in eqn.params else "manual_axes"])


def _labels_of_results(eqn: Any, own: list[Labels]) -> list[Labels]:
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        return [out - manual_axes(eqn) for out in labels_of_outs(params["jaxpr"], labels_in_shard_map(eqn, own))]
    if called_jaxpr(eqn) is not None:
        return labels_of_outs(params[CALL_JAXPRS[name]], own)
    if name == "cond":
        branches = [labels_of_outs(branch, own[1:]) for branch in params["branches"]]
        return [own[0].union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        closed, carried = carry_of(eqn)
        labels = labels_in_loop(closed, own, carried)
        return [*labels[carried], *labels_of_outs(closed, labels)[carried.stop - carried.start :]]
    if name == "while":
        (closed, carried), num = carry_of(eqn), params["cond_nconsts"]
        return labels_in_loop(closed, own[num:], carried, condition=params["cond_jaxpr"], read=own[:num])[carried]
    if name in COLLECTIVES or name == "axis_index":
        axes = params["axes"] if "axes" in params else params["axis_name"]
        axes = frozenset(axes if isinstance(axes, tuple) else [axes])
        is_replicated = name in _REPLICATES and params.get("axis_index_groups") is None
        own = [one - axes if is_replicated else one | axes for one in own or [NONE]]
    return own if name in EACH else [frozenset().union(*own)] * len(eqn.outvars)
