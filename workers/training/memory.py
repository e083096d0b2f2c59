"""Freed memory that a process keeps for its next step, where glibc allocates it."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

# mallopt's parameters in glibc's malloc.h, and the environment's variables for the same.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

KEPT = 128 << 20  # bytes of the heap that stay with the process though nothing is in them
MAPPED = 32 << 20  # bytes from which an allocation is a mapping of its own, which goes back when it is freed


def keep_freed_memory() -> bool:
    """Let this process keep up to 128 MB of freed memory from now on, and return whether it does.

    A step that frees each gradient as it is used leaves nothing at the end of the heap, so glibc returns the memory of
    its activations, and the next step faults in every page again: about a tenth of a step of a model of 1M parameters.
    Larger allocations than 32 MB go back as always. Nothing changes where the environment sets this, or without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED) and mallopt(TRIM_THRESHOLD, KEPT))
