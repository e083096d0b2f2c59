"""Requests that are forwarded to Ray's dashboard. Each route of the installed Ray must be in a list of decisions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from service.api.problems import Refusal
from service.api.ray_dashboard.page import ANSWERS
from service.api.ray_dashboard.paths import FORWARDED, Treatment, target, treatment

DASHBOARD = Path(ray.__file__).parent / "dashboard"

# What the installed Ray answers to GET and this server does not forward, by the reason.
REFUSED = {
    # runs a profiler in a process of a job, which slows it down or stops it
    "profiles": (
        "/memory_profile",
        "/task/cpu_profile",
        "/task/traceback",
        "/worker/cpu_profile",
        "/worker/gpu_profile",
        "/worker/jax_profile",
        "/worker/traceback",
    ),
    # keeps an uploaded package, holds a request open, or calls a function that the operator has named
    "acts": ("/api/packages/{protocol}/{package_name}", "/api/v0/delay/{delay_s}", "/api/component_activities"),
    # environment variables, all that the dashboard knows, files of Ray's own logs, or a log that ends with its job only
    "discloses": (
        "/api/v0/runtime_envs",
        "/test/dump",
        "/logs",
        "/api/jobs/{job_or_submission_id}/logs",
        "/api/jobs/{job_or_submission_id}/logs/tail",
        "/api/job_agent/jobs/{job_or_submission_id}/logs",
        "/api/job_agent/jobs/{job_or_submission_id}/logs/tail",
    ),
    # requested by no page of the dashboard
    "unused": (
        "/api/gcs_healthz",
        "/api/healthz",
        "/api/local_raylet_healthz",
        "/api/prometheus/sd",
        "/api/ray/version",
        "/api/train/v2/runs",
        "/api/v0/actors",
        "/api/v0/actors/summarize",
        "/api/v0/cluster_events",
        "/api/v0/jobs",
        "/api/v0/nodes",
        "/api/v0/objects",
        "/api/v0/objects/summarize",
        "/api/v0/workers",
        "/api/version",
        "/cluster_id",
        "/usage_stats_enabled",
    ),
}

# Ray's templates of which only a part is forwarded.
NARROWED = {"/static": "/static/{folder}/{file}", "/api/v0/logs/{media_type}": "/api/v0/logs/file"}


def routes_of(source: str) -> Iterator[tuple[str, str]]:
    """Method and path of every route that a module of Ray's dashboard declares."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        table, method = node.func.value, node.func.attr
        if isinstance(table, ast.Name) and table.id.lower().endswith(("routes", "routetable")) and method in METHODS:
            assert isinstance(node.args[0], ast.Constant), ast.unparse(node)
            yield method.upper(), str(node.args[0].value)


METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "view", "static", "route")


def routes() -> set[tuple[str, str]]:
    return {route for file in DASHBOARD.rglob("*.py") for route in routes_of(file.read_text())}


def test_every_route_of_ray_is_sorted() -> None:
    """Every route that Ray's dashboard answers is forwarded, answered by this server, or refused for a reason."""
    found = routes()
    assert len(found) > 60
    shown = {NARROWED.get(path, path) for method, path in found if method in ("GET", "STATIC")}
    refused = {path for paths in REFUSED.values() for path in paths}
    assert shown == set(FORWARDED) | set(ANSWERS) | refused
    assert not refused & (set(FORWARDED) | set(ANSWERS))
    others = {method for method, _ in found} - {"GET", "STATIC"}
    assert others == {"POST", "PUT", "DELETE"}, "methods that are never forwarded"


def test_a_new_route_of_ray_is_found() -> None:
    source = '@routes.get("/api/actors/kill", resp_type=1)\nasync def kill(self): pass\nroutes.static("/files", place)'
    assert set(routes_of(source)) == {("GET", "/api/actors/kill"), ("STATIC", "/files")}
    assert not set(routes_of(source)) & routes()


def test_routes_are_declared_in_no_other_way() -> None:
    """Ray adds routes to its applications by the tables only that the other test reads."""
    text = "".join(file.read_text() for file in DASHBOARD.rglob("*.py"))
    assert set(re.findall(r"\.add_(?:get|post|put|delete|patch|head|view|static|route|resource)\(", text)) == set()
    added = re.findall(r"app\.add_routes\((?:routes=)?(\S*?)\)", text.replace("\n", ""))
    assert set(added) == {"routes", "routes.bound_routes(", "SubprocessRouteTable.bound_routes("}


