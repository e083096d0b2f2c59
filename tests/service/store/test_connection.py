"""Guarantees on both SQLite and PostgreSQL: order of events, snapshots, durable commits, and every character."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from service.errors import Conflict
from service.store import JobWriter, Store, schema
from service.store.availability import is_away
from service.store.connection import TOKEN_LIFE_S, _is_committed, reading, transaction
from service.store.steering import SteeringStore
from service.types import EventKind, JobState, RungRecord, TrialState
from tests.postgresql import PostgreSQL
from tests.service.store.test_store import BEGINNING, RECIPE, RESOLVED, RUNG, TRIAL, chunk
from workers.types import Split


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@pytest.fixture
def on_postgresql(postgresql: PostgreSQL) -> Iterator[Store]:
    url = postgresql.migrated()
    store = Store(url)
    yield store
    store.close()
    postgresql.drop(url)


def new_writer(store: Store) -> JobWriter:
    job = store.create_job(kind="search", name="test", document={}, accepted=RESOLVED.to_json())
    return store.open_attempt(job.id)


def test_another_encoding_is_refused(postgresql: PostgreSQL) -> None:
    """A database that is not in UTF8 is refused with its encoding and the way out."""
    url = postgresql.create(encoding="SQL_ASCII")
    with pytest.raises(Conflict, match=r"its encoding is SQL_ASCII; texts need UTF8: .* --encoding=UTF8"):
        Store(url)
    postgresql.drop(url)


# Characters.

ODD = ("\x00", "a\x00b", "\ud800 alone", "\udfff\x00", "\x1a", "\x1a0000", "\x1a\x1a", "ü 🙂", "x" * 3_000_000)


def test_odd_characters_come_back(store: Store) -> None:
    """NUL, lone surrogates and very long texts come back from every kind of column."""
    writer = new_writer(store)
    samples = tuple(
        replace(sample, response=text) for sample, text in zip(chunk(range(len(ODD))).samples, ODD, strict=True)
    )
    for number, text in enumerate(ODD):
        writer.add_trial(replace(TRIAL, number=number, label=text))
        writer.finish_trials([number], TrialState.FAIL, text)
        writer.add_event("note", {text[:100]: text})
    writer.record_chunk(0, Split.SEARCH, replace(chunk(range(1)), samples=samples))
    writer.set_document_named("odd", list(ODD))
    writer.set_state(JobState.STOPPED, ODD[1])
    assert [(trial.label, trial.reason) for trial in store.trials(writer.job_id)] == [(text, text) for text in ODD]
    assert [sample.response for sample in store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)] == list(ODD)
    notes = [event.payload for event in store.events(writer.job_id) if event.kind == "note"]
    assert notes == [{text[:100]: text} for text in ODD]
    assert store.document(writer.job_id, "odd") == list(ODD)
    assert store.job(writer.job_id).reason == ODD[1]


def test_text_of_earlier_versions_stays(store: Store) -> None:
    """Text that was stored as it is, with the escape in it, is read as it is."""
    writer = new_writer(store)
    with store.engine.begin() as connection:
        connection.execute(sa.text("UPDATE studies SET reason = :text"), {"text": "\x1a then \x1aD7FF"})
    assert store.job(writer.job_id).reason == "\x1a then \x1aD7FF"


def test_infinite_numbers_are_refused(store: Store) -> None:
    """JSON has no infinite numbers, and nothing of such a write is stored."""
    writer = new_writer(store)
    with pytest.raises((sa.exc.StatementError, ValueError), match="Out of range float values are not JSON compliant"):
        writer.add_event("note", {"loss": float("nan")})
    assert store.last_event_id(writer.job_id) == store.events(writer.job_id)[BEGINNING - 1].id


def test_names_are_sorted_by_code_points(store: Store) -> None:
    """Capitals come before small letters, whatever the language of the database is."""
    writer = new_writer(store)
    writer.add_trial(TRIAL)
    for objective in ("b", "a", "B", "A_", "AA"):
        writer.record_chunk(3, Split.SEARCH, chunk(range(1), objective=objective))
    found = store.samples(writer.job_id, RECIPE.digest, Split.SEARCH)
    assert [sample.objective for sample in found] == ["AA", "A_", "B", "a", "b"]


def test_numbers_of_events_have_64_bits(store: Store) -> None:
    """A client may ask for events after any number that the API accepts."""
    assert store.events(new_writer(store).job_id, after=2**63 - 1) == ()


# Order.

WRITERS: dict[str, Callable[[Store, JobWriter], Any]] = {
    "refusal": lambda store, writer: store.record_refusal(writer.job_id, "no"),
    "attempt": lambda store, writer: store.open_attempt(writer.job_id),
    "resume": lambda store, writer: SteeringStore(store).resume(writer.job_id, reason="again"),
    "state": lambda store, writer: writer.set_state(JobState.RUNNING),
    "waiting": lambda store, writer: writer.set_waiting("no engine"),
    "trial": lambda store, writer: writer.add_trial(TRIAL),
    "rung": lambda store, writer: writer.finish_rung(7, RUNG, samples_reused=0),
    "end of trials": lambda store, writer: writer.finish_trials([7], TrialState.FAIL, "x"),
    "document": lambda store, writer: writer.set_document_named("holdout", {}),
    "event": lambda store, writer: writer.add_event("note", {}),
    "fault": lambda store, writer: new_writer(store).record_engine_fault("replica-1", 0, "broken"),
}


@pytest.mark.parametrize("write", WRITERS)
def test_events_appear_in_the_order_of_their_ids(write: str, store: Store) -> None:
    """No event of a job appears behind one with a larger id, for every writer: a watcher would miss it."""
    writer = new_writer(store)
    writer.add_trial(replace(TRIAL, number=7))
    writer.record_chunk(7, Split.SEARCH, chunk(range(2)))
    writer.set_state({"resume": JobState.FAILED, "fault": JobState.COMPLETE}.get(write, JobState.RUNNING))
    seen = store.last_event_id(writer.job_id)
    other = threading.Thread(target=WRITERS[write], args=(store, writer))
    with writer._transaction() as connection:
        hold_event(connection, writer.job_id)
        other.start()
        wait_until_blocked(other, store)
        assert store.events(writer.job_id, after=seen) == ()
    other.join(60)
    first, *later = store.events(writer.job_id, after=seen)
    assert first.kind == "held"
    assert later


# Seconds in which a writer that nothing keeps waiting would have written.
WRITES_WITHIN_S = 0.25


def wait_until_blocked(writer: threading.Thread, store: Store) -> None:
    """Wait until a transaction of the thread waits for a lock, as far as the database says so, or the thread ends."""
    if store.engine.dialect.name == "sqlite":
        writer.join(WRITES_WITHIN_S)
        return
    here = "datname = current_database()"
    waiting = sa.text(f"SELECT count(*) FROM pg_stat_activity WHERE {here} AND wait_event_type = 'Lock'")
    deadline = time.monotonic() + 60
    while writer.is_alive():
        with store.engine.connect() as connection:
            if connection.execute(waiting).scalar_one():
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hold_event(connection: sa.Connection, job_id: str) -> None:
    row = {"study": job_id, "time": 0.0, "kind": "held", "payload": {}}
    connection.execute(sa.insert(schema.events).values(row))


def test_faults_appear_in_the_order_of_their_ids(store: Store) -> None:
    """A driver that reads faults after the last that it saw misses none, though other jobs' drivers add them."""
    first, second = new_writer(store), new_writer(store)
    started, go_on = threading.Event(), threading.Event()

    def slowly(*_: Any) -> None:
        started.set()
        go_on.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first, "_notify_complete_studies", slowly)
        threads = [threading.Thread(target=first.record_engine_fault, args=("a", 0, "broken"))]
        threads[0].start()
        assert started.wait(60)
        threads.append(threading.Thread(target=second.record_engine_fault, args=("b", 0, "broken")))
        threads[1].start()
        wait_until_blocked(threads[1], store)
        assert store.engine_faults() == ()
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert [fault.replica for fault in store.engine_faults()] == ["a", "b"]


