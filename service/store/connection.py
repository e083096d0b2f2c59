"""Connections to the database: settings, how transactions begin and end, and the clock for stored times."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from service.errors import Conflict
from service.store.availability import FIRST_WAIT_S, Availability, is_away, is_waiting
from service.store.database_url import shown

__all__ = ["clock", "connect", "reading", "transaction"]

# Seconds that a writer waits for another transaction on SQLite before it fails.
BUSY_TIMEOUT_S = 60

# Defaults of PostgreSQL's library, unless the URL states others: seconds to connect; seconds of silence after which a
# connection is probed, between probes, and until sent data must be acknowledged (milliseconds), so that a cut network
# is noticed within a minute.
POSTGRESQL_SETTINGS = {
    "connect_timeout": 5,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 40_000,
    "application_name": "mergesearch",
}

# Seconds after which a connection of the pool is replaced.
RECYCLE_S = 1800


def connect(url: sa.URL) -> sa.Engine:
    """Create the SQLAlchemy engine for the database at `url`, which `parse_url` has returned; nothing is sent yet.

    Write transactions on SQLite take the write lock when they begin. NaN and infinite numbers in values of JSON columns
    are refused (ValueError).

    Raises:
        Conflict: The driver for this kind of database is not installed.
    """
    is_postgresql = url.get_backend_name() == "postgresql"
    settings = {name: value for name, value in POSTGRESQL_SETTINGS.items() if name not in url.query}
    try:
        engine = sa.create_engine(
            url,
            pool_pre_ping=is_postgresql,
            pool_recycle=RECYCLE_S if is_postgresql else -1,
            connect_args=settings if is_postgresql else {},
            json_serializer=partial(json.dumps, allow_nan=False),
        )
    except ModuleNotFoundError as error:
        raise Conflict(
            f"database {shown(url)}: the Python package {error.name} is not installed here; "
            "install it with: pip install 'mergesearch[postgres]'"
        ) from error
    if not is_postgresql:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin)
    return Availability(shown(url)).watch(engine)


def reading(engine: sa.Engine) -> sa.Engine:
    """The same engine with the options for transactions that only read.

    All queries of such a transaction see the database at the same moment, and wait for no transaction that writes.
    """
    if engine.dialect.name == "sqlite":
        return engine.execution_options(read_only=True)
    return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that writes; it is committed at the end of the context.

    If the connection is lost during the commit, PostgreSQL is asked whether the transaction was committed. An error
    therefore means that nothing was stored.
    """
    with engine.connect() as connection, connection.begin() as begun:
        yield connection
        number = _number_of(connection)
        try:
            begun.commit()
        except sa.exc.DBAPIError as error:
            if number is None or not is_away(error) or not _is_committed(engine, number):
                raise


def _number_of(connection: sa.Connection) -> int | None:
    """PostgreSQL's id of the transaction that is open on `connection`.

    Returns None on SQLite, and if the transaction has written nothing.
    """
    if connection.dialect.name == "sqlite":
        return None
    found: int | None = connection.execute(sa.text("SELECT pg_current_xact_id_if_assigned()::text::bigint")).scalar()
    return found


def _is_committed(engine: sa.Engine, number: int) -> bool:
    """Whether the transaction with PostgreSQL's id `number` was committed, after its connection was lost.

    The database is asked again while it says that the transaction is in progress. If it does not answer, it is asked
    again if `is_waiting` is true of `engine`; otherwise the error is raised.

    If the database's server crashed, it may have lost the transaction with its id. Then the result is False, unless a
    new transaction has got the same id: then it is whether that one was committed.
    """
    query = sa.text("SELECT pg_xact_status(CAST(:number AS text)::xid8)")
    while True:
        try:
            with engine.connect() as connection:
                status = connection.execute(query, {"number": str(number)}).scalar()
        except sa.exc.DataError:  # the id is in the future: a crash lost the transaction before it was on disk
            return False
        except sa.exc.DBAPIError as error:
            if not is_waiting(engine) or not is_away(error):
                raise
        else:
            if status != "in progress":  # the server has not noticed yet that the connection is gone
                return bool(status == "committed")
        time.sleep(FIRST_WAIT_S)


def clock(connection: sa.Connection) -> Any:
    """Present time in seconds since the epoch, by the clock of all stored times.

    The result is a number on SQLite, which only one machine uses. On PostgreSQL, which all machines share, it is an SQL
    expression for the time of the database's clock.
    """
    if connection.dialect.name == "sqlite":
        return time.time()
    return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # `_begin` opens transactions, not Python's sqlite3.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")  # first: a new file's switch to WAL takes a lock
    _to_wal(cursor)
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _to_wal(cursor: Any) -> None:
    """Switch an SQLite file to write-ahead logging; while the file is locked, try again for up to 60 s.

    If several connections switch a file at once, SQLite refuses all but one without waiting for its own timeout,
    because each would wait for the others to stop reading.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _begin(connection: sa.Connection) -> None:
    # A write transaction that begins by reading fails with "database is locked" at its first write, unless it takes
    # the write lock at once. Readers see one snapshot and never wait.
    reads = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
