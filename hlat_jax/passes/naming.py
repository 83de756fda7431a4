"""Names every float intermediate of a function, and makes functions with a backward pass that saves chosen ones.

A name is the primitive and its number in the function, such as `dot_general.3`. The same function, shapes and version
of JAX give the same names. Values inside calls (`jit`) and inside the function's own `jax.checkpoint` are named too.
Both remain in the function, and values chosen inside a `jax.checkpoint` are saved. Values inside loops, `custom_vjp`
and kernels have no names, but names that the derivative rule of a `custom_vjp` gives itself can be chosen.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies
from jax.extend import core

from hlat_jax.host.neuron_lowering import elide_idle_roundings
from hlat_jax.passes import fences
from hlat_jax.passes.interpret import Body, compound, evaluate
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    SAME_ELEMENTS,
    bind_again,
    called_jaxpr,
    function_name,
    identity,
    is_literal,
    place_of,
    trace_call,
)
from hlat_jax.passes.residuals import has_effects, opened_call, select_again, selected_jaxpr
from hlat_jax.passes.segments import Segment, best_limit, cut, is_worthwhile

_SEGMENT, _LOOP = "segment", "scan"  # begin the names of values in segments, and of those in loops


class MissingValues(ValueError):
    """The function has no values of the chosen names."""


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """The values that are saved for the backward pass. All others are recomputed.

    Attributes:
      saved: names of the saved values.
      stock_policy: one of `config.STOCK_POLICIES`, used instead of names.
    """

    saved: tuple[str, ...] = ()
    stock_policy: str = ""

    def __str__(self) -> str:
        if self.stock_policy:
            return f"policy:{self.stock_policy}"
        return "saved:" + ",".join(self.saved)

    @property
    def policy(self) -> Callable:
        """The policy of `jax.checkpoint` that saves these values."""
        if self.stock_policy:
            return getattr(checkpoint_policies, self.stock_policy)
        policy = checkpoint_policies.save_only_these_names(*self.saved)
        # Marks our checkpoints, for `recompute` to distinguish them from the function's. The policy is a closure up to
        # JAX 0.10.1, then a frozen dataclass whose class JAX checks: it cannot be wrapped or assigned to.
        object.__setattr__(policy, "is_choice", True)
        return policy


def checkpointed(fn: Callable, choice: RematChoice, *, region: str, prevent_cse: bool = True) -> Callable:
    """Returns `fn` with a backward pass that saves the arguments of each of its regions and the chosen values.

    Args:
      fn: a function of arrays. Values that it closes over are saved too.
      choice: names of values in the regions. Names begin with the number of the scan, `scan0.`, or of the segment's
        kind, `segment0.`. They begin with neither if the region is the function. A stock policy covers `fn`.
      region: extent of a checkpoint. It is the body of each outermost `lax.scan` (loops), each of the `segments`, or
        the function (whole). With auto, the names decide, and without names the first of `regions`.
      prevent_cse: the argument of `jax.checkpoint` for the function. It may be False if `fn` is a whole loop body.

    Raises:
      ValueError: at a call, if `fn` has no such regions, or (MissingValues) if the regions have no such values.
    """
    elide_idle_roundings()
    whole = jax.checkpoint(_with_names(fn, choice, "whole"), policy=choice.policy, prevent_cse=prevent_cse)
    if choice.stock_policy or region == "whole":
        return whole

    def run(*args: Any, **kwargs: Any) -> Any:
        where = region
        if where == "auto":
            where = _region_of(choice) or regions(trace_call(fn, args, kwargs)[0].jaxpr)[0]
        return (whole if where == "whole" else _with_names(fn, choice, where))(*args, **kwargs)

    return _with_name_of(fn, run)


def _region_of(choice: RematChoice) -> str:
    """Returns the region that the names of a choice come from; "" if they do not say."""
    numbered = [name.split(".") for name in choice.saved if "." in name]
    if not numbered:
        return ""
    prefix = numbered[0][0].rstrip("0123456789") if len(numbered[0]) > 2 else ""
    return {_SEGMENT: "segments", _LOOP: "loops"}.get(prefix, "whole")


def regions(jaxpr: core.Jaxpr) -> list[str]:
    """Returns the regions that a function supports. The first is used if they are not compared."""
    has_segments = bool(segments(jaxpr))
    if num_loops(jaxpr):
        return ["loops", "segments"] if has_segments else ["loops"]
    if has_segments:
        return ["segments"] if has_effects(jaxpr) else ["segments", "whole"]  # a checkpoint takes few effects
    return ["whole"]


def segments(jaxpr: core.Jaxpr) -> list[Segment]:
    """Returns the segments of a function, inside calls too, or none if they compute too little of the function."""
    candidates = list(_segments(jaxpr, best_limit(jaxpr)))
    return candidates if is_worthwhile(candidates, jaxpr) else []


def _segments(jaxpr: core.Jaxpr, limit: float) -> Iterator[Segment]:
    for part in _parts(jaxpr, limit):
        if isinstance(part, Segment):
            yield part
        elif (inner := opened_call(part)) is not None:
            yield from _segments(inner, limit)


def _with_names(fn: Callable, choice: RematChoice, region: str) -> Callable:
    """Returns `fn` with every float intermediate named, in loops or segments with a checkpoint around each."""

    def run(*args: Any, **kwargs: Any) -> Any:
        closed, leaves, tree = trace_call(fn, args, kwargs)
        jaxpr, namer, operands = closed.jaxpr, _Namer(choice), (*closed.consts, *leaves)
        if region == "loops" and not num_loops(jaxpr):
            raise ValueError(
                f"{function_name(fn)} has no lax.scan at its top level or inside jit. Give the layer itself."
            )
        if region == "segments" and not segments(jaxpr):
            raise ValueError(
                f"{function_name(fn)} has no segments, since few of its operations compute floats outside of loops. "
                "Set region='loops' or 'whole'."
            )
        if region == "whole":
            outs = _emit(jaxpr, operands, namer.names(""))
        else:
            limit = best_limit(jaxpr) if region == "segments" else None
            outs = _emit_regions(jaxpr, operands, namer, limit=limit, weights=jaxpr.invars)
        namer.check(fn)
        return jax.tree.unflatten(tree, outs)

    return _with_name_of(fn, run)


def _with_name_of(fn: Callable, run: Callable) -> Callable:
    run.__name__, run.__qualname__ = getattr(fn, "__name__", function_name(fn)), function_name(fn)
    return run


def num_loops(jaxpr: core.Jaxpr) -> int:
    """Returns the number of outermost scans, including those inside calls."""
    inner = [call for eqn in jaxpr.eqns if (call := opened_call(eqn)) is not None]
    return sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) + sum(map(num_loops, inner))


class _Namer:
    """Numbers the values of one function, and its regions."""

    def __init__(self, choice: RematChoice):
        self.choice = choice
        self.given: set[str] = set()
        self.num_loops = 0
        self.kinds: dict[tuple, int] = {}  # of segments
        self.traced: dict[tuple, Callable] = {}  # identity of a segment -> its function with a checkpoint
        self.selection: core.JaxprEqn | None = None  # the call that selects residuals around the segments

    def names(self, prefix: str) -> Callable[[core.JaxprEqn], list[str | None]]:
        """Returns a function that names the results of the equations of a region, which is called for each in turn."""
        counts: collections.Counter[str] = collections.Counter()

        def names_of(eqn: core.JaxprEqn) -> list[str | None]:
            primitive, names = eqn.primitive.name, []
            for var in eqn.outvars:
                is_float = jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)
                is_named = is_float and primitive not in SAME_ELEMENTS
                names.append(f"{prefix}{primitive}.{counts[primitive]}" if is_named else None)
                counts[primitive] += is_named
            self.given.update(filter(None, names))
            return names

        return names_of

    def check(self, fn: Callable) -> None:
        # names without a number may be given by a derivative rule, which is traced later
        missing = {name for name in self.choice.saved if "." in name} - self.given
        if missing:
            raise MissingValues(
                f"{function_name(fn)} has no values {', '.join(sorted(missing))}, which were chosen for another "
                "function, other shapes or another JAX version. Run remat.fit again."
            )


def _emit(
    jaxpr: core.Jaxpr | Segment, args: Sequence[Any], names_of: Callable[[core.JaxprEqn], list[str | None]]
) -> list:
    """Returns the results of a jaxpr for its constants and operands, with its values named."""

    def on_equation(eqn: core.JaxprEqn, ins: list) -> list:
        inner = called_jaxpr(eqn) if eqn.primitive.name == CHECKPOINT else opened_call(eqn)
        if inner is None:
            outs = zip(bind_again(eqn, ins), names_of(eqn), strict=True)
            return [out if name is None else checkpoint_name(out, name) for out, name in outs]

        def run(*ins: Any) -> list:
            return _emit(inner, ins, names_of)

        is_replaced = isinstance(jaxpr, Segment) and eqn.params.get("policy") is None  # by our own around all
        is_kept = eqn.primitive.name == CHECKPOINT and not is_replaced
        return compound(eqn).bind(ins, lambda body: run) if is_kept else _called_again(eqn, run, ins)

    return evaluate(jaxpr, args, on_equation)


def _called_again(eqn: core.JaxprEqn, fn: Callable, ins: list) -> list:
    """Returns the results of a call with `fn` as its function, under the same name, by which other passes know ops."""
    with place_of(eqn):
        if selected_jaxpr(eqn) is not None:
            return select_again(eqn, fn, ins)
        return compound(eqn).bind(ins, lambda body: fn) if eqn.primitive.name == "jit" else fn(*ins)


def _parts(jaxpr: core.Jaxpr, limit: float | None) -> Iterator[Segment | core.JaxprEqn]:
    """Yields the segments of a jaxpr, if there is a limit for them, and the equations between them, in order."""
    at = 0
    for segment in () if limit is None else cut(jaxpr, limit):
        yield from jaxpr.eqns[at : segment.start]
        yield segment
        at = segment.stop
    yield from jaxpr.eqns[at:]


def _emit_regions(
    jaxpr: core.Jaxpr, args: Sequence[Any], namer: _Namer, *, limit: float | None, weights: Sequence[core.Var]
) -> list:
    """Returns the results of an open jaxpr for its constants and inputs, with its segments or loops checkpointed.

    `limit` is the most bytes that a segment computes, or None for loops. `weights` are inputs that are not computed.
    """
    weights = {*weights, *jaxpr.constvars}
    parts = list(_parts(jaxpr, limit))
    computed: dict[tuple, set[int]] = {}  # kind of segment -> operands that are computed, in any segment of the kind
    for part in parts:
        if isinstance(part, Segment):
            places = {place for place, var in enumerate(part.invars) if var not in weights}
            computed[part.kind] = computed.get(part.kind, set()) | places

    def on_equation(part: Segment | core.JaxprEqn, ins: list) -> list:
        if isinstance(part, Segment):
            waiting = [at in computed[part.kind] for at in range(len(ins))]
            return _checkpointed_segment(part, ins, namer, waiting=waiting)
        if limit is None and part.primitive.name == "scan":
            return _checkpointed_loop(part, ins, namer)
        inner = opened_call(part)
        if inner is None:
            return bind_again(part, ins)
        namer.selection = part if selected_jaxpr(part) is not None else namer.selection
        operands = zip(inner.invars, part.invars, strict=True)
        passed = [own for own, var in operands if is_literal(var) or var in weights]

        def run(*ins: Any) -> list:
            return _emit_regions(inner, ins, namer, limit=limit, weights=passed)

        return _called_again(part, run, ins)

    return evaluate(jaxpr, args, on_equation, parts=parts)


def _checkpointed_segment(segment: Segment, ins: list, namer: _Namer, *, waiting: list[bool]) -> list:
    kind = namer.kinds.setdefault(segment.kind, len(namer.kinds))  # segments of one kind have the same names
    key = kind, identity(segment)
    if key in namer.traced:  # JAX traces and differentiates one function once
        return namer.traced[key](*ins)

    def emit(*args: Any) -> list:
        return _emit(segment, args, namer.names(f"{_SEGMENT}{kind}."))

    def run(*args: Any) -> list:
        if namer.selection is None:
            return emit(*args)
        return select_again(namer.selection, emit, args)

    namer.traced[key] = fences.checkpoint_in_order(run, policy=namer.choice.policy, waiting=waiting)
    return namer.traced[key](*ins)


def _checkpointed_loop(eqn: core.JaxprEqn, ins: list, namer: _Namer) -> list:
    names_of = namer.names(f"{_LOOP}{namer.num_loops}.")
    namer.num_loops += 1

    def checkpointed(body: Body) -> Callable[..., list]:
        def step(*args: Any) -> list:
            return _emit(body.closed.jaxpr, (*body.closed.consts, *args), names_of)

        return jax.checkpoint(step, policy=namer.choice.policy, prevent_cse=False)

    with place_of(eqn):
        return compound(eqn).bind(ins, checkpointed)
