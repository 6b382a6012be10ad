"""How the process's allocator keeps memory between batches."""

import ctypes
import os
from contextlib import suppress
from functools import cache

# malloc.h of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Freed memory at the end of the heap that is not given back.
_KEPT_BYTES = 512 << 20
# A block above this has pages of its own, which are given back when it is freed.
_LARGEST_KEPT_BYTES = 64 << 20


@cache
def keep_freed_memory() -> None:
    """Let glibc keep the memory that one batch frees for the next one; other C libraries are left alone.

    By default glibc returns large blocks to the system when they are freed and takes them again page by page, which
    was a third of the processor time of training and evaluating small convolutions. Thresholds that the user has set
    by `MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_` or `GLIBC_TUNABLES` remain.
    """
    if any(
        name in os.environ
        for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    ):
        return
    with suppress(AttributeError, TypeError, OSError):
        # Another C library.
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
