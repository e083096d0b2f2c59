"""Memory that a merge method's PyTorch function takes while it computes, in addition to its operands.

The numbers are bytes per element of the merged tensor, as PyTorch's allocator reports them. They are upper limits for
every choice of coefficients, measured on CPU and compared with a GPU (`tests/gpu`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["BLOCK_BYTES", "GPU_BLOCK_BYTES", "UNKNOWN", "Peak"]

# Bytes for chunks of a fixed number of elements, on a CPU and on a GPU: hashes of masks and of ties, float64 sums.
BLOCK_BYTES = 64 << 20
GPU_BLOCK_BYTES = 256 << 20


class Peak(NamedTuple):
    """Peak memory of a merge method's PyTorch function, as the coefficients of a formula for the bytes.

    The peak is (`per_source` N + `fixed`) n + `per_square` c^2 bytes, and `more_on_gpu` n bytes more on a GPU. N is the
    number of sources, and n is the number of elements of the merged tensor. c is the number of columns of a matrix, and
    0 for tensors of other dimensions. The peak includes the result, but not the operands, which are float32.
    """

    per_source: float
    fixed: float
    per_square: float = 0.0
    more_on_gpu: float = 0.0

    def num_bytes(self, shape: tuple[int, ...], num_sources: int, *, on_gpu: bool = False) -> int:
        columns = shape[1] if len(shape) == 2 else 0
        per_element = self.per_source * num_sources + self.fixed + (self.more_on_gpu if on_gpu else 0)
        return int(per_element * math.prod(shape) + self.per_square * columns**2)


# For methods that state none: at least what any method of this package takes.
UNKNOWN = Peak(12, 48)
