"""Compiled CPU kernel that adds MergOPT's noise, bit-identical to `noise.add_plainly` and several times as fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workers.merging.kernels.arguments import WORDS, as_array
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import hashed, rounded
from workers.merging.kernels.operations import value
from workers.merging.kernels.threads import pieces, run
from workers.merging.masks import key_words

__all__ = ["DTYPES", "add_noise"]

DTYPES = tuple(WORDS)

BLOCK = 1 << 10  # elements; each thread has whole blocks
HIGH_WORD = 1 << 32  # the compiled hash takes indices below this
MASK_32 = HIGH_WORD - 1


def add_noise(flat: torch.Tensor, quantiles: torch.Tensor, *, key: int, start: int) -> None:
    """Add MergOPT's noise to the contiguous CPU tensor `flat` in place, by compiled code.

    The optimizer MergOPT computes gradients at parameters with noise. The result is the same as by the function
    `noise.add_plainly`. The dtype of `flat` is one of DTYPES. The noise of an element is one of `quantiles`, the 2^16
    quantiles (float32) of the noise's distribution. The quantile is chosen by a hash of `key`, the seed of the random
    numbers, and of the element's index. `start` is the index of the first element of `flat` among the elements of all
    parameters.
    """
    words, table = as_array(flat), quantiles.numpy()
    k0, k1 = key_words(key)
    first = 0
    while first < words.size:  # the high word of the index is constant within each turn
        high, low = divmod(start + first, HIGH_WORD)
        stop = min(words.size, first + HIGH_WORD - low)
        k1s = np.uint32((k1 + high) & MASK_32)
        part = words[first:stop]
        calls = [
            (part, table, np.uint32(low), np.uint32(k0), k1s, *map(np.int64, piece))
            for piece in pieces(part.size, BLOCK)
        ]
        run(_add, calls)
        first = stop


@compiled
def _add(words: Any, table: Any, low: Any, k0: Any, k1: Any, start: Any, stop: Any) -> None:
    for i in range(start, stop):
        h = hashed(np.uint32(low + np.uint32(i)), k0, k1)
        words[i] = rounded(value(words[i]) + table[h >> np.uint32(16)], words[i])
