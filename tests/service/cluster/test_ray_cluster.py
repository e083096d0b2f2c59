"""What the server does with its studies in each round, told by a cluster that answers as Ray's dashboard does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.cluster import reconciler
from service.cluster.reconciler import MAX_CONSECUTIVE_FAILURES, MAX_RUNNING, RayCluster
from service.store import Store
from service.types import JobState
from tests.service.resolved import resolved_study


class Jobs:
    """Ray's client for jobs: `states` by submission id; jobs that begin with `refuses` are refused with `error`."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.submitted: list[str] = []
        self.refuses = "-"
        self.error = "Request failed with status code 500: Traceback: ValueError: bad entrypoint"

    def submit_job(self, *, submission_id: str, **_: Any) -> str:
        self.submitted.append(submission_id)
        if submission_id.startswith(self.refuses):
            raise RuntimeError(self.error)
        self.states[submission_id] = "RUNNING"
        return submission_id

    def get_job_info(self, name: str) -> Any:
        if name not in self.states:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist")
        return SimpleNamespace(status=SimpleNamespace(value=self.states[name]), message=None)

    def stop_job(self, name: str) -> bool:
        self.states[name] = "STOPPED"
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'studies.db'}")
    yield store
    store.close()


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def cluster(store: Store, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(reconciler, "_machines", lambda _: frozenset({"10.0.0.1"}))
    cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
    cluster._client = jobs
    return cluster


def create(store: Store, name: str) -> str:
    return store.create_job(kind="search", name=name, document={}, accepted=resolved_study().to_json()).id


def rounds(cluster: RayCluster, number: int = 1) -> None:
    for _ in range(number):
        cluster._round()


def test_several_machines_need_postgresql(
    cluster: RayCluster, jobs: Jobs, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No driver starts on several machines with SQLite, which is a file of one; drivers start with PostgreSQL."""
    machines = {"10.0.0.1", "10.0.0.2"}
    monkeypatch.setattr(reconciler, "_machines", lambda _: frozenset(machines))
    monkeypatch.setattr(reconciler, "NODES_S", 0.0)
    store = Store(database)
    cluster._store = store
    create(store, "a")
    rounds(cluster)
    if store.is_on_one_machine:
        assert jobs.submitted == []
        reason = cluster.not_ready() or ""
        assert reason.startswith(
            "Ray has 2 machines (10.0.0.1, 10.0.0.2), and SQLite is a file of one: several machines"
        )
        machines.pop()
        rounds(cluster)
    assert cluster.not_ready() is None
    assert len(jobs.submitted) == 1
    store.close()


def test_refused_job_fails_its_study_alone(
    store: Store, jobs: Jobs, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused job fails its own study and delays no other."""
    jobs.refuses = "odd"
    odd, other = create(store, "odd"), create(store, "other")
    rounds(cluster, 5)
    assert cluster.not_ready() is None
    assert [name.partition("-")[0] for name in jobs.submitted] == ["odd", "other"], "tried again only later"
    waiting_for = cluster.waiting_for(store.job(odd))
    assert waiting_for is not None
    assert waiting_for.startswith("its next driver, in ")
    assert waiting_for.endswith("Ray refused its driver's job: " + jobs.error)
    assert store.events(odd)[-1].kind == "job_refused"
    monkeypatch.setattr(reconciler, "BACK_OFF_S", 0.0)
    rounds(cluster, MAX_CONSECUTIVE_FAILURES + 1)
    record = store.job(odd)
    assert record.state is JobState.FAILED
    assert "5 drivers in a row ended without a result" in str(record.reason)
    assert "bad entrypoint" in str(record.reason)
    assert cluster.waiting_for(record) is None
    assert store.job(other).submissions == 1
    jobs.refuses = "-"
    store.resume(odd, reason="resumed by request")
    rounds(cluster)
    assert jobs.states[jobs.submitted[-1]] == "RUNNING"
    assert jobs.submitted[-1].startswith("odd-")


def test_cluster_without_jobs_is_not_ready(
    store: Store, jobs: Jobs, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that accepts no jobs is not ready, and no study fails."""
    monkeypatch.setattr(reconciler, "SUBMISSION_GRACE_S", 0.0)
    jobs.refuses = ""
    jobs.error = "Request failed with status code 500: No available agent to submit job, please try again later."
    study = create(store, "a")
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        rounds(cluster)
        assert "Ray accepts no jobs yet" in str(cluster.not_ready())
        cluster._client = jobs
    assert store.job(study).state is JobState.CREATED
    jobs.refuses = "-"
    rounds(cluster)
    assert cluster.not_ready() is None
    assert list(jobs.states.values()) == ["RUNNING"]


def test_waiting_study_says_for_what(
    store: Store, jobs: Jobs, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting study says for what, and continues however long it waited."""
    study = create(store, "a")
    for number in range(1, 3 * MAX_CONSECUTIVE_FAILURES):
        with monkeypatch.context() as patch:
            patch.setattr(reconciler, "BACK_OFF_S", 0.0)
            rounds(cluster)
        assert len(jobs.states) == number
        store.open_attempt(study).set_waiting("owner/name: the hub cannot be reached")
        jobs.states[jobs.submitted[-1]] = "FAILED"
        rounds(cluster, 3)
        assert len(jobs.states) == number, "the next driver comes later"
        waiting_for = str(cluster.waiting_for(store.job(study)))
        assert waiting_for.startswith("its next driver, in ")
        assert waiting_for.endswith("owner/name: the hub cannot be reached")
    assert store.job(study).state is JobState.STOPPED
    monkeypatch.setattr(reconciler, "BACK_OFF_S", 0.0)
    rounds(cluster)
    writer = store.open_attempt(study)
    writer.heartbeat(wall_clock_s=1.0)
    rounds(cluster)
    assert cluster.waiting_for(store.job(study)) is None
    writer.set_state(JobState.COMPLETE)


def test_a_resumed_study_gets_a_driver_at_once(store: Store, jobs: Jobs, cluster: RayCluster) -> None:
    study = create(store, "a")
    rounds(cluster)
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        writer = store.open_attempt(study)
    writer.set_state(JobState.FAILED, "no result")
    jobs.states[jobs.submitted[-1]] = "SUCCEEDED"
    rounds(cluster, 3)
    assert len(jobs.submitted) == 1
    with store._engine.begin() as connection:  # its driver was submitted long ago
        connection.exec_driver_sql("UPDATE studies SET submitted_at = submitted_at - 600")
    store.resume(study, reason="resumed by request")
    rounds(cluster)
    assert len(jobs.submitted) == 2


def test_waiting_study_takes_no_place(store: Store, jobs: Jobs, cluster: RayCluster) -> None:
    """A limited number of studies runs; one that waits for its next driver does not count."""
    studies = [create(store, f"s{number}") for number in range(MAX_RUNNING + 2)]
    rounds(cluster, 2)
    assert len(jobs.submitted) == MAX_RUNNING
    for study in studies[MAX_RUNNING:]:
        assert cluster.waiting_for(store.job(study)) == f"one of the {MAX_RUNNING} jobs before it to end"
    store.open_attempt(studies[0]).set_waiting("no engine")
    jobs.states[jobs.submitted[0]] = "FAILED"
    rounds(cluster)
    assert len(jobs.submitted) == MAX_RUNNING + 1
    assert jobs.submitted[-1].startswith(f"s{MAX_RUNNING}-")
    store.open_attempt(studies[1]).set_state(JobState.COMPLETE)
    rounds(cluster)
    assert len(jobs.submitted) == MAX_RUNNING + 2


def test_idle_driver_is_replaced(
    store: Store, jobs: Jobs, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver without progress is stopped, and the next one receives the reason."""
    monkeypatch.setattr(reconciler, "BACK_OFF_S", 0.0)
    told: list[str] = []
    monkeypatch.setattr(cluster, "_submit", lambda study, number, because: told.append(str(because)) or True)
    study = create(store, "a")
    store.record_submission(study, 1)
    name = f"a-{study[:8]}-1"
    jobs.states[name] = "RUNNING"
    store.open_attempt(study).heartbeat(wall_clock_s=1.0, idle_s=700.0, patience_s=600.0)
    rounds(cluster)
    assert jobs.states[name] == "STOPPED"
    rounds(cluster)
    assert told[0].startswith("its driver made no progress for 700 s")
