"""What a start on a Trainium machine finds in its way, by stand-ins for its processes and its caches."""

import os
import socket
import sys

import neuron_machine
import pytest
from refusals import assert_names, refused

from hlat_jax.host import compile_cache, neuron_start
from hlat_jax.host.neuron_topology import Machine, Topology

DIR = compile_cache.FOLDER


@pytest.fixture
def processes(tmp_path):
    return neuron_machine.mounted(tmp_path / "proc", "xfs")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def lines_of(function, *words, **options):
    said = []
    function(*words, say=said.append, **options)
    return said


# leftovers of the compiler


def test_lock_and_failure_of_a_local_cache_are_removed_and_said(cache, processes):
    sound = neuron_machine.compiled(cache, "sound", "model.neff", "model.done")
    locked = neuron_machine.compiled(cache, "locked", "model.hlo_module.pb.lock")
    failed = neuron_machine.compiled(cache, "failed", "model.log")
    neuron_machine.process(processes, 7, "python serve.py")
    [line] = lines_of(neuron_start.remove_leftovers, cache, processes=processes)
    assert "2 leftovers" in line
    assert [path.name for path in locked.iterdir()] == ["model.hlo_module.pb"]
    assert not failed.exists()
    assert len(list(sound.iterdir())) == 3
    assert lines_of(neuron_start.remove_leftovers, cache, processes=processes) == []
    assert lines_of(neuron_start.remove_leftovers, None, processes=processes) == []


def test_lock_that_may_be_in_use_is_kept_with_the_reason(cache, processes, monkeypatch):
    lock = neuron_machine.compiled(cache, "locked", "model.hlo_module.pb.lock") / "model.hlo_module.pb.lock"
    for pid, command, maps in ((7, "neuronx-cc compile x.hlo", ""), (8, "python x.py", "r-xp /a/libneuronpjrt.so\n")):
        folder = neuron_machine.process(processes, pid, command, maps=maps)
        [line] = lines_of(neuron_start.remove_leftovers, cache, processes=processes)
        assert_names(line, lock, f"process {pid} ({command})")
        (folder / "cmdline").unlink()
    monkeypatch.setattr(neuron_start.os, "getuid", lambda: lock.stat().st_uid + 1)
    assert "user" in lines_of(neuron_start.remove_leftovers, cache, processes=processes)[0]
    monkeypatch.undo()
    neuron_machine.mounted(processes, "lustre")
    [line] = lines_of(neuron_start.remove_leftovers, cache, processes=processes)
    assert_names(line, "lustre", "*.lock")
    assert lock.exists()


def test_file_system_is_that_of_the_longest_mount(tmp_path):
    (tmp_path / "self").mkdir()
    inner = tmp_path / "fsx"
    inner.mkdir()
    mounts = ["a / ext4 rw 0 0", f"b {inner} lustre rw 0 0", f"c {inner}x nfs rw 0 0"]
    for lines in (mounts, mounts[::-1]):
        (tmp_path / "self" / "mounts").write_text("\n".join(lines))
        assert neuron_start._file_system(inner / "cache", tmp_path) == "lustre"
    assert neuron_start._file_system(tmp_path, tmp_path) == "ext4"
    assert neuron_start._file_system(tmp_path, tmp_path / "none") == ""


def test_compilers_cache_is_a_folder_or_none():
    for url, expected in (("/x", "/x"), ("file:///x", "/x"), ("s3://bucket/x", None), ("", None)):
        found = neuron_start.compiler_cache({"NEURON_COMPILE_CACHE_URL": url})
        assert (found and str(found)) == expected


# a former run


