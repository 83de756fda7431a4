"""Reads and rebinds the equations of traced programs, and hides the differences of jaxprs between JAX versions."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from hlat_jax.host.jax_compat import partial_eval

_JAX = os.path.dirname(jax.__file__) + os.sep


def primitives(names: str) -> frozenset[str]:
    """Returns the names of primitives in a text."""
    return frozenset(names.split())


CHECKPOINT = "remat2"
# Calls that do nothing but run their function.
PLAIN_CALLS = {"jit", "closed_call", "core_call"}
RULE_WITH_TRACER = "its derivative rule closes over a traced array. Make the array an argument of the function"
# Primitives that call one function on their operands and return its results -> the parameter that holds its jaxpr.
CALL_JAXPRS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    CHECKPOINT: "jaxpr",
    "shard_map": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Collective primitives, and the XLA operation that each is lowered to.
COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
ALL_REDUCES = frozenset(name for name, kind in COLLECTIVES.items() if kind == "all-reduce")
# Primitives whose results have the elements of their operand, or that have no operand.
SAME_ELEMENTS = primitives("name copy reshape squeeze expand_dims broadcast_in_dim stop_gradient iota with_tangent")
REDUCTIONS = primitives("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
# Elementwise operations that cost several times as much as an addition.
TRANSCENDENTAL = primitives("exp exp2 log log1p log2 tanh logistic rsqrt sqrt cbrt pow sin cos div erf erfc erf_inv")
# Of operands of one shape but for dimensions of size 1, or scalars.
ELEMENTWISE = TRANSCENDENTAL | primitives(
    """
    neg abs sign floor ceil round is_finite expm1 tan asin acos atan atan2 sinh cosh asinh acosh atanh square
    one_minus_square integer_pow add sub mul add_any rem max min clamp select_n eq ne lt le gt ge and or xor not
    nextafter shift_left shift_right_arithmetic shift_right_logical real imag conj complex population_count clz lgamma
    digamma stop_gradient copy copy_p name convert_element_type reduce_precision
    """
)


def is_literal(atom: Any) -> bool:
    """Returns whether an operand or result is a literal, which has a `val`, not a variable."""
    return isinstance(atom, core.Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the operands or results that are not literals."""
    return [atom for atom in atoms if not is_literal(atom)]


def values_of(atoms: Iterable[Any], env: Mapping[Any, Any]) -> list[Any]:
    """Returns the values of literals, and the values of variables in `env`."""
    return [atom.val if is_literal(atom) else env[atom] for atom in atoms]


