"""A GPU that an engine shares with an actor, for gradients or verification: Ray's reservations, and limits of memory.

The engine leaves a share of its GPU's memory free (the option `gpu_share_left`). Without a limit, the actor could also
take memory that the engine reserved but does not use all the time, for example the memory for merging.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from search_spaces.study.engine import EngineOptions

__all__ = ["SHARED_GPUS", "engine_gpus", "has_share", "on_share"]

# GPUs that Ray reserves for the actor; the engine reserves the rest. So Ray puts neither two engines nor two such
# actors on one GPU.
SHARED_GPUS = 0.1
# Ray counts parts of GPUs in these units.
UNIT = 1e-4

# The environment variable with settings of PyTorch's memory allocator.
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def engine_gpus(options: EngineOptions) -> float:
    """GPUs that Ray reserves for an engine: all of its GPUs, or a part of its only GPU if an actor shares it."""
    return 1 - SHARED_GPUS if options.gpu_share_left else options.tensor_parallel_size


def has_share(free_gpus: float) -> bool:
    """Whether `free_gpus`, the GPUs of a machine that Ray has not reserved, have room for an actor beside an engine."""
    return free_gpus >= SHARED_GPUS - UNIT


def on_share(share: float) -> Mapping[str, Any]:
    """Ray options of an actor that shares the GPU of an engine, and takes at most this share of the GPU's memory.

    PyTorch raises an error in the actor if the actor needs more. Settings of PyTorch's memory allocator in this
    process's environment also apply to the actor.
    """
    limit = f"per_process_memory_fraction:{share:g}"
    settings = ",".join(filter(None, (os.environ.get(ALLOCATOR), limit)))
    return {"num_gpus": SHARED_GPUS, "runtime_env": {"env_vars": {ALLOCATOR: settings}}}
