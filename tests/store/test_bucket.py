"""Checkpoints in a bucket of a real server of S3, and on another disk: sent, whole or not, fetched."""

import json
import socket

import bucket_server
import numpy as np
import pytest
from refusals import assert_names

from hlat_jax.store import bucket as bucket_lib
from hlat_jax.store import remote
from hlat_jax.store.bucket import Bucket, begin_checkpoint, finish_checkpoint, receive_share, whole_steps
from hlat_jax.store.integrity import INTEGRITY_FILE, seal

pytest.importorskip("moto", reason="pip install 'hlat_jax[test]'")
FILES = {"run/metadata": b"{}", "state/d/0a": bytes(1000), "state/empty": b""}


@pytest.fixture(scope="module")
def server():
    with bucket_server.serve() as (faults, _):
        yield faults


@pytest.fixture
def faults(server):
    yield server
    vars(server).update(vars(bucket_server.Faults()))


@pytest.fixture(params=["s3", "disk"])
def bucket(request, faults, tmp_path):
    """An empty folder of a bucket or of a disk."""
    return Bucket(f"s3://bucket/{tmp_path.name}" if request.param == "s3" else tmp_path / "disk/run")


def write_checkpoint(folder, files=FILES):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    seal(folder, files)
    return folder


def send(bucket, folder, step, *, whole=True):
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for name in names:
        if name != INTEGRITY_FILE or whole:
            bucket.send(folder / name, f"checkpoints/{step}/{name}")


def fetch(bucket, step, folder):
    begin_checkpoint(bucket, step, folder)
    receive_share(bucket, step, folder)
    return finish_checkpoint(bucket, step, folder)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fetched_checkpoint_has_the_files_that_were_sent(bucket, tmp_path):
    sent = write_checkpoint(tmp_path / "5")
    send(bucket, sent, 5)
    assert fetch(bucket, 5, tmp_path / "fetched") == ""
    assert contents(tmp_path / "fetched") == {f"5/{name}": content for name, content in contents(sent).items()}


def test_only_a_checkpoint_with_its_manifest_is_whole(bucket, tmp_path):
    sent = write_checkpoint(tmp_path / "5")
    send(bucket, sent, 5)
    send(bucket, sent, 12)
    send(bucket, sent, 20, whole=False)
    assert whole_steps(bucket.sizes()) == [12, 5]
    bucket.remove_checkpoint(12)
    assert whole_steps(bucket.sizes()) == [5]
    assert not bucket.sizes(under="checkpoints/12")


def test_an_empty_bucket_has_no_objects(bucket):
    assert (bucket.sizes(), bucket.read("a/b")) == ({}, None)
    bucket.remove(["a/b"])


def test_objects_arrive_though_one_request_in_five_fails(faults, tmp_path):
    bucket, sent = Bucket(f"s3://bucket/{tmp_path.name}"), write_checkpoint(tmp_path / "5")
    faults.slow_share, faults.cut_share = 0.1, 0.1
    send(bucket, sent, 5)
    assert fetch(bucket, 5, tmp_path / "fetched") == ""
    assert contents(tmp_path / "fetched/5") == contents(sent)


def test_a_fetch_after_a_kill_asks_for_the_missing_files_only(faults, tmp_path):
    bucket, sent = Bucket(f"s3://bucket/{tmp_path.name}"), write_checkpoint(tmp_path / "5")
    send(bucket, sent, 5)
    begin_checkpoint(bucket, 5, tmp_path / "fetched")
    receive_share(bucket, 5, tmp_path / "fetched", share=slice(0, 1))
    faults.requests.clear()
    assert fetch(bucket, 5, tmp_path / "fetched") == ""
    got = [request for request in faults.requests if request.startswith("GET ") and "/checkpoints/5/" in request]
    assert sorted(request.rpartition("5/")[2] for request in got) == [INTEGRITY_FILE, "state/d/0a"]


def test_a_file_that_changed_in_the_bucket_is_damage(bucket, tmp_path):
    send(bucket, write_checkpoint(tmp_path / "5"), 5)
    bucket.write("checkpoints/5/state/d/0a", bytes(999) + b"\1")
    assert "state/d/0a has other content" in fetch(bucket, 5, tmp_path / "fetched")
    assert not contents(tmp_path / "fetched")


def test_a_checkpoint_replaces_a_damaged_one_of_its_step(bucket, tmp_path):
    send(bucket, write_checkpoint(tmp_path / "5"), 5)
    write_checkpoint(tmp_path / "fetched/5")
    (tmp_path / "fetched/5/state/d/0a").write_bytes(b"damaged")
    assert fetch(bucket, 5, tmp_path / "fetched") == ""
    assert (tmp_path / "fetched/5/state/d/0a").read_bytes() == bytes(1000)


def test_names_that_point_outside_the_folder_are_refused(bucket, tmp_path):
    manifest = {"files": {"../../outside": [1, 0]}}
    bucket.write(f"checkpoints/5/{INTEGRITY_FILE}", json.dumps(manifest).encode())
    with pytest.raises(ValueError, match="points outside"):
        fetch(bucket, 5, tmp_path / "fetched")


def test_a_large_object_is_sent_in_parts_and_read_in_blocks(faults, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_lib, "_BLOCK_BYTES", 1 << 20)
    content = np.random.default_rng(0).bytes((3 << 20) + 7)
    (tmp_path / "file").write_bytes(content)
    bucket = Bucket(f"s3://bucket/{tmp_path.name}")
    bucket.send(tmp_path / "file", "large")
    faults.slow_share = 0.2
    bucket.receive("large", tmp_path / "back", len(content))
    assert (tmp_path / "back").read_bytes() == content
    assert sum(request.startswith("GET") for request in faults.requests) >= 4


def test_a_full_store_a_wrong_key_and_no_bucket_are_named(faults, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_lib, "OBJECT_S", 0)
    faults.limit_bytes = 10
    with pytest.raises(remote.RemoteError, match="no free space"):
        Bucket("s3://bucket/run").write("a", bytes(11))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Bucket("s3://nowhere/run").sizes()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    with pytest.raises(PermissionError, match="access key"):
        Bucket("s3://bucket/run").sizes()


def test_a_store_that_never_answers_a_write_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and reads nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "key")
        monkeypatch.setattr(bucket_lib, "OBJECT_S", 1)
        (tmp_path / "file").write_bytes(b"content")
        for ask in (lambda each: each.write("a", b"b"), lambda each: each.send(tmp_path / "file", "a")):
            with pytest.raises(remote.RemoteError):
                ask(Bucket("s3://bucket/run"))


def test_urls_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"copy_to=ftp://host/run is a URL") as refused:
        Bucket("ftp://host/run", key="checkpoint.copy_to")
    assert_names(str(refused.value), "s3://", "gs://")
