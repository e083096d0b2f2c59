"""Moves of a database between SQLite and PostgreSQL: everything arrives, or nothing does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.cli.main import main
from service.errors import Conflict
from service.store import Store, schema
from service.store import move as moving
from service.store.accounts import AccountStore, Actor
from service.store.exports import ExportStore
from service.store.move import move
from service.store.notifications import NotificationStore
from service.store.steering import SteeringStore
from service.store.usage import add_usage
from service.types import Coverage, EventKind, ExportRecord, ExportState, JobState, Role, Scope, Steering
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.store.test_connection import ODD
from tests.service.store.test_store import RESOLVED, RUNG, TRIAL, WRITES, chunk
from workers.types import Split


@pytest.fixture
def url(postgresql: PostgreSQL) -> Iterator[str]:
    url = postgresql.migrated()
    yield url
    postgresql.drop(url)


def filled(url: str) -> Store:
    """A database with rows in every table, odd characters, and events of a deleted job."""
    store = Store(url)
    for name in ("first", "second"):
        job = store.create_job(kind="search", name=name, document={"seed": 1}, accepted=RESOLVED.to_json())
        writer = store.open_attempt(job.id)
        writer.add_trial(TRIAL)
        writer.add_trial(replace(TRIAL, number=9))
        for method, write in WRITES.items():
            if method != "set_state":
                write(writer)
        samples = tuple(
            replace(sample, response=text, tokens=((1, 2),))
            for sample, text in zip(chunk(range(20, 20 + len(ODD))).samples, ODD, strict=True)
        )
        writer.record_chunk(9, Split.HOLDOUT, replace(chunk(range(1)), samples=samples))
        writer.finish_rung(9, RUNG, samples_reused=1)
        ExportStore(store).add_export(ExportRecord(name, job.id, 3, "float32", ExportState.COMPLETE, 1 / 3))
        with store.engine.begin() as connection:
            row = {"study": job.id, "name": "x", "digest": "d", "num_bytes": 2**40, "facts": {}, "created_at": 1 / 7}
            connection.execute(sa.insert(schema.artifacts).values(row))
            connection.execute(sa.insert(schema.samples), [old_sample(job.id, *each) for each in enumerate(ODD)])
        SteeringStore(store).request_evaluation(job, 3, steering=Steering("evaluate"))
        SteeringStore(store).enqueue_trial(job, "by hand", configuration={"x": 1 / 3}, steering=Steering("enqueue"))
        store.open_attempt(job.id).set_state(JobState.COMPLETE)
    store.delete_job(job.id)
    store.set_drained(drained=True)
    accounts, actor = AccountStore(store), Actor(None, "command")
    accounts.add_user("ann", is_admin=True, actor=actor)
    accounts.add_team("red", actor=actor)
    accounts.set_role("red", "ann", Role.ADMIN, actor=actor)
    with store.engine.begin() as connection:
        add_usage(connection, "red", 1 / 3)
    accounts.add_token(
        "ann", name="ci", digest="d" * 64, prefix="mst_", scope=Scope.READ, lifetime_s=1 / 3, actor=actor
    )
    notifications = NotificationStore(store)
    hook = notifications.add_webhook(
        "https://example.org/", secret="whsec_x", events=(), owner="ann", covers=Coverage.TEAM, team="red", actor=actor
    )
    notifications.add_test(hook.id, lambda now: f'{{"now":{now}}}')
    notifications.record_waits({store.jobs()[0].id: "Ray"}, notify_after_s=1 / 3, works_after_s=1.0, passing="")
    return store


def old_sample(job: str, position: int, text: str) -> dict[str, Any]:
    """Row of a sample as earlier versions stored it."""
    key = {"study": job, "recipe_digest": TRIAL.recipe.digest, "split": "search", "objective": "math"}
    values = {"document": "d", "value": 0.5, "response": text, "is_truncated": False, "evidence": 1, "tokens": "[[1]]"}
    return {**key, "position": 100 + position, **values}


def rows_of(store: Store) -> dict[str, list[Any]]:
    with store.engine.connect() as connection:
        return {
            table.name: list(connection.execute(sa.select(table).order_by(*table.primary_key)))
            for table in schema.metadata.sorted_tables
            if table.name not in moving.NOT_COPIED
        }


def test_everything_arrives_in_both_directions(url: str, tmp_path: Path) -> None:
    """A move to PostgreSQL and back keeps every row, and ids continue where the first database had come to."""
    source = filled(f"sqlite:///{tmp_path / 'first.db'}")
    expected = rows_of(source)
    assert all(expected.values()), "every table that is copied has rows"
    (job,) = source.jobs()
    last = source.open_attempt(job.id)
    last.add_event("note", {})
    expected, newest = rows_of(source), source.last_event_id(job.id)
    target, back = Store(url), Store(f"sqlite:///{tmp_path / 'back.db'}")
    moved = move(source, target)
    assert {table.name: table.rows for table in moved} == {name: len(rows) for name, rows in expected.items()}
    assert rows_of(target) == expected
    assert move(target, back) == moved
    assert rows_of(back) == expected
    for store in (target, back):
        writer = store.open_attempt(job.id)
        writer.record_chunk(3, Split.SEARCH, chunk(range(100, 102)))
        writer.record_engine_fault("another", 0, "x")
        assert store.last_event_id(job.id) > newest
        store.close()
    source.close()


def test_deleted_ids_are_not_given_again(url: str, tmp_path: Path) -> None:
    """Ids of events that were deleted before a move are not used after it."""
    source = filled(f"sqlite:///{tmp_path / 'first.db'}")
    with source.engine.begin() as connection:
        given = connection.execute(sa.text("SELECT seq FROM sqlite_sequence WHERE name = 'events'")).scalar_one()
    (job,) = source.jobs()
    assert given > source.last_event_id(job.id)
    target, back = Store(url), Store(f"sqlite:///{tmp_path / 'back.db'}")
    move(source, target)
    move(target, back)
    for store in (target, back):
        store.open_attempt(job.id)
        assert store.last_event_id(job.id) == given + 1
        store.close()
    source.close()


def test_a_target_with_data_is_refused(url: str, tmp_path: Path) -> None:
    """Nothing is written to a database that has jobs."""
    source, target = filled(f"sqlite:///{tmp_path / 'first.db'}"), filled(url)
    before = rows_of(target)
    with pytest.raises(Conflict, match=r"has data already \(in its table \w+\); give an empty database") as refused:
        move(source, target)
    assert PASSWORD not in str(refused.value)
    assert rows_of(target) == before
    source.close()
    target.close()


def test_a_job_with_a_driver_is_refused(tmp_path: Path) -> None:
    """A driver's later results would be missing: the move says which job has one."""
    source = filled(f"sqlite:///{tmp_path / 'first.db'}")
    writer = source.open_attempt(source.jobs()[0].id)
    writer.set_state(JobState.RUNNING)
    writer.heartbeat(wall_clock_s=1.0)
    target = Store(f"sqlite:///{tmp_path / 'second.db'}")
    with pytest.raises(Conflict, match=r"job \w+ \(first\) has a driver"):
        move(source, target)
    source.close()
    target.close()


