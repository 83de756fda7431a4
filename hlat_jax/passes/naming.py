"""Names every float intermediate of a function, and makes functions whose backward pass saves chosen ones.

A name is the primitive and its number in the function, `dot_general.3`: the same function, shapes and version of JAX
give the same names. Values inside calls (`jit`) and inside the function's own `jax.checkpoint` are named too, and both
remain in the function; values chosen inside a `jax.checkpoint` are saved. Loops, `custom_vjp` and kernels are not
looked into, but names that the derivative rule of a `custom_vjp` gives itself can be chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend.core import Literal

from hlat_jax.host.neuron_lowering import elide_idle_roundings
from hlat_jax.passes import fences
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    SAME_ELEMENTS,
    bind_again,
    called_jaxpr,
    evaluate,
    function_name,
    place_of,
    plain_call,
    trace_call,
)
from hlat_jax.passes.segments import Segment, cut, is_worthwhile

_SEGMENT = "segment"  # begins the names of values in segments
_PREFIX = "saved:"


class MissingValues(ValueError):
    """Chosen values that a function does not have."""


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """The values that are saved for the backward pass; all others are recomputed.

    Attributes:
      saved: their names.
      stock_policy: one of `stack.STOCK_POLICIES`, used instead of names.
    """

    saved: tuple[str, ...] = ()
    stock_policy: str = ""

    def __str__(self) -> str:
        if self.stock_policy:
            return f"policy:{self.stock_policy}"
        return _PREFIX + ",".join(self.saved)

    @property
    def policy(self) -> Callable:
        """The policy of `jax.checkpoint` that saves them."""
        if self.stock_policy:
            return getattr(checkpoint_policies, self.stock_policy)
        policy = checkpoint_policies.save_only_these_names(*self.saved)
        # Marks our checkpoints, for `recompute` to distinguish them from the function's. The policy is a closure up to
        # JAX 0.10.1, then a frozen dataclass whose class JAX checks: it cannot be wrapped or assigned to.
        object.__setattr__(policy, "is_choice", True)
        return policy


def parse_choice(text: str) -> RematChoice:
    """Returns the `RematChoice` of names with this `str`."""
    return RematChoice(tuple(name for name in text.removeprefix(_PREFIX).split(",") if name))


def checkpoint_named(fn: Callable, choice: RematChoice, *, prevent_cse: bool = True) -> Callable:
    """Returns `fn` with a backward pass that saves its arguments and the chosen values.

    Args:
      fn: a function of arrays; what it closes over is saved too.
      choice: names that `with_names` gives.
      prevent_cse: the argument of `jax.checkpoint`; may be False if `fn` is the whole body of a loop.

    Raises:
      MissingValues: when called: a choice of values that `fn` does not have.
    """
    elide_idle_roundings()
    return jax.checkpoint(with_names(fn, choice), policy=choice.policy, prevent_cse=prevent_cse)


def checkpointed_loops(fn: Callable, choice: RematChoice) -> Callable:
    """Returns `fn` with the body of each outermost `lax.scan` checkpointed; names begin with the scan's, `scan0.`.

    Raises:
      ValueError: when called: `fn` has no such loop, or (MissingValues) a choice of values that they do not have.
    """
    elide_idle_roundings()

    def emit(closed: Any, leaves: list, namer: _Namer) -> list:
        if not num_loops(closed.jaxpr):
            raise ValueError(
                f"{function_name(fn)} has no lax.scan at its top level or inside jit; give the layer itself."
            )
        return _emit_loops(closed.jaxpr, closed.consts, leaves, namer)

    return _emitted(fn, choice, emit)


def checkpointed_segments(fn: Callable, choice: RematChoice) -> Callable:
    """Returns `fn` with each of its `segments` checkpointed; names begin with the number of its kind, `segment0.`.

    Raises:
      ValueError: when called: `fn` has no such segments, or (MissingValues) a choice of values that they do not have.
    """
    elide_idle_roundings()

    def emit(closed: Any, leaves: list, namer: _Namer) -> list:
        if not segments(closed.jaxpr):
            raise ValueError(f"{function_name(fn)} has no blocks that repeat; set region='whole'.")
        return _emit_segments(closed.jaxpr, closed.consts, leaves, namer, weights={*closed.jaxpr.invars})

    return _emitted(fn, choice, emit)


def is_of_segment(name: str) -> bool:
    """Returns whether a name is one that `checkpointed_segments` gives."""
    return name.startswith(_SEGMENT) and "." in name


def segments(jaxpr: Any) -> list[Segment]:
    """Returns the segments of a function, including those inside calls; none if they are not its layers."""
    found = list(_segments(jaxpr))
    return found if is_worthwhile(found, jaxpr) else []


def _segments(jaxpr: Any) -> Iterator[Segment]:
    for part in _parts(jaxpr):
        if isinstance(part, Segment):
            yield part
        elif (inner := plain_call(part)) is not None:
            yield from _segments(inner)


def with_names(fn: Callable, choice: RematChoice) -> Callable:
    """Returns `fn` with every float intermediate named. Raises MissingValues for an unknown name in `choice`."""

    def emit(closed: Any, leaves: list, namer: _Namer) -> list:
        return _emit(closed.jaxpr, closed.consts, leaves, namer.plan(closed.jaxpr))

    return _emitted(fn, choice, emit)


def _emitted(fn: Callable, choice: RematChoice, emit: Callable[[Any, list, _Namer], list]) -> Callable:
    """Returns a function whose results are those that `emit` computes from the jaxpr of `fn` and its operands."""

    def run(*args: Any, **kwargs: Any) -> Any:
        closed, leaves, tree = trace_call(fn, args, kwargs)
        namer = _Namer(choice)
        outs = emit(closed, leaves, namer)
        namer.check(fn)
        return jax.tree.unflatten(tree, outs)

    return run


def num_loops(jaxpr: Any) -> int:
    """Returns the number of outermost scans, including those inside calls."""
    inner = [call for eqn in jaxpr.eqns if (call := plain_call(eqn)) is not None]
    return sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) + sum(map(num_loops, inner))


class _Namer:
    """Numbers the values of one function."""

    def __init__(self, choice: RematChoice):
        self.choice = choice
        self.given: set[str] = set()
        self.counts: dict[str, int] = {}
        self.kinds: dict[tuple, int] = {}  # of segments

    def plan(self, jaxpr: Any, *, prefix: str = "") -> list:
        """Returns, for each equation, the names of its results or the plan of the call that it is."""
        plan = []
        for eqn in jaxpr.eqns:
            inner = _inner_values(eqn)
            plan.append([self._name(eqn, var, prefix) for var in eqn.outvars] if inner is None else
                        self.plan(inner, prefix=prefix))  # fmt: skip
        return plan

    def _name(self, eqn: Any, var: Any, prefix: str) -> str | None:
        key = prefix + eqn.primitive.name
        if eqn.primitive.name in SAME_ELEMENTS or not jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact):
            return None
        self.counts[key] = self.counts.get(key, -1) + 1
        name = f"{key}.{self.counts[key]}"
        self.given.add(name)
        return name

    def check(self, fn: Callable) -> None:
        # names without a number may be given by a derivative rule, which is traced later
        missing = {name for name in self.choice.saved if "." in name} - self.given
        if missing:
            raise MissingValues(
                f"{function_name(fn)} has no values {', '.join(sorted(missing))}: they were chosen for another "
                "function, other shapes or another JAX version. Run remat.fit again."
            )


def _inner_values(eqn: Any) -> Any:
    """Returns the jaxpr of a call or checkpoint whose values are named; None for other equations."""
    return called_jaxpr(eqn) if eqn.primitive.name == CHECKPOINT else plain_call(eqn)


def _emit(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], plan: list) -> list:
    plans = iter(plan)

    def bind(eqn: Any, ins: list) -> list:
        names, inner = next(plans), _inner_values(eqn)
        if inner is None:
            outs = zip(bind_again(eqn, ins), names, strict=True)
            return [out if name is None else checkpoint_name(out, name) for out, name in outs]

        def run(*ins: Any) -> list:
            return _emit(inner, (), ins, names)

        is_replaced = isinstance(jaxpr, Segment) and eqn.params.get("policy") is None  # by our own around all
        if eqn.primitive.name != CHECKPOINT or is_replaced:
            return _called_again(eqn, run, ins)
        return jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])(*ins)

    return evaluate(jaxpr, (*consts, *args), bind)


def _called_again(eqn: Any, fn: Callable, ins: list) -> list:
    """Returns the results of a call with `fn` as its function, under the same name, by which other passes know ops."""
    if eqn.primitive.name != "jit":
        return fn(*ins)
    fn.__name__ = fn.__qualname__ = eqn.params["name"]
    with place_of(eqn):
        return jax.jit(fn, inline=eqn.params["inline"])(*ins)


def _emit_loops(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], namer: _Namer) -> list:
    def bind(eqn: Any, ins: list) -> list:
        inner = plain_call(eqn)
        if inner is not None:
            return _called_again(eqn, lambda *ins: _emit_loops(inner, (), ins, namer), ins)
        return _scan(eqn, ins, namer) if eqn.primitive.name == "scan" else bind_again(eqn, ins)

    return evaluate(jaxpr, (*consts, *args), bind)


def _parts(jaxpr: Any) -> Iterator[Any]:
    """Yields the segments of a jaxpr and the equations between them, in order."""
    at = 0
    for segment in cut(jaxpr):
        yield from jaxpr.eqns[at : segment.start]
        yield segment
        at = segment.stop
    yield from jaxpr.eqns[at:]


def _emit_segments(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], namer: _Namer, *, weights: set) -> list:
    """Returns the results of a jaxpr, its segments checkpointed; `weights`: inputs that are not computed."""
    weights = {*weights, *jaxpr.constvars}
    parts = list(_parts(jaxpr))
    computed: dict[tuple, set[int]] = {}  # kind of segment -> operands that are computed, in any segment of the kind
    for part in parts:
        if isinstance(part, Segment):
            places = {place for place, var in enumerate(part.invars) if var not in weights}
            computed[part.kind] = computed.get(part.kind, set()) | places

    def bind(part: Any, ins: list) -> list:
        if isinstance(part, Segment):
            waiting = [at in computed[part.kind] for at in range(len(ins))]
            return _checkpointed_segment(part, ins, namer, waiting=waiting)
        inner = plain_call(part)
        if inner is None:
            return bind_again(part, ins)
        operands = zip(inner.invars, part.invars, strict=True)
        passed = {own for own, var in operands if isinstance(var, Literal) or var in weights}
        return _called_again(part, lambda *ins: _emit_segments(inner, (), ins, namer, weights=passed), ins)

    return evaluate(jaxpr, (*consts, *args), bind, parts=parts)


def _checkpointed_segment(segment: Segment, ins: list, namer: _Namer, *, waiting: list[bool]) -> list:
    prefix = f"{_SEGMENT}{namer.kinds.setdefault(segment.kind, len(namer.kinds))}."
    # segments of one kind have the same names
    namer.counts = {key: count for key, count in namer.counts.items() if not key.startswith(prefix)}
    plan = namer.plan(segment, prefix=prefix)
    run = fences.checkpoint_in_order(
        lambda *args: _emit(segment, (), args, plan), policy=namer.choice.policy, waiting=waiting
    )
    return run(*ins)


def _scan(eqn: Any, ins: list, namer: _Namer) -> list:
    closed, num_consts, num_carry = (eqn.params[key] for key in ("jaxpr", "num_consts", "num_carry"))
    namer.counts["scan"] = namer.counts.get("scan", -1) + 1
    plan = namer.plan(closed.jaxpr, prefix=f"scan{namer.counts['scan']}.")
    body = jax.checkpoint(
        lambda *args: _emit(closed.jaxpr, closed.consts, args, plan),
        policy=namer.choice.policy,
        prevent_cse=False,
    )
    consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]

    def step(carry, x):
        outs = body(*consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, init, xs, **options)
    return [*carry, *ys]
