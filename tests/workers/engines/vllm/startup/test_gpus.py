import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.engines.vllm.startup.gpus import engine_leftovers, free_gpu_bytes, gpus_of_this_machine, smallest_gpu_bytes
from workers.errors import EngineUnavailable


def test_gpus_are_counted(tmp_path: Path) -> None:
    assert gpus_of_this_machine(tmp_path / "none") == 0
    for name in ("0000:07:00.0", "0000:0a:00.0"):
        (tmp_path / name).mkdir()
    assert gpus_of_this_machine(tmp_path) == 2


def test_memory_of_the_smallest_gpu_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch reads it in another process, for which this test has a stand-in."""
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    device_count = lambda: 2\n    mem_get_info = lambda index: (1, [80, 24][index])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    smallest_gpu_bytes.cache_clear()
    assert smallest_gpu_bytes() == 24
    smallest_gpu_bytes.cache_clear()
    (tmp_path / "torch.py").write_text("raise ImportError")
    assert smallest_gpu_bytes() is None
    smallest_gpu_bytes.cache_clear()


def test_memory_that_a_killed_engine_held_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 10, 95]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0) if len(free) > 1 else free[0], 100))
    assert free_gpu_bytes(1, poll_s=0.0) == (95, 100)
    free[:] = [55, 90]
    assert free_gpu_bytes(1, share_left=0.35, wait_s=0.0, poll_s=0.0) == (55, 100), "gradients have the share"
    assert free_gpu_bytes(1, share_left=0.3, poll_s=0.0) == (90, 100)
    free[:] = [40]
    assert free_gpu_bytes(1, wait_s=0.0) == (40, 100), "another program's memory stays its own"


def test_processes_of_a_killed_engine_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While processes of a killed engine still merge, their memory is waited for, and the log names them."""
    left = [["process 7 (VLLM::Worker_TP1)"], ["process 7 (VLLM::Worker_TP1)"], []]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * 10**9 if len(left) > 1 else 95 * 10**9, 100 * 10**9))
    found = free_gpu_bytes(1, wait_s=0.0, poll_s=0.0, leaving=lambda: left.pop(0))
    assert found == (95 * 10**9, 100 * 10**9)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "10.0 of 100.0 GB of the GPU are free; waiting until process 7 (VLLM::Worker_TP1) end"
    left[:] = [["process 7 (VLLM::Worker_TP1)"]] * 9
    assert free_gpu_bytes(1, wait_s=0.0, leaving_wait_s=0.0, leaving=lambda: left[0])[0] == 10 * 10**9


def test_orphans_of_an_engine_are_found() -> None:
    """A process with the title of an engine's counts once the process that started it is dead."""
    child = "import time; time.sleep(60)"
    command = f"['VLLM::Worker_TP1', '-c', {child!r}], executable={sys.executable!r}, stdout=-3, stderr=-3"
    start = f"import subprocess; print(subprocess.Popen({command}).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True).stdout)
    own = subprocess.Popen(["VLLM::Worker_TP0", "-c", "input()"], executable=sys.executable, stdin=subprocess.PIPE)
    try:
        found = [text for text in engine_leftovers() if f"process {orphan} " in text or f"process {own.pid} " in text]
        assert len(found) == 1
        assert found[0].startswith(f"process {orphan} (VLLM::Worker_TP1")
    finally:
        own.communicate(b"\n")
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_gpus_that_are_not_there_are_told() -> None:
    with pytest.raises(EngineUnavailable, match=r"the memory of 2 GPUs cannot be read: .*CUDA"):
        free_gpu_bytes(2)
