"""Lowering rules for Neuron of primitives that JAX lowers to an operation that Neuron does not support."""

from __future__ import annotations

import functools

import jax
from jax.extend.mlir.dialects import stablehlo

from hlat_jax.host.jax_compat import lower_with_sharding_in_types, mlir


@functools.cache
def elide_idle_roundings() -> None:
    """Drops, only in programs for Neuron, every `reduce_precision` to the bits that its operand already has.

    `jax.checkpoint` with a policy that saves values puts one on each. It computes nothing, and Neuron's known issues
    list the operation as unsupported. Programs for other platforms are lowered as before. The rule is registered for
    all platforms and checks the platform, since a rule only for `neuron` needs Neuron's plugin.
    """
    mlir.register_lowering(jax.lax.reduce_precision_p, _reduce_precision)


def _reduce_precision(ctx, operand, *, exponent_bits: int, mantissa_bits: int):
    info = jax.numpy.finfo(ctx.avals_in[0].dtype)
    is_idle = (exponent_bits, mantissa_bits) == (info.nexp, info.nmant)
    if is_idle and set(ctx.module_context.platforms) == {"neuron"}:
        return [operand]
    bits = map(mlir.i32_attr, (exponent_bits, mantissa_bits))
    return [lower_with_sharding_in_types(ctx, stablehlo.reduce_precision(operand, *bits), ctx.avals_out[0])]
