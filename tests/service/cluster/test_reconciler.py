"""What a study needs, decided from what SQL and the cluster say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
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
    RayCluster,
    Step,
    next_step,
    submission_id,
)
from service.store import Store
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study

NOW = 1_000_000.0
RESOLVED = resolved_study()
STUDY = JobRecord("0123456789abcdef", "math-code", JobState.RUNNING, {}, RESOLVED, NOW - 5000, submissions=1)


def study(*, submitted_s_ago: float, heard_s_ago: float | None = None) -> JobRecord:
    """Its driver has begun if it was heard of since it was submitted."""
    heartbeat_at = None if heard_s_ago is None else NOW - heard_s_ago
    attempt = int(heard_s_ago is not None and heard_s_ago < submitted_s_ago)
    return replace(STUDY, submitted_at=NOW - submitted_s_ago, heartbeat_at=heartbeat_at, attempt=attempt)


def action(record: JobRecord, job: str | None, consecutive_failures: int = 0) -> str:
    return next_step(record, job, consecutive_failures=consecutive_failures, now=NOW).action


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
    step = next_step(record, "RUNNING", consecutive_failures=0, now=NOW)
    assert (step.action, step.because) == ("stop", f"its driver sent no heartbeat for {LOST_AFTER_S + 1:.0f} s")
    assert action(record, "STOPPED") == "submit"


def test_a_new_driver_is_not_judged_by_the_heartbeat_of_the_one_before() -> None:
    """Between taking the study over and its first heartbeat."""
    for submitted_s_ago in (5, LOST_AFTER_S + 60):
        record = replace(study(submitted_s_ago=submitted_s_ago, heard_s_ago=2 * submitted_s_ago + 60), attempt=1)
        assert action(record, "RUNNING") == "wait"
    record = replace(study(submitted_s_ago=START_GRACE_S + 1, heard_s_ago=START_GRACE_S + 2), attempt=1)
    assert action(record, "RUNNING") == "stop"


def test_a_driver_that_is_alive_and_does_not_get_on_is_stopped_and_replaced() -> None:
    record = replace(study(submitted_s_ago=900, heard_s_ago=2), patience_s=300.0)
    assert action(replace(record, progressed_at=NOW - 301), "RUNNING") == "wait"  # 299 s when it said so
    hung = replace(record, progressed_at=NOW - 303)
    step = next_step(hung, "RUNNING", consecutive_failures=0, now=NOW)
    assert (step.action, step.because) == ("stop", "its driver made no progress for 301 s")
    assert action(hung, "STOPPED") == "submit"
    of_the_one_before = replace(hung, submitted_at=NOW - 1)
    assert action(of_the_one_before, "RUNNING") == "wait"


def test_drivers_that_wait_come_ever_later_and_the_study_is_never_given_up() -> None:
    record = replace(study(submitted_s_ago=250, heard_s_ago=200), reason="the hub cannot be reached")
    for consecutive_waits in (1, 5, 50, 5000):
        step = next_step(
            record,
            "FAILED",
            consecutive_failures=MAX_CONSECUTIVE_FAILURES + 1,
            consecutive_waits=consecutive_waits,
            now=NOW,
        )
        if consecutive_waits > 1:
            assert (step.action, step.until) == ("wait", NOW + 50), consecutive_waits
        assert step.because == "its driver ended (Ray job FAILED): the hub cannot be reached"
    assert action(replace(record, submitted_at=NOW - 301), "FAILED", 0) == "submit"


def test_a_refused_job_is_submitted_again_later_under_its_name() -> None:
    def step(submitted_s_ago: float, consecutive_failures: int) -> Step:
        record = study(submitted_s_ago=submitted_s_ago)
        return next_step(record, None, consecutive_failures=consecutive_failures, now=NOW, refusal="bad name")

    because = "Ray refused its driver's job: bad name"
    assert step(7, 2) == Step("wait", because, until=NOW + 1)
    assert step(9, 2) == Step("submit", because, again=True)
    given_up = step(9, MAX_CONSECUTIVE_FAILURES)
    assert (given_up.action, str(given_up.because).endswith(because)) == ("give up", True)


def test_a_driver_that_never_begins_is_stopped() -> None:
    assert action(study(submitted_s_ago=START_GRACE_S + 1), "PENDING") == "stop"


@pytest.mark.parametrize("job", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_driver_that_ended_before_its_study_is_replaced(job: str) -> None:
    said = "exit code 9"
    step = next_step(study(submitted_s_ago=100, heard_s_ago=1), job, consecutive_failures=0, now=NOW, message=said)
    assert (step.action, step.because) == ("submit", f"its driver ended (Ray job {job}): exit code 9")


def test_what_a_driver_said_itself_counts_unless_another_said_it() -> None:
    record = replace(study(submitted_s_ago=100, heard_s_ago=1), reason="no engine")
    step = next_step(record, "FAILED", consecutive_failures=0, now=NOW, message="exit code 1")
    assert step.because == "its driver ended (Ray job FAILED): no engine"
    step = next_step(replace(record, attempt=0), "FAILED", consecutive_failures=0, now=NOW, message="no agent")
    assert step.because == "its driver ended (Ray job FAILED): no agent"


def test_a_cluster_that_forgot_the_job_gets_it_again() -> None:
    step = next_step(study(submitted_s_ago=100, heard_s_ago=1), None, consecutive_failures=0, now=NOW)
    assert step.action == "submit"
    assert step.because == "the cluster does not know its driver's job: Ray was restarted"


def test_a_submission_that_reached_no_cluster_is_made_again_under_its_name() -> None:
    assert action(study(submitted_s_ago=2), None) == "wait"
    assert next_step(study(submitted_s_ago=20), None, consecutive_failures=1, now=NOW) == Step("submit", again=True)


def test_drivers_that_achieve_nothing_come_ever_later_and_then_no_more() -> None:
    for consecutive_failures in range(MAX_CONSECUTIVE_FAILURES):
        pause_s = BACK_OFF_S * 2**consecutive_failures
        assert action(study(submitted_s_ago=pause_s - 0.5), "FAILED", consecutive_failures) == "wait"
        assert action(study(submitted_s_ago=pause_s + 0.5), "FAILED", consecutive_failures) == "submit"
    record = replace(study(submitted_s_ago=5, heard_s_ago=1), reason="no engine")
    step = next_step(record, "FAILED", consecutive_failures=MAX_CONSECUTIVE_FAILURES, now=NOW)
    assert step.action == "give up"
    assert step.because == (
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


class Dashboard:
    """What a Ray dashboard answers about jobs, over HTTP. Jobs run until the test says otherwise."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}

    @contextmanager
    def serving(self) -> Iterator[str]:
        jobs = self.jobs

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                if self.path == "/api/version":
                    self.answer(200, {"version": "4", "ray_version": "2.60.0", "ray_commit": "x"})
                elif name in jobs:
                    self.answer(200, jobs[name])
                else:
                    self.answer(404, f"Job {name} does not exist")

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = asked["submission_id"]
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
    studies = [store.create_job(name=f"s{i}", document={}, resolved=RESOLVED) for i in range(MAX_RUNNING + 2)]

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
                == ["its driver to start"] * MAX_RUNNING + [f"one of the {MAX_RUNNING} studies before it to end"] * 2
            )
            store.open_attempt(studies[1].id).set_state(JobState.COMPLETE)
            wait_for(MAX_RUNNING + 1)
            assert cluster.waiting_for(store.job(studies[-1].id)) == waiting[-1]
        finally:
            cluster.stop()
            store.close()
