"""The reconciler's decision for a job, from the database and the cluster's answers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from service.cluster.reconciler import (
    BACK_OFF_S,
    LOST_AFTER_S,
    MAX_CONSECUTIVE_FAILURES,
    MAX_RUNNING,
    START_GRACE_S,
    Action,
    Decision,
    RayCluster,
    decide,
    submission_id,
)
from service.disk import DRAINED
from service.store import Store
from service.store.steering import SteeringStore
from service.types import RESUMED_BY_REQUEST, JobRecord, JobState, Steering
from tests.postgresql import PASSWORD, PostgreSQL

# Seconds in which a reconciler with `short_rounds` looks at the jobs several times.
SEVERAL_ROUNDS_S = 0.5

NOW = 1_000_000.0
STUDY = JobRecord("0123456789abcdef", "math-code", JobState.RUNNING, {}, {}, NOW - 5000, "search", submissions=1)


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses between looks at the jobs short."""
    monkeypatch.setattr("service.cluster.reconciler.POLL_S", 0.1)


def study(*, submitted_s_ago: float, heard_s_ago: float | None = None) -> JobRecord:
    """A study whose driver was submitted at that time; if `heard_s_ago` is given, the driver has begun."""
    heartbeat_at = None if heard_s_ago is None else NOW - heard_s_ago
    attempt = int(heard_s_ago is not None and heard_s_ago < submitted_s_ago)
    return replace(STUDY, submitted_at=NOW - submitted_s_ago, heartbeat_at=heartbeat_at, attempt=attempt)


def action(record: JobRecord, job: str | None, consecutive_failures: int = 0) -> str:
    return decide(record, job, consecutive_failures=consecutive_failures, now=NOW).action


def test_a_new_study_gets_a_driver() -> None:
    assert action(replace(STUDY, submissions=0), None) == "submit"


@pytest.mark.parametrize("job", ["PENDING", "RUNNING"])
def test_a_driver_that_is_heard_of_is_left_alone(job: str) -> None:
    assert action(study(submitted_s_ago=900, heard_s_ago=3), job) == "wait"


def test_a_driver_that_starts_slowly_is_left_alone() -> None:
    assert action(study(submitted_s_ago=START_GRACE_S - 1), "RUNNING") == "wait"
    assert action(study(submitted_s_ago=100, heard_s_ago=200), "PENDING") == "wait"  # heard of: the one before


def test_a_driver_that_hangs_is_stopped_and_replaced() -> None:
    record = study(submitted_s_ago=900, heard_s_ago=LOST_AFTER_S + 1)
    decision = decide(record, "RUNNING", consecutive_failures=0, now=NOW)
    assert (decision.action, decision.because) == ("stop", f"its driver sent no heartbeat for {LOST_AFTER_S + 1:.0f} s")
    assert action(record, "STOPPED") == "submit"


def test_a_driver_is_not_lost_because_the_database_was_away() -> None:
    """Silence while the database did not answer, or before the server started, does not count."""
    silent = study(submitted_s_ago=1000, heard_s_ago=500)
    assert decide(silent, "RUNNING", consecutive_failures=0, now=NOW).action == "stop"
    back = NOW - LOST_AFTER_S + 1
    assert decide(silent, "RUNNING", consecutive_failures=0, now=NOW, watched_since=back).action == "wait"
    assert decide(silent, "RUNNING", consecutive_failures=0, now=NOW + 2, watched_since=back).action == "stop"


def test_new_driver_has_its_own_heartbeat() -> None:
    """A new driver is not judged by its predecessor's heartbeat.

    Between taking the study over and its first heartbeat.
    """
    for submitted_s_ago in (5, LOST_AFTER_S + 60):
        record = replace(study(submitted_s_ago=submitted_s_ago, heard_s_ago=2 * submitted_s_ago + 60), attempt=1)
        assert action(record, "RUNNING") == "wait"
    record = replace(study(submitted_s_ago=START_GRACE_S + 1, heard_s_ago=START_GRACE_S + 2), attempt=1)
    assert action(record, "RUNNING") == "stop"


def test_stuck_driver_is_replaced() -> None:
    """A living driver without progress is stopped and replaced."""
    record = replace(study(submitted_s_ago=900, heard_s_ago=2), patience_s=300.0)
    assert action(replace(record, progressed_at=NOW - 301), "RUNNING") == "wait"  # 299 s when it said so
    hung = replace(record, progressed_at=NOW - 303)
    decision = decide(hung, "RUNNING", consecutive_failures=0, now=NOW)
    assert (decision.action, decision.because) == ("stop", "its driver made no progress for 301 s")
    assert action(hung, "STOPPED") == "submit"
    of_the_one_before = replace(hung, submitted_at=NOW - 1)
    assert action(of_the_one_before, "RUNNING") == "wait"


