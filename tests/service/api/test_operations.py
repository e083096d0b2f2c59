"""Routes for operators: liveness, readiness and counts."""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
import threading
import time
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from service.disk import DRAINED
from service.types import JobState
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.api.harness import ApiServer, stored_study


def test_the_cluster_lives_as_long_as_the_application(tmp_path: Path) -> None:
    with ApiServer(tmp_path) as server:
        assert server.cluster.is_running
    assert not server.cluster.is_running


def test_the_server_is_alive_before_it_is_ready(http: httpx.Client, server: ApiServer) -> None:
    server.cluster.reason = "Ray is being started"
    assert http.get("/healthz").json() == {"status": "alive"}
    answer = http.get("/readyz")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"] == "Ray is being started"
    server.cluster.reason = None
    assert http.get("/readyz").json() == {"status": "ready"}


def test_a_database_that_is_away_is_named_and_comes_back(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """While the database is away, requests get 503 with its place and since when, and streams go on afterwards."""
    url = postgresql.migrated()
    told: list[str] = []
    with ApiServer(tmp_path, database=url) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        writer = server.store.open_attempt(stored_study(server.store).id)
        watcher = threading.Thread(target=watch, args=(server.url, writer.job_id, told))
        watcher.start()
        while len(told) < 2:
            time.sleep(0.01)
        postgresql.kill()
        for path in ("/readyz", f"/v1/studies/{writer.job_id}", "/v1/studies"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert re.match(
                r"database: postgresql://tests:\*\*\*@/test_\S+ does not answer since ", answer.json()["detail"]
            )
            assert PASSWORD not in answer.text
        assert http.get("/healthz").json() == {"status": "alive"}
        postgresql.start()
        assert http.get("/readyz").json() == {"status": "ready"}
        writer.set_state(JobState.COMPLETE)
        watcher.join(60)
        assert told == ["created", "attempt", "state", "end"]
    postgresql.drop(url)


def watch(url: str, study: str, told: list[str]) -> None:
    """Add the kinds of all frames of a study's stream to `told`, until the stream ends."""
    with httpx.stream("GET", f"{url}/v1/studies/{study}/events", timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("event: "):
                told.append(line.removeprefix("event: "))


def test_requests_are_counted_by_route(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    for _ in range(2):
        http.get(f"/v1/studies/{record.id}")
    http.get("/nowhere")
    lines = http.get("/metrics").text.splitlines()
    assert {"mergesearch_ready 1", "mergesearch_drained 0"} <= set(lines)
    server.cluster.reason = DRAINED
    drained = http.get("/metrics").text.splitlines()
    server.cluster.reason = None
    assert {"mergesearch_ready 0", "mergesearch_drained 1"} <= set(drained)
    assert 'mergesearch_http_requests_total{method="GET",route="/v1/studies/{study_id}",status="200"} 2' in lines
    assert 'mergesearch_http_requests_total{method="GET",route="none",status="404"} 1' in lines


@pytest.mark.parametrize("method", ["DELETE", "PUT", "PATCH"])
def test_other_methods_are_refused_with_those_there_are(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/studies")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert answer.json()["detail"] == f"{method} is not allowed here; use GET, POST"


def test_a_database_that_does_not_answer_is_unavailable(http: httpx.Client, server: ApiServer) -> None:
    database = server.data_dir / "mergesearch.db"
    server.store.close()
    content = database.read_bytes()
    for name in ("mergesearch.db", "mergesearch.db-wal", "mergesearch.db-shm"):
        (server.data_dir / name).unlink(missing_ok=True)
    database.write_bytes(b"no database at all" * 1000)
    server.store.close()  # also the connections that the server's regular work has opened to the old file meanwhile
    for path in ("/readyz", "/v1/studies"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["detail"] == "the server's database does not respond; the server's log says why"
    server.store.close()
    database.write_bytes(content)


def test_the_docs_are_swagger_ui_from_this_server_alone(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = {urljoin("/docs", link) for link in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
    assert {"/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"} < files
    for file in files:
        answer = http.get(file)
        assert answer.status_code == 200, file
        assert answer.headers["content-type"].split(";")[0] == mimetypes.guess_type(file)[0]
        assert http.get(file, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    (document,) = re.findall(r"url: '([^']+)'", page.text)
    assert http.get(urljoin("/docs", document)).json()["openapi"].startswith("3.1")
    assert "https:" not in page.text
    assert "http:" not in page.text


def test_the_docs_may_load_and_ask_nothing_but_this_server(http: httpx.Client) -> None:
    page = http.get("/docs")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"https?:|\*|unsafe-eval", page.headers["content-security-policy"])
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert '"validatorUrl": null' in script
