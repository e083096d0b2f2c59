"""Arithmetic on merge coefficients: on numbers, or on zero-dimensional tensors if gradients are needed.

Plain numbers are computed by `math`. Tensors are computed by torch, because `math` would detach them from their
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

__all__ = ["acos", "cos", "fsum", "sin", "sqrt"]


def fsum(numbers: Iterable[float]) -> float:
    """Sum of coefficients, which may be tensors with gradients.

    If all coefficients are plain numbers, they are added exactly and rounded once. If any coefficient is a tensor, the
    result is a tensor through which gradients flow.
    """
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