def test_waiting_drivers_are_never_given_up() -> None:
    """Drivers that wait start at growing intervals, and the study is never given up."""
    record = replace(study(submitted_s_ago=250, heard_s_ago=200), reason="the hub cannot be reached")
    for consecutive_waits in (1, 5, 50, 5000):
        decision = decide(
            record,
            "FAILED",
            consecutive_failures=MAX_CONSECUTIVE_FAILURES + 1,
            consecutive_waits=consecutive_waits,
            now=NOW,
        )
        if consecutive_waits > 1:
            assert (decision.action, decision.until) == ("wait", NOW + 50), consecutive_waits
        assert decision.because == "its driver ended (Ray job FAILED): the hub cannot be reached"
    assert action(replace(record, submitted_at=NOW - 301), "FAILED", 0) == "submit"


def test_a_refused_job_is_submitted_again_later_under_its_name() -> None:
    def decided(submitted_s_ago: float, consecutive_failures: int) -> Decision:
        record = study(submitted_s_ago=submitted_s_ago)
        return decide(record, None, consecutive_failures=consecutive_failures, now=NOW, refusal="bad name")

    because = "Ray refused its driver's job: bad name"
    assert decided(7, 2) == Decision(Action.WAIT, because, until=NOW + 1)
    assert decided(9, 2) == Decision(Action.SUBMIT, because, again=True)
    given_up = decided(9, MAX_CONSECUTIVE_FAILURES)
    assert (given_up.action, str(given_up.because).endswith(because)) == ("give up", True)


def test_a_driver_that_never_begins_is_stopped() -> None:
    assert action(study(submitted_s_ago=START_GRACE_S + 1), "PENDING") == "stop"


