"""Speeds and memory of this machine, or of the machines of a cluster.

Speeds of a CPU are measured in about a second. Speeds of GPUs are those of data sheets, because an engine may use the
GPU. Only a GPU without a data sheet is measured, and only while nothing else uses it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from search_spaces.study.engine import EngineOptions
from service.engine_machines import EngineMachines
from service.studies.planning.profiles import KINDS, PRODUCTS, MachineProfile
from workers.engines.host_memory import total_host_bytes
from workers.engines.vllm.environment import engine_environment
from workers.engines.vllm.startup.gpus import MOSTLY_FREE

__all__ = ["measured_speeds", "profile_for", "speeds_of_idle_gpu", "this_machine"]

MEASURED_S = 0.4  # seconds for each of the two speeds
COPIED = 1 << 25  # elements of float32: larger than caches of processors


def measured_speeds(threads: int, *, device: Literal["cuda", "cpu"]) -> dict[str, float]:
    """Measure the speeds of matrix products and copies on `device`, with `threads` threads on a CPU.

    The result contains `flops` (operations per second, in bfloat16 on a GPU, else in float32) and `bandwidth` (bytes
    per second, read and written together). Each speed is measured repeatedly for MEASURED_S seconds, and the fastest
    repetition counts, because other work slows some repetitions down.
    """
    import torch

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


def speeds_of_idle_gpu(threads: int) -> dict[str, float] | None:
    """Measure the speeds of this machine's first GPU (function `measured_speeds`); None if anything else uses it."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return measured_speeds(threads, device="cuda") if free >= MOSTLY_FREE * total else None


def _speeds_in_subprocess(threads: int) -> dict[str, float] | None:
    """Call `speeds_of_idle_gpu` in another process; return None also if it fails.

    In this process, which may run for as long as a server, a CUDA context would stay on the GPU.
    """
    code = f"import json; from {__name__} import speeds_of_idle_gpu; print(json.dumps(speeds_of_idle_gpu({threads})))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found: dict[str, float] | None = None if answer.returncode else json.loads(answer.stdout)
    return found


@cache
def this_machine() -> MachineProfile:
    """The profile of this machine: its cores and memory, and speeds of matrix products and copies.

    Without GPUs, speeds are measured. The speeds of a GPU are those of its data sheet. If there is none for a GPU of
    this name, they are measured if nothing else uses the GPU, and those of an H100 are assumed otherwise. The profile's
    name is "here" if speeds are measured; otherwise it names the GPU that has them.
    """
    import torch

    threads = int(engine_environment(EngineOptions())["OMP_NUM_THREADS"])
    cores, host_bytes = len(os.sched_getaffinity(0)), total_host_bytes()
    if not torch.cuda.is_available():
        speeds = measured_speeds(threads, device="cpu")
        return MachineProfile(
            name="here",
            cores=cores,
            host_bytes=host_bytes,
            core_flops=speeds["flops"] / threads,
            core_bandwidth=speeds["bandwidth"] / threads,
            host_bandwidth=speeds["bandwidth"] * cores / threads,
            source="measured here",
        )
    properties, gpus = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    with_speeds_of = partial(replace, cores=cores, host_bytes=host_bytes, gpus=gpus, gpu_bytes=properties.total_memory)
    kind = next((kind for kind, name in PRODUCTS.items() if name == properties.name), None)
    if kind is not None:
        return with_speeds_of(KINDS[kind], name=f"{kind}x{gpus}")
    measured = _speeds_in_subprocess(threads)
    if measured is None:
        assumed = "speeds of an H100 are assumed"
        return with_speeds_of(KINDS["h100"], name="this machine, as fast as H100s", source=assumed)
    return MachineProfile(
        name="here",
        cores=cores,
        host_bytes=host_bytes,
        gpus=gpus,
        gpu_bytes=properties.total_memory,
        gpu_flops=measured["flops"],
        gpu_flops_float32=measured["flops"] / 8,
        gpu_bandwidth=measured["bandwidth"],
        link_bandwidth=25e9,
        mapped_bandwidth=4.2e9,
        source="measured here; speeds of links are those of PCIe 4",
    )
