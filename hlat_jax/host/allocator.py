"""Keeps the memory that XLA's programs on CPUs free after every step in this process."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's <malloc.h>
# What may stay free at the end of a heap: glibc returns all of more. The heaps of threads are of this size.
_KEPT_BYTES = 64 << 20
_YOURS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks of 32 to 64 MiB, and returns other free memory to the system once.

    XLA allocates the temporaries of a program whenever it runs. Each time, glibc maps a block of more than 32 MiB, and
    the kernel zeroes each page that is written. This takes a tenth of a step of `tiny`, which needs 45 MiB. A
    thread's block that does not fit one heap of 64 MiB with its other data is mapped in any case. Freed memory below a
    block in use stays resident, so a run of `tiny` has 2 to 15 % more.

    Does nothing without glibc, or if the environment sets MALLOC_MMAP_MAX_, MALLOC_MMAP_THRESHOLD_,
    MALLOC_TRIM_THRESHOLD_ or any tunable of glibc.malloc.
    """
    libc = ctypes.CDLL(None)
    is_set = any(map(os.environ.get, _YOURS)) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        return
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.malloc_trim(0)  # compiling has freed much
