"""What the equations of a program are to a backward pass: work that is cheap to do again, FLOPs, what derivatives read.

A kind is cheap (elementwise work, moves, reductions: done again rather than kept), costly (products, gathers, random
bits, collectives: never done again) or opaque (loops, `custom_vjp`, effects: outside of every checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from hlat_jax.host.jax_compat import partial_eval
from hlat_jax.passes.jaxpr import (
    COLLECTIVES,
    REDUCTIONS,
    TRANSCENDENTAL,
    called_jaxpr,
    has_symbolic_zeros,
    inner_jaxprs,
    plain_call,
    primitives,
    rebind,
)
from hlat_jax.passes.products import PRODUCTS, product_flops

_MOVES = primitives(
    """
    broadcast_in_dim reshape squeeze expand_dims transpose rev slice dynamic_slice pad concatenate split iota copy
    copy_p name stop_gradient convert_element_type reduce_precision saturated_cast pvary pcast
    """
)
_ELEMENTWISE = TRANSCENDENTAL | primitives(
    """
    neg abs sign floor ceil round is_finite expm1 tan asin acos atan atan2 sinh cosh asinh acosh atanh square
    integer_pow add sub mul add_any rem max min clamp select_n eq ne lt le gt ge and or xor not nextafter
    shift_left shift_right_arithmetic shift_right_logical real imag conj complex population_count clz
    """
)
_CHEAP = _MOVES | _ELEMENTWISE | REDUCTIONS
# Not executed again, but may stand between cheap operations in one checkpoint: their derivatives read operands alone.
_COSTLY = (
    PRODUCTS
    | (frozenset(COLLECTIVES) - {"pmax", "pmin"})
    | primitives(
        """
        gather scatter scatter-add scatter_add scatter-mul dynamic_update_slice cumsum sharding_constraint
        reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add
        random_bits random_seed random_wrap random_unwrap random_fold_in random_split threefry2x32
        """
    )
)
# Their derivatives read no operand, whichever operands have one.
_LINEAR = (
    (_MOVES - {"dynamic_slice"})
    | (frozenset(COLLECTIVES) - {"pmax", "pmin"})
    | {"add", "sub", "add_any", "neg", "reduce_sum", "cumsum", "real", "imag", "conj"}
)
_BILINEAR = PRODUCTS | {"mul"}


def _has_effects(eqn: Any) -> bool:
    """Returns whether an equation does more than compute its results; that it reads a mesh axis does not count."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def inlined_call(eqn: Any) -> Any:
    """Returns the jaxpr of a call that can be inlined; None for other equations."""
    return None if _has_effects(eqn) else plain_call(eqn)


def kind_of(eqn: Any) -> str:
    """Returns the kind of an equation: cheap, costly or opaque."""
    name = eqn.primitive.name
    if _has_effects(eqn) or eqn.params.get("symbolic_zeros"):
        return "opaque"
    if name in _CHEAP:
        return "cheap"
    if name in _COSTLY:
        return "costly"
    if name == "custom_jvp_call" and all(kind_of(inner) == "cheap" or inlined_call(inner) is not None
                                         for inner in _all_equations(called_jaxpr(eqn))):  # fmt: skip
        return "cheap"
    return "opaque"


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "custom_jvp_call":
            for inner in inner_jaxprs(eqn):
                yield from _all_equations(inner)


def flops_of(eqn: Any) -> float:
    """Returns the FLOPs of an equation; an exponential counts as four, and moving elements or casting them as none."""
    name = eqn.primitive.name
    if name in PRODUCTS:
        return product_flops(eqn)
    inner = list(inner_jaxprs(eqn)) if name not in _CHEAP else []
    if inner:
        return sum(flops_of(one) for jaxpr in inner for one in jaxpr.eqns)
    if name in _MOVES:
        return 0.0
    size = max((getattr(var.aval, "size", 0) for var in (*eqn.invars, *eqn.outvars)), default=0)
    return (4.0 if name in TRANSCENDENTAL - {"div"} else 1.0) * size


def read_by_derivative(eqn: Any, is_active: Sequence[bool]) -> list[int] | None:
    """Returns the numbers of the operands that the derivative of an equation reads; None if that is costly."""
    name = eqn.primitive.name
    if name in _LINEAR:
        return []
    if name in _BILINEAR and len(eqn.invars) == 2:
        return [1 - i for i, active in enumerate(is_active) if active]
    jaxpr, _, held = _derivative(lambda ins: rebind(eqn, ins), eqn, is_active)
    live, used = partial_eval.dce_jaxpr(jaxpr.replace(outvars=held), [True] * len(held))
    if any(kind_of(one) != "cheap" and inlined_call(one) is None for one in _all_equations(live)):
        return None
    return [i for i, is_used in enumerate(used) if is_used]


def held_by_derivative(eqn: Any, is_active: Sequence[bool], *, bind: Callable) -> tuple[list[int], list[int]]:
    """Returns the numbers of the operands and of the results that the derivative of an equation holds.

    Args:
      eqn: the equation.
      is_active: for each operand, whether it is differentiated.
      bind: operands -> results, in place of the equation's own.
    """
    if eqn.primitive.name in ("while", "pallas_call") or has_symbolic_zeros(eqn):
        return [], []
    try:
        jaxpr, outs, held = _derivative(bind, eqn, is_active)
    except (NotImplementedError, TypeError, ValueError):  # not differentiable in reverse
        return [], []
    return [i for i, var in enumerate(jaxpr.invars) if var in held], [i for i, var in enumerate(outs) if var in held]


def _derivative(bind: Callable, eqn: Any, is_active: Sequence[bool]) -> tuple[Any, list, list]:
    """Returns (jaxpr of an equation and of what its derivative holds, variables of the former, of the latter)."""

    def differentiated(*ins):
        def of_active(*active):
            active = iter(active)
            return bind([next(active) if is_one else one for is_one, one in zip(is_active, ins, strict=True)])

        outs, pull = jax.vjp(of_active, *[one for is_one, one in zip(is_active, ins, strict=True) if is_one])
        return [*outs, *jax.tree.leaves(pull)]

    jaxpr = jax.make_jaxpr(differentiated)(*[var.aval for var in eqn.invars]).jaxpr
    num_outs = len(eqn.outvars)
    held = [var for var in jaxpr.outvars[num_outs:] if not isinstance(var, core.Literal)]
    return jaxpr, jaxpr.outvars[:num_outs], held
