"""Calls on nodes of the cluster: results and errors of the function, whatever happens to its Ray Job."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import parse_study
from service.api import preflight_process
from service.api.preflight_process import PreflightProcess, check_request
from service.api.problems import Unavailable
from service.cluster import job_client, node_calls
from service.cluster.node_calls import Node, NodeCalls
from service.disk import artifacts_dir
from service.engine_machines import EngineMachines
from service.jobs.base import RequestContext
from service.jobs.search.kind import SEARCH
from service.store import Store
from service.store.database_url import VARIABLE
from service.worker_process import CallLimits, LimitExceeded
from tests.end_to_end.server import ROOT
from tests.s3_server import S3
from tests.service.api.harness import document, resolved

HERE = Node("c0ffee", "10.0.0.7", 0.0, 4.0, is_head=True)


class Jobs:
    """Stand-in for Ray's client for jobs: jobs are processes of this machine; `logs` are kept by submission id."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entrypoints: list[str] = []
        self.selectors: list[dict[str, str]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.head: dict[str, str] = {}  # further variables of jobs on HERE
        self.is_killing = False

    def submit_job(
        self, *, entrypoint: str, submission_id: str, entrypoint_label_selector: dict[str, str], metadata: Any
    ) -> str:
        self.entrypoints.append(entrypoint)
        self.selectors.append(entrypoint_label_selector)
        program, *arguments = shlex.split(entrypoint)
        assert program == "python"
        with (self.directory / submission_id).open("wb") as log:
            self.processes[submission_id] = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=log,
                stderr=log,
                env=self.environment | (self.head if entrypoint_label_selector["ray.io/node-id"] == HERE.id else {}),
            )
        if self.is_killing:
            self.processes[submission_id].kill()
        return submission_id

    def get_job_info(self, name: str) -> Any:
        code = self.processes[name].poll()
        return SimpleNamespace(status=SimpleNamespace(value={None: "RUNNING", 0: "SUCCEEDED"}.get(code, "FAILED")))

    def get_job_logs(self, name: str) -> str:
        return (self.directory / name).read_text()

    def delete_job(self, name: str) -> bool:
        (self.directory / name).unlink()
        return True

    def stop_job(self, name: str) -> bool:
        self.processes[name].kill()
        return True


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    (tmp_path / "logs").mkdir()
    jobs = Jobs(tmp_path / "logs")
    monkeypatch.setattr(node_calls, "nodes_of", lambda _: (HERE,))
    monkeypatch.setattr(node_calls, "POLL_S", 0.02)
    yield jobs
    for process in jobs.processes.values():
        process.kill()
        process.wait()


@pytest.fixture
def calls(jobs: Jobs, tmp_path: Path) -> NodeCalls:
    return NodeCalls(lambda: (jobs, "http://dashboard"), tmp_path / "data")


def test_a_call_returns_and_raises_what_its_function_does(calls: NodeCalls, jobs: Jobs, tmp_path: Path, s3: S3) -> None:
    told = "result of the call: " + "0" * 64  # as a log may say
    assert asyncio.run(calls.call(print, told, node=HERE, timeout_s=60)) is None
    assert jobs.selectors == [{"ray.io/node-id": "c0ffee"}]
    assert not list(jobs.directory.iterdir()), "a job that told its result leaves nothing in Ray"
    with pytest.raises(InvalidStudy) as raised:
        asyncio.run(calls.call(parse_study, {"name": 3}, node=HERE, timeout_s=60))
    assert {problem.field for problem in raised.value.problems} >= {"name", "models", "objectives"}
    remote = NodeCalls(lambda: (jobs, None), tmp_path / "elsewhere", f"{s3.bucket()}/files")
    assert asyncio.run(remote.call(sorted, [3, 4], reverse=True, node=HERE, timeout_s=60)) == [4, 3]
    assert not (tmp_path / "elsewhere").exists()


def test_a_call_has_limits(calls: NodeCalls) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(calls.call(time.sleep, 600.0, node=HERE, timeout_s=0.5))
    limits = CallLimits(memory_bytes=2**30)
    with pytest.raises(LimitExceeded, match=r"1\.0 GiB of memory"):
        asyncio.run(calls.call(bytearray, 2**31, node=HERE, timeout_s=60, limits=limits))