def test_start_waits_for_processes_that_hold_devices(tmp_path, processes):
    machine = Machine(devices=tmp_path / "dev")
    neuron_machine.process(processes, 8, "python serve.py", opened=["/dev/null"])
    neuron_machine.process(processes, os.getpid(), "python -m hlat_jax.train", opened=[f"{tmp_path}/dev/neuron0"])
    neuron_machine.process(processes, 6, "/opt/aws/bin/neuron-monitor -c x", opened=[f"{tmp_path}/dev/neuron0"])
    wait = {"timeout_s": 0.02, "period_s": 0.01, "processes": processes}
    assert lines_of(neuron_start.wait_for_former_run, machine, 0, **wait) == []
    held = neuron_machine.process(processes, 9, "python -m hlat_jax.train", opened=[f"{tmp_path}/dev/neuron3"])
    first, last = lines_of(neuron_start.wait_for_former_run, machine, 0, **wait)
    assert_names(first, "0.02 s, as process 9 (python -m hlat_jax.train)")
    assert "0.02 s" in last
    assert lines_of(neuron_start.wait_for_former_run, None, 0, **wait) == []
    said = []

    def end(line):
        said.append(line)
        (held / "cmdline").unlink()

    neuron_start.wait_for_former_run(machine, 0, say=end, **wait | {"timeout_s": 60.0})
    assert len(said) == 1


def test_port_that_listens_or_is_kept_after_a_connection_is_taken():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert neuron_start.is_taken(port)
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
    accepted.close()  # the side that closes first keeps the port
    assert client.recv(1) == b""
    client.close()
    assert neuron_start.is_taken(port), "TIME_WAIT"
    assert neuron_start.find_obstacle(None, port) == f"port {port} of Neuron's collectives is taken"
    with socket.socket() as free:
        free.bind(("", 0))
        other = free.getsockname()[1]
    assert not neuron_start.is_taken(other)


# a start


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function of variables and of a topology's fields: (what `clear_way` says, whom it waits for)."""
    waited = []
    monkeypatch.setattr(neuron_start, "wait_for_former_run", lambda *found, say: waited.append(found))

    def run(environ, **fields):
        waited.clear()
        machine = Machine(devices=tmp_path)
        said = lines_of(neuron_start.clear_way, environ, Topology("trn1.32xlarge", **fields), machine)
        return said, waited[0][0] is machine, waited[0][1]

    return run


def test_start_without_the_plugin_is_refused_in_one_line(start, tmp_path, monkeypatch):
    with refused(sys.executable, "jax-neuronx", "libneuronxla", "`neuron`"):
        start({})
    monkeypatch.syspath_prepend(neuron_machine.installed(tmp_path / "one", "libneuronxla"))
    with refused("jax-neuronx") as caught:
        start({})
    assert "libneuronxla" not in str(caught.value)


def test_start_waits_for_what_its_process_needs(start, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(neuron_machine.installed(tmp_path / "site"))
    several = {"nodes": 2, "coordinator": "a"}
    for environ, fields, whole, port in (
        ({}, {}, True, 0),
        ({}, several, True, 41000),
        ({}, several | {"rank": 1}, True, 0),
        ({}, {"cores": 8}, False, 0),
        ({"NEURON_RT_VISIBLE_CORES": "0-7"}, {}, False, 0),
    ):
        assert start(environ, **fields) == ([], whole, port)


def test_start_leaves_out_a_cache_that_fails(start, tmp_path, monkeypatch, processes, cache):
    monkeypatch.syspath_prepend(neuron_machine.installed(tmp_path / "site"))
    monkeypatch.setattr(neuron_start, "_LOCAL", (neuron_start._file_system(tmp_path, neuron_start.PROCESSES),))
    neuron_machine.compiled(cache, "failed", "model.log")
    monkeypatch.setattr(compile_cache, "fault_of_cache", lambda environ: "RET_CHECK")
    environ = {DIR: str(tmp_path / "jax"), "NEURON_COMPILE_CACHE_URL": str(cache)}
    [leftovers, faulty], _, _ = start(environ)
    assert "1 leftovers" in leftovers
    assert "RET_CHECK" in faulty
    assert DIR not in environ
