"""The plain methods are the reference for the kernels; they run without any compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys
for name in ("numba", "llvmlite", "triton", "workers.merging.kernels", "workers.merging.statistics"):
    sys.modules[name] = None  # importing it raises ImportError

import pytest
import torch
from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from tests.workers.merging.methods.examples import EXAMPLES
from workers.merging.methods.plain import Operands, merge_tensors

base, *experts = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0))
for name, method in METHODS.items():
    count = method.max_sources or 3
    coefficients = {
        coefficient.name: value[:count] if isinstance(value := EXAMPLES[coefficient.name], tuple) else value
        for coefficient in method.coefficients
        if coefficient.name in EXAMPLES
    }
    merge = Merge(name, tuple(map(Source, "abc"[:count])), coefficients, seed=1 if method.takes_seed else None)
    merged = merge_tensors(merge, Operands(tuple(experts[:count]), base, keys=(1, 2, 3)[:count]))
    assert merged.shape == base.shape, name
print(len(METHODS))
"""


@pytest.mark.slow
def test_every_method_merges_without_numba_triton_and_kernels() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert int(finished.stdout) > 30
