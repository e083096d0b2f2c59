"""Database connections: settings, the begin and end of transactions, and the clock of stored times."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from service.errors import Conflict
from service.store.availability import FIRST_WAIT_S, Availability, is_away, is_waiting
from service.store.database_url import shown

__all__ = [
    "MAX_NAMED",
    "Reads",
    "clock",
    "clock_time",
    "connect",
    "insert",
    "one_of",
    "reading",
    "transaction",
    "unit_of_work",
]

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
    "client_encoding": "utf8",
}

# Seconds after which a connection of the pool is replaced.
RECYCLE_S = 1800

# The largest number of integers that a query names one by one. A query for more integers reads the whole range.
MAX_NAMED = 1001


def connect(url: sa.URL) -> sa.Engine:
    """Create the SQLAlchemy engine for the database at `url`; a connection is opened only when it is needed.

    Write transactions on SQLite take the write lock when they begin. NaN and infinite numbers in values of JSON columns
    are refused (ValueError). If a PostgreSQL database has another encoding than UTF8, its first connection raises
    Conflict.

    Raises:
        Conflict: The Python package for this kind of database is not installed.
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
    if is_postgresql:
        event.listen(engine, "connect", partial(_check_encoding, shown(url)))
    else:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin)
    return Availability(shown(url)).watch(engine)


def _check_encoding(place: str, connection: Any, _: Any) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise Conflict(
            f"database {place}: its encoding is {encoding}; texts need UTF8: create the database with "
            "createdb --encoding=UTF8 --template=template0"
        )


@dataclass(frozen=True)
class Reads:
    """Opener of a store's connections for reading; inside `unit_of_work`, it gives that context's connection."""

    engine: sa.Engine

    def connect(self) -> AbstractContextManager[sa.Connection]:
        outer = _unit_of(self.engine)
        return self.engine.connect() if outer is None else nullcontext(outer)


def reading(engine: sa.Engine) -> Reads:
    """Make an opener of read-only connections to the database of `engine`.

    Each connection has one transaction: all its queries see the same state of the database, and never wait for a
    transaction that writes.
    """
    if engine.dialect.name == "sqlite":
        return Reads(engine.execution_options(read_only=True))
    return Reads(engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True))


class _Units(threading.local):
    """Open transactions (`unit_of_work`) of one thread: the connection of each, keyed by its connection pool."""

    def __init__(self) -> None:
        self.connections: dict[sa.Pool, sa.Connection] = {}


_UNITS = _Units()


def _unit_of(engine: sa.Engine) -> sa.Connection | None:
    return _UNITS.connections.get(engine.pool)


