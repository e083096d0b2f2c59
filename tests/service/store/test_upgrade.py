"""Migrations: a database's content after its opening, also by several processes at once."""

from __future__ import annotations

import importlib
import multiprocessing
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from service.errors import Conflict
from service.store import Store, schema, upgrade
from service.store import connection as connections
from tests.mid_rung import write_database
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.resolved import resolved_study
from tests.service.stored_values import stored_values
from workers.types import Evidence, ScoreResult, Split

NUM_PROCESSES = 6


def new_database(file: Path) -> None:
    """Do nothing: the store creates the database when it opens it."""


def old_database(file: Path) -> None:
    """Write a database as the last version without migrations did."""
    write_database(file, data_dir=file.parent)


def rows(file: Path, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(file)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def tables(file: Path) -> list[tuple[Any, ...]]:
    return rows(file, "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE '%alembic%' ORDER BY name")


def opened(file: Path) -> Store:
    return Store(f"sqlite:///{file}")


@pytest.fixture(params=[new_database, old_database])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "study.db")
    return tmp_path / "study.db"


def test_databases_reach_newest_migration(file: Path) -> None:
    """Every database ends at the newest migration with the tables of the code."""
    opened(file).close()
    assert rows(file, "SELECT version_num FROM alembic_version") == [(schema.REVISION,)]
    assert rows(file, "SELECT version FROM schema_version") == [(schema.SCHEMA_VERSION,)]
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_the_revision_in_the_code_is_the_only_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(upgrade.MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [schema.REVISION]
    assert scripts.get_base() == schema.BASELINE


def test_first_migration_makes_older_tables(tmp_path: Path) -> None:
    """The first migration makes the tables of the version before."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    old_database(old)
    engine = sa.create_engine(f"sqlite:///{new}")
    with engine.begin() as connection:
        upgrade.migrate(connection, revision=schema.BASELINE)
    engine.dispose()

    def words(file: Path) -> list[tuple[str, list[str]]]:
        return [(name, (text or "").split()) for name, text in tables(file)]

    assert words(new) == words(old)


def test_an_old_database_keeps_every_row(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    old_database(file)
    selects = {}
    for name in {name for name, _ in tables(file)} & set(schema.metadata.tables) - {"schema_version"}:
        columns = [str(column) for _, column, *_ in rows(file, f'PRAGMA table_info("{name}")')]
        selects[name] = 'SELECT "{}" FROM "{}"'.format('", "'.join(columns), name)
    before = {name: rows(file, select) for name, select in selects.items()}
    opened(file).close()
    assert {name: rows(file, select) for name, select in selects.items()} == before
    assert before["trials"]


def test_old_samples_are_read_and_moved(tmp_path: Path) -> None:
    """Samples of an old database are the same before, while and after they are moved, recipe by recipe."""
    old_database(tmp_path / "study.db")
    store = opened(tmp_path / "study.db")
    (study,) = store.jobs()
    digests = sorted({trial.recipe.digest for trial in store.trials(study.id)})

    def found() -> list[Any]:
        whole = [store.samples(study.id, digest, split) for digest in digests for split in Split]
        values = [stored_values(store, study.id, split) for split in Split]
        replicas = {row.replica for row in store.evidence(study.id)}
        return [whole, values, store.num_unchecked(study.id, dict.fromkeys(replicas, 99)), store.void_samples(study.id)]

    before, numbers = found(), [1]
    assert len(before[0][0]) > 10
    while numbers[-1]:
        numbers.append(store.move_old_samples())
        assert found() == before
    store.close()
    assert rows(tmp_path / "study.db", "SELECT count(*) FROM samples") == [(0,)]
    assert sum(numbers[1:]) == sum(map(len, before[0]))
    assert len(numbers) > 3


def test_a_write_moves_the_old_samples_of_its_recipe(tmp_path: Path) -> None:
    """A chunk that is scored again adds nothing to the old samples of its recipe, which are moved."""
    old_database(tmp_path / "study.db")
    store = opened(tmp_path / "study.db")
    (study,) = store.jobs()
    digest = store.trials(study.id)[0].recipe.digest
    before = store.samples(study.id, digest, Split.SEARCH)
    again = tuple(replace(sample, value=0.5) for sample in before[:3])
    more = replace(before[0], position=before[-1].position + 100)
    evidence = Evidence(digest, "bank", {"search math[0:3]": "0"}, "sum", "replica", 0, "fake")
    store.open_attempt(study.id).record_chunk(0, Split.SEARCH, ScoreResult((*again, more), evidence, {}))
    assert sorted(store.samples(study.id, digest, Split.SEARCH), key=str) == sorted((*before, more), key=str)
    store.close()
    query = f"SELECT count(*) FROM samples WHERE recipe_digest = '{digest}'"
    assert rows(tmp_path / "study.db", query) == [(0,)]


def test_samples_of_an_old_database_have_no_tokens(tmp_path: Path) -> None:
    old_database(tmp_path / "study.db")
    store = opened(tmp_path / "study.db")
    (study,) = store.jobs()
    samples = store.samples(study.id, store.trials(study.id)[0].recipe.digest, Split.SEARCH)
    assert {sample.tokens for sample in samples} == {None}
    store.close()


def test_tables_of_a_creation_that_was_interrupted_are_completed(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    old_database(file)
    connection = sqlite3.connect(file)
    connection.execute("DELETE FROM schema_version")
    connection.execute("DROP TABLE documents")
    connection.commit()
    connection.close()
    store = opened(file)
    assert len(store.jobs()) == 1
    assert store.document(store.jobs()[0].id, "verification") is None
    store.close()
    assert rows(file, "SELECT version FROM schema_version") == [(schema.SCHEMA_VERSION,)]


@pytest.mark.parametrize("damage", ["alembic_version SET version_num = '9999'", "schema_version SET version = 99"])
def test_a_newer_database_is_refused_and_left_as_it_is(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    opened(file).close()
    connection = sqlite3.connect(file)
    connection.execute(f"UPDATE {damage}")
    connection.commit()
    before = list(connection.iterdump())
    reads = (
        f"(revision 9999, this program reads {schema.REVISION}|version 99, this program reads {schema.SCHEMA_VERSION})"
    )
    what = rf"{reads}; use the program that wrote it"
    with pytest.raises(Conflict, match=rf"database sqlite:///.*study\.db: schema {what}, or another database"):
        opened(file)
    assert list(connection.iterdump()) == before
    connection.close()


def test_an_old_database_of_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    old_database(file)
    connection = sqlite3.connect(file)
    connection.execute("UPDATE schema_version SET version = 1")
    connection.commit()
    connection.close()
    with pytest.raises(
        Conflict, match=f"schema version 1, this program reads {schema.SCHEMA_VERSION}; use the program that wrote it"
    ):
        opened(file)
    assert rows(file, "SELECT name FROM sqlite_master WHERE name LIKE '%alembic%'") == []


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "study.db"

    def fail(connection: sa.Connection, **_: Any) -> None:
        migrate(connection)
        raise sa.exc.OperationalError("", {}, Exception("disk I/O error"))

    migrate = upgrade.migrate
    monkeypatch.setattr(upgrade, "migrate", fail)
    with pytest.raises(Conflict, match="cannot be used: disk I/O error"):
        opened(file)
    assert tables(file) == []


def test_current_database_opens_at_once(tmp_path: Path) -> None:
    """A current database is opened without Alembic and beside a writer."""
    file = tmp_path / "study.db"
    store = opened(file)
    program = (
        "import sys, time; from service.store import Store; began = time.monotonic();"
        f"Store({store.url!r}).close(); print('alembic' in sys.modules, time.monotonic() - began < 5)"
    )
    with store._engine.begin():  # holds the write lock
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    store.close()
    assert done.stdout.split() == ["False", "True"]


def open_together(url: str, module: Any, name: str, replacement: Any, barrier: Any, errors: Any) -> None:
    """Open the database together with other processes: all begin before the first one has migrated it."""
    changes = pytest.MonkeyPatch()  # never undone: the process ends
    changes.setattr(importlib.import_module(module), name, replacement)
    migrate = upgrade.migrate

    def slowly(connection: sa.Connection, **options: Any) -> None:
        time.sleep(0.3)
        migrate(connection, **options)

    changes.setattr(upgrade, "migrate", slowly)
    barrier.wait()
    try:
        store = Store(url)
        store.create_job(kind="search", name="test", document={}, accepted=resolved_study().to_json())
        store.close()
        errors.put(None)
    except Exception as error:
        errors.put(f"{type(error).__name__}: {error}")


def begin_without_lock(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def lock_nothing(_: sa.Connection) -> None:
    """Do nothing, in place of the lock for migrations."""


def errors_of_processes(url: str, replaced: Callable[..., None], replacement: Any = None) -> list[str | None]:
    """Errors of processes in which `replacement` replaces the function `replaced`; None for each without an error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports once for all of them
    barrier, errors = context.Barrier(NUM_PROCESSES), context.Queue()
    arguments = (url, replaced.__module__, replaced.__name__, replacement or replaced, barrier, errors)
    processes = [context.Process(target=open_together, args=arguments) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    found = [errors.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return found


@pytest.mark.slow
def test_first_opening_by_many_processes(file: Path) -> None:
    """Processes that open a new database together all succeed."""
    studies = len(rows(file, "SELECT id FROM studies")) if file.exists() else 0
    assert errors_of_processes(f"sqlite:///{file}", connections._begin) == [None] * NUM_PROCESSES
    assert rows(file, "SELECT version_num FROM alembic_version") == [(schema.REVISION,)]
    assert rows(file, "SELECT version FROM schema_version") == [(schema.SCHEMA_VERSION,)]
    assert len(rows(file, "SELECT id FROM studies")) == studies + NUM_PROCESSES


def refused_switches(directory: Path, switch: Callable[[sqlite3.Cursor], object]) -> int:
    """Number of failed switches to WAL over 40 databases, each switched by 6 connections at once."""
    refused = 0
    for number in range(40):
        file = directory / f"{number}.db"
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("CREATE TABLE some (x)")
        barrier = threading.Barrier(6)

        def at_once(file: Path = file, barrier: threading.Barrier = barrier) -> bool:
            with closing(sqlite3.connect(file, isolation_level=None, timeout=60)) as connection:
                barrier.wait()
                try:
                    switch(connection.cursor())
                except sqlite3.OperationalError:
                    return True
            return False

        with ThreadPoolExecutor(6) as pool:
            refused += sum(future.result() for future in [pool.submit(at_once) for _ in range(6)])
    return refused


def test_switch_to_wal_by_many_connections(tmp_path: Path) -> None:
    """Connections that switch a database to WAL together all succeed."""
    assert refused_switches(tmp_path, connections._to_wal) == 0


def test_sqlite_alone_refuses_some(tmp_path: Path) -> None:
    """SQLite alone refuses some of these connections; how many depends on the machine and on what else it does."""
    directories = [tmp_path / str(number) for number in range(25)]
    for directory in directories:
        directory.mkdir()
    assert any(refused_switches(own, lambda cursor: cursor.execute("PRAGMA journal_mode=WAL")) for own in directories)


@pytest.mark.slow
def test_without_the_write_lock_they_do_not(file: Path) -> None:
    found = errors_of_processes(f"sqlite:///{file}", connections._begin, begin_without_lock)
    assert any(error is not None and "locked" in error for error in found), found


@pytest.fixture
def empty(postgresql: PostgreSQL) -> Iterator[str]:
    """URL of an empty database of PostgreSQL."""
    url = postgresql.create()
    yield url
    postgresql.drop(url)


@pytest.mark.slow
def test_first_opening_by_many_on_postgresql(empty: str) -> None:
    """Processes that open a new database of PostgreSQL together all succeed, and it is migrated once."""
    assert errors_of_processes(empty, upgrade._lock) == [None] * NUM_PROCESSES
    store = Store(empty)
    assert len(store.jobs()) == NUM_PROCESSES
    with store.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all() == [
            schema.REVISION
        ]
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    store.close()


@pytest.mark.slow
def test_without_the_advisory_lock_they_do_not(postgresql: PostgreSQL) -> None:
    """Without the lock, processes that create the tables at the same time disturb each other, often enough."""
    for _ in range(5):
        url = postgresql.create()
        found = errors_of_processes(url, upgrade._lock, lock_nothing)
        postgresql.drop(url)
        if any(error is not None for error in found):
            return
    raise AssertionError("no process was disturbed")


@pytest.mark.parametrize("damage", ["alembic_version SET version_num = '9999'", "schema_version SET version = 99"])
def test_a_newer_postgresql_database_is_refused(damage: str, postgresql: PostgreSQL) -> None:
    """A database of PostgreSQL that a newer program wrote is refused, by a message without the password."""
    url = postgresql.migrated()
    store = Store(url)
    with store.engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {damage}"))
    store.close()
    with pytest.raises(Conflict, match=r"postgresql.*tests:\*\*\*@/.*: schema (revision 9999|version 99)") as refused:
        Store(url)
    assert PASSWORD not in str(refused.value)
    postgresql.drop(url)
