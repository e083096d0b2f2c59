"""Cores of its machine that a replica's engine may use, divided by the engines that may run there.

The replica counts them itself: the machine from which replicas are deployed often has other cores, such as the head of
a cluster.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from search_spaces.study.engine import EngineOptions
from workers.models.modalities import MODALITIES
from workers.serving.replica import Worker
from workers.types import Family

__all__ = ["make_worker", "num_engines"]

log = logging.getLogger(__name__)


def make_worker(
    family: Family, options: EngineOptions, *, engines: int | None, on_gpus: bool, own: Mapping[str, Any]
) -> Worker:
    """Make the worker of a replica whose engine has its share of this machine's cores as threads.

    - `family`: the base model and its experts
    - `options`: the options of the engine; with the option `threads`, the environment has the number of threads already
    - `engines`: the number of equal engines in the cluster; None means as many as GPUs allow
    - `on_gpus`: whether engines run on GPUs. The workers of modalities that do not run on vLLM are given the device;
      vLLM runs on GPUs if it is built for them
    - `own`: other arguments of the worker's class

    Raises EngineUnavailable if the engine does not start.
    """
    if not options.threads:
        import ray

        here = ray.get_runtime_context().get_node_id()
        shared_by = num_engines(options, engines, on_gpus=on_gpus, here=here, nodes=ray.nodes())
        cores = len(os.sched_getaffinity(0)) - 1
        threads = max(1, cores // (shared_by * options.tensor_parallel_size))
        os.environ["OMP_NUM_THREADS"] = str(threads)  # PyTorch reads it when it is imported, here and in ranks
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(threads)
        log.info("%d engines share %d cores: %d threads for each process of one", shared_by, cores, threads)
    modality = MODALITIES[family.modality]
    device = {} if modality.runs_on_vllm else {"device": "cuda" if on_gpus else "cpu"}
    worker: Worker = modality.worker_class()(family, options, **own, **device)
    return worker


def num_engines(
    options: EngineOptions, engines: int | None, *, on_gpus: bool, here: str, nodes: Sequence[Mapping[str, Any]]
) -> int:
    """Largest number of equal engines that the machine with the node id `here` may run at once.

    `engines` is the number of engines in the cluster; None means as many as GPUs allow. `nodes` are the nodes of the
    cluster, as `ray.nodes` returns them. Engines on GPUs may all be on one machine, as far as its GPUs allow. Serve
    spreads engines on the CPU evenly over the machines.
    """
    alive = [node for node in nodes if node["Alive"]]
    if not on_gpus:
        machines = sum(bool(node["Resources"].get("CPU", 0)) for node in alive)
        return math.ceil((engines or 1) / max(1, machines))
    gpus = sum(int(node["Resources"].get("GPU", 0)) for node in alive if node["NodeID"] == here)
    room = gpus // options.tensor_parallel_size
    return max(1, room if engines is None else min(room, engines))
