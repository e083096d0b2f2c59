"""The route of the cluster: nodes as Ray's dashboard tells, the server's disk, versions, and who may read them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.store.schema import REVISION
from service.types import Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer
from tests.service.api.ray_dashboard.upstream import upstream

GIB = 2**30


def node(host: str, *, is_head: bool = False, state: str = "ALIVE", **changes: Any) -> dict[str, Any]:
    """A node in the format of Ray's dashboard at `/nodes?view=summary`."""
    return {
        "hostname": host,
        "ip": f"10.0.0.{len(host)}",
        "cpu": 12.5,
        "cpus": [16, 8],
        "mem": [64 * GIB, 40 * GIB, 37.5, 24 * GIB],
        "disk": {"/": {"total": 100 * GIB, "used": 30 * GIB, "free": 70 * GIB}},
        "gpus": [{"name": "NVIDIA H100", "utilizationGpu": 71, "memoryUsed": 1024, "memoryTotal": 81920}],
        "raylet": {"nodeId": f"id-{host}", "state": state, "isHeadNode": is_head},
        **changes,
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        yield server


def test_nodes_are_those_of_the_dashboard(server: ApiServer) -> None:
    """The head is first, a dead node last; memory, disk and GPUs are in bytes; the request has Ray's token."""
    told = [node("worker"), node("dead", state="DEAD", mem=None, disk=None, gpus=None), node("head", is_head=True)]
    with upstream({"/nodes": {"result": True, "data": {"summary": told}}}) as ray:
        server.cluster.ray = ray.dashboard
        found = httpx.get(f"{server.url}/v1/cluster").json()
        (asked,) = ray.requests
        assert asked.url.query == "view=summary"
    assert found["nodes_problem"] is None
    assert [each["host"] for each in found["nodes"]] == ["head", "worker", "dead"]
    assert found["nodes"][1] == {
        "id": "id-worker",
        "host": "worker",
        "address": "10.0.0.6",
        "is_head": False,
        "is_alive": True,
        "num_cpus": 16,
        "cpu_percent": 12.5,
        "memory": {"used": 24 * GIB, "total": 64 * GIB},
        "disk": {"used": 30 * GIB, "total": 100 * GIB},
        "gpus": [{"name": "NVIDIA H100", "percent": 71.0, "memory": {"used": GIB, "total": 80 * GIB}}],
    }
    assert found["nodes"][2]["memory"] == {"used": 0, "total": 0}
    assert not found["nodes"][2]["is_alive"]


def test_server_and_versions(server: ApiServer) -> None:
    """The disk is that of the data directory; versions are those of the installed packages."""
    server.cluster.ray = None
    found = httpx.get(f"{server.url}/v1/cluster").json()
    assert found["nodes_problem"] == "the server is not connected to Ray"
    assert found["disk"]["total"] == shutil.disk_usage(server.data_dir).total
    assert found["database"] == {"kind": "sqlite", "revision": REVISION}
    assert found["versions"]["ray"] == version("ray")
    assert found["versions"]["mergesearch"] == version("mergesearch")


@pytest.mark.parametrize("answer", [{}, {"data": {"summary": [3]}}, {"data": {"summary": [{"mem": ["a"]}]}}])
def test_an_answer_that_is_not_rays_is_said(server: ApiServer, answer: dict[str, Any]) -> None:
    with upstream({"/nodes": answer}) as ray:
        server.cluster.ray = ray.dashboard
        found = httpx.get(f"{server.url}/v1/cluster").json()
    assert found["nodes"] == []
    assert found["nodes_problem"].startswith("Ray's dashboard does not list its nodes")


def test_only_administrators_read_it(server: ApiServer) -> None:
    company = Company.on(server)
    for user, scope, status in (("owner", Scope.ADMIN, 403), ("root", Scope.READ, 200)):
        headers = bearer(company.tokens[user, scope])
        assert httpx.get(f"{server.url}/v1/cluster", headers=headers).status_code == status
