"""Checks of Ray's dashboard behind a server with a real Ray: the data that it shows, and requests that it refuses."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from service.api.ray_dashboard.paths import FORWARDED, Treatment
from tests.browser import has_browser, shown
from tests.end_to_end.server import Server, processes_of_ray
from tests.service.api.ray_dashboard.test_paths import routes

__all__ = ["check_ray_dashboard"]

SECRETS = ("s3cret-of-the-environment", "s3cret-of-the-command")
TYPES = ("text/css", "text/javascript", "application/javascript")
OTHERS_JOB = "of-another-program"


def check_ray_dashboard(server: Server, study: str, directory: Path) -> None:
    """Check that the dashboard shows a study's Ray Job without Ray's token or secrets, and allows no changes."""
    ray_job = server.get(f"/v1/studies/{study}")["job"]
    assert ray_job["dashboard_url"] == f"/ray/#/jobs/{ray_job['submission_id']}"
    with httpx.Client(base_url=f"{server.url}/ray/", timeout=60) as http, _ray(server) as ray:
        assert httpx.get(f"{server.host.dashboard_url}/api/jobs/").status_code == 401, "Ray asks for its token"
        _check_page(http)
        node = _check_data(http, ray_job["submission_id"])
        _check_secrets(http, ray, node)
        _check_nothing_acts(http, ray_job["submission_id"])
    _check_routes(server)
    if has_browser():
        page = shown(server.url + ray_job["dashboard_url"], directory, budget_ms=15_000)
        assert ray_job["submission_id"] in page
        assert "Running entrypoint for job" in re.sub(r"<[^>]+>", "", page), "its log is shown"
        assert "Authentication Token" not in page


def _ray(server: Server) -> httpx.Client:
    """Client of Ray's dashboard itself, with Ray's token."""
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()
    return httpx.Client(base_url=server.host.dashboard_url, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def _check_page(http: httpx.Client) -> None:
    """Check that every file named by the page exists, and has the type that a browser expects."""
    page = http.get("")
    files = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert len(files) == 3
    for file in files:
        answer = http.get(file)
        assert answer.status_code == 200, file
        assert file.endswith(".ico") or answer.headers["content-type"].split(";")[0] in TYPES
    assert http.get("api/authentication_mode").json() == {"authentication_mode": "disabled"}


def _check_data(http: httpx.Client, submission: str) -> str:
    """Check that all requests of the page about a job are answered; returns the id of the node."""

    def data(path: str, **parameters: Any) -> Any:
        answer = http.get(path, params=parameters)
        assert answer.status_code == 200, (path, answer.text)
        seen.add(path)
        return answer.json()

    seen: set[str] = set()
    (summary,) = data("nodes", view="summary")["data"]["summary"]
    node: str = summary["raylet"]["nodeId"]
    jobs = {job["submission_id"]: job for job in data("api/jobs/")}
    job = data(f"api/jobs/{submission}")
    assert job == jobs[submission]
    assert job["entrypoint"] == f"{sys.executable} <redacted>", "tests have a driver of their own"
    actors = data("logical/actors")["data"]["actors"]
    actor = next(name for name, found in actors.items() if found["state"] == "ALIVE")  # of Ray Serve
    data(f"nodes/{node}")
    data(f"logical/actors/{actor}")
    data(f"api/data/datasets/{job['job_id']}")
    for path in ("timezone", "events", "api/cluster_status", "api/serve/applications/", "api/v0/cluster_metadata"):
        data(path)
    of_job = {"filter_keys": "job_id", "filter_predicates": "=", "filter_values": job["job_id"]}
    assert data("api/v0/tasks", detail=1, limit=10_000, **of_job)["data"]["result"]["result"]
    data("api/v0/tasks/summarize", summary_by="lineage", **of_job)
    data("api/v0/tasks/timeline", download=1, job_id=job["job_id"])
    data("api/v0/placement_groups", detail=1, limit=10_000)
    logs = data("api/v0/logs", node_id=node)["data"]["result"]
    names = {name for group in logs.values() for name in group}
    file = f"job-driver-{submission}.log"
    assert file in names
    assert not {"raylet.out", "runtime_env_agent.log", "gcs_server.out"} & names
    log = http.get("api/v0/logs/file", params={"node_id": node, "filename": file, "lines": 50_000})
    assert log.status_code == 200
    assert f"Running entrypoint for job {submission}" in log.text
    assert http.get("api/v0/logs/file", params={"actor_id": actor, "suffix": "err"}).status_code == 200
    # Kubernetes' events are there with KubeRay alone, and runs of Ray Train during one.
    ids = {"node_id": node, "actor_id": actor, "job_or_submission_id": submission, "job_id": job["job_id"]}
    wanted = {path.format(**ids) for path, how in FORWARDED.items() if how is Treatment.DATA}
    assert wanted - {f"/{path}" for path in seen} == {"/api/v0/platform_events", "/api/train/v2/runs/v1"}
    return node


def _check_secrets(http: httpx.Client, ray: httpx.Client, node: str) -> None:
    """Check that the server shows no secret of another program's job, although Ray knows the secrets."""
    environment, command = SECRETS
    job = {"entrypoint": f"{sys.executable} -c pass --password {command}", "submission_id": OTHERS_JOB}
    ray.post("/api/jobs/", json={**job, "runtime_env": {"env_vars": {"API_KEY": environment}}}).raise_for_status()
    deadline = time.monotonic() + 60
    while ray.get(f"/api/jobs/{OTHERS_JOB}").json()["status"] not in ("SUCCEEDED", "FAILED"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    told = ray.get("/api/jobs/").text
    assert environment in told, "without the server, Ray tells it"
    assert command in told
    for path in ("api/jobs/", f"api/jobs/{OTHERS_JOB}", "logical/actors", "api/v0/tasks?detail=1&limit=10000"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert not [secret for secret in SECRETS if secret in answer.text], path
    assert '"API_KEY": "<redacted>"' in http.get(f"api/jobs/{OTHERS_JOB}").text
    for file in ("runtime_env_agent.log", f"job-driver-{OTHERS_JOB}.log"):
        place = {"node_id": node, "filename": file}
        assert [secret for secret in SECRETS if secret in ray.get("/api/v0/logs/file", params=place).text], file
        assert http.get("api/v0/logs/file", params=place).status_code == 403


def _check_nothing_acts(http: httpx.Client, submission: str) -> None:
    for method, path, status in (
        ("DELETE", f"api/jobs/{OTHERS_JOB}", 405),
        ("POST", f"api/jobs/{submission}/stop", 405),
        ("POST", "api/jobs/", 405),
        ("PUT", "api/serve/applications/", 405),
        ("GET", "worker/traceback?pid=1", 403),
        ("GET", "api/v0/runtime_envs", 403),
        ("GET", "test/dump", 403),
    ):
        assert http.request(method, path).status_code == status, (method, path)
    assert http.get(f"api/jobs/{OTHERS_JOB}").status_code == 200
    assert http.get("api/serve/applications/").json()["applications"], "replicas are still deployed"


def _check_routes(server: Server) -> None:
    """Check that the running dashboard has only the routes that `test_paths` finds in its source."""
    (gcs,) = processes_of_ray(server, "gcs_server")
    found = re.search(r"(/\S*/session_[\w-]+)/", " ".join(gcs.cmdline()))
    assert found is not None
    log = (Path(found[1]) / "logs" / "dashboard.log").read_text()
    running = re.findall(r"<ResourceRoute \[(\w+)\] <\w+  (\S+?)(?: ->[^>]*)?>", log)
    assert len(running) > 50
    known = routes() | {("GET", "/static")}
    assert {(method, re.sub(r":[^}]*", "", path)) for method, path in running} <= known
