"""Stored arrays read part by part: every value in its place, each chunk once, and little memory besides the result."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hlat_jax.store import array_reading
from hlat_jax.store.array_reading import read_chunked


def write_array(folder, values, chunk):
    """Stores an array in chunks, and returns TensorStore's spec of it."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    metadata = {"metadata": {"shape": list(values.shape), "chunks": list(chunk), "compressor": {"id": "zstd"}}}
    ts.open(spec | metadata, create=True, dtype=ts.dtype(values.dtype)).result().write(values).result()
    return spec


def sharded(*axes):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    return NamedSharding(mesh, PartitionSpec(*axes))


def test_any_shard_of_any_chunks_has_its_values(tmp_path, monkeypatch):
    values = np.arange(6 * 8 * 5, dtype=np.float32).reshape(6, 8, 5)
    for chunk, read_bytes in (((1, 1, 5), 100), ((3, 4, 3), 1), ((3, 4, 3), 100), ((6, 8, 5), 1 << 20)):
        monkeypatch.setattr(array_reading, "_READ_BYTES", read_bytes)
        spec = write_array(tmp_path / f"{chunk}-{read_bytes}", values, chunk)
        for sharding in (None, sharded(), sharded("x", "y"), sharded(None, ("x", "y")), sharded("x")):
            found = read_chunked(spec, jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding))
            assert getattr(found, "sharding", None) == sharding
            np.testing.assert_array_equal(found, values)
    for shape in ((), (0,), (4, 0, 3)):
        values = np.full(shape, 7, np.int32)
        spec = write_array(tmp_path / f"{shape}", values, [max(1, size) for size in shape])
        for sharding in (None, sharded()):
            found = read_chunked(spec, jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding))
            assert (found.shape, found.dtype) == (shape, np.int32)
            np.testing.assert_array_equal(found, values)


def test_reads_cover_each_part_once_and_take_each_chunk_once():
    sizes, chunks = ((1, 5), (2, 7), (0, 6)), ((1, 1, 1), (2, 3, 2), (5, 4, 6), (7, 7, 7))
    for limits, chunk, read_bytes in itertools.product((sizes, sizes[::-1]), chunks, (1, 24, 10_000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(array_reading, "_READ_BYTES", read_bytes)
            boxes = list(array_reading._boxes(limits, chunk, 2))
        counts, chunks_of = np.zeros((8, 8, 8), int), []
        for box in boxes:
            counts[box] += 1
            of_axes = (range(part.start // n, -(-part.stop // n)) for part, n in zip(box, chunk, strict=True))
            chunks_of += itertools.product(*of_axes)
        expected = np.zeros_like(counts)
        expected[tuple(slice(*limit) for limit in limits)] = 1
        np.testing.assert_array_equal(counts, expected)
        assert len(chunks_of) == len(set(chunks_of))
        assert len(boxes) == 1 or read_bytes < 10_000


def test_another_dtype_rounds_to_nearest(tmp_path):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 5000, np.uint32)
    ties = bits[:1000] & 0xFFFF0000 | 0x8000
    values = np.concatenate([bits, ties, np.array([0x7F7FFFFF, 1, 0x80000000, 0x7F800000], np.uint32)]).view(np.float32)
    found = read_chunked(write_array(tmp_path / "a", values, (1000,)), jax.ShapeDtypeStruct(values.shape, jnp.bfloat16))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(jnp.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))  # NaN equals NaN


def test_a_missing_chunk_raises(tmp_path):
    spec = write_array(tmp_path / "a", np.ones((4, 4), np.float32), (2, 4)) | {"fill_missing_data_reads": False}
    (tmp_path / "a/1.0").unlink()
    with pytest.raises(ValueError, match="missing"):
        read_chunked(spec, jax.ShapeDtypeStruct((4, 4), np.float32))


def resident(key):
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith(key))


def test_reading_takes_the_memory_of_an_array_and_few_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(array_reading, "_NUM_READS", 2)
    values = np.random.default_rng(0).integers(0, 256, (32, 1 << 20), np.uint8)
    spec = write_array(tmp_path / "a", values, (1, 1 << 20))
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    before = resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM is the peak from here on
    found = read_chunked(spec, jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=one_device))
    peak = resident("VmHWM") - before
    np.testing.assert_array_equal(found, values)
    assert peak < values.nbytes + (1 << 24)  # two reads at a time, each of a chunk of 1 MiB, stored and decoded
