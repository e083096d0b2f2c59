"""Ray's dashboard under the server's login: requests to Ray, answers to users, and the check of users."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from service.api.limits.headers import HEADERS
from service.api.ray_dashboard import forwarding
from service.api.ray_dashboard.forwarding import DashboardProxy
from service.auth.sessions import COOKIE
from service.cluster.dashboard import RayDashboard
from service.notifications.settings import NotificationSettings
from service.types import Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, stored_study
from tests.service.api.ray_dashboard.upstream import PAGE, TOKEN, Upstream, upstream

JOBS = "/api/jobs/"
LOG = "/api/v0/logs/file"
OF_DRIVER = {"node_id": "ab", "filename": "job-driver-a-0123abcd-1.log"}


def script(_: Request) -> Response:
    return Response("1;", media_type="application/javascript")


ANSWERS: dict[str, Any] = {
    "/": lambda _: HTMLResponse(PAGE),
    "/static/js/main.js": script,
    JOBS: [{"submission_id": "a", "entrypoint": "python x.py --key s3cret"}],
    LOG: lambda _: Response("line\n", media_type="text/html"),
    "/api/v0/logs": {"data": {"result": {"raylet": ["raylet.out"], "driver": ["job-driver-a-0123abcd-1.log"]}}},
}


@pytest.fixture(scope="module")
def ray() -> Iterator[Upstream]:
    with upstream(ANSWERS) as found:
        yield found


@pytest.fixture
def asked(ray: Upstream, server: ApiServer) -> Upstream:
    """The server's dashboard, without requests so far."""
    server.cluster.ray = ray.dashboard
    ray.requests.clear()
    ray.answers = dict(ANSWERS)
    return ray


def test_ray_gets_its_token_and_nothing_of_the_user(http: httpx.Client, asked: Upstream) -> None:
    """Neither the user's token nor cookies nor other headers reach Ray, and nothing of Ray's reaches the user."""
    own = {"Authorization": "Bearer mst_user", "Cookie": f"{COOKIE}=mss_user; other=1", "X-Ray-Authorization": "x"}
    answer = http.get("/ray/api/jobs/?limit=3", headers={**own, "Referer": "http://elsewhere/"})
    assert answer.json() == [{"submission_id": "a", "entrypoint": "python <redacted>"}]
    (request,) = asked.requests
    assert (request.method, request.url.path, request.url.query) == ("GET", JOBS, "limit=3")
    assert set(request.headers) == {"host", "accept", "accept-encoding", "user-agent", "authorization"}
    assert "user" not in str(request.headers.items()).replace("user-agent", "")
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in f"{answer.text}{answer.headers}"
    assert not {"set-cookie", "x-of-ray"} & set(answer.headers)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert TOKEN not in repr(asked.dashboard)


def test_cookies_of_ray_are_not_sent_back(http: httpx.Client, asked: Upstream) -> None:
    for _ in range(2):
        assert http.get("/ray/api/jobs/").status_code == 200
    assert [request.headers.get("cookie") for request in asked.requests] == [None, None]


