"""Speeds and memory of this machine, or of the machines of a cluster.

Speeds of a CPU are measured in one to two seconds. Speeds of GPUs are those of data sheets, because an engine may use
the GPU. Only a GPU without a data sheet is measured, and only while nothing else uses it.
"""

from __future__ import annotations

import json
import os
import statistics
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

MEASURED_S = 0.4  # seconds for each of the speeds
COPIED = 1 << 25  # elements of float32: larger than caches of processors
LOOPS = 100_000  # iterations of Python's loop in one repetition


def measured_speeds(threads: int, *, device: Literal["cuda", "cpu"]) -> dict[str, float]:
    """Measure the speeds of matrix products, of copies and of Python on `device`, with `threads` threads on a CPU.

    The result contains `flops` (operations per second, in bfloat16 on a GPU, else in float32) and `bandwidth` (bytes
    per second, read and written together), and on a CPU also `loops` (iterations per second of a short loop in Python).
    Each speed is measured repeatedly for MEASURED_S seconds. On a CPU, the mean of all repetitions counts, because a
    virtual machine may never have a processor for itself, but time that other processes of this machine take is left
    out. On a GPU the fastest repetition counts.
    """
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 4096 if device == "cuda" else 512
    seconds = _fastest if device == "cuda" else _mean_alone
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

        speeds = {"flops": 2 * size**3 / seconds(product), "bandwidth": 8 * COPIED / seconds(copy)}
        return speeds if device == "cuda" else speeds | {"loops": LOOPS / seconds(_loop)}
    finally:
        torch.set_num_threads(before)


def _loop() -> int:
    total = 0
    for number in range(LOOPS):
        total += number
    return total


def _fastest(call: Callable[[], object]) -> float:
    """Call `call` repeatedly for MEASURED_S seconds, and return how many seconds the fastest call took.

    A first call, which may be slower, is not measured.
    """
    return min(elapsed for elapsed, _ in _repeated(call))


def _mean_alone(call: Callable[[], object]) -> float:
    """Call `call` repeatedly for MEASURED_S seconds, and return the mean CPU seconds of this thread in a call.

    If `call` has several threads, this thread does an equal share of the work. A first call, which may be slower, is
    not measured.
    """
    return statistics.mean(cpu for _, cpu in _repeated(call))


def _repeated(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Elapsed seconds, and CPU seconds of this thread, of each call in MEASURED_S seconds."""
    call()
    found: list[tuple[float, float]] = []
    until = time.perf_counter() + MEASURED_S
    while True:
        started, cpu = time.perf_counter(), time.thread_time()
        call()
        ended = time.perf_counter()
        found.append((ended - started, time.thread_time() - cpu))
        if ended >= until:
            return found


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
            core_loops=speeds["loops"],
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