@pytest.mark.parametrize("end", ["error", "difference"])
def test_a_move_that_fails_leaves_the_target_empty(end: str, url: str, tmp_path: Path) -> None:
    """An error in the middle, or a copy that differs, leaves nothing, and the same move then succeeds."""
    source, target = filled(f"sqlite:///{tmp_path / 'first.db'}"), Store(url)
    empty = rows_of(target)

    def fail(text: str) -> None:
        if text.startswith("samples"):
            raise OSError("the terminal is gone")

    with pytest.MonkeyPatch.context() as patch:
        if end == "difference":
            described = moving._described
            patch.setattr(moving, "_described", lambda *args: replace(described(*args), digest="0"))
            with pytest.raises(Conflict, match="the copy differs"):
                move(source, target)
        else:
            with pytest.raises(OSError, match="the terminal is gone"):
                move(source, target, note=fail)
    assert rows_of(target) == empty
    move(source, target)
    assert rows_of(target) == rows_of(source)
    source.close()
    target.close()


def test_the_source_is_read_at_one_moment(url: str, tmp_path: Path) -> None:
    """What is written to the source during a move is not copied, not even in part."""
    source = filled(url)
    before = rows_of(source)
    (job,) = source.jobs()
    target = Store(f"sqlite:///{tmp_path / 'second.db'}")
    written: list[bool] = []

    def write(_: str) -> None:
        if not written:
            written.append(True)
            thread = threading.Thread(target=lambda: source.open_attempt(job.id).add_trial(replace(TRIAL, number=50)))
            thread.start()
            thread.join(60)

    move(source, target, note=write)
    assert rows_of(target) == before
    assert rows_of(source) != before
    source.close()
    target.close()


def test_the_command_moves_the_database_of_a_directory(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`database move DATA URL` copies the server's database and shows no password."""
    filled(f"sqlite:///{tmp_path / 'mergesearch.db'}").close()
    assert main(["database", "move", str(tmp_path), url]) == 0
    told = capsys.readouterr()
    assert "samples: " in told.err
    assert "copied " in told.out
    assert PASSWORD not in told.out + told.err
    assert main(["database", "move", str(tmp_path), url]) == 2
    assert "has data already" in capsys.readouterr().err
    target = Store(url)
    assert target.events(target.jobs()[0].id)[0].kind == EventKind.CREATED
    target.close()
