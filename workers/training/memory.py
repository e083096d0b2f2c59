"""Freed memory that a process keeps for its next step, where glibc allocates it."""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_freed_memory"]

# mallopt's parameters in glibc's malloc.h, and the environment variables that set them.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

KEPT = 128 << 20  # bytes of free heap that the process keeps
MAPPED = 32 << 20  # bytes above which an allocation is a separate mapping, which is returned when it is freed


def keep_freed_memory() -> bool:
    """Let this process keep up to 128 MB of freed memory for later steps, and return whether it does.

    A training step that frees each gradient when it was used leaves nothing at the end of the heap. Therefore glibc
    returns the memory of the step's activations to the system, and the next step faults in every page again. This takes
    about a tenth of a step of a model with 1M parameters. Allocations larger than 32 MB are always returned. Nothing
    changes without glibc, or if environment variables already set these limits of glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED) and mallopt(TRIM_THRESHOLD, KEPT))