@contextmanager
def unit_of_work(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Context in which all store calls of this thread are one transaction, which is committed at the end.

    If the context raises an error, nothing is stored. If one call raises an error that the code in the context catches,
    only this call stores nothing. Reads see what was written before in the context. A context inside another one
    belongs to the outer transaction. `engine` must not be a result of the function `waiting`, because a call cannot be
    repeated without the calls before it.
    """
    assert not is_waiting(engine), "a call of a unit of work cannot be repeated alone"
    if (outer := _unit_of(engine)) is not None:
        with outer.begin_nested():
            yield outer
        return
    pool = engine.pool
    with transaction(engine) as connection:
        _UNITS.connections[pool] = connection
        try:
            yield connection
        finally:
            del _UNITS.connections[pool]


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Context with a write transaction, which is committed when the context ends without an error.

    If the context raises an error, nothing was stored, even if the connection was lost during the commit. Inside the
    context `unit_of_work`, the transaction is a part of the transaction of that context.
    """
    if (outer := _unit_of(engine)) is not None:
        with outer.begin_nested():
            yield outer
        return
    with engine.connect() as connection, connection.begin() as begun:
        yield connection
        token = _store_token(connection)
        try:
            begun.commit()
        except sa.exc.DBAPIError as error:
            if token is None or not is_away(error) or not _is_committed(engine, token):
                raise
        else:
            connection.info[TOKEN] = token or connection.info.get(TOKEN)


# Name of a connection's newest committed token in SQLAlchemy's `Connection.info`.
TOKEN = "commit_token"

# Seconds after which tokens are deleted whose connection no longer exists.
TOKEN_LIFE_S = 24 * 3600

# Both parts see the transaction before this statement: nothing is stored if the transaction has written nothing.
_STORE_TOKEN = """
    WITH outdated AS (
        SELECT token FROM commit_tokens WHERE {is_outdated} AND pg_current_xact_id_if_assigned() IS NOT NULL
        FOR UPDATE SKIP LOCKED
    ), deleted AS (DELETE FROM commit_tokens WHERE token IN (SELECT token FROM outdated))
    INSERT INTO commit_tokens (token, time)
    SELECT :token, :now WHERE pg_current_xact_id_if_assigned() IS NOT NULL
    """

# The first is for the first transaction of a connection: it reads all tokens, which no index has by time. Connections
# are replaced every RECYCLE_S. The other finds the connection's previous token by its key.
FIRST_TOKEN = sa.text(_STORE_TOKEN.format(is_outdated="time < :now - :life"))
NEXT_TOKEN = sa.text(_STORE_TOKEN.format(is_outdated="token = :before"))


def _store_token(connection: sa.Connection) -> str | None:
    """Store a unique text, a token, in the open transaction, and return it.

    If the connection is lost during the commit, another connection can look the token up: it is stored only if the
    transaction was committed. Tokens that are no longer needed are deleted. On SQLite, and if the transaction has
    written nothing, no token is stored and the result is None.
    """
    if connection.dialect.name == "sqlite":
        return None
    token, before, now = uuid.uuid4().hex, connection.info.get(TOKEN), time.time()
    if before is None:
        stored = connection.execute(FIRST_TOKEN, {"token": token, "now": now, "life": TOKEN_LIFE_S})
    else:
        stored = connection.execute(NEXT_TOKEN, {"token": token, "now": now, "before": before})
    return token if stored.rowcount else None


def _is_committed(engine: sa.Engine, token: str) -> bool:
    """Whether PostgreSQL committed the transaction that stored `token`, a unique text.

    The function tries to insert the token again. PostgreSQL first waits for the end of that transaction, and then
    inserts nothing if the token is stored. If the database does not answer meanwhile, an `engine` that waits for its
    database repeats the query. For any other engine, the error is raised.
    """
    query = sa.text("INSERT INTO commit_tokens (token, time) VALUES (:token, :now) ON CONFLICT DO NOTHING")
    while True:
        try:
            with engine.connect() as connection:  # rolled back at its end
                return connection.execute(query, {"token": token, "now": time.time()}).rowcount == 0
        except sa.exc.DBAPIError as error:
            if not is_waiting(engine) or not is_away(error):
                raise
        time.sleep(FIRST_WAIT_S)


def clock(connection: sa.Connection) -> Any:
    """Current time by the database's clock, in seconds since the epoch, as a value for an SQL statement.

    On SQLite, the result is a number, because only one machine uses the database. On PostgreSQL, the result is an SQL
    expression, because all machines share the database's clock.
    """
    if connection.dialect.name == "sqlite":
        return time.time()
    return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float)


def clock_time(connection: sa.Connection) -> float:
    """Read the current time from the database's clock, in seconds since the epoch."""
    time_s = clock(connection)
    return time_s if isinstance(time_s, float) else float(connection.execute(sa.select(time_s)).scalar_one())


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Start an INSERT statement for `table` that supports ON CONFLICT, in the dialect of the connection's database."""
    from sqlalchemy.dialects import postgresql, sqlite

    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def one_of(column: sa.ColumnElement[int], numbers: Collection[int]) -> sa.ColumnElement[bool]:
    """SQL condition that selects at least the rows whose integer `column` is one of `numbers`.

    Databases limit the number of parameters of a statement. If there are more than MAX_NAMED numbers, the condition
    therefore selects all rows from the smallest to the largest number, and the caller must leave out the others.
    """
    if not numbers:
        return sa.false()
    first, last = min(numbers), max(numbers)
    if len(numbers) > MAX_NAMED or last - first == len(numbers) - 1:
        return column.between(first, last)
    return column.in_(list(numbers))


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
    """Switch an SQLite file to write-ahead logging; if the file is locked, try again for up to 60 s.

    If several connections switch a file at once, SQLite refuses all but one at once instead of waiting for its own
    timeout.
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
