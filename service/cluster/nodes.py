"""Nodes of a Ray cluster, and the use of their processors, memory, disk and GPUs as Ray's dashboard reports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from service.cluster.dashboard import RayDashboard

__all__ = ["GpuUse", "NodeUse", "nodes_in_use"]

# Seconds that Ray's dashboard has to answer.
ANSWER_S = 10.0

MIB = 2**20


@dataclass(frozen=True)
class GpuUse:
    """GPU of a node: its name, how busy it is in percent (None if unknown), and its memory in bytes."""

    name: str
    percent: float | None
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NodeUse:
    """Node of a Ray cluster, and the use of its machine's resources.

    - `id`, `host`, `address`: Ray's id of the node, and the name and network address of its machine
    - `is_head`, `is_alive`: whether the node is the head of the cluster, and whether Ray can use it
    - `num_cpus`, `cpu_percent`: the number of logical processors, and the percentage of them in use; None if unknown
    - `memory_used`, `memory_total`, `disk_used`, `disk_total`: bytes; 0 if Ray does not report them
    - `gpus`: the GPUs of the machine
    """

    id: str
    host: str
    address: str
    is_head: bool
    is_alive: bool
    num_cpus: int | None
    cpu_percent: float | None
    memory_used: int
    memory_total: int
    disk_used: int
    disk_total: int
    gpus: tuple[GpuUse, ...]


def nodes_in_use(dashboard: RayDashboard) -> tuple[NodeUse, ...]:
    """Request the nodes of the cluster from its dashboard: the head first, then living nodes, then dead ones.

    Raises ConnectionError if the dashboard does not answer, or answers something else.
    """
    url = f"{dashboard.url}/nodes"
    try:
        answer = httpx.get(
            url, params={"view": "summary"}, headers=dict(dashboard.headers), timeout=ANSWER_S, trust_env=False
        )
        answer.raise_for_status()
        found = answer.json()["data"]["summary"]
        nodes = [_node(each) for each in found]
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConnectionError(f"Ray's dashboard does not list its nodes: {error!r}") from error
    return tuple(sorted(nodes, key=lambda node: (not node.is_head, not node.is_alive, node.host, node.id)))


def _node(found: Mapping[str, Any]) -> NodeUse:
    raylet: Mapping[str, Any] = found.get("raylet") or {}
    memory: Sequence[float] = found.get("mem") or (0, 0, 0, 0)  # total, available, percent, used
    disk: Mapping[str, Any] = (found.get("disk") or {}).get("/") or {}
    cpus: Sequence[int] = found.get("cpus") or ()
    return NodeUse(
        id=str(raylet.get("nodeId") or ""),
        host=str(found.get("hostname") or raylet.get("nodeManagerHostname") or ""),
        address=str(found.get("ip") or raylet.get("nodeManagerAddress") or ""),
        is_head=bool(raylet.get("isHeadNode")),
        is_alive=raylet.get("state", "ALIVE") == "ALIVE",
        num_cpus=int(cpus[0]) if cpus else None,
        cpu_percent=None if found.get("cpu") is None else float(found["cpu"]),
        memory_used=int(memory[3]),
        memory_total=int(memory[0]),
        disk_used=int(disk.get("used") or 0),
        disk_total=int(disk.get("total") or 0),
        gpus=tuple(_gpu(each) for each in found.get("gpus") or ()),
    )


def _gpu(found: Mapping[str, Any]) -> GpuUse:
    busy = found.get("utilizationGpu")
    return GpuUse(
        name=str(found.get("name") or "GPU"),
        percent=None if busy is None else float(busy),
        used_bytes=int(found.get("memoryUsed") or 0) * MIB,
        total_bytes=int(found.get("memoryTotal") or 0) * MIB,
    )
