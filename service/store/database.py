"""Base class of `Store`: opens the database, SQLite or PostgreSQL, and gives snapshots and units of work.

It knows no table. The subclasses `JobStore`, `EventStore` and `ResultStore` read and write the tables of their subject.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Protocol, Self

import sqlalchemy as sa

from service.errors import Conflict, DatabaseUnavailable
from service.store.availability import availability_of, is_away, is_waiting, repeated, waiting
from service.store.connection import clock_time, connect, reading, unit_of_work
from service.store.database_url import parse_url, shown
from service.store.upgrade import upgrade

__all__ = ["Database"]

# Seconds until a store that waits tries again to open a database that does not answer.
RETRY_S = 1.0

# Texts in PostgreSQL's refusals of a connection, which have no error code.
REFUSALS = ("does not exist", "authentication failed", "no password supplied", "no pg_hba.conf entry")

# Any number, as long as every process uses the same (PostgreSQL).
ADMISSIONS_LOCK = 0x6D65726B


class _Connections(Protocol):
    """Interface that opens connections for reading the database.

    An SQLAlchemy engine opens a new connection at each call. A snapshot, which shows the database at one moment,
    returns the same connection at each call.
    """

    def connect(self) -> AbstractContextManager[sa.Connection]: ...


@dataclass(frozen=True)
class _OneConnection:
    """Gives all reads of a store the same connection, whose transaction stays open.

    All reads therefore see the same state of the database.
    """

    connection: sa.Connection

    def connect(self) -> AbstractContextManager[sa.Connection]:
        return nullcontext(self.connection)


@repeated
class Database:
    """Open database of one process, with its engine, snapshots and units of work. Thread-safe.

    The constructor creates or migrates the database at `url`, the URL of an SQLite file or of a PostgreSQL database.
    `waits` says what happens while the database does not answer: if it is True, calls wait and are then repeated;
    otherwise they raise the error. The database must be closed after use.

    A subclass has the methods of one subject. It reads through `self._reads.connect()`, so that a copy made by
    `snapshot` reads the snapshot, and writes in the context `transaction(self._engine)`. Each subclass with methods
    must be decorated with `repeated`, so that they wait too.

    Raises:
        Conflict: `url` names no database or a database of a newer version, or this user may not use the database.
        DatabaseUnavailable: The database does not answer, and `waits` is False.
    """

    def __init__(self, url: str | sa.URL, *, waits: bool = False) -> None:
        self._engine = waiting(connect(parse_url(url)), waits=waits)
        self._reads: _Connections = reading(self._engine)
        self._admissions = threading.RLock()
        while not self._is_open():
            time.sleep(RETRY_S)

    def _is_open(self) -> bool:
        """Try to open the database, and create or migrate its tables; return whether the database answered.

        If the database does not answer, the result is False in a store that waits for its database, and the caller
        tries again. Any other store raises DatabaseUnavailable. Raises Conflict if the database cannot be used.
        """
        try:
            upgrade(self._engine)
        except sa.exc.DatabaseError as error:
            reason = " ".join(str(error.orig).split())
            is_refusal = not is_away(error) or any(sign in reason for sign in REFUSALS)
            if is_waiting(self._engine) and not is_refusal:
                return False
            self._engine.dispose()
            if is_refusal:
                raise Conflict(f"database {self.place}: cannot be used: {reason}") from error
            raise DatabaseUnavailable(f"database {self.place}: does not answer: {reason}") from error
        return True

    def close(self) -> None:
        self._engine.dispose()

    @property
    def engine(self) -> sa.Engine:
        """SQLAlchemy engine of the database, for other stores in the same database, such as `ArtifactStore`."""
        return self._engine

    @property
    def is_on_one_machine(self) -> bool:
        """Whether only processes of this machine can open the database, because it is an SQLite file."""
        return self._engine.dialect.name == "sqlite"

    @property
    def url(self) -> str:
        """URL with which another process opens the database; it may hold a password."""
        return self._engine.url.render_as_string(hide_password=False)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Context with a connection for reading, for code outside this class that reads the same database.

        All queries in the context see the same state of the database. In a store that `snapshot` has made, this is the
        state at the beginning of the snapshot.
        """
        return self._reads.connect()

    def waiting(self) -> Self:
        """Copy of this store whose calls wait for an unavailable database instead of raising an error."""
        return self._with(waiting(self._engine))

    def _with(self, engine: sa.Engine) -> Self:
        other = copy(self)
        other._engine, other._reads = engine, reading(engine)
        return other

    def problem(self) -> str | None:
        """Message for users that says since when the database does not answer; None if it answered the last call."""
        return availability_of(self._engine).problem()

    def now(self) -> float:
        """Current time in seconds since the epoch, by the database's clock, which all stored times use."""
        with self._reads.connect() as connection:
            return clock_time(connection)

    @property
    def place(self) -> str:
        """URL, without a password, that names the database in messages."""
        return shown(self._engine.url)

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """Context with a copy of this store that reads the database in its current state, without later changes.

        The copy must not be used to write.
        """
        with self._reads.connect() as connection:
            frozen = self._with(waiting(self._engine, waits=False))
            frozen._reads = _OneConnection(connection)
            yield frozen

    def unit_of_work(self) -> AbstractContextManager[sa.Connection]:
        """Context in which all calls of stores of this database, made by this thread, are one transaction.

        The transaction is committed when the context ends without an error; otherwise nothing is stored. It serves to
        store a change together with its entry in the audit log.
        """
        return unit_of_work(self._engine)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Context in which the caller checks quotas and then stores the jobs or files that fit, in one transaction.

        Only one such context is open at a time, among all servers with this database. Otherwise two callers together
        could exceed a quota.
        """
        with self._admissions, unit_of_work(self._engine) as connection:  # who waits for the lock has no connection
            if connection.dialect.name == "postgresql":  # on SQLite, the transaction has the only write lock
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADMISSIONS_LOCK})
            yield