def inner_jaxprs(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the open jaxprs among the parameters of an equation, such as a called function, branches and kernels."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def identity(jaxpr: Any) -> tuple:
    """Returns what is equal for jaxprs that compute the same by the same functions, under the same names.

    Args:
      jaxpr: open, or anything with `invars`, `eqns` and `outvars`. Functions and arrays in it are told apart by `id`.
    """
    numbers: dict[Any, int] = {}

    def of_atom(atom: Any) -> Any:
        value = (type(atom.val), str(atom.val)) if is_literal(atom) else numbers.setdefault(atom, len(numbers))
        return value, str(atom.aval)

    def of_param(value: Any) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return identity(value.jaxpr), tuple(map(id, value.consts))
        if isinstance(value, core.Jaxpr):
            return identity(value)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(map(of_param, value))
        return by_value(value)

    return (
        tuple(map(of_atom, jaxpr.invars)),
        tuple(
            (
                eqn.primitive,
                str(eqn.source_info.name_stack),
                eqn.ctx,
                tuple(map(of_atom, (*eqn.invars, *eqn.outvars))),
                tuple((key, of_param(value)) for key, value in sorted(eqn.params.items())),
            )
            for eqn in jaxpr.eqns
        ),
        tuple(map(of_atom, jaxpr.outvars)),
    )


def by_value(value: Any) -> Any:
    """Returns what is equal for equal values, but for a function or a value without a hash only for the same object."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return (type(value), id(value)) if callable(value) else (type(value), value)


def reference_jaxpr(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the jaxpr of the `reference` function of a kernel's primitive, or None for other equations."""
    reference = getattr(eqn.primitive, "reference", None)
    if reference is None:
        return None
    return jax.make_jaxpr(functools.partial(reference, **eqn.params))(*(var.aval for var in eqn.invars)).jaxpr


def equations(jaxpr: core.Jaxpr, *, trips: int = 1) -> Iterator[tuple[core.JaxprEqn, int]]:
    """Yields (equation, number of executions) for every equation of a jaxpr, each followed by the equations inside it.

    A `while` counts as one trip, and every branch of a `cond` as taken. The derivative rules of `custom_vjp` are not
    included, because they appear in the trace of a gradient.
    """
    for eqn in jaxpr.eqns:
        yield eqn, trips
        for inner in inner_jaxprs(eqn):
            yield from equations(inner, trips=trips * inner_trips(eqn))


def inner_trips(eqn: core.JaxprEqn) -> int:
    """Returns how often an equation runs the jaxprs inside it, by the length of a scan or the grid of a kernel."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "pallas_call":
        return math.prod(size for size in eqn.params["grid_mapping"].grid if isinstance(size, int))
    return 1


def called_jaxpr(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the open jaxpr of the one function that an equation calls with its operands, or None."""
    key = CALL_JAXPRS.get(eqn.primitive.name)
    return None if key is None else getattr(eqn.params[key], "jaxpr", eqn.params[key])


def plain_call(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Returns the closed jaxpr of a call that only runs its function and places no arrays, or None for others."""
    if eqn.primitive.name not in PLAIN_CALLS:
        return None
    params, body = eqn.params, eqn.params[CALL_JAXPRS[eqn.primitive.name]]
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings):
        return None
    return body if hasattr(body, "consts") else core.ClosedJaxpr(body, [])


def aval_bytes(aval: Any) -> int:
    """Returns the size in bytes of an abstract value, or 0 if it has no shape, such as a token."""
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def is_transposed(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation belongs to the backward pass of a differentiated function."""
    return "transpose(" in str(eqn.source_info.name_stack)


def op_name(eqn: core.JaxprEqn) -> str | None:
    """Returns the name in the `def` of the function that an equation calls, or None if it calls none."""
    if eqn.primitive.name == "jit":
        return eqn.params["name"]
    if eqn.primitive.name == "pallas_call":
        return eqn.params["name"] if "name" in eqn.params else eqn.params["jaxpr"].debug_info.func_name
    inner = called_jaxpr(eqn)
    return None if inner is None else inner.debug_info.func_name


def source_of(eqn: core.JaxprEqn) -> str:
    """Returns "file.py:line (function)" of the user's line that an equation comes from, or "" if it is unknown."""
    text = source_info_util.summarize(eqn.source_info)
    parts = re.fullmatch(r"(.+?):(\d+)(?::\d+)? \((.*)\)", text)
    return f"{pathlib.PurePath(parts[1]).name}:{parts[2]} ({parts[3]})" if parts else text


def jax_function(eqn: core.JaxprEqn) -> str | None:
    """Returns the `op_name` of an equation that calls a function of JAX itself, or None for other equations."""
    inner = called_jaxpr(eqn)
    return op_name(eqn) if inner is not None and (inner.debug_info.func_filename or "").startswith(_JAX) else None


def function_name(fn: Any) -> str:
    """Returns the name of a function for error messages."""
    return getattr(fn, "__qualname__", type(fn).__name__)


def trace_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list, Any]:
    """Returns (the jaxpr of a call of a user's function, its operands, the tree of its results).

    Arguments without a dtype, such as Python numbers, strings, and functions among the leaves of a module, are passed
    to the function as they are.
    """
    all_leaves, structure = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(all_leaves) if is_array(leaf)]
    leaves = [all_leaves[place] for place in places]
    trees = []

    def flat(*leaves):
        given = dict(zip(places, leaves, strict=True))
        args, kwargs = jax.tree.unflatten(structure, [given.get(place, leaf) for place, leaf in enumerate(all_leaves)])
        outs, tree = jax.tree.flatten(fn(*args, **kwargs))
        trees.append(tree)
        list(map(jax.typeof, outs))  # names a result that is no array, which `make_jaxpr` does not
        return outs

    closed = jax.make_jaxpr(flat)(*leaves)
    return closed, leaves, trees[0]