def test_no_proxy_is_between(http: httpx.Client, asked: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's token is sent to Ray itself, whatever proxy the environment of the server names."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with httpx.Client(trust_env=False) as direct:
        assert direct.get(f"{http.base_url}/ray/api/jobs/").status_code == 200


def test_nothing_that_acts_reaches_ray(http: httpx.Client, asked: Upstream) -> None:
    """Other methods and other paths are refused with a problem document that says what is forwarded."""
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        answer = http.request(method, "/ray/api/jobs/")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    for path in ("worker/traceback?pid=1", "api/v0/delay/5", "api/v0/runtime_envs", "x", "nodes/..%2Ftest%2Fdump"):
        answer = http.get(f"/ray/{path}")
        assert answer.status_code == 403
        assert "is not among the paths of Ray's dashboard that this server forwards" in answer.json()["detail"]
    assert http.get("/ray/api/v0/logs/file", params={"node_id": "a", "filename": "raylet.out"}).status_code == 403
    assert asked.requests == []


def test_a_websocket_is_refused(server: ApiServer, asked: Upstream) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    answer = httpx.get(f"{server.url}/ray/api/jobs/a/logs/tail", headers={**upgrade, **key})
    assert answer.status_code == 403
    assert asked.requests == []


def test_the_page_and_its_files(http: httpx.Client, asked: Upstream) -> None:
    """The page is below /ray/ with a policy for this path only; files may be kept; their types are Ray's."""
    leads = http.get("/ray")
    assert (leads.status_code, leads.headers["location"]) == (307, "ray/")
    page = http.get("/ray/")
    assert page.text == PAGE
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    below = f"127.0.0.1:{http.base_url.port}/ray/"
    assert policy["connect-src"] == policy["script-src"] == below
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["sandbox"] == "allow-scripts allow-same-origin allow-downloads"
    assert page.headers["cache-control"] == "no-store"
    file = http.get("/ray/static/js/main.js")
    assert (file.text, file.headers["content-type"]) == ("1;", "application/javascript")
    assert file.headers["cache-control"] == "private, max-age=86400"
    for answer in (page, file):
        assert not {"set-cookie", "x-of-ray"} & set(answer.headers)
    assert file.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


def test_the_page_needs_a_name_in_host(http: httpx.Client, asked: Upstream) -> None:
    """The policy names the host of the request, which must not end one of its parts."""
    for host in ("localhost:1; script-src *", "[::1]:8080", "localhost:x"):
        answer = http.get("/ray/", headers={"Host": host})
        assert answer.status_code == 403, host
        assert "open the dashboard under a name, such as localhost" in answer.json()["detail"]
    assert http.get("/ray/", headers={"Host": "localhost"}).status_code == 200


def test_the_policy_names_the_public_url(tmp_path: Path, ray: Upstream) -> None:
    """The page may request what is below the public URL, also at a server without an identity provider."""
    settings = NotificationSettings(public_url="https://search.example.org")
    with ApiServer(tmp_path, notifications=settings) as server, httpx.Client(base_url=server.url) as http:
        server.cluster.ray = ray.dashboard
        policy = http.get("/ray/").headers["content-security-policy"]
    assert f"connect-src 127.0.0.1:{http.base_url.port}/ray/ https://search.example.org/ray/;" in policy


def test_below_a_prefix(tmp_path: Path, ray: Upstream) -> None:
    """Below a path prefix, the page, its policy and the links of jobs have the prefix."""
    with ApiServer(tmp_path, prefix="/teams") as server, httpx.Client(base_url=f"{server.url}/teams") as http:
        server.cluster.ray = ray.dashboard
        assert http.get("/ray").headers["location"] == "ray/"
        policy = http.get("/ray/").headers["content-security-policy"]
        assert f"connect-src 127.0.0.1:{http.base_url.port}/teams/ray/;" in policy
        study = stored_study(server.store)
        server.store.open_attempt(study.id)
        job = http.get(f"/v1/studies/{study.id}").json()["job"]
        assert job["dashboard_url"] == f"/teams/ray/#/jobs/{study.name}-1"


def test_the_page_asks_this_server_for_what_ray_would_ask(http: httpx.Client, asked: Upstream) -> None:
    """The page learns that it needs no token, has no Grafana, and cannot profile; Ray is not asked."""
    answers = {
        path: http.get(f"/ray/api/{path}").json()
        for path in ("authentication_mode", "grafana_health", "prometheus_health", "profiling_enabled")
    }
    assert answers["authentication_mode"] == {"authentication_mode": "disabled"}
    assert answers["grafana_health"]["data"]["grafanaHost"] == "DISABLED"
    assert answers["prometheus_health"]["result"] is False
    assert answers["profiling_enabled"]["data"]["profilingEnabled"] is False
    assert http.get("/ray/api/v0/runtime_env_redaction").json()["data"] == {"redactionEnabled": True}
    assert asked.requests == []


def test_logs_are_text(http: httpx.Client, asked: Upstream) -> None:
    """A log is plain text whatever Ray calls it; a list of logs has those that may be read."""
    answer = http.get("/ray/api/v0/logs/file", params=OF_DRIVER)
    assert (answer.text, answer.headers["content-type"]) == ("line\n", "text/plain; charset=utf-8")
    assert http.get("/ray/api/v0/logs?node_id=a").json()["data"]["result"] == {
        "raylet": [],
        "driver": ["job-driver-a-0123abcd-1.log"],
    }


def test_head_has_no_body(http: httpx.Client, asked: Upstream) -> None:
    for path, kind in (("/ray/", "text/html; charset=utf-8"), ("/ray/api/jobs/", "application/json")):
        answer = http.head(path)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"", kind)
    assert http.head("/ray/worker/traceback").status_code == 403
    assert [request.method for request in asked.requests] == ["HEAD", "HEAD"]


