"""Several servers of one database: one leader at a time, and every server learns of every event."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.errors import InUse
from service.server import alone
from service.store import Store
from service.store.database_url import parse_url, remember
from service.store.servers import LEADER, Leadership, Notifications
from service.types import EventKind
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.store.test_connection import new_writer


@pytest.fixture
def url(postgresql: PostgreSQL) -> Iterator[str]:
    url = postgresql.migrated()
    yield url
    postgresql.drop(url)


@pytest.fixture
def stores(url: str) -> Iterator[tuple[Store, Store]]:
    """The stores of two servers."""
    first, second = Store(url), Store(url)
    yield first, second
    first.close()
    second.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_of_two_servers_is_the_leader(stores: tuple[Store, Store]) -> None:
    """The first server leads, however often both ask; the second one leads once the first has ended."""
    first, second = map(Leadership, stores)
    for _ in range(3):
        assert first.is_held()
        assert not second.is_held()
    assert first.has_others()
    first.release()
    assert not first.is_leader
    wait_until(second.is_held)
    assert not second.has_others()
    assert not first.is_held()
    second.release()
    first.release()


def test_a_leader_without_its_session_notices(stores: tuple[Store, Store], postgresql: PostgreSQL) -> None:
    """When the leader's session ends, another server leads, and the former leader does not believe to lead."""
    first, second = map(Leadership, stores)
    assert first.is_held()
    with stores[0].engine.connect() as connection:
        holders = (
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = :key AND granted"
        )
        connection.execute(sa.text(holders), {"key": LEADER})
    wait_until(second.is_held)
    assert not first.is_held()
    assert not first.is_leader
    postgresql.kill()
    with pytest.raises(sa.exc.DBAPIError):
        second.is_held()
    assert not second.is_leader
    postgresql.start()
    assert first.is_held() + second.is_held() == 1
    first.release()
    second.release()


def test_the_only_server_of_sqlite_is_the_leader(tmp_path: Path) -> None:
    """SQLite has one server, which leads at once."""
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    leadership = Leadership(store)
    assert leadership.is_leader
    assert leadership.is_held()
    assert not leadership.has_others()
    leadership.release()
    store.close()


def test_a_second_server_of_sqlite_is_refused(tmp_path: Path) -> None:
    """A second server of a directory, or of a file of SQLite, is refused in one sentence."""
    address = parse_url(f"sqlite:///{tmp_path / 'data' / 'a.db'}")
    with alone(tmp_path / "data", address):
        with pytest.raises(InUse, match=r"process \d+ is using this directory"), alone(tmp_path / "data", address):
            pass
        message = r"another server uses it; several servers need PostgreSQL \(--database\)$"
        with pytest.raises(InUse, match=message), alone(tmp_path / "other", address):
            pass
    with alone(tmp_path / "other", address):
        pass


def test_servers_of_one_postgresql_share_a_directory(tmp_path: Path) -> None:
    """Servers of the same PostgreSQL may share a directory; a server with another database may not use it."""
    address = parse_url(f"postgresql://user:{PASSWORD.replace('@', '%40').replace('/', '%2F')}@host/one")
    other, file = address.set(database="two"), parse_url(f"sqlite:///{tmp_path / 'a.db'}")
    with alone(tmp_path, address):
        remember(tmp_path, address)
        with alone(tmp_path, address):
            pass
        with pytest.raises(InUse, match=r"a server with another database, postgresql://.*/one, uses") as refused:
            alone(tmp_path, other).__enter__()
        assert PASSWORD not in str(refused.value)
        with pytest.raises(InUse, match=r"is using this directory"), alone(tmp_path, file):
            pass
    with alone(tmp_path, other):
        pass


def test_every_server_hears_of_events(stores: tuple[Store, Store]) -> None:
    """Events that any process stores are announced to each server when they are committed, not before."""
    heard: queue.Queue[str] = queue.Queue()
    notifications = Notifications(stores[1], heard.put)
    notifications.start()
    wait_until(lambda: notifications.is_listening)
    writer = new_writer(stores[0])
    assert heard.get(timeout=30) == writer.job_id  # it was created
    assert heard.get(timeout=30) == writer.job_id  # and taken over
    with writer._transaction() as connection:
        writer._add_event(connection, EventKind.STATE, {})
        with pytest.raises(queue.Empty):
            heard.get(timeout=0.3)
    assert heard.get(timeout=30) == writer.job_id
    notifications.stop()


def test_announcements_go_on_after_the_database_was_away(stores: tuple[Store, Store], postgresql: PostgreSQL) -> None:
    """A server knows that it hears nothing while the database is away, and listens again afterwards."""
    heard: queue.Queue[str] = queue.Queue()
    notifications = Notifications(stores[1], heard.put)
    notifications.start()
    wait_until(lambda: notifications.is_listening)
    postgresql.kill()
    wait_until(lambda: not notifications.is_listening)
    postgresql.start()
    wait_until(lambda: notifications.is_listening)
    writer = new_writer(stores[0])
    assert heard.get(timeout=30) == writer.job_id
    thread = threading.Thread(target=notifications.stop)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