@pytest.mark.parametrize("job", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_driver_that_ended_before_its_study_is_replaced(job: str) -> None:
    said = "exit code 9"
    decision = decide(study(submitted_s_ago=100, heard_s_ago=1), job, consecutive_failures=0, now=NOW, message=said)
    assert (decision.action, decision.because) == ("submit", f"its driver ended (Ray job {job}): exit code 9")


def test_what_a_driver_said_itself_counts_unless_another_said_it() -> None:
    record = replace(study(submitted_s_ago=100, heard_s_ago=1), reason="no engine")
    decision = decide(record, "FAILED", consecutive_failures=0, now=NOW, message="exit code 1")
    assert decision.because == "its driver ended (Ray job FAILED): no engine"
    decision = decide(replace(record, attempt=0), "FAILED", consecutive_failures=0, now=NOW, message="no agent")
    assert decision.because == "its driver ended (Ray job FAILED): no agent"


def test_a_cluster_that_forgot_the_job_gets_it_again() -> None:
    decision = decide(study(submitted_s_ago=100, heard_s_ago=1), None, consecutive_failures=0, now=NOW)
    assert decision.action == "submit"
    assert decision.because == "the cluster does not know its driver's job: Ray was restarted"


def test_lost_submission_is_repeated() -> None:
    """A submission that reached no cluster is repeated under its name."""
    assert action(study(submitted_s_ago=2), None) == "wait"
    assert decide(study(submitted_s_ago=20), None, consecutive_failures=1, now=NOW) == Decision(
        Action.SUBMIT, again=True
    )


def test_useless_drivers_end() -> None:
    """Drivers without results start at growing intervals, then no more."""
    for consecutive_failures in range(MAX_CONSECUTIVE_FAILURES):
        pause_s = BACK_OFF_S * 2**consecutive_failures
        assert action(study(submitted_s_ago=pause_s - 0.5), "FAILED", consecutive_failures) == "wait"
        assert action(study(submitted_s_ago=pause_s + 0.5), "FAILED", consecutive_failures) == "submit"
    record = replace(study(submitted_s_ago=5, heard_s_ago=1), reason="no engine")
    decision = decide(record, "FAILED", consecutive_failures=MAX_CONSECUTIVE_FAILURES, now=NOW)
    assert decision.action == "give up"
    assert decision.because == (
        f"{MAX_CONSECUTIVE_FAILURES} drivers in a row ended without a result; the last one: "
        "its driver ended (Ray job FAILED): no engine"
    )


def test_a_submission_has_one_name_that_starts_with_the_study() -> None:
    assert submission_id(STUDY, 3) == "math-code-01234567-3"


def test_a_study_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store = Store(f"sqlite:///{tmp_path / 'studies.db'}")
    cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
    assert cluster.waiting_for(STUDY) == "Ray: Ray is being started"
    assert cluster.waiting_for(replace(STUDY, state=JobState.CANCELLED)) is None
    cluster._not_ready = None
    assert cluster.waiting_for(STUDY) == "its driver to start"
    assert cluster.waiting_for(replace(STUDY, attempt=1)) is None
    assert cluster.waiting_for(replace(STUDY, attempt=1, waiting_for="an engine to start")) == "an engine to start"
    store.close()


@pytest.mark.usefixtures("short_rounds")
def test_the_reconciler_goes_on_after_the_database_was_away(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the database is away the cluster is not ready for that reason; drivers are not lost by that."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr("service.cluster.reconciler.LOST_AFTER_S", 1.5)
    url, dashboard = postgresql.migrated(), Dashboard()
    store = Store(url)
    job = store.create_job(kind="search", name="s", document={}, accepted={})
    with dashboard.serving() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        cluster.start()
        try:
            wait_until(lambda: submission_id(job, 1) in dashboard.jobs)
            writer = Store(url, waits=True).open_attempt(job.id)
            writer.heartbeat(wall_clock_s=1.0)
            postgresql.kill()
            wait_until(lambda: "does not answer since" in (cluster.not_ready() or ""))
            assert (cluster.waiting_for(job) or "").startswith("database: postgresql://")
            time.sleep(2.0)  # longer than a driver may be silent
            postgresql.start()
            wait_until(lambda: cluster.not_ready() is None)
            for _ in range(3):
                writer.heartbeat(wall_clock_s=2.0)
                time.sleep(0.3)
            assert list(dashboard.jobs) == [submission_id(job, 1)]
            (asked,) = dashboard.asked
            assert PASSWORD not in asked
            assert "postgresql" not in asked
            assert dashboard.stopped == []
            wait_until(lambda: dashboard.stopped == [submission_id(job, 1)])  # silent while the database answers
        finally:
            cluster.stop()
            store.close()
    postgresql.drop(url)


@pytest.mark.slow
@pytest.mark.usefixtures("short_rounds")
def test_two_servers_answer_the_same_and_one_acts(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not lead says the same of queued and refused jobs, and submits only once the leader ended."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    url, dashboard = postgresql.migrated(), Dashboard()
    stores = [Store(url), Store(url)]
    refused = stores[0].create_job(kind="search", name=REFUSED, document={}, accepted={})
    jobs = [
        stores[0].create_job(kind="search", name=f"s{number}", document={}, accepted={})
        for number in range(MAX_RUNNING + 1)
    ]
    with dashboard.serving() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        clusters = [RayCluster(s, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None) for s in stores]
        try:
            clusters[0].start()
            wait_until(clusters[0].is_leader)
            clusters[1].start()

            def answers() -> list[list[str]]:
                found = [[cluster.waiting_for(job) or "" for job in stores[0].jobs()] for cluster in clusters]
                return [[re.sub(r"in \d+ s", "in N s", text) for text in texts] for texts in found]

            wait_until(lambda: len(dashboard.jobs) == MAX_RUNNING)
            wait_until(lambda: answers()[0] == answers()[1] and answers()[0][-1].startswith("one of the"))
            assert answers()[1][0].startswith("its next driver, in N s: Ray refused its driver's job: ")
            assert answers()[1][1:] == ["its driver to start"] * MAX_RUNNING + [
                f"one of the {MAX_RUNNING} jobs before it to end"
            ]
            assert not clusters[1].is_leader()
            asked = [json.loads(text)["submission_id"] for text in dashboard.asked]
            assert len(asked) == len(set(asked))
            clusters[0].stop()
            wait_until(clusters[1].is_leader)
            stores[1].open_attempt(jobs[0].id).set_state(JobState.COMPLETE)
            wait_until(lambda: submission_id(jobs[-1], 1) in dashboard.jobs)
            assert set(dashboard.jobs) == {submission_id(job, 1) for job in jobs}
            assert stores[0].refusal(refused.id)
        finally:
            for cluster in clusters:
                cluster.stop()
            for store in stores:
                store.close()
    postgresql.drop(url)


# The dashboard refuses jobs of this name.
REFUSED = "refused"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Dashboard:
    """Stand-in for Ray's dashboard over HTTP, for jobs. Jobs run until the test changes their state."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses  # every request, because of its token
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.stopped: list[str] = []

    @contextmanager
    def serving(self) -> Iterator[str]:
        jobs, stopped, received, refuses = self.jobs, self.stopped, self.asked, self.refuses

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                if refuses:
                    self.answer(403, "Forbidden: Invalid authentication token")
                elif self.path == "/api/version":
                    self.answer(200, {"version": "4", "ray_version": "2.60.0", "ray_commit": "x"})
                elif self.path.startswith("/api/v0/nodes"):
                    self.answer(200, {"result": True, "msg": "", "data": {"result": {"result": []}}})
                elif name in jobs:
                    self.answer(200, jobs[name])
                else:
                    self.answer(404, f"Job {name} does not exist")

            def do_POST(self) -> None:
                if self.path.endswith("/stop"):
                    stopped.append(self.path.split("/")[-2])
                    jobs[stopped[-1]]["status"] = "STOPPED"
                    self.answer(200, {"stopped": True})
                    return
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.append(json.dumps(asked))
                name = asked["submission_id"]
                if name.startswith(REFUSED):
                    self.answer(400, "no such runtime environment")
                    return
                jobs[name] = {"type": "SUBMISSION", "submission_id": name, "entrypoint": "x", "status": "RUNNING"}
                self.answer(200, {"job_id": name, "submission_id": name})

            def answer(self, status: int, document: Any) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()


@pytest.mark.slow
def test_only_so_many_studies_have_a_driver_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, dashboard = Store(f"sqlite:///{tmp_path / 'studies.db'}"), Dashboard()
    studies = [store.create_job(kind="search", name=f"s{i}", document={}, accepted={}) for i in range(MAX_RUNNING + 2)]

    def wait_for(num_submitted: int) -> None:
        deadline = time.monotonic() + 30
        while len(dashboard.jobs) < num_submitted and time.monotonic() < deadline:
            cluster.wake()
            time.sleep(0.02)
        for _ in range(10):  # and no more
            cluster.wake()
            time.sleep(0.02)
        assert sorted(dashboard.jobs) == [submission_id(study, 1) for study in studies[:num_submitted]]

    with dashboard.serving() as url:
        monkeypatch.setenv("RAY_ADDRESS", url)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        cluster.start()
        try:
            wait_for(MAX_RUNNING)
            waiting = [cluster.waiting_for(study) for study in store.jobs()]
            assert (
                waiting
                == ["its driver to start"] * MAX_RUNNING + [f"one of the {MAX_RUNNING} jobs before it to end"] * 2
            )
            store.open_attempt(studies[1].id).set_state(JobState.COMPLETE)
            wait_for(MAX_RUNNING + 1)
            assert cluster.waiting_for(store.job(studies[-1].id)) == waiting[-1]
        finally:
            cluster.stop()
            store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("short_rounds")
def test_a_drained_server_stops_drivers_and_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each driver is asked to end once; jobs say what they wait for, and get a driver when the drain ends."""
    store, dashboard = Store(f"sqlite:///{tmp_path / 'studies.db'}"), Dashboard()
    job = store.create_job(kind="search", name="s", document={}, accepted={})
    with dashboard.serving() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        cluster.start()
        try:
            first = submission_id(job, 1)
            wait_until(lambda: first in dashboard.jobs)
            store.set_drained(drained=True)
            wait_until(lambda: dashboard.stopped == [first])
            later = store.create_job(kind="search", name="later", document={}, accepted={})
            cluster.wake()
            time.sleep(SEVERAL_ROUNDS_S)
            assert (list(dashboard.jobs), dashboard.stopped) == ([first], [first])
            assert cluster.not_ready() == DRAINED == cluster.waiting_for(later)
            store.set_drained(drained=False)
            wait_until(lambda: cluster.not_ready() is None)
            wait_until(lambda: {submission_id(job, 2), submission_id(later, 1)} <= set(dashboard.jobs))
        finally:
            cluster.stop()
            store.close()


def test_a_wrong_token_is_what_the_log_and_readyz_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray's refusal is logged once, however often the server tries again."""
    store, dashboard = Store(f"sqlite:///{tmp_path / 'studies.db'}"), Dashboard(refuses=True)
    with dashboard.serving() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        for _ in range(3):
            cluster._round()
        reason = cluster.not_ready() or ""
    store.close()
    assert reason.startswith("Ray's dashboard does not answer: ")
    assert "Invalid authentication token" in reason
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"jobs wait: {reason}"
    ]


@pytest.mark.parametrize("job", ["PENDING", "RUNNING"])
def test_the_driver_of_a_job_that_pauses_is_asked_to_end(job: str) -> None:
    """A driver that hangs meanwhile is stopped like any other."""
    pausing = replace(study(submitted_s_ago=900, heard_s_ago=3), is_paused=True)
    assert action(pausing, job) == "interrupt"
    assert action(replace(pausing, heartbeat_at=NOW - LOST_AFTER_S - 1), job) == "stop"


def test_a_driver_from_before_an_edit_is_asked_to_end() -> None:
    edited = replace(study(submitted_s_ago=900, heard_s_ago=3), edited_after=1)
    assert edited.attempt == 1
    assert action(edited, "RUNNING") == "interrupt"
    assert action(replace(edited, attempt=2), "RUNNING") == "wait", "this one has read it"
    starting = replace(edited, submitted_after=1, submitted_at=NOW - 5)
    assert action(starting, "PENDING") == "wait", "this one will read it"
    assert action(edited, "STOPPED") == "submit"


@pytest.mark.parametrize("job", ["STOPPED", "FAILED", "SUCCEEDED", None])
def test_a_paused_job_gets_no_driver(job: str | None) -> None:
    paused = replace(study(submitted_s_ago=900, heard_s_ago=3), is_paused=True)
    assert action(paused, job) == "settle", "its driver has ended without saying so"
    assert action(replace(paused, state=JobState.PAUSED), job) == "wait"
    assert action(replace(paused, state=JobState.PAUSED, submissions=0), None) == "wait"
    assert action(replace(paused, is_paused=False, state=JobState.STOPPED), job) == "submit"


@pytest.mark.slow
@pytest.mark.usefixtures("short_rounds")
def test_a_paused_job_waits_until_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver is asked to end once; its place is free for other jobs; each says what it waits for."""
    store, dashboard = Store(f"sqlite:///{tmp_path / 'studies.db'}"), Dashboard()
    job = store.create_job(kind="search", name="s", document={}, accepted={})
    with dashboard.serving() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        cluster.start()
        try:
            first = submission_id(job, 1)
            wait_until(lambda: first in dashboard.jobs)
            store.open_attempt(job.id, as_driver=True).set_state(JobState.RUNNING)
            assert SteeringStore(store).pause(job.id, steering=Steering("pause")).state is JobState.RUNNING
            assert cluster.waiting_for(store.job(job.id)) == "its driver to end; then it is PAUSED"
            cluster.wake()
            wait_until(lambda: store.job(job.id).state is JobState.PAUSED)
            cluster.wake()
            time.sleep(SEVERAL_ROUNDS_S)
            assert (list(dashboard.jobs), dashboard.stopped) == ([first], [first])
            assert cluster.waiting_for(store.job(job.id)) == "a request to resume it"
            SteeringStore(store).resume(job.id, reason=RESUMED_BY_REQUEST, steering=Steering("resume"))
            cluster.wake()
            wait_until(lambda: submission_id(job, 2) in dashboard.jobs)
        finally:
            cluster.stop()
            store.close()


@pytest.mark.slow
@pytest.mark.usefixtures("short_rounds")
def test_waiting_jobs_start_by_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that have a place keep it, also when a job of a larger priority comes."""
    store, dashboard = Store(f"sqlite:///{tmp_path / 'studies.db'}"), Dashboard()
    jobs = [store.create_job(kind="search", name=f"s{i}", document={}, accepted={}) for i in range(MAX_RUNNING + 2)]

    def submitted() -> set[str]:
        return {name.partition("-")[0] for name in dashboard.jobs}

    with dashboard.serving() as url:
        monkeypatch.setenv("RAY_ADDRESS", url)
        cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
        cluster.start()
        try:
            first = {f"s{i}" for i in range(MAX_RUNNING)}
            wait_until(lambda: submitted() == first)
            urgent = SteeringStore(store).edit_job(
                jobs[-1], {"priority": 5}, document=None, restarts=False, steering=Steering("edit", changes={})
            )
            assert urgent is not None
            cluster.wake()
            time.sleep(SEVERAL_ROUNDS_S)
            assert submitted() == first
            store.open_attempt(jobs[0].id).set_state(JobState.COMPLETE)
            cluster.wake()
            wait_until(lambda: submitted() == first | {urgent.name})
            assert "before it to end" in str(cluster.waiting_for(store.job(jobs[-2].id)))
        finally:
            cluster.stop()
            store.close()
