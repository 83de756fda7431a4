"""A program as data flow: the operations of a jaxpr with calls inlined, and the values that they read and write.

`residuals` chooses among these values, `recompute` finds the cost of computing them again, and `liveness` adds up the
bytes that live at one time. `rewrite.graph` replaces parts of the program.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jax.extend import core

from hlat_jax.passes.interpret import Body
from hlat_jax.passes.jaxpr import aval_bytes, is_literal, variables

Atom = core.Var | core.Literal


@dataclasses.dataclass(eq=False)
class Call:
    """A call with a body that is part of a program's data flow.

    Attributes:
      eqn: the call, with the variables of its jaxpr.
      invars: the values that the call reads.
      results: the values that the body returns.
      own: the values that the body, and the calls in it, write.
    """

    eqn: core.JaxprEqn
    invars: list[Atom]
    results: list[Atom] = dataclasses.field(default_factory=list)
    own: frozenset[core.Var] = frozenset()


@dataclasses.dataclass(eq=False)
class Op:
    """One equation of a program with inlined calls.

    Attributes:
      eqn: the equation, with the variables of its jaxpr.
      calls: the inlined calls around the equation, outermost first.
      invars: the values that the operation reads.
      outvars: the values that the operation writes.
    """

    eqn: core.JaxprEqn
    calls: tuple[Call, ...]
    invars: list[Atom]
    outvars: list[core.Var]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def operands(self) -> list[core.Var]:
        """The values that the operation reads, without literals."""
        return variables(self.invars)

    @property
    def enclosing(self) -> tuple[core.JaxprEqn, ...]:
        """The calls around the equation, and the equation itself."""
        return (*(call.eqn for call in self.calls), self.eqn)


_Op = TypeVar("_Op", bound=Op)
_Part = TypeVar("_Part", Op, core.JaxprEqn)  # anything with `invars` and `outvars`


class Dataflow(Generic[_Op]):
    """The operations of a jaxpr, in order. Each value has its own variable, also if a jaxpr is called twice.

    Args:
      jaxpr: open jaxpr.
      inlined: function from an equation to the body of a call that is inlined, or to None for other equations.
      consts: values of the constants, if they are known.
      op: the type of the operations.

    Attributes:
      ops: the operations.
      inputs: the constants and inputs.
      outputs: the results.
      constants: the values of constants that are known, of inlined calls too.
      producer: value -> the operation that writes the value, for values that are not inputs.
      number: value -> position of the value in the order in which values are written.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        *,
        inlined: Callable[[core.JaxprEqn], Body | None],
        consts: Sequence[Any] = (),
        op: type[_Op] = Op,
    ):
        self.ops: list[_Op] = []
        self.inputs = [core.Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
        self.constants: dict[core.Var, Any] = dict(zip(self.inputs, consts, strict=False))
        self._inlined, self._op = inlined, op
        self._env: dict[core.Var, Atom] = {}  # variable of the jaxpr -> its value
        self.outputs = self._read(jaxpr, self.inputs, (), self._env)
        self.producer = {value: op for op in self.ops for value in op.outvars}
        values = dict.fromkeys([*self.inputs, *self.constants, *self.producer])
        self.number = {value: number for number, value in enumerate(values)}

    def atom(self, var: Atom) -> Atom:
        """Returns the value of a variable of the jaxpr, or a literal as it is."""
        return _atom(var, self._env)

    def _read(
        self, jaxpr: core.Jaxpr, args: Sequence[Atom], calls: tuple[Call, ...], env: dict[core.Var, Atom]
    ) -> list[Atom]:
        """Adds the operations of a jaxpr that these calls enclose, and returns its results."""
        env.update(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))
        for eqn in jaxpr.eqns:
            invars = [_atom(var, env) for var in eqn.invars]
            inner = self._inlined(eqn)
            if inner is None:
                outs: Sequence[Atom] = [core.Var(var.aval) for var in eqn.outvars]
                self.ops.append(self._op(eqn, calls, invars, outs))
            else:
                call, first, closed = Call(eqn, invars), len(self.ops), inner.closed
                consts = [core.Var(var.aval) for var in closed.jaxpr.constvars]
                self.constants.update(zip(consts, closed.consts, strict=True))
                outs = call.results = self._read(closed.jaxpr, [*consts, *inner.inputs(invars)], (*calls, call), {})
                call.own = frozenset(value for op in self.ops[first:] for value in op.outvars)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [_atom(var, env) for var in jaxpr.outvars]


def num_bytes(value: core.Var) -> int:
    """Returns the bytes of a value."""
    return aval_bytes(value.aval)


def _atom(var: Atom, env: dict[core.Var, Atom]) -> Atom:
    return var if is_literal(var) else env[var]


def readers(ops: Sequence[Op]) -> dict[core.Var, list[int]]:
    """Returns value -> positions of the operations that read it, in order. The last one ends its lifetime."""
    places_by_value = collections.defaultdict(list)
    for place, op in enumerate(ops):
        for value in op.operands:
            places_by_value[value].append(place)
    return places_by_value


def upstream(parts: Sequence[_Part], ends: Iterable[core.Var], *, without: Iterable[core.Var] = ()) -> list[_Part]:
    """Returns, in order, the operations or equations that `ends` depend on, stopping at the values in `without`."""
    given, needed, found = set(without), set(ends), []
    for part in reversed(parts):
        if not needed.isdisjoint(part.outvars):
            needed.update(value for value in variables(part.invars) if value not in given)
            found.append(part)
    return found[::-1]
