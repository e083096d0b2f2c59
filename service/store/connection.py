"""Connections to the database, with SQLite's settings and transactions."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

__all__ = ["connect"]

# Seconds that a writer waits for another transaction on SQLite before it fails.
BUSY_TIMEOUT_S = 60


def connect(url: str) -> sa.Engine:
    """Open the database at `url`.

    Write transactions on SQLite take the write lock when they begin.
    """
    engine = sa.create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin)
    return engine


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
    """Switch a file to write-ahead logging.

    Where several connections switch a file at once, SQLite refuses all but one, whatever its timeout is: each would
    wait for the others to stop reading.
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
