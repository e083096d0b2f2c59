"""The number of GPUs of this machine, and their memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from workers.errors import EngineUnavailable

__all__ = ["MOSTLY_FREE", "engine_leftovers", "free_gpu_bytes", "gpus_of_this_machine", "smallest_gpu_bytes"]

log = logging.getLogger(__name__)

# A GPU with at least this share of its memory free has no other user.
MOSTLY_FREE = 0.9

# Titles of the processes of an engine of several GPUs begin with this (vLLM's multiprocessing executor).
WORKER_TITLE = "VLLM::"

GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_this_machine(folder: Path = GPUS) -> int:
    """The number of the machine's NVIDIA GPUs, including those that other processes use; 0 if unknown.

    `folder` is the directory in /proc in which the driver lists the GPUs.
    """
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


@cache
def smallest_gpu_bytes() -> int | None:
    """Memory in bytes of the smallest GPU that this process may use; None if PyTorch cannot read it.

    It is read once.
    """
    try:
        return min((total for _, total in _read_in_subprocess("torch.cuda.device_count()")), default=None)
    except EngineUnavailable:
        return None


def free_gpu_bytes(
    num_gpus: int,
    *,
    share_left: float = 0.0,
    wait_s: float = 20.0,
    leaving_wait_s: float = 600.0,
    poll_s: float = 1.0,
    leaving: Callable[[], Sequence[str]] | None = None,
) -> tuple[int, int]:
    """Wait for GPU memory to become free, and return (free, total) bytes, the smallest over the first `num_gpus` GPUs.

    An engine that was just killed may still hold GPU memory. The wait ends when the share MOSTLY_FREE of the memory is
    free, not counting the share `share_left`, which other processes may use; but at the latest after `wait_s` seconds.
    While processes of a killed engine still run, it lasts up to `leaving_wait_s` seconds, because they may have to
    finish their current merge. `leaving` returns descriptions of these processes (by default the function
    `engine_leftovers`). `poll_s` is the time between two checks, in seconds. Raises EngineUnavailable if the free
    memory cannot be read.
    """
    started, noted = time.monotonic(), ""
    while True:
        free, total = _gpu_bytes(num_gpus)
        waited = time.monotonic() - started
        if free >= (MOSTLY_FREE - share_left) * total or waited >= leaving_wait_s:
            return free, total
        processes = (leaving or engine_leftovers)()
        if waited >= wait_s and not processes:
            return free, total
        for_what = "until " + " and ".join(processes) + " end" if processes else f"up to {wait_s:.0f} s for the rest"
        if for_what != noted:
            log.warning("%.1f of %.1f GB of the GPU are free; waiting %s", free / 1e9, total / 1e9, for_what)
            noted = for_what
        time.sleep(poll_s)


def engine_leftovers() -> tuple[str, ...]:
    """Engine processes of this user that still run although their parent process has ended.

    Each process is a text "process PID (NAME)". Only processes of engines on several GPUs are found, by the title that
    vLLM gives them. A process whose parent has ended is recognised by its new parent: process 1 or Ray's raylet.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith(WORKER_TITLE) and process.uids().real == os.getuid():
                parent = process.parent()
                if parent is None or parent.pid == 1 or parent.name() == "raylet":
                    found.append(f"process {process.pid} ({title})")
    return tuple(found)


def _gpu_bytes(num_gpus: int) -> tuple[int, int]:
    """Current GPU memory as (free, total) bytes, the smallest of each over the first `num_gpus` GPUs."""
    if num_gpus == 1:
        import torch

        return torch.cuda.mem_get_info()
    free, total = zip(*_read_in_subprocess(str(num_gpus)), strict=True)
    return min(free), min(total)


def _read_in_subprocess(num_gpus: str) -> list[tuple[int, int]]:
    """Free and total bytes of each of the first GPUs; `num_gpus` is their number, or an expression for it.

    Reading them in this process would create a CUDA context on each GPU. A context takes memory from the process that
    computes on the GPU. Raises EngineUnavailable if they cannot be read.
    """
    code = f"import json, torch; print(json.dumps([torch.cuda.mem_get_info(i) for i in range({num_gpus})]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineUnavailable(f"the memory of {num_gpus} GPUs cannot be read: {reason}")
    return [(free, total) for free, total in json.loads(answer.stdout)]
