"""The number of GPUs of this machine, and their free memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from workers.errors import EngineUnavailable

__all__ = ["free_gpu_bytes", "gpus_of_this_machine"]

# A GPU with at least this share of its memory free has no other user.
MOSTLY_FREE = 0.9

GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_this_machine(folder: Path = GPUS) -> int:
    """The number of NVIDIA GPUs of the machine, including those that other processes use; 0 if unknown."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def free_gpu_bytes(num_gpus: int, *, wait_s: float = 20.0, poll_s: float = 1.0) -> tuple[int, int]:
    """GPU memory in bytes as (free, total); both are the smallest over the first `num_gpus` GPUs of this process.

    Waits up to `wait_s` seconds until the share MOSTLY_FREE of the memory is free, because the memory of an engine that
    was just killed may not be free yet. Raises EngineUnavailable if the memory cannot be read.
    """
    deadline = time.monotonic() + wait_s
    while True:
        free, total = _gpu_bytes(num_gpus)
        if free >= MOSTLY_FREE * total or time.monotonic() >= deadline:
            return free, total
        time.sleep(poll_s)


def _gpu_bytes(num_gpus: int) -> tuple[int, int]:
    """Present GPU memory in bytes as (free, total); both are the smallest over the first `num_gpus` GPUs.

    If there are several GPUs, a subprocess reads their memory. Reading it in this process would create a CUDA context
    on each GPU, which takes memory from the process that computes on the GPU.
    """
    if num_gpus == 1:
        import torch

        return torch.cuda.mem_get_info()
    code = f"import json, torch; print(json.dumps([torch.cuda.mem_get_info(i) for i in range({num_gpus})]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineUnavailable(f"the memory of {num_gpus} GPUs cannot be read: {reason}")
    free, total = zip(*json.loads(answer.stdout), strict=True)
    return min(free), min(total)
