"""Finds products that are added to sums of squares, as in x·x - 2 x·y + y·y.

The terms cancel, so rounding one of them loses the sum. Examples are the distance to the nearest code of a codebook,
and a kernel matrix that must be positive definite.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend import core

from hlat_jax.passes.dataflow import Atom, Dataflow, Op
from hlat_jax.passes.interpret import called
from hlat_jax.passes.jaxpr import is_literal, primitives
from hlat_jax.passes.products import is_dot_of_vectors

_ADDS = primitives("add sub add_any")
_SCALES = primitives("mul div")
_MOVES = primitives("neg copy convert_element_type broadcast_in_dim reshape transpose squeeze name")


def cancelled_variables(jaxpr: core.Jaxpr, wanted: Sequence[bool]) -> set[core.Var]:
    """Returns the variables of a jaxpr that are only added to sums of squares, after moves and scales by a number.

    Args:
      jaxpr: open jaxpr.
      wanted: for each result, whether the caller only adds it to sums of squares.
    """
    flow = Dataflow(jaxpr, inlined=called)
    tags: dict[core.Var, str] = {}
    for op in flow.ops:
        tags |= dict.fromkeys(op.outvars, _tag(op, tags))
    added = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if want and not is_literal(var)}
    others = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if not want and not is_literal(var)}
    for eqn in reversed(jaxpr.eqns):
        is_summed = all(var in added and var not in others for var in eqn.outvars)
        for at, atom in enumerate(eqn.invars):
            if is_literal(atom):
                continue
            rest = [other for place, other in enumerate(eqn.invars) if place != at]
            is_added = eqn.primitive.name in _ADDS and (is_summed or _tag_of(flow.atom(rest[0]), tags) == "sum")
            is_moved = eqn.primitive.name in _MOVES or (eqn.primitive.name in _SCALES and rest[0].aval.size == 1)
            (added if is_added or (is_moved and is_summed) else others).add(atom)
    return added - others


def _tag_of(atom: Atom, tags: dict[core.Var, str]) -> str:
    return "" if is_literal(atom) else tags.get(atom, "")


def _tag(op: Op, tags: dict[core.Var, str]) -> str:
    """Returns whether the result of an operation is a square or a sum of squares; else ""."""
    name, operands = op.name, [_tag_of(atom, tags) for atom in op.invars]
    is_same = len(op.operands) == len(op.invars) == 2 and op.invars[0] == op.invars[1]
    if name == "square" or (name == "integer_pow" and op.eqn.params["y"] == 2) or (name == "mul" and is_same):
        return "square"
    if name == "dot_general" and is_same and is_dot_of_vectors(op.eqn):
        return "sum"
    if name == "reduce_sum" and operands[0]:
        return "sum"
    if name in _MOVES:
        return operands[0] if op.eqn.invars[0].aval.size > 1 else ""  # one number, such as a penalty, is no distance
    if name in _SCALES and any(atom.aval.size == 1 for atom in op.eqn.invars):
        return next(filter(None, operands), "")
    return "sum" if name in _ADDS and operands == ["sum", "sum"] else ""
