"""Conversion of tensors and rules to arguments of compiled functions: flat NumPy arrays and NumPy numbers.

NumPy has no bfloat16, and Numba has no arithmetic with float16 on CPU. Tensors of these dtypes are represented by
arrays of 16-bit words: bfloat16 by uint16, float16 by int16. The functions `elements.value` and `elements.rounded`
convert the words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, get_type_hints

import numpy as np
import torch

from workers.merging.kernels import rules

__all__ = ["as_array", "as_arrays", "typed"]

LARGEST = 3e38  # no number up to here is too large for float32
WORDS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor as a flat NumPy array that compiled code reads.

    bfloat16 and float16 elements are represented by words of 16 bits, which the function `operations.value` converts to
    numbers.
    """
    words = WORDS[tensor.dtype]
    flat = (tensor.detach() if tensor.requires_grad else tensor).view(-1)
    return (flat if words is tensor.dtype else flat.view(words)).numpy()


def as_arrays(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, ...]:
    """The tensors as flat NumPy arrays of one dtype that compiled code reads (function `as_array`).

    If the dtypes differ, all tensors are converted to float32, because a loop over the arrays is compiled for one
    dtype.
    """
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.float() for tensor in tensors]
    return tuple(map(as_array, tensors))


def typed(rule: Any) -> Any:
    """Copy of a rule whose fields have the types of compiled code's arguments.

    A rule has the numbers of a merge's formula as plain data. Numbers become float32. Probabilities become float64,
    whole numbers become uint32, and tensors become flat arrays.
    """
    kind: Any = type(rule)
    return kind(*(convert(field) for convert, field in zip(_conversions(kind), rule, strict=True)))


def _float32(number: float) -> np.float32:
    if -LARGEST <= number <= LARGEST:
        return np.float32(number)
    with np.errstate(over="ignore"):  # too large for float32 is infinite, as in torch
        return np.float32(number)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).numpy()


CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    float: _float32,
    int: np.uint32,
    rules.Numbers: lambda numbers: tuple(map(_float32, numbers)),
    rules.Words: lambda words: tuple(map(np.uint32, words)),
    rules.Doubles: lambda numbers: tuple(map(np.float64, numbers)),
    rules.Tensors: lambda tensors: tuple(map(_array, tensors)),
    rules.Sparsity: typed,
    rules.Comparison: typed,
}


@cache
def _conversions(rule: Any) -> tuple[Callable[[Any], Any], ...]:
    return tuple(CONVERSIONS[kind] for kind in get_type_hints(rule).values())
