"""Shards: the elements of a tensor that one rank of a tensor-parallel engine holds.

A rank holds some rows of a matrix (heads of attention, a part of the vocabulary) or some columns; in a stack of
experts, it holds some rows or columns of each expert. Such elements are runs of consecutive elements at equal
distances. The module `workers.engines.vllm.loading` finds out which elements a rank holds; this module does not depend
on an engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

__all__ = ["Shard"]


@dataclass(frozen=True)
class Shard:
    """Some elements of a contiguous tensor: runs of `run` consecutive elements, one run every `stride` elements.

    The first run begins at element `first` of the tensor in C order. `shape` is the shape of the shard's elements as a
    tensor; its number of elements is a multiple of `run`.
    """

    first: int
    run: int
    stride: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, view: torch.Tensor, whole: torch.Tensor) -> Self | None:
        """Describe which elements of the contiguous tensor `whole` are in its view `view`.

        Returns None if `view` is not in the memory of `whole`, or if its elements are not runs at equal distances in
        ascending order.
        """
        if (
            not whole.is_contiguous()
            or view.dtype != whole.dtype
            or view.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        ):
            return None
        first = int(view.storage_offset()) - int(whole.storage_offset())
        dims = [(size, step) for size, step in zip(view.shape, view.stride(), strict=True) if size != 1]
        run = 1
        while dims and dims[-1][1] == run:
            run *= dims.pop()[0]
        stride = dims[-1][1] if dims else run
        count = 1
        while dims and dims[-1][1] == stride * count:
            count *= dims.pop()[0]
        end = first + (count - 1) * stride + run
        if dims or stride < run or view.numel() == 0 or first < 0 or end > whole.numel():
            return None
        return cls(first, run, stride, tuple(view.shape))

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """The shard that has all elements of a tensor of the shape `shape`."""
        size = math.prod(shape)
        return cls(0, size, size, tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether the shard has all elements of a tensor of the shape `shape`."""
        return self.num_elements == math.prod(shape)

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of the shard in the contiguous tensor `whole`, as a view of its memory.

        The view has the shape [number of runs, length of a run].
        """
        count = self.num_elements // self.run if self.run else 0
        return whole.as_strided((count, self.run), (self.stride, 1), whole.storage_offset() + self.first)

    def indices(self, positions: torch.Tensor) -> torch.Tensor:
        """Convert positions within the shard to positions within the whole tensor.

        `positions` (int64) are indices, from 0, in the flattened shard. The result contains the index of each of these
        elements in the flattened whole tensor.
        """
        return self.first + positions // self.run * self.stride + positions % self.run
