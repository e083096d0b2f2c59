"""An engine that leaves a share of its GPU to gradients, and a process that fills this share and asks for more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.conftest import Figure, engines_on
from tests.gpu.engines.answers import OPTIONS, answers, check
from tests.gpu.engines.conftest import Engines
from tests.workers.recipes import arithmetic, slerp
from workers.serving.gpu_shares import on_share
from workers.types import Family

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

SHARE = 0.4
# Takes nine tenths of the share, is refused a tenth of the GPU beyond it, and keeps the memory until its input ends.
PROGRAM = f"""
import sys, torch
total = torch.cuda.mem_get_info()[1]
held = torch.ones(int(0.9 * {SHARE} * total), dtype=torch.uint8, device="cuda")
try:
    torch.ones(int(0.1 * total), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("full", int(held.sum()) == held.numel(), flush=True)
sys.stdin.read()
"""


def test_an_engine_is_right_beside_a_full_share(engines: Engines, small_family: Family, figure: Figure) -> None:
    """The other process gets no more than the share; an engine is right, and another one starts, while it has all."""
    if engines_on() != "cuda":
        pytest.skip("the memory of a CPU is not divided into shares")
    options = OPTIONS.model_copy(update={"gpu_share_left": SHARE})
    engine = engines.start("small Llama, a share left", small_family, options)
    free, total = torch.cuda.mem_get_info()
    figure(f"{free / total:.2f} of the GPU are free beside an engine that leaves {SHARE}")
    assert free >= SHARE * total
    environment = os.environ | on_share(SHARE)["runtime_env"]["env_vars"]
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "full True\n"
        for _ in range(2):
            for recipe in (arithmetic(small_family, 0.4, 0.9), slerp(small_family, 0.3)):
                report = engine.swap(recipe)
                assert report.off_device == "", "the engine has its own memory to merge in"
                check(answers(engine), recipe, engine)
            engines.close()
            engine = engines.start("small Llama, beside a full share", small_family, options)
        other.stdin.close()
    assert other.returncode == 0
