"""The allocator of a process that trains on CPUs."""

import os
import subprocess
import sys

import micro
import pytest

from hlat_jax.host import allocator

# in a thread: page faults of writing three times to a new block of 40 MiB and resident bytes, before and after
REUSE = """
import ctypes, resource, threading
from hlat_jax.host.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def write(times):
    for _ in range(times):
        block = libc.malloc(40 << 20)
        libc.memset(block, 1, 40 << 20)
        libc.free(block)

def in_thread():
    small = [libc.malloc(64 << 10) for _ in range(320)]
    for block in small:
        libc.memset(block, 1, 64 << 10)
    for block in small[:-1]:  # the last holds the others in the process
        libc.free(block)
    print(resident_bytes())
    for prepare in (lambda: None, keep_freed_memory):
        prepare()
        if prepare is keep_freed_memory:
            print(resident_bytes())
        write(2)
        before = faults()
        write(3)
        print(faults() - before)

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""


def counted(**environment):
    """Returns what `REUSE` prints."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", REUSE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env | environment)
    held, faults, left, faults_after = map(int, done.stdout.split())
    if not faults:
        pytest.skip("another allocator, or a kernel that counts no page faults")
    return held, faults, left, faults_after


def test_freed_blocks_are_reused_without_page_faults_and_what_was_free_is_returned():
    held, faults, left, faults_after = counted()
    assert faults_after < faults / 10  # with huge pages there are few
    assert held - left > 15 << 20  # of 20 MiB


@pytest.mark.parametrize(
    "environment",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"},
        {"MALLOC_MMAP_MAX_": "65536"},
        {"MALLOC_MMAP_THRESHOLD_": "100000"},
        {"MALLOC_TRIM_THRESHOLD_": "1"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_the_environment_comes_first(environment):
    _, faults, _, faults_after = counted(**environment)
    assert faults_after > faults / 2


def test_training_on_a_cpu_keeps_freed_memory(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: called.append(True))
    assert micro.train(micro.config(tmp_path, train__num_steps=1), tmp_path / "run") == 0
    assert called == [True]
