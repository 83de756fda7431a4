"""Splits each long `lax.scan` into two nested ones, with a checkpoint around the inner one.

    loss = nest_scans(loss)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, batch)
    print(loss.report())

The derivative of a scan keeps values of every step. Two nested scans keep the carry before each segment of steps. They
also keep the values of one segment at a time, which the backward pass computes again. Results are the same to the last
bit, and gradients up to the order of their sums.

Source: Chen et al., arXiv 1604.06174, section 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.passes.interpret import Body, Compound, compound, evaluate
from hlat_jax.passes.jaxpr import (
    CHECKPOINT,
    aval_bytes,
    called_jaxpr,
    is_inexact,
    linearized_at,
    place_of,
    rebind,
    source_of,
    trace_call,
    variables,
)
from hlat_jax.passes.residuals import has_effects

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_LEAST_STEPS = 16  # fewer are not split
_MOST_LEFT = 0.7  # of the bytes that a scan keeps, or keeps under a checkpoint around each step: more is no gain
_UNEVEN = 1.2  # a number of steps that divides the length may keep so many times what the best number keeps


@dataclasses.dataclass(frozen=True)
class NestedScan:
    """How a scan is split.

    Attributes:
      source: "file:line".
      length: number of steps of the scan.
      segment: number of steps of a segment. The last segment has fewer if they do not divide the length.
      has_checkpointed_steps: whether a checkpoint is around each step too, which is then computed three times.
    """

    source: str
    length: int
    segment: int
    has_checkpointed_steps: bool

    def __str__(self) -> str:
        num_segments = -(-self.length // self.segment)
        around = "each and around each step" if self.has_checkpointed_steps else "each"
        return (
            f"scan at {self.source}: {self.length} steps in {num_segments} segments of "
            f"{'at most ' if self.length % self.segment else ''}{self.segment}, a checkpoint around {around}"
        )


@dataclasses.dataclass(frozen=True)
class NestReport:
    """The scans that a trace split. `str` prints them."""

    replacements: tuple[NestedScan, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.replacements)) or "no scan is split"


class Nested(Generic[_Args, _Result]):
    """A function with its long scans split, see `nest_scans`."""

    def __init__(self, fn: Callable[_Args, _Result], share: float):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._share, self._report = fn, share, None

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        closed, leaves, tree = trace_call(self._fn, args, kwargs)
        splitter = _Splitter(self._share)
        outs = splitter.run(closed.jaxpr, (*closed.consts, *leaves))
        self._report = NestReport(tuple(dict.fromkeys(splitter.scans)))
        return jax.tree.unflatten(tree, outs)

    def report(self) -> NestReport:
        """Returns the scans that the last trace split.

        Raises:
          ValueError: the function was not yet called or traced.
        """
        if self._report is None:
            raise ValueError("nest_scans has no report yet. Call the function, or trace it with jax.eval_shape, first.")
        return self._report


def nest_scans(fn: Callable[_Args, _Result], *, share: float = 0.5) -> Nested[_Args, _Result]:
    """Returns a function with the same results and derivatives, in which long scans keep fewer bytes.

    Scans inside `jit`, `jax.checkpoint` and other scans are split too. Forward mode and `vmap` work. A scan is left as
    it is if it has fewer than 16 steps, has effects, or would keep about as much.

    Args:
      fn: a function that JAX can trace, with arguments as for `autocast`.
      share: the share of its bytes that a scan may keep. If segments keep more, each step gets a checkpoint too.
    """
    return Nested(fn, share)


class _Splitter:
    """Splits scans by the `share` of `nest_scans`, and records them in `scans`."""

    def __init__(self, share: float):
        self.share = share
        self.scans: list[NestedScan] = []

    def run(self, jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr for its constants and operands, its scans split."""
        return evaluate(jaxpr, args, self._bind)

    def _bind(self, eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        with place_of(eqn):
            if eqn.primitive.name == "scan":
                return self._scan(eqn, ins)
            if eqn.primitive.name in ("jit", CHECKPOINT) and _has_scan(called_jaxpr(eqn)):
                return compound(eqn).bind(ins, self._of_body)
            return rebind(eqn, ins)

    def _of_body(self, body: Body) -> Callable[..., list[Any]]:
        return lambda *args: self.run(body.closed.jaxpr, (*body.closed.consts, *args))

    def _scan(self, eqn: core.JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        loop, split = compound(eqn), _split(eqn, self.share)
        (body,) = loop.bodies
        closed = body.closed
        if _has_scan(closed.jaxpr):
            closed = jax.make_jaxpr(self._of_body(body))(*closed.in_avals)
        if split is None:
            return loop.bind(ins, lambda body: closed)
        self.scans.append(split)
        pairs = zip(ins, eqn.invars, strict=True)  # a literal is a number without a dtype
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x, var.aval.dtype) for x, var in pairs]
        return _in_segments(loop, closed, arrays, split)


