"""Migration of a database to this program's schema, by the Alembic files in `migrations/versions`.

A database that is up to date is only read, and Alembic is not imported. Any other database is migrated in one
transaction that holds the database's write lock. Processes that open a database at the same time therefore migrate it
only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from service.errors import Conflict
from service.store import schema
from service.store.connection import reading
from service.store.database_url import shown

__all__ = ["MIGRATIONS", "migrate", "upgrade"]

MIGRATIONS = Path(__file__).parent / "migrations"

# Any number, as long as every process uses the same (PostgreSQL).
ADVISORY_LOCK = 0x6D657267


@dataclass(frozen=True)
class _Marks:
    """Two numbers that may state the version of a database's schema; a number that is not stored is None.

    `revision` is Alembic's revision. `version` is a number in the table `schema_version`, which earlier versions of the
    program wrote before they used Alembic.
    """

    revision: str | None
    version: int | None


def upgrade(engine: sa.Engine) -> None:
    """Create the database's tables, or migrate them to the schema of this version of the program.

    On SQLite, transactions of `engine` must take the write lock when they begin.

    Raises:
        Conflict: This program cannot migrate the database's schema, because the schema is newer than the program,
            unknown, or too old.
        DatabaseError: The file is not a database (SQLAlchemy's error).
    """
    with reading(engine).connect() as connection:
        marks = _marks(connection)
    if marks.revision == schema.REVISION and marks.version == schema.SCHEMA_VERSION:
        return
    with engine.begin() as connection:  # not `transaction`, which needs the tables
        _lock(connection)
        marks = _marks(connection)
        _check(connection, marks)
        if marks.revision != schema.REVISION:
            migrate(connection)


def migrate(connection: sa.Connection, *, revision: str = schema.REVISION) -> None:
    """Run the missing Alembic migrations up to the schema's `revision`, in the connection's transaction.

    By default, `revision` is the newest revision that this program knows.

    Raises:
        Conflict: The database is at an unknown revision.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    marks = _marks(connection)
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if marks.revision is not None and marks.revision not in known:
        raise _other_version(connection, f"revision {marks.revision}", schema.REVISION)
    if marks.revision is None and marks.version is not None:
        command.stamp(config, schema.BASELINE)
    command.upgrade(config, revision)


def _marks(connection: sa.Connection) -> _Marks:
    tables = set(sa.inspect(connection).get_table_names())

    def value(table: str, column: str) -> object:
        if table not in tables:
            return None
        return connection.execute(sa.text(f"SELECT {column} FROM {table}")).scalar()

    revision, version = value("alembic_version", "version_num"), value("schema_version", "version")
    return _Marks(revision if revision is None else str(revision), version if isinstance(version, int) else None)


def _lock(connection: sa.Connection) -> None:
    """Wait until no other process migrates the database, and make others wait until this transaction ends.

    On SQLite nothing needs to be done, because the transaction has held the write lock since its beginning.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})


def _check(connection: sa.Connection, marks: _Marks) -> None:
    if marks.version is None:
        return
    is_old = marks.revision is None and marks.version != schema.BASELINE_VERSION
    if is_old or marks.version > schema.SCHEMA_VERSION:
        raise _other_version(connection, f"version {marks.version}", schema.SCHEMA_VERSION)


def _other_version(connection: sa.Connection, found: str, read: object) -> Conflict:
    return Conflict(
        f"database {shown(connection.engine.url)}: schema {found}, this program reads {read}; "
        "use the program that wrote it, or another database"
    )
