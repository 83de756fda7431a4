"""Checkpoints in a bucket of a real server of S3, and on another disk: sent, whole or not, fetched."""

import json
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from refusals import assert_names

from hlat_jax.store import bucket as bucket_lib
from hlat_jax.store import remote
from hlat_jax.store.bucket import Bucket, begin_checkpoint, finish_checkpoint, receive_share, whole_steps
from hlat_jax.store.integrity import INTEGRITY_FILE, seal

pytest.importorskip("moto", reason="pip install 'hlat_jax[test]'")
FILES = {"run/metadata": b"{}", "state/d/0a": bytes(1000), "state/empty": b""}


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


def test_a_store_that_never_answers_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and reads nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "key")
        monkeypatch.setattr(bucket_lib, "OBJECT_S", 1)
        (tmp_path / "file").write_bytes(b"content")
        for ask in (
            lambda each: each.write("a", b"b"),
            lambda each: each.send(tmp_path / "file", "a"),
            lambda each: each.read("a"),
            lambda each: each.sizes(),
            lambda each: each.receive("a", tmp_path / "to", 5),
            lambda each: each.remove(["a"]),
        ):
            began_s = time.monotonic()
            with pytest.raises(remote.RemoteError):
                ask(Bucket("s3://bucket/run"))
            assert time.monotonic() - began_s < 10


def test_the_first_error_ends_a_fetch_of_many_files(tmp_path, monkeypatch):
    asked = []

    def fail(self, name, path, num_bytes):
        asked.append(name)
        time.sleep(0.02)
        raise OSError("gone")

    monkeypatch.setattr(Bucket, "receive", fail)
    with pytest.raises(OSError, match="gone"):
        bucket_lib.receive_all(Bucket(tmp_path), {f"{number}": 1 for number in range(500)}, tmp_path / "to")
    assert len(asked) < 100


def test_urls_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"copy_to=ftp://host/run is a URL") as refused:
        Bucket("ftp://host/run", key="checkpoint.copy_to")
    assert_names(str(refused.value), "s3://", "gs://")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the copies on this machine, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket_lib, "_in_use", {})
    return tmp_path / "cache/hlat_jax/buckets"


def test_a_local_path_is_its_own_copy(tmp_path):
    assert bucket_lib.local_copy(tmp_path) == tmp_path
    with pytest.raises(ValueError, match=r"--checkpoint=ftp://host/a is a URL"):
        bucket_lib.local_copy("ftp://host/a", key="--checkpoint")


