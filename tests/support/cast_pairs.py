"""Finds the casts that a compiler may remove: a float that is cast to a narrower type, moved, and cast back."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util

from hlat_jax.passes.jaxpr import called_jaxpr, inner_jaxprs, is_literal, primitives

# A result may be one of the operands; so it is rounded as they are.
_MOVES = primitives(
    """
    reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice dynamic_update_slice concatenate pad
    select_n rev gather scatter copy copy_p name stop_gradient optimization_barrier sharding_constraint
    all_gather all_gather_invariant all_to_all ppermute pvary pcast split reduce_max reduce_min max min neg abs
    """
)


def cast_pairs(closed: Any) -> list[str]:
    """Returns the places, `file:line (function)`, of all casts back from bf16 to fp32 in a traced program.

    Follows values through moves, selects, maxima, calls, branches, and the carries of loops.
    """
    places: dict[str, None] = {}
    _results(closed.jaxpr, [False] * len(closed.jaxpr.invars), places)
    return list(places)


def _results(jaxpr: Any, given: Sequence[bool], places: dict[str, None]) -> list[bool]:
    """Returns which results of a jaxpr have been cast from fp32, and adds the places of casts back."""
    cast = dict(zip(jaxpr.invars, given, strict=True))

    def is_cast(atom: Any) -> bool:
        return not is_literal(atom) and cast.get(atom, False)

    for eqn in jaxpr.eqns:
        name, own = eqn.primitive.name, [is_cast(atom) for atom in eqn.invars]
        kinds = [getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars)]
        outs = [False] * len(eqn.outvars)
        if name == "convert_element_type":
            outs = [kinds == [jnp.float32, jnp.bfloat16]]
            if kinds == [jnp.bfloat16, jnp.float32] and own[0]:
                places[source_info_util.summarize(eqn.source_info)] = None
        elif name == "optimization_barrier":
            outs = own
        elif name in _MOVES:
            outs = [any(own)] * len(outs)
        elif name in ("scan", "while"):
            outs = _loop(eqn, own, places)
        elif name == "cond":
            branches = [_results(branch.jaxpr, own[1:], places) for branch in eqn.params["branches"]]
            outs = [any(parts) for parts in zip(*branches, strict=True)]
        elif called_jaxpr(eqn) is not None:
            outs = _results(called_jaxpr(eqn), own, places)
        elif name not in ("scatter-add", "reduce_precision") and any(True for _ in inner_jaxprs(eqn)):
            raise NotImplementedError(name)
        cast.update(zip(eqn.outvars, outs, strict=True))
    return [is_cast(atom) for atom in jaxpr.outvars]


def _loop(eqn: Any, own: list[bool], places: dict[str, None]) -> list[bool]:
    """Returns which results of a loop have been cast, in this iteration or an earlier one."""
    params = eqn.params
    if eqn.primitive.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        body, consts, carry, xs = params["body_jaxpr"].jaxpr, own[first : first + second], own[first + second :], []
    else:
        body, split = params["jaxpr"].jaxpr, params["num_consts"]
        consts, rest = own[:split], own[split:]
        carry, xs = rest[: params["num_carry"]], rest[params["num_carry"] :]
    while True:
        outs = _results(body, [*consts, *carry, *xs], places)
        after = [a or b for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if after == carry:
            return [*carry, *outs[len(carry) :]]
        carry = after
