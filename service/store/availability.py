"""Availability of the database: a monitor of its connections, and calls that wait until it answers.

While the database does not answer, a server answers requests with an error, and a driver waits. Waiting is an execution
option of SQLAlchemy's engine, which the function `waiting` sets. Therefore all objects that share the engine of a
waiting store wait, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from inspect import isfunction
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from service.errors import DatabaseUnavailable

__all__ = ["Availability", "Outage", "availability_of", "is_away", "is_waiting", "may_repeat", "repeated", "waiting"]

logger = logging.getLogger(__name__)

# Seconds before a transaction is repeated: at first, and at most.
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0

# Classes of PostgreSQL's error codes: of lost connections, too few resources, and ends by an operator or a crash; of
# transactions that it rolled back because of others.
AWAY_CODES = ("08", "53", "57P")
ROLLED_BACK_CODES = ("40",)

AVAILABILITY, WAITING = "availability", "waits"

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Outage:
    """A period, from `since` until `until`, in which the database did not answer.

    Both times are in seconds since the epoch, by this machine's clock.
    """

    since: float
    until: float


class Availability:
    """Monitor that records whether a database answered when it was last used.

    The monitor logs a message when the database stops answering and when it answers again. `place` is the text that
    names the database in messages. Thread-safe.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._since: float | None = None
        self._reason = ""
        self._ended: Outage | None = None

    def watch(self, engine: sa.Engine) -> sa.Engine:
        """Monitor every connection of `engine`; return a copy of the engine that knows this monitor.

        The function `availability_of` finds the monitor in the copy's execution options. Connections to SQLite are not
        monitored, because a file always answers.
        """
        if engine.dialect.name == "postgresql":
            event.listen(engine, "handle_error", self._on_error)
            event.listen(engine, "checkout", self._on_answer)
        return engine.execution_options(**{AVAILABILITY: self})

    def problem(self) -> str | None:
        """Message that says since when and why the database does not answer; None if it answered the last call."""
        with self._lock:
            if self._since is None:
                return None
            since = datetime.fromtimestamp(self._since, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            return f"database: {self._place} does not answer since {since}: {self._reason}"

    def take_ended(self) -> Outage | None:
        """Return the last outage that has ended since the previous call of this method; None if none has ended."""
        with self._lock:
            ended, self._ended = self._ended, None
            return ended

    def put_back(self, outage: Outage) -> None:
        """Let the next call of `take_ended` return `outage` again, because the outage could not be stored.

        If a newer outage has ended in the meantime, that call returns the newer outage instead.
        """
        with self._lock:
            self._ended = self._ended or outage

    def _on_error(self, context: Any) -> None:
        # A connection that has ended since it was last used is replaced; if that fails, this is called again.
        is_usable = context.statement is not None and not context.is_disconnect
        if context.is_pre_ping or not _is_away(context.original_exception, is_usable=is_usable):
            return
        with self._lock:
            if self._since is not None:
                return
            self._since = time.time()
            self._reason = " ".join(str(context.original_exception).split())
        logger.error("%s", self.problem())

    def _on_answer(self, *_: Any) -> None:
        with self._lock:
            if self._since is None:
                return
            self._ended = Outage(self._since, time.time())
            self._since = None
            away_s = self._ended.until - self._ended.since
        logger.warning("database: %s answers again after %.1f s", self._place, away_s)


def availability_of(engine: sa.Engine) -> Availability:
    """The monitor that records whether the database of the SQLAlchemy engine `engine` answers."""
    found: Availability = engine.get_execution_options()[AVAILABILITY]
    return found


def waiting(engine: sa.Engine, *, waits: bool = True) -> sa.Engine:
    """Return a copy of an SQLAlchemy engine whose store calls wait while the database does not answer.

    A call that uses the copy is repeated until the database answers. If `waits` is False, calls that use the copy raise
    the error instead.
    """
    return engine.execution_options(**{WAITING: waits})


def is_waiting(engine: sa.Engine) -> bool:
    """Whether `engine` is set to repeat store calls until the database answers, instead of raising the error."""
    return bool(engine.get_execution_options().get(WAITING, False))


def is_away(error: BaseException) -> bool:
    """Whether a store call raised `error` because the database did not answer."""
    if not isinstance(error, sa.exc.DBAPIError):
        return isinstance(error, DatabaseUnavailable)
    return _is_away(error.orig, is_usable=error.statement is not None and not error.connection_invalidated)


def may_repeat(error: BaseException) -> bool:
    """Whether a transaction that failed with `error` may succeed if it is repeated.

    The result is True if the database did not answer, or if it rolled the transaction back because of another
    transaction, as in a deadlock.
    """
    return is_away(error) or (isinstance(error, sa.exc.DBAPIError) and _code(error.orig).startswith(ROLLED_BACK_CODES))


def _is_away(error: BaseException | None, *, is_usable: bool) -> bool:
    """Whether PostgreSQL's driver raised `error` because the database did not answer.

    `is_usable` says whether a statement raised the error on a connection that can still be used. Such an error without
    a code comes from the driver itself, for example because a statement has too many parameters.
    """
    if not type(error).__module__.startswith("psycopg"):
        return False
    from psycopg import OperationalError

    is_lost = isinstance(error, OperationalError) and not _code(error) and not is_usable
    return is_lost or _code(error).startswith(AWAY_CODES)


def _code(error: BaseException | None) -> str:
    """SQLSTATE code that PostgreSQL gave `error`; "" if there is no code, for example after a lost connection."""
    return getattr(error, "sqlstate", None) or ""


def repeated(cls: Class) -> Class:
    """Decorate a store class so that its public methods wait and are repeated while the database does not answer.

    Methods wait only if the object's SQLAlchemy engine is a result of the function `waiting`. With any other engine,
    the methods raise the error instead. A method is also repeated if the database rolled its transaction back because
    of another transaction, as in a deadlock. Because a failed method is repeated as a whole, each public method must be
    one transaction. If a public method calls other public methods, each called method is repeated separately.
    """
    for name, method in list(vars(cls).items()):
        if isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _repeated(method))
    return cls


def _repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return method(self, *arguments, **options)
            except sa.exc.DBAPIError as error:
                if not is_waiting(self._engine) or not may_repeat(error):
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    return call
