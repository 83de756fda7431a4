"""How the allocator of this process treats memory that XLA's programs on CPUs free after every step."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's <malloc.h>
_KEPT_BYTES = 64 << 20  # at the end of each of its heaps; those of threads are of this size


def keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks of 32 to 64 MiB, and now return what else is free; without glibc, does nothing.

    XLA allocates the temporaries of a program whenever it runs. glibc maps a block of more than 32 MiB anew each time,
    and the kernel zeroes each page that is written: a tenth of the time of a step of `tiny`, which needs 45 MiB. Larger
    blocks of a thread are mapped in any case.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.malloc_trim(0)  # compiling has freed much
