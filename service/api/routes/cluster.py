"""Route that shows administrators the cluster: Ray's nodes, the server's disk, and versions of the parts."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from service.api.dependencies import Context
from service.api.permissions import needs
from service.api.problems import Json
from service.cluster.nodes import NodeUse, nodes_in_use
from service.disk import existing
from service.store.schema import REVISION
from service.threads import Work, in_threads_of
from service.types import Scope

__all__ = ["router"]

router = APIRouter(tags=["operations"])

# Packages whose versions decide what a merge scores, in the order in which they are shown.
PARTS = ("mergesearch", "ray", "vllm", "torch", "transformers", "lm_eval", "fastapi", "sqlalchemy")

Bytes = Annotated[int, Field(ge=0)]


class BytesUsedDocument(TypedDict):
    used: Bytes
    total: Annotated[int, Field(ge=0, description="0 if unknown.")]


class GpuDocument(TypedDict):
    name: str
    percent: Annotated[float | None, Field(description="How busy the GPU is; null if unknown.")]
    memory: BytesUsedDocument


class NodeDocument(TypedDict):
    """A node of the Ray cluster, and how much of its machine's resources is in use."""

    id: str
    host: str
    address: str
    is_head: bool
    is_alive: Annotated[bool, Field(description="Whether Ray can use the node.")]
    num_cpus: int | None
    cpu_percent: Annotated[float | None, Field(description="How busy the processors are; null if unknown.")]
    memory: BytesUsedDocument
    disk: BytesUsedDocument
    gpus: list[GpuDocument]


class DatabaseDocument(TypedDict):
    kind: Annotated[str, Field(description="sqlite or postgresql.")]
    revision: Annotated[str, Field(description="Revision of the database's schema.")]


class ClusterDocument(TypedDict):
    """State of the cluster and the server."""

    not_ready: Annotated[str | None, Field(description="Why no job can continue; null if jobs can.")]
    nodes: Annotated[list[NodeDocument], Field(description="Empty while Ray's dashboard does not answer.")]
    nodes_problem: Annotated[str | None, Field(description="Why the nodes are not known; null if they are.")]
    disk: Annotated[BytesUsedDocument, Field(description="The disk with the server's data directory.")]
    database: DatabaseDocument
    versions: Annotated[dict[str, str], Field(description="Versions of the installed parts, by package.")]


@router.get(
    "/cluster",
    dependencies=[needs(Scope.READ, is_for_admins=True)],
    response_model=None,
    responses={200: {"model": ClusterDocument}},
)
@in_threads_of(Work.RAY)
def get_cluster(services: Context) -> Response:
    """Show the nodes of the Ray cluster and the use of their resources, the server's disk, and versions of the parts.

    On a server with accounts only administrators may read it. The versions are the versions of the packages in the
    server's process.
    """
    nodes, problem = _nodes(services)
    disk = shutil.disk_usage(existing(services.data_dir))
    document: ClusterDocument = {
        "not_ready": services.cluster.not_ready(),
        "nodes": nodes,
        "nodes_problem": problem,
        "disk": {"used": disk.used, "total": disk.total},
        "database": {"kind": services.store.engine.dialect.name, "revision": REVISION},
        "versions": {"python": platform.python_version(), **_versions()},
    }
    return Json(document)


def _nodes(services: Context) -> tuple[list[NodeDocument], str | None]:
    dashboard = services.cluster.dashboard()
    if dashboard is None:
        return [], "the server is not connected to Ray"
    try:
        return [_document(node) for node in nodes_in_use(dashboard)], None
    except ConnectionError as error:
        return [], str(error)


def _document(node: NodeUse) -> NodeDocument:
    return {
        "id": node.id,
        "host": node.host,
        "address": node.address,
        "is_head": node.is_head,
        "is_alive": node.is_alive,
        "num_cpus": node.num_cpus,
        "cpu_percent": node.cpu_percent,
        "memory": {"used": node.memory_used, "total": node.memory_total},
        "disk": {"used": node.disk_used, "total": node.disk_total},
        "gpus": [
            {"name": gpu.name, "percent": gpu.percent, "memory": {"used": gpu.used_bytes, "total": gpu.total_bytes}}
            for gpu in node.gpus
        ],
    }


def _versions() -> dict[str, str]:
    """Versions of the packages in PARTS that are installed."""
    found = {}
    for name in PARTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
