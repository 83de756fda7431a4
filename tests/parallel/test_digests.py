"""Digests are those of the whole array on any mesh, see every changed word, and name the replica that differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.parallel.digests import PROBE, Replicas, adds_exactly, find_replicas, gather_digests, make_digest

MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
SHAPE, WHOLE = (4, 6, 8), P()
SPECS = (WHOLE, P("a"), P(None, "b", "c"), P(("a", "b"), None, "c"), P("c", None, ("b", "a")))


def digest_by_hand(values):
    """Returns the digest of a whole array in Python's integers, element by element in row-major order."""
    total, mask = 0, (1 << 32) - 1
    words = np.ascontiguousarray(values).reshape(-1).view(f"uint{8 * values.dtype.itemsize}")
    for index, word in enumerate(map(int, words)):
        factor = index * 0x9E3779B1 & mask
        factor = (factor ^ factor >> 16) * 0x7FEB352D & mask
        mixed = word * (factor | 1) & mask
        total += (mixed ^ mixed >> 15) * 0x846CA68B & mask
    return total & mask


def digests_of(values, spec=WHOLE, mesh=MESH):
    array = jax.device_put(values, NamedSharding(mesh, spec))
    digests = gather_digests(jax.jit(make_digest(mesh, [array.sharding]))([array], PROBE))
    assert adds_exactly(digests)
    return find_replicas([array], mesh), digests


def digest_of(values, spec=WHOLE, mesh=MESH):
    replicas, digests = digests_of(values, spec, mesh)
    assert replicas.differences(digests) == []
    return replicas.whole(digests)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_a_digest_is_that_of_the_whole_array_on_any_mesh(dtype):
    values = np.asarray(jnp.asarray(100 * np.random.default_rng(1).standard_normal(SHAPE), dtype))
    line = Mesh(np.array(jax.devices()[::-1][:4]), ("a",), axis_types=(AxisType.Auto,))
    found = {digest_of(values, spec) for spec in SPECS} | {digest_of(values, P("a"), line)}
    assert found == {digest_by_hand(values)}


def test_rows_of_zeros_at_the_end_change_no_digest():
    values = np.random.default_rng(2).standard_normal((6, 8)).astype(np.float32)
    padded = np.concatenate([values, np.zeros((2, 8), np.float32)])
    assert digest_of(values, P("a")) == digest_of(padded, P(("a", "b"))) == digest_by_hand(values)


def test_zeros_at_the_end_of_any_dim_change_no_digest():
    values = np.random.default_rng(4).standard_normal((3, 5, 7)).astype(np.float32)
    padded = np.pad(values, [(0, 1), (0, 3), (0, 1)])
    array = jax.device_put(padded, NamedSharding(MESH, P("a", ("c", "b"), None)))
    program = jax.jit(make_digest(MESH, [array.sharding], shapes=lambda _: [values.shape]))
    digests = gather_digests(program([array], PROBE))
    assert find_replicas([array], MESH).whole(digests) == [digest_by_hand(values)]


def test_a_flipped_bit_or_two_swapped_words_change_a_digest():
    rng = np.random.default_rng(3)
    values = rng.standard_normal(SHAPE).astype(np.float32)
    line = Mesh(np.array(jax.devices()[:1]), ("a",), axis_types=(AxisType.Auto,))
    digest, flat = jax.jit(make_digest(line, [NamedSharding(line, WHOLE)])), values.reshape(-1)
    whole = int(digest([values], PROBE)[0, 0])
    for _ in range(100):
        word, other = rng.choice(flat.size, 2, replace=False)
        flipped, swapped = flat.copy(), flat.copy()
        flipped.view(np.uint32)[word] ^= np.uint32(1) << rng.integers(32).astype(np.uint32)
        swapped[[word, other]] = flat[[other, word]]
        for changed in (flipped, swapped):
            assert int(digest([changed.reshape(SHAPE)], PROBE)[0, 0]) != whole


def test_a_scalar_has_a_digest():
    assert digest_of(np.float32(2.5)) == digest_by_hand(np.float32([2.5]))
    assert digest_of(np.float32(0)) == 0


def test_devices_that_add_as_floats_are_noticed():
    _, digests = digests_of(np.zeros(SHAPE, np.float32))
    wrong = digests.copy()
    wrong[:, -1] += np.uint32(64)  # as a sum that keeps 24 bits
    assert not adds_exactly(wrong)


def test_the_replica_in_the_minority_differs():
    three, two = [[(0, 1, 2)]], [[(0, 1), (2, 3)]]
    [found] = Replicas(three).differences(np.array([[5, 7], [6, 7], [5, 7]], np.uint32))
    assert (found.array, found.devices, found.replicas) == (0, (1,), (0, 1, 2))
    [found] = Replicas(two).differences(np.array([[5, 7], [5, 7], [5, 7], [8, 7]], np.uint32))
    assert (found.array, found.devices) == (0, (2, 3))  # of two, neither is known to be right
    [found] = Replicas(two).differences(np.array([[5, 7], [5, 9], [8, 7], [8, 7]], np.uint32))
    assert (found.array, found.devices) == (1, (1,))  # the probe, which all devices have
