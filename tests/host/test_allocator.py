"""The allocator of a process that trains on CPUs."""

import platform
import subprocess
import sys

import pytest

# page faults of writing to a block of 40 MiB that a thread allocates again and again, before and after
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
    for prepare in (lambda: None, keep_freed_memory):
        prepare()
        write(2)
        before = faults()
        write(3)
        print(faults() - before)

thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_blocks_are_reused_without_page_faults():
    done = subprocess.run([sys.executable, "-c", REUSE], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 10 < before