def test_a_call_without_a_result_is_told(
    calls: NodeCalls, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is killed, never ends or cannot read its call, and an absent cluster, have messages of their own."""
    jobs.is_killing = True
    with pytest.raises(ConnectionError, match=r"on the node 10\.0\.0\.7 has ended without a result \(FAILED\)"):
        asyncio.run(calls.call(len, [], node=HERE, timeout_s=60))
    jobs.is_killing = False
    monkeypatch.setattr(node_calls, "START_GRACE_S", 0.0)
    with pytest.raises(ConnectionError, match="did not end within 0 s"):
        asyncio.run(calls.call(time.sleep, 60.0, node=HERE, timeout_s=0.0))
    with pytest.raises(ConnectionError, match="Ray's dashboard does not answer"):
        asyncio.run(NodeCalls(lambda: (None, None), tmp_path).call(len, [], node=HERE, timeout_s=60))


def test_a_changed_call_is_not_run(calls: NodeCalls, jobs: Jobs, tmp_path: Path, capfd: Any) -> None:
    """Who can write to the files' location cannot run code on nodes by it."""
    submit = jobs.submit_job

    def change(**options: Any) -> str:
        (file,) = (
            path for path in artifacts_dir(tmp_path / "data").rglob("*") if path.is_file() and path.name[0] != "."
        )
        file.write_bytes(file.read_bytes().replace(b"sleep", b"other"))
        return submit(**options)

    jobs.submit_job = change  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="has ended without a result"):
        asyncio.run(calls.call(time.sleep, 0.0, node=HERE, timeout_s=60))
    assert "has changed" in next(jobs.directory.iterdir()).read_text()


def test_all_nodes_of_a_large_cluster_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [
        SimpleNamespace(
            node_id=str(n), node_ip=f"10.0.{n // 250}.{n % 250}", resources_total={"GPU": 8.0}, is_head_node=n == 0
        )
        for n in range(300)
    ]
    monkeypatch.setattr("ray.util.state.list_nodes", lambda *_, limit=100, **__: listed[:limit])
    assert len(node_calls.nodes_of("http://dashboard")) == 300


@pytest.mark.parametrize("is_remote", [True, False], ids=["object store", "directory"])
@pytest.mark.parametrize(
    ("nodes", "place", "machines"),
    [  # nodes: address, GPUs, CPUs, the head first; then where checks run, "" is here; and the GPUs of each machine
        ([("127.0.0.1", 0, 8)], "", []),
        ([("127.0.0.1", 0, 0), ("10.0.0.2", 0, 8)], "", [0]),
        ([("127.0.0.1", 0, 4), ("10.0.0.2", 0, 8)], "", [0, 0]),
        ([("10.0.0.1", 0, 0), ("10.0.0.2", 0, 8)], "0", [0]),
        ([("10.0.0.1", 0, 8), ("10.0.0.2", 1, 8), ("10.0.0.3", 2, 0)], "0", [0, 1, 2]),
        ([("10.0.0.1", 0, 8), ("10.0.0.2", 0, 8), ("10.0.0.2", 0, 4)], "0", [0, 0]),
        ([("10.0.0.1", 0, 0)], "0", []),
    ],
)
def test_jobs_are_checked_on_the_head(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[tuple[str, float, float]],
    place: str,
    machines: list[int],
    is_remote: bool,
) -> None:
    """Drivers check jobs again there, with the same models and database, whether or not other nodes have GPUs."""
    found = tuple(
        Node(str(number), *node, is_head=number == 0, memory_bytes=2**30) for number, node in enumerate(nodes)
    )
    monkeypatch.setattr(node_calls, "nodes_of", lambda _: found)
    calls = NodeCalls(lambda: (object(), None), tmp_path, "s3://bucket/files" if is_remote else None)
    node, known = calls.place()
    assert ("" if node is None else node.id) == place
    assert known == tuple(EngineMachines(number, 2**30) for number in machines)