def test_without_ray_the_reason_is_told(server: ApiServer, http: httpx.Client) -> None:
    """While the server is not connected to Ray, and while nobody listens there, the answer is 503 with the reason."""
    server.cluster.reason, server.cluster.ray = "Ray is being started", None
    answer = http.get("/ray/")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["detail"] == "Ray's dashboard cannot be reached: Ray is being started"
    server.cluster.ray = RayDashboard("http://127.0.0.1:1")
    answer = http.get("/ray/api/jobs/")
    assert answer.status_code == 503
    assert "Ray's dashboard does not answer: All connection attempts failed" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("status", "told", "because"),
    [
        (401, 503, "does not accept this server's token"),
        (403, 503, "does not accept this server's token"),
        (404, 404, "Ray's dashboard has no such page or object"),
        (400, 422, "refuses the query, with the status 400"),
        (500, 502, "answered with the status 500; the server's log says why"),
        (302, 502, "answered with the status 302"),
    ],
)
def test_errors_of_ray_are_problems(
    http: httpx.Client, asked: Upstream, caplog: pytest.LogCaptureFixture, status: int, told: int, because: str
) -> None:
    """A message of Ray, which may quote files and values, is logged and not sent; redirects are not followed."""

    def failing(_: Request) -> Response:
        if status == 302:
            return RedirectResponse(f"{asked.url}/api/v0/runtime_envs", status_code=302)
        return Response("Traceback: s3cret", status_code=status)

    asked.answers[JOBS] = failing
    answer = http.get("/ray/api/jobs/")
    assert answer.status_code == told
    assert because in answer.json()["detail"]
    assert "s3cret" not in answer.text
    assert ("Traceback: s3cret" in caplog.text) is (status != 302)
    assert len(asked.requests) == 1


def test_data_that_cannot_be_read_are_not_sent(
    http: httpx.Client, asked: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that are no JSON, or too much, are not sent, as secrets in them could not be removed."""
    asked.answers[JOBS] = lambda _: Response("API_KEY=s3cret")
    answer = http.get("/ray/api/jobs/")
    assert (answer.status_code, "s3cret" in answer.text) == (502, False)
    assert "is not JSON, so that it is not sent" in answer.json()["detail"]
    monkeypatch.setattr(forwarding, "MAX_DATA_BYTES", 2**20)
    asked.answers[JOBS] = ["x" * 2**20]
    answer = http.get("/ray/api/jobs/")
    assert answer.status_code == 502
    assert "Ray's answer has more than 1 MiB" in answer.json()["detail"]


def test_a_silent_ray_is_given_up(http: httpx.Client, asked: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard that sends nothing, and one that never ends its data, are given up after a while."""

    async def slowly(_: Request) -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    def silent(_: Request) -> Response:
        async def nothing() -> AsyncIterator[bytes]:
            await asyncio.sleep(3)
            yield b"[]"

        return StreamingResponse(nothing())

    monkeypatch.setattr(forwarding, "SILENCE_S", 0.3)
    asked.answers[JOBS] = silent
    answer = http.get("/ray/api/jobs/")
    assert (answer.status_code, answer.json()["detail"]) == (
        503,
        "Ray's dashboard does not answer: nothing arrived for 0.3 s",
    )
    monkeypatch.setattr(forwarding, "DATA_S", 0.3)
    asked.answers[JOBS] = lambda request: StreamingResponse(slowly(request))
    begun_at = time.monotonic()
    answer = http.get("/ray/api/jobs/")
    assert (answer.status_code, time.monotonic() - begun_at < 2.5) == (503, True)
    assert "no whole answer in 0.3 s" in answer.json()["detail"]


def test_logs_are_streamed(http: httpx.Client, asked: Upstream) -> None:
    """A log arrives while Ray still writes it; when its reader goes, Ray's answer ends."""
    may_end, has_ended = threading.Event(), threading.Event()

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield b"first\n"
            while not may_end.is_set():
                await asyncio.sleep(0.01)
                yield b"x" * 65536
        finally:
            has_ended.set()

    asked.answers[LOG] = lambda _: StreamingResponse(lines())
    with http.stream("GET", "/ray/api/v0/logs/file", params=OF_DRIVER) as answer:
        chunks = answer.iter_bytes(6)
        assert next(chunks) == b"first\n"
        assert not has_ended.is_set()
    assert has_ended.wait(timeout=10)
    may_end.set()


def test_the_answer_ends_if_nobody_waits_for_it(server: ApiServer, asked: Upstream) -> None:
    """If the user has gone before anything is sent, the connection to Ray is free again."""

    async def gone(_: Any) -> None:
        raise OSError("gone")

    async def never() -> Any:
        await asyncio.Event().wait()

    async def ask(proxy: DashboardProxy) -> int:
        response = await proxy.forward("GET", LOG, list(OF_DRIVER.items()))
        with pytest.raises((OSError, ClientDisconnect)):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, never, gone)
        assert proxy._http is not None
        pool = proxy._http._transport._pool  # type: ignore[attr-defined]
        busy = sum(not each.is_idle() and not each.is_closed() for each in pool.connections)
        await proxy.stop()
        return busy

    proxy = DashboardProxy(server.cluster)
    assert asyncio.run(ask(proxy)) == 0


