"""Automatic mixed precision: runs an fp32 function with its matrix products in bf16 or fp16.

Apply it to the forward function, before `jax.grad`. The backward pass inherits the dtypes, and fp32 parameters receive
fp32 gradients. `autocast_equations` applies the rules given here. fp16 also needs the loss scale of `step.loss_scale`.

    loss = autocast(loss_fp32, "bf16")
    value, grads = jax.value_and_grad(loss)(params_fp32, batch)

Source: RAF's AutoCast, arXiv 2303.04759 and github.com/awslabs/raf (Apache-2.0), with lists derived from TensorFlow's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.ops.own_backward import has_own_backward
from hlat_jax.passes.autocast_equations import Cast
from hlat_jax.passes.interpret import COMPOUND, map_jaxpr, stops_on_floats
from hlat_jax.passes.jaxpr import (
    COLLECTIVES,
    called_jaxpr,
    equations,
    op_name,
    primitives,
)

# Matrix products: operands are cast to the narrow dtype.
ALWAYS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"})

# Always fp32: bf16 is too coarse, or the range of fp16 too small. So is every primitive that is in none of the lists.
NEVER = primitives(
    """
    exp exp2 expm1 log log1p log2 pow integer_pow square one_minus_square sqrt rsqrt cbrt div rem tanh logistic erf
    erfc erf_inv lgamma digamma sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh reduce_sum reduce_prod
    cumsum cumprod cumlogsumexp reduce_window_sum select_and_scatter_add scatter-add scatter-mul pallas_call
    """
)

# Narrow if at least half of the operands declared fp32 are, not counting constants.
INFER = primitives(
    """
    add sub add_any mul neg abs sign stop_gradient max min clamp select_n floor ceil round copy copy_p name
    optimization_barrier broadcast_in_dim reshape transpose squeeze slice dynamic_slice dynamic_update_slice pad
    rev concatenate stack unstack split gather scatter reduce_max reduce_min reduce_window_max cummax cummin sort top_k
    sharding_constraint reshard device_put convert_element_type pvary pcast pbroadcast split_tangent with_tangent
    """
) | frozenset(COLLECTIVES)

# The bodies of `COMPOUND` are cast. A rule for the primitive can only be `never`; one for a function also `always`.
_RULES = ("always", "never", "infer")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class CastPolicy:
    """Dtype and rules by which a function is cast.

    Attributes:
      compute: the narrow dtype of matrix products and operations after them, bfloat16 or float16.
      rules: "always", "never" or "infer" by the name of a primitive or of an op. An op is a function under `jax.jit`,
        `jax.custom_vjp` or `jax.custom_jvp`. A `never` op runs entirely as declared. An `always` op gets narrow
        arguments. An `infer` op, or an op without a rule, is cast by the rules for the equations inside it.
    """

    compute: Any = jnp.bfloat16
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.compute not in (jnp.bfloat16, jnp.float16):
            raise ValueError(f"CastPolicy.compute={self.compute!r} must be jnp.bfloat16 or jnp.float16.")
        for name, rule in self.rules.items():
            if rule not in _RULES:
                raise ValueError(f"autocast rule {name}={rule!r} is unknown. Use one of {', '.join(_RULES)}.")


POLICIES = {"bf16": CastPolicy(jnp.bfloat16), "fp16": CastPolicy(jnp.float16)}


def autocast(fn: Callable[_Args, _Result], policy: CastPolicy | str) -> Callable[_Args, _Result]:
    """Returns a function with the same arguments, results and dtypes that runs fp32 matrix products in a narrow dtype.

    Values declared in other dtypes than fp32 are unchanged. Each call traces `fn` again, so wrap the result, or its
    caller, in `jax.jit`.

    Args:
      fn: a function that JAX can trace, of pytrees of arrays and of anything else. Values without a dtype, such as
        Python numbers, `train=True`, strings, and functions among the leaves of a module, are passed as they are.
      policy: a policy, or the name of one in `POLICIES`.

    Raises:
      ValueError: an unknown policy, or at a call a rule for a name that is no primitive of JAX and no op of `fn`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"autocast policy {policy!r} is unknown. Use {known}, or your own CastPolicy.")
        policy = POLICIES[policy]
    if not isinstance(policy, CastPolicy):
        raise ValueError(
            f"autocast policy {policy!r} is not a policy. Use {', '.join(POLICIES)}, or your own CastPolicy."
        )
    rules = policy.rules

    def run(closed: core.ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        _check_names(rules, closed.jaxpr, getattr(fn, "__name__", type(fn).__name__))
        rule, low = functools.partial(_rule, rules), jnp.dtype(policy.compute)
        return Cast(low, rule, wide_distances="dot_general" not in rules).outputs(closed, leaves)

    return map_jaxpr(fn, run)


def is_fp16(policy: CastPolicy | str | None) -> bool:
    """Returns whether a policy casts to fp16, so that gradients need a loss scale, see `step.loss_scale`."""
    cast_policy = POLICIES.get(policy) if isinstance(policy, str) else policy
    return cast_policy is not None and jnp.dtype(cast_policy.compute) == jnp.float16


def _rule(rules: Mapping[str, str], eqn: core.JaxprEqn) -> str:
    """Returns the rule for an equation: that for its function or primitive, else by its operands, else by the lists."""
    name = eqn.primitive.name
    named = rules.get(op_name(eqn) or name) or rules.get(name)
    if named is not None:
        return named
    if name in ALWAYS:
        return _product_rule(eqn)
    is_square = name == "mul" and eqn.invars[0] is eqn.invars[1]
    if is_square or (name == "while" and stops_on_floats(eqn)):
        return "never"
    body = called_jaxpr(eqn) if has_own_backward(eqn) else None
    inside = () if body is None else equations(body)
    if any(inner.primitive.name == "while" and _rule(rules, inner) == "never" for inner, _ in inside):
        return "never"  # its derivative rule may run the loop again, which must take the same steps
    return "infer" if name in INFER or name in COMPOUND else "never"


def _product_rule(eqn: core.JaxprEqn) -> str:
    """Returns the rule for a matrix product: "always" if it may be narrow."""
    precision = eqn.params["precision"]
    if jax.lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,)):
        return "never"
    if eqn.primitive.name == "dot_general":
        ((dims, _), _), shape = eqn.params["dimension_numbers"], getattr(eqn.invars[0].aval, "shape", ())
        if not dims:
            return "never"
        if math.prod(shape[dim] for dim in dims) <= 1:
            return "infer"  # an elementwise multiplication
    return "always"


def _check_names(rules: Mapping[str, str], jaxpr: core.Jaxpr, function: str) -> None:
    """Raises ValueError for a rule whose name is neither that of a primitive of JAX nor of an op of the function."""
    listed = jax.extend.core.primitives
    known = (
        {getattr(listed, name).name for name in dir(listed) if name.endswith("_p")} | ALWAYS | NEVER | INFER | COMPOUND
    )
    if set(rules) <= known:
        return
    eqns = [eqn for eqn, _ in equations(jaxpr)]
    ops = {name for eqn in eqns if (name := op_name(eqn)) is not None}
    for name in set(rules) - known - {eqn.primitive.name for eqn in eqns} - ops:
        raise ValueError(
            f"autocast rule {name}={rules[name]!r} names neither a primitive nor an op of {function}. Ops that it "
            f"calls: {', '.join(sorted(ops)) or 'none'}."
        )
