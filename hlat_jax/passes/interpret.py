"""The one interpreter of jaxprs, which every pass uses to enter the bodies of equations.

`map_jaxpr` traces a function and hands its jaxpr to a pass. `evaluate` runs the equations of a jaxpr in order. The pass
gives it a function of one equation and its operands, which are values, or facts on values such as labels. If the
equation has bodies, `compound` returns them, and the pass continues by one of these methods of `Compound`.

- `bind` binds the equation again, with a function or a jaxpr in place of each body. It is used to change a program.
- `bind_numbered` does the same, and a body knows the number of its trip or branch. It is used to draw random bits.
- `forward` maps facts on operands to facts on results, such as dtypes and labels. It repeats a loop until its carry is
  stable.
- `backward` maps the wanted results to the operands that they depend on. It is used to find readers.

`compound` is the one function that knows the primitives with bodies.

- Calls have their function: `jit`, `closed_call`, `core_call`, `checkpoint`, `shard_map`, `custom_jvp_call`,
  `custom_vjp_call`.
- `cond` has its branches, `scan` has one step, and `while` has one step and a condition.

A new call of JAX needs its name in `jaxpr.CALL_JAXPRS`. Another primitive with a body needs a function in `_READ`, and
a case in `bind_numbered`. Reducers of scatters and bodies of kernels are not bodies here, because they run on single
elements and on blocks. `jaxpr.equations` counts their equations too. `Compound.bind` keeps a derivative rule as it is.
A pass that changes such a function makes a new rule, as `autocast_calls` does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.passes.jaxpr import (
    CALL_JAXPRS,
    function_name,
    is_inexact,
    is_literal,
    rebind,
    trace_call,
    warn_of_rule_with_tracer,
    without_consts,
)

_T = TypeVar("_T")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
# (a jaxpr, facts on its inputs) -> facts on its results
OfBody = Callable[[core.ClosedJaxpr, list], Sequence]
# (facts on some values on each path that leads to them, facts on what selects the path) -> facts on the values
Join = Callable[[Sequence[Sequence], Sequence], list]


def map_jaxpr(
    fn: Callable[_Args, _Result], run: Callable[[core.ClosedJaxpr, list[Any]], Sequence[Any]]
) -> Callable[_Args, _Result]:
    """Returns a function that traces `fn` in each call and returns the results of `run` for the jaxpr and its inputs.

    If a derivative rule closes over a traced array, the function warns and calls `fn` as it is.

    Args:
      fn: a function that JAX can trace, with arguments as for `jaxpr.trace_call`.
      run: function (jaxpr, inputs) -> results, which usually calls `evaluate`.
    """

    def mapped(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        closed, leaves, tree = trace_call(fn, args, kwargs)
        if warn_of_rule_with_tracer(fn, closed.jaxpr):
            return fn(*args, **kwargs)
        return jax.tree.unflatten(tree, run(closed, leaves))

    mapped.__name__, mapped.__qualname__ = getattr(fn, "__name__", type(fn).__name__), function_name(fn)
    return mapped


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    on_equation: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    parts: Sequence[Any] = (),
    on_literal: Callable[[core.Literal], Any] = lambda literal: literal.val,
) -> list[Any]:
    """Returns the results of an open jaxpr for its constants and inputs.

    Args:
      jaxpr: open jaxpr, or anything with its fields, such as a `segments.Segment`.
      args: a value, or a fact, for each constant and input.
      on_equation: function (equation, operands) -> results.
      parts: parts with `invars` and `outvars` that are run instead of the equations, if given.
      on_literal: function from a literal to its value.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(atom: Any) -> Any:
        return on_literal(atom) if is_literal(atom) else env[atom]

    for eqn in parts or jaxpr.eqns:
        env.update(zip(eqn.outvars, on_equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr that an equation runs.

    Attributes:
      closed: the jaxpr.
      reads: numbers of the operands of the equation that are inputs of the jaxpr.
      param: the parameter of the equation that holds the jaxpr.
      branch: the number of the branch, for the branches of a `cond`.
    """

    closed: core.ClosedJaxpr
    reads: tuple[int, ...]
    param: str
    branch: int = 0

    def inputs(self, operands: Sequence[_T]) -> list[_T]:
        """Returns the operands that are inputs of the body."""
        return [operands[at] for at in self.reads]


@dataclasses.dataclass(frozen=True)
class Compound:
    """An equation that runs jaxprs.

    Attributes:
      eqn: the equation.
      bodies: the function of a call, the branches of a `cond`, the step of a loop.
      carried: the operands that a loop carries, which are its first results too. None if it is not a loop.
      condition: the condition of a `while`.
    """

    eqn: core.JaxprEqn
    bodies: tuple[Body, ...]
    carried: slice | None = None
    condition: Body | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def has_branches(self) -> bool:
        """Whether the first operand selects one of the bodies."""
        return self.name == "cond"

    def forward(self, facts: Sequence[Any], of_body: OfBody, join: Join) -> list[Any]:
        """Returns facts on the results from facts on the operands.

        Args:
          facts: facts on the operands.
          of_body: function (jaxpr, facts on its inputs) -> facts on its results.
          join: function (facts on each path, facts on the operands that select the path) -> facts. Paths are the
            branches of a `cond`, or the carry before a trip of a loop and after it.
        """
        if self.carried is not None:
            facts = self.in_any_trip(facts, of_body, join)
        outs = [list(of_body(body.closed, body.inputs(facts))) for body in self.bodies]
        if self.has_branches:
            return join(outs, facts[:1])
        carry = [] if self.carried is None else facts[self.carried]
        return [*carry, *outs[0][len(carry) :]]

    def in_any_trip(self, facts: Sequence[Any], of_body: OfBody, join: Join) -> list[Any]:
        """Returns facts on the operands of a loop that hold in each of its trips. Arguments are as for `forward`."""
        (body,), facts = self.bodies, list(facts)
        while True:
            carry, stop = facts[self.carried], []
            if self.condition is not None:
                stop = list(of_body(self.condition.closed, self.condition.inputs(facts)))
            after = list(of_body(body.closed, body.inputs(facts)))[: len(carry)]
            joined = join([carry, after], stop)
            if joined == carry:
                return facts
            facts[self.carried] = joined

    def backward(self, wanted: Sequence[bool], of_body: OfBody) -> list[bool]:
        """Returns for each operand whether a wanted result depends on it, apart from the selection of a path.

        Args:
          wanted: whether each result is wanted.
          of_body: function (jaxpr, whether each result is wanted) -> whether a wanted result depends on each input.
        """
        wanted = list(wanted)
        while True:
            reached = [False] * len(self.eqn.invars)
            for body in self.bodies:
                for at, is_read in zip(body.reads, of_body(body.closed, wanted), strict=True):
                    reached[at] |= is_read
            if self.carried is None:
                return reached
            carry = reached[self.carried]
            again = [a or b for a, b in zip(wanted, carry, strict=False)] + wanted[len(carry) :]
            if again == wanted:
                return reached
            wanted = again

    def bind(
        self, operands: Sequence[Any], replacement: Callable[[Body], core.ClosedJaxpr | Callable[..., Sequence[Any]]]
    ) -> list[Any]:
        """Returns the results of the equation with other bodies.

        Args:
          operands: values of the operands.
          replacement: function from a body to a closed jaxpr, or to a function from the inputs of the body to the list
            of its results. This function may not read values of the surrounding trace, see `bind_numbered`.
        """
        changed: dict[str, Any] = {}
        consts: list[Any] = []
        for body in (*self.bodies, *([] if self.condition is None else [self.condition])):
            new = replacement(body)
            is_closed = isinstance(new, core.ClosedJaxpr)
            if self.name == "shard_map":  # traced where the axes of the mesh are bound
                return bind_shard_map(self.eqn, core.jaxpr_as_fun(new) if is_closed else new, operands)
            closed = new if is_closed else jax.make_jaxpr(new)(*body.closed.in_avals)
            if self.has_branches:
                changed[body.param] = (*changed.get(body.param, ()), closed)
            elif hasattr(self.eqn.params[body.param], "consts"):
                changed[body.param] = closed
            else:
                changed[body.param], consts = without_consts(closed)
        return rebind(self.eqn, [*consts, *operands], **changed)

    def bind_numbered(self, operands: Sequence[Any], run: Callable[[Body, Any, list[Any]], Sequence[Any]]) -> list[Any]:
        """Returns the results of a loop or a `cond` with other bodies, which may read values of the surrounding trace.

        Args:
          operands: values of the operands.
          run: function (body or condition, number, inputs) -> results. The number counts branches, the rows that trips
            of a `scan` read, or trips of a `while`.
        """
        if self.has_branches:
            return jax.lax.switch(operands[0], [_branch(run, body) for body in self.bodies], *operands[1:])
        (body,), carried, params = self.bodies, self.carried, self.eqn.params
        read, num_carry = operands[: carried.start], carried.stop - carried.start

        def step(carry: list, numbered: tuple) -> tuple[list, list]:
            number, walked = numbered
            results = list(run(body, number, body.inputs([*read, *carry, *walked])))
            return results[:num_carry], results[num_carry:]

        if self.condition is None:
            numbers = jnp.arange(params["length"], dtype=jnp.uint32)
            order = {key: params[key] for key in ("length", "reverse", "unroll")}
            carry, stacked = jax.lax.scan(step, operands[carried], (numbers, operands[carried.stop :]), **order)
            return [*carry, *stacked]

        def going(state: tuple) -> Any:
            return run(self.condition, state[0], self.condition.inputs([*read, *state[1]]))[0]

        def turn(state: tuple) -> tuple:
            carry = step(state[1], (state[0], ()))[0]
            if self.condition.closed.out_avals[0].shape:  # under `vmap`: each row keeps its values when it has ended
                carry = list(map(functools.partial(_where_rows, going(state)), carry, state[1]))
            return state[0] + 1, carry

        first = jnp.uint32(0), operands[carried]
        return jax.lax.while_loop(lambda state: jnp.any(going(state)), turn, first)[1]


def _where_rows(chosen: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the rows of `new` that are chosen, and the other rows of `old`."""
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (new.ndim - chosen.ndim)), new, old)


