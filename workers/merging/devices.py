"""Choice of the device that computes each merged tensor, by the memory that its merge method needs.

A method with a kernel for CUDA needs memory for its operands and its result. Any other method runs on a GPU by its
PyTorch function; the function makes float32 copies and several temporary tensors. If a GPU has too little memory for a
tensor, the tensor is computed on the CPU, from the same sources, so that the GPU does not run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from search_spaces.methods import METHODS
from workers.merging.bank import Bank
from workers.merging.kernels.lowering import FUSED, ON_CUDA
from workers.merging.merged_tensor import MergedTensor
from workers.merging.methods.peaks import BLOCK_BYTES, GPU_BLOCK_BYTES
from workers.merging.methods.plain import PLAIN
from workers.merging.plan import TensorPlan
from workers.models.headers import DTYPE_BYTES, TensorInfo
from workers.types import Placement

__all__ = ["bank_for", "devices_of", "peak_bytes"]

FLOAT32_BYTES = 4
# PyTorch rounds each large allocation on a GPU up to this size.
ALLOCATION_BYTES = 2 << 20
# Bytes of a rank on a GPU (`Bank.ranks`).
RANK_BYTES = 4


def bank_for(
    tensor: MergedTensor, plan: TensorPlan, bank: Bank, dtype: torch.dtype, num_elements: int | None = None
) -> Bank:
    """Choose the device for computing one merged tensor, and return the bank (the source weights) with this device.

    The result is `bank` itself, or a bank that has the same weights and computes on the CPU. The CPU is used if
    computing `tensor`, one of the merged tensors that `plan` lists, takes more memory (function `peak_bytes`) than the
    bank's device has for merging (attribute `Bank.room_bytes`). `dtype` is the dtype of the result. `num_elements` is
    the number of elements that are computed, if a kernel computes only a part of the tensor; None means all elements.
    """
    if bank.room_bytes is None or bank.device.type == "cpu":
        return bank
    return bank if peak_bytes(tensor, plan, bank, dtype, num_elements) <= bank.room_bytes else bank.on("cpu")


def devices_of(
    plan: TensorPlan, bank: Bank, dtype: torch.dtype, num_elements: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Type of the device, such as "cuda", that computes each tensor of the merged model, keyed by tensor name.

    `plan` lists the tensors of the merge, and `bank` has the weights of its sources. A tensor for which the bank's
    device has too little memory is computed on the CPU. `dtype` is the dtype of the results. `num_elements` maps the
    name of a tensor of which only a part is computed to the number of elements of this part.
    """
    parts = num_elements or {}
    return {
        name: bank_for(tensor, plan, bank, dtype, parts.get(name)).device.type
        for tensor in plan.tensors
        for name in tensor.shapes()
    }


def peak_bytes(
    tensor: MergedTensor, plan: TensorPlan, bank: Bank, dtype: torch.dtype, num_elements: int | None = None
) -> int:
    """Largest number of bytes that computing one merged tensor of `plan` allocates on the bank's device.

    `plan` lists the tensors of the merge, and `bank` has the weights of its sources. The result of the merge, in
    `dtype`, is counted. Sources that are on the device already are not counted. `num_elements` is the number of
    elements that are computed, if a kernel computes only a part of the tensor; None means all elements.
    """
    merge = tensor.merge
    operands = [*merge.sources, *([merge.base_in(plan.recipe.base)] if METHODS[merge.method].needs_base else [])]
    shape, method = tensor.shape, PLAIN[merge.method]
    if plan.recipe.trim == "model" and "majority" in method.uses:
        # The majority sign is elected tensor by tensor over the whole model (`Bank.majority`).
        shape = max((each.shape for each in plan.tensors), key=math.prod)
    count = math.prod(shape) if num_elements is None else num_elements
    is_there = bank.placement is Placement.GPU
    copied = converted = 0
    for operand in operands:
        alias, name = plan.aliases[operand.model], bank.layout.name(tensor.suffix, operand.layer)
        source = bank.view(alias).tensor(name)
        if not isinstance(source, TensorInfo):
            copied += 2 * FLOAT32_BYTES * math.prod(shape)  # the computed tensor, and a product of the same size
            copied += 0 if num_elements is None else FLOAT32_BYTES * count  # the part of it
        else:
            copied += 0 if is_there else DTYPE_BYTES[source.dtype] * count
            converted += 0 if source.dtype == "F32" else FLOAT32_BYTES * count
    result = count * dtype.itemsize
    is_fused = merge.method in (FUSED if bank.device.type == "cpu" else ON_CUDA) and not plan.recipe.keeps_equal
    if is_fused:
        scaled = 2 * FLOAT32_BYTES * count if tensor.factor != 1 else 0
        return copied + result + scaled + (len(operands) + 1) * ALLOCATION_BYTES
    ranks = RANK_BYTES * count * len(merge.sources) if "ranks" in method.uses else 0
    is_on_gpu = bank.device.type != "cpu"
    taken = method.peak.num_bytes(shape, len(merge.sources), on_gpu=is_on_gpu)
    chunks = GPU_BLOCK_BYTES if is_on_gpu else BLOCK_BYTES
    return copied + converted + ranks + max(taken, FLOAT32_BYTES * count + result) + chunks
