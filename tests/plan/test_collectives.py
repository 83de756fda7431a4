"""Collectives are read from HLO text as programs of known collectives have them: kind, axes, trips, bytes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.plan.collectives import Count, bus_factor, collectives, count_collectives, device_groups

AXES = ("pipe", "data", "fsdp", "tensor")
ROWS, WIDTH = 8, 16  # of one device, fp32
BLOCK = ROWS * WIDTH * 4


def _mesh(*degrees):
    devices = np.asarray(jax.devices()[: int(np.prod(degrees))]).reshape(degrees)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


def _text(body, mesh, *, trips=1):
    """Returns the compiled text of `body`, on a block [ROWS, WIDTH] of every device, in a scan of `trips`."""

    def run(x):
        return jax.lax.scan(lambda carry, _: (jnp.sin(body(carry)), None), x, None, length=trips)[0]

    whole = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(AXES)))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    return jax.jit(mapped).lower(whole).compile().as_text()


def _gather_and_cut(x, axis):
    return jax.lax.all_gather(x, axis, tiled=True)[:ROWS]


def _scatter_and_repeat(x, axis):
    part = jax.lax.psum_scatter(x, axis, tiled=True)
    return jnp.concatenate([part] * (ROWS // part.shape[0]))


def _exchange(x, axis):
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def _ring(x, axis):
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


BODIES = {
    "all-reduce": (jax.lax.psum, lambda group: BLOCK),
    "all-gather": (_gather_and_cut, lambda group: BLOCK * group),
    "reduce-scatter": (_scatter_and_repeat, lambda group: BLOCK),
    "all-to-all": (_exchange, lambda group: BLOCK),
    "collective-permute": (_ring, lambda group: BLOCK),
}


@pytest.mark.quick_cases(
    "all-gather-data",
    "all-gather-fsdp",
    "all-gather-tensor",
    "all-reduce-data",
    "all-reduce-tensor",
    "collective-permute-fsdp",
    "collective-permute-pipe",
    "collective-permute-tensor",
    "reduce-scatter-data",
    "reduce-scatter-fsdp",
    "reduce-scatter-pipe",
    "reduce-scatter-tensor",
)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("kind", BODIES)
def test_collectives_have_kind_axis_trips_and_bytes(kind, axis):
    degrees = [4 if name == axis else 1 for name in AXES]
    degrees[0 if axis != "pipe" else 3] = 2
    mesh = _mesh(*degrees)
    body, payload = BODIES[kind]
    [found] = collectives(_text(lambda x: body(x, axis), mesh), mesh)
    assert (found.kind, found.axes, found.group_size) == (kind, (axis,), 4)
    assert (found.payload_bytes, found.trips, found.num_arrays, found.dtypes) == (payload(4), 1, 1, ("f32",))
    assert found.wire_bytes == payload(4) * bus_factor(kind, 4)


def _psum(*axes):
    return lambda x: jax.lax.psum(x, axes)


def test_collectives_over_several_axes_name_them_all_outermost_first():
    mesh = _mesh(2, 2, 1, 2)
    [found] = collectives(_text(_psum("tensor", "pipe"), mesh), mesh)
    assert (found.axes, found.group_size) == (("pipe", "tensor"), 4)


def test_collectives_in_loops_count_once_per_trip_of_every_loop():
    mesh = _mesh(1, 2, 1, 4)

    def twice(x):
        x = jax.lax.scan(lambda y, _: (jnp.cos(jax.lax.psum(y, "tensor")), None), x, None, length=3)[0]
        return jax.lax.psum(x, "data")

    counts = count_collectives(_text(twice, mesh, trips=5), mesh)
    assert counts == {
        ("all-reduce", ("data",)): Count(1, 1, 5, 5 * BLOCK, 5.0 * BLOCK),
        ("all-reduce", ("tensor",)): Count(1, 1, 15, 15 * BLOCK, 1.5 * 15 * BLOCK),
    }


WHILE = """HloModule m
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]) parameter(0)
  %ar = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%add
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %bound = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %loop = (s32[], f32[4]) while(%start), condition=%condition, body=%body
}
"""


def test_trip_count_falls_back_to_the_loop_condition():
    [found] = collectives(WHILE, _shape(data=2, tensor=2))
    assert (found.axes, found.trips, found.payload_bytes) == (("tensor",), 7, 16)


def test_collectives_in_a_loop_of_unknown_length_raise():
    with pytest.raises(ValueError, match="loop %loop has a collective, and its trip count is not in the text"):
        collectives(WHILE.replace("constant(7)", "parameter(1)"), _shape(data=2, tensor=2))
    harmless = WHILE.replace("constant(7)", "parameter(1)").replace("all-reduce(", "negate(")
    assert collectives(harmless, _shape(data=2, tensor=2)) == []


def _shape(**degrees):
    return types.SimpleNamespace(shape=degrees)


def _entry(line):
    return f"HloModule m\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n  {line}\n}}\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%a = (f32[2]{0}, /*index=1*/bf16[3,5]{1,0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add",
            ("all-reduce", ("data", "tensor"), 8, 2, 38, ("bf16", "f32")),
        ),
        (
            "%a = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            ("all-gather", ("tensor",), 4, 1, 32, ("bf16",)),
        ),
        (
            "%a = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}",
            ("collective-permute", ("data",), 2, 1, 16, ("f32",)),
        ),
        (
            "%a = f32[4]{0} reduce-scatter(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add",
            ("reduce-scatter", ("data",), 2, 1, 32, ("f32",)),
        ),
        (
            "%a = (f32[4]{0}, f32[4]{0}) all-to-all(%x, %y), replica_groups=[4,2]<=[8]",
            ("all-to-all", ("tensor",), 2, 1, 32, ("f32",)),
        ),
        (
            "%a = pred[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}",
            ("collective-permute", (), 1, 1, 8, ("pred",)),
        ),
        (
            "%a = f32[] all-reduce(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, to_apply=%f",
            ("all-reduce", ("tensor",), 2, 1, 4, ("f32",)),
        ),
    ],
)
def test_collectives_parse_every_instruction_form(line, expected):
    [c] = collectives(_entry(line), _shape(data=2, tensor=4))
    assert (c.kind, c.axes, c.group_size, c.num_arrays, c.payload_bytes, c.dtypes) == expected


def test_done_of_an_async_collective_is_not_counted():
    done = "%a = f32[4]{0} all-reduce-done(%x)"
    assert collectives(_entry(done), _shape(data=2)) == []


def test_count_collectives_skips_single_device_groups():
    line = "%a = f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert count_collectives(_entry(line), _shape(data=2)) == {}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_device_groups_reads_every_notation(text, groups):
    assert sorted(map(sorted, device_groups(text, 8).tolist())) == groups


def test_device_groups_refuses_unknown_notation():
    with pytest.raises(ValueError, match="replica groups 'ring of four' are in an unknown notation"):
        device_groups("ring of four", 4)


def test_collectives_require_an_entry_computation():
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("stablehlo text", _shape(data=2))
