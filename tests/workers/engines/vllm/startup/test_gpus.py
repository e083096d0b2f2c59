from pathlib import Path

import pytest
import torch

from workers.engines.vllm.startup.gpus import free_gpu_bytes, gpus_of_this_machine
from workers.errors import EngineUnavailable


def test_gpus_are_counted(tmp_path: Path) -> None:
    assert gpus_of_this_machine(tmp_path / "none") == 0
    for name in ("0000:07:00.0", "0000:0a:00.0"):
        (tmp_path / name).mkdir()
    assert gpus_of_this_machine(tmp_path) == 2


def test_memory_that_a_killed_engine_held_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 10, 95]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0) if len(free) > 1 else free[0], 100))
    assert free_gpu_bytes(1, poll_s=0.0) == (95, 100)
    free[:] = [40]
    assert free_gpu_bytes(1, wait_s=0.0) == (40, 100), "another program's memory stays its own"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_gpus_that_are_not_there_are_told() -> None:
    with pytest.raises(EngineUnavailable, match=r"the memory of 2 GPUs cannot be read: .*CUDA"):
        free_gpu_bytes(2)
