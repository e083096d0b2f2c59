"""Coordination of servers that use one database: election of the leader, and notifications of new events.

Any number of servers may use a PostgreSQL database. All of them answer requests; only the leader starts and replaces
drivers, and writes exports. An SQLite database has a single server, which is the leader.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from service.store.attempt_writer import CHANNEL
from service.store.availability import availability_of, is_away
from service.store.sql import Store

__all__ = ["Leadership", "Notifications"]

logger = logging.getLogger(__name__)

# Advisory locks of PostgreSQL: the leader's, and the one that every server shares.
LEADER, SERVERS = 0x6D657268, 0x6D657269

# Seconds until a lost connection is tried again, and at most until a stop is noticed.
RETRY_S, LISTEN_S = 2.0, 1.0


class Leadership:
    """Election of a leader among the servers that use the same database; only the leader starts drivers.

    Drivers are the processes that work on jobs. On PostgreSQL the leader is the server whose database session holds a
    lock. When the session ends, another server can take the lock. A leader whose session has ended detects this at the
    next call of `is_held`. Until then two servers may act as leader, which does no harm: a driver's Ray Job has a fixed
    id, and Ray refuses to start the same id twice. On SQLite the only server is the leader. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._engine = _single(store)
        self._connection: sa.Connection | None = None
        self._has_lock = self._engine is None
        self._lock = threading.Lock()

    @property
    def is_leader(self) -> bool:
        """Whether this server was the leader at the last call of `is_held`; the database is not asked.

        The leader is the only server that starts drivers, the processes that work on jobs.
        """
        return self._has_lock

    def is_held(self) -> bool:
        """Become the leader if there is none, and return whether this server is the leader.

        The leader is the only server that starts drivers, the processes that work on jobs.

        Raises:
            DBAPIError: The database does not answer; this server is not the leader.
        """
        if self._engine is None:
            return True
        with self._lock:
            try:
                self._has_lock = self._acquire(self._engine)
            except sa.exc.DBAPIError:  # the session has ended: begin another one
                self._close()
                try:
                    self._has_lock = self._acquire(self._engine)
                except sa.exc.DBAPIError:
                    self._close()
                    raise
            return self._has_lock

    def has_others(self) -> bool:
        """Whether other servers use the same database; False if the database does not answer."""
        with self._lock:
            if self._connection is None:
                return False
            query = sa.text(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = :key AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            try:
                return int(self._connection.execute(query, {"key": SERVERS}).scalar_one()) > 1
            except sa.exc.DBAPIError:
                return False

    def release(self) -> None:
        """Stop being the leader, so that another server can become it.

        The leader is the only server that starts drivers, the processes that work on jobs.
        """
        with self._lock:
            if self._engine is not None:
                self._close()
                self._engine.dispose()

    def _acquire(self, engine: sa.Engine) -> bool:
        if self._connection is None:
            self._connection = engine.connect()
            self._connection.execute(sa.text("SELECT pg_advisory_lock_shared(:key)"), {"key": SERVERS})
        if self._has_lock:  # the session may have ended
            self._connection.execute(sa.text("SELECT 1"))
            return True
        is_leader = bool(
            self._connection.execute(sa.text("SELECT pg_try_advisory_lock(:key)"), {"key": LEADER}).scalar()
        )
        if is_leader:
            logger.info("this server is the leader: it starts and replaces drivers")
        return is_leader

    def _close(self) -> None:
        self._has_lock = False
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


class Notifications:
    """Thread that calls `on_event` with the id of each job that has a new event, as soon as the event is stored.

    The event may come from any server or driver (a process that works on a job). On SQLite, and while the connection to
    the database is lost, `on_event` is not called. `is_listening` is True while the thread receives PostgreSQL's
    notifications.
    """

    def __init__(self, store: Store, on_event: Callable[[str], None]) -> None:
        self._engine = _single(store)
        self._on_event = on_event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self.is_listening = False

    def start(self) -> None:
        if self._engine is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._engine is not None
        while not self._stopping.is_set():
            try:
                with self._engine.connect() as connection:
                    self._listen(connection)
            except Exception as error:  # the next connection continues; until then, events are polled for
                if not is_away(error):  # which the availability has logged
                    logger.exception("new events are not announced at the moment")
            finally:
                self.is_listening = False
            self._stopping.wait(RETRY_S)
        self._engine.dispose()

    def _listen(self, connection: sa.Connection) -> None:
        connection.execute(sa.text(f"LISTEN {CHANNEL}"))
        driver: Any = connection.connection.driver_connection
        self.is_listening = True
        while not self._stopping.is_set():
            for notification in driver.notifies(timeout=LISTEN_S):
                self._on_event(notification.payload)
                if self._stopping.is_set():
                    return
            connection.execute(sa.text("SELECT 1"))  # raises if the connection is lost


def _single(store: Store) -> sa.Engine | None:
    """Make an SQLAlchemy engine with a single connection that stays open, separate from the store's connections.

    Such a connection holds a lock of PostgreSQL, or receives its notifications. The connection notices a lost server
    within some seconds. Returns None for SQLite, where no such connection is needed.
    """
    if store.engine.dialect.name == "sqlite":
        return None
    settings = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 2}
    engine = sa.create_engine(
        store.engine.url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT", connect_args=settings
    )
    return availability_of(store.engine).watch(engine)
