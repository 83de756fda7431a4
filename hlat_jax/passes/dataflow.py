"""A program as data flow: operations, and values with their bytes and readers.

`residuals` chooses among these values, `recompute` weighs what a backward pass computes again, and `liveness` adds up
what lives at one time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hlat_jax.passes.jaxpr import aval_bytes, is_literal, variables


@dataclasses.dataclass(eq=False)
class Op:
    """One equation of a program whose calls are inlined.

    Attributes:
      eqn: the equation.
      calls: the inlined calls around it, outermost first.
      ins: what it reads: numbers of values, and `Literal`s.
      outs: the values that it writes.
    """

    eqn: Any
    calls: tuple
    ins: list
    outs: list[int]

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def operands(self) -> list[int]:
        """The values that it reads."""
        return variables(self.ins)

    @property
    def enclosing(self) -> tuple:
        """The calls around it, and the equation itself."""
        return (*self.calls, self.eqn)


class Dataflow:
    """The operations of a jaxpr, in order; values are numbered.

    Args:
      jaxpr: open.
      inlined: equation -> jaxpr of a call that is read as if its equations stood in its place, or None.
      op: the type of the operations.

    Attributes:
      ops: the operations.
      avals: the type of each value.
      inputs: the constants and inputs.
      outputs: the results: numbers of values, and `Literal`s.
      producer: value -> the operation that writes it, for values that are no inputs.
    """

    def __init__(self, jaxpr: Any, *, inlined: Callable[[Any], Any], op: type = Op):
        self.avals: list[Any] = []
        self.ops: list[Any] = []
        self._inlined, self._op = inlined, op
        self._env = {var: self._new(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self.inputs = list(self._env.values())
        self._read(jaxpr, self._env, ())
        self.outputs = [self.atom(var) for var in jaxpr.outvars]
        self.producer = {value: op for op in self.ops for value in op.outs}

    def num_bytes(self, value: int) -> int:
        """Returns the bytes of a value, by its type."""
        return aval_bytes(self.avals[value])

    def atom(self, var: Any) -> Any:
        """Returns the value of a variable of the jaxpr; a `Literal` stays itself."""
        return _atom(var, self._env)

    def _new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _read(self, jaxpr: Any, env: dict[Any, Any], calls: tuple) -> None:
        for eqn in jaxpr.eqns:
            ins = [_atom(var, env) for var in eqn.invars]
            inner = self._inlined(eqn)
            if inner is None:
                outs = [self._new(var.aval) for var in eqn.outvars]
                self.ops.append(self._op(eqn, calls, ins, outs))
            else:
                inside = {var: self._new(var.aval) for var in inner.constvars}
                inside |= dict(zip(inner.invars, ins, strict=True))
                self._read(inner, inside, (*calls, eqn))
                outs = [_atom(var, inside) for var in inner.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))


def _atom(var: Any, env: dict[Any, Any]) -> Any:
    return var if is_literal(var) else env[var]


def readers(ops: Sequence[Any]) -> dict[int, list[int]]:
    """Returns value -> places of the operations that read it, in order; the last one ends its lifetime."""
    places_by_value = collections.defaultdict(list)
    for place, op in enumerate(ops):
        for value in op.operands:
            places_by_value[value].append(place)
    return places_by_value


def alive(ops: Sequence[Any], wanted: Iterable[int], *, given: Iterable[int] = ()) -> list[Any]:
    """Returns the operations that some values depend on, up to those that are given."""
    given, needed_ops = set(given), []
    needed = set(wanted) - given
    for op in reversed(ops):
        if needed.intersection(op.outs):
            needed.update(value for value in op.operands if value not in given)
            needed_ops.append(op)
    return needed_ops[::-1]
