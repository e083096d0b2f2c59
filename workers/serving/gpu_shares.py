"""A GPU that an engine shares with an actor, for gradients or verification: Ray's reservations, and limits of memory.

The engine leaves a share of its GPU's memory free (the option `gpu_share_left`). Without a limit, the actor could also
take memory that the engine reserved but does not use all the time, for example the memory for merging.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from search_spaces.study.engine import EngineOptions
from workers.engines.vllm.memory import CONTEXT_BYTES

__all__ = [
    "SHARED_GPUS",
    "engine_gpus",
    "has_room",
    "has_share",
    "machine_with_share",
    "on_share",
    "whole_gpus",
]

# GPUs that Ray reserves for the actor; the engine reserves the rest. So Ray puts neither two engines nor two such
# actors on one GPU.
SHARED_GPUS = 0.1
# Ray counts parts of GPUs in these units.
UNIT = 1e-4

# The environment variables with settings of PyTorch's memory allocator; the first wins if both are set.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def engine_gpus(options: EngineOptions) -> float:
    """GPUs that Ray reserves for an engine: all of its GPUs, or a part of its only GPU if an actor shares it."""
    return 1 - SHARED_GPUS if options.gpu_share_left else options.tensor_parallel_size


def has_share(free_gpus: float) -> bool:
    """Whether an actor beside an engine finds room among `free_gpus`, the GPUs of a machine that Ray has not reserved.

    These are a sum over all GPUs of the machine.
    """
    return free_gpus >= SHARED_GPUS - UNIT


def whole_gpus(machines: Iterable[Mapping[str, float]]) -> int:
    """Number of GPUs without any engine or actor, from the free resources of each machine, as Ray reports them."""
    return sum(int(free.get("GPU", 0) + UNIT) for free in machines)


def machine_with_share(machines: Mapping[str, Mapping[str, float]]) -> str | None:
    """Node id of a machine on which an engine leaves a part of its GPU; None if there is no such machine.

    `machines` has the free resources of each machine, keyed by node id. An actor that Ray placed on another machine
    would keep a whole GPU from engines.
    """
    return next((node for node, free in machines.items() if has_share(free.get("GPU", 0) % 1)), None)


def has_room(share: float) -> bool:
    """Whether this process, which shares the GPU of an engine, finds `share` of the GPU's memory free.

    It does not if the engine is that of another study and left less.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    return free >= share * total - CONTEXT_BYTES


def on_share(share: float) -> Mapping[str, Any]:
    """Ray options of an actor that shares the GPU of an engine, and takes at most this share of the GPU's memory.

    PyTorch raises an error in the actor if the actor needs more; the CUDA context is not counted. Settings of PyTorch's
    memory allocator in this process's environment also apply to the actor.
    """
    given = next(filter(None, map(os.environ.get, ALLOCATOR)), "").strip(", ")
    settings = ",".join(filter(None, (given, f"per_process_memory_fraction:{share:g}")))
    return {"num_gpus": SHARED_GPUS, "runtime_env": {"env_vars": {ALLOCATOR[0]: settings}}}
