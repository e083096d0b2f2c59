"""Thread pool of the CPU kernels, which uses as many threads as torch.

Kernels run without Python's interpreter lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, TypeVar

import torch

__all__ = ["MIN_PIECE", "each_in_one_thread", "pieces", "run"]

T = TypeVar("T")
# Merging a smaller piece takes less time than waking a thread.
MIN_PIECE = 1 << 16  # elements
_local = threading.local()  # is_alone: this thread merges one of many small tensors


def pieces(num_elements: int, block: int) -> list[tuple[int, int]]:
    """Divide the indices of `num_elements` elements into ranges, at most one for each thread.

    Each range consists of whole blocks of `block` elements; the last block may be incomplete. Returns (start, stop) for
    each range. The result is empty if there are no elements.
    """
    is_alone = getattr(_local, "is_alone", False)
    num_pieces = 1 if is_alone else max(1, min(torch.get_num_threads(), num_elements // MIN_PIECE))
    size = max(1, -(-num_elements // (num_pieces * block))) * block
    return [(start, min(start + size, num_elements)) for start in range(0, num_elements, size)]


def run(kernel: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Run `kernel` in several threads, once for each tuple of arguments in `calls`; return the results in order.

    The first of the calls runs in the thread that calls this function.
    """
    others = [_threads().submit(kernel, *arguments) for arguments in calls[1:]]
    return [kernel(*arguments) for arguments in calls[:1]] + [other.result() for other in others]


def each_in_one_thread(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `function` for each of `items`, in as many threads as torch uses; each call runs in a single thread.

    Kernels that `function` calls do not use further threads. This is for many small tensors, because dividing a small
    tensor among threads would take as long as merging it.
    """
    queue = iter(items)  # an iterator of a sequence: `next` is atomic under the interpreter lock

    def work() -> None:
        _local.is_alone = True
        try:
            for item in queue:
                function(item)
        finally:
            _local.is_alone = False

    others = [_threads().submit(work) for _ in range(torch.get_num_threads() - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="merge")
