"""Fused kernels of the methods that searches use most, for CPU (Numba) and CUDA (Triton).

They compute what the plain methods of `workers.merge_methods` compute, bit for bit on the same kind of device, but in
one pass, on the sources as they are stored, and write the result rounded once to where it shall be. What a source's
statistics are and where they are kept is not known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from search_spaces.recipe import Merge
from workers.merge_methods import (
    Operands,
    Products,
    cosine_of,
    karcher_weights,
    linear_weights,
    model_stock_weights,
    multislerp_weights,
    num_kept,
    nuslerp_weights,
    slerp_weights,
)

__all__ = ["FUSED", "for_each", "is_fused", "merge_stored"]

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
        merge.method in FUSED
        and 0 < tensors[0].numel() <= MAX_ELEMENTS
        and all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in tensors)
        and dtype in DTYPES
        and tensors[0].device.type in ("cpu", "cuda")
    )


def merge_stored(merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    """Write the merged tensor to `out`, contiguous and of its operands' shape, rounded once to its dtype.

    For what `is_fused` accepts; statistics that the method uses must be known.
    """
    FUSED[merge.method](_backend(out), merge, stored, out)


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
    importlib.import_module("workers.kernels.cpu").each_in_one_thread(function, small)


def _backend(out: torch.Tensor) -> ModuleType:
    """Imported when they are needed: both compilers take a second to import."""
    return importlib.import_module(f"workers.kernels.{out.device.type}")


def _sum(weights: Callable[[Merge, Operands], Sequence[float]]) -> Callable[..., None]:
    def fused(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
        kernels.weighted_sum(stored.tensors, out, weights=weights(merge, stored))

    return fused


def _task_sum(weights: Callable[[Merge, Operands], Sequence[float]]) -> Callable[..., None]:
    def fused(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
        kernels.weighted_task_sum(stored.tensors, stored.base, out, weights=weights(merge, stored))

    return fused


def _multislerp_task_vectors(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    if len(stored.tensors) == 1:
        kernels.weighted_sum(stored.tensors, out, weights=[1.0])
    else:
        weights = multislerp_weights(merge.per_source("weight"), _products(stored))
        kernels.weighted_task_sum(stored.tensors, stored.base, out, weights=weights)


def _nearswap(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    kernels.nearswap(stored.tensors, out, t=merge.number("t"))


def _ram(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    kernels.ram(stored.tensors, stored.base, out, epsilon=merge.number("epsilon"))


def _task_arithmetic(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    kernels.task_arithmetic(stored.tensors, stored.base, out, lambdas=merge.per_source("lambda"))


def _ties(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    rank = num_kept(merge.number("k"), out.numel())
    trims = [magnitudes.trim(rank) for magnitudes in stored.magnitudes or () if magnitudes is not None]
    assert len(trims) == len(stored.tensors), "ties was not given the magnitudes of all its sources"
    kernels.ties(stored.tensors, stored.base, out, lambda_=merge.number("lambda"), trims=trims)


def _dare_linear(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    lambdas, densities = merge.per_source("lambda"), merge.per_source("density")
    kernels.dare_linear(stored.tensors, stored.base, out, lambdas=lambdas, densities=densities, keys=stored.keys)


def _dare_ties(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    lambda_, densities = merge.number("lambda"), merge.per_source("density")
    kernels.dare_ties(stored.tensors, stored.base, out, lambda_=lambda_, densities=densities, keys=stored.keys)


def _cosine(stored: Operands) -> float:
    assert stored.cosine is not None, "the cosine was not given"
    return stored.cosine


def _products(stored: Operands) -> Products:
    assert stored.products is not None, "the inner products were not given"
    return stored.products


FUSED: Mapping[str, Callable[..., None]] = {
    "linear": _sum(lambda merge, stored: linear_weights(merge.per_source("weight"))),
    "slerp": _sum(lambda merge, stored: slerp_weights(merge.number("t"), _cosine(stored))),
    "nuslerp": _sum(lambda merge, stored: nuslerp_weights(merge.per_source("weight"), _cosine(stored))),
    "nuslerp_task_vectors": _task_sum(
        lambda merge, stored: nuslerp_weights(merge.per_source("weight"), cosine_of(_products(stored), 0, 1))
    ),
    "multislerp": _sum(lambda merge, stored: multislerp_weights(merge.per_source("weight"), _products(stored))),
    "multislerp_task_vectors": _multislerp_task_vectors,
    "karcher": _sum(lambda merge, stored: karcher_weights(merge.per_source("weight"), _products(stored))),
    "model_stock": _task_sum(lambda merge, stored: model_stock_weights(_products(stored))),
    "nearswap": _nearswap,
    "ram": _ram,
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "dare_linear": _dare_linear,
    "dare_ties": _dare_ties,
}
