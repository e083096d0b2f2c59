"""Speeds and memory of this machine, measured in about a second, or of the machines of a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from search_spaces.study.engine import EngineOptions
from service.engine_machines import EngineMachines
from service.studies.planning.profiles import KINDS, MachineProfile
from workers.engines.host_memory import total_host_bytes
from workers.engines.vllm.environment import engine_environment

__all__ = ["measured_speeds", "profile_for", "this_machine"]

MEASURED_S = 0.4  # seconds for each of the two speeds
COPIED = 1 << 25  # elements of float32: larger than caches of processors


def measured_speeds(threads: int) -> dict[str, float]:
    """Measure the speeds of this machine's matrix products and copies, with `threads` threads on a CPU.

    The result contains `flops` (operations per second, in bfloat16 on a GPU, else in float32) and `bandwidth` (bytes
    per second, read and written together). Each speed is measured repeatedly for MEASURED_S seconds, and the fastest
    repetition counts, because other work slows some repetitions down.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 4096 if device == "cuda" else 512
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        source = torch.ones(COPIED, device=device)
        target = torch.empty_like(source)

        def product() -> None:
            float((matrix @ matrix)[0, 0])  # waits for the device

        def copy() -> None:
            target.copy_(source)
            float(target[0])

        return {"flops": 2 * size**3 / _fastest(product), "bandwidth": 8 * COPIED / _fastest(copy)}
    finally:
        torch.set_num_threads(before)


def _fastest(call: Callable[[], None]) -> float:
    """Call `call` repeatedly for MEASURED_S seconds, and return how many seconds the fastest call took.

    A first call, which may be slower, is not measured.
    """
    call()
    best, until = float("inf"), time.perf_counter() + MEASURED_S
    while True:
        started = time.perf_counter()
        call()
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended >= until:
            return best


def profile_for(machines: Sequence[EngineMachines]) -> MachineProfile:
    """The profile of the machines for which a study was checked.

    The result is the profile of this machine, with one exception: if `machines` have GPUs, and this machine (such as
    the head of a cluster) has none, the profile has the GPUs and the memory of the first group in `machines`. The
    speeds of these GPUs are not known: the speeds of an H100 are assumed, and the profile's name says so.
    """
    import torch

    with_gpus = [group for group in machines if group.num_gpus]
    if not with_gpus or torch.cuda.is_available():
        return this_machine()
    group, one = with_gpus[0], KINDS["h100"]
    return replace(
        one,
        name=f"cluster of {group.num_gpus} GPU(s) a machine, as fast as H100s",
        gpus=group.num_gpus,
        gpu_bytes=group.gpu_bytes or one.gpu_bytes,
        cores=one.cores * group.num_gpus,
        host_bytes=group.memory_bytes or one.host_bytes * group.num_gpus,
        nodes=sum(each.most for each in with_gpus if replace(each, most=group.most) == group),
        source="speeds of an H100 are assumed",
    )


@cache
def this_machine() -> MachineProfile:
    """The profile of this machine: its cores and memory, and the measured speeds of matrix products and copies."""
    import torch

    threads = int(engine_environment(EngineOptions())["OMP_NUM_THREADS"])
    speeds, cores = measured_speeds(threads), len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return MachineProfile(
            name="here",
            cores=cores,
            host_bytes=total_host_bytes(),
            core_flops=speeds["flops"] / threads,
            core_bandwidth=speeds["bandwidth"] / threads,
            host_bandwidth=speeds["bandwidth"] * cores / threads,
            source="measured here",
        )
    properties = torch.cuda.get_device_properties(0)
    return MachineProfile(
        name="here",
        cores=cores,
        host_bytes=total_host_bytes(),
        gpus=torch.cuda.device_count(),
        gpu_bytes=properties.total_memory,
        gpu_flops=speeds["flops"],
        gpu_flops_float32=speeds["flops"] / 8,
        gpu_bandwidth=speeds["bandwidth"],
        link_bandwidth=25e9,
        mapped_bandwidth=4.2e9,
        source="measured here; speeds of links are those of PCIe 4",
    )
