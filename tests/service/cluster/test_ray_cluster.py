"""The server's work on its studies in each round, with a stand-in for Ray's dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.cluster import queue, reconciler
from service.cluster.reconciler import MAX_CONSECUTIVE_FAILURES, MAX_RUNNING, RayCluster
from service.errors import StaleAttempt
from service.server import page_of
from service.store import JobWriter, Store
from service.store.accounts import AccountStore, Actor
from service.store.steering import SteeringStore
from service.types import Account, EventKind, JobState, Role, Steering
from tests.service.resolved import resolved_study


class Jobs:
    """Stand-in for Ray's client for jobs: `states` by submission id; ids that begin with `refuses` get `error`."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.submitted: list[str] = []
        self.entrypoints: list[str] = []
        self.metadata: dict[str, dict[str, str]] = {}
        self.stopped: list[str] = []
        self.ends_slowly = False  # a stopped job runs until the test says otherwise
        self.refuses = "-"
        self.error = "Request failed with status code 500: Traceback: ValueError: bad entrypoint"

    def submit_job(self, *, submission_id: str, entrypoint: str, metadata: dict[str, str], **_: Any) -> str:
        self.metadata[submission_id] = metadata
        self.submitted.append(submission_id)
        self.entrypoints.append(entrypoint)
        if submission_id.startswith(self.refuses):
            raise RuntimeError(self.error)
        self.states[submission_id] = "RUNNING"
        return submission_id

    def get_job_info(self, name: str) -> Any:
        if name not in self.states:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist")
        return SimpleNamespace(status=SimpleNamespace(value=self.states[name]), message=None)

    def stop_job(self, name: str) -> bool:
        self.stopped.append(name)
        if not self.ends_slowly:
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


def create(store: Store, name: str, *, team: str | None = None) -> str:
    return store.create_job(kind="search", name=name, document={}, accepted=resolved_study().to_json(), team=team).id


def rounds(cluster: RayCluster, number: int = 1) -> None:
    for _ in range(number):
        cluster._round()


@pytest.mark.parametrize("url", [None, "https://merge.example.org/team/"])
def test_ray_jobs_name_the_pages_of_their_jobs(
    store: Store, jobs: Jobs, tmp_path: Path, cluster: RayCluster, url: str | None
) -> None:
    """Where the server's URL is known, the metadata of a Ray Job have the URL of the job's page."""
    del cluster  # which has prepared the environment
    known = RayCluster(
        store,
        tmp_path,
        dashboard_host="127.0.0.1",
        dashboard_port=None,
        page_of=partial(page_of, public_url=url),
    )
    known._client = jobs
    study = create(store, "a")
    rounds(known)
    page = {} if url is None else {"page": f"https://merge.example.org/team/studies/{study}"}
    assert [*jobs.metadata.values()] == [{"job_name": "a", "study_id": study, **page}]
    served = store.create_job(kind="serving", name="c", document={"study": study}, accepted={})
    assert page_of(served, public_url="http://h") == f"http://h/studies/{study}"
    tuned = store.create_job(kind="finetune", name="t", document={}, accepted={})
    assert page_of(tuned, public_url="http://h") == f"http://h/finetunes/{tuned.id}"


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
    SteeringStore(store).resume(odd, reason="resumed by request")
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
    SteeringStore(store).resume(study, reason="resumed by request")
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


