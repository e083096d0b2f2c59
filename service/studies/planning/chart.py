"""Values of the Helm chart for the machines of a study, with one group of nodes for its engines."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from service.studies.planning.profiles import PRODUCTS, MachineProfile
from workers.types import Placement

if TYPE_CHECKING:
    from search_spaces.study.file import Study
    from service.studies.planning.placement import StudyPlacement

__all__ = ["chart_values"]

GIB = 1 << 30
# Shares of a node's memory: of a pod, as the system needs some (a pod has more if its study needs more), and of its
# shared memory, which counts towards it. The chart refuses more than half of a pod's memory.
POD_SHARE, SHM_SHARE, MOST_SHM_SHARE = 0.9, 0.3, 0.5


def chart_values(
    study: Study, profile: MachineProfile, placement: StudyPlacement, *, sources_bytes: int
) -> dict[str, Any]:
    """Values of the Helm chart that a study needs, for `helm install --values`.

    The values are the image's variant, the group of nodes for engines, and the size of the cache of models. `profile`
    describes the machines, and `placement` says how the study uses them. The cache has room for one and a half times
    `sources_bytes`, the size of the models. Other values, such as the database, are in the chart's profiles.
    """
    needed = placement.host_bytes if placement.host_bytes <= placement.host_capacity else 0
    memory = max(int(POD_SHARE * profile.host_bytes / GIB), math.ceil(needed / GIB))
    # Engines share the sources that they keep in host memory there.
    shared = math.ceil(1.05 * sources_bytes / GIB) if placement.bank == Placement.HOST else 0
    shm = min(int(MOST_SHM_SHARE * memory), max(int(SHM_SHARE * memory), shared))
    pod = {
        "cpu": str(max(1, profile.cores - 2)),
        "memory": f"{memory}Gi",
        "shm": f"{max(1, shm)}Gi",
    }
    cache = {"cache": {"size": f"{max(20, math.ceil(1.5 * sources_bytes / GIB))}Gi"}}
    if not profile.gpus:
        return {
            "image": {"variant": "cpu"},
            "models": cache,
            "ray": {"cpuGroup": {**pod, "minReplicas": 1, "maxReplicas": max(1, placement.nodes)}},
        }
    group: dict[str, Any] = {
        "name": "engines",
        "gpus": profile.gpus,
        **pod,
        "gpuMemory": f"{profile.gpu_bytes // 10**9}G",
        "minReplicas": 0,
        "maxReplicas": max(1, placement.nodes),
    }
    product = next((name for kind, name in PRODUCTS.items() if re.fullmatch(rf"{kind}(x\d+)?", profile.name)), None)
    if product is not None:
        # The label of NVIDIA's GPU feature discovery.
        group["nodeSelector"] = {"nvidia.com/gpu.product": product.replace(" ", "-")}
    # Engines of several GPUs take long to load.
    idle = {"idleTimeoutSeconds": 3600} if study.engine.tensor_parallel_size > 1 else {}
    return {"image": {"variant": "gpu"}, "models": cache, "ray": {**idle, "gpuGroups": [group]}}
