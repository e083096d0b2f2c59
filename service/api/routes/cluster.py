"""Route that shows administrators the cluster: Ray's nodes, the server's disk, and the versions of packages."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.responses import Response

from service.api.dependencies import Context
from service.api.permissions import needs
from service.api.problems import Json
from service.cluster.nodes import NodeUse, nodes_in_use
from service.disk import existing
from service.schemas.api import ClusterDocument, NodeDocument
from service.store.schema import REVISION
from service.threads import Work, in_threads_of
from service.types import Scope

__all__ = ["router"]

router = APIRouter(tags=["operations"])

# Packages whose versions decide what a merge scores, in the order in which they are shown.
PARTS = ("mergesearch", "ray", "vllm", "torch", "transformers", "lm_eval", "fastapi", "sqlalchemy")


@router.get(
    "/cluster",
    dependencies=[needs(Scope.READ, is_for_admins=True)],
    response_model=None,
    responses={200: {"model": ClusterDocument}},
)
@in_threads_of(Work.RAY)
def get_cluster(services: Context) -> Response:
    """Show the nodes of the Ray cluster and the use of their resources, the server's disk, and versions of packages.

    On a server with accounts only administrators may read these data. The versions are of the packages that the server
    itself uses, such as ray and torch.
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
    """Versions of those packages in the constant `PARTS`, such as ray and vllm, that are installed, keyed by name."""
    found = {}
    for name in PARTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
