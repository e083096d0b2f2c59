"""An outage of the database: stores that wait lose and repeat nothing; others fail at once and say since when."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from inspect import getmembers, isfunction

import pytest
import sqlalchemy as sa

from service.jobs.heartbeat import Heartbeat
from service.store import JobWriter, Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.store.availability import FIRST_WAIT_S, is_away, repeated
from service.store.exports import ExportStore
from service.store.notifications import NotificationStore
from service.store.steering import SteeringStore
from service.types import EventKind, JobState, TrialState
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.store.test_store import BEGINNING, RESOLVED, TRIAL, WRITES
from tests.service.tune.harness import coordinator_of, drive, new_study, trial_list
from workers.serving.fake import FakeScorer

AWAY = r"database: postgresql://tests:\*\*\*@/test_\S+ does not answer since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: \S"


@pytest.fixture
def server(postgresql: PostgreSQL) -> PostgreSQL:
    return postgresql


@pytest.fixture
def url(server: PostgreSQL) -> Iterator[str]:
    url = server.migrated()
    yield url
    server.drop(url)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


def new_writer(store: Store) -> JobWriter:
    job = store.create_job(kind="search", name="test", document={}, accepted=RESOLVED.to_json())
    return store.open_attempt(job.id)


ENDS: dict[str, Callable[[PostgreSQL], None]] = {"stop": PostgreSQL.stop, "kill": PostgreSQL.kill}


@pytest.mark.parametrize("end", ENDS)
def test_a_store_that_does_not_wait_says_since_when(end: str, store: Store, server: PostgreSQL) -> None:
    """Calls fail at once while the database is away, with its place and the time; afterwards they succeed."""
    writer = new_writer(store)
    assert store.problem() is None
    ENDS[end](server)
    for call in (store.jobs, lambda: writer.add_event("note", {}), lambda: store.job(writer.job_id)):
        with pytest.raises(sa.exc.OperationalError) as failed:
            call()
        assert is_away(failed.value)
    problem = store.problem()
    assert problem is not None
    assert re.match(AWAY, problem), problem
    assert PASSWORD not in problem
    server.start()
    assert store.jobs()
    assert store.problem() is None


def test_a_statement_that_the_driver_refuses_is_no_outage(store: Store) -> None:
    """A repeated statement with too many parameters would be refused for ever."""
    writer = new_writer(store.waiting())
    with pytest.raises(sa.exc.OperationalError, match="number of parameters must be between 0 and 65535") as refused:
        writer.finish_trials(range(70_000), TrialState.PRUNED)
    assert not is_away(refused.value)
    assert store.problem() is None
    writer.finish_trials(range(1000), TrialState.PRUNED)
    assert len(store.events(writer.job_id, kinds=[EventKind.TRIAL_STATE])) == 1000


def test_writes_of_a_killed_server_are_stored_once(store: Store, server: PostgreSQL) -> None:
    """A writer that waits stores each event exactly once, in order, however often the server is killed."""
    writer = new_writer(store.waiting())
    done = threading.Event()

    def write() -> None:
        for number in range(400):
            writer.add_event("note", {"n": number})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    for end in ("kill", "stop", "kill"):
        time.sleep(0.2)
        ENDS[end](server)
        server.start()
    assert done.wait(60)
    thread.join()
    events = store.events(writer.job_id, after=BEGINNING)
    assert [event.payload["n"] for event in events if event.kind == "note"] == list(range(400))
    assert 1 <= sum(event.kind == "database" for event in events) <= 3


def test_every_write_waits_and_tells_of_it(url: str, server: PostgreSQL) -> None:
    """Every method of a writer waits for the database, and the job has an event about that."""
    stores = {method: Store(url) for method in WRITES}  # of a driver for each method
    writers = {method: new_writer(store.waiting()) for method, store in stores.items()}
    for writer in writers.values():
        writer.add_trial(TRIAL)
    server.kill()
    threads = {method: threading.Thread(target=WRITES[method], args=(writers[method],)) for method in WRITES}
    for thread in threads.values():
        thread.start()
    time.sleep(2 * FIRST_WAIT_S)
    assert [method for method, thread in threads.items() if not thread.is_alive()] == []
    server.start()
    for thread in threads.values():
        thread.join(60)
    assert [method for method, thread in threads.items() if thread.is_alive()] == []
    for method, store in stores.items():
        told = [event for event in store.events(writers[method].job_id) if event.kind == "database"]
        assert [event.payload["away_s"] > 0 for event in told] == [True], method
        store.close()


def test_a_store_that_waits_opens_late(url: str, server: PostgreSQL) -> None:
    """A driver that starts while the database is away begins once it answers."""
    server.kill()
    found: list[Store] = []
    thread = threading.Thread(target=lambda: found.append(Store(url, waits=True)))
    thread.start()
    thread.join(2 * FIRST_WAIT_S)
    assert not found
    server.start()
    thread.join(60)
    assert found[0].jobs() == ()
    found[0].close()


def test_reads_in_a_snapshot_are_not_repeated(store: Store, server: PostgreSQL) -> None:
    """A snapshot that the database lost is an error: later reads would see another moment."""
    with store.waiting().snapshot() as snapshot:
        assert snapshot.jobs() == ()
        server.kill()
        server.start()
        with pytest.raises(sa.exc.OperationalError):
            snapshot.jobs()


STORES = (Store, JobWriter, SteeringStore, ExportStore, ArtifactStore, AccountStore, NotificationStore)


@pytest.mark.parametrize("cls", STORES)
def test_all_public_methods_of_a_store_are_repeated(cls: type) -> None:
    """Methods of base classes too, each once: `repeated` decorates only the methods of the class that it is given."""

    @repeated
    class Example:
        def call(self) -> None: ...

    code = Example.call.__code__
    methods = {name: method for name, method in getmembers(cls, isfunction) if not name.startswith("_")}
    assert methods
    assert [name for name, method in methods.items() if method.__code__ is not code] == []
    assert [name for name, method in methods.items() if vars(method)["__wrapped__"].__code__ is code] == []


def test_waiting_counts_as_progress(store: Store, server: PostgreSQL) -> None:
    """A driver that waited for the database is not idle afterwards, and its heartbeats go on."""
    writer = new_writer(store.waiting())
    with Heartbeat(writer, 0.0, interval_s=0.05) as heartbeat:
        time.sleep(0.2)
        server.kill()
        time.sleep(1.0)
        server.start()
        deadline = time.monotonic() + 30
        while heartbeat.idle_s > 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = store.job(writer.job_id).heartbeat_at
        while store.job(writer.job_id).heartbeat_at == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heartbeat.check()


def test_a_study_goes_on_after_its_database_was_killed(
    url: str, server: PostgreSQL, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A study whose database is killed and restarted at many steps ends with the trials of an undisturbed one."""
    undisturbed, study = new_study(tmp_path_factory.mktemp("undisturbed"))
    drive(coordinator_of(undisturbed, study), FakeScorer())
    expected = trial_list(undisturbed, study)
    undisturbed.close()

    store = Store(url, waits=True)
    study = store.create_job(kind="search", name="test", document={}, accepted=RESOLVED.to_json()).id
    steps = 0

    def disturb(_: str) -> None:
        nonlocal steps
        steps += 1
        if steps % 40 == 0 and steps <= 160:
            (server.kill if steps % 80 else server.stop)()
            threading.Timer(0.3, server.start).start()

    drive(coordinator_of(store, study, observer=disturb), FakeScorer())
    assert steps > 160
    assert trial_list(store, study) == expected
    assert sum(event.kind == "database" for event in store.events(study)) == 4
    store.close()


def test_artifacts_wait_too(store: Store, server: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An artifact of a driver is stored once the database answers."""
    directory = tmp_path_factory.mktemp("artifact")
    (directory / "file").write_text("x")
    job = new_writer(store).job_id
    artifacts = ArtifactStore(store.waiting(), tmp_path_factory.mktemp("artifacts"))
    server.kill()
    threading.Timer(0.3, server.start).start()
    assert artifacts.put(job, "policy", directory) == artifacts.get(job, "policy")
    assert store.job(job).state is JobState.CREATED