def _has_scan(jaxpr: core.Jaxpr) -> bool:
    if any(eqn.primitive.name == "scan" for eqn in jaxpr.eqns):
        return True
    return any(_has_scan(inner) for eqn in jaxpr.eqns if (inner := called_jaxpr(eqn)) is not None)


def _split(eqn: core.JaxprEqn, share: float) -> NestedScan | None:
    """Returns how a scan is split; None if it is not."""
    length = eqn.params["length"]
    if length < _LEAST_STEPS or has_effects(eqn):
        return None
    carry, kept = _bytes_of_step(eqn)
    if not kept:
        return None  # nothing is differentiated
    before = length * min(kept, carry) + kept  # of the scan under a checkpoint around each step, or without

    def least(num_bytes: Callable[[int], float]) -> tuple[float, int]:
        sizes = range(2, length // 2 + 1)
        even = min((num_bytes(size), size) for size in sizes if length % size == 0) if _is_even(length) else None
        best = min((num_bytes(size), size) for size in sizes)
        return even if even is not None and even[0] <= _UNEVEN * best[0] else best

    plain = least(lambda size: math.ceil(length / size) * carry + size * kept)
    stepped = least(lambda size: (math.ceil(length / size) + size) * carry + kept)
    is_enough = plain[0] <= share * length * kept or plain[0] <= stepped[0]
    num_bytes, size = plain if is_enough else stepped
    if num_bytes > _MOST_LEFT * before:
        return None
    return NestedScan(source_of(eqn), length, size, not is_enough)


def _is_even(length: int) -> bool:
    return any(length % size == 0 for size in range(2, math.isqrt(length) + 1))


def _bytes_of_step(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns (bytes of the floats that a scan carries, bytes that the derivative of one step keeps).

    What all steps read, or a step reads of the scan's operands, is not counted: it is kept in any case.
    """
    loop = compound(eqn)
    closed, carried = loop.bodies[0].closed, loop.carried
    places = [at for at, aval in enumerate(closed.in_avals) if hasattr(aval, "dtype") and is_inexact(aval)]

    def kept(*args: Any) -> list[Any]:
        return jax.tree.leaves(linearized_at(core.jaxpr_as_fun(closed), args, places)[1])

    jaxpr = jax.make_jaxpr(kept)(*closed.in_avals).jaxpr
    given = {*jaxpr.constvars, *jaxpr.invars[: carried.start], *jaxpr.invars[carried.stop :]}
    floats = [aval for aval in closed.in_avals[carried] if hasattr(aval, "dtype") and is_inexact(aval)]
    return sum(map(aval_bytes, floats)), sum(aval_bytes(var.aval) for var in {*variables(jaxpr.outvars)} - given)


def _in_segments(loop: Compound, closed: core.ClosedJaxpr, ins: list[Any], split: NestedScan) -> list[Any]:
    """Returns the results of a scan with the steps of `closed`, in segments."""
    carried, params = loop.carried, loop.eqn.params
    reverse = params["reverse"]
    consts, carry, xs = ins[: carried.start], ins[carried], ins[carried.stop :]
    num_carry, size = len(carry), split.segment

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        outs = core.jaxpr_as_fun(closed)(*consts, *carry, *xs)
        return outs[:num_carry], outs[num_carry:]

    if split.has_checkpointed_steps:
        step = jax.checkpoint(step, prevent_cse=False)

    def segment(length: int, carry: Any, xs: Any) -> tuple[Any, Any]:
        return jax.lax.scan(step, carry, xs, length=length, reverse=reverse, unroll=params["unroll"])

    def checkpointed(length: int, *, prevent_cse: bool) -> Callable:
        return jax.checkpoint(functools.partial(segment, length), prevent_cse=prevent_cse)

    num_rest = split.length % size
    num_whole = split.length // size
    # the rest is run last, so that in a scan from the end it is at the start
    rest, whole = (slice(0, num_rest), slice(num_rest, None)) if reverse else (slice(-num_rest, None), slice(-num_rest))
    if not num_rest:
        whole = slice(None)
    in_segments = [x[whole].reshape(num_whole, size, *x.shape[1:]) for x in xs]
    carry, ys = jax.lax.scan(
        checkpointed(size, prevent_cse=False), carry, in_segments, length=num_whole, reverse=reverse
    )
    ys = [y.reshape(num_whole * size, *y.shape[2:]) for y in ys]
    if num_rest:
        carry, last = checkpointed(num_rest, prevent_cse=True)(carry, [x[rest] for x in xs])
        ys = [jnp.concatenate((b, a) if reverse else (a, b)) for a, b in zip(ys, last, strict=True)]
    return [*carry, *ys]
