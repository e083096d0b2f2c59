"""A GPU that an engine shares with gradients; the only machine of the test has a GPU for Ray alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from workers.serving.gpu_shares import engine_gpus, has_share, machine_with_share, on_share, whole_gpus


@pytest.mark.slow
def test_an_engine_and_gradients_have_one_gpu(tmp_path: Path) -> None:
    """Ray puts one gradient actor on the engine's GPU, with a limit of memory; a second one computes on the CPU."""
    command = [sys.executable, "-m", "tests.workers.serving.shared_gpu", str(tmp_path / "seen.json")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3])
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    limit = "expandable_segments:True,per_process_memory_fraction:0.4"
    shared = {"device": "cuda", "CUDA_VISIBLE_DEVICES": "0", "PYTORCH_CUDA_ALLOC_CONF": limit}
    assert said["engine"] == "0"
    assert said["first"] == shared
    assert said["second"]["device"] == "cpu"
    assert (said["left by the engine"], said["left by both"]) == (0.1, 0.0)
    assert "no GPU is free for gradients, so the CPU computes them" in ran.stderr


def test_engines_that_share_nothing_reserve_whole_gpus() -> None:
    assert engine_gpus(EngineOptions(tensor_parallel_size=4)) == 4
    assert engine_gpus(EngineOptions(gpu_share_left=0.2)) == pytest.approx(0.9)
    assert not has_share(0.05)
    assert has_share(1 - 0.9), "which is a little less than 0.1"


def test_the_machine_of_an_engine_is_found() -> None:
    """A part of a GPU is free there; on another machine the actor would keep a whole GPU from engines."""
    machines = {"idle": {"GPU": 2.0}, "busy": {"GPU": 0.0}, "cpus": {"CPU": 8.0}, "engine": {"GPU": 1.1}}
    assert machine_with_share(machines) == "engine"
    assert machine_with_share({name: machines[name] for name in ("idle", "busy", "cpus")}) is None
    assert whole_gpus(machines.values()) == 3
    assert whole_gpus([{"GPU": 0.1}] * 12) == 0, "no sum of parts is a GPU"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native,", "PYTORCH_ALLOC_CONF": "x"}, "backend:native,"),
    ],
)
def test_settings_of_the_allocator_are_kept(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = f"{expected}per_process_memory_fraction:0.25"
    assert on_share(0.25)["runtime_env"] == {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": settings}}


def test_the_limit_is_a_setting_of_pytorch() -> None:
    """The name stands in the header of the installed PyTorch, which parses settings only on a machine with a GPU."""
    header = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
    assert '"per_process_memory_fraction"' in header.read_text()