def test_some_kinds_of_jobs_take_no_place(
    store: Store, jobs: Jobs, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of a kind without places start beside the others, and leave them their places."""
    monkeypatch.setattr(cluster, "_placeless", frozenset({"serving"}))
    for number in range(2):
        store.create_job(kind="serving", name=f"chat{number}", document={}, accepted={})
    for number in range(MAX_RUNNING + 1):
        create(store, f"s{number}")
    store.create_job(kind="serving", name="late", document={}, accepted={})
    rounds(cluster, 2)
    names = [name.partition("-")[0] for name in jobs.submitted]
    assert sorted(names) == sorted(["chat0", "chat1", "late", *(f"s{number}" for number in range(MAX_RUNNING))])


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


def drive(store: Store, job: str) -> JobWriter:
    """Begin the submitted driver of a job."""
    writer = store.open_attempt(job, as_driver=True)
    writer.set_state(JobState.RUNNING)
    writer.heartbeat(wall_clock_s=1.0)
    return writer


def create_urgent(store: Store) -> str:
    job = create(store, "urgent")
    edited = SteeringStore(store).edit_job(
        store.job(job), {"priority": 5}, document=None, restarts=False, steering=Steering("edit", changes={})
    )
    assert edited is not None
    return job


@pytest.fixture
def single(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """A cluster with one place, where jobs have no minimum working time before a preemption."""
    monkeypatch.setattr(queue, "KEEPS_PLACE_S", 0.0)
    monkeypatch.setattr(reconciler, "BACK_OFF_S", 0.0)
    cluster._places = 1
    return cluster


def test_urgent_job_takes_the_place_of_another(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """The driver is asked to end once; the job waits, and continues with its trials when the urgent one has ended."""
    job = create(store, "a")
    rounds(single)
    writer = drive(store, job)
    urgent = create_urgent(store)
    jobs.ends_slowly = True
    rounds(single, 3)
    assert jobs.stopped == [f"a-{job[:8]}-1"]
    assert single.waiting_for(store.job(urgent)) == "a running job to give up its place"
    assert single.waiting_for(store.job(job)) == "its driver to end; then it waits for a place"
    assert single.queue().running == (job,)
    writer.add_event(EventKind.RUNG, {"trial": 1})  # it may still store what was being scored
    jobs.states[jobs.submitted[-1]] = "STOPPED"
    rounds(single, 2)
    with pytest.raises(StaleAttempt):
        writer.add_event(EventKind.RUNG, {"trial": 2})
    assert [name.partition("-")[0] for name in jobs.submitted] == ["a", "urgent"]
    record = store.job(job)
    assert (record.state, record.reason) == (JobState.STOPPED, "it gave up its place")
    assert single.waiting_for(record) == "one of the 1 jobs before it to end"
    (event,) = (event.payload for event in store.events(job) if event.kind == "preempted")
    assert event == {"reason": "a job of priority 5 needs its place", "priority": 0}
    assert urgent not in str([event.payload for event in store.events(job)])
    (entry,) = AccountStore(store).audit(target=f"job {job}")
    assert (entry.action, entry.origin, entry.after) == ("job.preempt", "queue", {"for": f"job {urgent}"})
    drive(store, urgent).set_state(JobState.COMPLETE)
    rounds(single)
    assert jobs.submitted[-1] == f"a-{job[:8]}-2"
    assert "its driver ended (Ray job STOPPED): it gave up its place" in jobs.entrypoints[-1]


def test_equal_priority_takes_no_place(store: Store, jobs: Jobs, single: RayCluster) -> None:
    job = create(store, "a")
    rounds(single)
    drive(store, job)
    create(store, "b")
    rounds(single, 3)
    assert jobs.stopped == []
    assert len(jobs.submitted) == 1


def test_a_starting_driver_is_not_preempted(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """A job whose driver has not begun could not end between chunks."""
    job = create(store, "a")
    rounds(single)
    create_urgent(store)
    rounds(single, 2)
    assert jobs.stopped == []
    assert not store.job(job).yields


def test_one_job_makes_room_for_an_urgent_one(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """While a job leaves, or pauses, its place is kept for the urgent one, and no other job is preempted."""
    single._places = 2
    first, second = create(store, "a"), create(store, "b")
    rounds(single)
    for job in (first, second):
        drive(store, job)
    jobs.ends_slowly = True
    create_urgent(store)
    rounds(single, 4)
    assert len(jobs.stopped) == 1
    assert [store.job(job).yields for job in (first, second)].count(True) == 1
    create_urgent(store)
    rounds(single, 4)
    assert len(jobs.stopped) == 2


def test_a_job_that_pauses_makes_room_too(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """The place of a job that a user pauses is free soon, so that no other job is preempted."""
    single._places = 2
    first, second = create(store, "a"), create(store, "b")
    rounds(single)
    for job in (first, second):
        drive(store, job)
    jobs.ends_slowly = True
    SteeringStore(store).pause(first, steering=Steering("pause"))
    urgent = create_urgent(store)
    rounds(single, 3)
    assert not store.job(second).yields
    assert single.waiting_for(store.job(urgent)) == "a running job to give up its place"


def test_teams_take_turns_on_one_place(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """Jobs of two teams alternate, although one team has submitted all of its jobs before."""
    accounts = AccountStore(store)
    for team in ("red", "blue"):
        accounts.add_team(team, actor=Actor(None, "tests"))
    for number, team in enumerate(("red", "red", "red", "blue", "blue", "blue")):
        create(store, f"{team}{number}", team=team)
    order = []
    for _ in range(6):
        rounds(single)
        name = jobs.submitted[-1]
        order.append(name[:3])
        job = next(job.id for job in store.jobs() if name.startswith(job.name))
        writer = drive(store, job)
        writer.heartbeat(wall_clock_s=1800.0, num_gpus=1)
        writer.set_state(JobState.COMPLETE)
    assert order == ["red", "blu"] * 3


def test_used_up_hours_stop_a_job_until_they_are_raised(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """The job says which quota it waits for, with both numbers only to its team, and continues with a larger one."""
    accounts = AccountStore(store)
    accounts.add_team("red", actor=Actor(None, "tests"))
    accounts.set_limits("red", {"gpu_hours": 2.0}, actor=Actor(None, "tests"))
    job = create(store, "a", team="red")
    rounds(single)
    drive(store, job).heartbeat(wall_clock_s=7201.0, num_gpus=1)
    rounds(single, 4)
    assert jobs.stopped == jobs.submitted == [f"a-{job[:8]}-1"]
    record = store.job(job)
    assert record.state is JobState.STOPPED
    expected = "quota gpu_hours of team red: 2.0 of 2 are used this month (UTC)"
    member, stranger = Account("m", roles={"red": Role.VIEWER}), Account("s", roles={"blue": Role.ADMIN})
    assert single.waiting_for(record) == single.waiting_for(record, reader=member) == expected
    assert single.waiting_for(record, reader=stranger) == "a quota of its team"
    (event,) = (event.payload for event in store.events(job) if event.kind == "preempted")
    assert event["reason"] == "quota gpu_hours: its team has used up its GPU-hours of this month"
    accounts.set_limits("red", {"gpu_hours": 3.0}, actor=Actor(None, "tests"))
    rounds(single)
    assert jobs.submitted[-1] == f"a-{job[:8]}-2"


def test_used_up_hours_stop_served_studies(store: Store, jobs: Jobs, single: RayCluster) -> None:
    """A served study takes no place, stops at the quota, which its event names, and continues with a larger one."""
    single._placeless = frozenset({"serving"})
    accounts = AccountStore(store)
    accounts.add_team("red", actor=Actor(None, "tests"))
    accounts.set_limits("red", {"gpu_hours": 2.0}, actor=Actor(None, "tests"))
    served = store.create_job(kind="serving", name="s", document={"study": "0"}, accepted={}, team="red").id
    job = create(store, "a")
    rounds(single)
    assert sorted(jobs.submitted) == [f"a-{job[:8]}-1", f"s-{served[:8]}-1"]
    assert single.queue().running == (job,)
    drive(store, served).heartbeat(wall_clock_s=7201.0, num_gpus=1)
    rounds(single, 4)
    assert jobs.stopped == [f"s-{served[:8]}-1"]
    assert len(jobs.submitted) == 2, "the other job runs on, and no driver starts for the served study"
    record = store.job(served)
    assert record.state is JobState.STOPPED
    assert single.waiting_for(record) == "quota gpu_hours of team red: 2.0 of 2 are used this month (UTC)"
    (event,) = (event.payload for event in store.events(served) if event.kind == "preempted")
    assert event["reason"] == "quota gpu_hours: its team has used up its GPU-hours of this month"
    (entry,) = accounts.audit(target=f"job {served}")
    assert (entry.action, entry.after) == ("job.preempt", {"quota": "gpu_hours"})
    accounts.set_limits("red", {"gpu_hours": None}, actor=Actor(None, "tests"))
    rounds(single)
    assert jobs.submitted[-1] == f"s-{served[:8]}-2"


def test_the_queue_tells_when_jobs_are_expected(store: Store, single: RayCluster) -> None:
    """The estimate is the last heartbeat and the time left; without a time left there is none."""
    job, next_job = create(store, "a"), create(store, "b")
    rounds(single)
    drive(store, job)
    rounds(single)
    assert single.queue().estimates == {}
    single._time_left_of = lambda _: 100.0
    rounds(single)
    heard_at = store.job(job).heartbeat_at
    assert heard_at is not None
    assert single.queue().estimates == {next_job: heard_at + 100.0}
