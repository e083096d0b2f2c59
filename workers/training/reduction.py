"""Derivatives of a loss with respect to a merge's coefficients, computed from the gradient at a merged tensor.

For a sum of task vectors (expert minus base), a derivative is the inner product of gradient and task vector, which is
computed without holding the task vector in memory. Other merge methods are differentiated through their function in
PyTorch, which needs memory for several tensors of the merged tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.base import Coefficient
from search_spaces.recipe import Merge
from workers.merging.bank import Bank
from workers.merging.materialize import operands_of, sources_of
from workers.merging.merged_tensor import MergedTensor
from workers.merging.methods.averages import linear_weights
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.plan import TensorPlan

__all__ = ["Derivatives", "derivatives", "inner_product", "stated_coefficients"]

# By coefficient: [number of sources], or [1] for a shared coefficient; float64.
Derivatives = Mapping[str, torch.Tensor]
Tensors = Sequence[torch.Tensor]

STORED = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 1 << 22  # elements of a difference at a time, where no kernel computes


def stated_coefficients(tensor: MergedTensor) -> tuple[Coefficient, ...]:
    """Coefficients of a tensor's merge with respect to which a loss can be differentiated.

    Of the coefficients for which the merge method has derivatives, these are the ones to which the merge gives a value.
    The result may be empty.

    Raises:
        InvalidRecipe: The merge method has no derivatives at all, or a coefficient has one value for each source and
            two sources are layers of the same model. The message names the method.
    """
    merge, declared = tensor.merge, METHODS[tensor.merge.method]
    if not declared.gradients_by:
        known = ", ".join(name for name, method in METHODS.items() if method.gradients_by)
        raise InvalidRecipe(
            f"{tensor.name}: {merge.method} has no gradient by coefficients; methods that have are {known}"
        )
    models = [source.model for source in merge.sources]
    stated = tuple(c for c in declared.gradients_by if c.name in merge.coefficients)
    if len(set(models)) < len(models) and any(c.per_model for c in stated):
        raise InvalidRecipe(
            f"{tensor.name}: {merge.method} has several layers of one model among its sources, {', '.join(models)}; "
            "gradients are by model, so each may be named once"
        )
    return stated


def derivatives(tensor: MergedTensor, plan: TensorPlan, bank: Bank, gradient: torch.Tensor) -> Derivatives:
    """Derivatives of the loss with respect to the coefficients of one merged tensor, keyed by the coefficient's name.

    Each derivative is a float64 tensor with one number for each source, or with a single number if the sources share
    the coefficient. The coefficients are the result of the function `stated_coefficients`. `plan` lists the tensors of
    the merge to which `tensor` belongs, and `bank` has the weights of its sources. `gradient` is the gradient of the
    loss with respect to the merged tensor.
    """
    fused = FUSED.get(tensor.merge.method)
    if fused is not None:
        return fused(*sources_of(tensor, plan, bank), tensor.merge, gradient)
    operands = operands_of(tensor, plan, bank)
    names = {c.name: c.per_model for c in stated_coefficients(tensor)}
    return _through_the_function(operands, tensor.merge, gradient, names)


def inner_product(first: torch.Tensor, second: torch.Tensor) -> float:
    """Inner product of `first` and `second`, computed in float32 within chunks and summed over chunks in float64."""
    parts = zip(torch.split(first.flatten(), CHUNK), torch.split(second.flatten(), CHUNK), strict=True)
    return math.fsum(float(one.float() @ other.float()) for one, other in parts)


def _linear(tensors: Tensors, base: torch.Tensor | None, merge: Merge, gradient: torch.Tensor) -> Derivatives:
    """Derivatives of a loss with respect to the weights of the merge method `linear`.

    The merge is m = sum_t w_t theta_t / W with the sources theta_t, their weights w_t, and W = sum_t w_t. The sources
    are `tensors`; there is no base. Let G be the gradient of the loss with respect to m. The derivative with respect to
    w_j is <G, theta_j - m> / W. This inner product is computed from the sources' differences from the first source,
    because the inner products of G with whole tensors are almost equal, and their difference would lose digits.
    """
    weights = merge.per_source("weight")
    products = _projections(gradient, tensors, tensors[0])
    mean = sum(share * product for share, product in zip(linear_weights(weights), products, strict=True))
    return {"weight": (products - mean) / sum(weights)}


def _task_arithmetic(tensors: Tensors, base: torch.Tensor | None, merge: Merge, gradient: torch.Tensor) -> Derivatives:
    assert base is not None
    return {"lambda": _projections(gradient, tensors, base)}


FUSED: Mapping[str, Callable[[Tensors, torch.Tensor | None, Merge, torch.Tensor], Derivatives]] = {
    "linear": _linear,
    "task_arithmetic": _task_arithmetic,
}


def _projections(gradient: torch.Tensor, tensors: Tensors, base: torch.Tensor) -> torch.Tensor:
    """Inner products of `gradient` with (tensor - `base`) for each of `tensors`, in float64: [len(tensors)]."""
    every = [gradient, *tensors, base]
    if gradient.device.type == "cpu" and all(each.is_contiguous() and each.dtype in STORED for each in every):
        from workers.merging.kernels.reductions import projections

        return torch.tensor(projections(gradient, tensors, base), dtype=torch.float64)
    products = torch.zeros(len(tensors), dtype=torch.float64, device=gradient.device)
    parts = (torch.split(each.flatten(), CHUNK) for each in (gradient, base, *tensors))
    for direction, origin, *others in zip(*parts, strict=True):
        for i, other in enumerate(others):
            products[i] += direction.float() @ (other.float() - origin.float())
    return products


def _through_the_function(
    operands: Operands, merge: Merge, gradient: torch.Tensor, per_model: Mapping[str, bool]
) -> Derivatives:
    """Derivatives of the loss with respect to the coefficients of a merge, by automatic differentiation.

    PyTorch differentiates the function of the merge method, which is called with the tensors `operands`. `gradient` is
    the gradient of the loss with respect to the merged tensor. The keys of `per_model` are the coefficients' names; a
    value is True for a coefficient that has a number for each source.
    """
    leaves = {
        name: [
            torch.tensor(number, dtype=torch.float64, requires_grad=True)
            for number in (merge.per_source(name) if is_each else (merge.number(name),))
        ]
        for name, is_each in per_model.items()
    }
    given = {name: each if per_model[name] else each[0] for name, each in leaves.items()}
    every = [leaf for each in leaves.values() for leaf in each]
    with torch.enable_grad():
        merged = PLAIN[merge.method].merge(operands.in_float32(), merge, given=given)
    if not merged.requires_grad:  # such as the mean of one model
        return {name: torch.zeros(len(each), dtype=torch.float64) for name, each in leaves.items()}
    slopes = iter(torch.autograd.grad(merged, every, gradient.float(), materialize_grads=True))
    return {name: torch.stack([next(slopes) for _ in each]) for name, each in leaves.items()}
