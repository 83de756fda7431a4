"""What a loss costs: bytes that its backward pass keeps, FLOPs, how far two gradients are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.passes.products import live_jaxpr, total_flops


def residual_bytes(loss: Callable, params: Any, batch: Any, *, by_xla: bool = False) -> int:
    """Returns the bytes held between forward and backward pass, without the arguments themselves.

    Counted in the trace, or as the results of the program that XLA compiles for the forward pass.
    """

    def pullback(params, batch):
        return jax.tree.leaves(jax.vjp(lambda params: loss(params, batch), params)[1])

    kept = jax.make_jaxpr(pullback)(params, batch).jaxpr
    seen = set(kept.invars)
    places = []
    for place, var in enumerate(kept.outvars):
        if isinstance(var, jax.extend.core.Var) and var not in seen:
            seen.add(var)
            places.append(place)
    if by_xla:
        program = jax.jit(lambda params, batch: [pullback(params, batch)[place] for place in places])
        return program.lower(params, batch).compile().memory_analysis().output_size_in_bytes
    return sum(kept.outvars[place].aval.size * kept.outvars[place].aval.dtype.itemsize for place in places)


def step_for_memory(loss: Callable) -> Callable:
    """Returns the gradient by the parameters, scheduled as on accelerators: XLA on CPU runs blocks side by side."""
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    return jax.jit(jax.value_and_grad(loss), compiler_options=options)


def total_product_flops(loss: Callable, params: Any, batch: Any) -> float:
    """Returns the FLOPs of the products of a gradient."""
    return total_flops(live_jaxpr(jax.jit(jax.value_and_grad(loss)).trace(params, batch)))


def distance(found: Any, wanted: Any) -> float:
    """Returns the norm of the difference of two trees, relative to that of `wanted`."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    squares = [(np.sum(np.square(np.float64(a) - np.float64(b))), np.sum(np.square(np.float64(b)))) for a, b in pairs]
    away, norm = np.sum(squares, axis=0)
    return float(np.sqrt(away / norm))


def rounded(tree: Any) -> Any:
    """Returns the tree with its fp32 arrays rounded to bf16 once, in fp32."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.float32 else x, tree)
