"""Fused kernels of the methods that searches use most, for CPU (Numba) and CUDA (Triton).

They compute what the plain methods of `workers.merge_methods` compute, bit for bit on the same kind of device, but in
one pass, on the sources as they are stored, and write the result rounded once to where it shall be. What a source's
statistics are and where they are kept is not known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from search_spaces.recipe import Merge
from workers.merge_methods import Operands, linear_weights, num_kept, nuslerp_weights, slerp_weights

__all__ = ["FUSED", "is_fused", "merge_stored"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def _backend(out: torch.Tensor) -> ModuleType:
    """Imported when they are needed: both compilers take a second to import."""
    return importlib.import_module(f"workers.kernels.{out.device.type}")


def _sum(weights: Callable[[Merge, Operands], Sequence[float]]) -> Callable[..., None]:
    def fused(kernels: Any, merge: Merge, stored: Operands, out: torch.Tensor) -> None:
        kernels.weighted_sum(stored.tensors, out, weights=weights(merge, stored))

    return fused


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


FUSED: Mapping[str, Callable[..., None]] = {
    "linear": _sum(lambda merge, stored: linear_weights(merge.per_source("weight"))),
    "slerp": _sum(lambda merge, stored: slerp_weights(merge.number("t"), _cosine(stored))),
    "nuslerp": _sum(lambda merge, stored: nuslerp_weights(merge.per_source("weight"), _cosine(stored))),
    "task_arithmetic": _task_arithmetic,
    "ties": _ties,
    "dare_linear": _dare_linear,
    "dare_ties": _dare_ties,
}
