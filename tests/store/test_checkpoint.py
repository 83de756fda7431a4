"""Checkpoints: what comes back is what was saved, and what is not whole is never taken for it."""

import errno
import math
import os
import shutil
import sys
import time
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from micro import reseal, saved_steps
from refusals import assert_names, refused

from hlat_jax import config as config_lib
from hlat_jax.store import array_reading, checkpoint
from hlat_jax.store.checkpoint import Checkpointer, SaveError, find_saved, read_arrays, read_checkpoint
from hlat_jax.store.integrity import INTEGRITY_FILE

POSITION = np.array([3, 2**53 + 1, -1], np.int64)  # 2**53 + 1 is the first integer that a float would lose
METADATA = {"anything": {"name": "x"}, "tokens": 7}
KNOWN = {"position": POSITION, "metadata": METADATA, "norms": {"params": 1.0}}


def keep(last=3, every=0):
    return config_lib.CheckpointConfig(keep_last=last, keep_every_steps=every)


def make_state(seed=0):
    rng = np.random.default_rng(seed)
    w, b = rng.standard_normal((16, 24)), rng.standard_normal(24)
    params = {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray(b, jnp.bfloat16)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"step": jnp.int32(seed), "params": params, "opt_state": optimizer.init(params)}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_bitwise(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpointer(tmp_path):
    c = Checkpointer(tmp_path, config=keep())
    yield c
    c.close()


def save(checkpointer, *steps):
    for step in steps:
        checkpointer.save(step, make_state(step), **KNOWN | {"position": POSITION + step})
    checkpointer.wait()


def files_of(folder, step):
    return sorted(path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file())


def largest_file(folder, step):
    return max(files_of(folder, step), key=lambda path: path.stat().st_size)


def flip_bit(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def test_state_position_and_metadata_round_trip_bitwise(tmp_path, checkpointer):
    assert checkpointer.latest_metadata() is None
    assert checkpointer.restore(abstract(make_state())) is None
    save(checkpointer, 1, 2)
    step, state, position, metadata = checkpointer.restore(abstract(make_state()))
    assert step == 2
    assert_bitwise(state, make_state(2))
    assert position.dtype == np.int64
    np.testing.assert_array_equal(position, POSITION + 2)
    assert metadata == METADATA
    assert checkpointer.latest_metadata() == (2, METADATA)
    assert not checkpointer.save(2, make_state(9), **KNOWN)  # it is saved already
    folder = checkpointer.folder / ".." / checkpointer.folder.name / "1"
    assert_bitwise(read_arrays(folder, abstract(make_state())), make_state(1))  # under a path with dots
    other = Checkpointer(tmp_path, config=keep(1, 2))  # of a process with other settings
    assert_bitwise(other.restore(abstract(make_state())).state, make_state(2))
    other.close()


def test_donating_the_state_after_a_save_changes_nothing(checkpointer):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    state = {"w": jax.device_put(np.random.default_rng(0).standard_normal((1024, 2048)).astype(np.float32), sharding)}
    expected = {"w": np.array(state["w"])}
    step = jax.jit(lambda s: {"w": s["w"] * 0 - 1}, donate_argnums=0)
    checkpointer.save(1, state, **KNOWN)
    for _ in range(3):
        state = step(state)
    state["w"].block_until_ready()
    target = {"w": jax.ShapeDtypeStruct((1024, 2048), np.float32, sharding=sharding)}
    assert_bitwise(checkpointer.restore(target)[1], expected)


def stored_chunk(checkpointer, name):
    """Returns the shape of the chunks of an array of the state in the checkpoint of step 1."""
    checkpointer.wait()
    spec = checkpoint._array_spec(checkpointer.folder / "1", name)
    context = tensorstore.Context({array_reading.INDEX_CACHE: {}})
    return tensorstore.open(spec, context=context).result().chunk_layout.read_chunk.shape


def test_arrays_restore_whatever_the_size_of_their_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MIN_CHUNK_BYTES", 4)
    values = np.random.default_rng(0).standard_normal((8, 12, 10)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    state = {"w": jax.device_put(values, NamedSharding(mesh, PartitionSpec("x", None, "y")))}
    for chunk_bytes in (1 << 20, 96):  # one for each shard, or several
        monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", chunk_bytes)
        checkpointer = Checkpointer(tmp_path / str(chunk_bytes), config=keep())
        checkpointer.save(1, state, **KNOWN)
        for axes in ((), ("y", "x"), (None, None, "y")):
            target = jax.ShapeDtypeStruct(values.shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
            restored = checkpointer.restore({"w": target}).state
            assert restored["w"].sharding == target.sharding
            assert_bitwise(restored, {"w": values})
        chunk = stored_chunk(checkpointer, "w")
        assert math.prod(chunk) * 4 <= 96 if chunk_bytes == 96 else chunk == (2, 12, 5)
        checkpointer.close()


def test_axes_with_a_large_prime_factor_are_not_stored_in_tiny_chunks(checkpointer, monkeypatch):
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 4096)
    monkeypatch.setattr(checkpoint, "_MIN_CHUNK_BYTES", 256)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    state = {
        "prime": np.zeros((499, 20), np.float32),  # a row has 80 bytes
        "divisible": np.zeros((500, 20), np.float32),
        "sharded": jax.device_put(np.zeros((8 * 61, 48), np.float32), sharding),
        "scalar": np.float32(0),
    }
    checkpointer.save(1, jax.tree.map(jnp.asarray, state), **KNOWN)
    chunks = {name: stored_chunk(checkpointer, name) for name in state}
    assert chunks == {"prime": (499, 20), "divisible": (50, 20), "sharded": (61, 48), "scalar": None}


def test_a_checkpoint_saved_again_under_its_step_is_read_again(checkpointer):
    for seed in (1, 2):
        checkpointer.save(5, make_state(seed) | {"step": jnp.int32(5)}, **KNOWN)
        state = checkpointer.restore(abstract(make_state()))[1]
        assert_bitwise(state, make_state(seed) | {"step": jnp.int32(5)})
        shutil.rmtree(checkpointer.folder / "5")
        checkpointer._manager.reload()


def test_a_restored_state_is_donated_in_place(checkpointer):
    save(checkpointer, 1)
    w = checkpointer.restore(abstract(make_state()))[1]["params"]["w"]
    address = w.unsafe_buffer_pointer()
    assert jax.jit(lambda w: w + 1, donate_argnums=0)(w).unsafe_buffer_pointer() == address


def test_restore_skips_a_damaged_checkpoint_and_names_it(tmp_path, checkpointer, capfd):
    save(checkpointer, 1, 2)
    flip_bit(largest_file(tmp_path, 2))
    step, state, position, _ = checkpointer.restore(abstract(make_state()))
    assert step == 1
    assert_bitwise(state, make_state(1))
    np.testing.assert_array_equal(position, POSITION + 1)
    assert_names(capfd.readouterr().err, "checkpoints/2 ", largest_file(tmp_path, "2.damaged-1").name, "step 1")
    save(checkpointer, 2)  # again
    assert_bitwise(checkpointer.restore(abstract(make_state()))[1], make_state(2))
    for step in (1, 2):
        flip_bit(largest_file(tmp_path, step))
    with refused("checkpoints/2", "checkpoints/1"):
        checkpointer.restore(abstract(make_state()))


def test_damage_to_any_file_is_detected_or_harmless(tmp_path, checkpointer):
    save(checkpointer, 1, 2)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "checkpoints" / "2", whole)
    for how in ("flipped", "truncated", "deleted"):
        noticed = []
        for number, path in enumerate(files_of(tmp_path, 2)):
            if how == "flipped":
                flip_bit(path, place=0.9 * (number % 7) / 7)
            elif how == "truncated":
                path.write_bytes(path.read_bytes()[:-2])  # the last byte of a JSON file is a newline
            else:
                path.unlink()
            step, state, _, _ = Checkpointer(tmp_path, config=keep()).restore(abstract(make_state()))
            assert_bitwise(state, make_state(step))
            noticed += [path.name] if step == 1 else []
            for path in (tmp_path / "checkpoints").glob("2*"):  # it may be kept aside
                shutil.rmtree(path)
            shutil.copytree(whole, tmp_path / "checkpoints" / "2")
        assert largest_file(tmp_path, 2).name in noticed
        assert INTEGRITY_FILE in noticed


def test_mismatched_shape_or_dtype_raises_and_is_not_damage(tmp_path, checkpointer):
    save(checkpointer, 1, 2)
    for shape, dtype in (((16, 25), np.float32), ((16, 24), jnp.bfloat16)):
        wrong = abstract(make_state())
        wrong["params"]["w"] = jax.ShapeDtypeStruct(shape, dtype, sharding=wrong["params"]["w"].sharding)
        with refused("['w']", "float32[16, 24]"):
            checkpointer.restore(wrong)
    assert saved_steps(tmp_path) == [1, 2]


def test_a_checkpoint_goes_once_its_export_has_read_it(tmp_path):
    c = Checkpointer(tmp_path, config=keep(1))
    c.exported.step = 1
    save(c, 1, 2)
    assert saved_steps(tmp_path) == [1, 2]
    c.release()
    assert saved_steps(tmp_path) == [2]
    save(c, 3)
    assert saved_steps(tmp_path) == [3]
    c.close()


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    checkpointer = Checkpointer(tmp_path, config=keep(1))
    save(checkpointer, 1)
    norms = {"params": float("inf"), "opt_state.mu": 1.0, "opt_state.nu": float("nan")}
    with refused("step 2", "params is inf", "opt_state.nu is nan"):
        checkpointer.save(2, make_state(2), **KNOWN | {"norms": norms})
    checkpointer.close()
    assert saved_steps(tmp_path) == [1]


DATA = {"batch_size": 2, "seq_len": 8, "packing": "concat"}
INVALID_RECORDS = [
    (lambda run: run.pop("norms"), "norms "),  # as of an older version
    (lambda run: run.update(metadata=[]), "metadata=[]"),
    (lambda run: run["metadata"].pop("jax"), "metadata.jax"),
    (lambda run: run.update(norms={"params": float("inf")}), "params is inf"),
    (lambda run: run.update(position=[[3, 0]] * 2), "step 3"),
]


def save_as_a_run(checkpointer, *steps):
    for step in steps:
        metadata = {"config": {"data": DATA}, "tokens": step * 14, "num_nonfinite": 0, "jax": {}}
        metadata |= {"tokenizer_sha256": "a", "manifest": {"files": []}, "implementations": {}}
        known = {"position": np.array([[step, 0], [step, 0]]), "metadata": metadata, "norms": {"params": 1.0}}
        checkpointer.save(step, make_state(step), **known)
    checkpointer.wait()


def test_a_record_that_no_run_writes_is_damage(tmp_path, checkpointer, capfd):
    save_as_a_run(checkpointer, 1, 2)
    assert find_saved(tmp_path).name == "2"
    folder = tmp_path / "checkpoints/2"
    kept = (folder / "run/metadata").read_bytes()
    for change, fact in INVALID_RECORDS:
        (folder / "run/metadata").write_bytes(kept)
        reseal(folder, change)
        with refused("checkpoints/2 ", fact) as error:
            find_saved(folder)
        assert "\n" not in str(error.value)
    assert find_saved(tmp_path).name == "1"
    assert checkpointer.latest_metadata()[0] == 1
    assert checkpointer.restore(abstract(make_state()))[0] == 1
    assert capfd.readouterr().err.count("step 3") == 2


def test_a_link_or_copy_has_the_step_of_its_record(tmp_path, checkpointer, capfd):
    save_as_a_run(checkpointer, 1, 24)
    folder = tmp_path / "checkpoints"
    (folder / "latest").symlink_to("24")
    assert find_saved(folder / "latest") == folder / "24"
    copy = shutil.copytree(folder / "24", folder / "keep-24")
    assert read_checkpoint(find_saved(copy), abstract(make_state())).step == 24
    shutil.move(folder / "24", folder / "25")
    assert checkpointer.restore(abstract(make_state()))[0] == 1
    assert_names(capfd.readouterr().err, "checkpoints/25 ", "step 24", "step 1")


def test_only_folders_named_after_a_step_are_checkpoints(tmp_path, checkpointer):
    save(checkpointer, 1, 40)
    flip_bit(largest_file(tmp_path, 40))
    folder = tmp_path / "checkpoints"
    for name in ("0000024", "\u0662\u0664", "+24"):
        shutil.copytree(folder / "1", folder / name)
    (folder / "98").symlink_to("98")
    (folder / "99").write_text("")
    (folder / "99.damaged-1").symlink_to("nowhere")
    assert find_saved(tmp_path).name == "1"
    again = Checkpointer(tmp_path, config=keep())
    assert again.restore(abstract(make_state()))[0] == 1
    again.close()
    aside = {path.name for path in folder.iterdir() if "." in path.name}
    assert aside == {"40.damaged-1", "98.damaged-1", "99.damaged-1", "99.damaged-2"}


def test_a_save_can_be_repeated_after_a_kill(tmp_path, monkeypatch):
    seal = Checkpointer._seal

    def seal_and_copy(self):
        for moment in ("written", "sealed"):  # what is on the disk then is what a kill would leave
            if moment == "sealed":
                seal(self)
            if self._saving == 2:
                shutil.copytree(tmp_path / "run", tmp_path / moment)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_seal", seal_and_copy)
        checkpointer = Checkpointer(tmp_path / "run", config=keep(1))
        save(checkpointer, 1, 2)
        checkpointer.close()
    for moment in ("written", "sealed"):
        folder = tmp_path / moment / "checkpoints"
        assert len(list(folder.glob("2*"))) == 1
        checkpointer = Checkpointer(folder.parent, config=keep(1))
        assert [path.name for path in folder.iterdir()] == ["1"]
        assert_bitwise(checkpointer.restore(abstract(make_state())).state, make_state(1))
        save(checkpointer, 2)
        assert checkpointer.latest_metadata()[0] == 2
        checkpointer.close()


def test_a_full_disk_keeps_the_previous_checkpoint(small_disk):
    disk = small_disk("2m")

    def state(seed):
        return {"w": jnp.asarray(np.random.default_rng(seed).standard_normal(300_000), jnp.float32)}  # 1.2 MB

    checkpointer = Checkpointer(disk, config=keep(1))
    checkpointer.save(1, state(1), **KNOWN)
    checkpointer.wait()
    checkpointer.save(2, state(2), **KNOWN)
    with refused("step 2 ", os.strerror(errno.ENOSPC), "1,200,000 bytes", "step 1 ", kind=SaveError):
        checkpointer.wait()
    checkpointer.check()  # raised once
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["1"]
    step, restored, _, _ = checkpointer.restore(abstract(state(1)))
    assert step == 1
    assert_bitwise(restored, state(1))
    small = {"w": jnp.ones(8)}
    checkpointer.save(3, small, **KNOWN)
    checkpointer.close()
    assert saved_steps(disk) == [3]


def test_only_errors_of_a_closed_event_loop_are_silenced(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    checkpoint.silence_orbax_retry_logs.__wrapped__()
    closed = types.SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("Event loop is closed"))
    others = [types.SimpleNamespace(exc_type=kind, exc_value=kind("another")) for kind in (RuntimeError, OSError)]
    for each in (closed, *others):
        sys.unraisablehook(each)
    assert shown == others


def test_a_disk_that_cannot_hold_a_checkpoint_is_refused(checkpointer, monkeypatch):
    state, free = {"w": jax.ShapeDtypeStruct((250, 3), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.bfloat16)}, []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(total=10**6, free=free[0]))
    free[:] = [3002]
    checkpointer.require_space(state)
    free[:] = [3001]
    with refused("3,002 bytes", "3,001", "checkpoints", "--workdir"):
        checkpointer.require_space(state)


def test_check_raises_after_a_failed_background_save(tmp_path, checkpointer, monkeypatch):
    save(checkpointer, 1)
    failing = mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr("hlat_jax.store.integrity.size_and_crc", failing)
    checkpointer.save(2, make_state(2), **KNOWN)
    deadline = time.monotonic() + 600
    with refused(os.strerror(errno.EMFILE), "ulimit -n", kind=SaveError):
        while time.monotonic() < deadline:
            checkpointer.check()
            time.sleep(0.01)
    assert saved_steps(tmp_path) == [1]