def rule_with_tracer(jaxpr: core.Jaxpr) -> tuple[str, str] | None:
    """Returns (name, place of the call) of a function with a derivative rule that closes over a traced array, or None.

    Such a rule can run only while the array is traced. It cannot run from a jaxpr, or under `jax.jit` or
    `jax.checkpoint` around the function that computes the array.
    """
    for eqn, _ in equations(jaxpr):
        if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call") or jax_function(eqn) is not None:
            continue
        if not _holds_tracer(list(eqn.params.values())):
            continue  # rules are run below as if all operands were differentiated, so only where it may matter

        def total(args: list[Any], *, eqn: core.JaxprEqn = eqn) -> jax.Array:
            return sum(jnp.sum(out.real) for out in rebind(eqn, args) if is_inexact(out))

        try:
            closed = jax.make_jaxpr(jax.grad(total, allow_int=True))([var.aval for var in eqn.invars])
        except Exception:  # an error of a rule is raised where the function is differentiated, if it is
            continue
        if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
            return op_name(eqn) or eqn.primitive.name, source_info_util.summarize(eqn.source_info)
    return None


def _holds_tracer(rules: list[Any]) -> bool:
    """Returns whether a tracer can be reached from functions, by what they close over and the attributes of that."""
    left, seen = list(rules), set()
    while left:
        one = left.pop()
        if isinstance(one, jax.core.Tracer):
            return True
        if id(one) in seen or isinstance(one, (type, ModuleType, core.Jaxpr, core.ClosedJaxpr)):
            continue
        seen.add(id(one))
        if isinstance(one, (tuple, list, dict, CellType, functools.partial)):
            left += gc.get_referents(one)
        else:
            left += [*(getattr(one, "__closure__", None) or ()), *(getattr(one, "__defaults__", None) or ())]
            left += [getattr(one, "f_transformed", None), *getattr(one, "__dict__", {}).values()]
    return False


def warn_of_rule_with_tracer(fn: Any, jaxpr: core.Jaxpr) -> tuple[str, str] | None:
    """Returns the `rule_with_tracer` of a function. If there is one, warns that passes leave the function as it is."""
    rule = rule_with_tracer(jaxpr)
    if rule is not None:
        text = f"passes leave {function_name(fn)} as it is, because of {rule[0]} at {rule[1]}: {RULE_WITH_TRACER}."
        warnings.warn(text, stacklevel=3)
    return rule


def is_array(leaf: Any) -> bool:
    """Returns whether an argument is traced: it has a dtype and a shape."""
    if isinstance(leaf, type):  # `jnp.float32` has the attributes of its instances
        return False
    return hasattr(leaf, "__jax_array__") or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))


@contextlib.contextmanager
def place_of(eqn: core.JaxprEqn) -> Iterator[None]:
    """Context manager in which new equations get the name stack, source line and context of `eqn`."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def rebind(eqn: core.JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Returns the results of binding an equation's primitive to other operands, with some parameters changed."""
    bound = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX 0.9 returns the functions separately
    results = eqn.primitive.bind(*functions, *args, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def bind_again(eqn: core.JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Returns the results of `rebind` under the equation's name stack and source line."""
    with place_of(eqn):
        return rebind(eqn, args, **changed)


def perturbed_at(fn: Callable, primals: Sequence[Any], places: Sequence[int]) -> Callable:
    """Returns `fn` as a function of only the arguments at these positions. The others are fixed to `primals`."""

    def of_perturbed(*perturbed: Any) -> list:
        merged = list(primals)
        for at, value in zip(places, perturbed, strict=True):
            merged[at] = value
        return fn(*merged)

    return of_perturbed


def linearized_at(fn: Callable, primals: Sequence[Any], places: Sequence[int]) -> tuple[list, Callable]:
    """Linearizes `fn` with respect to the arguments at these positions, as `jax.linearize` does."""
    return jax.linearize(perturbed_at(fn, primals, places), *(primals[at] for at in places))


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which values of a type vary, as `shard_map` checks them."""
    axes = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if axes is None else axes.varying  # JAX 0.9 has vma


def inputs_of(jaxpr: core.Jaxpr, at: int) -> list[bool]:
    """Returns for each input of a jaxpr whether its result number `at` depends on it."""
    return partial_eval.dce_jaxpr(jaxpr, [number == at for number in range(len(jaxpr.outvars))])[1]


def without_dead_code(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns an open jaxpr with the same inputs and results, without equations that no result depends on."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def without_consts(closed: core.ClosedJaxpr) -> tuple[core.Jaxpr, list[Any]]:
    """Returns (open jaxpr, constants) of a closed jaxpr. The open jaxpr takes the constants before its operands."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), list(closed.consts)


def is_inexact(aval: Any) -> bool:
    """Returns whether values of this type are floating-point or complex, and so have a derivative."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)
