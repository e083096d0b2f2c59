"""Arithmetic on coefficients, which are numbers, or tensors without dimensions where a gradient by them is wanted.

`math` computes the numbers, so that their bits are its; it would cut a tensor off its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["acos", "cos", "fsum", "sin", "sqrt"]


def fsum(numbers: Iterable[float]) -> float:
    """The exact sum, rounded once; of tensors their sum."""
    terms = list(numbers)
    return sum(terms) if any(isinstance(term, torch.Tensor) for term in terms) else math.fsum(terms)


def sqrt(number: float) -> float:
    return torch.sqrt(number) if isinstance(number, torch.Tensor) else math.sqrt(number)


def sin(number: float) -> float:
    return torch.sin(number) if isinstance(number, torch.Tensor) else math.sin(number)


def cos(number: float) -> float:
    return torch.cos(number) if isinstance(number, torch.Tensor) else math.cos(number)


def acos(number: float) -> float:
    return torch.acos(number) if isinstance(number, torch.Tensor) else math.acos(number)