def _branch(run: Callable[[Body, Any, list[Any]], Sequence[Any]], body: Body) -> Callable[..., list[Any]]:
    return lambda *inputs: list(run(body, body.branch, list(inputs)))


def compound(eqn: core.JaxprEqn) -> Compound | None:
    """Returns an equation with its bodies, or None for an equation without bodies."""
    read = _READ.get(eqn.primitive.name)
    return None if read is None else read(eqn)


def called(eqn: core.JaxprEqn) -> Body | None:
    """Returns the one function that an equation calls with its operands, or None if it calls none."""
    return _call(eqn).bodies[0] if eqn.primitive.name in CALL_JAXPRS else None


def _call(eqn: core.JaxprEqn) -> Compound:
    param = CALL_JAXPRS[eqn.primitive.name]
    function = eqn.params[param]
    closed = function if hasattr(function, "consts") else core.ClosedJaxpr(function, [])
    return Compound(eqn, (Body(closed, _all_operands(eqn), param),))


def _cond(eqn: core.JaxprEqn) -> Compound:
    branches = enumerate(eqn.params["branches"])
    return Compound(eqn, tuple(Body(closed, _all_operands(eqn)[1:], "branches", at) for at, closed in branches))


def _scan(eqn: core.JaxprEqn) -> Compound:
    params = eqn.params
    if "ft_in" in params:  # since JAX 0.11: what the loop reads, carries and walks through
        num_consts, num_carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    body = Body(params["jaxpr"], _all_operands(eqn), "jaxpr")
    return Compound(eqn, (body,), slice(num_consts, num_consts + num_carry))