def test_an_answer_that_breaks_off_is_seen(
    http: httpx.Client, asked: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    """If Ray's answer breaks off, so does that of the server: a part of a log is not taken for the whole."""

    async def lines() -> AsyncIterator[bytes]:
        yield b"first\n"
        await asyncio.sleep(0.1)
        raise RuntimeError("killed")

    asked.answers[LOG] = lambda _: StreamingResponse(lines())
    with pytest.raises(httpx.RemoteProtocolError):
        http.get("/ray/api/v0/logs/file", params=OF_DRIVER)
    assert "Ray's dashboard: an answer broke off" in caplog.text


def test_requests_to_ray_are_limited(server: ApiServer, asked: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit requests wait, and are refused with 503 if they wait too long; then there is room again."""
    monkeypatch.setattr(forwarding, "MAX_REQUESTS", 2)
    monkeypatch.setattr(forwarding, "CONNECT_S", 0.3)
    go_on = threading.Event()

    async def waiting() -> AsyncIterator[bytes]:
        yield b"begun\n"
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    asked.answers[LOG] = lambda _: StreamingResponse(waiting())
    statuses: list[int] = []

    def read() -> None:
        statuses.append(httpx.get(f"{server.url}/ray{LOG}", params=OF_DRIVER, timeout=30).status_code)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 10
    while len(asked.requests) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    answer = httpx.get(f"{server.url}/ray{JOBS}")
    assert answer.status_code == 503
    assert "it is busy with 2 other requests of this server" in answer.json()["detail"]
    go_on.set()
    for reader in readers:
        reader.join()
    assert statuses == [200, 200]
    assert httpx.get(f"{server.url}/ray{JOBS}").status_code == 200


# -- who may read it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [False, True])
def test_administrators_read_it_or_every_user(tmp_path: Path, ray: Upstream, is_open: bool) -> None:
    """Administrators may read the dashboard, with --open-dashboard every user; never one without a token or session.

    Documents of jobs have a link to it for those who may read it, and while Ray is there.
    """
    with ApiServer(tmp_path, has_open_dashboard=is_open) as server, httpx.Client(base_url=server.url) as http:
        server.cluster.ray = ray.dashboard
        company = Company.on(server)
        study = company.own(stored_study(server.store))
        server.store.open_attempt(study.id)
        page = f"/ray/#/jobs/{study.name}-1"
        for user in ("root", "owner", "viewer"):
            may = is_open or user == "root"
            cookie = {"Cookie": f"{COOKIE}={company.add_session(user)}"}
            for headers in (bearer(company.tokens[user, Scope.READ]), cookie):
                http.cookies.clear()
                for path in ("/ray/", "/ray/static/js/main.js", "/ray/api/jobs/", "/ray"):
                    for method in ("GET", "HEAD"):
                        if (method, path) != ("HEAD", "/ray"):
                            answer = http.request(method, path, headers=headers)
                            assert (answer.status_code < 400) is may, (user, path)
                            assert may or answer.status_code == 403
                found = http.get(f"/v1/studies/{study.id}", headers=headers).json()["job"]
                listed = http.get("/v1/studies", headers=headers).json()["studies"][0]["job"]
                assert found == listed == {"submission_id": f"{study.name}-1", "dashboard_url": page if may else None}
        refused = http.get("/ray/api/jobs/", headers=bearer(company.tokens["owner", Scope.ADMIN]))
        assert is_open or "with --open-dashboard every user may" in refused.json()["detail"]
        for headers in ({}, bearer("mst_wrong"), {"Cookie": f"{COOKIE}=mss_wrong"}):
            for path in ("/ray", "/ray/", "/ray/api/jobs/", "/ray/api/authentication_mode"):
                assert http.get(path, headers=headers).status_code == 401
        server.cluster.ray = None
        root = bearer(company.tokens["root", Scope.READ])
        assert http.get(f"/v1/studies/{study.id}", headers=root).json()["job"]["dashboard_url"] is None
