"""Finds products that are added to sums of squares: x·x - 2 x·y + y·y, whose terms cancel.

Such a sum is small beside its terms, so rounding a term or its factors loses the sum: the nearest code, a kernel matrix
that is positive definite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from hlat_jax.passes.jaxpr import called
from hlat_jax.passes.products import is_dot_of_vectors

_ADDS = frozenset({"add", "sub", "add_any"})
_SCALES = frozenset({"mul", "div"})
_MOVES = frozenset(
    {"neg", "copy", "convert_element_type", "broadcast_in_dim", "reshape", "transpose", "squeeze", "name"}
)


def cancelled(jaxpr: Any, wanted: Sequence[bool]) -> set[Any]:
    """Returns the variables of a jaxpr that are only added to sums of squares, after moves and scales by a number.

    Args:
      jaxpr: open.
      wanted: for each result, whether the caller only does that with it.
    """
    tags = _Tags(jaxpr, [(at, "") for at, _ in enumerate([*jaxpr.constvars, *jaxpr.invars])])
    found = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if want and not isinstance(var, Literal)}
    others = {var for var, want in zip(jaxpr.outvars, wanted, strict=True) if not want and not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        is_summed = all(var in found and var not in others for var in eqn.outvars)
        for at, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            rest = [other for place, other in enumerate(eqn.invars) if place != at]
            is_added = eqn.primitive.name in _ADDS and (is_summed or tags.of(rest[0]) == "sum")
            is_moved = eqn.primitive.name in _MOVES or (eqn.primitive.name in _SCALES and rest[0].aval.size == 1)
            (found if is_added or (is_moved and is_summed) else others).add(atom)
    return found - others


class _Tags:
    """Which values of a jaxpr are squares, sums of squares, or roots of these.

    Args:
      jaxpr: open.
      given: for each constant and input, (identity, tag).
    """

    def __init__(self, jaxpr: Any, given: Sequence[tuple[Any, str]]):
        self._env = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))
        for eqn in jaxpr.eqns:
            inner = called(eqn)
            if inner is not None and len(inner.invars) == len(eqn.invars):
                operands = [self._env.get(atom, (atom, "")) if not isinstance(atom, Literal) else (object(), "")
                            for atom in eqn.invars]  # fmt: skip
                inside = _Tags(inner, [*((object(), "") for _ in inner.constvars), *operands])
                self._env.update(
                    (var, (var, inside.of(out))) for var, out in zip(eqn.outvars, inner.outvars, strict=True)
                )
            else:
                self._env.update((var, (var, self._tag(eqn))) for var in eqn.outvars)

    def of(self, atom: Any) -> str:
        return "" if isinstance(atom, Literal) else self._env[atom][1]

    def _tag(self, eqn: Any) -> str:
        name, tags = eqn.primitive.name, [self.of(atom) for atom in eqn.invars]
        same = [self._env[atom][0] if not isinstance(atom, Literal) else object() for atom in eqn.invars]
        is_same = len(same) == 2 and same[0] is same[1]
        if name == "square" or (name == "integer_pow" and eqn.params["y"] == 2) or (name == "mul" and is_same):
            return "sum" if tags[0] == "root" else "square"
        if name == "dot_general" and is_same and is_dot_of_vectors(eqn):
            return "sum"
        if name == "reduce_sum" and tags[0]:
            return "sum" if tags[0] != "root" else ""
        if name == "sqrt" and tags[0] == "sum":
            return "root"
        if name in _MOVES:
            return tags[0] if eqn.invars[0].aval.size > 1 else ""  # one number, such as a penalty, is no distance
        if name in _SCALES and any(atom.aval.size == 1 for atom in eqn.invars):
            return next(filter(None, tags), "")
        return "sum" if name in _ADDS and tags == ["sum", "sum"] else ""
