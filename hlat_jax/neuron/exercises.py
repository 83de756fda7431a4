"""Small JAX programs for the devices of this machine, as inputs of `probes`.

Each program is jitted, so that none of its operations runs on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.config import ParallelConfig
from hlat_jax.facts.core_groups import server_of
from hlat_jax.parallel.degrees import place_over
from hlat_jax.parallel.sharding import Layout, make_layout
from hlat_jax.precision import Rounding

_NUM_DRAWN = 1 << 20


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uniform, normal), 2^20 numbers each, from the `rbg` generator as for initial weights."""

    @jax.jit
    def draw_both(key):
        normal_key, uniform_key = jax.random.split(key)
        return jax.random.uniform(uniform_key, (_NUM_DRAWN,)), jax.random.normal(normal_key, (_NUM_DRAWN,))

    uniform, normal = draw_both(jax.random.key(seed, impl="rbg"))
    return np.asarray(uniform), np.asarray(normal)


def multiply(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Returns a @ b of bf16 matrices with a result of the given dtype, converted to fp32."""
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.dtype(dtype)))
    return np.asarray(product(*(x.astype(jnp.bfloat16) for x in (a, b)))).astype(np.float32)


def cast(values: np.ndarray) -> np.ndarray:
    """Returns fp32 values after a cast to bf16."""
    # not cast back in the program: the compiler could remove a pair of casts
    return np.asarray(jax.jit(lambda x: x.astype(jnp.bfloat16))(values)).astype(np.float32)


def cast_by_hash(values: np.ndarray) -> np.ndarray:
    """Returns fp32 values after `precision.Rounding`, stochastic rounding to bf16 in software."""
    write = jax.jit(lambda x: Rounding((jnp.uint32(3), jnp.uint32(5))).write(x, jnp.bfloat16, name="doctor"))
    return np.asarray(write(values)).astype(np.float32)


def add_one(state: jax.Array) -> jax.Array:
    """Returns state + 1, with `state` donated."""
    return jax.jit(lambda x: x + 1, donate_argnums=0)(state)


def layouts_to_check(
    parallel: ParallelConfig, devices: Sequence[Any], num_kv_heads: int
) -> Iterator[tuple[Layout, str]]:
    """Yields (layout, axis) for every set of groups that collectives of a run on these devices may use.

    These are the axes that the config's layout splits, if it fits, with devices placed as in a run, and all devices.
    """
    try:
        layout = place_over(parallel, devices, server=server_of(devices), num_kv_heads=num_kv_heads)
        split = layout.wide(layout.mesh.axis_names)
    except ValueError:
        split = ()
    yield from ((layout, axis) for axis in split)
    if not any(layout.mesh.shape[axis] == len(devices) for axis in split):
        yield make_layout(ParallelConfig(data=len(devices)), devices, num_kv_heads=1), "data"


def run_collective(name: str, values: np.ndarray, *, layout: Layout, axis: str) -> np.ndarray:
    """Returns the result of one collective along one mesh axis, as `probes.collectives` expects it.

    Every device of the mesh takes part in its own group. The result is the first group's, or NaN if another differs.
    """
    others = tuple(other for other in layout.mesh.axis_names if other != axis)
    size = layout.mesh.shape[axis]
    collective = {
        "sum": lambda row: jax.lax.psum(row, axis),
        "gather": lambda row: jax.lax.all_gather(row, axis),
        "scatter": lambda row: jax.lax.psum_scatter(row, axis, scatter_dimension=0, tiled=False),
        "next": lambda row: jax.lax.ppermute(row, axis, [(index, (index + 1) % size) for index in range(size)]),
        "previous": lambda row: jax.lax.ppermute(row, axis, [(index, (index - 1) % size) for index in range(size)]),
    }[name]

    def on_device(mine):
        return collective(mine[0])[None, None]

    mapped = jax.shard_map(on_device, mesh=layout.mesh, in_specs=P(axis), out_specs=P(others, axis), check_vma=False)
    groups = np.asarray(jax.jit(mapped)(jax.device_put(values, NamedSharding(layout.mesh, P(axis)))))
    return np.where((groups == groups[:1]).all(0), groups[0], np.nan)
