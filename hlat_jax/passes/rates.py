"""Costs of recomputation on the device at hand: `remat.fit(..., options=RematOptions(rates=measured_rates()))`."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.passes.recompute import Rates

_CHAIN = 8  # operations, which XLA fuses into one loop


@functools.cache
def measured_rates(*, dtype: str = "float32", width: int = 1024, num_elements: int = 1 << 22) -> Rates:
    """Returns rates of which elementwise work is measured on JAX's default device, once in a process; some seconds.

    Collectives and transfers to the host keep the rates of `Rates`: one device sends nothing.

    Args:
      dtype: dtype of the operands.
      width: width of the square matrices whose product is the unit.
      num_elements: size of the arrays of elementwise work; more than the caches hold.

    Source: RAF profiles operations on the device, awslabs/raf `src/pass/rematerialization.cc`; here it is three kinds
    of work rather than each operation.
    """
    matrix, vector = jnp.full((width, width), 1e-3, dtype), jnp.full((num_elements,), 0.5, dtype)
    second_per_flop = _seconds(jnp.matmul, matrix, matrix) / (2 * width**3)

    def rate(one: Callable) -> float:
        short, long = (_seconds(functools.partial(_chained, one, count), vector) for count in (1, 1 + _CHAIN))
        return max(long - short, 0.0) / _CHAIN / num_elements / second_per_flop

    return Rates(
        element=rate(lambda x, number: x * (1.5 + number) - number) / 2,
        transcendental=rate(lambda x, _: jnp.exp(-x)),
    )


def _chained(one: Callable, count: int, x: jax.Array) -> jax.Array:
    for number in range(count):
        x = one(x, number)
    return x


def _seconds(fn: Callable, *args: Any, rounds: int = 5) -> float:
    """Returns the median duration of a function, without its compilation."""
    compiled = jax.jit(fn).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        found.append(time.perf_counter() - began)
    return statistics.median(found)
