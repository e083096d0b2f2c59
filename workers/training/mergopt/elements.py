"""Numbering of the elements of all parameters; an element's number determines its noise in MergOPT.

Parameters follow each other in the optimizer's order, each in C order of its whole shape. A rank that holds a shard of
a parameter (FSDP2) numbers its elements as if it held the whole parameter. Therefore the shard gets the same noise as
that part of the parameter gets in an unsharded process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from workers.training.mergopt import kernel
from workers.training.mergopt.noise import add_plainly

__all__ = ["Part", "add", "parts_of"]


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a parameter that this process holds: the whole parameter, or a shard.

    `tensor` is the part and shares the parameter's memory. The elements of all parameters are numbered one after the
    other. `start` is the number of the part's first element, and `first` is the number of the whole parameter's first
    element.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor
    start: int
    first: int

    def add_noise(self, quantiles: torch.Tensor, *, key: int) -> None:
        """Add MergOPT's noise to this part of a parameter, in place; gradients are computed with the noise.

        `quantiles` are the 2^16 quantiles of the noise's distribution (float32). `key` is the seed of the random
        numbers (function `noise.draw_key`).
        """
        add(self.tensor, quantiles, key=key, start=self.start)


def parts_of(parameters: Iterable[torch.Tensor]) -> list[Part]:
    """The part of each of `parameters` that this process holds: the whole parameter, or its shard.

    A parameter that occurs twice is listed once. Raises ValueError for a parameter that is not of a floating dtype, or
    that is sharded along another dimension than the first.
    """
    found: list[Part] = []
    seen: set[int] = set()
    start = 0
    for parameter in parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if not parameter.is_floating_point():
            raise ValueError(f"mergopt: a parameter of dtype {parameter.dtype}; expected a floating dtype")
        local, offset = _local(parameter)
        found.append(Part(parameter, local, start + offset, start))
        start += math.prod(parameter.shape)
    return found


def add(tensor: torch.Tensor, quantiles: torch.Tensor, *, key: int, start: int) -> None:
    """Add MergOPT's noise to the elements of `tensor`, in place; gradients are computed with the noise.

    The noise of an element is one of `quantiles`, the 2^16 quantiles (float32) of the noise's distribution. The
    quantile is chosen by a hash of `key`, the seed of the random numbers (function `noise.draw_key`), and of the
    element's index. `start` is the index of the first element of `tensor` among the elements of all parameters.
    """
    whole = tensor if tensor.is_contiguous() else tensor.contiguous()
    if whole.dtype in kernel.DTYPES and whole.device.type in ("cpu", "cuda"):
        add_noise = kernel.add_noise if whole.device.type == "cpu" else _on_gpu()
        add_noise(whole, quantiles, key=key, start=start)
    else:
        add_plainly(whole.view(-1), quantiles, key=key, start=start)
    if whole is not tensor:
        tensor.copy_(whole)


def _on_gpu() -> Callable[..., None]:
    from workers.training.mergopt.cuda_kernel import add_noise  # Triton takes a second to import

    return add_noise


def _local(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Part of a parameter in this process's memory, and the index of the part's first element in the parameter.

    Raises ValueError if the parameter is sharded along another dimension than the first.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    placements = parameter.placements
    if any(type(place) not in _KNOWN or (place.is_shard() and not place.is_shard(0)) for place in placements):
        raise ValueError(
            f"mergopt: a parameter is placed as {tuple(map(str, placements))}; expected replicas and shards of the "
            "first dimension, as fully_shard makes them"
        )
    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    rows: Sequence[int] = parameter.shape[1:]
    local: torch.Tensor = parameter.to_local().detach()
    return local, offsets[0] * math.prod(rows) if offsets else 0


_KNOWN = (torch.distributed.tensor.Replicate, torch.distributed.tensor.Shard)
