"""The GPU on which the other tests of this directory run. Without a GPU they are not collected."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import Figure

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tests/gpu needs a CUDA device")
def test_device(figure: Figure) -> None:
    properties = torch.cuda.get_device_properties(0)
    figure(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    assert (torch.ones(3, device="cuda") * 2).sum() == 6
