"""Collectives of a trace and of its compiled program: kind, axes, trips and bytes are as written."""

import jax
import jax.numpy as jnp
import numpy as np
from compiled_collectives import collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.plan.collectives import Count, bus_factor, count_collectives, traced_collectives

AXES = ("pipe", "data", "fsdp", "tensor")
ROWS, WIDTH = 8, 16  # of one device, fp32
BLOCK = ROWS * WIDTH * 4


def mesh_of(*degrees):
    devices = np.asarray(jax.devices()[: int(np.prod(degrees))]).reshape(degrees)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


def of_trace_and_program(body, mesh, *, trips=1):
    """Returns the collectives of `body`, on a block [ROWS, WIDTH] of every device, in a scan of `trips`."""

    def run(x):
        return jax.lax.scan(lambda carry, _: (jnp.sin(body(carry)), None), x, None, length=trips)[0]

    whole = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(AXES)))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    traced = jax.jit(mapped).trace(whole)
    return traced_collectives(traced.jaxpr, mesh), collectives(traced.lower().compile().as_text(), mesh)


def scatter_and_repeat(x, axis):
    part = jax.lax.psum_scatter(x, axis, tiled=True)
    return jnp.concatenate([part] * (ROWS // part.shape[0]))


BODIES = {
    "all-reduce": (jax.lax.psum, BLOCK),
    "all-gather": (lambda x, axis: jax.lax.all_gather(x, axis, tiled=True)[:ROWS], 4 * BLOCK),
    "reduce-scatter": (scatter_and_repeat, BLOCK),
    "all-to-all": (lambda x, axis: jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True), BLOCK),
    "collective-permute": (lambda x, axis: jax.lax.ppermute(x, axis, [(i, (i + 1) % 4) for i in range(4)]), BLOCK),
}


def test_collectives_have_kind_axis_trips_and_bytes():
    axis, mesh = "data", mesh_of(1, 4, 2, 1)
    for kind, (body, payload) in BODIES.items():
        for [found] in of_trace_and_program(lambda x, body=body: body(x, axis), mesh):
            assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 4)
            assert (found.payload_bytes, found.trips, found.num_arrays) == (payload, 1, 1)
            assert found.wire_bytes == payload * bus_factor(kind, 4)


def test_collectives_in_loops_count_once_per_trip_of_every_loop_and_name_all_axes():
    mesh = mesh_of(1, 2, 2, 2)

    def twice(x):
        x = jax.lax.scan(lambda y, _: (jnp.cos(jax.lax.psum(y, ("tensor", "data"))), None), x, None, length=3)[0]
        return jax.lax.psum(x, "fsdp")

    for found in of_trace_and_program(twice, mesh, trips=5):
        assert count_collectives(found) == {
            ("all-reduce", ("data", "tensor")): Count(15, 15 * BLOCK, 1.5 * 15 * BLOCK),
            ("all-reduce", ("fsdp",)): Count(5, 5 * BLOCK, 5.0 * BLOCK),
        }
