"""`mergesearch database migrate`, which migrates an installation's database before its servers are replaced."""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.store import Store
from service.store.schema import REVISION
from tests.mid_rung import write_database
from tests.postgresql import PASSWORD, PostgreSQL
from tests.service.cli.terminals import Terminal

VARIABLE = "MERGESEARCH_DATABASE"


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


def test_an_old_database_is_migrated(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is named by its URL, its server's directory, or the variable; a second time does nothing."""
    file = tmp_path / "mergesearch.db"
    write_database(file, data_dir=tmp_path)
    monkeypatch.setenv(VARIABLE, f"sqlite:///{file}")
    for arguments in ([], [f"sqlite:///{file}"], [tmp_path]):
        code, out, err = terminal.run("database", "migrate", *arguments)
        assert (code, out) == (0, f"database sqlite:///{file}: is at revision {REVISION}, that of this version\n"), err
    engine = sa.create_engine(f"sqlite:///{file}")
    with closing(engine.raw_connection()) as connection:
        assert connection.cursor().execute("SELECT version_num FROM alembic_version").fetchall() == [(REVISION,)]
    code, out, _ = terminal.run("database", "migrate", tmp_path, "--json")
    assert json.loads(out) == {"database": f"sqlite:///{file}", "revision": REVISION}


def test_a_newer_database_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    Store(f"sqlite:///{file}").close()
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    code, out, err = terminal.run("database", "migrate", f"sqlite:///{file}")
    assert (code, out) == (2, "")
    assert "schema revision 9999, this program reads" in err


def test_a_database_that_is_not_named_is_asked_for(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    code, _, err = terminal.run("database", "migrate")
    assert code == 2
    assert err == (
        "mergesearch: database: none is named; give its URL or its server's data directory, "
        "or set MERGESEARCH_DATABASE\n"
    )


def test_a_database_that_is_away_ends_the_command(terminal: Terminal) -> None:
    """Without --wait the command ends at once, with the place and no password."""
    code, out, err = terminal.run("database", "migrate", "postgresql://u:s3cr3t@127.0.0.1:1/db")
    assert (code, out) == (1, "")
    assert err.startswith("mergesearch: database postgresql://u:***@127.0.0.1:1/db: does not answer: ")
    assert "s3cr3t" not in err


def test_a_database_that_starts_later_is_waited_for(terminal: Terminal, postgresql: PostgreSQL) -> None:
    url = postgresql.migrated()
    postgresql.kill()

    def start() -> None:
        time.sleep(1.5)
        postgresql.start()

    starting = threading.Thread(target=start)
    starting.start()
    code, out, err = terminal.run("database", "migrate", url, "--wait", 60)
    starting.join()
    assert code == 0, err
    assert f"is at revision {REVISION}" in out
    assert "waiting: database postgresql://" in err
    assert PASSWORD not in out + err
    postgresql.drop(url)


@pytest.mark.parametrize("text", ["-1", "soon", "inf", "nan"])
def test_other_times_to_wait_are_refused(terminal: Terminal, text: str) -> None:
    code, _, err = terminal.run("database", "migrate", f"--wait={text}")
    assert code == 2
    assert f"{text!r} is not a number of seconds; give 0 or more, such as 60" in err
