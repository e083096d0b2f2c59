"""Requests that a page of another site makes a browser send are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api.app import create_app
from service.types import JobState
from tests.service.api.harness import ApiServer, QuickPreflight, stored_study
from tests.service.http_server import HttpServer

FOREIGN = {"Host": "attacker.example", "Origin": "http://attacker.example"}


def test_a_name_that_was_made_to_point_here_is_refused(http: httpx.Client, server: ApiServer) -> None:
    stored_study(server.store)
    answer = http.get("/v1/studies", headers=FOREIGN)
    assert (answer.status_code, answer.headers["content-type"]) == (421, "application/problem+json")
    assert "Host 'attacker.example': is not a name of this server" in answer.json()["detail"]
    assert "--allow-host" in answer.json()["detail"]
    assert 'route="none",status="421"' in http.get("/metrics").text


def test_a_page_of_another_site_cannot_cancel(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    for origin in ("http://attacker.example", "null", "http://127.0.0.1", "http://localhost:1", "http://[", ""):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        answer = http.post(f"/v1/studies/{record.id}:cancel", headers=headers)
        assert answer.status_code == 403, origin
        assert answer.headers["content-type"] == "application/problem+json"
    assert server.store.job(record.id).state is JobState.CREATED


def test_the_servers_own_page_may_send_requests(http: httpx.Client, server: ApiServer) -> None:
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        authority = f"{host}:{httpx.URL(server.url).port}"
        headers = {"Host": authority, "Origin": f"http://{authority}"}
        assert http.get("/v1/studies", headers=headers).status_code == 200, host


@pytest.mark.parametrize("host", ["127.0.0.1.attacker.example", "localhost.attacker.example", "127.0.0.1@a", ""])
def test_names_that_only_look_alike_are_refused(http: httpx.Client, host: str) -> None:
    assert http.get("/healthz", headers={"Host": host}).status_code in (400, 421)


@pytest.fixture
def behind_proxy(server: ApiServer, tmp_path: Path) -> Iterator[str]:
    """The same application behind a second server, which may also be called by the name studies.example."""
    app = create_app(
        server.store,
        cluster=server.cluster,
        data_dir=tmp_path,
        preflight=QuickPreflight(),
        hosts=("Studies.example",),
    )
    with HttpServer(lambda: app) as second:
        yield second.url


def test_names_that_the_operator_gives_are_accepted(behind_proxy: str) -> None:
    public = {"Origin": "https://studies.example"}
    for host in ("studies.example", "studies.example:8443", "127.0.0.1"):
        assert httpx.get(f"{behind_proxy}/healthz", headers={"Host": host, **public}).status_code == 200
    assert httpx.get(f"{behind_proxy}/healthz", headers=FOREIGN).status_code == 421
