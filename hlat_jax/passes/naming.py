"""Names every float intermediate of a function, and makes functions whose backward pass saves chosen ones.

A name is the primitive and its number in the function, `dot_general.3`: the same function, shapes and version of JAX
give the same names. Values inside calls (`jit`) and inside the function's own `jax.checkpoint` are named too, and both
remain in the function; values chosen inside a `jax.checkpoint` are saved. Loops, `custom_vjp` and kernels are not
looked into, but names that the derivative rule of a `custom_vjp` gives itself can be chosen.
"""

from __future__ import annotations

import dataclasses
import functools
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
    trace_call,
)
from hlat_jax.passes.residuals import opened_call, select_again, selected_jaxpr
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


def checkpointed(fn: Callable, choice: RematChoice, *, region: str) -> Callable:
    """Returns `fn` with each of its regions checkpointed.

    Args:
      fn: a function of arrays; what it closes over is saved too.
      choice: names of values in the regions. Names begin with the number of the scan, `scan0.`, or with that of the
        segment's kind, `segment0.`.
      region: what a checkpoint covers: the body of each outermost `lax.scan` (loops), or each of its `segments`.

    Raises:
      ValueError: when called: `fn` has no such regions, or (MissingValues) a choice of values that they do not have.
    """
    elide_idle_roundings()

    def emit(closed: Any, leaves: list, namer: _Namer) -> list:
        if region == "loops" and not num_loops(closed.jaxpr):
            raise ValueError(
                f"{function_name(fn)} has no lax.scan at its top level or inside jit; give the layer itself."
            )
        if region == "segments" and not segments(closed.jaxpr):
            raise ValueError(f"{function_name(fn)} has no blocks that repeat; set region='whole'.")
        args = (*closed.consts, *leaves)
        return _emit_regions(closed.jaxpr, args, namer, has_segments=region == "segments", weights=closed.jaxpr.invars)

    return _emitted(fn, choice, emit)


def is_of_segment(name: str) -> bool:
    """Returns whether a name is that of a value in a segment."""
    return name.startswith(_SEGMENT) and "." in name


def segments(jaxpr: Any) -> list[Segment]:
    """Returns the segments of a function, including those inside calls; none if they are not its layers."""
    found = list(_segments(jaxpr))
    return found if is_worthwhile(found, jaxpr) else []


def _segments(jaxpr: Any) -> Iterator[Segment]:
    for part in _parts(jaxpr, has_segments=True):
        if isinstance(part, Segment):
            yield part
        elif (inner := opened_call(part)) is not None:
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
    inner = [call for eqn in jaxpr.eqns if (call := opened_call(eqn)) is not None]
    return sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) + sum(map(num_loops, inner))


class _Namer:
    """Numbers the values of one function."""

    def __init__(self, choice: RematChoice):
        self.choice = choice
        self.given: set[str] = set()
        self.counts: dict[str, int] = {}
        self.kinds: dict[tuple, int] = {}  # of segments
        self.selection: Any = None  # the call that selects residuals around the segments

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
    return called_jaxpr(eqn) if eqn.primitive.name == CHECKPOINT else opened_call(eqn)


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
    if selected_jaxpr(eqn) is not None:
        with place_of(eqn):
            return select_again(eqn, fn, ins)
    if eqn.primitive.name != "jit":
        return fn(*ins)
    fn.__name__ = fn.__qualname__ = eqn.params["name"]
    with place_of(eqn):
        return jax.jit(fn, inline=eqn.params["inline"])(*ins)


def _parts(jaxpr: Any, *, has_segments: bool) -> Iterator[Any]:
    """Yields the segments of a jaxpr and the equations between them, in order."""
    at = 0
    for segment in cut(jaxpr) if has_segments else ():
        yield from jaxpr.eqns[at : segment.start]
        yield segment
        at = segment.stop
    yield from jaxpr.eqns[at:]


def _emit_regions(
    jaxpr: Any, args: Sequence[Any], namer: _Namer, *, has_segments: bool, weights: Sequence[Any]
) -> list:
    """Returns the results of a jaxpr, its segments or else its loops checkpointed.

    Args:
      jaxpr: open.
      args: its constants and inputs.
      namer: of the function.
      has_segments: whether the regions are segments.
      weights: inputs that are not computed.
    """
    weights = {*weights, *jaxpr.constvars}
    parts = list(_parts(jaxpr, has_segments=has_segments))
    computed: dict[tuple, set[int]] = {}  # kind of segment -> operands that are computed, in any segment of the kind
    for part in parts:
        if isinstance(part, Segment):
            places = {place for place, var in enumerate(part.invars) if var not in weights}
            computed[part.kind] = computed.get(part.kind, set()) | places

    def bind(part: Any, ins: list) -> list:
        if isinstance(part, Segment):
            waiting = [at in computed[part.kind] for at in range(len(ins))]
            return _checkpointed_segment(part, ins, namer, waiting=waiting)
        if not has_segments and part.primitive.name == "scan":
            return _checkpointed_loop(part, ins, namer)
        inner = opened_call(part)
        if inner is None:
            return bind_again(part, ins)
        namer.selection = part if selected_jaxpr(part) is not None else namer.selection
        operands = zip(inner.invars, part.invars, strict=True)
        passed = [own for own, var in operands if isinstance(var, Literal) or var in weights]

        def run(*ins: Any) -> list:
            return _emit_regions(inner, ins, namer, has_segments=has_segments, weights=passed)

        return _called_again(part, run, ins)

    return evaluate(jaxpr, args, bind, parts=parts)


def _checkpointed_segment(segment: Segment, ins: list, namer: _Namer, *, waiting: list[bool]) -> list:
    prefix = f"{_SEGMENT}{namer.kinds.setdefault(segment.kind, len(namer.kinds))}."
    # segments of one kind have the same names
    namer.counts = {key: count for key, count in namer.counts.items() if not key.startswith(prefix)}
    plan = namer.plan(segment, prefix=prefix)

    def run(*args: Any) -> list:
        fn = functools.partial(_emit, segment, (), plan=plan)
        if namer.selection is None:
            return fn(args)
        return select_again(namer.selection, lambda *args: fn(args), args)

    checkpointed = fences.checkpoint_in_order(run, policy=namer.choice.policy, waiting=waiting)
    return checkpointed(*ins)


def _checkpointed_loop(eqn: Any, ins: list, namer: _Namer) -> list:
    closed = eqn.params["jaxpr"]
    namer.counts["scan"] = namer.counts.get("scan", -1) + 1
    plan = namer.plan(closed.jaxpr, prefix=f"scan{namer.counts['scan']}.")
    body = jax.checkpoint(
        lambda *args: _emit(closed.jaxpr, closed.consts, args, plan), policy=namer.choice.policy, prevent_cse=False
    )
    return bind_again(eqn, ins, jaxpr=jax.make_jaxpr(body)(*closed.in_avals))
