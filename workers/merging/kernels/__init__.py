"""Fused kernels of most methods for CPU (Numba), and of those that searches use most for CUDA (Triton).

They compute what the plain methods of `workers.merging.methods` compute, bit for bit on the same kind of device, but in
one pass (two where its numbers depend on what a method drops), on the sources as they are stored, and write the result
rounded once to where it shall be. What a source's statistics are and where they are kept is not known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering import FUSED, ON_CUDA
from workers.merging.kernels.threads import each_in_one_thread
from workers.merging.methods import Operands

__all__ = ["FUSED", "ON_CUDA", "for_each", "is_fused", "merge_stored"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A tensor with more than this part of each thread's share of the work is merged by all threads together.
SHARES = 8
T = TypeVar("T")
# Kernels count a tensor's elements in 32 bits.
MAX_ELEMENTS = 2**32 - 1


def is_fused(merge: Merge, stored: Operands, dtype: torch.dtype) -> bool:
    """There is a kernel that merges `stored`, operands in the dtypes they are stored in, to `dtype`."""
    tensors = [*stored.tensors, *([] if stored.base is None else [stored.base])]
    return (
        merge.method in (ON_CUDA if tensors[0].is_cuda else FUSED)
        and 0 < tensors[0].numel() <= MAX_ELEMENTS
        and all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in tensors)
        and dtype in DTYPES
        and tensors[0].device.type in ("cpu", "cuda")
    )


def merge_stored(merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    """Write the merged tensor to `out`, contiguous and of its operands' shape, rounded once to its dtype.

    For what `is_fused` accepts; statistics that the method uses must be known.
    """
    # Imported when it is needed: both compilers take a second to import.
    backend = importlib.import_module(f"workers.merging.kernels.{out.device.type}")
    backend.merge(FUSED[merge.method](merge, stored), stored.tensors, stored.base, out)


def for_each(function: Callable[[T], None], items: Sequence[tuple[int, T]], device: torch.device) -> None:
    """Call `function` for each item of (number of elements that it merges, item), in any order.

    On CPU in several threads at once, but for the largest: these are merged one by one, by all threads.
    """
    if device.type != "cpu":
        for _, item in items:
            function(item)
        return
    threads = torch.get_num_threads()
    large = sum(size for size, _ in items) / (SHARES * threads) if threads > 1 else 0
    small = []
    for size, item in sorted(items, key=lambda each: -each[0]):
        if size > large:
            function(item)
        else:
            small.append(item)
    each_in_one_thread(function, small)
