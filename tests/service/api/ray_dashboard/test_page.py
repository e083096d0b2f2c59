"""The page of Ray's dashboard in a browser: it works below /ray/, and its scripts reach nothing else of the server."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from service.api.ray_dashboard.page import policy
from service.api.routes import ray_dashboard
from tests.browser import has_browser, shown
from tests.service.api.harness import ApiServer
from tests.service.api.ray_dashboard.upstream import PAGE, upstream

BUILD = Path(ray.__file__).parent / "dashboard" / "client" / "build"

needs_browser = pytest.mark.skipif(not has_browser(), reason="no Chromium; Debian: apt-get install chromium")

# What a script of the dashboard may try against the API, each in its own way; what it read, or that it did not.
ATTACK = """
const told = {}, root = document.getElementById('root');
const attempt = async (name, action) => {
  try { told[name] = String(await action()).slice(0, 40) } catch (error) { told[name] = 'refused' }
};
const asked = (url) => new Promise((resolve, reject) => {
  const request = new XMLHttpRequest();
  request.onload = () => resolve(request.responseText); request.onerror = reject;
  request.open('GET', url); request.send();
});
const loaded = (tag, name, url) => new Promise((resolve, reject) => {
  const element = document.createElement(tag);
  element.onload = () => resolve('loaded'); element.onerror = reject;
  element[name] = url; document.body.append(element);
});
(async () => {
  await attempt('own', async () => (await fetch('api/jobs/')).text());
  await attempt('fetch', async () => (await fetch('../v1/studies')).text());
  await attempt('climbing', async () => (await fetch('api/../../v1/studies')).text());
  await attempt('escaped', async () => (await fetch('..%2Fv1%2Fstudies')).status);
  await attempt('post', async () => (await fetch('../v1/studies', {method: 'POST', body: '{}'})).text());
  await attempt('xhr', () => asked('../v1/studies'));
  await attempt('events', () => new Promise((resolve, reject) => {
    const source = new EventSource('../v1/studies'); source.onopen = () => resolve('open'); source.onerror = reject;
  }));
  await attempt('import', () => import('../../../docs/swagger-ui-bundle.js'));
  await attempt('image', () => loaded('img', 'src', '../docs/favicon-32x32.png'));
  await attempt('script', () => loaded('script', 'src', '../docs/swagger-ui-bundle.js'));
  await attempt('window', () => window.open('../v1/studies').location.href);
  await attempt('eval', () => eval('"evaluated"'));
  await attempt('worker', () => new Promise((resolve, reject) => {
    const worker = new Worker('static/js/worker.js');
    worker.onmessage = () => resolve('works'); worker.onerror = reject;
  }));
  await attempt('elsewhere', async () => (await fetch('http://127.0.0.1:1/')).text());
  navigator.sendBeacon('../v1/studies', 'x');
  root.textContent = JSON.stringify(told);
})();
"""


def script(text: str) -> Any:
    return lambda _: Response(text, media_type="application/javascript")


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[ApiServer]:
    """A server without accounts, so that requests of the page's scripts are not refused for lack of a token."""
    answers = {"/": lambda _: HTMLResponse(PAGE), "/static/js/main.js": script(ATTACK), "/api/jobs/": ["mine"]}
    answers["/static/js/worker.js"] = script("postMessage('works')")
    with upstream(answers) as found, ApiServer(tmp_path) as server:
        server.cluster.ray = found.dashboard
        yield server


def outcome(server: ApiServer, directory: Path) -> dict[str, str]:
    document = shown(f"{server.url}/ray/", directory)
    (told,) = re.findall(r'<div id="root">(.*?)</div>', document)
    found: dict[str, str] = json.loads(html.unescape(told))
    return found


def num_requests(server: ApiServer, route: str) -> int:
    told = httpx.get(f"{server.url}/metrics").text
    return sum(int(number) for number in re.findall(rf'route="{re.escape(route)}",status="\d+"}} (\d+)', told))


@needs_browser
@pytest.mark.slow
def test_scripts_reach_the_dashboard_alone(attacked: ApiServer, tmp_path: Path) -> None:
    """A script in the page of the dashboard reads what is below /ray/, and reaches nothing else of the server."""
    told = outcome(attacked, tmp_path / "browser")
    assert told.pop("own") == '["mine"]'
    assert told.pop("escaped") == "403"  # it is below /ray/, as long as no proxy resolves it
    assert set(told.values()) == {"refused"}, told
    assert len(told) == 12
    assert num_requests(attacked, "/ray/{path}") > 2
    assert num_requests(attacked, "/v1/studies") == 0


@needs_browser
@pytest.mark.slow
def test_without_the_policy_they_reach_more(
    attacked: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the policy of other pages of the server, or without one, the same script reads studies."""
    monkeypatch.setattr(ray_dashboard, "policy", lambda _: "default-src 'self' 'unsafe-eval'")
    told = outcome(attacked, tmp_path / "browser")
    for way in ("fetch", "climbing", "xhr"):
        assert told[way] == '{"studies":[],"total":0,"next":null}', told
    for way in ("image", "script", "worker"):
        assert told[way] in ("loaded", "works"), told
    assert told["post"].startswith('{"type":"about:blank"')
    assert num_requests(attacked, "/v1/studies") > 3


def test_the_policy_names_every_root() -> None:
    parts = policy(["host:8080/ray/", "https://search.example.org/teams/ray/"]).split("; ")
    assert "connect-src host:8080/ray/ https://search.example.org/teams/ray/" in parts


JOB: dict[str, Any] = {
    "type": "SUBMISSION",
    "submission_id": "sums-0123abcd-1",
    "job_id": None,
    "status": "RUNNING",
    "entrypoint": "/venv/bin/python -m service.jobs.driver --data /data --job 0123abcd",
    "message": "of the job",
    "start_time": 1,
    "end_time": None,
    "metadata": {},
    "runtime_env": {},
    "driver_info": None,
    "driver_node_id": "ab",
}


@needs_browser
@pytest.mark.slow
def test_the_client_of_ray_works_below_a_prefix(tmp_path: Path) -> None:
    """The installed Ray's own client shows a job at the link of the job's document, below a path prefix.

    It asks for no token, shows no metrics, and requests nothing that is refused.
    """

    def static(request: Request) -> Response:
        return FileResponse(BUILD / request.url.path.lstrip("/"))

    files = {f"/{file.relative_to(BUILD)}": static for file in BUILD.rglob("static/**/*") if file.is_file()}
    answers = {
        "/": lambda _: FileResponse(BUILD / "index.html"),
        "/favicon.ico": static,
        "/api/jobs/": [JOB],
        "/api/jobs/sums-0123abcd-1": JOB,
        "/timezone": {"offset": "+00:00", "value": "Etc/UTC"},
        "/nodes": {"result": True, "msg": "", "data": {"summary": []}},
        "/api/v0/logs/file": lambda _: Response("a line that the driver printed"),
        **files,
    }
    with upstream(answers) as found, ApiServer(tmp_path, prefix="/teams") as server:
        server.cluster.ray = found.dashboard
        document = shown(f"{server.url}/teams/ray/#/jobs/sums-0123abcd-1", tmp_path / "browser", budget_ms=15_000)
        refused = re.findall(r'route="/ray/\{path\}",status="(40[1-9])"', httpx.get(f"{server.url}/metrics").text)
    assert "a line that the driver printed" in re.sub(r"<[^>]+>", "", document)
    assert "python -m service.jobs.driver --data /data --job 0123abcd" in document
    assert "Authentication Token" not in document
    assert "Metrics" not in document
    assert set(refused) <= {"404"}  # of what this dashboard does not have
