"""CUDA kernel that adds MergOPT's noise to one tensor; its results are bit-identical to those of `noise.add_plainly`.

Tests on machines without a GPU run the kernel in Triton's interpreter, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workers.merging.kernels.cuda import element_hash, launching_on
from workers.merging.masks import key_words

__all__ = ["add_noise"]

BLOCK = 1024  # elements of one Triton program


def add_noise(flat: torch.Tensor, quantiles: torch.Tensor, *, key: int, start: int) -> None:
    """Add MergOPT's noise to the contiguous CUDA tensor `flat` in place, without synchronising with the device.

    The optimizer MergOPT computes gradients at parameters with noise. The noise of an element is one of `quantiles`,
    the 2^16 quantiles (float32, on the device of `flat`) of the noise's distribution. The quantile is chosen by a hash
    of `key`, the seed of the random numbers, and of the element's index. `start` is the index of the first element of
    `flat` among the elements of all parameters.
    """
    if size := flat.numel():
        numbers = torch.tensor([*key_words(key), start], dtype=torch.int64, device=flat.device)
        with launching_on(flat.device):
            _add[(triton.cdiv(size, BLOCK),)](flat, quantiles, numbers, size, BLOCK=BLOCK, enable_fp_fusion=False)


@triton.jit
def _add(flat, quantiles, numbers, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel that adds the noise of the optimizer MergOPT to `flat`.

    `numbers` has three numbers: the low and the high 32 bits of the key (the seed of the random numbers), and the index
    of the first element of `flat` among the elements of all parameters. `quantiles` are the quantiles of the noise's
    distribution. `size` is the number of elements of `flat`. Each program of the kernel handles `BLOCK` elements.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    element = tl.load(numbers + 2) + i
    high = (tl.load(numbers + 1) + (element >> 32)).to(tl.uint32)
    drawn = element_hash(element, tl.load(numbers).to(tl.uint32), high) >> 16
    moved = tl.load(flat + i, mask=is_inside, other=0).to(tl.float32) + tl.load(quantiles + drawn.to(tl.int64))
    tl.store(flat + i, moved.to(flat.dtype.element_ty), mask=is_inside)
