"""The GPU on which the other tests of this directory run. Without a GPU they are not collected (`conftest.py`)."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import ON_CPU, Figure, engines_on

pytestmark = [pytest.mark.gpu, pytest.mark.bare]


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"tests/gpu needs a CUDA device; with {ON_CPU}=cpu the tests in tests/gpu/engines run on the CPU",
)
def test_device(figure: Figure) -> None:
    properties = torch.cuda.get_device_properties(0)
    figure(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    if not engines_on():
        figure("vLLM is not installed: no test in tests/gpu/engines was collected")
    assert (torch.ones(3, device="cuda") * 2).sum() == 6
