"""Usage, limits, moves and preemptions in the store, on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from service.errors import NotFound
from service.store import Store, schema
from service.store.accounts import AccountStore, Actor
from service.store.connection import transaction
from service.store.steering import SteeringStore
from service.store.usage import DAY_S, HALF_LIFE_DAYS, add_usage, read_usage
from service.types import JobRecord, JobState, Role, Scope, Steering, TeamLimits, TeamUsage

ACTOR = Actor("ann", "192.0.2.1", "mst_abcdef")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@pytest.fixture
def accounts(store: Store) -> AccountStore:
    accounts = AccountStore(store)
    accounts.add_team("red", actor=ACTOR)
    return accounts


def create(store: Store, name: str = "s", team: str | None = "red") -> JobRecord:
    return store.create_job(kind="search", name=name, document={}, accepted={}, team=team)


def preempt(accounts: AccountStore, job: JobRecord, because: str) -> bool:
    return accounts.preempt(job, because, actor=ACTOR, after={"for": "job x"})


def test_heartbeats_add_to_the_usage_of_the_team(store: Store) -> None:
    """Seconds since the last heartbeat count, times the GPUs; what a driver takes back is taken back."""
    writer = store.open_attempt(create(store).id)
    writer.heartbeat(wall_clock_s=3600.0, num_gpus=2)
    writer.heartbeat(wall_clock_s=7200.0, num_gpus=1)
    assert store.team_usage() == {"red": TeamUsage(3.0, 3.0)}
    writer.heartbeat(wall_clock_s=5400.0, num_gpus=1)
    other = store.open_attempt(create(store, "alone", None).id)
    other.heartbeat(wall_clock_s=1800.0, num_gpus=1)
    writer.heartbeat(wall_clock_s=9000.0)  # a run of a command counts for nobody
    assert store.team_usage() == {"red": TeamUsage(2.5, 2.5), None: TeamUsage(0.5, 0.5)}


def test_usage_survives_jobs_and_teams(store: Store, accounts: AccountStore) -> None:
    job = create(store)
    writer = store.open_attempt(job.id)
    writer.heartbeat(wall_clock_s=3600.0, num_gpus=1)
    writer.set_state(JobState.COMPLETE)
    store.delete_job(job.id)
    accounts.remove_team("red", actor=ACTOR)
    assert store.team_usage() == {"red": TeamUsage(1.0, 1.0)}


def test_old_usage_counts_less(store: Store) -> None:
    """An hour counts half after the half-life for shares, and wholly until the end of its month for quotas."""
    now = datetime(2026, 3, 20, 12, tzinfo=UTC).timestamp()
    first = int(datetime(2026, 3, 1, tzinfo=UTC).timestamp() // DAY_S)
    today = int(now // DAY_S)
    rows = {"a": today, "b": today - int(HALF_LIFE_DAYS), "c": first, "d": first - 1, "e": today - 100}
    with transaction(store.engine) as connection:
        table = sa.insert(schema.team_usage)
        connection.execute(table, [{"team": team, "day": day, "gpu_s": 7200.0} for team, day in rows.items()])
    with store.reading() as connection:
        found = read_usage(connection, now=now)
    assert {team: usage.month for team, usage in found.items()} == {"a": 2.0, "b": 2.0, "c": 2.0, "d": 0.0}
    assert (found["a"].recent, found["b"].recent) == (2.0, 1.0)
    assert 0 < found["d"].recent < found["c"].recent < 1


def test_drivers_of_a_team_add_usage_at_once(store: Store) -> None:
    """Drivers whose heartbeats come at the same time lose no hours."""

    def beat() -> None:
        for _ in range(20):
            with transaction(store.engine) as connection:
                add_usage(connection, "red", 36.0)

    threads = [threading.Thread(target=beat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.team_usage()["red"].month == pytest.approx(0.8)


def test_limits_are_stored_with_an_audit_entry(accounts: AccountStore) -> None:
    """A change keeps other limits, None lifts a quota, and the audit log has the limits before and after."""
    assert accounts.team("red").limits == TeamLimits()
    accounts.set_limits("red", {"weight": 2.5, "gpu_hours": 500.0, "artifact_bytes": 2**40}, actor=ACTOR)
    changed = accounts.set_limits("red", {"gpu_hours": None, "max_running": 2}, actor=ACTOR)
    assert changed.limits == TeamLimits(weight=2.5, max_running=2, artifact_bytes=2**40)
    assert accounts.limits() == {"red": changed.limits}
    accounts.set_limits("red", {"max_running": 2}, actor=ACTOR)  # no change, no entry
    entries = [entry for entry in accounts.audit() if entry.action == "team.limit"]
    assert len(entries) == 2
    assert entries[1].before is not None
    assert entries[1].after is not None
    assert entries[1].before["limits"]["gpu_hours"] == 500.0
    assert entries[1].after["limits"] == {
        "weight": 2.5,
        "max_running": 2,
        "max_replicas": None,
        "max_served": 4,
        "gpu_hours": None,
        "artifact_bytes": 2**40,
        "export_bytes": None,
        "requests_per_minute": None,
    }
    with pytest.raises(NotFound, match="team 'blue': there is no such team"):
        accounts.set_limits("blue", {"weight": 1.0}, actor=ACTOR)


def test_a_token_knows_the_rates_of_its_teams(accounts: AccountStore) -> None:
    accounts.add_user("ann", is_admin=True, actor=ACTOR)
    accounts.add_team("blue", actor=ACTOR)
    for team in ("red", "blue"):
        accounts.set_role(team, "ann", Role.MEMBER, actor=ACTOR)
    accounts.set_limits("red", {"requests_per_minute": 60}, actor=ACTOR)
    token = {"name": "t", "prefix": "mst_", "scope": Scope.READ, "lifetime_s": None}
    accounts.add_token("ann", digest="d" * 64, actor=ACTOR, **token)  # type: ignore[arg-type]
    accounts.add_session("ann", digest="e" * 64, lifetime_s=99.0, idle_s=99.0, actor=ACTOR)
    by_token, by_session = accounts.find_token("d" * 64), accounts.find_session("e" * 64, idle_s=99.0)
    assert by_token is not None
    assert by_session is not None
    assert by_token[1] == by_session[1]
    assert (by_token[1].roles, by_token[1].rates) == ({"red": Role.MEMBER, "blue": Role.MEMBER}, {"red": 60})


def test_a_move_holds_until_the_job_starts(store: Store, accounts: AccountStore) -> None:
    """The move has an event with who and why, which does not name the other job, and an audit entry that does."""
    job, other = create(store), create(store, "other")
    steering = Steering("move", "ann", "a deadline")
    accounts.move_job(job.id, other.id, actor=ACTOR, steering=steering)
    moved = accounts.move_job(job.id, None, actor=ACTOR, steering=steering)
    assert (moved.moved_before, moved.moved_at is not None) == ("", True)
    events = [event.payload for event in store.events(job.id) if event.kind == "steered"]
    assert events == [{"action": "move", "user": "ann", "reason": "a deadline"}] * 2
    entries = [entry for entry in accounts.audit() if entry.action == "job.move"]
    assert [(entry.target, entry.before, entry.after) for entry in entries] == [
        (f"job {job.id}", {"before": None}, {"before": other.id}),
        (f"job {job.id}", {"before": other.id}, {"before": ""}),
    ]
    store.record_submission(job.id, 1)
    assert (store.job(job.id).moved_before, store.job(job.id).moved_at) == (None, None)
    with pytest.raises(NotFound):
        accounts.move_job("x", None, actor=ACTOR, steering=steering)


def test_a_job_is_asked_once_to_make_room(store: Store, accounts: AccountStore) -> None:
    """Its driver may store what it has; then the job is STOPPED, and the driver can write no more."""
    requests = SteeringStore(store)
    job = create(store)
    store.record_submission(job.id, 1)
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.RUNNING)
    job = store.job(job.id)
    assert not preempt(accounts, replace(job, attempt=7), "of another attempt")
    assert preempt(accounts, job, "a job of priority 5 needs its place")
    assert store.job(job.id).yields
    assert not preempt(accounts, job, "again")
    writer.add_event("chunk", {})
    requests.settle(job.id)
    settled = store.job(job.id)
    assert (settled.state, settled.reason, settled.yields) == (JobState.STOPPED, "it gave up its place", False)
    events = [event.payload for event in store.events(job.id) if event.kind == "preempted"]
    assert events == [{"reason": "a job of priority 5 needs its place", "priority": 0}]
    entries = [entry for entry in accounts.audit() if entry.action == "job.preempt"]
    assert [(entry.target, entry.after) for entry in entries] == [(f"job {job.id}", {"for": "job x"})]
    requests.settle(job.id)
    assert store.job(job.id) == settled


def test_preempted_drivers_are_no_failures(store: Store, accounts: AccountStore) -> None:
    """A job may be preempted any number of times before it stores a result, and is never given up for that."""
    job = create(store)
    for number in range(1, 8):
        store.record_submission(job.id, number)
        store.open_attempt(job.id, as_driver=True)
        assert preempt(accounts, store.job(job.id), "because")
        SteeringStore(store).settle(job.id)
    assert store.consecutive_failures(job.id) == 0


def test_a_preemption_is_stored_with_its_audit_entry(
    store: Store, accounts: AccountStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the audit entry cannot be stored, the job is not preempted: no kill in between loses the entry."""
    job = create(store)
    store.record_submission(job.id, 1)
    store.open_attempt(job.id, as_driver=True)

    def fail(*_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr("service.store.accounts.record_change", fail)
    with pytest.raises(ConnectionError):
        preempt(accounts, store.job(job.id), "because")
    assert not store.job(job.id).yields
    assert "preempted" not in [event.kind for event in store.events(job.id)]


def test_a_job_that_ended_is_not_preempted(store: Store, accounts: AccountStore) -> None:
    job = create(store)
    store.open_attempt(job.id).set_state(JobState.COMPLETE)
    assert not preempt(accounts, store.job(job.id), "because")
    SteeringStore(store).settle(job.id)
    assert store.job(job.id).state is JobState.COMPLETE
