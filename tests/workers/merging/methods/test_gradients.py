"""Gradients of the plain functions by coefficients, compared with differences of their results in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from tests.workers.merging.methods.examples import EXAMPLES
from workers.merging.methods import scalars
from workers.merging.methods.plain import PLAIN, Operands

STEP = 1e-5
DIFFERENTIABLE = [(name, c.name) for name, method in METHODS.items() for c in method.gradients_by]
# Their results depend on statistics and counts alone, or on thresholds that jump.
WITHOUT = {"model_stock", "model_stock_rows", "arcee_fusion", "sce", "sce_mergekit", "ram", "ramplus_tl"}


def example(name: str) -> tuple[Merge, Operands]:
    declared = METHODS[name]
    count = declared.max_sources or 3
    generator = torch.Generator().manual_seed(0)
    base, *tensors = torch.randn(count + 1, 6, 8, generator=generator, dtype=torch.float64)
    coefficients = {
        c.name: value[:count] if isinstance(value := EXAMPLES[c.name], tuple) else value
        for c in declared.coefficients
        if c.name in EXAMPLES
    }
    sources = tuple(map(Source, "abc"[:count]))
    merge = Merge(name, sources, coefficients, seed=1 if declared.takes_seed else None)
    near = tuple(base + 0.1 * tensor for tensor in tensors)
    return merge, Operands(near, base if declared.needs_base else None, keys=(1, 2, 3)[:count])


def given(numbers: Tensor) -> Sequence[Tensor] | Tensor:
    return list(numbers) if numbers.dim() else numbers


@pytest.mark.parametrize(("name", "coefficient"), DIFFERENTIABLE)
def test_gradients_are_the_slopes_of_the_result(name: str, coefficient: str) -> None:
    merge, operands = example(name)
    declared = METHODS[name].coefficient(coefficient)
    assert declared is not None
    numbers = merge.per_source(coefficient) if declared.per_model else merge.number(coefficient)
    upstream = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(values: Tensor) -> Tensor:
        merged = PLAIN[name].merge(operands, merge, given={coefficient: given(values)})
        assert merged.dtype == torch.float64
        return (merged * upstream).sum()

    at = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(at), at)
    steps = STEP * torch.eye(at.numel(), dtype=torch.float64)
    with torch.no_grad():
        slopes = [(loss(at + step.view(at.shape)) - loss(at - step.view(at.shape))) / (2 * STEP) for step in steps]
    torch.testing.assert_close(gradient.flatten(), torch.stack(slopes), rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(("name", "coefficient"), DIFFERENTIABLE)
def test_tensor_coefficients_equal_numbers(name: str, coefficient: str) -> None:
    """Coefficients that are tensors give the values of numbers."""
    merge, operands = example(name)
    declared = METHODS[name].coefficient(coefficient)
    assert declared is not None
    numbers = merge.per_source(coefficient) if declared.per_model else merge.number(coefficient)
    single = operands.in_float32()
    merged = PLAIN[name].merge(
        single, merge, given={coefficient: given(torch.tensor(numbers, dtype=torch.float64, requires_grad=True))}
    )
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.detach(), PLAIN[name].merge(single, merge), rtol=1e-5, atol=1e-6)


def test_the_declarations_say_which_methods_have_no_gradient() -> None:
    assert {name for name, method in METHODS.items() if not method.gradients_by} == WITHOUT


def test_sums_are_exact_or_have_gradients() -> None:
    """Sums of numbers are exact, and sums of tensors keep their gradient."""
    assert scalars.fsum([1e16, 1.0, -1e16]) == 1.0
    terms = torch.tensor([0.1, 0.2], dtype=torch.float64, requires_grad=True)
    total = scalars.fsum(list(terms))
    assert isinstance(total, torch.Tensor)
    (gradient,) = torch.autograd.grad(total, terms)
    assert gradient.tolist() == [1.0, 1.0]