def example(template: str) -> str:
    return re.sub(r"\{\w+\}", "abc", template)


@pytest.mark.parametrize("path", [path for paths in REFUSED.values() for path in paths])
def test_refused_paths_have_no_treatment(path: str) -> None:
    assert treatment(example(path)) is None
    with pytest.raises(Refusal, match="is not among the paths of Ray's dashboard that this server forwards"):
        target(example(path), [])


@pytest.mark.parametrize("path", FORWARDED)
def test_forwarded_paths_have_theirs(path: str) -> None:
    assert treatment(example(path)) is FORWARDED[path]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "//",
        "/api/jobs",
        "/api/jobs//",
        "/api/jobs/..",
        "/api/jobs/a/stop",
        "/nodes/../api/v0/runtime_envs",
        "/nodes/.",
        "/nodes/a\\..\\b",
        "/nodes/a\n",
        "/static/js/../main.js",
        "/static/js/",
        "/static/a/b/c",
        "/api/v0/logs/stream",
        "/API/JOBS/",
        "http://192.0.2.1/nodes",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    assert treatment(path) is None


def test_the_path_is_sent_as_it_was_checked() -> None:
    """Separators of a path's parts are escaped again in the parts, so that Ray reads the same parts."""
    sent = target("/api/jobs/ä ?#%2F..", [("a b", "c&d"), ("a b", "2")])
    assert sent.place == "/api/jobs/%C3%A4%20%3F%23%252F..?a+b=c%26d&a+b=2"
    assert sent.treatment is Treatment.DATA


LOG = "/api/v0/logs/file"


@pytest.mark.parametrize(
    "name",
    [
        "job-driver-sums-0123abcd-1.log",
        "job-driver-check-0123456789abcdef.log",
        f"worker-{'ab' * 28}-01000000-4711.out",
        f"worker-{'ab' * 28}-ffffffff-4711.err",
        "serve/replica_scorer_Scorer_x#1.log",
        "serve/controller_123.log.2",
    ],
)
def test_output_of_jobs_is_shown(name: str) -> None:
    assert target(LOG, [("node_id", "a"), ("filename", name)]).treatment is Treatment.LOG


@pytest.mark.parametrize(
    "name",
    [
        "raylet.out",
        "gcs_server.out",
        "runtime_env_setup-01000000.log",
        "runtime_env_agent.log",
        "dashboard.log",
        "dashboard_agent.log",
        "../auth_token",
        "/etc/passwd",
        "serve/../raylet.log",
        "serve/..log",
        "serve/../../../etc/x.log",
        "job-driver-../raylet.log",
        "job-driver-..log",
        "job-driver-raysubmit_abc.log",
        "job-driver-../x-0123abcd-1.log",
        "old/job-driver-a-0123abcd-1.log",
        "",
    ],
)
def test_logs_of_rays_own_processes_are_refused(name: str) -> None:
    with pytest.raises(Refusal, match="is not a log that this server shows; it shows the output of its own drivers"):
        target(LOG, [("node_id", "a"), ("filename", name)])


def test_a_log_is_named_in_one_way() -> None:
    """A log is asked for by file, actor or task, and by parameters that are known, each once."""
    assert target(LOG, [("actor_id", "ab"), ("suffix", "err"), ("lines", "50000")])
    assert target(LOG, [("task_id", "ab"), ("suffix", "out"), ("filter_ansi_code", "true")])
    with pytest.raises(Refusal, match="the query names no log; it has filename, actor_id or task_id"):
        target(LOG, [("node_id", "a")])
    with pytest.raises(Refusal, match=r"pid: is not accepted; accepted once are actor_id, attempt_number, filename"):
        target(LOG, [("node_id", "a"), ("pid", "1")])
    shown, hidden = ("filename", "job-driver-a-0123abcd-1.log"), ("filename", "raylet.out")
    for twice in ([shown, hidden], [hidden, shown]):
        with pytest.raises(Refusal, match="a parameter: is not accepted; accepted once are"):
            target(LOG, twice)
