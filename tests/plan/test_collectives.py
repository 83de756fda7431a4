"""Collectives of a trace and of its compiled program: kind, axes, trips and bytes are as written."""

import types

import compiled_collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def gather_and_cut(x, axis):
    return jax.lax.all_gather(x, axis, tiled=True)[:ROWS]


def scatter_and_repeat(x, axis):
    part = jax.lax.psum_scatter(x, axis, tiled=True)
    return jnp.concatenate([part] * (ROWS // part.shape[0]))


def exchange(x, axis):
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def ring(x, axis):
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


BODIES = {
    "all-reduce": (jax.lax.psum, BLOCK),
    "all-gather": (gather_and_cut, 4 * BLOCK),
    "reduce-scatter": (scatter_and_repeat, BLOCK),
    "all-to-all": (exchange, BLOCK),
    "collective-permute": (ring, BLOCK),
}


@pytest.mark.parametrize("axis", ["data", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("pipe", "tensor"))])
def test_collectives_have_kind_axis_trips_and_bytes(axis):
    mesh = mesh_of(*(4 if name == axis else 2 if name == "fsdp" else 1 for name in AXES))
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


GROUPS = {
    "{{0,2},{1,3}}": [[0, 2], [1, 3]],
    "{}": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "[4,2]<=[2,2,2]T(0,2,1)": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=2,'b'=4] {'b'}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh['a'=2,'b'=4] {'b':(1)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=2,'b'=4] {'b':(2)2}": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
}


def test_every_notation_of_groups_in_a_text_is_read():
    for text, groups in GROUPS.items():
        assert sorted(map(sorted, compiled_collectives.device_groups(text, 8).tolist())) == groups, text


def test_merged_collectives_and_those_that_leave_no_device_are_told_apart():
    lines = (
        "%a = (f32[2]{0}, /*index=1*/bf16[3,5]{1,0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add",
        "%b = pred[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
        "%c = f32[4]{0} all-reduce-done(%x)",
    )
    text = "HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {\n  " + "\n  ".join(lines) + "\n}\n"
    merged, alone = collectives(text, types.SimpleNamespace(shape={"data": 2, "tensor": 4}))
    assert (merged.axes, merged.num_arrays, merged.payload_bytes) == (("data", "tensor"), 2, 38)
    assert (alone.axes, list(count_collectives([merged, alone]))) == ((), [("all-reduce", ("data", "tensor"))])
