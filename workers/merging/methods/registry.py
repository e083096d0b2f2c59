"""The decorator that registers the PyTorch function of a merge method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from search_spaces.methods import METHODS
from workers.merging.methods.peaks import UNKNOWN, Peak

__all__ = ["FUNCTIONS", "PEAKS", "merges"]

Function = TypeVar("Function", bound=Callable[..., torch.Tensor])

# Complete once all modules of this package are imported: see `plain`.
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
PEAKS: dict[str, Peak] = {}  # of the same methods


def merges(name: str, *, peak: Peak = UNKNOWN) -> Callable[[Function], Function]:
    """Decorator that registers a function as the PyTorch implementation of the merge method `name`.

    `peak` is an upper limit of the memory that the function takes. Raises ValueError if the package
    `search_spaces.methods` does not declare the method, or if the method already has a function.
    """
    if name not in METHODS:
        raise ValueError(f"merge method {name!r} is not declared; declare it in a module of search_spaces/methods")
    if name in FUNCTIONS:
        raise ValueError(f"{name} is computed by {FUNCTIONS[name].__module__} already; a method has one function")

    def register(function: Function) -> Function:
        FUNCTIONS[name], PEAKS[name] = function, peak
        return function

    return register
