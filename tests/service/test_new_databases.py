"""Databases that are copied for tests are equal to those that the migrations make."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from service.store import Store
from tests.service.new_databases import copying


def content(file: Path) -> list[str]:
    """All statements that would create the database again, and its journal mode."""
    with closing(sqlite3.connect(file)) as database:
        return [*database.iterdump(), *map(str, database.execute("PRAGMA journal_mode").fetchone())]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.store.database.upgrade", copying(tmp_path / "template.db"))
        for name in ("first", "second"):
            Store(f"sqlite:///{tmp_path / name}").close()
    return tmp_path / "second"


def test_a_copy_is_the_migrated_database(copied: Path, tmp_path: Path) -> None:
    """A copy has the tables, rows, mode and rights of a database that was migrated; nothing else is left beside it."""
    Store(f"sqlite:///{tmp_path / 'migrated'}").close()
    assert len(content(copied)) > 30
    assert content(copied) == content(tmp_path / "first") == content(tmp_path / "migrated")
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (copied, tmp_path / "migrated")}
    assert len(modes) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"template.db", "first", "second", "migrated"}


def test_an_existing_database_is_not_replaced(copied: Path, tmp_path: Path) -> None:
    """What a database has stays when it is opened again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.store.database.upgrade", copying(tmp_path / "template.db"))
        for expected in (0, 1):
            store = Store(f"sqlite:///{copied}")
            assert len(store.unfinished_jobs()) == expected
            store.create_job(kind="search", name="a", document={}, accepted={})
            store.close()
