"""Threads for computing on the CPU in the process that owns an engine, while the engine's ranks wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["threads_of_ranks"]


@contextmanager
def threads_of_ranks(ranks: int) -> Iterator[None]:
    """Context in which torch and the merge kernels compute with the threads of all `ranks` of an engine.

    Each process of an engine has an equal share of the engine's threads (module `workers.serving.cores`). The ranks do
    not compute while their owner compares the engine with transformers. Torch gets no more threads than the cores that
    this process may use, without one; at the end it gets the threads back that it had. Do not nest contexts.
    """
    if ranks == 1:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(before, min(ranks * before, len(os.sched_getaffinity(0)) - 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