def test_drivers_know_the_machines_of_their_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver asks the cluster of RAY_ADDRESS for its nodes, which its own machine's GPUs say nothing about."""
    nodes = (Node("0", "127.0.0.1", 0, 4, is_head=True, memory_bytes=2**30), Node("1", "10.0.0.2", 8, 16))
    monkeypatch.setattr(node_calls, "nodes_of", lambda _: nodes)
    monkeypatch.setattr(node_calls, "check_reachable", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert node_calls.cluster_machines() == ()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert node_calls.cluster_machines() == (EngineMachines(0, 2**30), EngineMachines(8, None))

    def unreachable() -> None:
        raise ConnectionError("no Ray answers there")

    monkeypatch.setattr(node_calls, "check_reachable", unreachable)
    assert node_calls.cluster_machines() == ()


@pytest.mark.slow
def test_a_study_that_names_another(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3) -> None:
    """Only the head has the variable with the database, so a check there alone finds the other study."""
    monkeypatch.setattr(node_calls, "nodes_of", lambda _: (HERE, Node("beef", "10.0.0.8", 1.0, 4.0)))
    database = f"sqlite:///{tmp_path / 'server.db'}"
    jobs.head = {VARIABLE: database}
    store = Store(database)
    try:
        study = parse_study(document())
        other = store.create_job(
            kind="search", name=study.name, document=study.canonical(), accepted=resolved(study).to_json()
        ).id
    finally:
        store.close()
    calls = NodeCalls(lambda: (jobs, None), tmp_path / "data", f"{s3.bucket()}/files")
    preflight = PreflightProcess(RequestContext(store_url=database, data_dir=tmp_path / "data"), cluster=calls)

    def problem(study: str) -> str:
        models = {"base": "/models/base", "experts": {"math": {"from_study": {"id": study}}, "text": "/models/text"}}
        body = json.dumps(document(models=models)).encode()
        with pytest.raises(InvalidStudy) as refused:
            asyncio.run(preflight.accept(body, is_json=True, kind=SEARCH))
        (found,) = refused.value.problems
        assert found.field == "models.experts.math.from_study"
        return found.message

    assert "no trial has reached the full budget yet" in problem(other)
    jobs.head = {}
    assert f"set {VARIABLE} to the URL of its database (for jobs: where Ray's head is started)" in problem(other)
    assert not list((tmp_path / "data").glob("*.db")), "a check makes no database"


def test_an_absent_cluster_delays_few_checks(tmp_path: Path) -> None:
    """A server that shares its files with the head checks jobs itself while Ray starts."""
    assert NodeCalls(lambda: (None, None), tmp_path).place() == (None, ())
    with pytest.raises(ConnectionError, match="Ray's dashboard does not answer"):
        NodeCalls(lambda: (None, None), tmp_path, "s3://bucket/files").place()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a dashboard that accepts connections and never answers. The client's timeout is half a second."""
    for module in (job_client, node_calls, preflight_process):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts; nobody reads
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_ray_jobs_are_not_waited_for_without_limit(silent: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"Ray's dashboard did not answer within 0\.5 s"):
        job_client.job_client(silent)
    assert time.monotonic() - started < 30, "most of it to import Ray"


@pytest.mark.usefixtures("silent")
def test_a_call_ends_although_a_request_does_not(calls: NodeCalls, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_calls, "START_GRACE_S", 0.1)
    released = threading.Event()
    monkeypatch.setattr(jobs, "submit_job", lambda **_: released.wait(60))
    started = time.monotonic()
    with pytest.raises(ConnectionError, match=r"the cluster did not answer within 0\.7 s"):
        asyncio.run(_released(calls.call(len, [], node=HERE, timeout_s=0.1), released))
    assert time.monotonic() - started < 10


async def _released(call: Any, released: threading.Event) -> Any:
    """Await `call`, then end the threads that it has left, because the event loop would wait for them."""
    try:
        return await call
    finally:
        released.set()


def test_a_silent_dashboard_takes_few_threads(silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for their turn before the cluster is asked, and are refused after a limit of time."""
    asked: list[str] = []
    released = threading.Event()

    def nodes_of(url: str) -> tuple[Node, ...]:
        asked.append(url)
        released.wait(60)
        return ()

    monkeypatch.setattr(node_calls, "nodes_of", nodes_of)
    monkeypatch.setattr(preflight_process, "ANSWER_S", 0.9)
    cluster = NodeCalls(lambda: (object(), silent), tmp_path, "s3://bucket/files")
    preflight = PreflightProcess(RequestContext(), cluster=cluster)

    async def outcomes() -> list[Any]:
        requests = [
            asyncio.create_task(preflight.accept(b"{}", is_json=True, kind=SEARCH, client=str(number % 4)))
            for number in range(6)
        ]
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert asked == [silent] * 3, "a thread for each turn"
        found = await asyncio.gather(*requests, return_exceptions=True)
        released.set()
        return found

    found = asyncio.run(outcomes())
    assert [type(each) for each in found] == [Unavailable] * 6
    assert "could not be checked on the cluster (Ray's dashboard did not answer within 0.9 s)" in str(found[0])


def test_the_list_of_nodes_has_a_limit_of_time(silent: str, tmp_path: Path) -> None:
    """Ray's own request for its nodes is left after the limit."""
    cluster = NodeCalls(lambda: (object(), silent), tmp_path, "s3://bucket/files")
    with pytest.raises(ConnectionError, match=r"Ray's dashboard did"):
        asyncio.run(preflight_process._place(cluster))


@pytest.mark.slow
def test_requests_are_checked_on_a_node(calls: NodeCalls, jobs: Jobs, tmp_path: Path) -> None:
    """Every problem is reported by its field as on this machine, and no password leaves the server."""
    url = "postgresql://user:s3cr3t@127.0.0.1:1/none"
    context = RequestContext(store_url=url, data_dir=tmp_path / "data")
    preflight = PreflightProcess(context, cluster=calls)

    def outcome(*, is_here: bool = False, **changes: Any) -> Any:
        body = json.dumps(document(**changes)).encode()
        try:
            if is_here:
                return check_request(body, SEARCH.noun, SEARCH.accept, context, is_json=True)
            return asyncio.run(preflight.accept(body, is_json=True, kind=SEARCH))
        except InvalidStudy as error:
            return error.problems

    wrong: dict[str, Any] = {
        "models": {"base": "/models/base", "experts": {"math": "/models/math"}},
        "engine": {"replicas": 10**6},
    }
    try:
        assert outcome() == outcome(is_here=True)
        assert (found := outcome(**wrong)) == outcome(is_here=True, **wrong)
        assert "models" in {problem.field for problem in found}
        assert len(jobs.entrypoints) == 2
        stored = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
        assert not [content for content in stored if b"s3cr3t" in content]
        jobs.is_killing = True
        with pytest.raises(Unavailable, match=r"could not be checked on the cluster \(Ray job .*\); try again"):
            outcome()
    finally:
        preflight.stop()