# Reads.


def torn_trials(store: Store) -> bool:
    """Whether a read shows a trial's end without its last rung or the reverse; both are stored between its queries."""
    writer = new_writer(store)
    writer.add_trial(TRIAL)
    full = RungRecord(1, {"math": 8}, {"math": 0.75}, {"math": 0.125})
    is_done = False

    def end_trial(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal is_done
        if not is_done and ("FROM rungs" in statement or "FROM trials" in statement):
            is_done = True
            thread = threading.Thread(
                target=writer.finish_rung, args=(3, full), kwargs={"samples_reused": 0, "state": TrialState.COMPLETE}
            )
            thread.start()
            thread.join(60)

    sa.event.listen(store.engine, "after_cursor_execute", end_trial)
    (trial,) = store.trials(writer.job_id)
    sa.event.remove(store.engine, "after_cursor_execute", end_trial)
    assert is_done
    assert store.trial(writer.job_id, 3).rungs == (full,)
    return (trial.state is TrialState.COMPLETE) != bool(trial.rungs)


def test_the_queries_of_a_read_see_one_moment(store: Store) -> None:
    """A write between two queries of a read is seen by both or by neither."""
    assert not torn_trials(store)


def test_without_snapshots_a_read_is_torn(on_postgresql: Store) -> None:
    """PostgreSQL's default transactions would show part of the write: the test above can fail."""
    on_postgresql._reads = on_postgresql.engine
    assert torn_trials(on_postgresql)


def test_a_snapshot_holds_for_several_reads(store: Store) -> None:
    """Reads of one snapshot agree with each other, whatever is written meanwhile; later reads see it."""
    writer = new_writer(store)
    with store.snapshot() as snapshot:
        assert snapshot.trials(writer.job_id) == ()
        writer.add_trial(TRIAL)
        writer.set_state(JobState.RUNNING)
        assert snapshot.job(writer.job_id).state is JobState.CREATED
        assert snapshot.trials(writer.job_id) == ()
        assert len(snapshot.events(writer.job_id)) == BEGINNING
        assert len(store.events(writer.job_id)) == BEGINNING + 2
    assert len(store.trials(writer.job_id)) == 1


def test_reading_writes_nothing(on_postgresql: Store) -> None:
    """A transaction for reads refuses writes."""
    with on_postgresql._reads.connect() as connection, pytest.raises(sa.exc.DBAPIError, match="read-only transaction"):
        connection.execute(sa.delete(schema.events))


# Commits and connections.


def terminated(connection: Any) -> None:
    """End the session of this connection, as the server."""
    with pytest.raises(Exception, match=r"terminating connection|server closed"):
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_commit_whose_answer_was_lost_is_found(on_postgresql: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose connection breaks after the commit has succeeded; it is not written twice."""
    writer = new_writer(on_postgresql)
    commit = type(on_postgresql.engine.dialect).do_commit
    lost: list[bool] = []

    def lose_answer(dialect: Any, connection: Any) -> None:
        commit(dialect, connection)
        if not lost:
            lost.append(True)
            terminated(connection)
            commit(dialect, connection)

    monkeypatch.setattr(type(on_postgresql.engine.dialect), "do_commit", lose_answer)
    writer.add_event("note", {})
    assert lost
    assert [event.kind for event in on_postgresql.events(writer.job_id)][BEGINNING:] == ["note"]


def test_a_commit_that_never_came_is_an_error(on_postgresql: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose connection breaks before the commit fails, and nothing of it is stored."""
    writer = new_writer(on_postgresql)
    commit = type(on_postgresql.engine.dialect).do_commit

    def lose_commit(dialect: Any, connection: Any) -> None:
        terminated(connection)
        commit(dialect, connection)

    with monkeypatch.context() as patch:
        patch.setattr(type(on_postgresql.engine.dialect), "do_commit", lose_commit)
        with pytest.raises(sa.exc.OperationalError):
            writer.add_event("note", {})
    assert len(on_postgresql.events(writer.job_id)) == BEGINNING


def test_connections_of_a_restarted_server_are_replaced(on_postgresql: Store, postgresql: PostgreSQL) -> None:
    """A store goes on after its server was restarted, without an error."""
    writer = new_writer(on_postgresql)
    postgresql.stop()
    postgresql.start()
    writer.add_event("note", {})
    assert on_postgresql.last_event_id(writer.job_id)


def test_stored_times_are_those_of_the_database(on_postgresql: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver whose clock is wrong stores the times of the database's clock."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: 1.0)
    writer = new_writer(on_postgresql)
    writer.heartbeat(wall_clock_s=1.0, idle_s=20.0)
    on_postgresql.record_submission(writer.job_id, 1)
    job = on_postgresql.job(writer.job_id)
    times = (job.created_at, job.heartbeat_at, job.submitted_at, on_postgresql.events(writer.job_id)[0].time)
    assert all(time_s is not None and abs(time_s - now) < 60 for time_s in times), times
    assert job.progressed_at == pytest.approx(now - 20, abs=60)


def test_a_database_error_is_not_an_absence(on_postgresql: Store) -> None:
    """Only lost connections and the like count as an absence of the database; a wrong row does not."""
    writer = new_writer(on_postgresql)
    writer.add_trial(TRIAL)
    with pytest.raises(sa.exc.IntegrityError) as refused:
        writer.add_trial(TRIAL)
    assert not is_away(refused.value)
    assert EventKind.TRIAL in [event.kind for event in on_postgresql.events(writer.job_id)]


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_transaction_in_progress_is_waited_for(on_postgresql: Store, ends: str) -> None:
    """Whether a transaction was committed is known once it has ended; its id in PostgreSQL plays no part."""
    insert = sa.insert(schema.commit_tokens)
    with on_postgresql.engine.connect() as connection, ThreadPoolExecutor() as pool:
        connection.execute(insert, {"token": "lost", "time": time.time()})
        answer = pool.submit(_is_committed, on_postgresql.engine, "lost")
        wait([answer], timeout=WRITES_WITHIN_S)
        assert not answer.done()
        getattr(connection, ends)()
        assert answer.result(timeout=30) is (ends == "commit")
    assert _is_committed(on_postgresql.engine, "lost") is (ends == "commit")


def tokens(store: Store) -> set[str]:
    with reading(store.engine).connect() as connection:
        return set(connection.execute(sa.select(schema.commit_tokens.c.token)).scalars())


def test_connections_keep_one_token_each(on_postgresql: Store) -> None:
    """A connection's newest token replaces the one before; tokens of connections that are gone are deleted later."""
    writer = new_writer(on_postgresql)
    with on_postgresql.engine.begin() as connection:
        rows = [{"token": "old", "time": time.time() - 2 * TOKEN_LIFE_S}, {"token": "new", "time": time.time()}]
        connection.execute(sa.insert(schema.commit_tokens), rows)
    before = tokens(on_postgresql)
    for _ in range(3):
        writer.add_event("note", {})
    assert {"new", "old"} <= before & tokens(on_postgresql)
    assert len(tokens(on_postgresql)) == len(before)
    assert tokens(on_postgresql) - before
    on_postgresql.engine.dispose()
    for _ in range(2):
        writer.add_event("note", {})
    assert "new" in tokens(on_postgresql)
    assert "old" not in tokens(on_postgresql), "a new connection has deleted it"


def test_a_write_reads_no_other_token(on_postgresql: Store) -> None:
    """What a write costs does not grow with the number of tokens; the first of a connection may read them all."""
    writer = new_writer(on_postgresql)
    used: list[str] = []
    rows = [{"token": f"other {number}", "time": time.time()} for number in range(5000)]
    with on_postgresql.engine.begin() as connection:
        connection.execute(sa.insert(schema.commit_tokens), rows)
        connection.execute(sa.text("ANALYZE commit_tokens"))
    writer.add_event("note", {})

    def keep(_: Any, cursor: Any, statement: str, parameters: Any, *___: Any) -> None:
        if "commit_tokens" in statement and not used:
            used.append(statement)
            cursor.execute(f"EXPLAIN {statement}", parameters)
            used.append("\n".join(row[0] for row in cursor.fetchall()))

    sa.event.listen(on_postgresql.engine, "before_cursor_execute", keep)
    writer.add_event("note", {})
    statement, plan = used
    assert "Index" in plan, statement
    assert "Seq Scan" not in plan, plan


def test_transactions_that_write_nothing_store_no_token(on_postgresql: Store) -> None:
    """A transaction that only reads stores no token."""
    before = tokens(on_postgresql)
    with transaction(on_postgresql.engine) as connection:
        connection.execute(sa.select(schema.studies))
    assert tokens(on_postgresql) == before