def test_a_copy_fetches_only_what_has_changed(faults, cache, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    for name, content in {"config.json": b"{}", "model.safetensors": b"weights", "old": b"-"}.items():
        Bucket(url).write(name, content)
    copy = bucket_lib.local_copy(url)
    Bucket(url).write("config.json", b"[]")  # of the same size
    Bucket(url).remove(["old"])
    faults.requests.clear()
    assert bucket_lib.local_copy(url) == copy
    assert {name for name in contents(copy) if not name.startswith(".")} == {"config.json", "model.safetensors"}
    assert (copy / "config.json").read_bytes() == b"[]"
    assert not any("model.safetensors" in request for request in faults.requests)


def test_the_copy_of_a_run_is_its_newest_whole_checkpoint(faults, cache, tmp_path, capsys):
    url, sent = f"s3://bucket/{tmp_path.name}", write_checkpoint(tmp_path / "5")
    for step in (5, 12):
        send(Bucket(url), sent, step)
    send(Bucket(url), sent, 20, whole=False)
    Bucket(url).write("tokenizer/tokenizer.model", b"pieces")
    copy = bucket_lib.local_copy(url)
    assert (copy.name, contents(copy)) == ("12", contents(sent))
    assert (copy.parent.parent / "tokenizer/tokenizer.model").read_bytes() == b"pieces"
    assert bucket_lib.local_copy(f"{url}/checkpoints/5").name == "5"
    for step, problem in ((20, "nothing whole"), (21, "nothing whole")):
        with pytest.raises(ValueError, match=problem):
            bucket_lib.local_copy(f"{url}/checkpoints/{step}")
    Bucket(url).write(f"checkpoints/12/{INTEGRITY_FILE}", b'{"files": {"run/metadata": [2, 1]}}')
    assert bucket_lib.local_copy(url).name == "5"
    assert_names(capsys.readouterr().err, "step 12", url, "run/metadata")


def test_copies_that_nobody_uses_make_room_for_new_ones(faults, cache, tmp_path, monkeypatch):
    url = f"s3://bucket/{tmp_path.name}"
    for name in ("a", "b", "c"):
        Bucket(f"{url}/{name}").write("config.json", b"{}")
    first = bucket_lib.local_copy(f"{url}/a")
    used = bucket_lib.local_copy(f"{url}/b")
    bucket_lib._in_use.pop(first).close()
    free = {True: 1, False: 1 << 30}
    usage = bucket_lib.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(bucket_lib.shutil, "disk_usage", lambda _: usage._replace(free=free[first.exists()]))
    third = bucket_lib.local_copy(f"{url}/c")
    assert (first.exists(), used.exists(), third.exists()) == (False, True, True)
    free[False] = 1
    Bucket(f"{url}/d").write("config.json", b"{}")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        bucket_lib.local_copy(f"{url}/d")


def test_old_steps_of_a_run_that_nobody_uses_make_room_for_its_newest(faults, cache, tmp_path, monkeypatch):
    url, sent = f"s3://bucket/{tmp_path.name}", write_checkpoint(tmp_path / "5")
    copies = []
    for step in (5, 12, 20):
        send(Bucket(url), sent, step)
        if step < 20:
            copies.append(bucket_lib.local_copy(url))
    bucket_lib._in_use.pop(copies[0]).close()
    usage = bucket_lib.shutil.disk_usage(tmp_path)
    free = lambda _: usage._replace(free=1 if copies[0].exists() else 1 << 30)  # noqa: E731
    monkeypatch.setattr(bucket_lib.shutil, "disk_usage", free)
    newest = bucket_lib.local_copy(url)
    assert [copy.exists() for copy in (*copies, newest)] == [False, True, True]
    assert contents(newest) == contents(sent)


def test_a_folder_is_staged_and_sent_its_last_file_last(faults, cache, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    staging = bucket_lib.staging_folder(url, key="--out")
    staged = write_checkpoint(staging / "part")
    faults.requests.clear()
    bucket_lib.send_staged(staged, url, last="run/metadata")
    assert [request for request in faults.requests if request.startswith("PUT")][-1].endswith("/run/metadata")
    assert {*Bucket(url).sizes()} == {*FILES, INTEGRITY_FILE}
    assert not [*staging.parent.iterdir()]
    with pytest.raises(ValueError, match=f"--out={url} exists already"):
        bucket_lib.staging_folder(url, key="--out")


def test_a_staged_folder_that_was_sent_in_part_is_sent_again(faults, cache, tmp_path, monkeypatch):
    url = f"s3://bucket/{tmp_path.name}"
    staged = bucket_lib.staging_folder(url, key="--out")
    write_checkpoint(staged)
    (staged / "of_an_older_try").write_bytes(b"")
    monkeypatch.setattr(Bucket, "send", cut_after(2))
    with pytest.raises(OSError, match="cut"):
        bucket_lib.send_staged(staged, url, last="run/metadata")
    assert "run/metadata" not in Bucket(url).sizes()
    Bucket(url).write(f"{bucket_lib.PROBE}-0", b"")  # left by a kill
    assert bucket_lib.staging_folder(url, key="--out") == staged
    (staged / "of_an_older_try").unlink()
    bucket_lib.send_staged(staged, url, last="run/metadata")
    assert {*Bucket(url).sizes()} == {*FILES, INTEGRITY_FILE}


def test_two_processes_do_not_stage_one_folder(faults, cache, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    staged = write_checkpoint(bucket_lib.staging_folder(url, key="--out"))
    code = "import sys; from hlat_jax.store.bucket import staging_folder; staging_folder(sys.argv[1], key='--out')"
    other = [sys.executable, "-c", code, url]
    done = subprocess.run(other, capture_output=True, text=True, timeout=300, check=False)
    assert_names(done.stderr, f"--out={url}", "another process")
    bucket_lib.send_staged(staged, url, last="run/metadata")
    assert {*Bucket(url).sizes()} == {*FILES, INTEGRITY_FILE}
    Bucket(url).remove(Bucket(url).sizes().keys())
    assert subprocess.run(other, timeout=300, check=False).returncode == 0


def test_two_machines_leave_the_whole_folder_of_one(faults, cache, tmp_path, monkeypatch):
    url, send_one = f"s3://bucket/{tmp_path.name}", Bucket.send
    first, second = (
        write_checkpoint(tmp_path / name, {**FILES, "of": name.encode(), f"only_{name}": b""}) for name in "ab"
    )
    sent = contents(second)
    bucket_lib.staging_folder(url, key="--out")

    def send(bucket, path, name):
        monkeypatch.setattr(Bucket, "send", send_one)
        send_one(bucket, path, name)
        bucket_lib.send_staged(second, url, last="run/metadata")  # from its begin to its end

    monkeypatch.setattr(Bucket, "send", send)
    with pytest.raises(ValueError, match=f"{url}: another command writes there"):
        bucket_lib.send_staged(first, url, last="run/metadata")
    assert {name: Bucket(url).read(name) for name in Bucket(url).sizes()} == sent
    with pytest.raises(ValueError, match=f"{url}: another command has written it since"):
        bucket_lib.send_staged(first, url, last="run/metadata")
    assert {name: Bucket(url).read(name) for name in Bucket(url).sizes()} == sent
    assert first.exists()


def test_a_folder_that_two_commands_write_is_not_whole(faults, cache, tmp_path, monkeypatch):
    url, send_one = f"s3://bucket/{tmp_path.name}", Bucket.send
    staged = write_checkpoint(bucket_lib.staging_folder(url, key="--out"))

    def send(bucket, path, name):
        if name == "run/metadata":  # another machine begins just before it
            bucket.write(".unfinished", b"other")
        send_one(bucket, path, name)

    monkeypatch.setattr(Bucket, "send", send)
    with pytest.raises(ValueError, match=f"{url}: another command writes there"):
        bucket_lib.send_staged(staged, url, last="run/metadata")
    assert "run/metadata" not in Bucket(url).sizes()
    assert Bucket(url).read(".unfinished") == b"other"
    assert staged.exists()


def test_a_folder_of_other_files_is_not_written_into(faults, cache, tmp_path):
    url = f"s3://bucket/{tmp_path.name}"
    Bucket(url).write(f"{bucket_lib.PROBE}-0", b"")
    bucket_lib.staging_folder(url, key="--out")
    Bucket(url).write("notes.txt", b"")
    with pytest.raises(ValueError, match=f"--out={url} exists already"):
        bucket_lib.staging_folder(url, key="--out")


def cut_after(count):
    """Returns a `Bucket.send` that fails once, after so many calls."""
    send, calls = Bucket.send, []

    def cut(self, *args):
        calls.append(args)
        if len(calls) == count + 1:
            raise OSError("cut")
        send(self, *args)

    return cut


def test_a_build_that_was_cut_in_mid_upload_is_resumed(faults, cache, tmp_path, monkeypatch, data_here):
    url = f"s3://bucket/{tmp_path.name}"
    lines = [json.dumps({"text": f"Document {number}. " + "abc " * 500}) for number in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    words = ("build", tmp_path / "a.jsonl", "--shard_mb=1")
    monkeypatch.setattr(Bucket, "send", cut_after(2))
    assert data_here(*words, f"--out={url}")[0] != 0
    code, _, err = data_here(*words, f"--out={url}")
    assert code == 0, err
    assert data_here(*words, f"--out={tmp_path / 'built'}")[0] == 0
    local = {path.name: path.stat().st_size for path in (tmp_path / "built").iterdir()}
    assert len(local) >= 5
    assert Bucket(url).sizes() == local
    code, _, err = data_here(*words, f"--out={url}")
    assert code == 2
    assert_names(err, url, "exists already")
