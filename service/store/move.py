"""Copies all data of one database to another, for example from SQLite to PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa

from service.errors import Conflict
from service.store import schema
from service.store.connection import transaction
from service.store.sql import Store

__all__ = ["MovedTable", "check_empty", "copy_tables", "move"]

# Rows that are read, and written, at once.
BATCH = 1000

# Not copied: the first is made with the tables, like Alembic's own table; the second is about connections. Sessions and
# logins of browsers end, as a session that ended after a backup would be valid again.
NOT_COPIED = frozenset({"schema_version", "commit_tokens", "sessions", "logins"})


@dataclass(frozen=True)
class MovedTable:
    """A database table that was copied: its name, and its number of rows.

    `digest` is the sha256 of the rows in the order of their keys.
    """

    name: str
    rows: int
    digest: str


def move(source: Store, target: Store, *, note: Callable[[str], None] = lambda _: None) -> list[MovedTable]:
    """Copy all tables of `source` to the empty `target` in one transaction, and compare the copies with the originals.

    All tables of the source are read at one moment, and the source is not changed. Rows keep their ids, and ids of rows
    that were deleted in the source are not used again in the target. If this process ends early, the target is still
    empty. `note` is called with messages about the progress. Returns the copied tables.

    Raises:
        Conflict: The target has data, a driver (process) still works on a job of the source, or a copy differs.
    """
    with source.snapshot() as snapshot:
        _check_no_driver(snapshot)
        return copy_tables(snapshot, target, note=note)


def copy_tables(
    source: Store,
    target: Store,
    *,
    change: Callable[[sa.Connection], object] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> list[MovedTable]:
    """Copy all tables of `source` to the empty `target` in one transaction, and compare the copies with the originals.

    Unlike `move`, this function does not check whether processes still work on jobs of `source`. After the comparison,
    `change` is called in the same transaction with a connection to `target`, and may change the copies. `note` is
    called with messages about the progress. Returns the copied tables.

    Raises:
        Conflict: The target has data, or a copy differs.
    """
    with source.reading() as reads, transaction(target.engine) as writes:
        _check_empty(writes, target.place)
        copied = [_copy(reads, writes, table, note) for table in _tables()]
        for before in copied:
            note(f"{before.name}: comparing the copy")
            after = _described(writes, schema.metadata.tables[before.name])
            if after != before:
                raise Conflict(f"{target.place}: table {before.name}: the copy differs ({after}, not {before})")
        change(writes)
    return copied


def _check_no_driver(source: Store) -> None:
    now = source.now()
    for job in source.jobs():
        if job.heartbeat_at is not None and job.has_driver(now=now):
            raise Conflict(
                f"database {source.place}: job {job.id} ({job.name}) has a driver, whose later results the copy would "
                f"not have (its last heartbeat was {now - job.heartbeat_at:.0f} s ago); stop the server and its Ray"
            )


def check_empty(target: Store) -> None:
    """Check that no table of `target` has rows. Raises Conflict if a table has rows."""
    with target.reading() as connection:
        _check_empty(connection, target.place)


def _tables() -> list[sa.Table]:
    return [table for table in schema.metadata.sorted_tables if table.name not in NOT_COPIED]


def _check_empty(target: sa.Connection, place: str) -> None:
    for table in _tables():
        if target.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
            raise Conflict(f"database {place}: has data already (in its table {table.name}); give an empty database")


def _copy(source: sa.Connection, target: sa.Connection, table: sa.Table, note: Callable[[str], None]) -> MovedTable:
    number = source.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    digest, done = hashlib.sha256(), 0
    for rows in _batches(source, table):
        for row in rows:
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
        target.execute(sa.insert(table), [dict(row._mapping) for row in rows])
        done += len(rows)
        note(f"{table.name}: {done} of {number} rows")
    if _counts(table):
        _set_counter(target, table, _counter(source, table))
    return MovedTable(table.name, done, digest.hexdigest())


def _described(connection: sa.Connection, table: sa.Table) -> MovedTable:
    digest, done = hashlib.sha256(), 0
    for rows in _batches(connection, table):
        done += len(rows)
        for row in rows:
            digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return MovedTable(table.name, done, digest.hexdigest())


def _batches(connection: sa.Connection, table: sa.Table) -> Iterator[list[sa.Row[tuple[object, ...]]]]:
    query = sa.select(table).order_by(*table.primary_key).execution_options(yield_per=BATCH)
    for rows in connection.execute(query).partitions():
        yield list(rows)


# The last id that a table has given to a row.


def _counts(table: sa.Table) -> bool:
    return table.autoincrement_column is not None


def _counter(connection: sa.Connection, table: sa.Table) -> int:
    largest = connection.execute(sa.select(sa.func.coalesce(sa.func.max(table.c.id), 0))).scalar_one()
    if connection.dialect.name == "postgresql":
        sequence = f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {table.name}_id_seq"
        return max(int(largest), int(connection.execute(sa.text(sequence)).scalar_one()))
    if not table.dialect_options["sqlite"]["autoincrement"]:
        return int(largest)
    query = sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name")
    return max(int(largest), int(connection.execute(query, {"name": table.name}).scalar() or 0))


def _set_counter(connection: sa.Connection, table: sa.Table, number: int) -> None:
    if number == 0:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.setval(f"{table.name}_id_seq", number)))
    elif table.dialect_options["sqlite"]["autoincrement"]:
        row = {"name": table.name, "number": number}
        connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), row)
        connection.execute(sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :number)"), row)
