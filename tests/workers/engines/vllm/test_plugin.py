"""The check that a packed copy of weights agrees with the plain weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.engines.vllm.plugin import _bits, _compute_int8_in_float32, _gives_its_columns


def layer(dtype: torch.dtype) -> Any:
    """A linear layer, [rows, columns], that multiplies by a copy of its weights, like a layer with packed weights."""
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    copy = weight.clone()
    return SimpleNamespace(weight=weight, cpu_linear=lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_are_detected(dtype: torch.dtype) -> None:
    """A copy with other weights is detected, however small the difference."""
    linear = layer(dtype)
    assert _gives_its_columns(linear)
    linear.weight *= 1 + 2 * torch.finfo(dtype).eps
    assert not _gives_its_columns(linear)
    linear.weight[5, 7] = torch.inf  # the candidate fails, not the engine
    assert _gives_its_columns(linear)


def test_bits_are_those_of_the_weights_in_any_order() -> None:
    weights = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moved = weights.flatten(1)[:, torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    padded = torch.cat([moved, torch.zeros(3, 5, dtype=torch.bfloat16)], dim=1)
    assert _bits(weights) == _bits(moved) == _bits(padded)
    weights[1, 2, 3] *= 1.01
    assert _bits(weights) != _bits(moved)


def test_int8_in_float32_uses_no_kernel_for_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX, vLLM would take a kernel that refuses float32; tests/end_to_end/test_run.py scores such a model."""
    kernels = SimpleNamespace(check_cpu_sgl_kernel=lambda n, k, dtype: n % 16 == 0)
    _compute_int8_in_float32(kernels)
    assert not kernels.check_cpu_sgl_kernel(32, 32, torch.int8)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    assert kernels.check_cpu_sgl_kernel(32, 32, torch.int8)
    assert not kernels.check_cpu_sgl_kernel(8, 32, torch.int8)