def _while(eqn: core.JaxprEqn) -> Compound:
    params, every, num_read = eqn.params, _all_operands(eqn), eqn.params["cond_nconsts"]
    carried = slice(num_read + params["body_nconsts"], len(every))
    body = Body(params["body_jaxpr"], every[num_read:], "body_jaxpr")
    condition = Body(params["cond_jaxpr"], every[:num_read] + every[carried], "cond_jaxpr")
    return Compound(eqn, (body,), carried, condition)


def _all_operands(eqn: core.JaxprEqn) -> tuple[int, ...]:
    return tuple(range(len(eqn.invars)))


_READ = {**dict.fromkeys(CALL_JAXPRS, _call), "cond": _cond, "scan": _scan, "while": _while}
COMPOUND = frozenset(_READ)  # the names of the primitives with bodies


def bind_shard_map(
    eqn: core.JaxprEqn, local: Callable[..., Sequence[Any]], args: Sequence[Any], *, replicated: Sequence[Any] = ()
) -> list[Any]:
    """Returns the results of a `shard_map` equation with another function `local` on each device.

    `local` gets the device's parts of the operands `args`, and each of `replicated` as a whole.
    """
    params = eqn.params
    mapped = jax.shard_map(
        lambda *arrays: tuple(local(*arrays)),
        mesh=params["mesh"],
        in_specs=(*params["in_specs"], *[jax.sharding.PartitionSpec()] * len(replicated)),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"],
        check_vma=params["check_vma"],
    )
    return list(mapped(*args, *replicated))


def reaching(
    jaxpr: core.Jaxpr, is_end: Callable[[core.JaxprEqn], bool], *, wanted: Sequence[bool] | None = None
) -> list[bool]:
    """Returns for each input of a jaxpr whether a value computed from it is an operand of a selected equation.

    Args:
      jaxpr: open jaxpr.
      is_end: function that selects equations.
      wanted: for each result, whether reaching it counts too. By default, no result counts.
    """
    reaching_vars = {
        var for var, want in zip(jaxpr.outvars, wanted or (), strict=False) if want and not is_literal(var)
    }
    for eqn in reversed(jaxpr.eqns):
        outs, inside = [var in reaching_vars for var in eqn.outvars], compound(eqn)
        if is_end(eqn):
            reached = [True] * len(eqn.invars)
        elif inside is None:
            reached = [any(outs)] * len(eqn.invars)
        else:
            reached = inside.backward(outs, lambda closed, wanted: reaching(closed.jaxpr, is_end, wanted=wanted))
        reaching_vars |= {var for var, reach in zip(eqn.invars, reached, strict=True) if reach and not is_literal(var)}
    return [var in reaching_vars for var in jaxpr.invars]


def stops_on_floats(eqn: core.JaxprEqn) -> bool:
    """Returns whether floats that a `while` carries enter into its condition in any trip. In a `fori_loop` none do."""

    def of_body(closed: core.ClosedJaxpr, wanted: list[bool]) -> list[bool]:
        return reaching(closed.jaxpr, lambda eqn: False, wanted=wanted)

    loop = _while(eqn)
    wanted = of_body(loop.condition.closed, [True])[eqn.params["cond_nconsts"] :]
    read = loop.backward(wanted, of_body)[loop.carried]
    carried = zip(eqn.invars[loop.carried], wanted, read, strict=True)
    return any(is_inexact(atom.aval) and (is_wanted or is_read) for atom, is_wanted, is_read in carried)
